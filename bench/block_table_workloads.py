"""Block tables under decoding: a step of 256 requests, 16 of which get a block, on every table that is installed.

  native   kvpool.worker.step.block_table.MultiGroupBlockTable on the CPU
  outputs  the same step from its SchedulerOutput by one call (StepOutputs), which also gives positions and query starts
  numpy    the same with numpy's indexing, as a table without native code would have it
  vllm     vLLM's MultiGroupBlockTable, as its CPU runner has it: the device tensor is the host's
  dropin   what the level ``tables`` puts in its place, called as vLLM calls it

A round is one step; figures are ns per request, or per append.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench.workloads import Workload

NUM_REQUESTS = 256
BLOCK_SIZE = 16
WIDTH = 128
MAX_TOKENS = 8_192
FIRST_BLOCKS = 20  # of each request when it starts
APPENDS = NUM_REQUESTS // BLOCK_SIZE  # a request needs a block every BLOCK_SIZE steps
MAX_STEPS = (WIDTH - FIRST_BLOCKS) * BLOCK_SIZE


class Table:
    """One group's table as an engine's worker would call it.

    Attributes:
        append_row: (ids of each group, row).
    """

    append_row: Callable[[tuple[list[int], ...], int], None]

    def add_row(self, ids: tuple[list[int], ...], row: int) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def compute_slots(self, positions: np.ndarray) -> None:
        """Slots of token i of row i; positions[i] of it."""
        raise NotImplementedError

    def slots(self) -> list[int]:
        """The slots of the last call."""
        raise NotImplementedError


class NativeTable(Table):
    def __init__(self) -> None:
        from kvpool.worker.step.block_table import BlockTableConfig, MultiGroupBlockTable

        self.tables = MultiGroupBlockTable([BlockTableConfig(BLOCK_SIZE, WIDTH)], NUM_REQUESTS, MAX_TOKENS)
        self.append_row, self.add_row = self.tables.append_row, self.tables.add_row  # type: ignore[method-assign]
        self.rows = np.arange(NUM_REQUESTS, dtype=np.int32)

    def commit(self) -> None:
        self.tables.commit(NUM_REQUESTS)

    def compute_slots(self, positions: np.ndarray) -> None:
        self.tables.compute_slot_mapping(self.rows, positions)

    def slots(self) -> list[int]:
        return self.tables[0].slot_mapping[:NUM_REQUESTS].tolist()


class NumpyTable(Table):
    def __init__(self) -> None:
        self.block_ids = np.zeros((NUM_REQUESTS, WIDTH), np.int32)
        self.num_blocks = np.zeros(NUM_REQUESTS, np.int32)
        self.slot_mapping = np.full(MAX_TOKENS, -1, np.int64)
        self.rows = np.arange(NUM_REQUESTS)

    def append_row(self, ids: tuple[list[int], ...], row: int) -> None:  # type: ignore[override]
        start = self.num_blocks[row]
        end = start + len(ids[0])
        self.block_ids[row, start:end] = ids[0]
        self.num_blocks[row] = end

    def add_row(self, ids: tuple[list[int], ...], row: int) -> None:
        self.num_blocks[row] = 0
        self.append_row(ids, row)

    def commit(self) -> None:
        """The device's table is the host's."""

    def compute_slots(self, positions: np.ndarray) -> None:
        blocks, offsets = np.divmod(positions, BLOCK_SIZE)
        n = len(positions)
        np.multiply(self.block_ids[self.rows, blocks], BLOCK_SIZE, out=self.slot_mapping[:n], dtype=np.int64)
        self.slot_mapping[:n] += offsets
        self.slot_mapping[n:] = -1

    def slots(self) -> list[int]:
        return self.slot_mapping[:NUM_REQUESTS].tolist()


class VllmTable(Table):
    """vLLM's class, or a subclass of it, through the calls of its V1 runner."""

    def __init__(self, make: Callable[..., Any]) -> None:
        import torch
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()
        self.tables = make(NUM_REQUESTS, MAX_TOKENS, False, torch.device("cpu"), [BLOCK_SIZE], [WIDTH])
        for buffer in (self.tables[0].block_table, self.tables[0].slot_mapping):
            buffer.gpu = buffer.cpu
        self.append_row, self.add_row = self.tables.append_row, self.tables.add_row  # type: ignore[method-assign]
        self.query_starts = torch.arange(NUM_REQUESTS + 1, dtype=torch.int32)
        self.positions = torch.zeros(NUM_REQUESTS, dtype=torch.int64)

    def commit(self) -> None:
        self.tables.commit_block_table(NUM_REQUESTS)

    def compute_slots(self, positions: np.ndarray) -> None:
        self.tables.compute_slot_mapping(NUM_REQUESTS, self.query_starts, self.positions)

    def slots(self) -> list[int]:
        return self.tables[0].slot_mapping.gpu[:NUM_REQUESTS].tolist()


def make_table(name: str) -> Table:
    if name == "native":
        return NativeTable()
    if name == "numpy":
        return NumpyTable()
    if name == "dropin":
        from kvpool.integrations.vllm.tables import MultiGroupBlockTable

        return VllmTable(MultiGroupBlockTable)
    from vllm.v1.worker.block_table import MultiGroupBlockTable as StockTable

    return VllmTable(StockTable)


def installed_names() -> list[str]:
    names = ["native", "outputs", "numpy"] if find_spec("torch") else ["outputs", "numpy"]
    return [*names, "vllm", "dropin"] if find_spec("vllm") else names


class DecodeSteps(Workload):
    """16 appends, commit and the slots of 256 decoding requests; or one of the three alone.

    Args:
        part: "step", "append", "commit" or "slots".
    """

    def __init__(self, name: str, part: str = "step") -> None:
        self.table = make_table(name)
        self.part = part
        self.blocks_per_round = APPENDS if part == "append" else NUM_REQUESTS
        self.num_steps = MAX_STEPS
        self.positions = np.zeros(NUM_REQUESTS, np.int64)

    def prepare(self) -> None:
        if self.num_steps == MAX_STEPS:
            self.num_steps = 0
            for row in range(NUM_REQUESTS):
                self.table.add_row(([1 + (row * 7 + i) % 5_000 for i in range(FIRST_BLOCKS)],), row)
        turn = self.num_steps % BLOCK_SIZE
        self.appends = [(([5_001 + self.num_steps],), turn * APPENDS + i) for i in range(APPENDS)]
        # As far as every request has got: those whose turn it is get the block of their next token now.
        self.positions[:] = FIRST_BLOCKS * BLOCK_SIZE + self.num_steps - np.repeat(np.arange(BLOCK_SIZE), APPENDS)
        np.maximum(self.positions, FIRST_BLOCKS * BLOCK_SIZE - BLOCK_SIZE, out=self.positions)
        if isinstance(self.table, VllmTable):
            self.table.positions.numpy()[:] = self.positions
        if self.part in ("commit", "slots"):
            for ids, row in self.appends:
                self.table.append_row(ids, row)
        self.num_steps += 1

    def operate(self) -> None:
        append, table = self.table.append_row, self.table
        if self.part in ("step", "append"):
            for ids, row in self.appends:
                append(ids, row)
        if self.part in ("step", "commit"):
            table.commit()
        if self.part in ("step", "slots"):
            table.compute_slots(self.positions)

    def check(self) -> None:
        """The slots of one more step, from the blocks that the appends put there."""
        if self.part != "step":
            return
        self.prepare()
        self.operate()
        for row, (slot, position) in enumerate(zip(self.table.slots(), self.positions.tolist())):
            index = position // BLOCK_SIZE
            first = row // APPENDS
            block = 1 + (row * 7 + index) % 5_000
            if index >= FIRST_BLOCKS:
                block = 5_001 + first + (index - FIRST_BLOCKS) * BLOCK_SIZE
            assert slot == block * BLOCK_SIZE + position % BLOCK_SIZE, f"row {row}, position {position}"


class OutputSteps(Workload):
    """The same steps from their SchedulerOutput by one call of StepOutputs.

    Args:
        with_all: also rows of keys and values, and compressed rows.
    """

    def __init__(self, with_all: bool = False) -> None:
        from kvpool.native.block_rows import BlockRowGroups, BlockRows
        from kvpool.native.step_outputs import StepOutputs
        from kvpool.scheduler.output import CachedRequestData, SchedulerOutput

        self.blocks_per_round = NUM_REQUESTS
        self.groups = BlockRowGroups([BlockRows(NUM_REQUESTS, WIDTH, BLOCK_SIZE)])
        self.outputs = StepOutputs(self.groups, MAX_TOKENS, with_kv_rows=with_all, with_compressed=with_all)
        self.ids = [f"request-{i}" for i in range(NUM_REQUESTS)]
        self.row_of = {request_id: row for row, request_id in enumerate(self.ids)}
        self.make_step = lambda blocks, computed: SchedulerOutput(
            1,
            [],
            CachedRequestData(self.ids, [False] * NUM_REQUESTS, blocks, computed, computed, [[]] * NUM_REQUESTS),
            dict.fromkeys(self.ids, 1),
            NUM_REQUESTS,
            *([] for _ in range(5)),
        )
        self.num_steps = MAX_STEPS

    def prepare(self) -> None:
        if self.num_steps == MAX_STEPS:
            self.num_steps = 0
            for row in range(NUM_REQUESTS):
                self.groups.add_row(([1 + (row * 7 + i) % 5_000 for i in range(FIRST_BLOCKS)],), row)
        turn = self.num_steps % BLOCK_SIZE
        blocks: list[Any] = [None] * NUM_REQUESTS
        for i in range(APPENDS):
            blocks[turn * APPENDS + i] = ([5_001 + self.num_steps],)
        first = FIRST_BLOCKS * BLOCK_SIZE
        computed = [max(first - BLOCK_SIZE, first + self.num_steps - row // APPENDS) for row in range(NUM_REQUESTS)]
        self.step = self.make_step(blocks, computed)
        self.num_steps += 1

    def operate(self) -> None:
        self.outputs.apply_step(self.step, self.row_of)

    def check(self) -> None:
        self.prepare()
        self.operate()
        rows = self.groups.groups[0]
        rows.check()
        for row, position in enumerate(self.outputs.positions[:NUM_REQUESTS].tolist()):
            slot = int(rows.block_ids[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            assert self.outputs.slots[0][row] == slot


def make_workload(name: str, part: str = "step") -> Workload:
    """A workload of an implementation; ``outputs`` has only whole steps."""
    return OutputSteps() if name == "outputs" else DecodeSteps(name, part)
