"""Requests with one new token each: read together if they are alike in length, as much as stays in the caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.worker.attention.batch import Selection, StepKinds
from kvpool.worker.attention.key_rows import Spans, find_cells
from kvpool.worker.step.step_tensors import HostArray

PADDING_SHARE = 0.2
PIECE_TOKENS = 1024


@dataclass(frozen=True)
class PartSizes:
    """How much to read at a time.

    Attributes:
        max_cells: cells of a chunk, if it is more than one piece. Those of larger ones fall out of the caches between
            being read from the pool and being used.
        spare_cells: padding that costs less than another part. To it comes ``PADDING_SHARE`` of a part.
        max_piece: longer sequences are read in pieces of at most so many tokens; None: in one. Pieces stay in the
            caches and are work for several cores.
    """

    max_cells: int
    spare_cells: int
    max_piece: int | None

    @staticmethod
    def of(kv_cache: torch.Tensor) -> PartSizes:
        """From the size of a cell, key and value. On the CPU as measured there."""
        num_kv_heads, head_size = kv_cache.shape[3:]
        cell_bytes = 2 * num_kv_heads * head_size * kv_cache.element_size()
        if kv_cache.device.type == "cpu":
            return PartSizes(max(1, (4 << 20) // cell_bytes), (1 << 19) // cell_bytes, PIECE_TOKENS)
        return PartSizes(max(1, (256 << 20) // cell_bytes), (1 << 24) // cell_bytes, None)


@dataclass(frozen=True)
class Chunk:
    """Pieces that are read at a time.

    Attributes:
        pieces: of the part.
        cells: int64 [pieces * length], what they see.
        bias: [pieces, 1, 1, length], 0 or as good as -inf; None if all cells count.
    """

    pieces: slice
    cells: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class DecodePart:
    """Requests with one new token that see about as many tokens.

    Attributes:
        tokens: theirs in the packed batch.
        num_requests: b.
        num_pieces: p, in which each of them is read.
        chunks: of the b * p pieces in order.
    """

    tokens: Selection
    num_requests: int
    num_pieces: int
    chunks: list[Chunk]


def plan_decodes(
    kinds: StepKinds, rows: HostArray, firsts: HostArray, block_table: torch.Tensor, kv_cache: torch.Tensor
) -> list[DecodePart]:
    """The decodes of a step, in parts.

    Args:
        kinds: the step.
        rows: int32 numpy array [r], row of each request.
        firsts: int64 numpy array [r], first position that each request reads here.
        block_table: of the KV cache group.
        kv_cache: a layer of it, for its shape and dtype.

    O(cells read). At most ``PADDING_SHARE`` of them is padding, or little of it in each length of requests.
    """
    sizes = PartSizes.of(kv_cache)
    lengths = (kinds.seq_lens - firsts)[kinds.decodes]
    parts = []
    for alike in split_by_length(lengths, sizes.spare_cells):
        requests = kinds.decodes[alike]
        spans = Spans(rows[requests].astype(np.int64), firsts[requests], kinds.seq_lens[requests])
        cells, counts = find_cells(block_table, spans, kv_cache.shape[2])
        num_pieces = 1 if sizes.max_piece is None else -(-cells.shape[1] // sizes.max_piece)
        cells, counts = cut(cells, counts, num_pieces)
        bias = None if counts is None else make_bias(counts, kv_cache.dtype)[:, None, None]
        step = max(1, sizes.max_cells // cells.shape[1])
        some = [slice(first, first + step) for first in range(0, len(cells), step)]
        chunks = [Chunk(place, cells[place].view(-1), None if bias is None else bias[place]) for place in some]
        parts.append(DecodePart(kinds.tokens_of(requests, block_table.device), requests.size, num_pieces, chunks))
    return parts


def cut(cells: torch.Tensor, counts: torch.Tensor | None, num_pieces: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [b, length] cut into ``num_pieces`` each, [b * num_pieces, length of a piece]; the last cell fills up."""
    missing = -cells.shape[1] % num_pieces
    if missing:
        counts = torch.ones_like(cells, dtype=torch.bool) if counts is None else counts
        cells = torch.cat([cells, cells[:, -1:].expand(-1, missing)], 1)
        counts = torch.cat([counts, counts.new_zeros(len(counts), missing)], 1)
    length = cells.shape[1] // num_pieces
    return cells.reshape(-1, length), None if counts is None else counts.reshape(-1, length)


def make_bias(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a cell counts, and elsewhere so little that its weight is 0 beside one that does.

    Not -inf: a piece in which nothing counts would come out as NaN.
    """
    bias = torch.zeros(counts.shape, dtype=dtype, device=counts.device)
    return bias.masked_fill_(~counts, torch.finfo(dtype).min / 2)


def split_by_length(lengths: HostArray, spare_cells: int) -> Iterator[HostArray]:
    """Indices of requests that are alike in length; all of them once.

    In their order where all are alike, else from the longest on. O(r log r).
    """
    order = np.arange(lengths.size)
    padding = int(lengths.max(initial=0)) * lengths.size - int(lengths.sum())
    if padding > PADDING_SHARE * (padding + int(lengths.sum())) + spare_cells:
        order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < lengths.size:
        rest = lengths[order[first:]]
        room = int(rest.max()) * np.arange(1, rest.size + 1)
        is_worth_it = room - np.cumsum(rest) <= PADDING_SHARE * room + spare_cells
        end = first + int(np.flatnonzero(is_worth_it)[-1]) + 1
        yield order[first:end]
        first = end
