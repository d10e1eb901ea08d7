"""Counts of what a cache was asked for and what it had: for one interval, for recent requests, and as histograms.

Plain Python over the standard library; whoever exports them (``kvpool.metrics.prometheus``, an
engine's own log) reads them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from kvpool.errors import InvalidArgumentError

logger = logging.getLogger("kvpool")

DEFAULT_MAX_RECENT_REQUESTS = 1000

_given_warnings: set[str] = set()

# Upper bounds in seconds, vLLM's for residency times: from reuse within a step to half an hour.
RESIDENCY_BUCKETS_SECONDS: tuple[float, ...] = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


def _warn_once(message: str, *values: object) -> None:
    """Log a warning that could come with every request, the first time only."""
    if message not in _given_warnings:
        _given_warnings.add(message)
        logger.warning(message, *values)


class CacheHitSource(str, Enum):
    """Where the KV of cached tokens came from, nearest first. The last stands for a tier that does not tell.

    vLLM: ``CacheHitSource``.
    """

    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@dataclass
class BaseCacheStats:
    """Queries and hits of a cache in one interval.

    Attributes:
        reset: the cache was reset in the interval.
        requests: requests that asked.
        queries: what they asked for; the unit is the cache's.
        hits: how much of it was there.

    vLLM: ``BaseCacheStats``.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class PrefixCacheStats(BaseCacheStats):
    """Queries and hits of the prefix cache in one interval, in tokens.

    Requests that come back after a preemption are counted apart: they hit what they computed themselves, which says
    nothing of the cache.

    Attributes:
        preempted_requests, preempted_queries, preempted_hits: the three counts for requests preempted before.
        hits_by_source: ``hits`` by tier, for a cache that has several; empty otherwise.

    vLLM: ``PrefixCacheStats``.
    """

    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[CacheHitSource, int] = field(default_factory=dict)

    def record(
        self,
        num_tokens: int,
        num_hits: int,
        preempted: bool,
        hits_by_source: Mapping[CacheHitSource, int] | None = None,
    ) -> None:
        """Count one request.

        Args:
            num_tokens: tokens looked up.
            num_hits: tokens found.
            preempted: whether the request was preempted before; its hits are not split by source.
            hits_by_source: ``num_hits`` by tier. Shares that do not add up to it are counted as
                ``CacheHitSource.EXTERNAL_UNSPECIFIED``, with a warning in the log the first time.
        """
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
            return
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits
        if hits_by_source is None:
            return
        if sum(hits_by_source.values()) != num_hits:
            _warn_once("%d cached tokens were attributed as %s, which is another number", num_hits, hits_by_source)
            hits_by_source = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_hits}
        for source, num_source_hits in hits_by_source.items():
            if num_source_hits:
                self.hits_by_source[source] = self.hits_by_source.get(source, 0) + num_source_hits


class CachingMetrics:
    """Hit rate over the most recent requests.

    Args:
        max_recent_requests: how many requests count; the oldest intervals leave as a whole, the newest one stays
            however many requests it has.

    vLLM: ``CachingMetrics``.
    """

    def __init__(self, max_recent_requests: int = DEFAULT_MAX_RECENT_REQUESTS) -> None:
        self.max_recent_requests = max_recent_requests
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self._intervals: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: BaseCacheStats) -> None:
        """Add an interval. One in which the cache was reset starts over; one without requests pushes nothing out."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._intervals.append((stats.requests, stats.queries, stats.hits))
        self._add(stats.requests, stats.queries, stats.hits)
        while len(self._intervals) > 1 and self.aggregated_requests > self.max_recent_requests:
            requests, queries, hits = self._intervals.popleft()
            self._add(-requests, -queries, -hits)

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self.aggregated_requests += requests
        self.aggregated_query_total += queries
        self.aggregated_query_hit += hits

    def reset(self) -> None:
        """Forget all requests."""
        self._intervals.clear()
        self.aggregated_requests = self.aggregated_query_total = self.aggregated_query_hit = 0

    @property
    def empty(self) -> bool:
        """Whether no request counts."""
        return self.aggregated_requests == 0

    @property
    def hit_rate(self) -> float:
        """Hits per query, 0.0 to 1.0; 0.0 without queries."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total


class Histogram:
    """Values counted by bucket, since creation: bounded memory, never drained.

    One thread observes; others may read. A reader may see a value in the buckets and not yet in the sum.

    Args:
        upper_bounds: inclusive upper bounds of the buckets, rising (InvalidArgumentError); one more bucket takes
            what lies above.
    """

    __slots__ = ("_counts", "sum", "upper_bounds")

    def __init__(self, upper_bounds: Iterable[float] = RESIDENCY_BUCKETS_SECONDS) -> None:
        self.upper_bounds = tuple(upper_bounds)
        if not self.upper_bounds or any(low >= high for low, high in zip(self.upper_bounds, self.upper_bounds[1:])):
            raise InvalidArgumentError(f"bounds of buckets must rise: {self.upper_bounds}")
        self._counts = [0] * (len(self.upper_bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value. O(log buckets)."""
        self._counts[bisect_left(self.upper_bounds, value)] += 1
        self.sum += value

    def cumulative_counts(self) -> list[int]:
        """For each bound how many values lie at or below it, then how many there are."""
        return list(accumulate(self._counts))
