"""What a recording has told of requests, compared with what they are. Where the backend is native, so is this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvpool import backend
from kvpool.recording.operations import pack

if TYPE_CHECKING or backend.BACKEND == "reference" or sys.byteorder != "little":

    class Told:
        """A request as the file has it.

        Attributes:
            number: that stands for its id.
            num_tokens, num_computed_tokens, num_prompt_tokens, num_in_flight_tokens, shared_prefix_boundary, status: of
                the request.
            skips_cache: its ``skip_reading_prefix_cache``.
            num_hashes, last_hash: of its block hashes. A hash stands for all before it.
        """

        def __init__(self, number: int) -> None:
            self.number = number
            self.num_tokens = self.num_computed_tokens = self.num_prompt_tokens = self.num_in_flight_tokens = 0
            self.shared_prefix_boundary = self.num_hashes = 0
            self.last_hash: Any = None
            self.skips_cache: Any = None
            self.status: Any = None

        def forget_tokens(self) -> None:
            """The file does not have its numbers of tokens as they are noted here."""
            self.num_tokens = -1

        def is_current(self, request: Any, caches: bool) -> bool:
            """Whether nothing has changed. For requests of other classes than kvpool's, always False.

            Args:
                caches: whether its hashes count.
            """
            return False

    def pack_batch(
        known: dict[Any, Told], requests: Iterable[Any], caches: bool, tell: Callable[[Any], Told]
    ) -> tuple[bytes, bytes, bytes, list[int], list[bytes]]:
        """Packed numbers, tokens and computed tokens of requests; and the numbers of those that have a further hash,
        with these hashes, which count as told. What else has changed is told by a call.

        Args:
            known: what was told, by request id; tokens and computed tokens are noted there.
            tell: tells all of a request.

        Raises:
            OverflowError: a number of tokens that no model has.
        """
        told = [tell(request) for request in requests]
        return (
            pack(one.number for one in told),
            pack(one.num_tokens for one in told),
            pack(one.num_computed_tokens for one in told),
            [],
            [],
        )

    class PlainCalls:
        """Calls of ``allocate_slots`` with a request and a number of tokens alone, which an engine may make for each
        of its requests at every step: they are written together. Here none is taken.

        Attributes:
            num_calls: that were made; is_full: there is no room for a further one; is_empty: there is nothing to tell.

        Args:
            told: by request id.
            caches: whether hashes of requests count.
        """

        num_calls = 0
        is_full = False
        is_empty = True

        def __init__(self, told: dict[Any, Told], caches: bool) -> None:
            pass

        def has(self, told: Told) -> bool:
            """Whether one of the calls is for this request."""
            return False

        def add(self, request: Any, num_new_tokens: Any) -> bool:
            """The next call, before it is made; its request's tokens are noted as told. False if it is not taken: the
            request is none of kvpool's, or something else has changed of it, or there is no room."""
            return False

        def settle(self, rows: Any) -> None:
            """What the call has given: packed ids by group, None for no room, False for nothing. It counts from here
            on; one that was added and is not settled does not."""

        def take_grown(self) -> tuple[list[int], list[bytes]]:
            """The requests that have a further hash, which count as told, and these hashes; to be told before the
            calls."""
            return [], []

        def take(self) -> tuple[bytes, bytes, bytes, bytes, list[bytes], list[int]]:
            """The fields of ``PlainAllocations``; then there are none."""
            return b"", b"", b"", b"", [], []

else:
    from kvpool.native.told import PlainCalls, Told, pack_batch

__all__ = ["PlainCalls", "Told", "pack_batch"]
