"""A request in plain Python: its tokens, their number, and the block hashes that follow them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import isfinite
from typing import Any

from kvpool.hashing.block_hash import BlockHash
from kvpool.requests.request_base import RequestBase, RequestBlockHasher, to_token_ids
from kvpool.requests.token_ids import MAX_TOKEN_ID

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


class Request(RequestBase):
    __doc__ = RequestBase.__doc__

    # ``_hash_block_size`` is 0 where the hasher may ask for more than full blocks. ``_before_append`` holds, with such
    # a hasher, the numbers of tokens and of hashes before the last tokens came, so that these can be taken back
    # without asking it; else None.

    def _create(self, all_token_ids: list[int], block_hasher: RequestBlockHasher | None, hash_block_size: int) -> None:
        self._all_token_ids = TokenList(all_token_ids)
        self._output_token_ids: list[int] = []
        self._block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._hash_block_size = hash_block_size
        self._before_append: tuple[int, int] | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.shared_prefix_boundary = 0
        self.spec_token_ids: list[int] = []

    @staticmethod
    def are_token_ids(tokens: list[Any]) -> bool:
        """Whether all are exact ints from 0 to ``MAX_TOKEN_ID``."""
        if len(tokens) == 1:  # as always when requests decode
            return type(tokens[0]) is int and 0 <= tokens[0] <= MAX_TOKEN_ID
        return {int}.issuperset(map(type, tokens)) and (
            not tokens or (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID)
        )

    @staticmethod
    def are_plain(
        request_id: Any,
        max_tokens: Any,
        priority: Any,
        arrival_time: Any,
        skip_reading_prefix_cache: Any,
        cache_salt: Any,
        session_id: Any,
    ) -> bool:
        """Whether these arguments of a request are what they are stored as, and in range."""
        return (
            type(request_id) is str
            and request_id.isascii()
            and type(max_tokens) is int
            and max_tokens > 0
            and type(priority) is int
            and (arrival_time is None or (type(arrival_time) is float and isfinite(arrival_time)))
            and (skip_reading_prefix_cache is False or skip_reading_prefix_cache is True)
            and (cache_salt is None or (type(cache_salt) is str and cache_salt.isascii()))
            and (session_id is None or (type(session_id) is str and session_id.isascii()))
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompt and output."""
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self._output_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Number of tokens, the drafts in ``spec_token_ids`` included."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def block_hashes(self) -> list[BlockHash]:
        """A digest per full hash block, in token order; those of tokens that were changed by hand are gone."""
        if self._all_token_ids.first_changed != NOTHING_CHANGED:
            self._drop_stale_hashes()
        return self._block_hashes

    @block_hashes.setter
    def block_hashes(self, block_hashes: list[BlockHash]) -> None:
        if type(block_hashes) is not list:
            raise TypeError(f"block_hashes must be a list, not {type(block_hashes).__name__}")
        self._all_token_ids.first_changed = NOTHING_CHANGED
        self._before_append = None
        self._block_hashes = block_hashes

    def _drop_stale_hashes(self) -> None:
        """Drops the hashes from the first block on in which a token changed."""
        first = self._all_token_ids.first_changed
        self._all_token_ids.first_changed = NOTHING_CHANGED
        # What a foreign hasher covers with a hash is unknown: all its hashes go.
        del self._block_hashes[first // self._hash_block_size if self._hash_block_size else 0 :]
        self._before_append = None

    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None:
        """Add one output token or several, and the hashes of blocks that are full now. O(new tokens).

        Raises:
            TypeError: a token that is no integer.
            InvalidArgumentError: a token below 0 or above ``MAX_TOKEN_ID``. After any error, also one of the hasher,
                nothing has changed.
        """
        new: list[int] | None = None
        if type(token_ids) is not int or not 0 <= token_ids <= MAX_TOKEN_ID:
            new = to_token_ids(token_ids if hasattr(token_ids, "__iter__") else [token_ids], self.are_token_ids)
        if self._all_token_ids.first_changed != NOTHING_CHANGED:
            self._drop_stale_hashes()
        hashes, num_tokens, num_output_tokens = (
            self._block_hashes,
            len(self._all_token_ids),
            len(self._output_token_ids),
        )
        num_hashes = len(hashes)
        is_foreign = self._hash_block_size == 0 and self._block_hasher is not None
        before = (num_tokens, num_hashes) if is_foreign else None
        try:
            if new is None:
                self._output_token_ids.append(token_ids)  # type: ignore[arg-type]
                self._all_token_ids.append(token_ids)
            else:
                self._output_token_ids.extend(new)
                self._all_token_ids.extend(new)
            self.update_block_hashes()
        except BaseException:
            del self._output_token_ids[num_output_tokens:]
            list.__delitem__(self._all_token_ids, slice(num_tokens, None))  # what has hashes has not changed
            del hashes[num_hashes:]
            self._block_hashes = hashes
            raise
        self._before_append = before

    def update_block_hashes(self) -> None:
        """Bring ``block_hashes`` up to date: stale ones go, those of new full blocks come."""
        if self._block_hasher is None:
            return
        if self._all_token_ids.first_changed != NOTHING_CHANGED:
            self._drop_stale_hashes()
        size = self._hash_block_size
        if size == 0 or len(self._all_token_ids) // size != len(self._block_hashes):
            self._block_hashes.extend(self._block_hasher(self))
