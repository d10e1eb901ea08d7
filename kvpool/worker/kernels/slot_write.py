"""Keys and values of packed tokens to their slots: a Triton kernel, one launch for both.

With TRITON_INTERPRET=1 set before this module is imported it runs on tensors of the CPU, which is how it is tested.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpool.errors import InvalidArgumentError

MAX_ITEMS_PER_PROGRAM = 2_048
ITEMS_PER_WARP = 256


@triton.jit  # type: ignore[untyped-decorator]
def slot_write_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants only
    key_ptr,
    key_token_stride,
    key_head_stride,
    value_ptr,
    value_token_stride,
    value_head_stride,
    slots_ptr,
    cache_ptr,
    num_slots,
    block_size,
    HEAD_SIZE: tl.constexpr,
    TOKEN_ITEMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program writes ``TILE`` items of one token's key and value; of a token without a slot none."""
    token = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        is_item = item < TOKEN_ITEMS
        head = item // HEAD_SIZE
        place = item - head * HEAD_SIZE
        key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + place, mask=is_item)
        value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + place, mask=is_item)
        key_row = slot + slot // block_size * block_size
        target = cache_ptr + key_row * TOKEN_ITEMS + item
        tl.store(target, key.to(cache_ptr.dtype.element_ty), mask=is_item)
        value_target = target + block_size * TOKEN_ITEMS
        tl.store(value_target, value.to(cache_ptr.dtype.element_ty), mask=is_item)


def write_to_slots(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes packed keys and values to a layer's cache, converted to its dtype.

    Args:
        kv_cache: contiguous [num_blocks, 2, block_size, num_kv_heads, head_size].
        key, value: [n, num_kv_heads, head_size]; with the items of a head side by side they are read in place, heads
            and tokens being anywhere (views of a fused projection).
        slots: int64 [n]. A token whose slot is negative or behind the cache is skipped. Of several tokens at one slot
            any one may stay.

    All on one device, for CUDA the current one; nothing waits. InvalidArgumentError for other shapes. O(n).
    """
    num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
    wanted = (slots.numel(), num_kv_heads, head_size)
    if key.shape != wanted or value.shape != wanted or not kv_cache.is_contiguous():
        raise InvalidArgumentError(
            f"keys {list(key.shape)} and values {list(value.shape)} for {slots.numel()} slots of a cache "
            f"{list(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    if slots.numel() == 0:
        return
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    token_items = num_kv_heads * head_size
    tile = min(triton.next_power_of_2(token_items), MAX_ITEMS_PER_PROGRAM)
    slot_write_kernel[(slots.numel(), triton.cdiv(token_items, tile))](
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        slots.contiguous(),
        kv_cache,
        num_blocks * block_size,
        block_size,
        HEAD_SIZE=head_size,
        TOKEN_ITEMS=token_items,
        TILE=tile,
        num_warps=max(1, min(8, tile // ITEMS_PER_WARP)),
    )
