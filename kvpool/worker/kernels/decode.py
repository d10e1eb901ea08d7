"""Attention of one token per request over the paged cache: Triton kernels, split over long sequences.

A program of ``decode_kernel`` takes a request, a KV head and a split of the sequence. It serves all query heads of
that KV head, so keys and values are read once, and keeps a running maximum, sum and weighted sum of values in float32
(online softmax, arXiv:1805.02867). Where a sequence is cut into several splits each leaves its normalised result and
the logarithm of its sum, and ``merge_kernel`` weighs them (flash decoding).

What is not attended to is not read either: tokens behind the sequence, in front of the window, and the table's cells in
front of the window, which are stale. So nothing that lies there can reach the result, were it NaN.

How a sequence is cut depends on numbers of the host alone, nothing waits for the device, and the result is right
whatever ``max_seq_len`` says.

With TRITON_INTERPRET=1 set before this module is imported it runs on tensors of the CPU, which is how it is tested.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpool.cache.spec import ceil_div
from kvpool.errors import InvalidArgumentError

LOG2_E = 1.4426950408889634
MERGE_TILE = 16
MIN_DOT_ROWS = 16  # of tl.dot
TILE_BYTES = 16_384  # of keys that a program holds at a time
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# How sequences are split.
MIN_TOKENS = 256  # fewer are not worth a merge
MAX_TOKENS = 2_048  # one long sequence among many short ones is cut too
PROGRAMS_PER_PROCESSOR = 4
MAX_PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Split:
    """Split i starts ``i * tokens`` behind the first token attended to.

    Attributes:
        tokens: of a split; the last one takes what is left.
        number: of splits, 1 or more.
    """

    tokens: int
    number: int


def plan_split(num_programs: int, max_tokens: int, num_processors: int, partial_bytes: int) -> Split:
    """Enough programs for the device, and no split too short to be worth it or so long that others wait for it.

    Args:
        num_programs: programs of one split: requests times KV heads.
        max_tokens: that a request attends to.
        num_processors: of the device.
        partial_bytes: what one split of all requests leaves for the merge; ``MAX_PARTIAL_BYTES`` in all at most.
    """
    wanted = ceil_div(PROGRAMS_PER_PROCESSOR * num_processors, num_programs)
    tokens = min(max(ceil_div(max_tokens, wanted), MIN_TOKENS), MAX_TOKENS)
    tokens = max(tokens, ceil_div(max_tokens, max(1, MAX_PARTIAL_BYTES // partial_bytes)))
    tokens = ceil_div(tokens, MIN_TOKENS) * MIN_TOKENS
    return Split(tokens, max(1, ceil_div(max_tokens, tokens)))


@triton.jit  # type: ignore[untyped-decorator]
def first_and_end(rows_ptr, seq_lens_ptr, request, width, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of a request, its first token to attend to, and the end; no tokens where it has no row."""
    row = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(seq_lens_ptr + request).to(tl.int32)
    end = tl.where(row >= 0, tl.minimum(length, width * BLOCK_SIZE), 0)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    return row, first, end


@triton.jit  # type: ignore[untyped-decorator]
def product_of(one, other, WIDENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Matrix product with float32 sums. ``WIDENS``: of float32 operands (Triton's interpreter multiplies the bits of
    bfloat16 ones as integers)."""
    if WIDENS:
        one, other = one.to(tl.float32), other.to(tl.float32)
    return tl.dot(one, other, input_precision="ieee")


IS_INTERPRETED = not isinstance(product_of, triton.JITFunction)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants only
    query_ptr,
    query_request_stride,
    query_head_stride,
    cache_ptr,
    cache_block_stride,
    cache_kv_stride,
    cache_token_stride,
    cache_head_stride,
    table_ptr,
    table_stride,
    width,
    rows_ptr,
    seq_lens_ptr,
    out_ptr,
    out_request_stride,
    out_head_stride,
    partial_ptr,
    partial_lse_ptr,
    scale,
    soft_cap,
    tokens_per_split,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """The ``GROUP`` query heads of one KV head of one request, over split ``program_id(1)`` of its tokens.

    ``scale`` and ``soft_cap`` are such that logits come out in base 2.
    """
    request = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    row, first, end = first_and_end(rows_ptr, seq_lens_ptr, request, width, BLOCK_SIZE, WINDOW)
    start = first + split * tokens_per_split
    stop = tl.where(split == num_splits - 1, end, tl.minimum(end, start + tokens_per_split))

    group = tl.arange(0, GROUP_TILE)
    place = tl.arange(0, HEAD_TILE)
    is_place = place < HEAD_SIZE
    is_query = (group < GROUP)[:, None] & is_place[None, :]
    query_head = kv_head * GROUP + group
    query_offsets = request * query_request_stride + query_head[:, None] * query_head_stride + place[None, :]
    query = tl.load(query_ptr + query_offsets, mask=is_query, other=0.0)
    key_ptr = cache_ptr + kv_head.to(tl.int64) * cache_head_stride + place[None, :]
    cells_ptr = table_ptr + row * table_stride

    maximum = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    weighted = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
    for tile_start in range(start, stop, TOKEN_TILE):
        token = tile_start + tl.arange(0, TOKEN_TILE)
        is_token = token < stop
        block = token // BLOCK_SIZE
        block_id = tl.load(cells_ptr + block, mask=is_token, other=0).to(tl.int64)
        offsets = block_id * cache_block_stride + (token - block * BLOCK_SIZE) * cache_token_stride
        is_read = is_token[:, None] & is_place[None, :]
        key = tl.load(key_ptr + offsets[:, None], mask=is_read, other=0.0).to(query.dtype)
        if GROUP_TILE == 1:
            logits = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]
        else:
            logits = product_of(query, tl.trans(key), WIDENS)
        logits = logits * scale
        if HAS_SOFT_CAP:
            # tanh by exp, which every version of Triton and its interpreter have; right at both ends
            logits = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits)))
        logits = tl.where(is_token[None, :], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(logits - new_maximum[:, None])
        value = tl.load(key_ptr + cache_kv_stride + offsets[:, None], mask=is_read, other=0.0).to(query.dtype)
        if GROUP_TILE == 1:
            product = tl.sum(tl.trans(weights) * value.to(tl.float32), axis=0)[None, :]
        else:
            product = product_of(weights.to(value.dtype), value, WIDENS)
        weighted = weighted * shrink[:, None] + product
        total = total * shrink + tl.sum(weights, axis=1)
        maximum = new_maximum

    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    if not IS_SPLIT:
        out_offsets = request * out_request_stride + query_head[:, None] * out_head_stride + place[None, :]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)
    elif start < stop:
        part = (request * NUM_KV_HEADS * GROUP + query_head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * HEAD_SIZE + place[None, :], result, mask=is_query)
        tl.store(partial_lse_ptr + part, maximum + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations of constants only
    partial_ptr,
    partial_lse_ptr,
    width,
    rows_ptr,
    seq_lens_ptr,
    out_ptr,
    out_request_stride,
    out_head_stride,
    tokens_per_split,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Weighs the results of a query head's splits; of those without tokens nothing was written."""
    request = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    _, first, end = first_and_end(rows_ptr, seq_lens_ptr, request, width, BLOCK_SIZE, WINDOW)
    used = tl.minimum(num_splits, tl.cdiv(tl.maximum(end - first, 0), tokens_per_split))

    place = tl.arange(0, HEAD_TILE)
    is_place = place < HEAD_SIZE
    first_part = (request * NUM_HEADS + head) * num_splits
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([HEAD_TILE], tl.float32)
    for tile_start in range(0, used, SPLIT_TILE):
        split = tile_start + tl.arange(0, SPLIT_TILE)
        is_used = split < used
        lse = tl.load(partial_lse_ptr + first_part + split, mask=is_used, other=float("-inf"))
        offsets = (first_part + split)[:, None] * HEAD_SIZE + place[None, :]
        result = tl.load(partial_ptr + offsets, mask=is_used[:, None] & is_place[None, :], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(lse - new_maximum)
        weighted = weighted * shrink + tl.sum(weights[:, None] * result, axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        maximum = new_maximum

    result = weighted / tl.where(total > 0.0, total, 1.0)
    out_offsets = request * out_request_stride + head * out_head_stride + place
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_place)


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    *,
    max_seq_len: int | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """Attention of the last token of each request to its sequence, whose keys and values are in the cache.

    Args:
        query: [r, num_heads, head_size], float16, bfloat16 or float32, items of a head side by side.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], one of these dtypes, items of a head side by
            side; num_heads is a multiple of num_kv_heads.
        block_table: int32 [max_rows, width], the blocks of a row side by side.
        rows, seq_lens: int32 [r]: row of each request, and its tokens with the one that asks. A request without tokens
            or with a negative row gets zeros; other rows outside the table are not noticed.
        scale: factor of the products of query and key.
        sliding_window: leading tokens up to the last ``sliding_window`` are neither attended to nor read, nor are their
            cells of the table.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
        out: where to write the result, like ``query``.
        max_seq_len: of ``seq_lens``, for how work is cut; what the table has room for if left out. A wrong number costs
            time alone.
        split: how to cut instead.

    Returns:
        [r, num_heads, head_size] of the query's dtype; sums are in float32.

    All on one device, for CUDA the current one; nothing waits. InvalidArgumentError for what doesn't fit together.
    O(tokens attended to).
    """
    _check(query, kv_cache, block_table, rows, seq_lens, out)
    if (sliding_window is not None and sliding_window < 1) or (soft_cap is not None and soft_cap <= 0):
        raise InvalidArgumentError(f"a sliding window of {sliding_window} tokens, logits capped at {soft_cap}")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if query.shape[0] == 0:
        return out
    num_requests, num_heads, head_size = query.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    if split is None:
        max_tokens = block_table.shape[1] * block_size if max_seq_len is None else max(1, max_seq_len)
        max_tokens = min(max_tokens, sliding_window or max_tokens)
        num_processors = _num_processors(query.device)
        split = plan_split(num_requests * num_kv_heads, max_tokens, num_processors, 4 * query.numel())
    compute_dtype = torch.promote_types(query.dtype, kv_cache.dtype)
    query = query.to(compute_dtype)
    group, head_tile = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_size))
    batch = (block_table.shape[1], rows, seq_lens, out, out.stride(0), out.stride(1))
    partial, partial_lse = _partials(query, split)
    shared = {"HEAD_SIZE": head_size, "HEAD_TILE": head_tile, "BLOCK_SIZE": block_size, "WINDOW": sliding_window or 0}
    decode_kernel[(num_requests * num_kv_heads, split.number)](
        *(
            query,
            query.stride(0),
            query.stride(1),
            kv_cache,
            *kv_cache.stride()[:4],
            block_table,
            block_table.stride(0),
        ),
        *batch,
        *(partial, partial_lse, scale / soft_cap if soft_cap else scale * LOG2_E, (soft_cap or 0.0) * LOG2_E),
        *(split.tokens, split.number),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_TILE=1 if group == 1 else max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        TOKEN_TILE=token_tile(head_tile, compute_dtype),
        HAS_SOFT_CAP=soft_cap is not None,
        IS_SPLIT=split.number > 1,
        WIDENS=IS_INTERPRETED and compute_dtype == torch.bfloat16,
        **shared,
    )
    if split.number > 1:
        merge_kernel[(num_requests * num_heads,)](
            *(partial, partial_lse, *batch, split.tokens, split.number),
            NUM_HEADS=num_heads,
            SPLIT_TILE=MERGE_TILE,
            **shared,
        )
    return out


def _partials(query: torch.Tensor, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the splits' results and logarithms, [r, num_heads, splits, ...]; none to speak of without any."""
    num_requests, num_heads, head_size = query.shape
    shape = (num_requests, num_heads, split.number) if split.number > 1 else (0, 0, 0)
    return query.new_empty((*shape, head_size), dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def token_tile(head_tile: int, dtype: torch.dtype) -> int:
    """Tokens that a program takes at a time, 16 .. 64: so many that their keys fit into ``TILE_BYTES``."""
    return max(16, min(64, TILE_BYTES // (head_tile * dtype.itemsize)))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    num_requests, num_heads, head_size = query.shape
    num_kv_heads, cache_head_size = kv_cache.shape[3:]
    if head_size != cache_head_size or num_heads % num_kv_heads:
        raise InvalidArgumentError(
            f"{num_heads} query heads of {head_size} over {num_kv_heads} KV heads of {cache_head_size}"
        )
    if query.dtype not in DTYPES or kv_cache.dtype not in DTYPES:
        raise InvalidArgumentError(f"queries {query.dtype} over a cache {kv_cache.dtype}: one of {DTYPES}")
    if rows.shape != (num_requests,) or seq_lens.shape != (num_requests,) or block_table.dim() != 2:
        raise InvalidArgumentError(
            f"{num_requests} queries, rows {list(rows.shape)}, lengths {list(seq_lens.shape)}, "
            f"table {list(block_table.shape)}"
        )
    if out is not None and out.shape != query.shape:
        raise InvalidArgumentError(f"a result {list(out.shape)} for queries {list(query.shape)}")
    strides = (query.stride(2), kv_cache.stride(4), block_table.stride(1), rows.stride(0), seq_lens.stride(0))
    if any(stride != 1 for stride in strides) or (out is not None and out.stride(2) != 1):
        raise InvalidArgumentError(f"items that aren't side by side: strides {strides}")
