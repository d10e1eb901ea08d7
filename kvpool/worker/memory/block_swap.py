"""Blocks that leave the device for host memory, and come back.

A host block holds a block of all layers side by side, so that it is one copy over the bus; on the device the layers of
a block lie apart. On CUDA blocks therefore pass through a buffer on the device, where they are put together (swap out)
or taken apart (swap in), and each run of neighbouring host ids is one copy between the buffer and pinned memory. All of
it runs on a stream of its own, one part after the other.

Order on CUDA. A swap starts after what the compute stream (the current one at the call) had queued until then: a block
swapped out holds what was written before the call, and a block swapped in is overwritten after the reads before the
call. What is queued on the compute stream after the call runs beside the swap until ``wait()``. So between a call and
``wait()``

* nobody may write to the blocks that are swapped out: the scheduler must not have given them to others yet;
* nobody may read or write the blocks that are swapped in.

Swaps among themselves run in the order of their calls: a host block may be reused by the next call. The host reads host
blocks after ``synchronize()`` only. On the CPU every call has ended when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvpool.errors import InvalidArgumentError
from kvpool.worker.memory.block_ids import BlockIds, check_not_null, check_pairs, checked_ids, ids_on
from kvpool.worker.memory.device_memory import allocate_blocks
from kvpool.worker.memory.paged_kv_cache import PagedKVCache

BUFFER_BYTES = 32 * 2**20  # on the device, or one block if that is more


class BlockSwap:
    """Host memory for blocks of a cache, and the copies both ways.

    Args:
        cache: whose blocks.
        num_host_blocks: blocks that the host has room for, ids 0 .. num_host_blocks - 1; all may be used.

    Attributes:
        host: [num_host_blocks, num_layers, 2, block_size, num_kv_heads, head_size], pinned if the cache is on CUDA.

    Who swaps chooses the ids; nothing here keeps track of them. Lists of neighbouring ids cost fewer copies. Not for
    several threads at once.
    """

    def __init__(self, cache: PagedKVCache, num_host_blocks: int) -> None:
        if num_host_blocks < 1:
            raise InvalidArgumentError(f"host memory of {num_host_blocks} blocks")
        self.cache = cache
        self.num_host_blocks = num_host_blocks
        self._blocks = cache.storage.transpose(0, 1)  # by block, as the host has them
        self._is_cuda = cache.device.type == "cuda"
        shape = (num_host_blocks, *self._blocks.shape[1:])
        self.host = allocate_blocks(shape, num_host_blocks, cache.dtype, torch.device("cpu"), pinned=self._is_cuda)
        if self._is_cuda:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
            num_buffered = min(num_host_blocks, max(1, BUFFER_BYTES // self.host[0].nbytes))
            self._buffer = torch.empty((num_buffered, *shape[1:]), dtype=cache.dtype, device=cache.device)
            for tensor in (self._buffer, cache.storage):  # freed memory must outlive what is queued here
                tensor.record_stream(self._stream)

    def swap_out(self, block_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copies blocks of all layers to the host: ``block_ids[i]`` to ``host_ids[i]``.

        Raises:
            InvalidArgumentError: lists of different lengths, an id that isn't there, a host block twice. Nothing is
                copied.

        O(blocks * layers).
        """
        blocks, hosts = self._checked(block_ids, host_ids, "swap_out")
        check_pairs(blocks, hosts, "swap_out")
        blocks, hosts = in_host_order(blocks, hosts)
        if not self._is_cuda:
            for block, host, number in runs(blocks, hosts):
                self.host[host : host + number].copy_(self._blocks[block : block + number])
            return
        with self._after_compute():
            take_out(self._blocks, self.host, self._buffer, blocks, hosts)

    def swap_in(self, host_ids: BlockIds, block_ids: BlockIds) -> None:
        """Copies host blocks to blocks of all layers: ``host_ids[i]`` to ``block_ids[i]``.

        Raises:
            InvalidArgumentError: lists of different lengths, an id that isn't there, a block twice, the null block.
                Nothing is copied.

        O(blocks * layers).
        """
        blocks, hosts = self._checked(block_ids, host_ids, "swap_in")
        check_pairs(hosts, blocks, "swap_in")
        check_not_null(blocks, "swap_in")
        blocks, hosts = in_host_order(blocks, hosts)
        if not self._is_cuda:
            for block, host, number in runs(blocks, hosts):
                self._blocks[block : block + number].copy_(self.host[host : host + number])
            return
        with self._after_compute():
            put_in(self._blocks, self.host, self._buffer, blocks, hosts)

    def wait(self) -> None:
        """What is queued on the current stream from now on starts after all swaps so far. The host does not wait."""
        if self._is_cuda:
            torch.cuda.current_stream(self.cache.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for all swaps so far."""
        if self._is_cuda:
            self._stream.synchronize()

    def _after_compute(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        return torch.cuda.stream(self._stream)

    def _checked(self, block_ids: BlockIds, host_ids: BlockIds, name: str) -> tuple[list[int], list[int]]:
        blocks = checked_ids(block_ids, self.cache.num_blocks, name)
        return blocks, checked_ids(host_ids, self.num_host_blocks, f"{name} (host)")


def in_host_order(block_ids: list[int], host_ids: list[int]) -> tuple[list[int], list[int]]:
    """The same pairs with the host's ids going up, for long runs. O(n log n)."""
    order = sorted(range(len(host_ids)), key=host_ids.__getitem__)
    return [block_ids[i] for i in order], [host_ids[i] for i in order]


def runs(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of ids as (id, other id, length) of runs in which both go up by one. O(n)."""
    first = 0
    for end in range(1, len(one) + 1):
        if end == len(one) or one[end] != one[end - 1] + 1 or other[end] != other[end - 1] + 1:
            yield one[first], other[first], end - first
            first = end


def take_out(
    blocks: torch.Tensor, host: torch.Tensor, buffer: torch.Tensor, block_ids: list[int], host_ids: list[int]
) -> None:
    """Queues copies of ``blocks[block_ids]`` to ``host[host_ids]`` through a buffer, as many at a time as it holds.

    Args:
        blocks, host, buffer: [number of blocks, ...] alike otherwise; the first and the last on one device.
    """
    for first in range(0, len(block_ids), len(buffer)):
        ids, hosts = block_ids[first : first + len(buffer)], host_ids[first : first + len(buffer)]
        torch.index_select(blocks, 0, ids_on(blocks.device, ids), out=buffer[: len(ids)])
        for place, target, number in runs(range(len(ids)), hosts):
            host[target : target + number].copy_(buffer[place : place + number], non_blocking=True)


def put_in(
    blocks: torch.Tensor, host: torch.Tensor, buffer: torch.Tensor, block_ids: list[int], host_ids: list[int]
) -> None:
    """Queues copies of ``host[host_ids]`` to ``blocks[block_ids]``, see ``take_out``."""
    for first in range(0, len(block_ids), len(buffer)):
        ids, hosts = block_ids[first : first + len(buffer)], host_ids[first : first + len(buffer)]
        for place, source, number in runs(range(len(ids)), hosts):
            buffer[place : place + number].copy_(host[source : source + number], non_blocking=True)
        blocks.index_copy_(0, ids_on(blocks.device, ids), buffer[: len(ids)])
