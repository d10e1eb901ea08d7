"""What a decode step of 256 requests costs beside the model, warm and cold (see ``bench.cold``).

``python -m bench.bench_decode_step`` prints us per request of each part; ``--quick`` takes fewer and shorter samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

pytest.importorskip("torch")

from bench.cold import make_matrix_product, measure_cold
from bench.conftest import TimeWorkload
from bench.decode_step_workloads import NUM_REQUESTS, PARTS, DecodeStep
from bench.sampling import FULL, QUICK, Settings, measure_workloads


@pytest.mark.parametrize("part", PARTS)
def test_decode_step(time_workload: TimeWorkload, part: str) -> None:
    time_workload(f"decode step of {NUM_REQUESTS}", DecodeStep(part))


def measure(settings: Settings = FULL, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """us per request of each part, warm and cold."""
    warm = measure_workloads({part: DecodeStep(part, device) for part in PARTS}, settings)
    cold = measure_cold({part: DecodeStep(part, device) for part in PARTS}, settings.samples, make_matrix_product())
    return {part: (median(warm[part]) / 1e3, median(cold[part]) / 1e3) for part in PARTS}


def main(arguments: list[str]) -> int:
    print(f"| us per request, {NUM_REQUESTS} decodes | warm | cold |\n| --- | ---: | ---: |")
    for part, (warm, cold) in measure(QUICK if "--quick" in arguments else FULL).items():
        print(f"| {PARTS[part]} | {warm:.2f} | {cold:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
