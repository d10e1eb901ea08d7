"""Attention by FlashInfer's kernels, which read kvpool's blocks as they are.

A layer's cache [num_blocks, 2, block_size, num_kv_heads, head_size] is FlashInfer's paged cache of layout NHD in one
tensor. Its wrappers are planned once a step from host tensors: compressed rows of the table (indptr, indices,
last_page_len), for decodes and prefill chunks apart. For layers with a window the blocks in front of it are left out,
since the table doesn't name them any more: what counts is the distance to the end of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.errors import InvalidArgumentError
from kvpool.worker.attention.batch import Selection, StepKinds, put, take, window_starts
from kvpool.worker.attention.interface import AttentionLayer, check_inputs
from kvpool.worker.step.step_tensors import GroupTensors, HostArray, StepTensors

WORKSPACE_BYTES = 128 << 20
MAX_GROUP_WITHOUT_TENSOR_CORES = 2
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CompressedRows:
    """The blocks of some requests, int32 tensors on the host; FlashInfer's indptr, indices and last_page_len."""

    starts: torch.Tensor
    blocks: torch.Tensor
    last_block_lens: torch.Tensor


@dataclass
class LayerKind:
    """Wrappers of layers that are planned alike; made when first needed."""

    decode: Any = None
    prefill: Any = None


class FlashInferBackend:
    """FlashInfer's wrappers for decodes and for prefill chunks (``AttentionBackend``); float16 and bfloat16, on CUDA.

    Garbage in unused slots doesn't matter as long as it is finite.

    Args:
        device: where the workspace is.

    Raises:
        ImportError: there is no FlashInfer.
    """

    name = "flashinfer"
    with_kv_rows = False
    with_compressed = True

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._flashinfer = flashinfer
        # Zeroed: kernels that take semaphores from the workspace want them so at first.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._layer_kinds: dict[Any, LayerKind] = {}
        self._planned: set[Any] = set()
        self._step: StepTensors | None = None
        self._kinds: StepKinds | None = None
        self._tokens: tuple[Selection, Selection] = (slice(0, 0), slice(0, 0))

    def plan(self, step: StepTensors) -> None:
        kinds = StepKinds.of(step)
        self._step, self._kinds = step, kinds
        device = step.rows.device
        self._tokens = kinds.tokens_of(kinds.decodes, device), kinds.tokens_of(kinds.prefills, device)
        self._planned.clear()

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        step = check_inputs(self._step, query, kv_cache, group_id)
        if query.dtype not in DTYPES:
            raise InvalidArgumentError(f"FlashInfer computes in float16 and bfloat16, not in {query.dtype}")
        kinds = self._kinds or StepKinds.of(step)
        key = (group_id, layer, query.shape[1], kv_cache.shape[2:], query.dtype)
        layer_kind = self._layer_kinds.setdefault(key, LayerKind())
        if key not in self._planned:
            self._plan_layers(layer_kind, step.groups[group_id], kinds, query, kv_cache, layer)
            self._planned.add(key)
        decode_tokens, prefill_tokens = self._tokens
        if kinds.prefills.size == 0 and isinstance(decode_tokens, slice):
            return self._run(layer_kind.decode, query, kv_cache)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if kinds.decodes.size:
            put(output, decode_tokens, self._run(layer_kind.decode, take(query, decode_tokens), kv_cache))
        if kinds.prefills.size:
            put(output, prefill_tokens, self._run(layer_kind.prefill, take(query, prefill_tokens), kv_cache))
        return output

    def _run(self, wrapper: Any, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapper.run(query.contiguous(), kv_cache)
        return result

    def _plan_layers(
        self,
        layer_kind: LayerKind,
        group: GroupTensors,
        kinds: StepKinds,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        block_size, num_kv_heads, head_size = kv_cache.shape[2:]
        skipped = window_starts(kinds, layer.sliding_window) // block_size
        sizes = (query.shape[1], num_kv_heads, head_size, block_size)
        settings = {
            "pos_encoding_mode": "NONE",
            "window_left": -1 if layer.sliding_window is None else layer.sliding_window - 1,
            "logits_soft_cap": layer.soft_cap,
            "sm_scale": layer.scale,
            "q_data_type": query.dtype,
            "kv_data_type": kv_cache.dtype,
        }
        if kinds.decodes.size:
            if layer_kind.decode is None:
                with_tensor_cores = query.shape[1] // num_kv_heads > MAX_GROUP_WITHOUT_TENSOR_CORES
                layer_kind.decode = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=with_tensor_cores
                )
            rows = compress(group, kinds.decodes, skipped)
            layer_kind.decode.plan(rows.starts, rows.blocks, rows.last_block_lens, *sizes, **settings)
        if kinds.prefills.size:
            if layer_kind.prefill is None:
                layer_kind.prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            rows = compress(group, kinds.prefills, skipped)
            starts = np.concatenate([[0], np.cumsum(kinds.query_lens[kinds.prefills])]).astype(np.int32)
            layer_kind.prefill.plan(
                torch.from_numpy(starts),
                rows.starts,
                rows.blocks,
                rows.last_block_lens,
                *sizes,
                causal=True,
                **settings,
            )


def compress(group: GroupTensors, requests: HostArray, skipped: HostArray) -> CompressedRows:
    """Compressed rows of some requests, without the first ``skipped[i]`` blocks of request i. O(blocks).

    In memory of their own: the device may read them while the next step is built.

    Raises:
        InvalidArgumentError: the step has no compressed rows.
    """
    if group.block_starts is None or group.blocks is None or group.last_block_lens is None:
        raise InvalidArgumentError("FlashInfer needs steps with compressed rows")
    starts = group.block_starts.numpy().astype(np.int64)
    firsts = starts[requests] + skipped[requests]
    lengths = starts[requests + 1] - firsts
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)
    return CompressedRows(
        torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        torch.from_numpy(group.blocks.numpy()[places]),
        torch.from_numpy(group.last_block_lens.numpy()[requests]),
    )
