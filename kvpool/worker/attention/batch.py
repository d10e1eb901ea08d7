"""The requests of a step by kind: one new token (decodes), or several (prefill chunks, with or without a past)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpool.worker.step.step_tensors import HostArray, StepTensors

Selection = slice | torch.Tensor
"""Tokens of a packed batch, or requests of a step: a range, or indices (int64, on the device)."""


@dataclass(frozen=True)
class StepKinds:
    """Which requests of a step are what. int64 numpy arrays over all requests or of indices of requests.

    Attributes:
        seq_lens: [r], tokens of each request after the step.
        query_lens: [r], new tokens of each request, at least 1.
        query_starts: [r + 1], first new token in the packed batch.
        decodes, prefills: indices of requests, in their order.
    """

    seq_lens: HostArray
    query_lens: HostArray
    query_starts: HostArray
    decodes: HostArray
    prefills: HostArray

    @staticmethod
    def of(step: StepTensors) -> StepKinds:
        """O(r), nothing waits for the device."""
        starts = step.host_query_starts.astype(np.int64)
        query_lens = np.diff(starts)
        return StepKinds(
            seq_lens=step.host_seq_lens.astype(np.int64),
            query_lens=query_lens,
            query_starts=starts,
            decodes=np.flatnonzero(query_lens == 1),
            prefills=np.flatnonzero(query_lens > 1),
        )

    def tokens_of(self, requests: HostArray, device: torch.device) -> Selection:
        """The new tokens of these requests, one request behind the other. O(tokens)."""
        lens = self.query_lens[requests]
        offsets = np.cumsum(lens) - lens
        return selection_of(np.arange(lens.sum()) + np.repeat(self.query_starts[requests] - offsets, lens), device)


def selection_of(indices: HostArray, device: torch.device) -> Selection:
    """These indices, as a range if they are one. O(indices)."""
    if indices.size == 0:
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == indices.size and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return to_device(indices, device)


def window_starts(kinds: StepKinds, sliding_window: int | None) -> HostArray:
    """First position that any new token of each request sees, int64 [r]: nothing in front of it may be read. O(r)."""
    if sliding_window is None:
        return np.zeros(kinds.seq_lens.shape, dtype=np.int64)
    starts: HostArray = np.maximum(kinds.seq_lens - kinds.query_lens - sliding_window + 1, 0)
    return starts


def take(tokens: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The selected rows: a view for a range, a copy for indices."""
    return tokens[selection] if isinstance(selection, slice) else tokens.index_select(0, selection)


def put(target: torch.Tensor, selection: Selection, values: torch.Tensor) -> None:
    """Writes the selected rows."""
    if isinstance(selection, slice):
        target[selection] = values
    else:
        target.index_copy_(0, selection, values)


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor with the items of an array, sharing memory on the CPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device)
