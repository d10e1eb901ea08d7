"""One step of the scheduler as tensors: appended blocks, positions, slots and compressed rows by one native call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.native.step_outputs import StepOutputs
from kvpool.worker.step.block_table import MultiGroupBlockTable

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GroupTensors:
    """What kernels need of a KV cache group. n tokens and r requests in the step.

    Attributes:
        block_table: int32 [max_num_rows, width] on the device; the rows of a batch are ``StepTensors.rows``.
        slots: int64 [n] on the device, place of each token.
        key_rows, value_rows: int64 [n] on the device, see ``compute_kv_rows``; None if not asked for.
        block_starts, blocks, last_block_lens: int32, see ``compress_rows`` (FlashInfer plans on the host); None if not
            asked for.
        num_common_blocks: leading blocks that all requests share and whose keys and values are there already.
    """

    block_table: torch.Tensor
    slots: torch.Tensor
    key_rows: torch.Tensor | None
    value_rows: torch.Tensor | None
    block_starts: torch.Tensor | None
    blocks: torch.Tensor | None
    last_block_lens: torch.Tensor | None
    num_common_blocks: int


@dataclass(frozen=True)
class StepTensors:
    """A step: running and resumed requests in the order of the ``SchedulerOutput``, then the new ones.

    Attributes:
        rows, seq_lens: int32 [r] on the device: row of each request, and its tokens after the step.
        query_starts: int32 [r + 1] on the device: first token of each request, and n.
        positions: int64 [n] on the device.
        groups: one for each KV cache group.
        host_rows, host_seq_lens, host_query_starts: the int32 items of the first three as numpy arrays, so that nobody
            has to wait for the device to know the shape of the step.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    positions: torch.Tensor
    groups: list[GroupTensors]
    host_rows: HostArray
    host_seq_lens: HostArray
    host_query_starts: HostArray


class StepTensorBuilder:
    """Turns each ``SchedulerOutput`` into ``StepTensors``. Not for several threads at once.

    Args:
        tables: the tables to apply it to.
        max_num_tokens: tokens of the largest step.
        with_kv_rows, with_compressed: which of the optional tensors to make.
    """

    def __init__(
        self,
        tables: MultiGroupBlockTable,
        max_num_tokens: int,
        *,
        with_kv_rows: bool = False,
        with_compressed: bool = False,
    ) -> None:
        self.tables = tables
        self._device = tables[0].device
        self._is_cuda = self._device.type == "cuda"
        self._shares_memory = tables[0].shares_memory
        self._sent: torch.cuda.Event | None = None
        self._host: dict[int, torch.Tensor] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._parts: dict[int, tuple[int, torch.Tensor]] = {}
        self.outputs = StepOutputs(
            tables,
            max_num_tokens,
            with_kv_rows=with_kv_rows,
            with_compressed=with_compressed,
            make_array=self._make_array,
        )

    def build(self, output: Any, row_of: dict[str, int]) -> StepTensors:
        """Applies the step to the tables, sends what changed, and returns the step's tensors.

        The tensors and arrays are void after the next call. Errors: see ``StepOutputs.apply_step``.
        """
        if self._sent is not None:
            self._sent.synchronize()
        out = self.outputs
        out.apply_step(output, row_of)
        used = int(out.rows[: out.num_requests].max(initial=-1)) + 1
        self.tables.commit(used)
        step = StepTensors(
            rows=self._send(out.rows, out.num_requests),
            seq_lens=self._send(out.seq_lens, out.num_requests),
            query_starts=self._send(out.query_starts, out.num_requests + 1),
            positions=self._send(out.positions, out.num_tokens),
            groups=[self._group(group_id) for group_id in range(len(self.tables))],
            host_rows=out.rows[: out.num_requests],
            host_seq_lens=out.seq_lens[: out.num_requests],
            host_query_starts=out.query_starts[: out.num_requests + 1],
        )
        if self._is_cuda:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self._device))
        return step

    def _group(self, group_id: int) -> GroupTensors:
        out = self.outputs
        has_kv_rows, is_compressed = bool(out.key_rows), bool(out.blocks)
        starts = self._host_part(out.block_starts[group_id], out.num_requests + 1) if is_compressed else None
        return GroupTensors(
            block_table=self.tables[group_id].device_rows,
            slots=self._send(out.slots[group_id], out.num_tokens),
            key_rows=self._send(out.key_rows[group_id], out.num_tokens) if has_kv_rows else None,
            value_rows=self._send(out.value_rows[group_id], out.num_tokens) if has_kv_rows else None,
            block_starts=starts,
            blocks=None if starts is None else self._host_part(out.blocks[group_id], int(starts[-1])),
            last_block_lens=self._host_part(out.last_block_lens[group_id], out.num_requests) if is_compressed else None,
            num_common_blocks=out.num_common_blocks[group_id],
        )

    def _make_array(self, num_items: int, dtype: Any) -> np.ndarray[Any, Any]:
        tensor = torch.empty(num_items, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=self._is_cuda)
        array = tensor.numpy()
        self._host[id(array)] = tensor
        return array

    def _host_part(self, array: np.ndarray[Any, Any], num_items: int) -> torch.Tensor:
        return self._leading_part(self._host[id(array)], num_items)

    def _send(self, array: np.ndarray[Any, Any], num_items: int) -> torch.Tensor:
        host = self._host_part(array, num_items)
        if self._shares_memory:
            return host
        if id(array) not in self._on_device:
            self._on_device[id(array)] = torch.empty_like(self._host[id(array)], device=self._device)
        return self._leading_part(self._on_device[id(array)], num_items).copy_(host, non_blocking=True)

    def _leading_part(self, tensor: torch.Tensor, num_items: int) -> torch.Tensor:
        """The first items of a tensor that lives as long as this object. Steps of one size after the other are the
        rule, and cutting a tensor costs as much as all of a step's slots."""
        known = self._parts.get(id(tensor))
        if known is None or known[0] != num_items:
            known = self._parts[id(tensor)] = num_items, tensor[:num_items]
        return known[1]
