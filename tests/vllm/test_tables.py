"""The native tables of the level `tables` beside vLLM's own: same edits, same rows, same slots."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.block_table")
pytestmark = pytest.mark.vllm

import torch  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.utils import CpuGpuBuffer  # noqa: E402
from vllm.v1.worker import block_table as stock  # noqa: E402
from vllm.v1.worker import gpu_input_batch  # noqa: E402

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.integrations.vllm import tables  # noqa: E402
from kvpool.integrations.vllm.hooks import Hooks  # noqa: E402
from kvpool.native.block_rows import BlockRows  # noqa: E402

NUM_ROWS, MAX_TOKENS, MAX_BLOCKS, MAX_ID = 8, 96, 12, 500
CPU = torch.device("cpu")
LAYOUTS = {
    "one group": ([16], None),
    "blocks of 7": ([7], None),
    "two groups": ([16, 32], None),
    "with mamba": ([16, 1024], [stock.SlotMappingMode.TOKEN_TO_KV_SLOT, stock.SlotMappingMode.NONE]),
}


@pytest.fixture(scope="module", autouse=True)
def kernels_of_the_cpu() -> Iterator[None]:
    """vLLM's slot kernel needs Triton; an engine on the CPU replaces it when it starts."""
    current_platform.register_triton_kernel_overrides()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make(cls: type, layout: str) -> Any:
    block_sizes, modes = LAYOUTS[layout]
    return cls(NUM_ROWS, MAX_TOKENS, False, CPU, block_sizes, [MAX_BLOCKS] * len(block_sizes), slot_mapping_modes=modes)


class Lockstep:
    """Both tables under the edits of an input batch: rows in use lie without gaps at the front."""

    def __init__(self, layout: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.both = [make(stock.MultiGroupBlockTable, layout), make(tables.MultiGroupBlockTable, layout)]
        self.num_groups = len(LAYOUTS[layout][0])
        self.num_rows = 0

    def call(self, name: str, *arguments: Any) -> None:
        for each in self.both:
            getattr(each, name)(*arguments)

    def ids(self, longest: int) -> tuple[list[int], ...]:
        return tuple(
            [self.rng.randrange(MAX_ID) for _ in range(self.rng.randrange(longest + 1))] for _ in range(self.num_groups)
        )

    def edit(self) -> None:
        kind = self.rng.choice(["add", "append", "append", "swap", "remove"])
        if kind == "add" and self.num_rows < NUM_ROWS:
            self.call("add_row", self.ids(MAX_BLOCKS // 2), self.num_rows)
            self.num_rows += 1
        elif self.num_rows == 0:
            return
        elif kind == "append":
            row, ids = self.rng.randrange(self.num_rows), self.ids(2)
            held = [int(table.num_blocks_per_row[row]) for table in self.both[0].block_tables]
            if all(n + len(new) <= MAX_BLOCKS for n, new in zip(held, ids)):
                self.call("append_row", ids, row)
        elif kind == "swap":
            self.call("swap_row", self.rng.randrange(self.num_rows), self.rng.randrange(self.num_rows))
        elif kind == "remove":
            row = self.rng.randrange(self.num_rows)
            self.num_rows -= 1
            self.call("clear_row", row)
            if row < self.num_rows:
                self.call("move_row", self.num_rows, row)

    def compare_rows(self) -> None:
        self.call("commit_block_table", self.num_rows)
        for one, other in zip(self.both[0].block_tables, self.both[1].block_tables):
            assert np.array_equal(one.num_blocks_per_row, other.num_blocks_per_row)
            assert np.array_equal(one.get_numpy_array(), other.get_numpy_array())
            assert torch.equal(one.get_cpu_tensor(), other.get_cpu_tensor())
            committed = other.get_device_tensor(self.num_rows)
            assert torch.equal(one.get_device_tensor(self.num_rows), committed)
            other.rows.check()

    def compare_slots(self) -> None:
        """Positions go past a row's blocks too, as those of drafts do; never past the row itself."""
        lengths = [self.rng.randrange(5) for _ in range(self.num_rows)]
        starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        limit = MAX_BLOCKS * min(table.block_size for table in self.both[0].block_tables)
        positions = torch.tensor([self.rng.randrange(limit) for _ in range(int(starts[-1]))], dtype=torch.int64)
        self.call("compute_slot_mapping", self.num_rows, starts, positions)
        n = positions.numel()
        for one, other in zip(self.both[0].block_tables, self.both[1].block_tables):
            assert torch.equal(one.slot_mapping.gpu[:n], other.slot_mapping.gpu[:n])
            if other.slot_mapping_mode is stock.SlotMappingMode.NONE:
                assert not other.slot_mapping.gpu.any()
            else:
                # vLLM's kernel for GPUs pads the tail, that for CPUs leaves it to the runner.
                assert (other.slot_mapping.gpu[n:] == -1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_lockstep(layout: str, seed: int) -> None:
    both = Lockstep(layout, seed)
    for _ in range(100):
        both.edit()
        both.compare_rows()
        both.compare_slots()


def test_padding_of_the_kernel_for_gpus() -> None:
    """Under Triton's interpreter vLLM's own kernel could be asked; here its rule is spelled out: what no token of the
    step uses is padding, also what a longer step used before."""
    native = make(tables.MultiGroupBlockTable, "one group")
    native.add_row(([3, 4],), 0)
    for n in (20, 3, 7):
        starts, positions = torch.tensor([0, n], dtype=torch.int32), torch.arange(n)
        native.compute_slot_mapping(1, starts, positions)
        slots = native[0].slot_mapping.gpu
        assert slots[:n].tolist() == [48 + p if p < 16 else 64 + p - 16 for p in range(n)]
        assert (slots[n:] == -1).all()


@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_are_those_that_vllm_expands_to(ratio: int) -> None:
    """vLLM expands the manager's ids on the device (``map_to_kernel_block_table``): id * ratio + 0 .. ratio - 1."""
    native = make(tables.MultiGroupBlockTable, "one group")
    expanded = BlockRows(NUM_ROWS, native[0].max_num_blocks_per_req * ratio, 16 // ratio, ratio)
    rng = random.Random(ratio)
    for row in range(NUM_ROWS):
        ids = [rng.randrange(MAX_ID) for _ in range(rng.randrange(1, MAX_BLOCKS))]
        native.add_row((ids,), row)
        expanded.add_row(ids, row)
    manager_ids = native[0].get_device_tensor(NUM_ROWS)
    wanted = (manager_ids[:, :, None] * ratio + torch.arange(ratio)).reshape(NUM_ROWS, -1)
    for row in range(NUM_ROWS):
        n = int(expanded.num_blocks_per_row[row])
        assert expanded.block_ids[row, :n].tolist() == wanted[row, :n].tolist()


def test_it_is_vllms_class_with_its_buffers() -> None:
    native = make(tables.MultiGroupBlockTable, "two groups")
    assert isinstance(native, stock.MultiGroupBlockTable)
    for table in native.block_tables:
        assert isinstance(table, stock.BlockTable)
        buffers = [value for value in vars(table).values() if isinstance(value, CpuGpuBuffer)]
        assert len(buffers) == 2 and all(buffer.gpu is buffer.cpu for buffer in buffers)
        assert np.shares_memory(table.rows.block_ids, table.block_table.np)
    with pytest.raises(ValueError, match="must match block_sizes length"):
        tables.MultiGroupBlockTable(4, 16, False, CPU, [16], [4, 4])


def test_rows_of_one_group_alone() -> None:
    """``cp_utils`` fills the rows of each group by itself, at full width, over what was there."""
    for each in (stock.MultiGroupBlockTable, tables.MultiGroupBlockTable):
        table = make(each, "two groups")[1]
        ids = [1 + i % MAX_ID for i in range(table.max_num_blocks_per_req)]
        for row in (0, 1, 1):
            table.add_row(ids, row)
        table.append_row([], 0)
        table.move_row(1, 2)
        table.swap_row(0, 3)
        table.clear_row(2)
        table.commit_block_table(4)
        assert table.get_device_tensor(4).tolist() == [[0] * len(ids)] * 3 + [ids]


def test_cells_cleared_and_put_back_by_the_runner() -> None:
    """``preserve_serving_state`` clears all cells, and restores them but no counts."""
    native = make(tables.MultiGroupBlockTable, "one group")
    native.add_row(([3, 4],), 0)
    table = native[0]
    saved = table.block_table.gpu.clone(), table.block_table.cpu.clone()
    native.clear()
    assert not table.get_numpy_array().any()
    table.block_table.gpu.copy_(saved[0])
    table.block_table.cpu.copy_(saved[1])
    native.append_row(([5],), 0)
    assert table.get_numpy_array()[0, :4].tolist() == [3, 4, 5, 0]
    table.rows.check()


def test_refusals_change_nothing() -> None:
    native = make(tables.MultiGroupBlockTable, "two groups")
    native.add_row(([3, 4], [5]), 0)
    width = native[0].max_num_blocks_per_req
    for ids, row in (([1], [-1]), 0), (([1] * width, [1]), 0), (([1], [1]), NUM_ROWS), (([1],), 0):
        with pytest.raises(InvalidArgumentError):
            native.append_row(ids, row)
    assert [int(table.num_blocks_per_row[0]) for table in native.block_tables] == [2, 1]
    with pytest.raises(ValueError, match="1 query starts for 1 requests"):
        native.compute_slot_mapping(1, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))


def test_tensors_of_another_kind_go_to_vllm() -> None:
    both = Lockstep("one group", 1)
    both.call("add_row", ([3, 4],), 0)
    both.call("commit_block_table", 1)
    strided = torch.arange(20, dtype=torch.int64)[::2]
    assert not tables.is_readable(strided, torch.int64) and not tables.is_readable(strided.int(), torch.int64)
    both.call("compute_slot_mapping", 1, torch.tensor([0, 10], dtype=torch.int32), strided.contiguous())
    one, other = (each[0].slot_mapping.gpu[:10].tolist() for each in both.both)
    assert one == other == [48 + p if p < 16 else 64 + p - 16 for p in range(0, 20, 2)]


def test_install_and_restore() -> None:
    hooks = Hooks()
    tables.install(hooks)
    try:
        assert gpu_input_batch.MultiGroupBlockTable is tables.MultiGroupBlockTable
    finally:
        hooks.restore()
    assert gpu_input_batch.MultiGroupBlockTable is stock.MultiGroupBlockTable
