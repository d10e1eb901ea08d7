"""Warm times of scheduler steps: one group a workload, one entry an implementation; ns per running request or block.

``python -m bench.bench_scheduler`` prints them as a table, with ratios, vLLM's too where it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from bench.conftest import TimeWorkload
from bench.implementations import Implementation, load_installed
from bench.rows import Row
from bench.sampling import FULL, Settings, measure_workloads, ratio_of
from bench.scheduler_workloads import scheduler_rows

QUICK = Settings(samples=3, sample_ms=8.0)


@pytest.mark.parametrize("row", scheduler_rows(), ids=lambda row: row.name)
def test_scheduler(time_workload: TimeWorkload, implementation: Implementation, row: Row) -> None:
    time_workload(row.name, row.make(implementation))


def main(arguments: list[str]) -> int:
    """Prints a line per row; ``--quick`` takes fewer and shorter samples."""
    settings = QUICK if "--quick" in arguments else FULL
    implementations = load_installed()
    names = list(implementations)
    ratios = [name for name in names if name != "native"]
    print(f"| | {' | '.join(f'{name} ns' for name in names)} | {' | '.join(f'{name}/native' for name in ratios)} |")
    print("| --- |" + " ---: |" * (len(names) + len(ratios)))
    for row in scheduler_rows():
        samples = measure_workloads({name: row.make(each) for name, each in implementations.items()}, settings)
        figures = " | ".join(f"{median(samples[name]):,.0f}" for name in names)
        compared = " | ".join(f"{ratio_of(samples[name], samples['native']).value:.1f}x" for name in ratios)
        print(f"| {row.title} | {figures} | {compared} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
