"""Fixtures of the benches: each implementation under the same names, and one way to time a workload."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import pytest

from bench.implementations import NAMES, Implementation, load
from bench.rows import USUAL_POOL
from bench.sampling import garbage_collector_off
from bench.workloads import Workload

ROUNDS = int(os.environ.get("KVPOOL_BENCH_ROUNDS", "30"))

TimeWorkload = Callable[[str, Workload], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --benchmark-disable nothing is timed: the benches only have to work, and large pools would take minutes."""
    if not config.getoption("benchmark_disable"):
        return
    too_large = pytest.mark.skip(reason=f"pools of more than {USUAL_POOL:,} blocks are for timed runs")
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("num_blocks", 0) > USUAL_POOL:
            item.add_marker(too_large)


@pytest.fixture(params=NAMES)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """native, reference and vllm in turn; vllm is skipped where it is not installed."""
    if request.param == "vllm":
        pytest.importorskip("vllm.v1.core.block_pool")
    return load(request.param)


@pytest.fixture
def time_workload(benchmark) -> TimeWorkload:  # type: ignore[no-untyped-def]  # pytest-benchmark is untyped
    """Times ``operate()`` of a workload, round by round, in the group of that name; then checks the pool.

    KVPOOL_BENCH_ROUNDS sets the number of rounds (30). ``extra_info`` gets ``ns_per_block`` (median).
    """

    def run(group: str, workload: Workload) -> None:
        benchmark.group = group
        with garbage_collector_off():
            benchmark.pedantic(workload.operate, setup=workload.prepare, rounds=ROUNDS, iterations=1, warmup_rounds=2)
        workload.check()
        if benchmark.stats is not None:  # None with --benchmark-disable
            seconds = median(benchmark.stats.stats.data)
            benchmark.extra_info["blocks_per_round"] = workload.blocks_per_round
            benchmark.extra_info["ns_per_block"] = round(seconds * 1e9 / workload.blocks_per_round, 2)

    return run
