"""What a recording has told of requests, compared with what they are. Where the backend is native, so is this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvpool import _backend
from kvpool.recording.operations import pack

if TYPE_CHECKING or _backend.BACKEND == "reference" or sys.byteorder != "little":

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

        def is_current(self, request: Any, caches: bool) -> bool:
            """Whether nothing has changed. For requests of other classes than kvpool's, always False.

            Args:
                caches: whether its hashes count.
            """
            return False

    def pack_batch(
        known: dict[Any, Told], requests: Iterable[Any], caches: bool, tell: Callable[[Any], Told]
    ) -> tuple[bytes, bytes, bytes]:
        """Packed numbers, tokens and computed tokens of requests. What else has changed is told.

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
        )

else:
    from kvpool._told import Told, pack_batch

__all__ = ["Told", "pack_batch"]
