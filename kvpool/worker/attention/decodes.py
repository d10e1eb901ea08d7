"""Requests with one new token each: read together if they are alike in length, as much as stays in the caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.cache.spec import ceil_div
from kvpool.worker.attention.batch import Selection, StepKinds
from kvpool.worker.attention.key_rows import PositionRanges, find_key_rows
from kvpool.worker.step.step_tensors import HostArray

PADDING_SHARE = 0.2
SPLIT_TOKENS = 1024


@dataclass(frozen=True)
class PartSizes:
    """How much to read at a time.

    Attributes:
        max_key_rows: of a batch, if it is more than one split. Those of larger ones fall out of the caches between
            being read from the pool and being used.
        spare_key_rows: padding that costs less than another part. ``PADDING_SHARE`` of a part is added to it.
        max_split: longer sequences are read in splits of at most so many tokens; None: in one. Splits stay in the
            caches and are work for several cores.
    """

    max_key_rows: int
    spare_key_rows: int
    max_split: int | None

    @staticmethod
    def of(kv_cache: torch.Tensor) -> PartSizes:
        """From the size of a key row, key and value. On the CPU as measured there."""
        num_kv_heads, head_size = kv_cache.shape[3:]
        token_bytes = 2 * num_kv_heads * head_size * kv_cache.element_size()
        if kv_cache.device.type == "cpu":
            return PartSizes(max(1, (4 << 20) // token_bytes), (1 << 19) // token_bytes, SPLIT_TOKENS)
        return PartSizes(max(1, (256 << 20) // token_bytes), (1 << 24) // token_bytes, None)


@dataclass(frozen=True)
class SplitBatch:
    """Splits that are read at a time.

    Attributes:
        splits: of the part.
        key_rows: int64 [splits * length], what they see.
        bias: [splits, 1, 1, length], 0 or as good as -inf; None if all key rows count.
    """

    splits: slice
    key_rows: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class DecodePart:
    """Requests with one new token that see about as many tokens.

    Attributes:
        tokens: theirs in the packed batch.
        num_requests: b.
        num_splits: p, in which each of them is read.
        batches: of the b * p splits in order.
    """

    tokens: Selection
    num_requests: int
    num_splits: int
    batches: list[SplitBatch]


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

    O(key rows read). At most ``PADDING_SHARE`` of them is padding, or little of it in each length of requests.
    """
    sizes = PartSizes.of(kv_cache)
    lengths = (kinds.seq_lens - firsts)[kinds.decodes]
    parts = []
    for alike in split_by_length(lengths, sizes.spare_key_rows):
        requests = kinds.decodes[alike]
        ranges = PositionRanges(rows[requests].astype(np.int64), firsts[requests], kinds.seq_lens[requests])
        key_rows, counts = find_key_rows(block_table, ranges, kv_cache.shape[2])
        num_splits = 1 if sizes.max_split is None else ceil_div(key_rows.shape[1], sizes.max_split)
        key_rows, counts = cut(key_rows, counts, num_splits)
        bias = None if counts is None else make_bias(counts, kv_cache.dtype)[:, None, None]
        step = max(1, sizes.max_key_rows // key_rows.shape[1])
        some = [slice(first, first + step) for first in range(0, len(key_rows), step)]
        batches = [SplitBatch(place, key_rows[place].view(-1), None if bias is None else bias[place]) for place in some]
        parts.append(DecodePart(kinds.tokens_of(requests, block_table.device), requests.size, num_splits, batches))
    return parts


def cut(
    key_rows: torch.Tensor, counts: torch.Tensor | None, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [b, length] cut into ``num_splits`` each, [b * num_splits, length of a split]; the last key row fills up."""
    missing = -key_rows.shape[1] % num_splits
    if missing:
        counts = torch.ones_like(key_rows, dtype=torch.bool) if counts is None else counts
        key_rows = torch.cat([key_rows, key_rows[:, -1:].expand(-1, missing)], 1)
        counts = torch.cat([counts, counts.new_zeros(len(counts), missing)], 1)
    length = key_rows.shape[1] // num_splits
    return key_rows.reshape(-1, length), None if counts is None else counts.reshape(-1, length)


def make_bias(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key row counts, and elsewhere so little that its weight is 0 beside one that does.

    Not -inf: a split in which nothing counts would come out as NaN.
    """
    bias = torch.zeros(counts.shape, dtype=dtype, device=counts.device)
    return bias.masked_fill_(~counts, torch.finfo(dtype).min / 2)


def split_by_length(lengths: HostArray, spare_key_rows: int) -> Iterator[HostArray]:
    """Indices of requests that are alike in length; all of them once.

    In their order where all are alike, else from the longest on. O(r log r).
    """
    order = np.arange(lengths.size)
    padding = int(lengths.max(initial=0)) * lengths.size - int(lengths.sum())
    if padding > PADDING_SHARE * (padding + int(lengths.sum())) + spare_key_rows:
        order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < lengths.size:
        rest = lengths[order[first:]]
        room = int(rest.max()) * np.arange(1, rest.size + 1)
        is_worth_it = room - np.cumsum(rest) <= PADDING_SHARE * room + spare_key_rows
        end = first + int(np.flatnonzero(is_worth_it)[-1]) + 1
        yield order[first:end]
        first = end
