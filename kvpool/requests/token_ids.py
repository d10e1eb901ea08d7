"""Token ids: which there are, and those of a request as others see them, a view that can be read and not changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

MAX_TOKEN_ID = 2**31 - 1
"""Workers keep token ids as int32, as vLLM's do; what is larger could be scheduled, and never be computed."""


class TokenIds(Sequence[int]):
    """Read-only view of a list of token ids; it grows and shrinks with the list. A slice is a new list.

    A request's lists belong together, and to its block hashes, so they are changed by its methods.
    vLLM: ``ConstantList``.
    """

    __slots__ = ("_token_ids",)

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._token_ids[index]

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._token_ids

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._token_ids == other._token_ids
        if isinstance(other, list):
            return self._token_ids == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it can change

    def copy(self) -> list[int]:
        """A list of the token ids now."""
        return self._token_ids[:]

    def __repr__(self) -> str:
        return f"TokenIds({list(self._token_ids)})"
