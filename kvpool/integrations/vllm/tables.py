"""Level ``tables``: the block tables of vLLM's V1 runner on native rows.

``InputBatch`` builds one ``MultiGroupBlockTable``, from a name in its module; that name is what is replaced. The new
class lets vLLM's own build its tables, with its buffers, widths and checks, and then takes over their memory: rows are
edited by the core, and slots of positions in host memory are computed by it. Device tensors, context parallelism and
whatever else vLLM's tables do stay vLLM's. The V2 runner has tables of another kind and never asks for these.

On the CPU vLLM keeps a device copy that it copies to at every step, or makes it the same tensor (``CPUModelRunner``);
here it is the same tensor from the start, and there is nothing to commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker import block_table as stock

from kvpool.native.block_rows import BlockRowGroups, BlockRows
from kvpool.native.step_outputs import QuerySlots

if TYPE_CHECKING:
    from kvpool.integrations.vllm.hooks import Hooks

TARGETS = (
    "vllm.v1.worker.block_table.MultiGroupBlockTable",
    "vllm.v1.worker.block_table.BlockTable",
    "vllm.v1.utils.CpuGpuBuffer",
    "vllm.v1.worker.gpu_input_batch.InputBatch.__init__",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._postprocess_tensors",
)


class BlockTable(stock.BlockTable):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's table of one KV cache group, made native by ``take_over``.

    Attributes beside vLLM's:
        rows: the native rows, in the memory of ``block_table.cpu``.
    """

    rows: BlockRows

    @classmethod
    def take_over(cls, table: Any) -> BlockTable:
        """Turns a table that vLLM has just built into a native one, in place."""
        is_on_host = table.device.type == "cpu"
        if is_on_host:
            table.block_table.gpu = table.block_table.cpu
            table.slot_mapping.gpu = table.slot_mapping.cpu
        table.__class__ = cls
        num_rows, width = table.block_table.np.shape
        table.rows = BlockRows(num_rows, width, table.block_size, memory=table.block_table.np)
        table.num_blocks_per_row = table.rows.num_blocks_per_row
        return table  # type: ignore[no-any-return]

    def append_row(self, block_ids: list[int], row_idx: int) -> None:
        self.rows.append_row(block_ids, row_idx)

    def add_row(self, block_ids: list[int], row_idx: int) -> None:
        self.rows.add_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        self.rows.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        self.rows.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        self.rows.swap_row(src, tgt)

    def commit_block_table(self, num_reqs: int) -> None:
        if self.block_table.gpu is not self.block_table.cpu:
            super().commit_block_table(num_reqs)


class MultiGroupBlockTable(BlockRowGroups, stock.MultiGroupBlockTable):  # type: ignore[misc]
    """vLLM's tables of all KV cache groups; edits of rows are the base's native methods, one call for all groups."""

    block_tables: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stock.MultiGroupBlockTable.__init__(self, *args, **kwargs)
        self.block_tables = [BlockTable.take_over(table) for table in self.block_tables]
        BlockRowGroups.__init__(self, [table.rows for table in self.block_tables])
        self._is_on_host = all(table.device.type == "cpu" for table in self.block_tables)
        self._maps_plainly = self._is_on_host and all(table.dcp_world_size == 1 for table in self.block_tables)
        self._query_slots = [
            QuerySlots(table.rows, table.slot_mapping.np)
            for table in self.block_tables
            if table.slot_mapping_mode is stock.SlotMappingMode.TOKEN_TO_KV_SLOT
        ]

    def commit_block_table(self, num_reqs: int) -> None:
        if not self._is_on_host:
            super().commit_block_table(num_reqs)

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        are_readable = is_readable(query_start_loc, torch.int32) and is_readable(positions, torch.int64)
        if not (self._maps_plainly and are_readable):
            super().compute_slot_mapping(num_reqs, query_start_loc, positions)
            return
        num_tokens = positions.shape[0]
        if query_start_loc.shape[0] <= num_reqs:
            raise ValueError(f"{query_start_loc.shape[0]} query starts for {num_reqs} requests")
        starts, places = query_start_loc.data_ptr(), positions.data_ptr()
        for query_slots in self._query_slots:
            query_slots.write(num_reqs, starts, places, num_tokens)

    def clear(self) -> None:
        # vLLM's, which zeroes the cells and leaves the counts: its caller puts the cells back.
        stock.MultiGroupBlockTable.clear(self)


def is_readable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the items lie one after the other in host memory."""
    return tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()


def install(hooks: Hooks) -> None:
    """Makes vLLM's input batches build native tables."""
    from vllm.v1.worker import gpu_input_batch

    if gpu_input_batch.MultiGroupBlockTable is not stock.MultiGroupBlockTable:
        raise RuntimeError("vllm.v1.worker.gpu_input_batch holds another MultiGroupBlockTable than vLLM's")
    hooks.replace(gpu_input_batch, "MultiGroupBlockTable", MultiGroupBlockTable)
