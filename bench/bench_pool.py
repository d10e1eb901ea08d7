"""Warm times of the pool's operations: one group a workload with its parameters, one entry an implementation.

Batches of 1 .. 4,096 blocks, pools of 1,000 .. 2,000,000. KVPOOL_C_BENCH names the binary of bench/c/bench_pool.c;
without it the comparison with C is skipped.
"""

from __future__ import annotations

import os
from statistics import median

import pytest

from bench.conftest import TimeWorkload
from bench.implementations import Implementation, load
from bench.rows import BATCHES, C_ROW, CACHED_WORKLOADS, MAX_OVER_C, POOL_SIZES, USUAL_POOL, create_row, ids_row
from bench.sampling import FULL, c_sampler, measure, sampler_of
from bench.workloads import BATCH, ChurnedGetAndFree, GetAndFree, GetAndFreeIds

C_BENCH = os.environ.get("KVPOOL_C_BENCH", "")


def skip_if_too_small(num_blocks: int, batch: int) -> None:
    if batch >= num_blocks:
        pytest.skip(f"a pool of {num_blocks} blocks has no batch of {batch}")


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_get_and_free(time_workload: TimeWorkload, implementation: Implementation, batch: int, num_blocks: int) -> None:
    skip_if_too_small(num_blocks, batch)
    time_workload(f"get_free on batch={batch} pool={num_blocks}", GetAndFree(implementation, num_blocks, batch))


@pytest.mark.parametrize("batch", BATCHES)
def test_get_and_free_caching_off(time_workload: TimeWorkload, implementation: Implementation, batch: int) -> None:
    time_workload(
        f"get_free off batch={batch} pool={USUAL_POOL}",
        GetAndFree(implementation, USUAL_POOL, batch, enable_caching=False),
    )


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
@pytest.mark.parametrize("batch", (16, BATCH))
def test_get_and_free_churned(
    time_workload: TimeWorkload, implementation: Implementation, batch: int, num_blocks: int
) -> None:
    time_workload(
        f"get_free churned batch={batch} pool={num_blocks}", ChurnedGetAndFree(implementation, num_blocks, batch)
    )


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_allocate_and_free_ids(
    time_workload: TimeWorkload, implementation: Implementation, batch: int, num_blocks: int
) -> None:
    skip_if_too_small(num_blocks, batch)
    time_workload(f"ids batch={batch} pool={num_blocks}", GetAndFreeIds(implementation, num_blocks, batch))


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
@pytest.mark.parametrize("name", CACHED_WORKLOADS)
def test_cached(time_workload: TimeWorkload, implementation: Implementation, name: str, num_blocks: int) -> None:
    workload = CACHED_WORKLOADS[name][1]
    time_workload(f"{name} batch={BATCH} pool={num_blocks}", workload(implementation, num_blocks))


@pytest.mark.parametrize("batch", (1, 16))
@pytest.mark.parametrize("name", ("evict", "free_cached", "touch", "cache_full"))
def test_cached_in_small_batches(
    time_workload: TimeWorkload, implementation: Implementation, name: str, batch: int
) -> None:
    workload = CACHED_WORKLOADS[name][1]
    time_workload(f"{name} batch={batch} pool=4097", workload(implementation, batch=batch))


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
def test_create(benchmark, implementation: Implementation, num_blocks: int) -> None:  # type: ignore[no-untyped-def]
    benchmark.group = f"create pool={num_blocks}"
    workload = create_row(num_blocks).make(implementation)
    benchmark.pedantic(workload.operate, setup=workload.prepare, rounds=3, iterations=1)
    workload.check()


@pytest.mark.skipif(not C_BENCH, reason="KVPOOL_C_BENCH names no binary of bench/c/bench_pool.c")
def test_ids_against_c(benchmark) -> None:  # type: ignore[no-untyped-def]
    """allocate_ids + free_ids of 256 blocks costs at most 1.5 times the same loop in C."""
    benchmark.group = "ids against C"
    workload = ids_row().make(load("native"))
    samplers = {"native": sampler_of(workload, FULL.sample_ms), "c": c_sampler(C_BENCH, C_ROW, FULL.sample_ms)}
    results = benchmark.pedantic(measure, args=(samplers, FULL.samples), rounds=1)
    workload.check()
    medians = {name: median(samples) for name, samples in results.items()}
    benchmark.extra_info.update({f"{name}_ns_per_block": round(value, 2) for name, value in medians.items()})
    assert medians["native"] <= MAX_OVER_C * medians["c"], medians
