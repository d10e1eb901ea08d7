"""Which key rows of a paged cache hold the tokens that queries see, and reading them into a reused workspace.

A layer's cache [num_blocks, 2, block_size, num_kv_heads, head_size] is, as rows of one head-set each,
[num_blocks * 2 * block_size, ...]: the key of the token in slot ``block * block_size + offset`` is row
``block * 2 * block_size + offset``, its value is ``block_size`` rows further. A *key row* is the row of a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.worker.attention.batch import to_device
from kvpool.worker.step.step_tensors import HostArray


@dataclass(frozen=True)
class PositionRanges:
    """Consecutive positions of some requests: those from ``firsts`` up to, not including, ``ends``.

    Attributes:
        rows: int64 numpy array [b], row of each request in the block table.
        firsts, ends: int64 numpy arrays [b], firsts < ends.
    """

    rows: HostArray
    firsts: HostArray
    ends: HostArray


def first_key_rows_(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Key rows of the first tokens of blocks, in place of their ids: a block's values are between its keys and the
    next block's."""
    return blocks.mul_(2 * block_size)


def find_key_rows(
    block_table: torch.Tensor, ranges: PositionRanges, block_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The key rows of ranges, as a rectangle.

    Blocks in front of and behind a range are never looked at. Where ranges are shorter than the rectangle, or begin
    within a block, the last key row of the range stands in: what is read is always a token of the same request, so that
    garbage in unused slots, NaN too, can't reach a result.

    Args:
        block_table: int32 [max_rows, width].
        ranges: b of them.
        block_size: tokens in a block.

    Returns:
        Key rows, int64 [b, length], and which of them count, bool [b, length]; None if all do. O(b * length).
    """
    device = block_table.device
    first_blocks, last_blocks = ranges.firsts // block_size, (ranges.ends - 1) // block_size
    num_blocks = int((last_blocks - first_blocks).max()) + 1
    length = int((ranges.ends - first_blocks * block_size).max())
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), last_blocks[:, None])
    rows, columns = to_device(ranges.rows, device), to_device(columns, device)
    blocks = block_table[rows[:, None], columns].long()
    offsets = torch.arange(block_size, device=device)
    key_rows = (first_key_rows_(blocks, block_size)[:, :, None] + offsets).flatten(1)[:, :length]
    lows, highs = ranges.firsts - first_blocks * block_size, ranges.ends - first_blocks * block_size
    if not lows.any() and (highs == length).all():
        return key_rows.contiguous(), None
    index = torch.arange(length, device=device)
    low, high = to_device(lows, device)[:, None], to_device(highs, device)[:, None]
    counts = (index >= low).logical_and_(index < high)
    return torch.where(counts, key_rows, key_rows.gather(1, high - 1)), counts


def find_key_rows_in_line(block_table: torch.Tensor, ranges: PositionRanges, block_size: int) -> torch.Tensor:
    """The key rows of ranges one behind the other, int64 [sum of lengths], nothing else. O(key rows)."""
    lengths = ranges.ends - ranges.firsts
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(offsets - ranges.firsts, lengths)
    columns = positions // block_size
    device = block_table.device
    rows = to_device(np.repeat(ranges.rows, lengths), device)
    blocks = block_table[rows, to_device(columns, device)].long()
    return first_key_rows_(blocks, block_size).add_(to_device(positions - columns * block_size, device))


class Workspace:
    """Memory that keys and values are read into, kept from layer to layer: fresh pages cost more than the reading."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def read(self, kv_cache: torch.Tensor, key_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of n key rows, each [n, num_kv_heads, head_size]; void at the next call. O(n)."""
        num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
        num_key_rows, row_size = key_rows.numel(), num_kv_heads * head_size
        flat = kv_cache.view(num_blocks * 2 * block_size, row_size)
        keys, values = self._take(kv_cache, 2 * num_key_rows * row_size).view(2, num_key_rows, row_size)
        torch.index_select(flat, 0, key_rows, out=keys)
        torch.index_select(flat[block_size:], 0, key_rows, out=values)
        return keys.view(num_key_rows, num_kv_heads, head_size), values.view(num_key_rows, num_kv_heads, head_size)

    def _take(self, like: torch.Tensor, num_items: int) -> torch.Tensor:
        memory = self._memory
        if memory.dtype != like.dtype or memory.device != like.device or memory.numel() < num_items:
            self._memory = memory = torch.empty(0)  # given back before the larger one is taken
            with torch.inference_mode(False):  # usable in and out of that mode
                memory = torch.empty(num_items + num_items // 4, dtype=like.dtype, device=like.device)
            self._memory = memory
        return memory[:num_items]
