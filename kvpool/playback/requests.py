"""The requests of a recording, as the manager reads them: with as many tokens, which are all 0, and the same hashes."""

from __future__ import annotations

import enum
from typing import Any

from kvpool.backend import Request
from kvpool.playback.limits import PlaybackLimits
from kvpool.recording.operations import NewHashes, RequestState, unpack
from kvpool.requests.status import RequestStatus

_OWN_STATUSES = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)


class OtherStatus(enum.Enum):
    """Statuses that are not kvpool's; a manager goes by their names."""

    RUNNING = 0
    WAITING = 1
    PREEMPTED = 2


class OtherRequest:
    """A request of another engine's class, for which there are no compiled calls."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.all_token_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_tokens = self.num_prompt_tokens = self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.num_preemptions = self.shared_prefix_boundary = 0
        self.skip_reading_prefix_cache = False
        self.status: Any = OtherStatus.RUNNING


class UnknownRequestError(ValueError):
    """A call for a request that was not told of."""


class CostError(ValueError):
    """More than the limits allow."""


class Requests:
    """The requests that live, by number."""

    def __init__(self, limits: PlaybackLimits) -> None:
        self._limits = limits
        self._requests: dict[int, Any] = {}
        self._num_tokens = 0

    @staticmethod
    def id_of(number: int) -> str:
        """The id that a request has here."""
        return f"request {number}"

    def get(self, number: int) -> Any:
        """The request. UnknownRequestError if there is none."""
        request = self._requests.get(number)
        if request is None:
            raise UnknownRequestError(f"there is no request {number}")
        return request

    def named(self, number: int) -> Any:
        """The request, or one that has no more than the id."""
        return self._requests.get(number) or OtherRequest(self.id_of(number))

    def forget(self, number: int) -> None:
        """It has left."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._num_tokens -= request.num_tokens

    def forget_all(self) -> None:
        """A snapshot: all are told anew."""
        self._requests.clear()
        self._num_tokens = 0

    def update(self, state: RequestState) -> None:
        """What was told of a request.

        Raises:
            UnknownRequestError: it goes on from hashes that there are not.
            CostError: too many requests or tokens.
        """
        request = self._requests.get(state.request)
        if request is None or isinstance(request, Request) != state.is_own:
            self.forget(state.request)
            request = self._add(state)
        num_known = len(request.block_hashes)
        if state.num_kept_hashes > num_known:
            raise UnknownRequestError(
                f"{state.num_kept_hashes} hashes of request {state.request}, which has {num_known}"
            )
        self.set_tokens(state.request, state.num_tokens)
        hashes = request.block_hashes
        del hashes[state.num_kept_hashes :]
        hashes += state.new_hashes
        request.block_hashes = hashes
        request.num_prompt_tokens = state.num_prompt_tokens
        request.num_computed_tokens = state.num_computed_tokens
        request.num_in_flight_tokens = state.num_in_flight_tokens
        request.shared_prefix_boundary = state.shared_prefix_boundary
        request.skip_reading_prefix_cache = state.skip_reading_prefix_cache
        request.status = _OWN_STATUSES[state.status] if state.has_own_status else OtherStatus(state.status)

    def add_hashes(self, new: NewHashes) -> None:
        """One for each of some requests. UnknownRequestError if one is not there, or without a hash."""
        numbers = unpack(new.requests)
        if len(numbers) != len(new.hashes):
            raise UnknownRequestError(f"{len(new.hashes)} hashes for {len(numbers)} requests")
        for number, block_hash in zip(numbers, new.hashes):
            self.get(number).block_hashes.append(block_hash)

    def _add(self, state: RequestState) -> Any:
        if len(self._requests) >= self._limits.max_requests:
            raise CostError(f"more than {self._limits.max_requests:,} requests at a time")
        request_id = self.id_of(state.request)
        request = Request(request_id, [], arrival_time=0.0) if state.is_own else OtherRequest(request_id)
        self._requests[state.request] = request
        return request

    def set_tokens(self, number: int, num_tokens: int) -> None:
        """Gives a request so many tokens; its hashes stay. CostError, see ``update``."""
        request = self.get(number)
        if not 0 <= num_tokens <= self._limits.max_tokens:
            raise CostError(
                f"request {number} has {num_tokens:,} tokens, more than {self._limits.max_tokens:,} (--max-tokens"
                " raises the limit)"
            )
        num_before = request.num_tokens
        if num_tokens == num_before:
            return
        self._num_tokens += num_tokens - num_before
        if self._num_tokens > self._limits.max_total_tokens:
            raise CostError(f"requests of more than {self._limits.max_total_tokens:,} tokens together")
        if isinstance(request, Request):
            hashes = request.block_hashes
            del request._all_token_ids[num_tokens:]
            request._all_token_ids.extend([0] * (num_tokens - num_before))
            request.block_hashes = hashes  # they do not follow the tokens here
        else:
            request.num_tokens = num_tokens
            request.all_token_ids = [0] * num_tokens
