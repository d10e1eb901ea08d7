"""Attention by the kernels of flash-attn 2, which read kvpool's blocks through the table.

Keys are ``kv_cache[:, 0]`` and values ``kv_cache[:, 1]``, each [num_blocks, block_size, num_kv_heads, head_size]. For
layers with a window the table handed over begins at the window's first block, since those in front are stale: what
counts is the distance to the end of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.errors import InvalidArgumentError
from kvpool.worker.attention.batch import Selection, StepKinds, put, take, to_device, window_starts
from kvpool.worker.attention.interface import AttentionLayer, check_inputs
from kvpool.worker.step.step_tensors import HostArray, StepTensors

PAGE_MULTIPLE = 256
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PagedBatch:
    """Some requests of a step as flash-attn wants them; int32 tensors on the device.

    Attributes:
        tokens: theirs in the packed batch.
        block_table: [b, width].
        kv_lens: [b], tokens that the table's rows hold.
        query_starts, kv_starts: [b + 1], running sums.
        max_query_len, max_kv_len: the largest.
    """

    tokens: Selection
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    max_query_len: int
    max_kv_len: int


class FlashAttnBackend:
    """flash-attn 2 (``AttentionBackend``), for float16 and bfloat16 on CUDA and blocks of a multiple of 256 tokens.

    Garbage in unused slots doesn't matter as long as it is finite.

    Raises:
        ImportError: there is no flash-attn.
    """

    name = "flash_attn"
    with_kv_rows = False
    with_compressed = False

    def __init__(self) -> None:
        import flash_attn

        self._flash_attn = flash_attn
        self._step: StepTensors | None = None
        self._kinds: StepKinds | None = None
        self._batches: dict[tuple[int, int | None], tuple[PagedBatch | None, PagedBatch | None]] = {}

    def plan(self, step: StepTensors) -> None:
        self._step, self._kinds = step, StepKinds.of(step)
        self._batches.clear()

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        step = check_inputs(self._step, query, kv_cache, group_id)
        block_size = kv_cache.shape[2]
        if query.dtype not in DTYPES:
            raise InvalidArgumentError(f"flash-attn computes in float16 and bfloat16, not in {query.dtype}")
        if block_size % PAGE_MULTIPLE:
            raise InvalidArgumentError(
                f"flash-attn needs blocks of a multiple of {PAGE_MULTIPLE} tokens, not {block_size}"
            )
        key = (group_id, layer.sliding_window)
        if key not in self._batches:
            kinds = self._kinds or StepKinds.of(step)
            firsts = window_starts(kinds, layer.sliding_window)
            table = step.groups[group_id].block_table
            self._batches[key] = (
                make_batch(step, kinds, kinds.decodes, firsts, table, block_size),
                make_batch(step, kinds, kinds.prefills, firsts, table, block_size),
            )
        decodes, prefills = self._batches[key]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if decodes is not None:
            put(output, decodes.tokens, self._decode(decodes, query, kv_cache, layer))
        if prefills is not None:
            put(output, prefills.tokens, self._prefill(prefills, query, kv_cache, layer))
        return output

    def _decode(
        self, batch: PagedBatch, query: torch.Tensor, kv_cache: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        result: torch.Tensor = self._flash_attn.flash_attn_with_kvcache(
            take(query, batch.tokens)[:, None],
            kv_cache[:, 0],
            kv_cache[:, 1],
            cache_seqlens=batch.kv_lens,
            block_table=batch.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_size(layer),
            softcap=layer.soft_cap or 0.0,
        )
        return result[:, 0]

    def _prefill(
        self, batch: PagedBatch, query: torch.Tensor, kv_cache: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        result: torch.Tensor = self._flash_attn.flash_attn_varlen_func(
            take(query, batch.tokens),
            kv_cache[:, 0],
            kv_cache[:, 1],
            batch.query_starts,
            batch.kv_starts,
            batch.max_query_len,
            batch.max_kv_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_size(layer),
            softcap=layer.soft_cap or 0.0,
            block_table=batch.block_table,
        )
        return result


def window_size(layer: AttentionLayer) -> tuple[int, int]:
    """Tokens before and behind the own position that are seen, -1 for all."""
    return (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)


def make_batch(
    step: StepTensors,
    kinds: StepKinds,
    requests: HostArray,
    firsts: HostArray,
    block_table: torch.Tensor,
    block_size: int,
) -> PagedBatch | None:
    """Requests of a step from the block of their first position on that counts; None if there are none. O(blocks)."""
    if requests.size == 0:
        return None
    device = block_table.device
    first_blocks = firsts[requests] // block_size
    last_blocks = (kinds.seq_lens[requests] - 1) // block_size
    width = int((last_blocks - first_blocks).max()) + 1
    columns = np.minimum(first_blocks[:, None] + np.arange(width), last_blocks[:, None])
    kv_lens = kinds.seq_lens[requests] - first_blocks * block_size
    query_lens = kinds.query_lens[requests]
    rows = to_device(step.host_rows[requests].astype(np.int64), device)
    return PagedBatch(
        tokens=kinds.tokens_of(requests, device),
        block_table=block_table[rows[:, None], to_device(columns, device)],
        kv_lens=to_device(kv_lens.astype(np.int32), device),
        query_starts=to_device(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32), device),
        kv_starts=to_device(np.concatenate([[0], np.cumsum(kv_lens)]).astype(np.int32), device),
        max_query_len=int(query_lens.max()),
        max_kv_len=int(kv_lens.max()),
    )
