"""Counts of prefix cache lookups, the hit rate of recent requests, histograms, and what the collector puts in them."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidArgumentError
from kvpool.metrics import residency, stats
from kvpool.metrics.residency import KVCacheMetricsCollector
from kvpool.metrics.stats import RESIDENCY_BUCKETS_SECONDS, BaseCacheStats, CachingMetrics, Histogram, PrefixCacheStats

HOST, DISK, UNKNOWN = (
    stats.CacheHitSource.HOST,
    stats.CacheHitSource.DISK,
    stats.CacheHitSource.EXTERNAL_UNSPECIFIED,
)


def test_requests_are_counted_and_preempted_ones_apart() -> None:
    counts = PrefixCacheStats()
    counts.record(num_tokens=10, num_hits=0, preempted=False)
    counts.record(num_tokens=20, num_hits=16, preempted=False)
    counts.record(num_tokens=12, num_hits=8, preempted=True)
    assert counts == PrefixCacheStats(
        requests=2, queries=30, hits=16, preempted_requests=1, preempted_queries=12, preempted_hits=8
    )
    assert counts.reset is False and counts.hits_by_source == {}


def test_hits_are_split_by_their_source() -> None:
    counts = PrefixCacheStats()
    counts.record(10, 8, False, {HOST: 8, DISK: 0})
    counts.record(10, 6, False, {HOST: 2, DISK: 4})
    counts.record(10, 4, True, {HOST: 4})
    assert counts.hits_by_source == {HOST: 10, DISK: 4}
    assert PrefixCacheStats().hits_by_source == {}


def test_shares_that_do_not_add_up_are_of_unknown_source(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "_given_warnings", set())
    counts = PrefixCacheStats()
    with caplog.at_level(logging.WARNING, "kvpool"):
        counts.record(10, 8, False, {HOST: 7})
        counts.record(10, 8, False, {HOST: 9})
    assert counts.hits_by_source == {UNKNOWN: 16} and counts.hits == 16
    assert len(caplog.records) == 1 and "8 cached tokens" in caplog.text


def interval(requests: int, queries: int, hits: int, reset: bool = False) -> BaseCacheStats:
    return BaseCacheStats(reset=reset, requests=requests, queries=queries, hits=hits)


def test_the_hit_rate_is_of_recent_requests() -> None:
    recent = CachingMetrics(max_recent_requests=5)
    assert recent.empty and recent.hit_rate == 0.0
    recent.observe(interval(3, 30, 0))
    recent.observe(interval(2, 20, 20))
    assert recent.hit_rate == 0.4
    recent.observe(interval(0, 0, 0))
    recent.observe(interval(1, 10, 10))
    assert recent.hit_rate == 1.0 and recent.aggregated_requests == 3
    recent.observe(interval(9, 100, 25))
    assert recent.hit_rate == 0.25, "the newest interval counts however large it is"
    recent.observe(interval(1, 10, 5, reset=True))
    assert recent.hit_rate == 0.5 and not recent.empty
    recent.observe(interval(0, 0, 0, reset=True))
    assert recent.empty
    recent.observe(interval(1, 0, 0))
    assert recent.hit_rate == 0.0 and not recent.empty


@given(st.lists(st.floats(0, 4000) | st.sampled_from(RESIDENCY_BUCKETS_SECONDS), max_size=50))
def test_a_histogram_counts_by_inclusive_upper_bound(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    at_most = [sum(value <= bound for value in values) for bound in RESIDENCY_BUCKETS_SECONDS]
    assert histogram.cumulative_counts() == [*at_most, len(values)]
    assert histogram.sum == pytest.approx(sum(values))


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        Histogram(bounds)


def evict_all(pool: Any, make_request: Any, is_cached: bool) -> None:
    """Allocate all blocks, cache them or not, free them and allocate them again."""
    blocks = pool.get_new_blocks(pool.num_gpu_blocks - 1)
    if is_cached:
        request = make_request(range(4 * len(blocks)))
        pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    pool.free_blocks(blocks)
    pool.free_blocks(pool.get_new_blocks(len(blocks)))


@pytest.mark.parametrize(("cached_only", "num_uncached_samples"), [(False, 2), (True, 0)])
def test_blocks_that_were_never_cached_can_be_left_out(
    make_pool: Any, make_request: Any, cached_only: bool, num_uncached_samples: int
) -> None:
    collector = KVCacheMetricsCollector(1.0, cached_only=cached_only)
    pool = make_pool(3, metrics_collector=collector)
    evict_all(pool, make_request, is_cached=False)
    assert len(collector.drain_events()) == num_uncached_samples
    pool.reset_prefix_cache()
    evict_all(pool, make_request, is_cached=True)
    assert len(collector.drain_events()) == 2
    assert len(collector.block_metrics) == 2, "only the blocks that were allocated last are still followed"


def test_the_default_is_vllms() -> None:
    assert KVCacheMetricsCollector().cached_only is False


def test_histograms_outlive_draining_and_resets(
    make_pool: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(residency.time, "monotonic_ns", lambda: int(now[0] * 1e9))
    collector = KVCacheMetricsCollector(1.0, max_eviction_samples=1)
    pool = make_pool(2, metrics_collector=collector)
    for _ in range(3):
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_blocks(make_request(range(4)), [block], 0, 1, 4, 0)
        for step in (2.0, 0.5):
            now[0] += step
            pool.touch([block])
        pool.free_blocks([block] * 3)
        now[0] += 8.0
    pool.get_new_blocks(1)
    assert collector.dropped_samples == 2, "only one sample is kept"
    collector.drain_events()
    pool.free_blocks([pool.blocks[1]])
    assert pool.reset_prefix_cache() is True
    assert collector.lifetime_histogram.sum == 3 * 10.5
    assert collector.idle_histogram.sum == 3 * 8.0
    assert collector.reuse_gap_histogram.sum == 3 * 0.5
    counts = dict(zip(RESIDENCY_BUCKETS_SECONDS, collector.lifetime_histogram.cumulative_counts()))
    assert (counts[10], counts[20]) == (0, 3)


def test_samples_are_bounded_whoever_drains(make_pool: Any) -> None:
    collector = KVCacheMetricsCollector(1.0, max_eviction_samples=16)
    pool = make_pool(3, metrics_collector=collector)
    for _ in range(1000):
        pool.free_blocks(pool.get_new_blocks(2))
    assert len(collector.block_metrics) <= 2
    assert len(collector.drain_events()) == 16
    assert collector.lifetime_histogram.cumulative_counts()[-1] == 1998


# Beside vLLM


@pytest.mark.vllm
def test_the_fields_are_those_of_vllm() -> None:
    theirs = pytest.importorskip("vllm.v1.metrics.stats")
    for name in ("BaseCacheStats", "PrefixCacheStats", "KVCacheEvictionEvent"):
        ours = getattr(stats, name, None) or getattr(residency, name)
        assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(getattr(theirs, name))]
    assert [(s.name, s.value) for s in stats.CacheHitSource] == [
        (s.name, s.value) for s in pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    ]
    assert RESIDENCY_BUCKETS_SECONDS == pytest.importorskip("vllm.v1.metrics.buckets").KV_CACHE_RESIDENCY_BUCKETS


@pytest.mark.vllm
def test_the_same_records_give_the_same_counts_as_vllm() -> None:
    theirs = pytest.importorskip("vllm.v1.metrics.stats")
    rng = random.Random(5)
    ours_recent, their_recent = CachingMetrics(20), theirs.CachingMetrics(20)
    for _ in range(200):
        ours, other = PrefixCacheStats(), theirs.PrefixCacheStats()
        ours.reset = other.reset = rng.random() < 0.1
        for _ in range(rng.randrange(6)):
            num_tokens = rng.randrange(1, 100)
            num_hits = rng.randrange(num_tokens)
            shares = rng.choice([None, {"host": num_hits}, {"host": 1, "disk": num_hits - 1}, {"host": num_hits + 1}])
            arguments = (num_tokens, num_hits, rng.random() < 0.3)
            for counts, source_class in ((ours, stats.CacheHitSource), (other, theirs.CacheHitSource)):
                counts.record(*arguments, shares and {source_class(name): n for name, n in shares.items()})
        for counts in (ours, other):
            counts.hits_by_source = {source.value: n for source, n in counts.hits_by_source.items()}
        assert dataclasses.asdict(ours) == dataclasses.asdict(other)
        ours_recent.observe(ours)
        their_recent.observe(other)
        assert (ours_recent.hit_rate, ours_recent.empty) == (their_recent.hit_rate, their_recent.empty)
        assert ours_recent.aggregated_requests == their_recent.aggregated_requests


@pytest.mark.vllm
def test_the_same_calls_give_the_same_samples_as_vllm(monkeypatch: pytest.MonkeyPatch, make_pool: Any) -> None:
    theirs = pytest.importorskip("vllm.v1.core.kv_cache_metrics")
    now = [0]
    monkeypatch.setattr(residency.time, "monotonic_ns", lambda: now[0])
    rng = random.Random(7)
    ours, other = KVCacheMetricsCollector(0.5), theirs.KVCacheMetricsCollector(0.5)
    blocks = make_pool(9).blocks
    for _ in range(2000):
        now[0] += rng.randrange(10**9)
        block = blocks[rng.randrange(1, 9)]
        call = rng.choice(["on_block_allocated", "on_block_accessed", "on_block_accessed", "on_block_evicted"])
        value = rng.random()
        monkeypatch.setattr(random, "random", lambda value=value: value)
        getattr(ours, call)(block)
        getattr(other, call)(block)
        assert ours.block_metrics.keys() == other.block_metrics.keys()
        if rng.randrange(50) == 0:
            samples = [dataclasses.asdict(sample) for sample in ours.drain_events()]
            assert samples == [dataclasses.asdict(sample) for sample in other.drain_events()]
        if rng.randrange(300) == 0:
            ours.reset()
            other.reset()
