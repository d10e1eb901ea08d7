"""Times of one layer's attention of requests that decode over the paged cache, with and without a shared prefix.

  repeat_kv  keys and values of each request gathered into new memory, repeated for the query heads that share them
  gather     ``GatherBackend``
  cascade    ``CascadeBackend``
  ...        on CUDA the other backends that are installed

``python -m bench.bench_attention`` prints a table of medians, all of a case sampled in turn; *with plan* is the first
layer of a step, which finds what the others use. ``--quick`` takes fewer and shorter samples, ``--device cuda``
measures there, with CUDA's clock. The last column sets each against a plain copy of the bytes that it has to read.
``measure`` returns the same as rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

torch = pytest.importorskip("torch")

from bench.conftest import TimeWorkload  # noqa: E402
from bench.sampling import FULL, QUICK, Settings, cuda_sampler_of, garbage_collector_off, sampler_of  # noqa: E402
from bench.sampling import measure as sample_in_turn  # noqa: E402
from bench.workloads import SEED, Workload  # noqa: E402
from kvpool.scheduler.output import CachedRequestData, SchedulerOutput  # noqa: E402
from kvpool.worker.attention import BACKENDS, AttentionLayer, create_backend, why_unusable  # noqa: E402
from kvpool.worker.step.block_table import BlockTableConfig, MultiGroupBlockTable  # noqa: E402
from kvpool.worker.step.step_tensors import StepTensorBuilder, StepTensors  # noqa: E402

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A batch of decodes: so many requests of ``tokens`` tokens each, the first ``shared`` of them common to all."""

    requests: int
    num_kv_heads: int
    group: int
    head_size: int
    tokens: int
    shared: int
    dtype: Any
    block_size: int = 16

    @property
    def title(self) -> str:
        heads = (
            f"{self.num_kv_heads} x {self.group} heads of {self.head_size}, {str(self.dtype).removeprefix('torch.')}"
        )
        return f"{self.requests} requests, {heads}, {self.tokens:,} tokens, {self.shared:,} shared"

    @property
    def num_bytes(self) -> int:
        """Of all requests' keys and values, each counted for itself."""
        return 2 * self.requests * self.tokens * self.num_kv_heads * self.head_size * self.dtype.itemsize


CASES = {
    "few": Case(8, 3, 3, 64, 576, 512, torch.float32),
    "few in bfloat16": Case(8, 3, 3, 64, 576, 512, torch.bfloat16),
    "many": Case(64, 3, 3, 64, 576, 512, torch.float32),
    "many in bfloat16": Case(64, 3, 3, 64, 576, 512, torch.bfloat16),
    "larger heads": Case(8, 8, 4, 128, 576, 512, torch.float32),
    "nothing shared": Case(64, 3, 3, 64, 576, 0, torch.float32),
}
LONG_CASES = {"long": Case(8, 8, 4, 128, 4_160, 4_096, torch.float32)}
CUDA_CASES = {
    "nothing shared": Case(64, 8, 4, 128, 2_048, 0, torch.bfloat16),
    "long": Case(8, 8, 4, 128, 16_384, 0, torch.bfloat16),
    "shared": Case(64, 8, 4, 128, 2_304, 2_048, torch.bfloat16),
}


class Batch:
    """The tensors of a case: shuffled blocks, and the step in which each request computes its last token."""

    def __init__(self, case: Case, device: str) -> None:
        generator = torch.Generator().manual_seed(SEED)
        blocks, shared = -(-case.tokens // case.block_size), case.shared // case.block_size
        num_blocks = 1 + shared + case.requests * (blocks - shared)
        ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        tables = MultiGroupBlockTable([BlockTableConfig(case.block_size, blocks)], case.requests, case.requests, device)
        for row in range(case.requests):
            first = shared + row * (blocks - shared)
            tables.add_row((ids[:shared] + ids[first : first + blocks - shared],), row)
        names = [str(row) for row in range(case.requests)]
        cached = CachedRequestData(
            names,
            *([value] * case.requests for value in (False, None)),
            *([count] * case.requests for count in (case.tokens - 1, 0)),
            [[]] * case.requests,
        )
        output = SchedulerOutput(1, [], cached, dict.fromkeys(names, 1), case.requests, *([] for _ in range(5)))
        builder = StepTensorBuilder(tables, case.requests, with_compressed=True)
        self.case = case
        self.step: StepTensors = builder.build(output, {name: row for row, name in enumerate(names)})
        sizes = (num_blocks, 2, case.block_size, case.num_kv_heads, case.head_size)
        self.kv_cache = torch.randn(sizes, generator=generator, dtype=torch.float32).to(device, case.dtype)
        heads = case.num_kv_heads * case.group
        self.query = torch.randn((case.requests, heads, case.head_size), generator=generator).to(device, case.dtype)
        self.layer = AttentionLayer(case.head_size**-0.5)
        self._wanted: Any = None

    def attend_by_repeating(self) -> Any:
        """What the others are compared with, in time and in numbers."""
        case = self.case
        rows = self.step.groups[0].block_table.long()[:, :, None] * (2 * case.block_size)
        rows = (rows + torch.arange(case.block_size, device=rows.device)).flatten(1)[:, : case.tokens]
        flat = self.kv_cache.view(-1, case.num_kv_heads, case.head_size)
        keys, values = (
            flat[rows + part].repeat_interleave(case.group, 2).transpose(1, 2) for part in (0, case.block_size)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(self.query[:, :, None], keys, values, scale=self.layer.scale)[:, :, 0]

    @property
    def wanted(self) -> Any:
        if self._wanted is None:
            self._wanted = self.attend_by_repeating()
        return self._wanted


class OneLayer(Workload):
    """A call of a round.

    Args:
        attend: computes the batch's attention.
    """

    blocks_per_round = 1

    def __init__(self, batch: Batch, attend: Callable[[], Any]) -> None:
        self.batch, self.operate = batch, attend  # type: ignore[method-assign]

    def operate(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        error = (self.operate() - self.batch.wanted).abs().max().item()  # type: ignore[func-returns-value]
        if error > TOLERANCES[self.batch.case.dtype]:
            raise AssertionError(f"off by {error}")


def make_layer(name: str, batch: Batch, *, with_plan: bool = False) -> OneLayer:
    """One layer by a backend, or by ``repeat_kv``; the first one of a step, or a later one."""
    if name == "repeat_kv":
        return OneLayer(batch, batch.attend_by_repeating)
    case, device = batch.case, batch.kv_cache.device
    backend = create_backend(name, device, block_size=case.block_size, dtype=case.dtype)
    backend.plan(batch.step)

    def attend() -> Any:
        if with_plan:
            backend.plan(batch.step)
        return backend.attend(batch.query, batch.kv_cache, 0, batch.layer)

    return OneLayer(batch, attend)


class Copy(Workload):
    """A plain copy of the bytes that a batch has to read."""

    blocks_per_round = 1

    def __init__(self, batch: Batch) -> None:
        self.source = torch.ones(batch.case.num_bytes, dtype=torch.uint8, device=batch.kv_cache.device)
        self.target = torch.zeros_like(self.source)

    def operate(self) -> None:
        self.target.copy_(self.source)

    def check(self) -> None:
        if not torch.equal(self.source, self.target):
            raise AssertionError("a copy that isn't one")


@dataclass(frozen=True)
class Row:
    """One backend on one case.

    Attributes:
        case, name: what was measured.
        us, us_with_plan: medians of a call, and of one that is the first of its step.
        copy_us: median of a copy of ``case.num_bytes``, sampled in turn with them.
    """

    case: Case
    name: str
    us: float
    us_with_plan: float
    copy_us: float

    @property
    def share(self) -> float:
        """Of the speed of a plain copy of all keys and values, which it has to read but not to write."""
        return self.copy_us / self.us


def usable_names(case: Case, device: str) -> list[str]:
    """``repeat_kv`` and the backends that can be used here."""
    usable = [
        name
        for name in BACKENDS
        if why_unusable(name, torch.device(device), block_size=case.block_size, dtype=case.dtype) is None
    ]
    return ["repeat_kv", *usable]


def measure_case(case: Case, device: str, settings: Settings) -> list[Row]:
    """A row for each of ``usable_names``, sampled in turn."""
    batch, names = Batch(case, device), usable_names(case, device)
    workloads: dict[str, Workload] = {name: make_layer(name, batch) for name in names}
    workloads |= {f"{name} with plan": make_layer(name, batch, with_plan=True) for name in names if name in BACKENDS}
    workloads["copy"] = Copy(batch)
    make_sampler = cuda_sampler_of if torch.device(device).type == "cuda" else sampler_of
    with garbage_collector_off(), torch.inference_mode():
        samplers = {name: make_sampler(workload, settings.sample_ms) for name, workload in workloads.items()}
        samples = sample_in_turn(samplers, settings.samples)
        for workload in workloads.values():
            workload.check()
    us = {name: median(times) / 1e3 for name, times in samples.items()}
    return [Row(case, name, us[name], us.get(f"{name} with plan", us[name]), us["copy"]) for name in names]


def measure(device: str = "cpu", settings: Settings = FULL) -> list[Row]:
    """All cases of a device. Two minutes on the CPU with ``FULL``, one with ``QUICK``; seconds on CUDA."""
    cases = CUDA_CASES if torch.device(device).type == "cuda" else {**CASES, **LONG_CASES}
    return [row for case in cases.values() for row in measure_case(case, device, settings)]


@pytest.mark.parametrize("name", ["repeat_kv", "gather", "cascade"])
@pytest.mark.parametrize("case", CASES)
def test_decode(time_workload: TimeWorkload, case: str, name: str) -> None:
    time_workload(f"decode attention, {case}", make_layer(name, Batch(CASES[case], "cpu")))


def main(arguments: list[str]) -> int:
    """Prints a line per case and backend."""
    device = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cpu"
    print("| decode attention, one layer | | us | with plan | against repeat_kv | against gather | of a copy |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    settings = QUICK if "--quick" in arguments else FULL
    for case in (CUDA_CASES if torch.device(device).type == "cuda" else {**CASES, **LONG_CASES}).values():
        rows = measure_case(case, device, settings)
        us = {row.name: row.us for row in rows}
        for row in rows:
            figures = f"{row.us:,.0f} | {row.us_with_plan:,.0f} | {us['repeat_kv'] / row.us:.1f}x"
            against = f"{us['gather'] / row.us:.2f}x | {row.share:.0%}"
            print(f"| {case.title} | {row.name} | {figures} | {against} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
