"""Queues of the requests that wait: in order of arrival, or by priority.

Both know their requests by id, so that one can leave from any place without a walk: a client that goes away must not
cost time in proportion to the length of the queue.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.config import SchedulingPolicy

if TYPE_CHECKING:
    from kvpool.backend import Request

_MIN_STALE_ENTRIES = 16  # below that a rebuild of the heap isn't worth it


class RequestQueue(ABC):
    """Waiting requests in the order in which they will be served; vLLM's class of that name.

    ``len``, truth and ``request in queue`` (identity) are O(1).
    """

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Puts a request in its place: the end of the queue, or where its priority says.

        Raises:
            InvalidArgumentError: a request with this id is in the queue.
        """

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Puts a request that has already been served back: to the front, or where its priority says.

        Raises:
            InvalidArgumentError: a request with this id is in the queue.
        """

    @abstractmethod
    def peek_request(self) -> Request:
        """The request to serve next, which stays.

        Raises:
            IndexError: the queue is empty.
        """

    @abstractmethod
    def pop_request(self) -> Request:
        """Takes the request to serve next.

        Raises:
            IndexError: the queue is empty.
        """

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Takes a request out, wherever it is.

        Raises:
            InvalidArgumentError: it isn't in the queue.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, request: object) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All requests in the order of service."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served. Every call is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        _refuse_duplicate(request, self._requests)
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("the queue is empty")

    def pop_request(self) -> Request:
        if not self._requests:
            raise IndexError("the queue is empty")
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        if request not in self:
            raise _not_queued(request)
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return self._requests.get(getattr(request, "request_id", "")) is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue(RequestQueue):
    """The smallest (priority, arrival_time, request_id) first, so that ties go to who came first.

    What has been served before has no privilege but its arrival time: ``prepend_request`` is ``add_request``. The key
    is read when a request is added. Adding and popping are O(log n), removal is O(1): its entry stays in the heap until
    it comes to the top or stale entries outnumber the live ones. Iteration is O(n log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, int]] = []  # ends with the serial number of the entry
        self._requests: dict[str, tuple[int, Request]] = {}
        self._next_serial = 0

    def add_request(self, request: Request) -> None:
        _refuse_duplicate(request, self._requests)
        serial = self._next_serial
        self._next_serial += 1  # first: no two entries have the same, also where this call is interrupted
        heapq.heappush(self._heap, (request.priority, request.arrival_time, request.request_id, serial))
        self._requests[request.request_id] = (serial, request)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def peek_request(self) -> Request:
        heap = self._heap
        while heap:
            _, _, request_id, serial = heap[0]
            found = self._requests.get(request_id)
            if found is not None and found[0] == serial:
                return found[1]
            heapq.heappop(heap)
        raise IndexError("the queue is empty")

    def pop_request(self) -> Request:
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        if request not in self:
            raise _not_queued(request)
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + _MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[int, float, str, int]) -> bool:
        found = self._requests.get(entry[2])
        return found is not None and found[0] == entry[3]

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        found = self._requests.get(getattr(request, "request_id", ""))
        return found is not None and found[1] is request

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[entry[2]][1] for entry in sorted(self._heap) if self._is_live(entry))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue that serves in the order of that policy."""
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else FCFSRequestQueue()


def _refuse_duplicate(request: Request, queued: OrderedDict[str, Request] | dict[str, tuple[int, Request]]) -> None:
    if request.request_id in queued:
        raise InvalidArgumentError(f"a request with the id {request.request_id!r} is in the queue")


def _not_queued(request: Request) -> InvalidArgumentError:
    return InvalidArgumentError(f"request {request.request_id!r} isn't in the queue")
