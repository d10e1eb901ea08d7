"""How requests come to a scheduler, change between its queues, and leave: everything but the steps themselves."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError
from kvpool.kv_cache_spec import CrossAttentionSpec
from kvpool.request_status import RequestStatus
from kvpool.scheduler.admission import require_fit
from kvpool.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvpool.scheduler.queue import create_request_queue
from kvpool.scheduler.stats import Counts, SchedulerStats

if TYPE_CHECKING:
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.request import Request
    from kvpool.scheduler.in_flight import StepUnderWay


class RequestLifecycle:
    """The part of ``Scheduler``, which documents the arguments and attributes, that owns the queues.

    A request is WAITING, then RUNNING, perhaps PREEMPTED and RUNNING again, and finally one of FINISHED_*. Only here
    does a status change, together with the queue that the request is in and the blocks that it has.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.config = config = config or SchedulerConfig()
        self.max_model_len: int = kv_cache_manager.max_model_len
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_model_len:
            raise InvalidArgumentError(
                f"without chunked prefill a step of {config.max_num_batched_tokens} tokens can't compute a sequence of "
                f"max_model_len, {self.max_model_len} tokens"
            )
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        if any(isinstance(group.kv_cache_spec, CrossAttentionSpec) for group in groups):
            raise InvalidArgumentError("this scheduler knows no encoder inputs, which a cross-attention group needs")
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(SchedulingPolicy(config.policy))
        self.running: list[Request] = []
        self.steps_under_way: deque[StepUnderWay] = deque()
        self._stop_token_ids: dict[str, frozenset[int]] = {}  # of requests that have some of their own
        self._finished_request_ids: list[str] = []  # since the last step
        self._preempted_request_ids: list[str] = []  # since the last step
        self._counts = Counts()

    def add_request(self, request: Request, stop_token_ids: Iterable[int] = ()) -> None:
        """Queues a request. O(1), with the policy "priority" O(log n).

        Args:
            request: new, or at least waiting and without computed tokens.
            stop_token_ids: tokens that end this request, beside those of the configuration.

        Raises:
            RequestTooLargeError: at its full length it would not fit into the empty cache; the message says how many
                blocks it needs and how many there are.
            InvalidArgumentError: the id is taken; the request isn't waiting; the prompt is empty or leaves no room for
                a token within ``max_model_len``; prefix caching is on, and its block hashes are missing.
        """
        if request.request_id in self.requests:
            raise InvalidArgumentError(f"there is an unfinished request with the id {request.request_id!r}")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise InvalidArgumentError(f"request {request.request_id!r} has been used: {request.status.name}")
        require_fit(request, self.kv_cache_manager)
        own_stop_token_ids = frozenset(stop_token_ids)
        self.waiting.add_request(request)
        self.requests[request.request_id] = request
        if own_stop_token_ids:
            self._stop_token_ids[request.request_id] = own_stop_token_ids | self.config.stop_token_ids

    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        finished_status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[Request]:
        """Ends requests from outside, whatever they are doing: by default an abort.

        Their blocks are free when the call returns. Tokens of a step that is under way are dropped when they come.

        Args:
            request_ids: one id, several, or None for all; unknown and finished ones are skipped.
            finished_status: a finished status.

        Returns:
            The requests that this call ended, in the order of the ids.

        Raises:
            InvalidArgumentError: the status isn't a finished one.
        """
        if not RequestStatus.is_finished(finished_status):
            raise InvalidArgumentError(f"{finished_status!r} is no status of a finished request")
        if request_ids is None:
            ended = list(self.requests.values())
        else:
            wanted = [request_ids] if isinstance(request_ids, str) else dict.fromkeys(request_ids)
            ended = [self.requests[request_id] for request_id in wanted if request_id in self.requests]
        self._end([(request, finished_status) for request in ended])
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether there are unfinished requests, or finished ones that workers have not been told of."""
        return bool(self.requests or self._finished_request_ids)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Numbers of the running and of the waiting requests."""
        return len(self.running), len(self.waiting)

    def make_stats(self) -> SchedulerStats:
        """State now, and counters since the scheduler was made; nothing is reset."""
        return self._counts.to_stats(len(self.running), len(self.waiting), self.kv_cache_manager.usage)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets what the prefix cache holds, e.g. because the weights have changed.

        Args:
            reset_running_requests: preempt all running requests first, so that nothing is in use. They start over
                with the tokens they have.

        Returns:
            Whether the cache is empty now; False while requests run that were not to be preempted.
        """
        if reset_running_requests:
            while self.running:  # the last one first: the front of the queue is the first again
                self._preempt(self.running.pop())
        return self.kv_cache_manager.reset_prefix_cache()

    # ---- changes of status ----

    def _move_to_running(self, request: Request, num_computed_tokens: int) -> None:
        """The front of ``waiting`` starts, with so many tokens of its prefix hit computed."""
        self.waiting.pop_request()
        if self.config.policy is SchedulingPolicy.PRIORITY:
            insort(self.running, request, key=self.order_of_service)
        else:
            self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens

    def order_of_service(self, request: Request) -> tuple[int, float, str]:
        """Sorts running requests; first come, first served keeps them as they were admitted."""
        if self.config.policy is SchedulingPolicy.PRIORITY:
            return request.priority, request.arrival_time, request.request_id
        return 0, 0.0, ""

    def _preempt(self, request: Request) -> None:
        """Takes a request's blocks and queues it again; it has left ``running``."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        self._preempted_request_ids.append(request.request_id)
        self._counts.preemptions += 1

    def _end(self, ended: list[tuple[Request, RequestStatus]]) -> None:
        """Takes requests out of their queues, ``running`` in one walk, and frees what they hold."""
        leaving = set()
        for request, _ in ended:
            if request.status is RequestStatus.RUNNING:
                leaving.add(request.request_id)
            else:
                self.waiting.remove_request(request)
        if leaving:
            self.running = [request for request in self.running if request.request_id not in leaving]
        for request, status in ended:
            request.status = status
            self.kv_cache_manager.free(request)
            del self.requests[request.request_id]
            self._stop_token_ids.pop(request.request_id, None)
            self._finished_request_ids.append(request.request_id)
        self._counts.finished_requests += len(ended)
