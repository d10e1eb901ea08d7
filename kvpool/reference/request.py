"""A request in plain Python: its tokens, their number, and the block hashes that follow them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kvpool._request_operations import RequestBlockHasher, RequestOperations, to_token_ids
from kvpool.block_hash import BlockHash

NOTHING_CHANGED = sys.maxsize


class TokenList(list[int]):
    """A list that remembers the first index at which it was changed, other than by adding to its end.

    Attributes:
        first_changed: that index, or ``NOTHING_CHANGED``; whoever has acted on it resets it.
    """

    __slots__ = ("first_changed",)

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        super().__init__(token_ids)
        self.first_changed = NOTHING_CHANGED

    def _note(self, index: Any) -> None:
        if isinstance(index, slice):
            places = range(len(self))[index]
            lowest = min(places[0], places[-1]) if places else index.indices(len(self))[0]
        else:
            lowest = index.__index__()
            lowest = max(0, lowest + len(self)) if lowest < 0 else lowest
        self.first_changed = min(self.first_changed, lowest)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._note(index)
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        self._note(index)
        super().__delitem__(index)

    def insert(self, index: Any, value: int) -> None:
        self._note(index)
        super().insert(index, value)

    def pop(self, index: Any = -1) -> int:
        self._note(index)
        return super().pop(index)

    def remove(self, value: int) -> None:
        self._note(0)
        super().remove(value)

    def clear(self) -> None:
        self._note(0)
        super().clear()

    def reverse(self) -> None:
        self._note(0)
        super().reverse()

    def sort(self, **options: Any) -> None:
        self._note(0)
        super().sort(**options)

    def __imul__(self, factor: Any) -> TokenList:  # type: ignore[misc]
        self._note(0)
        super().__imul__(factor)
        return self


class RequestBase:
    """What a scheduler does with a request at every step. ``Request`` adds the rest.

    Args:
        all_token_ids: tokens of the prompt; copied.
        block_hasher: see ``Request``.
        hash_block_size: tokens per hash where it is known that the hasher asks for nothing but full blocks, else 0.
    """

    def __init__(self, all_token_ids: list[int], block_hasher: RequestBlockHasher | None, hash_block_size: int) -> None:
        self._all_token_ids = TokenList(all_token_ids)
        self._output_token_ids: list[int] = []
        self._block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._hash_block_size = hash_block_size
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.shared_prefix_boundary = 0
        self.spec_token_ids: list[int] = []

    @staticmethod
    def has_only_ints(tokens: list[Any]) -> bool:
        """Whether all tokens are exact ints."""
        return {int}.issuperset(map(type, tokens))

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def block_hashes(self) -> list[BlockHash]:
        if self._all_token_ids.first_changed != NOTHING_CHANGED:
            self._drop_stale_hashes()
        return self._block_hashes

    @block_hashes.setter
    def block_hashes(self, block_hashes: list[BlockHash]) -> None:
        if type(block_hashes) is not list:
            raise TypeError(f"block_hashes must be a list, not {type(block_hashes).__name__}")
        self._all_token_ids.first_changed = NOTHING_CHANGED
        self._block_hashes = block_hashes

    def _drop_stale_hashes(self) -> None:
        """Drops the hashes from the first block on in which a token changed."""
        first = self._all_token_ids.first_changed
        self._all_token_ids.first_changed = NOTHING_CHANGED
        # What a foreign hasher covers with a hash is unknown: all its hashes go.
        del self._block_hashes[first // self._hash_block_size if self._hash_block_size else 0 :]

    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None:
        """Adds one output token or several, and the hashes of blocks that are full now. O(new tokens).

        Raises:
            TypeError: a token that is no integer; nothing has changed.
        """
        if type(token_ids) is int:
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            new = to_token_ids(token_ids if hasattr(token_ids, "__iter__") else [token_ids], self.has_only_ints)
            self._output_token_ids.extend(new)
            self._all_token_ids.extend(new)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Brings ``block_hashes`` up to date: stale ones go, those of new full blocks come."""
        if self._block_hasher is None:
            return
        if self._all_token_ids.first_changed != NOTHING_CHANGED:
            self._drop_stale_hashes()
        size = self._hash_block_size
        if size == 0 or len(self._all_token_ids) // size != len(self._block_hashes):
            self._block_hashes.extend(self._block_hasher(self))


class Request(RequestOperations, RequestBase):
    """A request in plain Python; see ``RequestOperations`` for its arguments."""
