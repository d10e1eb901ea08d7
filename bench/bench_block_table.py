"""Times of a worker's block tables: warm, and cold after a 3,000 x 3,000 matrix product, see ``bench.cold``.

``python -m bench.bench_block_table`` prints them as a table with ratios; ``--quick`` takes fewer and shorter samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from bench.block_table_workloads import OutputSteps, installed_names, make_workload
from bench.cold import AfterMatrixProduct, make_matrix_product, measure_cold
from bench.conftest import TimeWorkload
from bench.sampling import FULL, QUICK, garbage_collector_off, measure_workloads
from bench.workloads import Workload

PARTS = {
    "step": "16 appends, commit, slots of 256 decodes",
    "append": "append_row of one block, per call",
    "commit": "commit of 256 rows",
    "slots": "slots of 256 decodes",
}
NAMES = ["native", "outputs", "numpy", "vllm", "dropin"]
COLD_ROUNDS = 7


def make_installed(name: str, part: str) -> Workload:
    if name not in installed_names():
        pytest.skip(f"{name} is not installed")
    if name == "outputs" and part != "step":
        pytest.skip("one call does the whole step")
    return make_workload(name, part)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", PARTS)
def test_warm(time_workload: TimeWorkload, name: str, part: str) -> None:
    time_workload(f"block table {part}", make_installed(name, part))


def test_all_outputs(time_workload: TimeWorkload) -> None:
    time_workload("block table step", OutputSteps(with_all=True))


@pytest.mark.parametrize("name", NAMES)
def test_cold(benchmark, name: str) -> None:  # type: ignore[no-untyped-def]  # pytest-benchmark is untyped
    benchmark.group = "cold block table step"
    with garbage_collector_off():
        workload = AfterMatrixProduct(make_installed(name, "step"), make_matrix_product())
        benchmark.pedantic(workload.operate, setup=workload.prepare, rounds=COLD_ROUNDS, iterations=1)
    workload.check()


def print_row(title: str, samples: dict[str, list[float]], names: list[str]) -> None:
    """Medians in ns, and how many times faster than the others the native table is, or the drop-in where it runs."""
    figures = " | ".join(f"{median(samples[name]):,.1f}" if name in samples else "-" for name in names)
    native = median(samples["native"])
    compared = [f"numpy {median(samples['numpy']) / native:.1f}x"]
    if "vllm" in samples:
        compared.append(f"vLLM {median(samples['vllm']) / native:.1f}x")
        compared.append(f"vLLM/dropin {median(samples['vllm']) / median(samples['dropin']):.1f}x")
    print(f"| {title} | {figures} | {', '.join(compared)} |", flush=True)


def main(arguments: list[str]) -> int:
    """Prints a line per part, warm, then the step cold."""
    settings = QUICK if "--quick" in arguments else FULL
    names = installed_names()
    if "native" not in names:
        sys.exit("the worker's tables need torch: pip install kvpool[torch]")
    print(f"| ns per request | {' | '.join(names)} | native against |\n| --- |{' ---: |' * len(names)} --- |")
    for part, title in PARTS.items():
        taking_part = [name for name in names if name != "outputs" or part == "step"]
        samples = measure_workloads({name: make_workload(name, part) for name in taking_part}, settings)
        print_row(f"{title}, warm", samples, names)
    cold = measure_cold({name: make_workload(name) for name in names}, settings.samples, make_matrix_product())
    print_row(f"{PARTS['step']}, cold", cold, names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
