"""Attention by plain torch, on any device: gathers what a step sees and hands it to scaled dot product attention.

The query heads that share a KV head are rows of one query, so that keys and values are never repeated. What is read,
and in which parts, is found once a step, for each KV cache group and window when its first layer asks; a layer then
gathers and multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpool.worker.attention.batch import StepKinds, put, take, window_starts
from kvpool.worker.attention.decodes import DecodePart, plan_decodes
from kvpool.worker.attention.dense import attend_causal, attend_dense, merge_splits
from kvpool.worker.attention.interface import AttentionLayer, check_inputs
from kvpool.worker.attention.key_rows import Workspace
from kvpool.worker.attention.prefills import (
    CausalBias,
    PrefillPart,
    plan_prefills,
)
from kvpool.worker.step.step_tensors import HostArray, StepTensors

QUERY_ROWS, QUERY_ROWS_ON_CPU = 1024, 192  # of a tile: enough to fill the processor, few of them behind the diagonal


@dataclass(frozen=True)
class Parts:
    """What has to be read for a step's tokens."""

    decodes: list[DecodePart]
    prefills: list[PrefillPart]


@dataclass(frozen=True)
class LayerCall:
    """The tensors of one call of ``attend``, see there."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    layer: AttentionLayer


class PartsReader:
    """Finds and computes the parts of steps by plain torch. Keeps masks and memory from step to step."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._causal_biases: dict[tuple[int, int | None, torch.dtype], CausalBias] = {}

    def find(self, step: StepTensors, kinds: StepKinds, firsts: HostArray, call: LayerCall, group_id: int) -> Parts:
        """The parts of a step for layers like this one.

        Args:
            firsts: int64 numpy array [r], first position that each request reads.

        O(key rows read).
        """
        table = step.groups[group_id].block_table
        causal_bias = self._causal_bias(call)
        return Parts(
            plan_decodes(kinds, step.host_rows, firsts, table, call.kv_cache),
            plan_prefills(kinds, step.host_rows, firsts, table, call.kv_cache, causal_bias),
        )

    def compute(self, parts: Parts, call: LayerCall, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Writes the attention of the parts' tokens.

        Args:
            output: [n, num_heads, head_size].
            lse: [n, num_kv_heads, group], of ``wide_dtype``, where the logarithms of the sums go if they are wanted.
        """
        for decode in parts.decodes:
            self._compute_decode(decode, call, output, lse)
        for prefill in parts.prefills:
            self._compute_prefill(prefill, call, output, lse)

    def read(self, kv_cache: torch.Tensor, key_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of key rows, see ``Workspace.read``."""
        return self._workspace.read(kv_cache, key_rows)

    def _compute_decode(
        self, part: DecodePart, call: LayerCall, output: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        num_kv_heads, head_size = call.kv_cache.shape[3:]
        query = take(call.query, part.tokens).reshape(part.num_requests, num_kv_heads, -1, head_size)
        if part.num_splits > 1:
            query = query.repeat_interleave(part.num_splits, 0)
        with_lse = lse is not None or part.num_splits > 1
        results = []
        for batch in part.batches:
            rows = query[batch.splits]
            shape = (len(rows), -1, num_kv_heads, head_size)
            keys, values = (each.view(shape).transpose(1, 2) for each in self.read(call.kv_cache, batch.key_rows))
            results.append(attend_dense(rows, keys, values, batch.bias, call.layer, with_lse=with_lse))
        result, result_lse = join(results)
        if part.num_splits > 1 and result_lse is not None:
            splits = (part.num_requests, part.num_splits)
            result, result_lse = merge_splits(
                result.view(*splits, *result.shape[1:]), result_lse.view(*splits, *result_lse.shape[1:])
            )
        put(output, part.tokens, result.reshape(part.num_requests, -1, head_size))
        if lse is not None and result_lse is not None:
            put(lse, part.tokens, result_lse)

    def _compute_prefill(
        self, part: PrefillPart, call: LayerCall, output: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        keys, values = (each.transpose(0, 1)[None] for each in self.read(call.kv_cache, part.key_rows))
        num_kv_heads = keys.shape[1]
        query, result = _by_kv_head(call.query, num_kv_heads), _by_kv_head(output, num_kv_heads)
        group = query.shape[2]
        if part.sees_all and lse is None and call.layer.soft_cap is None and query.device.type != "cpu":
            whole = query[part.tokens].permute(2, 1, 0, 3)
            keys, values = (heads.expand(group, -1, -1, -1) for heads in (keys, values))
            result[part.tokens] = attend_causal(whole, keys, values, call.layer).permute(2, 1, 0, 3)
            return
        for tile in part.tiles:
            rows = query[tile.tokens].transpose(0, 1).flatten(1, 2)[None]
            seen = (keys[:, :, tile.keys], values[:, :, tile.keys])
            of_rows, lse_of_rows = attend_dense(rows, *seen, tile.bias, call.layer, with_lse=lse is not None)
            result[tile.tokens] = of_rows.reshape(num_kv_heads, -1, group, of_rows.shape[-1]).transpose(0, 1)
            if lse is not None and lse_of_rows is not None:
                lse[tile.tokens] = lse_of_rows.reshape(num_kv_heads, -1, group).transpose(0, 1)

    def _causal_bias(self, call: LayerCall) -> CausalBias:
        group = call.query.shape[1] // call.kv_cache.shape[3]
        window = call.layer.sliding_window
        key = (group, window, call.query.dtype)
        if key not in self._causal_biases:
            rows = QUERY_ROWS_ON_CPU if call.query.device.type == "cpu" else QUERY_ROWS
            self._causal_biases[key] = CausalBias(max(1, rows // group), group, window, call.query)
        return self._causal_biases[key]


def join(results: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of ``attend_dense`` one behind the other."""
    if len(results) == 1:
        return results[0]
    sums = [lse for _, lse in results if lse is not None]
    return torch.cat([output for output, _ in results]), torch.cat(sums) if sums else None


def _by_kv_head(heads: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    return heads.view(heads.shape[0], num_kv_heads, heads.shape[1] // num_kv_heads, heads.shape[2])


class GatherBackend:
    """Attention by plain torch (``AttentionBackend``), on any device.

    Nothing but the tokens that a request sees is ever read, so neither garbage nor NaN in other slots can reach a
    result; among the tokens of one request, a NaN spreads within the tile of queries that sees it.

    Args:
        reader: whose memory to use; its own by default.
    """

    name = "gather"
    with_kv_rows = True
    with_compressed = False

    def __init__(self, reader: PartsReader | None = None) -> None:
        self._reader = reader or PartsReader()
        self._step: StepTensors | None = None
        self._kinds: StepKinds | None = None
        self._parts: dict[tuple[int, int | None], Parts] = {}

    def plan(self, step: StepTensors) -> None:
        self._step, self._kinds = step, StepKinds.of(step)
        self._parts.clear()

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        step = check_inputs(self._step, query, kv_cache, group_id)
        call = LayerCall(query, kv_cache, layer)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._reader.compute(self._parts_of(step, call, group_id), call, output)
        return output

    def _parts_of(self, step: StepTensors, call: LayerCall, group_id: int) -> Parts:
        key = (group_id, call.layer.sliding_window)
        if key not in self._parts:
            kinds = self._kinds or StepKinds.of(step)
            firsts = window_starts(kinds, call.layer.sliding_window)
            self._parts[key] = self._reader.find(step, kinds, firsts, call, group_id)
        return self._parts[key]
