"""Stand-ins for FlashInfer and flash-attn, by plain torch: what their documentation says of the calls made here.

Written from the documentation of flashinfer-python 0.7.4 and flash-attn 2.8; names and defaults are theirs. They refuse
what the packages don't take, and read what they are told to read: a wrong start, length, window or alignment gives
wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 4, 8)


def attend(query: Any, keys: Any, values: Any, *, scale: float, cap: float, left: int, causal: bool) -> Any:
    """Queries [q, num_heads, d] are the last of the keys [k, num_kv_heads, d].

    ``left`` tokens before them are seen, all if it is negative; those behind too, unless ``causal``.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    is_hidden = (behind < 0) & torch.tensor(causal)
    if left >= 0:
        is_hidden = is_hidden | (behind > left)
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


class _PagedWrapper:
    """What FlashInfer's two wrappers of the paged cache have in common."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 16 << 20
        self.planned: dict[str, Any] | None = None

    def keep(
        self, indptr: Any, indices: Any, last_page_len: Any, sizes: tuple[int, int, int, int], **given: Any
    ) -> None:
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.dim() == 1
        num_qo_heads, num_kv_heads, _, page_size = sizes
        assert indptr[0] == 0 and indptr[-1] == len(indices) and len(indptr) == len(last_page_len) + 1
        assert (indptr.diff() >= 1).all() and (last_page_len >= 1).all() and (last_page_len <= page_size).all()
        assert num_qo_heads % num_kv_heads == 0 and given["q_data_type"] in HALF_DTYPES
        kept = {"indptr": indptr.clone(), "indices": indices.clone(), "last_page_len": last_page_len.clone()}
        self.planned = {**kept, "sizes": sizes, **given}

    def run_rows(self, q: Any, paged_kv_cache: Any, qo_indptr: list[int], causal: bool) -> Any:
        plan = self.planned
        assert plan is not None, "run before plan"
        num_qo_heads, num_kv_heads, head_dim, page_size = plan["sizes"]
        assert q.shape == (qo_indptr[-1], num_qo_heads, head_dim) and q.is_contiguous()
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_dim)
        assert q.dtype == plan["q_data_type"] and paged_kv_cache.dtype == (plan["kv_data_type"] or q.dtype)
        scale = plan["sm_scale"] or 1 / math.sqrt(head_dim)
        output = torch.empty_like(q)
        for i, last in enumerate(plan["last_page_len"].tolist()):
            pages = plan["indices"][plan["indptr"][i] : plan["indptr"][i + 1]].long()
            length = (len(pages) - 1) * page_size + last
            keys, values = (paged_kv_cache[pages, part].flatten(0, 1)[:length] for part in (0, 1))
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            cap, left = plan["logits_soft_cap"] or 0.0, plan["window_left"]
            output[rows] = attend(q[rows], keys, values, scale=scale, cap=cap, left=left, causal=causal)
        return output


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE"
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in GROUPS_WITHOUT_TENSOR_CORES
        self.keep(
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
        )

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        return self.run_rows(q, paged_kv_cache, list(range(len(q) + 1)), causal=False)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
    ) -> None:
        assert pos_encoding_mode == "NONE" and len(qo_indptr) == len(paged_kv_indptr)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        self.keep(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            qo_indptr=qo_indptr.tolist(),
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
        )

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        assert self.planned is not None, "run before plan"
        return self.run_rows(q, paged_kv_cache, self.planned["qo_indptr"], self.planned["causal"])


def _check_flash(q: Any, k: Any, v: Any, block_table: Any) -> None:
    assert q.dtype in HALF_DTYPES and k.dtype == v.dtype == q.dtype
    assert k.shape == v.shape and k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1 and q.shape[-2] % k.shape[2] == 0


def _read(cache: Any, block_table: Any, row: int, length: int) -> Any:
    num_pages = -(-length // cache.shape[1])
    assert num_pages <= block_table.shape[1]
    return cache[block_table[row, :num_pages].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    _check_flash(q, k_cache, v_cache, block_table)
    assert q.dim() == 4 and cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(q) == len(block_table)
    assert window_size[1] == (-1 if window_size[0] < 0 else 0)
    output = torch.empty_like(q)
    scale = softmax_scale or q.shape[-1] ** -0.5
    for i, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_read(cache, block_table, i, length) for cache in (k_cache, v_cache))
        output[i] = attend(q[i], keys, values, scale=scale, cap=softcap, left=window_size[0], causal=causal)
    return output


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Any = None,
) -> Any:
    _check_flash(q, k, v, block_table)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_q) == len(cu_seqlens_k)
    assert len(block_table) == len(cu_seqlens_q) - 1 and cu_seqlens_q[-1] == len(q) and q.dim() == 3
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert window_size[1] == (-1 if window_size[0] < 0 else 0)
    output = torch.empty_like(q)
    scale = softmax_scale or q.shape[-1] ** -0.5
    for i, length in enumerate(cu_seqlens_k.diff().tolist()):
        keys, values = (_read(cache, block_table, i, length) for cache in (k, v))
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        output[rows] = attend(q[rows], keys, values, scale=scale, cap=softcap, left=window_size[0], causal=causal)
    return output


@contextmanager
def installed() -> Iterator[None]:
    """Puts both in the place of the packages."""
    flashinfer, flash_attn = ModuleType("flashinfer"), ModuleType("flash_attn")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(flashinfer, wrapper.__name__, wrapper)
    for function in (flash_attn_with_kvcache, flash_attn_varlen_func):
        setattr(flash_attn, function.__name__, function)
    with mock.patch.dict("sys.modules", {"flashinfer": flashinfer, "flash_attn": flash_attn}):
        yield
