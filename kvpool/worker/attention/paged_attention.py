"""Attention of a model's layers over the paged cache: where a layer writes, what it may read, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.cache.spec import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from kvpool.errors import InvalidArgumentError
from kvpool.worker.attention import AttentionBackend, AttentionLayer
from kvpool.worker.memory.paged_kv_cache import PagedKVCache
from kvpool.worker.step.step_tensors import StepTensors


class PagedAttention:
    """What a model calls for each of its layers. Knows nothing of the model but the names of these.

    All tokens of a step are written before any is read: a request may have hit blocks that another one computes in
    the same step.

    Args:
        kv_cache: layer i of it serves the i-th layer of each group.
        backend: reads it.
        kv_cache_groups: the layers, by name.

    Attributes:
        num_layers: layers of all groups.
        num_attended: of these, how many have been computed in this step.

    Raises:
        InvalidArgumentError: a layer is in two groups, a group has more layers than the cache, or is of a kind that has
            no keys and values per token.
    """

    def __init__(
        self, kv_cache: PagedKVCache, backend: AttentionBackend, kv_cache_groups: Sequence[KVCacheGroupSpec]
    ) -> None:
        self.kv_cache, self.backend = kv_cache, backend
        self._windows = [_window(group) for group in kv_cache_groups]
        self._places: dict[str, tuple[int, int]] = {}  # group and layer of the cache
        for group_id, group in enumerate(kv_cache_groups):
            if len(group.layer_names) > kv_cache.num_layers:
                raise InvalidArgumentError(
                    f"group {group_id} has {len(group.layer_names)} layers, the cache {kv_cache.num_layers}"
                )
            for layer, name in enumerate(group.layer_names):
                if name in self._places:
                    raise InvalidArgumentError(f"layer {name!r} is in two KV cache groups")
                self._places[name] = group_id, layer
        self.num_layers = len(self._places)
        self.num_attended = 0
        self._step: StepTensors | None = None

    def start_step(self, step: StepTensors) -> None:
        """The layers of this step come next."""
        self.num_attended = 0
        self._step = step
        self.backend.plan(step)

    def attend(
        self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        """Writes the keys and values of the step's n tokens, then computes their attention.

        Args:
            name: of the layer.
            query: [n, num_heads, head_size]; key, value: [n, num_kv_heads, head_size]; of any strides.
            layer: scale, window and cap.

        Returns:
            [n, num_heads, head_size].

        Raises:
            InvalidArgumentError: an unknown layer; shapes that are not the cache's; a window that is not that of the
                layer's group, whose blocks outside the window are not there any more. Nothing has been written.
        """
        step = self._step
        if step is None or name not in self._places:
            raise InvalidArgumentError(f"layer {name!r} " + ("is in no KV cache group" if step else "before any step"))
        group_id, index = self._places[name]
        if layer.sliding_window != self._windows[group_id]:
            raise InvalidArgumentError(
                f"layer {name!r} has a sliding window of {layer.sliding_window} tokens, its KV cache group {group_id} "
                f"one of {self._windows[group_id]}"
            )
        cache = self.kv_cache
        wanted = (step.positions.numel(), cache.num_kv_heads, cache.head_size)
        if key.shape != wanted or value.shape != wanted:
            raise InvalidArgumentError(
                f"layer {name!r} has keys {list(key.shape)} and values {list(value.shape)} for a cache of "
                f"[tokens, num_kv_heads, head_size] = {list(wanted)}"
            )
        group = step.groups[group_id]
        if group.key_rows is not None and group.value_rows is not None:
            cache.write_rows(index, key, value, group.key_rows, group.value_rows)
        else:
            cache.write(index, key, value, group.slots)
        self.num_attended += 1
        return self.backend.attend(query, cache.layers[index], group_id, layer)


def _window(group: KVCacheGroupSpec) -> int | None:
    spec = group.kv_cache_spec
    if type(spec) is FullAttentionSpec or type(spec) is SlidingWindowSpec:
        return spec.sliding_window
    raise InvalidArgumentError(
        f"layers {group.layer_names} are cached as {type(spec).__name__}, and only full attention and sliding windows "
        "can be computed here"
    )
