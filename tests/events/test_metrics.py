"""The metrics collector: what a pool tells it, and what it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pool_state import CallLog, block_ids

from kvpool.errors import InvalidArgumentError
from kvpool.metrics import residency
from kvpool.metrics.residency import KVCacheMetricsCollector


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(residency, "time", clock)
    return clock


def test_a_pool_tells_its_collector(make_pool: Any, make_request: Any) -> None:
    log = CallLog()
    pool = make_pool(4, metrics_collector=log)
    assert pool.metrics_collector is log
    blocks = pool.get_new_blocks(2)
    assert log.take() == [("evicted", 1), ("allocated", 1), ("evicted", 2), ("allocated", 2)]
    pool.cache_full_blocks(make_request(range(4)), blocks, 0, 1, 4, 0)
    pool.touch([blocks[1], blocks[0], blocks[1], pool.null_block])
    assert log.take() == [("accessed", 2), ("accessed", 1), ("accessed", 2), ("accessed", 0)]
    pool.touch_ids(memoryview(b"\2\0\0\0\1\0\0\0").cast("i"))
    assert log.take() == [("accessed", 2), ("accessed", 1)]
    pool.evict_blocks([1, 3])
    assert log.take() == [("evicted", 1), ("evicted", 3)]
    assert pool.reset_prefix_cache() is False
    pool.free_blocks(blocks * 2 + blocks + [blocks[1]])
    assert log.take() == []
    assert pool.reset_prefix_cache() is True
    assert log.take() == [("reset", -1)]
    pool.allocate_ids(1)
    assert [name for name, _ in log.take()] == ["evicted", "allocated"]


def test_nothing_is_evicted_with_caching_off(make_pool: Any) -> None:
    log = CallLog()
    pool = make_pool(4, enable_caching=False, metrics_collector=log)
    pool.free_blocks(pool.get_new_blocks(2))
    pool.get_new_blocks(1)
    assert log.take() == [("allocated", 1), ("allocated", 2), ("allocated", 1)]


def test_a_refused_touch_tells_nothing(make_pool: Any, backend: Any) -> None:
    log = CallLog()
    pool = make_pool(4, metrics_collector=log)
    with pytest.raises(RuntimeError):
        pool.touch([pool.blocks[1], backend.KVCacheBlock(2)])
    with pytest.raises(ValueError):
        pool.get_new_blocks(4)
    assert log.take() == []


def test_a_collector_that_raises_takes_no_block_away(make_pool: Any) -> None:
    log = CallLog()
    pool = make_pool(4, metrics_collector=log)

    def fail(block: Any) -> None:
        if block.block_id == 2:
            raise RuntimeError("no room for samples")

    log.on_block_allocated = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no room"):
        pool.get_new_blocks(3)
    pool.check()
    assert pool.get_num_free_blocks() == 3
    assert block_ids(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3]


@pytest.mark.parametrize("rate", [0, -1, 1.5])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(AssertionError) as raised:
        KVCacheMetricsCollector(rate)
    assert type(raised.value) is InvalidArgumentError


def test_a_block_is_sampled_from_allocation_to_eviction(make_pool: Any, make_request: Any, clock: Clock) -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = make_pool(3, metrics_collector=collector)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(make_request(range(8)), blocks, 0, 2, 4, 0)
    assert set(collector.block_metrics) == {1, 2}
    for clock.seconds in (101.0, 103.0, 107.0):
        pool.touch(blocks[:1])
    pool.free_blocks(blocks + blocks[:1] * 3)
    clock.seconds = 110.0
    assert collector.drain_events() == []
    pool.get_new_blocks(2)
    by_id = dict(zip([2, 1], collector.drain_events()))
    assert (by_id[1].lifetime_seconds, by_id[1].idle_seconds) == (10.0, 3.0)
    assert by_id[1].reuse_gaps_seconds == (2.0, 4.0)
    assert (by_id[2].lifetime_seconds, by_id[2].idle_seconds, by_id[2].reuse_gaps_seconds) == (10.0, 10.0, ())
    assert collector.drain_events() == []


def test_four_accesses_are_remembered(clock: Clock) -> None:
    state = residency.BlockMetricsState()
    for clock.seconds in (101.0, 102.0, 104.0, 108.0, 116.0):
        state.record_access()
    assert state.get_reuse_gaps_seconds() == [2.0, 4.0, 8.0]
    assert state.get_lifetime_seconds() == 16.0 and state.get_idle_time_seconds() == 0.0


def test_uncached_blocks_are_samples_too_as_in_vllm(make_pool: Any) -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = make_pool(3, metrics_collector=collector)
    pool.free_blocks(pool.get_new_blocks(2))
    pool.get_new_blocks(2)
    assert len(collector.drain_events()) == 2


def test_samples_are_bounded_and_the_oldest_go_first(make_pool: Any) -> None:
    collector = KVCacheMetricsCollector(1.0, max_eviction_samples=5)
    pool = make_pool(3, metrics_collector=collector)
    for _ in range(1000):
        pool.free_blocks(pool.get_new_blocks(2))
    assert collector.dropped_samples == 1998 - 5
    assert len(collector.drain_events()) == 5
    unbounded = KVCacheMetricsCollector(1.0, max_eviction_samples=None)
    pool.metrics_collector = unbounded
    for _ in range(1000):
        pool.free_blocks(pool.get_new_blocks(2))
    assert len(unbounded.drain_events()) == 1998
    with pytest.raises(InvalidArgumentError):
        KVCacheMetricsCollector(1.0, max_eviction_samples=0)


def test_a_share_of_the_allocations_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.24, 0.25, 0.9, 0.0])
    monkeypatch.setattr(residency, "random", SimpleNamespace(random=lambda: next(draws)))
    collector = KVCacheMetricsCollector(0.25)
    assert [collector.should_sample_block() for _ in range(4)] == [True, False, False, True]


def test_a_reset_forgets(make_pool: Any) -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = make_pool(3, metrics_collector=collector)
    pool.free_blocks(pool.get_new_blocks(2))
    pool.free_blocks(pool.get_new_blocks(2))
    assert collector.block_metrics
    assert pool.reset_prefix_cache() is True
    assert collector.block_metrics == {} and collector.drain_events() == []
