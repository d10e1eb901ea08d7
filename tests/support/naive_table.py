"""Block tables the obvious way: lists of ids, and formulas written down as they read. What tests compare with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PAD = -1


class NaiveTable:
    """Rows of one KV cache group; ids are kept as the kernel's blocks."""

    def __init__(self, num_rows: int, width: int, block_size: int, ratio: int = 1) -> None:
        self.num_rows, self.width, self.block_size, self.ratio = num_rows, width, block_size, ratio
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]

    def kernel_blocks(self, ids: Iterable[int]) -> list[int]:
        return [b * self.ratio + part for b in ids for part in range(self.ratio)]

    def append_row(self, ids: Iterable[int], row: int) -> None:
        self.rows[row] = self.rows[row] + self.kernel_blocks(ids)

    def add_row(self, ids: Iterable[int], row: int) -> None:
        self.rows[row] = self.kernel_blocks(ids)

    def clear_row(self, row: int) -> None:
        self.rows[row] = []

    def move_row(self, source: int, target: int) -> None:
        if source != target:
            self.rows[target], self.rows[source] = self.rows[source], []

    def swap_row(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def padded(self) -> np.ndarray:
        return np.array([row + [0] * (self.width - len(row)) for row in self.rows], np.int32)

    def slot(self, row: int, position: int) -> int:
        return self.rows[row][position // self.block_size] * self.block_size + position % self.block_size

    def num_common(self, rows: Sequence[int], limit: int) -> int:
        common = 0
        for column in zip(*(self.rows[row] for row in rows)):
            if common >= limit or len(set(column)) > 1 or column[0] == 0:
                break
            common += 1
        return common
