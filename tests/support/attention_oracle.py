"""Random steps over a paged cache, and their attention in float64, token by token."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvpool.worker.attention import AttentionBackend, AttentionLayer
from kvpool.worker.step.step_tensors import GroupTensors, StepTensors


@dataclass(frozen=True)
class Shape:
    """What a model and its cache look like."""

    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass
class Request:
    """``past`` tokens before the step, ``new`` ones in it; the first ``shared`` blocks are request ``sharer``'s."""

    past: int
    new: int
    shared: int = 0
    sharer: int | None = None
    blocks: list[int] = field(default_factory=list)
    keys: Any = None  # float64 [past + new, num_kv_heads, head_size], as they are in the cache
    values: Any = None

    @property
    def seq_len(self) -> int:
        return self.past + self.new


@dataclass
class Case:
    """A step, the cache it reads, and what the requests consist of."""

    shape: Shape
    requests: list[Request]
    step: StepTensors
    kv_cache: torch.Tensor
    query: torch.Tensor


def draw_requests(rng: random.Random, kind: str, block_size: int, longest: int) -> list[Request]:
    """Requests of a step, by kind: ``KINDS``."""
    if kind == "alike":
        return [Request(longest, 1) for _ in range(5)]
    if kind == "uneven":
        return [Request(6 * longest, 1) if i in (2, 7) else Request(rng.randrange(20), 1) for i in range(12)]
    decode_share = {"decodes": 1.0, "prefills": 0.0}.get(kind, 0.6)
    requests = [
        Request(
            rng.choice([0, rng.randrange(longest)]) if kind == "prefills" else rng.randrange(longest),
            1 if rng.random() < decode_share else rng.randrange(2, max(3, longest // 2)),
        )
        for _ in range(8 if kind == "shared" else 6)
    ]
    if kind == "shared":
        for i in range(2, len(requests)):
            sharer = rng.choice([0, 0, 1, i - 1])
            most = min(requests[sharer].past, requests[i].past) // block_size
            if most > 0 and rng.random() < 0.9:
                requests[i].sharer, requests[i].shared = sharer, rng.randrange(1, most + 1)
    return requests


KINDS = ("decodes", "prefills", "mixed", "shared", "alike", "uneven")
"""One new token each; chunks with or without a past; both in any order; with leading blocks in common, as a tree; of
equal length; two long ones among short ones."""


def make_case(
    rng: random.Random,
    shape: Shape,
    requests: list[Request],
    *,
    window: int | None = None,
    fill: float = 1e4,
    stale: int = 1,
) -> Case:
    """Puts requests into shuffled blocks of a cache that is full of ``fill``.

    The tables' cells in front of the window and behind the blocks are ``stale``; block 1 is nobody's.
    """
    block_size, width = shape.block_size, max(math.ceil(r.seq_len / shape.block_size) for r in requests) + 2
    num_blocks = 3 + sum(math.ceil(r.seq_len / block_size) for r in requests)
    free = list(range(2, num_blocks))
    rng.shuffle(free)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    sizes = (num_blocks, 2, block_size, shape.num_kv_heads, shape.head_size)
    cache = torch.full(sizes, fill, dtype=torch.float64)
    if math.isfinite(fill):
        cache.mul_(torch.randn(sizes, generator=generator, dtype=torch.float64))
    table = torch.full((len(requests) + 3, width), stale, dtype=torch.int32)
    rows = rng.sample(range(table.shape[0]), len(requests))
    for request, row in zip(requests, rows):
        fill_request(request, requests, cache, free, generator, shape)
        table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        if window is not None:
            table[row, : max(0, request.past - window + 1) // block_size] = stale
    num_tokens = sum(r.new for r in requests)
    query = torch.randn((num_tokens, shape.num_kv_heads * shape.group, shape.head_size), generator=generator)
    step = make_step(requests, rows, table, shape)
    return Case(shape, requests, step, cache.to(shape.device, shape.dtype), query.to(shape.device, shape.dtype))


def fill_request(
    request: Request, requests: list[Request], cache: torch.Tensor, free: list[int], generator: Any, shape: Shape
) -> None:
    sizes = (request.seq_len, shape.num_kv_heads, shape.head_size)
    draws = (torch.randn(sizes, generator=generator, dtype=torch.float64) for _ in range(2))
    request.keys, request.values = (draw.to(shape.dtype).double() for draw in draws)
    if request.sharer is not None:
        other, num_shared = requests[request.sharer], request.shared * shape.block_size
        request.blocks = other.blocks[: request.shared]
        request.keys[:num_shared], request.values[:num_shared] = other.keys[:num_shared], other.values[:num_shared]
    while len(request.blocks) * shape.block_size < request.seq_len:
        request.blocks.append(free.pop())
    for position in range(request.seq_len):
        block, offset = request.blocks[position // shape.block_size], position % shape.block_size
        cache[block, 0, offset], cache[block, 1, offset] = request.keys[position], request.values[position]


def make_step(requests: list[Request], rows: list[int], table: torch.Tensor, shape: Shape) -> StepTensors:
    """The tensors of a step as ``StepTensorBuilder`` makes them, request by request."""
    seq_lens = [r.seq_len for r in requests]
    starts = np.cumsum([0] + [r.new for r in requests]).astype(np.int32)
    positions = [p for r in requests for p in range(r.past, r.seq_len)]
    tables = [table[row].tolist()[: math.ceil(n / shape.block_size)] for row, n in zip(rows, seq_lens)]
    most = min(r.past for r in requests) // shape.block_size
    num_common = next((i for i in range(most) if len({t[i] for t in tables}) > 1), most)
    group = GroupTensors(
        block_table=table.to(shape.device),
        slots=torch.empty(0, dtype=torch.int64),
        key_rows=None,
        value_rows=None,
        block_starts=torch.tensor(np.cumsum([0] + [len(t) for t in tables]), dtype=torch.int32),
        blocks=torch.tensor([b for t in tables for b in t], dtype=torch.int32),
        last_block_lens=torch.tensor([(n - 1) % shape.block_size + 1 for n in seq_lens], dtype=torch.int32),
        num_common_blocks=num_common,
    )
    return StepTensors(
        rows=torch.tensor(rows, dtype=torch.int32, device=shape.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=shape.device),
        query_starts=torch.tensor(starts, device=shape.device),
        positions=torch.tensor(positions, device=shape.device),
        groups=[group],
        host_rows=np.array(rows, dtype=np.int32),
        host_seq_lens=np.array(seq_lens, dtype=np.int32),
        host_query_starts=starts,
    )


def attend_slowly(case: Case, layer: AttentionLayer) -> torch.Tensor:
    """float64 [n, num_heads, head_size]: every query alone, from the tokens of its request and not from the cache."""
    query, shape = case.query.double().cpu(), case.shape
    output = torch.empty_like(query)
    token = 0
    for request in case.requests:
        for position in range(request.past, request.seq_len):
            first = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
            for head in range(query.shape[1]):
                keys = request.keys[first : position + 1, head // shape.group]
                values = request.values[first : position + 1, head // shape.group]
                scores = keys @ query[token, head] * layer.scale
                if layer.soft_cap is not None:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                output[token, head] = torch.softmax(scores, 0) @ values
            token += 1
    return output


def check(backend: AttentionBackend, case: Case, layer: AttentionLayer, tolerance: float) -> None:
    """Fails where a backend says something else than the slow way, or another layer of the same kind something else."""
    first, second = check_layers(backend, case, [layer, layer], tolerance)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def check_layers(
    backend: AttentionBackend, case: Case, layers: list[AttentionLayer], tolerance: float
) -> list[torch.Tensor]:
    """The layers of one step, whose results are right when the last is there."""
    wanted = {layer: attend_slowly(case, layer) for layer in layers}
    backend.plan(case.step)
    results = [backend.attend(case.query, case.kv_cache, 0, layer) for layer in layers]
    for layer, result in zip(layers, results):
        assert result.shape == case.query.shape and result.dtype == case.query.dtype
        error = (result.double().cpu() - wanted[layer]).abs().max().item()
        assert error <= tolerance, f"off by {error} with {layer}"
    return results
