"""How a step is taken back that was planned, and whose tokens will not come: it failed, or was interrupted.

Blocks become findable when they are allocated. If nobody computes them, the next request with that prefix would read
whatever is in them: so a step that fails must not just be forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError
from kvpool.requests.status import RequestStatus
from kvpool.scheduler.in_flight import Admission, News, StepUnderWay
from kvpool.scheduler.lifecycle import RequestLifecycle
from kvpool.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.scheduler.config import SchedulerConfig


class StepWithdrawal(RequestLifecycle):
    """The part of ``Scheduler`` that takes steps back."""

    def __init__(self, kv_cache_manager: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        super().__init__(kv_cache_manager, config)
        self._step_number = 0
        self._last_taken_step = 0  # the step whose tokens came last

    def withdraw(self, scheduler_output: SchedulerOutput | None = None) -> list[str]:
        """Takes back a step whose tokens will not come, and the steps after it. O(requests + blocks of the steps).

        Their requests, with their tokens and counts, are what they were before the step, and will be scheduled again
        unless ``finish_requests`` ends them. Blocks that the step took are free, and blocks that it made findable are
        so no more; it doesn't matter whether workers have executed all of it, a part, or nothing. The next message
        tells workers whole block tables.

        What a step gave up stays given up, as workers may have written over it: evicted blocks, those outside of
        windows, and the blocks of preempted requests, which wait. Where layers keep Mamba states, the step's requests
        are preempted as well. Counts of the manager's look-ups stay.

        Args:
            scheduler_output: the step, as ``schedule()`` returned it or a decoded copy, also one without tokens, whose
                news workers may have missed; None: all that are under way.

        Returns:
            The ids of the unfinished requests of these steps.

        Raises:
            InvalidArgumentError: the step is not under way: its tokens were taken, or it was withdrawn.
        """
        self._settle()
        first = 0 if scheduler_output is None else scheduler_output.step
        has_tokens = scheduler_output is None or bool(scheduler_output.num_scheduled_tokens)
        numbers = [step.number for step in self.steps_under_way]
        is_possible = first in numbers if has_tokens else self._last_taken_step < first <= self._step_number
        if scheduler_output is not None and not is_possible:
            raise InvalidArgumentError(f"step {first} is not under way; these are: {numbers}")
        ids = [
            request.request_id
            for step in self.steps_under_way
            if step.number >= first
            for request in step.requests
            if self.requests.get(request.request_id) is request
        ]
        try:
            while self.steps_under_way and self.steps_under_way[-1].number >= first:
                take_back = partial(self._take_back_last, self.steps_under_way[-1])
                self._change = take_back
                take_back()
                self._change = None
        except BaseException:
            self._settle()
            raise
        if scheduler_output is not None and not has_tokens:  # it has told workers who is gone, no more
            told = News(list(scheduler_output.finished_request_ids), list(scheduler_output.preempted_request_ids))
            self._news = told.joined_with(self._news)
        return list(dict.fromkeys(ids))

    def _take_back_last(self, step: StepUnderWay) -> None:
        if self.steps_under_way and self.steps_under_way[-1] is step:
            self.steps_under_way.pop()
        self._take_back(step, is_told=True)

    def _take_back_planned(self, step: StepUnderWay) -> None:
        """A step that was being put together: no worker knows of it, and a call of the manager may have been
        interrupted."""
        if self.steps_under_way and self.steps_under_way[-1] is step:
            self.steps_under_way.pop()
        self._resent_ids.update(step.resent_ids)
        self._introduced_ids.update(step.introduced_ids)
        self.kv_cache_manager.drop_pending()
        self._take_back(step, is_told=False)

    def _take_back(self, step: StepUnderWay, *, is_told: bool) -> None:
        """Sets everything to what it was; where a part has been done, nothing changes."""
        manager = self.kv_cache_manager
        manager.evict_blocks({*step.abandoned_block_ids, *step.copied_block_ids})
        for admission in reversed(step.admitted):
            self._take_back_admission(admission, is_told=is_told)
        admitted = {id(admission.request) for admission in step.admitted}
        counts = step.num_computed_tokens or [request.num_computed_tokens for request in step.requests]
        running = dict(zip(step.requests, counts))
        for request in step.touched:
            running.setdefault(request, request.num_computed_tokens)
        for request, num_computed_tokens in running.items():
            if id(request) not in admitted and request.status is RequestStatus.RUNNING:
                self._take_back_tokens(request, num_computed_tokens, is_told=is_told)
        self._count_in_flight(step.requests)
        if step.news is not None:
            self._news = step.news.joined_with(self._news)
        self._counts.take_back_steps(step.counts)

    def _count_in_flight(self, requests: Iterable[Request]) -> None:
        in_flight = Counter[int]()
        for step in self.steps_under_way:
            for request, num_tokens in zip(step.requests, step.num_tokens):
                in_flight[id(request)] += num_tokens
        for request in requests:
            request.num_in_flight_tokens = in_flight[id(request)]

    def _take_back_tokens(self, request: Request, num_computed_tokens: int, *, is_told: bool) -> None:
        manager = self.kv_cache_manager
        request.num_computed_tokens = num_computed_tokens
        manager.take_back(request, num_computed_tokens)
        if manager.has_recurrent_states:
            self._preempt(request)
        elif is_told:
            self._resent_ids.add(request.request_id)
            self._news.preempted_request_ids.append(request.request_id)

    def _take_back_admission(self, admission: Admission, *, is_told: bool) -> None:
        request, manager = admission.request, self.kv_cache_manager
        if self.requests.get(request.request_id) is not request:
            return  # ended since
        if request.num_preemptions == admission.num_preemptions:
            manager.take_back(request, admission.num_hit_tokens)
            self._stop_running(request)
            manager.free(request)
            request.status = admission.status
            request.num_computed_tokens = 0
            self._requeue(request)
        if is_told:
            # Workers may know it from the step, or not: they forget it, and it is new once more.
            if admission.is_introduction:
                self._introduced_ids.add(request.request_id)
                self._news.finished_request_ids.append(request.request_id)
            else:
                self._news.preempted_request_ids.append(request.request_id)
