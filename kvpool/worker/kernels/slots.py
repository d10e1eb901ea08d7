"""Slots of tokens whose positions are on the device: a Triton kernel.

With TRITON_INTERPRET=1 set before this module is imported it runs on tensors of the CPU, which is how it is tested.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpool.native.step_outputs import PAD_SLOT_ID

TOKENS_PER_PROGRAM = 256


@triton.jit  # type: ignore[untyped-decorator]
def slot_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants only
    table_ptr,
    row_stride,
    num_rows,
    width,
    rows_ptr,
    positions_ptr,
    slots_ptr,
    num_tokens,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAD: tl.constexpr,
):
    """Writes ``num_slots`` slots; those from ``num_tokens`` on, and of tokens outside the table, are padding."""
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_token = token < num_tokens
    row = tl.load(rows_ptr + token, mask=is_token, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=is_token, other=-1).to(tl.int64)
    block = position // BLOCK_SIZE
    is_inside = is_token & (row >= 0) & (row < num_rows) & (position >= 0) & (block < width)
    block_id = tl.load(table_ptr + row * row_stride + block, mask=is_inside, other=0).to(tl.int64)
    slot = block_id * BLOCK_SIZE + (position - block * BLOCK_SIZE)
    tl.store(slots_ptr + token, tl.where(is_inside, slot, PAD), mask=token < num_slots)


def write_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int, slots: torch.Tensor
) -> None:
    """Slot of each token, and padding behind them.

    Args:
        table: int32 [num_rows, width], a row's items side by side. Cells behind a row's blocks hold the null block: a
            token there gets a slot of the null block, since counts are not on the device.
        rows, positions: integers [num_tokens], side by side. Outside the table: ``PAD_SLOT_ID``.
        block_size: tokens of a block.
        slots: int64 [n], n >= num_tokens; all of it is written.

    All on one device; nothing waits. O(n).
    """
    if slots.numel() == 0:
        return
    num_programs = triton.cdiv(slots.numel(), TOKENS_PER_PROGRAM)
    slot_kernel[(num_programs,)](
        table,
        table.stride(0),
        table.shape[0],
        table.shape[1],
        rows,
        positions,
        slots,
        positions.numel(),
        slots.numel(),
        BLOCK_SIZE=block_size,
        TILE=TOKENS_PER_PROGRAM,
        PAD=PAD_SLOT_ID,
    )
