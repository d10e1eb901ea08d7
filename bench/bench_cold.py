"""Cold times of the per-step operations: one call after a 3,000 x 3,000 matrix product, see ``bench.cold``."""

from __future__ import annotations

from statistics import median

import pytest

from bench.cold import AfterMatrixProduct, make_matrix_product
from bench.implementations import Implementation
from bench.rows import Row, cold_rows
from bench.sampling import garbage_collector_off

ROUNDS = 7


@pytest.mark.parametrize("row", cold_rows(), ids=lambda row: row.name)
def test_cold(benchmark, implementation: Implementation, row: Row) -> None:  # type: ignore[no-untyped-def]
    benchmark.group = f"cold {row.name}"
    with garbage_collector_off():
        workload = AfterMatrixProduct(row.make(implementation), make_matrix_product())
        benchmark.pedantic(workload.operate, setup=workload.prepare, rounds=ROUNDS, iterations=1)
    workload.check()
    if benchmark.stats is not None:
        seconds = median(benchmark.stats.stats.data)
        benchmark.extra_info["ns_per_block"] = round(seconds * 1e9 / workload.blocks_per_round, 2)
