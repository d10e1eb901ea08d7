"""Attention that reads the leading blocks which requests share once for all of them, by plain torch.

The queries of requests with the same leading blocks, as many rows of one, see the keys of these blocks; what a request
has of its own is read as by the backend "gather"; the two are weighed by the sums of their exponentials. Equal block
ids are the same tokens, so ids are all that has to be compared.

Decodes and prefill chunks alike take part; windows and capped scores go the way of "gather".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.worker.attention.batch import Selection, StepKinds, put, take
from kvpool.worker.attention.dense import attend_dense, merge, wide_dtype
from kvpool.worker.attention.gather import GatherBackend, LayerCall, Parts, PartsReader
from kvpool.worker.attention.interface import AttentionLayer, check_inputs
from kvpool.worker.attention.key_rows import PositionRanges, find_key_rows_in_line
from kvpool.worker.attention.sharing import Sharers, find_sharers
from kvpool.worker.step.step_tensors import GroupTensors, StepTensors

MIN_SAVED_BYTES = 2 << 20
MAX_SCORES = 1 << 26  # of a shared part on devices where they are kept


@dataclass(frozen=True)
class SharedPart:
    """Leading key rows that some requests share.

    Attributes:
        tokens: all tokens of these requests in the packed batch, m of them.
        num_tokens: m.
        key_rows: int64 [length].
    """

    tokens: Selection
    num_tokens: int
    key_rows: torch.Tensor


@dataclass(frozen=True)
class CascadeParts:
    """What has to be read for a step's tokens.

    Attributes:
        alone: for requests that share nothing.
        own: for those that do, behind what they share.
        shared: what they share.
    """

    alone: Parts
    own: Parts
    shared: list[SharedPart]


class CascadeBackend:
    """Attention by plain torch that reads shared leading blocks once (``AttentionBackend``), on any device.

    Made for the CPU. Elsewhere only blocks that all requests of a step share are seen, since tables aren't on the host,
    and the scores of shared parts are kept in memory. What is said of NaN in ``GatherBackend`` holds here too.

    Args:
        min_saved_bytes: requests share where it saves the reading of so many bytes in a layer. The default is where it
            begins to pay: merging costs a few calls of torch.
    """

    name = "cascade"
    with_kv_rows = True
    with_compressed = False

    def __init__(self, min_saved_bytes: int = MIN_SAVED_BYTES) -> None:
        self._min_saved_bytes = min_saved_bytes
        self._reader = PartsReader()
        self._gather = GatherBackend(self._reader)
        self._step: StepTensors | None = None
        self._parts: dict[int, CascadeParts | None] = {}

    def plan(self, step: StepTensors) -> None:
        self._step = step
        self._parts.clear()
        self._gather.plan(step)

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        step = check_inputs(self._step, query, kv_cache, group_id)
        if layer.sliding_window is not None or layer.soft_cap is not None:
            return self._gather.attend(query, kv_cache, group_id, layer)
        call = LayerCall(query, kv_cache, layer)
        if group_id not in self._parts:
            self._parts[group_id] = self._find(step, call, group_id)
        parts = self._parts[group_id]
        if parts is None:
            return self._gather.attend(query, kv_cache, group_id, layer)
        num_kv_heads = kv_cache.shape[3]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sizes = (query.shape[0], num_kv_heads, query.shape[1] // num_kv_heads)
        lse = torch.empty(sizes, dtype=wide_dtype(query.dtype), device=query.device)
        self._reader.compute(parts.alone, call, output)
        self._reader.compute(parts.own, call, output, lse)
        for shared in parts.shared:
            self._merge(shared, call, output, lse)
        return output

    def _merge(self, part: SharedPart, call: LayerCall, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds what requests share to what each has of its own."""
        keys, values = (each.transpose(0, 1)[None] for each in self._reader.read(call.kv_cache, part.key_rows))
        num_kv_heads, group = lse.shape[1:]
        sizes = (part.num_tokens, num_kv_heads, group, -1)
        rows = take(call.query, part.tokens).reshape(sizes).transpose(0, 1).flatten(1, 2)[None]
        results = [attend_dense(some, keys, values, None, call.layer, with_lse=True) for some in _row_tiles(rows, keys)]
        of_rows, lse_of_rows = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*results))
        own, own_lse = take(output, part.tokens).view(sizes), take(lse, part.tokens)
        shared = of_rows.reshape(num_kv_heads, part.num_tokens, group, -1).transpose(0, 1)
        shared_lse = lse_of_rows.reshape(num_kv_heads, part.num_tokens, group).transpose(0, 1)
        put(output, part.tokens, merge(own, own_lse, shared, shared_lse).flatten(1, 2))

    def _find(self, step: StepTensors, call: LayerCall, group_id: int) -> CascadeParts | None:
        group, kinds = step.groups[group_id], StepKinds.of(step)
        block_size, num_kv_heads, head_size = call.kv_cache.shape[2:]
        block_bytes = 2 * block_size * num_kv_heads * head_size * call.kv_cache.element_size()
        sharers = find_step_sharers(step, group, kinds, block_size, self._min_saved_bytes / block_bytes)
        if not sharers:
            return None
        firsts = np.zeros(kinds.seq_lens.size, dtype=np.int64)
        shared = []
        for found in sharers:
            end = found.num_blocks * block_size
            firsts[found.requests] = end
            leading = PositionRanges(
                *(np.array([x], dtype=np.int64) for x in (step.host_rows[found.requests[0]], 0, end))
            )
            key_rows = find_key_rows_in_line(group.block_table, leading, block_size)
            tokens = kinds.tokens_of(found.requests, call.query.device)
            shared.append(SharedPart(tokens, int(kinds.query_lens[found.requests].sum()), key_rows))
        alone, own = (
            dataclasses.replace(
                kinds, decodes=kinds.decodes[chosen[kinds.decodes]], prefills=kinds.prefills[chosen[kinds.prefills]]
            )
            for chosen in (firsts == 0, firsts > 0)
        )
        return CascadeParts(
            alone=self._reader.find(step, alone, firsts, call, group_id),
            own=self._reader.find(step, own, firsts, call, group_id),
            shared=shared,
        )


def find_step_sharers(
    step: StepTensors, group: GroupTensors, kinds: StepKinds, block_size: int, min_saved_blocks: float
) -> list[Sharers]:
    """Requests of a step to read together, see ``find_sharers``.

    Only blocks in front of a request's first new token count, so that each has something of its own behind them.
    """
    num_full = (kinds.seq_lens - kinds.query_lens) // block_size
    if group.block_table.device.type == "cpu":
        table = group.block_table.numpy()
        tables = [table[row, :count] for row, count in zip(step.host_rows.tolist(), num_full.tolist())]
        return find_sharers(tables, min_saved_blocks)
    num_common, num_requests = min(group.num_common_blocks, int(num_full.min(initial=0))), num_full.size
    if num_requests < 2 or (num_requests - 1) * num_common <= min_saved_blocks:
        return []
    return [Sharers(np.arange(num_requests), num_common)]


def _row_tiles(rows: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of queries [1, h, m, head_size], cut where all scores at once would take much memory."""
    if rows.device.type == "cpu":
        return (rows,)
    tiles: tuple[torch.Tensor, ...] = rows.split(max(1, MAX_SCORES // (keys.shape[1] * keys.shape[2])), 2)  # type: ignore[no-untyped-call]
    return tiles
