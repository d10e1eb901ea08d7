"""Block tables of a worker: host rows, their copy on the device, slots, and a step as tensors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from kvpool.worker.step.block_table import BlockTable, BlockTableConfig, MultiGroupBlockTable  # noqa: E402
from kvpool.worker.step.staging import Staging  # noqa: E402
from kvpool.worker.step.step_tensors import StepTensorBuilder  # noqa: E402

ROWS, WIDTH, TOKENS = 6, 8, 40
PLACES = [
    pytest.param(("cpu", None), id="shared"),
    pytest.param(("cpu", False), id="copied"),
    pytest.param(("cuda", None), id="cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where the tables are: memory shared with the host, a copy on the CPU, CUDA."""
    device, shares_memory = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return {"device": device, "shares_memory": shares_memory}


def make_tables(place: dict[str, Any]) -> MultiGroupBlockTable:
    configs = [BlockTableConfig(16, WIDTH, num_blocks=100), BlockTableConfig(32, WIDTH, kernel_block_size=8)]
    return MultiGroupBlockTable(configs, ROWS, TOKENS, **place)


def test_the_device_has_the_rows_after_a_commit(place: dict[str, Any]) -> None:
    tables = make_tables(place)
    rng = random.Random(3)
    for _ in range(300):
        row, other = rng.randrange(ROWS), rng.randrange(ROWS)
        kind = rng.choice(["add_row", "append_row", "append_row", "append_row", "move_row", "swap_row", "clear_row"])
        if kind in ("move_row", "swap_row"):
            getattr(tables, kind)(row, other)
        elif kind == "clear_row":
            tables.clear_row(row)
        else:
            held = 0 if kind == "add_row" else int(tables[0].num_blocks_per_row[row])
            ids = [rng.randrange(100) for _ in range(min(rng.randrange(1, 4), WIDTH - held))]
            getattr(tables, kind)((ids, ids), row)
        num_rows = rng.randrange(ROWS + 1)
        tables.commit(num_rows)
        for table in tables.block_tables:
            assert table.device_rows.shape == (ROWS, table.width) and table.device_rows.dtype == torch.int32
            assert torch.equal(table.device_rows[:num_rows].cpu(), table.host[:num_rows])


def test_a_row_behind_the_batch_waits_for_a_commit_that_includes_it() -> None:
    table = BlockTable(BlockTableConfig(16, WIDTH), ROWS, TOKENS, shares_memory=False)
    table.add_row([5, 6], 3)
    table.commit(3)
    assert not table.device_rows.any()
    table.commit(4)
    assert table.device_rows[3, :3].tolist() == [5, 6, 0]


def test_few_changes_travel_as_cells_and_many_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BlockTable(BlockTableConfig(16, WIDTH), ROWS, TOKENS, shares_memory=False)
    sent: list[int] = []

    def send(self: Staging, taken: Any, target: Any, stock: Any = Staging.send) -> Any:
        sent.append(taken.numel())
        return stock(self, taken, target)

    monkeypatch.setattr(Staging, "send", send)
    table.commit(ROWS)
    table.append_row([5], 1)
    table.append_row([6], 4)
    table.commit(ROWS)
    for row in range(4):
        table.add_row(list(range(1, WIDTH + 1)), row)
    table.commit(ROWS)
    table.commit(ROWS)
    assert sent == [4, ROWS * WIDTH]
    assert torch.equal(table.device_rows, table.host)


def test_on_the_cpu_nothing_is_copied() -> None:
    table = BlockTable(BlockTableConfig(16, WIDTH), ROWS, TOKENS)
    table.append_row([7], 2)
    assert table.device_rows is table.host and table.device_rows[2, 0] == 7
    table.commit(3)
    assert table.num_changes(3) == 1


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["lists", "arrays", "tensors"])
def test_slots_and_padding(place: dict[str, Any], kind: Any) -> None:
    tables = make_tables(place)
    tables.add_row(([9, 4], [3]), 0)
    tables.add_row(([5], [6]), 2)
    tables.commit(3)
    slots = tables.compute_slot_mapping(kind([0, 2, 0, 0]), kind([0, 15, 16, 31]))
    assert slots[0].tolist() == [144, 95, 64, 79] and slots[1].tolist() == [96, 207, 112, 127]
    slots = tables.compute_slot_mapping(kind([2]), kind([1]))
    for table, wanted in zip(tables.block_tables, (81, 193)):
        assert table.slot_mapping.tolist() == [wanted] + [-1] * (TOKENS - 1) and table.slot_mapping.dtype == torch.int64


def test_refused_slots_leave_the_mapping_alone(place: dict[str, Any]) -> None:
    table = make_tables(place)[0]
    table.add_row([9], 0)
    table.compute_slot_mapping([0, 0], [3, 4])
    for rows, positions in (([0, 0, 0], [1, 16, 2]), ([0, ROWS], [1, 2]), ([0], [1, 2]), ([0] * 41, list(range(41)))):
        with pytest.raises(InvalidArgumentError):
            table.compute_slot_mapping(rows, positions)
    assert table.slot_mapping[:3].tolist() == [147, 148, -1]
    for num_rows in (-1, ROWS + 1):
        with pytest.raises(InvalidArgumentError, match="a batch of"):
            table.commit(num_rows)


@pytest.mark.parametrize(
    ("config", "num_rows", "num_tokens"),
    [
        (BlockTableConfig(16, 4, kernel_block_size=6), 4, 8),
        (BlockTableConfig(16, 4, kernel_block_size=32), 4, 8),
        (BlockTableConfig(16, 0), 4, 8),
        (BlockTableConfig(16, 4), 0, 8),
        (BlockTableConfig(16, 4), 4, 0),
        (BlockTableConfig(0, 4), 4, 8),
    ],
)
def test_impossible_sizes_are_refused(config: BlockTableConfig, num_rows: int, num_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError):
        BlockTable(config, num_rows, num_tokens)


def test_staging_grows_and_keeps_its_memory() -> None:
    staging = Staging(torch.int32, torch.device("cpu"))
    first = staging.take(10)
    assert first.numel() == 10 and staging.take(4).data_ptr() == first.data_ptr()
    target = torch.zeros(12, dtype=torch.int32)
    larger = staging.take(12)
    larger.copy_(torch.arange(12))
    assert staging.send(larger, target) is target and target.tolist() == list(range(12))


def step_of(blocks: tuple[list[int], list[int]] | None) -> SchedulerOutput:
    """Request a decodes behind 16 tokens, b prefills 3 tokens behind a hit of 16."""
    return SchedulerOutput(
        1,
        [NewRequestData("b", [1] * 19, ([5, 8], [3]), 16)],
        CachedRequestData(["a"], [False], [blocks], [16], [1], [[3]]),
        {"a": 1, "b": 3},
        4,
        *([] for _ in range(5)),
    )


def test_a_step_as_tensors(place: dict[str, Any]) -> None:
    tables = make_tables(place)
    tables.add_row(([5], [3]), 4)
    builder = StepTensorBuilder(tables, TOKENS, with_kv_rows=True, with_compressed=True)
    for _ in range(2):  # the second time over what the first has left
        tables.add_row(([5], [3]), 4)
        step = builder.build(step_of(([9], [])), {"a": 4, "b": 1})
        assert step.rows.tolist() == [4, 1] and step.seq_lens.tolist() == [17, 19]
        assert step.query_starts.tolist() == [0, 1, 4] and step.positions.tolist() == [16, 16, 17, 18]
        one, other = step.groups
        assert one.slots.tolist() == [144, 128, 129, 130] and other.slots.tolist() == [112, 112, 113, 114]
        assert one.key_rows.tolist() == [288, 256, 257, 258] and one.value_rows.tolist() == [304, 272, 273, 274]
        assert one.block_table[step.rows.long(), :3].tolist() == [[5, 9, 0], [5, 8, 0]]
        assert one.block_starts.tolist() == [0, 2, 4] and one.blocks.tolist() == [5, 9, 5, 8]
        assert one.last_block_lens.tolist() == [1, 3] and other.last_block_lens.tolist() == [1, 3]
        assert (one.num_common_blocks, other.num_common_blocks) == (1, 2)
    assert StepTensorBuilder(tables, TOKENS).build(step_of(([], [])), {"a": 4, "b": 1}).groups[0].blocks is None


def test_steps_are_applied_without_tensors(place: dict[str, Any]) -> None:
    tables = make_tables(place)
    tables.add_row(([5], [3]), 4)
    tables.apply_step(step_of(([9], [])), {"a": 4, "b": 1})
    assert tables[0].host[[1, 4], :2].tolist() == [[5, 8], [5, 9]] and len(tables) == 2


INTERPRETED = """
import itertools, random
import torch
from kvpool.worker.kernels.slots import TOKENS_PER_PROGRAM, write_slots
rng = random.Random(5)
cases = 0
for block_size, n, extra in itertools.product((1, 7, 16), (0, 1, 5, TOKENS_PER_PROGRAM + 3), (0, 9)):
    table = torch.randint(0, 1000, (6, 20), dtype=torch.int32)[:, : rng.choice((8, 20))]
    rows = torch.randint(-1, 7, (n,), dtype=rng.choice((torch.int32, torch.int64)))
    positions = torch.randint(-3, table.shape[1] * block_size + 9, (n,))
    slots = torch.full((n + extra + 2,), -7)
    write_slots(table, rows, positions, block_size, slots[: n + extra])
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        inside = 0 <= row < 6 and 0 <= position < table.shape[1] * block_size
        wanted = int(table[row, position // block_size]) * block_size + position % block_size if inside else -1
        assert slots[i] == wanted, (block_size, row, position, slots[i])
    assert slots[n:].tolist() == [-1] * extra + [-7] * 2
    cases += 1
print(cases)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpool.worker.kernels.slots import slot_kernel
names = slot_kernel.arg_names
constants = {"BLOCK_SIZE": 16, "TILE": 256, "PAD": -1}
types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
types |= {"table_ptr": "*i32", "rows_ptr": "*i32", "positions_ptr": "*i64", "slots_ptr": "*i64"}
for capability in (80, 90):
    source = ASTSource(fn=slot_kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "cubin" in compiled.asm and f"sm_{capability}" in compiled.asm["ptx"]
    print(capability)
"""


def run_python(program: str, **environment: str) -> list[str]:
    """Triton reads its environment when it is imported, hence a process of its own."""
    folder = str(Path(__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, folder]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_the_slot_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_python(INTERPRETED, TRITON_INTERPRET="1") == ["24"]


def test_the_slot_kernel_compiles_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert run_python(COMPILED, TRITON_CACHE_DIR=str(tmp_path)) == ["80", "90"]


@pytest.mark.cuda
def test_positions_on_the_device_never_come_back_to_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    table = BlockTable(BlockTableConfig(16, WIDTH), ROWS, TOKENS, "cuda")
    table.add_row([9, 4], 0)
    assert table.host.is_pinned()
    table.commit(1)
    rows, positions = torch.tensor([0, 0, 0], device="cuda"), torch.tensor([0, 17, 16 * WIDTH], device="cuda")
    slots = table.compute_slot_mapping(rows, positions)
    assert slots.is_cuda and slots.tolist() == [144, 65, -1] and table.slot_mapping[3:].eq(-1).all()
