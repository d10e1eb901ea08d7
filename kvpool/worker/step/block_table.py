"""Block tables of a worker: rows of block ids on the host, their copy on the device, and slots of tokens.

Rows are edited on the host by native code; ``commit`` sends what changed. On the CPU host and device table are one
tensor, and there is nothing to send. A request has the same row in the tables of all KV cache groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.errors import InvalidArgumentError
from kvpool.native.block_rows import BlockRowGroups, BlockRows
from kvpool.native.step_outputs import PAD_SLOT_ID, compute_slots
from kvpool.worker.step.staging import Staging

BlockIds = list[int] | tuple[int, ...] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class BlockTableConfig:
    """The table of one KV cache group.

    Attributes:
        block_size: tokens in a block of the cache manager.
        max_blocks_per_row: blocks of the manager that a request can have.
        kernel_block_size: tokens in a block of the attention kernel, a divisor of ``block_size``; the same if None. The
            table then holds kernel blocks: id b of the manager becomes b * ratio .. b * ratio + ratio - 1.
        num_blocks: blocks of the pool; larger ids are refused. Not checked if None.
    """

    block_size: int
    max_blocks_per_row: int
    kernel_block_size: int | None = None
    num_blocks: int | None = None

    @property
    def ratio(self) -> int:
        """Blocks of the kernel in a block of the manager. InvalidArgumentError if there is no whole number of them."""
        kernel_block_size = self.kernel_block_size or self.block_size
        if self.block_size < 1 or self.block_size % kernel_block_size:
            raise InvalidArgumentError(
                f"blocks of {self.block_size} tokens aren't made of blocks of {kernel_block_size}"
            )
        return self.block_size // kernel_block_size


class BlockTable(BlockRows):
    """The block table of one KV cache group (vLLM: ``vllm.v1.worker.block_table.BlockTable``).

    Its rows on the host are the base's: ``append_row``, ``add_row``, ``move_row``, ``swap_row``, ``clear_row``. Not for
    several threads at once.

    Args:
        config: sizes of the group.
        max_num_rows: requests that may run at a time.
        max_num_tokens: tokens of the largest step.
        device: where kernels read the table.
        shares_memory: whether the device reads the host's memory; by default on the CPU.

    Attributes:
        host, device_rows: int32 [max_num_rows, width]; rows are edited in the first, and the second is what kernels
            read, as of the last ``commit``.
        num_blocks_per_row: int32 numpy array [max_num_rows], in blocks of the kernel, as are width and ``block_size``.
        slot_mapping: int64 [max_num_tokens] on the device; behind the tokens of a step it is ``PAD_SLOT_ID``.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        max_num_rows: int,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
        *,
        shares_memory: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.shares_memory = self.device.type == "cpu" if shares_memory is None else shares_memory
        shape = (max_num_rows, config.max_blocks_per_row * config.ratio)
        if min(*shape, max_num_tokens) < 1:
            raise InvalidArgumentError(f"no table has {shape[0]} rows of {shape[1]} blocks and {max_num_tokens} tokens")
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        block_size = config.block_size // config.ratio
        super().__init__(*shape, block_size, config.ratio, config.num_blocks, self.host.numpy())
        self.device_rows = self.host if self.shares_memory else torch.zeros_like(self.host, device=self.device)
        self.slot_mapping = torch.full((max_num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=self.device)
        self._shared_slots = self.slot_mapping.numpy() if self.shares_memory else None
        self._max_num_tokens = max_num_tokens
        self._num_slots_written = 0
        self._slots_written = self.slot_mapping[:0]
        self._changes = Staging(torch.int32, self.device)
        self._slots = Staging(torch.int64, self.device)

    def commit(self, num_rows: int) -> None:
        """Makes the device's rows those of the host, for the first ``num_rows``, by one copy that nobody waits for.

        Changed cells travel as (index, value) and are put in place on the device; where that is more than the rows
        themselves, these are copied whole. Changes of later rows wait for a commit that includes them.
        O(num_rows + changes).
        """
        self._check_num_rows(num_rows)
        num_changes = 0 if self.shares_memory else self.num_changes(num_rows)
        if num_changes == 0:
            return
        committed = self.device_rows[:num_rows]
        if 2 * num_changes >= committed.numel():
            taken = self._changes.take(committed.numel())
            taken.copy_(self.host[:num_rows].view(-1))
            self.drop_changes(num_rows)
            self._changes.send(taken, committed.view(-1))
        else:
            taken = self._changes.take(2 * num_changes)
            self.take_changes(num_rows, taken.numpy())
            pairs = self._changes.send(taken, torch.empty_like(taken, device=self.device)).view(num_changes, 2)
            self.device_rows.view(-1).index_put_((pairs[:, 0].long(),), pairs[:, 1])

    def compute_slot_mapping(self, req_indices: Any, positions: Any) -> torch.Tensor:
        """Slot of each token: ``table[row, position // block_size] * block_size + position % block_size``.

        Args:
            req_indices, positions: row and position of each token, integers [n]. In host memory (arrays, lists, CPU
                tensors) a token without a block is an InvalidArgumentError and changes nothing; on the device it gets a
                slot of the null block, or none (``PAD_SLOT_ID``) outside the table.

        Returns:
            The first n items of ``slot_mapping``, on the device. O(n + tokens of the step before).
        """
        num_tokens = len(positions)
        if len(req_indices) != num_tokens or num_tokens > self._max_num_tokens:
            raise InvalidArgumentError(
                f"{len(req_indices)} rows and {num_tokens} positions, in a step of at most {self._max_num_tokens}"
            )
        num_to_write = max(num_tokens, self._num_slots_written)
        if isinstance(positions, torch.Tensor) and positions.device.type != "cpu":
            from kvpool.worker.kernels.slots import write_slots

            target = self.slot_mapping[:num_to_write]
            write_slots(self.device_rows, req_indices.contiguous(), positions.contiguous(), self.block_size, target)
        elif self._shared_slots is not None:
            self._write_host_slots(req_indices, positions, num_tokens, self._shared_slots, num_to_write)
        else:
            taken = self._slots.take(num_to_write)
            self._write_host_slots(req_indices, positions, num_tokens, taken.numpy(), num_to_write)
            self._slots.send(taken, self.slot_mapping[:num_to_write])
        if num_tokens != self._num_slots_written:  # else the same part: torch takes tens of us to cut one, cold
            self._num_slots_written = num_tokens
            self._slots_written = self.slot_mapping[:num_tokens]
        return self._slots_written

    def _write_host_slots(
        self, req_indices: Any, positions: Any, num_tokens: int, slots: np.ndarray[Any, Any], num_to_write: int
    ) -> None:
        compute_slots(self, req_indices, positions, slots)
        if num_tokens < num_to_write:
            slots[num_tokens:num_to_write] = PAD_SLOT_ID

    def _check_num_rows(self, num_rows: int) -> None:
        if not 0 <= num_rows <= self.num_rows:
            raise InvalidArgumentError(f"a batch of {num_rows} rows in a table of {self.num_rows}")


class MultiGroupBlockTable(BlockRowGroups):
    """The block tables of all KV cache groups (vLLM: the class of that name).

    Rows are edited in all groups by one call of the base, applied in all of them or in none: ``append_row``,
    ``add_row``, ``move_row``, ``swap_row``, ``clear_row``, and ``apply_step`` for a whole ``SchedulerOutput``.

    Args: as for ``BlockTable``, with a configuration for each group.

    Attributes:
        block_tables: one ``BlockTable`` a group; also ``tables[i]``.
    """

    def __init__(
        self,
        configs: Sequence[BlockTableConfig],
        max_num_rows: int,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
        *,
        shares_memory: bool | None = None,
    ) -> None:
        self.block_tables = [
            BlockTable(config, max_num_rows, max_num_tokens, device, shares_memory=shares_memory) for config in configs
        ]
        super().__init__(self.block_tables)

    def __getitem__(self, group_id: int) -> BlockTable:
        return self.block_tables[group_id]

    def __len__(self) -> int:
        return len(self.block_tables)

    def commit(self, num_rows: int) -> None:
        """``BlockTable.commit`` of each group."""
        for table in self.block_tables:
            table.commit(num_rows)

    def compute_slot_mapping(self, req_indices: Any, positions: Any) -> list[torch.Tensor]:
        """``BlockTable.compute_slot_mapping`` of each group."""
        return [table.compute_slot_mapping(req_indices, positions) for table in self.block_tables]
