"""Times of the memory of keys and values against plain copies of as many bytes.

``python -m bench.bench_kv_cache`` prints a table of medians and of their ratio: the share of a plain copy's speed.
``--quick`` takes fewer and shorter samples, ``--device cuda`` measures there, with CUDA's clock. ``measure`` returns
the same as rows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

torch = pytest.importorskip("torch")

from bench.conftest import TimeWorkload  # noqa: E402
from bench.kv_cache_workloads import CUDA_PARTS, CUDA_SHAPES, PARTS, SHAPES, Part, Shape  # noqa: E402
from bench.sampling import FULL, QUICK, Settings, cuda_sampler_of, garbage_collector_off, sampler_of  # noqa: E402
from bench.sampling import measure as sample_in_turn  # noqa: E402

SMALL = {"num_layers": 2, "num_blocks": 300}  # where nothing is timed


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        shape, part: what was measured, names of ``SHAPES`` and ``PARTS``.
        num_bytes: moved by a call.
        kvpool_us, plain_us: medians of a call and of the plain copy, sampled in turn.
    """

    shape: str
    part: str
    num_bytes: int
    kvpool_us: float
    plain_us: float

    @property
    def share(self) -> float:
        """Of the plain copy's speed; above 1 where it is faster."""
        return self.plain_us / self.kvpool_us


def measure_part(shape: Shape, part: Part, device: str, settings: Settings) -> tuple[int, float, float]:
    """Bytes, and microseconds of the operation and of the plain copy."""
    workload, plain = part.make_pair(shape, device)
    make_sampler = cuda_sampler_of if torch.device(device).type == "cuda" else sampler_of
    with garbage_collector_off():
        samplers = {
            name: make_sampler(one, settings.sample_ms) for name, one in (("kvpool", workload), ("plain", plain))
        }
    samples = sample_in_turn(samplers, settings.samples)
    workload.check()
    medians = {name: median(times) / 1e3 for name, times in samples.items()}
    return workload.num_bytes, medians["kvpool"], medians["plain"]


def measure(device: str = "cpu", settings: Settings = FULL, shapes: dict[str, Shape] | None = None) -> list[Row]:
    """All parts that a device has. About a minute with ``FULL``, a third with ``QUICK``."""
    is_cuda = torch.device(device).type == "cuda"
    parts = CUDA_PARTS if is_cuda else PARTS
    return [
        Row(shape_name, part_name, *measure_part(shape, part, device, settings))
        for shape_name, shape in (shapes or (CUDA_SHAPES if is_cuda else SHAPES)).items()
        for part_name, part in parts.items()
    ]


@pytest.mark.parametrize("name", ["kvpool", "plain"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape_name", SHAPES)
def test_kv_cache(
    time_workload: TimeWorkload, pytestconfig: pytest.Config, shape_name: str, part: str, name: str
) -> None:
    shape = SHAPES[shape_name]
    if pytestconfig.getoption("benchmark_disable"):
        shape = replace(shape, **SMALL)
    workload, plain = PARTS[part].make_pair(shape, "cpu")
    time_workload(f"kv cache {part}, {shape_name}", workload if name == "kvpool" else plain)


def main(arguments: list[str]) -> int:
    """Prints a line per part."""
    device = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cpu"
    print("| shape | operation | KiB | kvpool us | plain copy us | share of its speed |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in measure(device, QUICK if "--quick" in arguments else FULL):
        figures = f"{row.num_bytes / 1024:,.1f} | {row.kvpool_us:,.1f} | {row.plain_us:,.1f} | {row.share:.0%}"
        print(f"| {row.shape} | {row.part} | {figures} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
