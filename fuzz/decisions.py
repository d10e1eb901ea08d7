"""An input of bytes, read as decisions: which call comes next, with which arguments.

Every input is a valid history; past its end all decisions are 0 and ``is_empty`` says so. The same bytes make the same
history, so a file of them replays what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Finding(AssertionError):
    """Something that must not happen, whoever is to blame."""


class Decisions:
    """Reads ``data`` from the front.

    Attributes:
        num_hostile: values drawn so far for the current call that are no value of the promised type.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.num_hostile = 0

    @property
    def is_empty(self) -> bool:
        return self.at >= len(self.data)

    def byte(self) -> int:
        if self.at >= len(self.data):
            return 0
        self.at += 1
        return self.data[self.at - 1]

    def bytes(self, n: int) -> bytes:
        taken = self.data[self.at : self.at + n]
        self.at += len(taken)
        return taken

    def below(self, n: int) -> int:
        """0 .. n - 1."""
        if n <= 256:
            return self.byte() % n
        return int.from_bytes(bytes(self.byte() for _ in range(4)), "big") % n

    def chance(self, percent: int) -> bool:
        return self.byte() * 100 >= 256 * (100 - percent)

    def choose(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]
