"""How long blocks live in the cache, how long they lie idle before they are evicted, and how often they are used.

A sample of the blocks is followed from allocation to eviction; the pool calls the ``on_`` methods. Times come from
the monotonic clock. What was measured is kept twice: sample by sample until somebody drains them, up to a bound, and
in histograms since creation, for readers that must not take samples away from each other.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from kvpool.errors import InvalidArgumentError
from kvpool.metrics.stats import Histogram
from kvpool.pool.interface import Block

DEFAULT_SAMPLE_RATE = 0.01
DEFAULT_MAX_EVICTION_SAMPLES = 65_536
MAX_ACCESSES_REMEMBERED = 4

_NS_PER_SECOND = 1e9


@dataclass
class KVCacheEvictionEvent:
    """What a sampled block's life was like, told when it is evicted.

    Attributes:
        lifetime_seconds: since its allocation.
        idle_seconds: since its last access, or its allocation if nothing hit it.
        reuse_gaps_seconds: between its last accesses, oldest first.
    """

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


class BlockMetricsState:
    """Times of one sampled block, nanoseconds of the monotonic clock."""

    __slots__ = ("access_history", "birth_time_ns", "last_access_ns")

    def __init__(self) -> None:
        self.birth_time_ns = self.last_access_ns = time.monotonic_ns()
        self.access_history: deque[int] = deque(maxlen=MAX_ACCESSES_REMEMBERED)

    def record_access(self) -> None:
        """The block was hit now."""
        self.last_access_ns = time.monotonic_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        """Time since allocation, seconds."""
        return (time.monotonic_ns() - self.birth_time_ns) / _NS_PER_SECOND

    def get_idle_time_seconds(self) -> float:
        """Time since the last access, or since allocation without one, seconds."""
        return (time.monotonic_ns() - self.last_access_ns) / _NS_PER_SECOND

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Times between the remembered accesses, seconds, oldest first; [] with fewer than two."""
        times = list(self.access_history)
        return [(later - earlier) / _NS_PER_SECOND for earlier, later in pairwise(times)]


class KVCacheMetricsCollector:
    """Follows a sample of the blocks of a pool.

    Args:
        sample_rate: share of allocations to follow, above 0 and at most 1 (InvalidArgumentError).
        max_eviction_samples: eviction samples kept until ``drain_events``; beyond that the oldest are dropped.
            None keeps all (as vLLM), without bound if nobody drains.
        cached_only: a block that carries no hash when it is reused was not evicted, and is no sample. By default
            (as vLLM) it is one.

    Attributes:
        block_metrics: state of the sampled blocks by block id.
        dropped_samples: eviction samples lost to ``max_eviction_samples``, since creation.
        lifetime_histogram, idle_histogram, reuse_gap_histogram: all samples since creation, seconds; neither draining
            nor a reset of the cache empties them.

    vLLM: ``KVCacheMetricsCollector``.
    """

    def __init__(
        self,
        sample_rate: float = DEFAULT_SAMPLE_RATE,
        *,
        max_eviction_samples: int | None = DEFAULT_MAX_EVICTION_SAMPLES,
        cached_only: bool = False,
    ) -> None:
        if not 0 < sample_rate <= 1.0:
            raise InvalidArgumentError(f"sample_rate must be above 0 and at most 1, not {sample_rate}")
        if max_eviction_samples is not None and max_eviction_samples < 1:
            raise InvalidArgumentError(f"max_eviction_samples must be at least 1, not {max_eviction_samples}")
        self.sample_rate = sample_rate
        self.max_eviction_samples = max_eviction_samples
        self.cached_only = cached_only
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self.dropped_samples = 0
        self._eviction_events: deque[KVCacheEvictionEvent] = deque(maxlen=max_eviction_samples)
        self.lifetime_histogram = Histogram()
        self.idle_histogram = Histogram()
        self.reuse_gap_histogram = Histogram()

    def should_sample_block(self) -> bool:
        """Whether to follow the block that is being allocated."""
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: Block) -> None:
        """A block was taken from the free list."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: Block) -> None:
        """A block got one more user."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: Block) -> None:
        """A block is about to lose its hashes, or (unless ``cached_only``) is reused without having had any."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is None or (self.cached_only and block.block_hash is None):
            return
        sample = KVCacheEvictionEvent(
            lifetime_seconds=state.get_lifetime_seconds(),
            idle_seconds=state.get_idle_time_seconds(),
            reuse_gaps_seconds=tuple(state.get_reuse_gaps_seconds()),
        )
        self.lifetime_histogram.observe(sample.lifetime_seconds)
        self.idle_histogram.observe(sample.idle_seconds)
        for gap in sample.reuse_gaps_seconds:
            self.reuse_gap_histogram.observe(gap)
        if len(self._eviction_events) == self.max_eviction_samples:
            self.dropped_samples += 1
        self._eviction_events.append(sample)

    def reset(self) -> None:
        """The cache was reset: forget the sampled blocks and the samples not drained yet."""
        self.block_metrics.clear()
        self._eviction_events.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The eviction samples since the last call, oldest first."""
        events = list(self._eviction_events)
        self._eviction_events.clear()
        return events
