"""Attention by kvpool's own Triton kernel for decodes, and by plain torch for prefill chunks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from kvpool.worker.attention.batch import Selection, StepKinds, put, selection_of, take, window_starts
from kvpool.worker.attention.gather import LayerCall, Parts, PartsReader
from kvpool.worker.attention.interface import AttentionLayer, check_inputs
from kvpool.worker.step.step_tensors import StepTensors


@dataclass(frozen=True)
class Decodes:
    """The decodes of a step: their tokens in the packed batch, and int32 tensors on the device."""

    tokens: Selection
    rows: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int


class TritonBackend:
    """Decodes by ``paged_decode`` straight from the blocks, prefill chunks as in ``GatherBackend``.

    Nothing waits for the device. Unused slots don't matter, whatever they hold.

    Raises:
        ImportError: there is no Triton.
    """

    name = "triton"
    with_kv_rows = False
    with_compressed = False

    def __init__(self) -> None:
        from kvpool.worker.kernels.decode import paged_decode

        self._paged_decode = paged_decode
        self._reader = PartsReader()
        self._step: StepTensors | None = None
        self._prefills: StepKinds | None = None
        self._decodes: Decodes | None = None
        self._parts: dict[tuple[int, int | None], Parts] = {}

    def plan(self, step: StepTensors) -> None:
        kinds = StepKinds.of(step)
        self._step, self._decodes = step, None
        self._parts.clear()
        self._prefills = dataclasses.replace(kinds, decodes=kinds.decodes[:0]) if kinds.prefills.size else None
        if kinds.decodes.size:
            requests = selection_of(kinds.decodes, step.rows.device)
            self._decodes = Decodes(
                tokens=kinds.tokens_of(kinds.decodes, step.rows.device),
                rows=take(step.rows, requests),
                seq_lens=take(step.seq_lens, requests),
                max_seq_len=int(kinds.seq_lens[kinds.decodes].max()),
            )

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        step = check_inputs(self._step, query, kv_cache, group_id)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = self._decodes
        if decodes is not None:
            is_range = isinstance(decodes.tokens, slice)
            result = self._paged_decode(
                take(query, decodes.tokens),
                kv_cache,
                step.groups[group_id].block_table,
                decodes.rows,
                decodes.seq_lens,
                layer.scale,
                layer.sliding_window,
                layer.soft_cap,
                output[decodes.tokens] if is_range else None,
                max_seq_len=decodes.max_seq_len,
            )
            if not is_range:
                put(output, decodes.tokens, result)
        if self._prefills is not None:
            call = LayerCall(query, kv_cache, layer)
            key = (group_id, layer.sliding_window)
            if key not in self._parts:
                firsts = window_starts(self._prefills, layer.sliding_window)
                self._parts[key] = self._reader.find(step, self._prefills, firsts, call, group_id)
            self._reader.compute(self._parts[key], call, output)
        return output
