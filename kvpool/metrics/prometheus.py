"""Prometheus metrics of block pools, cache managers and event publishers, read when they are scraped.

Nothing is counted here: the sources count, and a scrape reads them. So an exporter costs an engine nothing per step,
takes nothing away from other readers, and can't fall behind. Names are vLLM's where it has the metric, with
``kvpool:`` for ``vllm:``; dashboards need that one change.

A scrape runs in the thread of whoever scrapes. On the native pool each read is atomic; the twin's count of evictable
blocks is a walk that may miss blocks that move meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kvpool.metrics.stats import Histogram

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Source:
    """What the metrics of one set of label values are read from.

    Attributes:
        owner: a ``BlockPool``, or a ``KVCacheManager`` (whose ``block_pool`` is read).
        publisher: a ``ZmqEventPublisher``, or None.
        label_values: in the order of the exporter's label names.
    """

    owner: Any
    publisher: Any
    label_values: tuple[str, ...]

    @property
    def pool(self) -> Any:
        return getattr(self.owner, "block_pool", self.owner)

    @property
    def prefix_cache_stats(self) -> Any:
        """Stats since creation where the manager keeps such totals, else those of the current interval."""
        totals = getattr(self.owner, "prefix_cache_totals", None)
        return totals if totals is not None else getattr(self.owner, "prefix_cache_stats", None)


@dataclass(frozen=True)
class Reading:
    """One metric: how to read its value from a source. A read that gives None leaves the sample out.

    Attributes:
        name: without prefix, and for counters without ``_total``.
        documentation: the HELP line.
        read: a number, or a ``Histogram`` for a histogram.
    """

    name: str
    documentation: str
    read: Callable[[Source], Any]


def _of_prefix_cache(name: str) -> Callable[[Source], int | None]:
    return lambda source: getattr(source.prefix_cache_stats, name, None)


def _of_publisher(name: str) -> Callable[[Source], int | None]:
    return lambda source: getattr(source.publisher, name, None)


def _of_collector(name: str) -> Callable[[Source], Histogram | None]:
    return lambda source: getattr(source.pool.metrics_collector, name, None)


GAUGES = (
    Reading("kv_cache_usage_perc", "Blocks in use; 1 means all of them.", lambda source: source.pool.get_usage()),
    Reading("kv_cache_blocks", "Blocks that can be allocated.", lambda source: source.pool.num_gpu_blocks - 1),
    Reading(
        "kv_cache_free_blocks",
        "Blocks that nobody uses, cached or not.",
        lambda source: source.pool.get_num_free_blocks(),
    ),
    Reading(
        "kv_cache_evictable_blocks",
        "Free blocks that are cached: they can be hit, and are evicted when they are reused.",
        lambda source: source.pool.num_evictable_blocks,
    ),
    Reading("kv_event_queued_batches", "Batches of events not published yet.", _of_publisher("queued_batches")),
)

COUNTERS = (
    Reading("prefix_cache_queries", "Tokens looked up in the prefix cache.", _of_prefix_cache("queries")),
    Reading("prefix_cache_hits", "Tokens found in the prefix cache.", _of_prefix_cache("hits")),
    Reading(
        "kv_cache_evictions",
        "Blocks that lost their hash because they were reused.",
        lambda source: source.pool.stats.evictions,
    ),
    Reading(
        "kv_cache_invalid_frees",
        'Frees of blocks that were not in use, skipped under on_invalid_free="warn".',
        lambda source: source.pool.stats.invalid_frees,
    ),
    Reading(
        "kv_events_dropped",
        "Events lost because the queue of the pool was full.",
        lambda source: source.pool.dropped_events,
    ),
    Reading("kv_event_batches_published", "Batches of events published.", _of_publisher("published_batches")),
    Reading(
        "kv_event_batches_dropped",
        "Batches of events lost by the publisher; subscribers see gaps in the sequence.",
        _of_publisher("dropped_batches"),
    ),
    Reading(
        "kv_event_overflows",
        "Times that more waited for a slow subscriber than may, so that it lost batches.",
        _of_publisher("overflows"),
    ),
    Reading(
        "kv_event_refused_peers",
        "Connections to the publisher that failed in the handshake or were cut because of a limit.",
        _of_publisher("refused_peers"),
    ),
    Reading(
        "kv_event_refused_replay_requests",
        "Requests for replays that were none, or too many.",
        _of_publisher("refused_requests"),
    ),
    Reading(
        "kv_event_abandoned_replays",
        "Clients that were gone, or fetched nothing for a while, before a replay was at its end.",
        _of_publisher("abandoned_replays"),
    ),
)

HISTOGRAMS = (
    Reading(
        "kv_block_lifetime_seconds",
        "Time from the allocation of a block to its eviction. Sampled.",
        _of_collector("lifetime_histogram"),
    ),
    Reading(
        "kv_block_idle_before_evict_seconds",
        "Time from the last access of a block to its eviction. Sampled.",
        _of_collector("idle_histogram"),
    ),
    Reading(
        "kv_block_reuse_gap_seconds",
        "Time between the last accesses of a block, told when it is evicted. Sampled.",
        _of_collector("reuse_gap_histogram"),
    ),
)


class KVCacheExporter:
    """A collector in the sense of prometheus-client, for any number of pools under different labels.

    A scrape is O(1) per source, but for the evictable blocks: O(free blocks), about 10 ms with 2 million of them.

    Args:
        owner: a ``BlockPool`` or ``KVCacheManager``. Prefix cache metrics need a manager with ``log_stats``; they
            cover its lifetime if it has ``prefix_cache_totals``, else they start over (as counters may) when its
            ``make_prefix_cache_stats`` is called. Histograms need a ``KVCacheMetricsCollector`` in the pool.
        publisher: the ``ZmqEventPublisher`` of its events, if it has one.
        labels: put on every sample; vLLM's are ``model_name`` and ``engine``.
        registry: where to register; None for one of its own.
        prefix: of all names.

    Attributes:
        registry: what to scrape, for example ``prometheus_client.generate_latest(exporter.registry)``.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: the registry has metrics of these names already.

    vLLM: ``PrometheusStatLogger``, which is told values in each step.
    """

    def __init__(
        self,
        owner: Any,
        *,
        publisher: Any = None,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
        prefix: str = "kvpool:",
    ) -> None:
        client = _import_client()
        self.prefix = prefix
        self._label_names = tuple(labels or ())
        self._sources: list[Source] = []
        self.add(owner, publisher=publisher, labels=labels)
        self.registry = client.CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    def add(self, owner: Any, *, publisher: Any = None, labels: Mapping[str, str] | None = None) -> None:
        """Read one more pool or manager, such as that of another data-parallel rank.

        Raises:
            InvalidArgumentError: other label names than the first source has, or values that another source has.
        """
        labels = labels or {}
        if set(labels) != set(self._label_names):
            raise InvalidArgumentError(f"the labels of this exporter are {self._label_names}, not {tuple(labels)}")
        values = tuple(str(labels[name]) for name in self._label_names)
        if any(source.label_values == values for source in self._sources):
            raise InvalidArgumentError(f"two sources with the same labels: {dict(labels)}")
        # A new list, because a scrape in another thread may be iterating over the old one.
        self._sources = [*self._sources, Source(owner, publisher, values)]

    def start_http_server(self, port: int, addr: str = LOCALHOST) -> Any:
        """Serve ``/metrics`` from a thread; returns prometheus-client's server and thread."""
        return _import_client().start_http_server(port, addr, registry=self.registry)

    def close(self) -> None:
        """Leave the registry, and let go of the sources."""
        self.registry.unregister(self)
        self._sources = []

    def describe(self) -> Iterator[Metric]:
        """The metric families without samples; the registry looks for names that are taken."""
        return self._families(())

    def collect(self) -> Iterator[Metric]:
        """The metric families with what the sources say now. Called by the registry."""
        return self._families(self._sources)

    def _families(self, sources: Sequence[Source]) -> Iterator[Metric]:
        core = _import_client().core
        for readings, family_class in (
            (GAUGES, core.GaugeMetricFamily),
            (COUNTERS, core.CounterMetricFamily),
            (HISTOGRAMS, core.HistogramMetricFamily),
        ):
            for reading in readings:
                family = family_class(self.prefix + reading.name, reading.documentation, labels=self._label_names)
                for source in sources:
                    value = reading.read(source)
                    if value is not None:
                        family.add_metric(source.label_values, **_sample_of(value))
                yield family


def _sample_of(value: Any) -> dict[str, Any]:
    """A number or a ``Histogram`` as ``add_metric`` takes it."""
    if not hasattr(value, "cumulative_counts"):
        return {"value": value}
    return {"buckets": _buckets_of(value), "sum_value": value.sum}


def _buckets_of(histogram: Histogram) -> list[tuple[str, int]]:
    bounds: Iterable[str] = [*(str(float(bound)) for bound in histogram.upper_bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative_counts()))


def _import_client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError("the exporter needs prometheus-client: pip install kvpool[prometheus]") from error
    return prometheus_client
