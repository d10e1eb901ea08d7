"""Warm times of block hashing: one group a workload, one entry an implementation; ns per block of 16 tokens.

``python -m bench.bench_hash`` prints them as a table, with ratios, vLLM's too where it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from bench.conftest import TimeWorkload
from bench.hash_workloads import hash_rows
from bench.implementations import Implementation, load_installed
from bench.rows import Row
from bench.sampling import FULL, measure_workloads, ratio_of


@pytest.mark.parametrize("row", hash_rows(), ids=lambda row: row.name)
def test_hash(time_workload: TimeWorkload, implementation: Implementation, row: Row) -> None:
    time_workload(row.name, row.make(implementation))


def main() -> int:
    """Prints a line per row; 1 if a target is missed, 0 where there is no vLLM to compare with."""
    implementations = load_installed()
    baseline = "vllm" if "vllm" in implementations else "reference"
    is_met = True
    print(f"| operation | {' | '.join(f'{name} ns' for name in implementations)} | {baseline}/native | target |")
    print("| --- |" + " ---: |" * (len(implementations) + 2))
    for row in hash_rows():
        samples = measure_workloads({name: row.make(each) for name, each in implementations.items()}, FULL)
        ratio = ratio_of(samples[baseline], samples["native"])
        figures = " | ".join(f"{median(samples[name]):,.0f}" for name in implementations)
        target = "-" if row.target is None else f"{row.target:g}x"
        print(f"| {row.title} | {figures} | {ratio.value:.1f}x ({ratio.low:.1f} .. {ratio.high:.1f}) | {target} |")
        is_met &= baseline != "vllm" or row.target is None or ratio.value >= row.target
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
