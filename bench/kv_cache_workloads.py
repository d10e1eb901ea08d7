"""The memory of keys and values at work: each operation beside a plain copy of as many bytes.

  kvpool  kvpool.worker: PagedKVCache, BlockSwap, and on CUDA the decode kernel
  plain   ``copy_`` between tensors whose items lie side by side

"Warm" operations have the same places each time, which stay in the processor's caches. The others go round in memory
much larger than those: a plain copy takes the next place of a target as large as the cache, an operation other blocks
and another layer. Rows all over memory then cost what reaching them costs, two to three times a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from bench.workloads import SEED, Workload
from kvpool.native.step_outputs import compute_kv_rows
from kvpool.worker.memory.block_swap import BlockSwap
from kvpool.worker.memory.paged_kv_cache import PagedKVCache

BLOCK_SIZE = 16
TURNS = 16  # lists of slots or blocks that an operation goes round in
DECODE_REQUESTS, DECODE_TOKENS = 64, 2_048


@dataclass(frozen=True)
class Shape:
    """Heads, dtype and size of a cache; ``query_heads`` for the decode."""

    query_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    num_layers: int = 4
    num_blocks: int = 1_025

    def make_cache(self, device: str) -> PagedKVCache:
        return PagedKVCache(
            self.num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_size, self.num_layers, self.dtype, device
        )


SHAPES = {
    "8 heads of 128, bfloat16": Shape(),
    "3 heads of 64, float32": Shape(9, 3, 64, torch.float32, 8, 1_025),
}
CUDA_SHAPES = {"8 heads of 128, bfloat16": Shape(num_layers=8, num_blocks=DECODE_REQUESTS * DECODE_TOKENS // 16 + 1)}


class CacheWorkload(Workload):
    """One call a round.

    Attributes:
        num_bytes: that a call takes from one place to another.
    """

    blocks_per_round = 1
    num_bytes: int

    def __init__(self, shape: Shape, device: str, n: int, num_turns: int) -> None:
        self.shape, self.n, self.num_turns = shape, n, num_turns
        self.generator = torch.Generator().manual_seed(SEED)
        self.cache = shape.make_cache(device)
        self.cache.storage.fill_(1)  # its pages are there
        self.device = self.cache.device
        self.layers = cycle(range(min(num_turns, shape.num_layers)))
        self.set_up()

    def set_up(self) -> None:
        raise NotImplementedError

    def random(self, *sizes: int) -> Any:
        values = torch.randn(sizes, generator=self.generator)
        return values.to(self.device, self.shape.dtype)

    def random_ids(self, number: int) -> Any:
        return 1 + torch.randperm(self.shape.num_blocks - 1, generator=self.generator)[:number]

    def check(self) -> None:
        self.operate()


class Write(CacheWorkload):
    """Keys and values of n tokens: of n requests that decode, or from ``BLOCK_SIZE * 16`` on of whole blocks."""

    def set_up(self) -> None:
        self.key, self.value = self.random(2, self.n, self.shape.num_kv_heads, self.shape.head_size)
        self.num_bytes = 2 * self.key.nbytes
        self.slots = [self.make_slots().to(self.device) for _ in range(self.num_turns)]
        self.start_over()

    def start_over(self) -> None:
        self.turns = cycle(self.slots)

    def make_slots(self) -> Any:
        if self.n <= BLOCK_SIZE * BLOCK_SIZE:
            return self.random_ids(self.n) * BLOCK_SIZE + torch.randint(BLOCK_SIZE, (self.n,), generator=self.generator)
        return (self.random_ids(self.n // BLOCK_SIZE)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)

    def operate(self) -> None:
        self.cache.write(next(self.layers), self.key, self.value, next(self.turns))

    def check(self) -> None:
        self.layers = cycle([0])
        self.start_over()
        self.operate()
        blocks, places = self.slots[0] // BLOCK_SIZE, self.slots[0] % BLOCK_SIZE
        for half, wanted in ((0, self.key), (1, self.value)):
            if not torch.equal(self.cache.layers[0][blocks, half, places], wanted):
                raise AssertionError("a token is not where it was written")


class WriteRows(Write):
    """The same by rows, which are computed once a step."""

    def start_over(self) -> None:
        turns = []
        for slots in self.slots:
            rows = torch.empty(2, self.n, dtype=torch.int64)
            compute_kv_rows(slots.cpu().numpy(), BLOCK_SIZE, *rows.numpy())
            turns.append(rows.to(self.device).unbind())
        self.rows = cycle(turns)

    def operate(self) -> None:
        key_rows, value_rows = next(self.rows)
        self.cache.write_rows(next(self.layers), self.key, self.value, key_rows, value_rows)


class Gather(CacheWorkload):
    """n blocks of a layer into a workspace."""

    def set_up(self) -> None:
        self.out = self.random(2, self.n * BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_size)
        self.num_bytes = self.out.nbytes
        self.turns = cycle([self.random_ids(self.n).to(self.device) for _ in range(self.num_turns)])

    def operate(self) -> None:
        self.cache.gather(next(self.layers), next(self.turns), out=(self.out[0], self.out[1]))


class CopyBlocks(CacheWorkload):
    """n blocks of all layers to n others."""

    def set_up(self) -> None:
        self.num_bytes = self.n * self.cache.nbytes // self.shape.num_blocks
        self.turns = cycle([self.random_ids(2 * self.n).view(2, -1).tolist() for _ in range(self.num_turns)])

    def operate(self) -> None:
        self.cache.copy_blocks(*next(self.turns))


class Swap(CacheWorkload):
    """n blocks of all layers, scattered on the device, to neighbours of the host, and back."""

    def set_up(self) -> None:
        self.num_bytes = 2 * self.n * self.cache.nbytes // self.shape.num_blocks
        self.swap = BlockSwap(self.cache, 4 * self.n)
        self.turns = cycle([self.random_ids(self.n).tolist() for _ in range(self.num_turns)])
        self.hosts = cycle([list(range(first, first + self.n)) for first in range(0, 4 * self.n, self.n)])

    def operate(self) -> None:
        ids, hosts = next(self.turns), next(self.hosts)
        self.swap.swap_out(ids, hosts)
        self.swap.swap_in(hosts, ids)
        self.swap.wait()


class Decode(CacheWorkload):
    """A layer's attention of n requests with ``DECODE_TOKENS`` tokens each; bytes are those of keys and values, which
    it reads and, unlike a copy, does not write anywhere."""

    def set_up(self) -> None:
        blocks = DECODE_TOKENS // BLOCK_SIZE
        self.query = self.random(self.n, self.shape.query_heads, self.shape.head_size)
        self.table = self.random_ids(self.n * blocks).view(self.n, blocks).int().to(self.device)
        self.rows = torch.arange(self.n, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.full_like(self.rows, DECODE_TOKENS)
        self.out = torch.empty_like(self.query)
        self.num_bytes = self.n * blocks * self.cache.layers[0][0].nbytes

    def operate(self) -> None:
        from kvpool.worker.kernels.decode import paged_decode

        paged_decode(
            self.query,
            self.cache.layers[next(self.layers)],
            self.table,
            self.rows,
            self.seq_lens,
            self.shape.head_size**-0.5,
            out=self.out,
            max_seq_len=DECODE_TOKENS,
        )


class Plain(Workload):
    """Copies of as many bytes as a workload moves.

    Args:
        workload: whose bytes.
        copies: calls; keys and values are two.
    """

    blocks_per_round = 1

    def __init__(self, workload: CacheWorkload, copies: int) -> None:
        self.copies = copies
        memory = workload.shape.make_cache(str(workload.device)).storage.view(-1).fill_(1)
        number = workload.num_bytes // copies // memory.itemsize
        pieces = [piece for piece in memory.split(number) if piece.numel() == number]
        self.targets = cycle(pieces if workload.num_turns > 1 else pieces[:copies])
        self.sources = self.make_sources(pieces, memory.new_ones(copies, number))

    def make_sources(self, pieces: list[Any], tokens: Any) -> Iterator[Any]:
        """What is copied: the same tokens each time."""
        return cycle(tokens)

    def operate(self) -> None:
        for _ in range(self.copies):
            next(self.targets).copy_(next(self.sources))

    def check(self) -> None:
        self.operate()


class PlainBlocks(Plain):
    """From one place of memory to another."""

    def make_sources(self, pieces: list[Any], tokens: Any) -> Iterator[Any]:
        half = len(pieces) // 2
        return cycle(pieces[half:] + pieces[:half])


class PlainSwap(Plain):
    """From the device to the host and back, half of the bytes each way."""

    def make_sources(self, pieces: list[Any], tokens: Any) -> Iterator[Any]:
        host = tokens[0].cpu()
        return cycle([host.pin_memory() if tokens.is_cuda else host])

    def operate(self) -> None:
        target, host = next(self.targets), next(self.sources)
        host.copy_(target, non_blocking=True)
        target.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class Part:
    """An operation on n tokens, blocks or requests, and the copy beside it."""

    kind: type[CacheWorkload]
    n: int
    plain: type[Plain] = Plain
    copies: int = 2
    num_turns: int = TURNS

    def make_pair(self, shape: Shape, device: str) -> tuple[CacheWorkload, Plain]:
        workload = self.kind(shape, device, self.n, self.num_turns)
        return workload, self.plain(workload, self.copies)


PARTS = {
    **{f"write, {n} tokens, warm": Part(Write, n, num_turns=1) for n in (1, 32, 256, 2_048)},
    **{f"write by rows, {n} tokens, warm": Part(WriteRows, n, num_turns=1) for n in (1, 32, 256, 2_048)},
    **{f"write by rows, {n} tokens": Part(WriteRows, n) for n in (32, 256, 2_048)},
    **{f"gather, {n} blocks": Part(Gather, n) for n in (1, 16, 256)},
    **{f"copy, {n} blocks": Part(CopyBlocks, n, PlainBlocks, 1) for n in (1, 16, 64)},
    **{f"swap out and in, {n} blocks": Part(Swap, n, PlainSwap) for n in (1, 64)},
}
CUDA_PARTS = {
    **PARTS,
    f"decode, {DECODE_REQUESTS} x {DECODE_TOKENS} tokens": Part(Decode, DECODE_REQUESTS, PlainBlocks, 1),
}
