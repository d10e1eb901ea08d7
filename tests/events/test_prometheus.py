"""The exporter, scraped through prometheus-client's text exposition."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import urllib.request
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvpool.errors import InvalidArgumentError
from kvpool.events.publisher import ZmqEventPublisher
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.metrics import residency
from kvpool.metrics.prometheus import COUNTERS, GAUGES, HISTOGRAMS, KVCacheExporter
from kvpool.metrics.residency import KVCacheMetricsCollector
from kvpool.metrics.stats import RESIDENCY_BUCKETS_SECONDS, PrefixCacheStats

prometheus_client = pytest.importorskip("prometheus_client")

NAMES_OF_VLLM = {
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
}


def scrape(registry: Any) -> dict[str, Any]:
    """Families by name, as a Prometheus server reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus_client.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(registry: Any) -> dict[str, float]:
    """The samples of one source, without histograms: name without prefix to value."""
    return {
        sample.name.removeprefix("kvpool:"): sample.value
        for family in scrape(registry).values()
        if family.type != "histogram"
        for sample in family.samples
    }


def a_manager(pool: Any, **attributes: Any) -> Any:
    """What the exporter reads of a cache manager."""
    return SimpleNamespace(block_pool=pool, **attributes)


def test_a_pool_is_read_when_it_is_scraped(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(11, on_invalid_free="warn")
    exporter = KVCacheExporter(pool)
    assert values(exporter.registry) == {
        "kv_cache_usage_perc": 0.0,
        "kv_cache_blocks": 10.0,
        "kv_cache_free_blocks": 10.0,
        "kv_cache_evictable_blocks": 0.0,
        "kv_cache_evictions_total": 0.0,
        "kv_cache_invalid_frees_total": 0.0,
        "kv_events_dropped_total": 0.0,
    }
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(make_request(range(12)), blocks, 0, 3, 4, 0)
    pool.free_blocks(blocks[:2])
    now = values(exporter.registry)
    assert now["kv_cache_usage_perc"] == pool.get_usage() > 0.1
    assert (now["kv_cache_free_blocks"], now["kv_cache_evictable_blocks"]) == (8.0, 2.0)
    pool.get_new_blocks(7)
    pool.free_blocks(blocks[3:])
    pool.free_blocks(blocks[3:])
    now = values(exporter.registry)
    assert (now["kv_cache_evictions_total"], now["kv_cache_invalid_frees_total"]) == (1.0, 1.0)


def test_dropped_events_are_counted(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6, enable_kv_cache_events=True, max_queued_events=2)
    for start in range(5):
        pool.cache_full_blocks(make_request(range(start, start + 4)), pool.get_new_blocks(1), 0, 1, 4, 0)
    assert values(KVCacheExporter(pool).registry)["kv_events_dropped_total"] == 3.0


def test_prefix_cache_stats_come_from_the_manager(make_pool: Any) -> None:
    pool = make_pool(2)
    interval, totals = PrefixCacheStats(), PrefixCacheStats()
    for counts in (interval, totals):
        counts.record(20, 16, preempted=False)
        counts.record(9, 9, preempted=True)
    totals.record(5, 0, preempted=False)

    def queries_and_hits(manager: Any) -> tuple[Any, Any]:
        now = values(KVCacheExporter(manager).registry)
        return now.get("prefix_cache_queries_total"), now.get("prefix_cache_hits_total")

    assert queries_and_hits(a_manager(pool, prefix_cache_stats=interval)) == (20.0, 16.0)
    assert queries_and_hits(a_manager(pool, prefix_cache_stats=interval, prefix_cache_totals=totals)) == (25.0, 16.0)
    assert queries_and_hits(a_manager(pool, prefix_cache_stats=None, prefix_cache_totals=None)) == (None, None)
    assert queries_and_hits(pool) == (None, None)


def test_a_cache_manager_is_read(backend: Any, make_request: Any) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float16")
    config = KVCacheConfig(num_blocks=9, kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, 64, log_stats=True, block_pool_class=backend.BlockPool)
    exporter = KVCacheExporter(manager)
    for request_id in ("first", "second"):
        request = make_request(
            range(10), request_id=request_id, num_tokens=10, num_preemptions=0, skip_reading_prefix_cache=False
        )
        _, num_hit_tokens = manager.get_computed_blocks(request)
        manager.record_prefix_cache_stats(request, num_hit_tokens)
        if request_id == "first":
            blocks = manager.block_pool.get_new_blocks(2)
            manager.block_pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    now = values(exporter.registry)
    assert (now["prefix_cache_queries_total"], now["prefix_cache_hits_total"]) == (20.0, 8.0)
    assert (now["kv_cache_free_blocks"], now["kv_cache_usage_perc"]) == (6.0, 0.25)


def test_a_publisher_is_read_too(make_pool: Any) -> None:
    publisher = SimpleNamespace(
        queued_batches=3,
        published_batches=7,
        dropped_batches=2,
        overflows=4,
        refused_peers=5,
        refused_requests=6,
        abandoned_replays=8,
    )
    now = values(KVCacheExporter(make_pool(2), publisher=publisher).registry)
    assert now["kv_event_queued_batches"] == 3.0
    assert now["kv_event_batches_published_total"] == 7.0
    assert now["kv_event_batches_dropped_total"] == 2.0
    assert now["kv_event_overflows_total"] == 4.0
    assert now["kv_event_refused_peers_total"] == 5.0
    assert now["kv_event_refused_replay_requests_total"] == 6.0
    assert now["kv_event_abandoned_replays_total"] == 8.0


def test_all_that_a_publisher_counts_is_read(make_pool: Any) -> None:
    pytest.importorskip("zmq")
    with ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        now = values(KVCacheExporter(make_pool(2), publisher=publisher).registry)
    of_publisher = {name: value for name, value in now.items() if name.startswith("kv_event_")}
    assert len(of_publisher) == 7 and set(of_publisher.values()) == {0.0}


def test_histograms_show_all_samples_and_take_none(
    make_pool: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.0]
    monkeypatch.setattr(residency.time, "monotonic_ns", lambda: int(now[0] * 1e9))
    collector = KVCacheMetricsCollector(1.0)
    pool = make_pool(2, metrics_collector=collector)
    exporter = KVCacheExporter(pool, labels={"engine": "0"})
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(make_request(range(4)), [block], 0, 1, 4, 0)
    for _ in range(2):
        now[0] += 0.25
        pool.touch([block])
    pool.free_blocks([block] * 3)
    now[0] += 6.5
    pool.get_new_blocks(1)
    for _ in range(2):
        families = scrape(exporter.registry)
        for name, total in (("lifetime", 7.0), ("idle_before_evict", 6.5), ("reuse_gap", 0.25)):
            family = families[f"kvpool:kv_block_{name}_seconds"]
            assert family.type == "histogram"
            samples = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in family.samples}
            assert samples["sum", None] == total and samples["count", None] == 1.0
            buckets = {float(le): value for (kind, le), value in samples.items() if kind == "bucket"}
            assert buckets == {bound: float(total <= bound) for bound in (*RESIDENCY_BUCKETS_SECONDS, float("inf"))}
            assert all(s.labels["engine"] == "0" for s in family.samples)
    assert len(collector.drain_events()) == 1


def test_without_a_collector_histograms_are_empty(make_pool: Any) -> None:
    families = scrape(KVCacheExporter(make_pool(2)).registry)
    assert families["kvpool:kv_block_lifetime_seconds"].samples == []


def test_several_pools_differ_by_their_labels(make_pool: Any) -> None:
    exporter = KVCacheExporter(make_pool(3), labels={"model_name": "m", "engine": "0"})
    exporter.add(make_pool(5), labels={"engine": "1", "model_name": "m"})
    samples = scrape(exporter.registry)["kvpool:kv_cache_free_blocks"].samples
    assert [(s.labels, s.value) for s in samples] == [
        ({"model_name": "m", "engine": "0"}, 2.0),
        ({"model_name": "m", "engine": "1"}, 4.0),
    ]
    with pytest.raises(InvalidArgumentError, match="same labels"):
        exporter.add(make_pool(5), labels={"engine": 1, "model_name": "m"})
    with pytest.raises(InvalidArgumentError, match="labels of this exporter"):
        exporter.add(make_pool(5), labels={"engine": "2"})
    with pytest.raises(InvalidArgumentError, match="labels of this exporter"):
        exporter.add(make_pool(5))


def test_a_given_registry_is_used_and_left(make_pool: Any) -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("other", "Another metric.", registry=registry).set(1)
    exporter = KVCacheExporter(make_pool(3), registry=registry)
    assert exporter.registry is registry
    assert {"other", "kvpool:kv_cache_usage_perc"} <= scrape(registry).keys()
    with pytest.raises(ValueError, match="Duplicated"):
        KVCacheExporter(make_pool(3), registry=registry)
    KVCacheExporter(make_pool(3), registry=registry, prefix="second:")
    exporter.close()
    assert not any(name.startswith("kvpool:") for name in scrape(registry))
    KVCacheExporter(make_pool(3), registry=registry)
    assert "kvpool:kv_cache_usage_perc" in scrape(registry)


def test_an_own_registry_is_not_the_global_one(make_pool: Any) -> None:
    one, other = KVCacheExporter(make_pool(3)), KVCacheExporter(make_pool(4))
    assert one.registry is not other.registry
    assert one.registry is not prometheus_client.REGISTRY


def test_it_is_served_over_http(make_pool: Any) -> None:
    server, thread = KVCacheExporter(make_pool(3)).start_http_server(0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            assert "kvpool:kv_cache_free_blocks 2.0" in answer.read().decode().splitlines()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_scrapes_in_another_thread_see_whole_values(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(65, metrics_collector=KVCacheMetricsCollector(1.0))
    exporter = KVCacheExporter(pool)
    stop = threading.Event()
    seen: list[dict[str, float]] = []
    failures: list[BaseException] = []

    def keep_scraping() -> None:
        try:
            while not stop.is_set():
                seen.append(values(exporter.registry))
        except BaseException as error:  # the assertion below shows it
            failures.append(error)

    scraper = threading.Thread(target=keep_scraping)
    scraper.start()
    for start in range(1500):
        blocks = pool.get_new_blocks(8)
        pool.cache_full_blocks(make_request(range(start, start + 32)), blocks, 0, 8, 4, 0)
        pool.free_blocks(blocks)
    stop.set()
    scraper.join()
    assert failures == [] and seen
    for before, after in pairwise(seen):
        assert before["kv_cache_evictions_total"] <= after["kv_cache_evictions_total"]
    assert all(now["kv_cache_free_blocks"] in (56.0, 64.0) for now in seen)
    assert all(0 <= now["kv_cache_evictable_blocks"] <= 64 for now in seen)


def test_a_missing_client_is_told(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install kvpool\[prometheus\]"):
        KVCacheExporter(make_pool(3))


def test_the_client_is_imported_when_it_is_needed() -> None:
    code = "import sys, kvpool.metrics.prometheus; print('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


def test_every_metric_has_a_name_of_its_own_and_a_description() -> None:
    readings = [*GAUGES, *COUNTERS, *HISTOGRAMS]
    assert len({reading.name for reading in readings}) == len(readings)
    assert NAMES_OF_VLLM.issubset(reading.name for reading in readings)
    assert all(reading.documentation.endswith(".") for reading in readings)


@pytest.mark.vllm
def test_names_are_those_of_vllm() -> None:
    text = inspect.getsource(pytest.importorskip("vllm.v1.metrics.loggers"))
    for name in NAMES_OF_VLLM:
        assert f'"vllm:{name}"' in text
