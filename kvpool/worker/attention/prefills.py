"""Requests with several new tokens: one by one, a tile of queries at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.worker.attention.batch import StepKinds
from kvpool.worker.attention.key_rows import PositionRanges, find_key_rows_in_line
from kvpool.worker.step.step_tensors import HostArray


@dataclass(frozen=True)
class Tile:
    """Queries of a request that are computed together, and what they see.

    Attributes:
        tokens: in the packed batch.
        keys: within the key rows of the request.
        bias: [queries * group, keys], 0 or -inf.
    """

    tokens: slice
    keys: slice
    bias: torch.Tensor


@dataclass(frozen=True)
class PrefillPart:
    """A request with several new tokens.

    Attributes:
        tokens: in the packed batch.
        key_rows: int64 [length], what they see together.
        tiles: the queries in their order.
        sees_all: whether each query sees all key rows up to its own.
    """

    tokens: slice
    key_rows: torch.Tensor
    tiles: list[Tile]
    sees_all: bool


class CausalBias:
    """Masks of tiles of queries as views of one matrix, for one window and group of heads.

    Row ``i * group + g`` stands for query ``i`` and column ``c`` for a key ``reach + i - c`` tokens before it. What
    a tile sees depends on distances only, so a tile is a range of columns, and nothing is computed for it. The matrix
    grows with the longest reach.
    """

    def __init__(self, num_queries: int, group: int, sliding_window: int | None, like: torch.Tensor) -> None:
        self.num_queries = num_queries
        self.sliding_window = sliding_window
        self._group = group
        self._reach = -1
        self._matrix = torch.empty(0, dtype=like.dtype, device=like.device)

    def view(self, num_queries: int, distance: int) -> torch.Tensor:
        """Mask [num_queries * group, distance + num_queries] of queries whose first key is so far before the first."""
        if distance > self._reach:
            self._grow(max(2 * self._reach, distance, self.num_queries))
        first = self._reach - distance
        return self._matrix[: num_queries * self._group, first : first + distance + num_queries]

    def _grow(self, reach: int) -> None:
        old = self._matrix
        query = torch.arange(self.num_queries, device=old.device)[:, None]
        distance = reach + query - torch.arange(reach + self.num_queries, device=old.device)
        is_hidden = distance < 0
        if self.sliding_window is not None:
            is_hidden |= distance >= self.sliding_window
        matrix = torch.zeros(is_hidden.shape, dtype=old.dtype, device=old.device)
        matrix.masked_fill_(is_hidden, float("-inf"))
        self._matrix, self._reach = matrix.repeat_interleave(self._group, 0), reach


def plan_prefills(
    kinds: StepKinds,
    rows: HostArray,
    firsts: HostArray,
    block_table: torch.Tensor,
    kv_cache: torch.Tensor,
    causal_bias: CausalBias,
) -> list[PrefillPart]:
    """The prefill chunks of a step. Arguments as of ``plan_decodes``. O(key rows read + tiles)."""
    if kinds.prefills.size == 0:
        return []
    firsts, ends = firsts[kinds.prefills], kinds.seq_lens[kinds.prefills]
    ranges = PositionRanges(rows[kinds.prefills].astype(np.int64), firsts, ends)
    key_rows = find_key_rows_in_line(block_table, ranges, kv_cache.shape[2])
    parts = []
    key_rows_of: Any = key_rows.split((ends - firsts).tolist())  # type: ignore[no-untyped-call]
    for request, first, its_key_rows in zip(kinds.prefills.tolist(), firsts.tolist(), key_rows_of):
        tokens = slice(int(kinds.query_starts[request]), int(kinds.query_starts[request + 1]))
        past = int(kinds.seq_lens[request]) - (tokens.stop - tokens.start)
        tiles = [
            make_tile(tokens, query, past, first, causal_bias)
            for query in range(tokens.start, tokens.stop, causal_bias.num_queries)
        ]
        parts.append(PrefillPart(tokens, its_key_rows, tiles, causal_bias.sliding_window is None))
    return parts


def make_tile(tokens: slice, query: int, past: int, first: int, causal_bias: CausalBias) -> Tile:
    """A tile of a request.

    Args:
        tokens: of the request, in the packed batch; ``past`` tokens of it are in front of them.
        query: first token of the tile, in the packed batch.
        first: first position that is read of the request.
    """
    num_queries = min(causal_bias.num_queries, tokens.stop - query)
    position = past + query - tokens.start
    window = causal_bias.sliding_window
    low = first if window is None else max(first, position - window + 1)
    keys = slice(low - first, position + num_queries - first)
    return Tile(slice(query, query + num_queries), keys, causal_bias.view(num_queries, position - low))
