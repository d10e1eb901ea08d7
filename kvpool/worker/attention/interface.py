"""What a layer asks of attention over the paged cache, and what every backend offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvpool.errors import InvalidArgumentError
from kvpool.worker.step.step_tensors import StepTensors


@dataclass(frozen=True)
class AttentionLayer:
    """What a layer asks for; fixed for a model.

    Attributes:
        scale: factor of the scores, usually 1 / sqrt(head_size).
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; all of them if None.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before the mask; unchanged if None.

    Raises:
        InvalidArgumentError: a window below 1, or a cap that is not above 0.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidArgumentError(f"a sliding window of {self.sliding_window} tokens")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise InvalidArgumentError(f"a soft cap of {self.soft_cap}")


class AttentionBackend(Protocol):
    """Attention of a packed batch over the paged cache. Not for several threads at once.

    Attributes:
        name: as in ``BACKENDS``.
        with_kv_rows, with_compressed: which optional tensors of a step serve it best, see ``StepTensorBuilder``. A step
            without compressed rows is refused by who asks for them; rows are only for who writes the cache.
    """

    name: str
    with_kv_rows: bool
    with_compressed: bool

    def plan(self, step: StepTensors) -> None:
        """Takes a step on, before its first layer. What layers have in common is computed once a step."""

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int, layer: AttentionLayer) -> torch.Tensor:
        """Attention of the step's tokens, causal by positions. Their keys and values are in the cache already.

        Args:
            query: [n, num_heads, head_size], the step's tokens in their order.
            kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], one layer, of the query's dtype;
                ``num_kv_heads`` divides ``num_heads``.
            group_id: KV cache group of the layer: it is read through the block table of that group.
            layer: scale, window and cap. Layers of a group may differ in them.

        Returns:
            [n, num_heads, head_size], of the query's dtype, in memory that later calls leave alone.

        Raises:
            InvalidArgumentError: no step planned, or shapes and dtypes that don't go together.
        """
        ...


def check_inputs(step: StepTensors | None, query: torch.Tensor, kv_cache: torch.Tensor, group_id: int) -> StepTensors:
    """The step; InvalidArgumentError where these are no inputs of ``attend`` for it."""
    if step is None:
        raise InvalidArgumentError("attention before a step was planned")
    if not 0 <= group_id < len(step.groups):
        raise InvalidArgumentError(f"KV cache group {group_id} of {len(step.groups)}")
    num_tokens = step.positions.shape[0]
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise InvalidArgumentError(
            f"a cache of shape {tuple(kv_cache.shape)} isn't [num_blocks, 2, block_size, num_kv_heads, head_size]"
        )
    if query.dim() != 3 or query.shape[0] != num_tokens or query.shape[2] != kv_cache.shape[4]:
        raise InvalidArgumentError(
            f"queries of shape {tuple(query.shape)} for {num_tokens} tokens and heads of {kv_cache.shape[4]}"
        )
    if query.shape[1] % kv_cache.shape[3]:
        raise InvalidArgumentError(f"{query.shape[1]} query heads can't share {kv_cache.shape[3]} KV heads")
    if query.dtype != kv_cache.dtype:
        raise InvalidArgumentError(f"queries of {query.dtype} and a cache of {kv_cache.dtype}")
    return step
