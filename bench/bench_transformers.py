"""kvpool's cache allocator beside the stock one of transformers' continuous batching; ns per block.

``python -m bench.bench_transformers`` prints a table with ratios, ``--quick`` one of fewer and shorter samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from bench.conftest import TimeWorkload
from bench.rows import Row
from bench.sampling import FULL, Settings, measure_workloads, ratio_of

workloads = pytest.importorskip("bench.transformers_workloads", reason="it needs torch and transformers")

QUICK = Settings(samples=3, sample_ms=8.0)


@pytest.mark.parametrize("name", workloads.ALLOCATORS)
@pytest.mark.parametrize("row", workloads.transformers_rows(), ids=lambda row: row.name)
def test_transformers(time_workload: TimeWorkload, name: str, row: Row) -> None:
    time_workload(f"transformers {row.name}", row.make(workloads.ALLOCATORS[name]))


def main(arguments: list[str]) -> int:
    """Prints a line per row."""
    settings = QUICK if "--quick" in arguments else FULL
    print("| | stock ns | kvpool ns | ratio | smallest .. largest |\n| --- | ---: | ---: | ---: | ---: |")
    for row in workloads.transformers_rows():
        samples = measure_workloads({name: row.make(each) for name, each in workloads.ALLOCATORS.items()}, settings)
        ratio = ratio_of(samples["stock"], samples["native"])
        figures = " | ".join(f"{median(samples[name]):,.0f}" for name in workloads.ALLOCATORS)
        print(f"| {row.title} | {figures} | {ratio.value:.1f}x | {ratio.low:.1f} .. {ratio.high:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
