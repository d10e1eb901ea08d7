"""Counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """State of a scheduler, and what it has done since it was made.

    A request that was preempted looks its own tokens up when it resumes: these queries and hits say nothing about how
    much requests share, and are counted apart.

    Attributes:
        num_running_requests, num_waiting_requests: now; the preempted ones wait.
        kv_cache_usage: share of the blocks in use now, 0 to 1.
        num_steps: steps in which at least one token was scheduled.
        num_scheduled_tokens: tokens of all steps; those computed again after a preemption count again.
        num_preemptions: of all requests.
        num_finished_requests: stopped, at their maximum length, or aborted.
        prefix_query_tokens, prefix_hit_tokens: tokens of requests at their first admission, and how many of them the
            prefix cache had.
        resumed_query_tokens, resumed_hit_tokens: the same at the admissions after a preemption.
    """

    num_running_requests: int = 0
    num_waiting_requests: int = 0
    kv_cache_usage: float = 0.0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_finished_requests: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens of first admissions that were hits; 0 before the first."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass
class Counts:
    """What is counted along the way; see SchedulerStats."""

    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0

    def add_lookup(self, num_tokens: int, num_hit_tokens: int, *, is_resumed: bool) -> None:
        """A request of so many tokens was admitted, and so many were in the prefix cache."""
        if is_resumed:
            self.resumed_query_tokens += num_tokens
            self.resumed_hit_tokens += num_hit_tokens
        else:
            self.prefix_query_tokens += num_tokens
            self.prefix_hit_tokens += num_hit_tokens

    def of_steps(self) -> tuple[int, ...]:
        """What only steps count, for ``take_back_steps``."""
        return (
            self.steps,
            self.scheduled_tokens,
            self.prefix_query_tokens,
            self.prefix_hit_tokens,
            self.resumed_query_tokens,
            self.resumed_hit_tokens,
        )

    def take_back_steps(self, before: tuple[int, ...]) -> None:
        """Drops what steps have counted that were withdrawn; what they gave up for good stays."""
        self.steps, self.scheduled_tokens, self.prefix_query_tokens, self.prefix_hit_tokens = before[:4]
        self.resumed_query_tokens, self.resumed_hit_tokens = before[4:]

    def to_stats(self, num_running: int, num_waiting: int, usage: float) -> SchedulerStats:
        """The counts, and what the scheduler is like now."""
        return SchedulerStats(
            num_running_requests=num_running,
            num_waiting_requests=num_waiting,
            kv_cache_usage=usage,
            num_steps=self.steps,
            num_scheduled_tokens=self.scheduled_tokens,
            num_preemptions=self.preemptions,
            num_finished_requests=self.finished_requests,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            resumed_query_tokens=self.resumed_query_tokens,
            resumed_hit_tokens=self.resumed_hit_tokens,
        )
