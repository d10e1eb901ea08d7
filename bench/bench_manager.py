"""Warm times of the cache manager: one group a workload, one entry an implementation; ns per request.

``python bench/table.py --rows manager,hash,request`` prints them, and those of block hashing, beside vLLM's and the
targets.
"""

from __future__ import annotations

import pytest

from bench.conftest import TimeWorkload
from bench.implementations import Implementation
from bench.manager_workloads import manager_rows
from bench.rows import Row


@pytest.mark.parametrize("row", manager_rows(), ids=lambda row: row.name)
def test_manager(time_workload: TimeWorkload, implementation: Implementation, row: Row) -> None:
    time_workload(row.name, row.make(implementation))
