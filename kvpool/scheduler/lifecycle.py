"""How requests come to a scheduler, change between its queues, and leave: everything but the steps themselves."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvpool.cache.spec import CrossAttentionSpec
from kvpool.common.arguments import to_int
from kvpool.errors import InvalidArgumentError
from kvpool.requests.status import RequestStatus
from kvpool.scheduler.admission import require_fit
from kvpool.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvpool.scheduler.in_flight import News
from kvpool.scheduler.output import RequestOutput
from kvpool.scheduler.queue import create_request_queue
from kvpool.scheduler.stats import Counts, SchedulerStats

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.scheduler.in_flight import StepUnderWay


class RequestLifecycle:
    """The part of ``Scheduler``, which documents the arguments and attributes, that owns the queues.

    A request is WAITING, then RUNNING, perhaps PREEMPTED and RUNNING again, and finally one of FINISHED_*. Only here
    does a status change, together with the queue that the request is in and the blocks that it has; a step that is
    withdrawn sets it back (``withdrawal``).

    A call has happened or has not, also where an exception ends it at any place: one of a hasher or a collector, want
    of memory, Ctrl-C. Each call notes in ``_change`` what takes it back or completes it, before its first change, and
    drops the note with its last one. What is noted can be run again from its start, should it be interrupted too. That
    holds as far as the calls of the pool do: the native ones can't be interrupted, those of the twin can.
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
        self._news = News()
        self._resent_ids: set[str] = set()  # who runs, and whose block table workers may not know as it is
        self._introduced_ids: set[str] = set()  # who waits, was told to workers as new, and has to be told so again
        self._counts = Counts()
        self._change: Callable[[], None] | None = None
        self._preemption: Callable[[], None] | None = None  # the same for a preemption, as part of another change
        self.outputs: list[RequestOutput] = []

    def _settle(self) -> None:
        """Takes a call back that was interrupted, or completes it, so that it has happened or has not."""
        if self._change is None and self._preemption is None:
            return
        if self._preemption is not None:
            self._preemption()
            self._preemption = None
        if self._change is not None:
            self._change()
        self.kv_cache_manager.release_orphans()
        self._change = None

    def add_request(self, request: Request, stop_token_ids: Iterable[int] = ()) -> None:
        """Queues a request. O(1), with the policy "priority" O(log n).

        Args:
            request: new, or at least waiting and without computed tokens.
            stop_token_ids: tokens that end this request, beside those of the configuration.

        Raises:
            TypeError: a stop token that is no integer.
            RequestTooLargeError: at its full length it would not fit into the empty cache; the message says how many
                blocks it needs and how many there are.
            InvalidArgumentError: the id is taken; the request isn't waiting; the prompt is empty or leaves no room for
                a token within ``max_model_len``; prefix caching is on, and its block hashes are missing.
        """
        own_stop_token_ids = frozenset(to_int("a stop token id", token_id) for token_id in stop_token_ids)
        self._settle()
        if request.request_id in self.requests:
            raise InvalidArgumentError(f"there is an unfinished request with the id {request.request_id!r}")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise InvalidArgumentError(f"request {request.request_id!r} has been used: {request.status.name}")
        require_fit(request, self.kv_cache_manager)
        self._change = partial(self._forget, request)
        try:
            self.waiting.add_request(request)
            self.requests[request.request_id] = request
            if own_stop_token_ids:
                self._stop_token_ids[request.request_id] = own_stop_token_ids | self.config.stop_token_ids
            self._change = None
        except BaseException:
            self._settle()
            raise

    def _forget(self, request: Request) -> None:
        """As if it had not been added."""
        if request in self.waiting:
            self.waiting.remove_request(request)
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
        if request.request_id not in self.requests:
            self._stop_token_ids.pop(request.request_id, None)

    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        finished_status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[Request]:
        """Ends requests from outside, whatever they are doing: by default an abort.

        Their blocks are free when the call returns. Tokens of a step that is under way are dropped when they come.
        After an error (FINISHED_ERROR), what nobody else uses of its cached blocks can't be hit any more.

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
        self._settle()
        if request_ids is None:
            ended = list(self.requests.values())
        else:
            wanted = [request_ids] if isinstance(request_ids, str) else dict.fromkeys(request_ids)
            ended = [self.requests[request_id] for request_id in wanted if request_id in self.requests]
        try:
            self._end([(request, finished_status) for request in ended])
        except BaseException:
            self._settle()
            raise
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether there are unfinished requests, or finished ones that workers have not been told of."""
        return bool(self.requests or self._news.finished_request_ids)

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
        self._settle()
        if reset_running_requests:
            self._change = self._preempt_all
            try:
                self._preempt_all()
                self._change = None
            except BaseException:
                self._settle()
                raise
        return self.kv_cache_manager.reset_prefix_cache()

    def _preempt_all(self) -> None:
        while self.running:  # the last one first: the front of the queue is the first again
            self._preempt(self.running[-1])

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
        """Takes a running request's blocks and queues it again."""
        counted = request.num_preemptions + 1, self._counts.preemptions + 1
        self._preemption = partial(self._complete_preemption, request, *counted)
        self._preemption()
        self._preemption = None

    def _complete_preemption(self, request: Request, num_preemptions: int, num_preemptions_of_all: int) -> None:
        self._note_abandoned_blocks(request)
        self._stop_running(request)
        self.kv_cache_manager.free(request)
        self._resent_ids.discard(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions = num_preemptions
        self._requeue(request)
        _append_once(self._news.preempted_request_ids, request.request_id)
        self._counts.preemptions = num_preemptions_of_all

    def _stop_running(self, request: Request) -> None:
        if self.running and self.running[-1] is request:
            self.running.pop()
        elif request in self.running:
            self.running.remove(request)

    def _requeue(self, request: Request) -> None:
        """To the front of the waiting ones, or where its priority says."""
        if request in self.waiting:
            self.waiting.remove_request(request)
        self.waiting.prepend_request(request)

    def _note_abandoned_blocks(self, request: Request) -> None:
        """A request leaves while steps compute for it: if they don't come to their end, what they were to fill must not
        be hit."""
        if not request.num_in_flight_tokens:
            return
        num_computed_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        block_ids = self.kv_cache_manager.find_uncomputed_ids(request, num_computed_tokens)
        for step in self.steps_under_way:
            if request in step.requests:
                step.abandoned_block_ids += block_ids

    def _end(self, ended: list[tuple[Request, RequestStatus]]) -> None:
        """Takes requests out of their queues, ``running`` in one walk, and frees what they hold.

        Args:
            ended: with their new statuses.
        """
        self._change = complete = partial(self._complete_end, ended, self._counts.finished_requests + len(ended))
        complete()
        self._change = None

    def _complete_end(self, ended: list[tuple[Request, RequestStatus]], num_finished_requests: int) -> None:
        leaving = set()
        for request, _ in ended:
            if request.status is RequestStatus.RUNNING:
                leaving.add(request.request_id)
            elif request in self.waiting:
                self.waiting.remove_request(request)
        if leaving:
            self.running = [request for request in self.running if request.request_id not in leaving]
        for request, status in ended:
            self._note_abandoned_blocks(request)
            if status is RequestStatus.FINISHED_ERROR:
                self.kv_cache_manager.evict_blocks(self.kv_cache_manager.find_own_cached_ids(request))
            request.status = status
            self.kv_cache_manager.free(request)
            request_id = request.request_id
            self._stop_token_ids.pop(request_id, None)
            self._resent_ids.discard(request_id)
            self._introduced_ids.discard(request_id)
            if self.requests.get(request_id) is request:
                _append_once(self._news.finished_request_ids, request_id)
                del self.requests[request_id]
        self._counts.finished_requests = num_finished_requests


def _append_once(ids: list[str], request_id: str) -> None:
    """Appends an id that the end of the list may be already."""
    if not ids or ids[-1] != request_id:
        ids.append(request_id)
