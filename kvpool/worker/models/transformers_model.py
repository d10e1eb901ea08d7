"""Decoders of transformers on the paged cache, with their own code.

transformers looks up the attention of a layer by a name (``AttentionInterface``) and hands keyword arguments of the
model on to it. So the model computes one packed row of tokens, position by position as told, without a cache of its own
and without a mask; and its layers find ``PagedAttention`` in a keyword argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from kvpool.cache.sizing import group_layers
from kvpool.cache.spec import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec
from kvpool.worker.attention import AttentionLayer
from kvpool.worker.attention.paged_attention import PagedAttention
from kvpool.worker.models.attention_modules import AttentionModule, UnsupportedModelError, find_attention_modules
from kvpool.worker.models.model_files import model_errors
from kvpool.worker.models.pretrained import (
    ModelFacts,
    load_pretrained,
    longest_sequence,
    make_without_weights,
    read_config,
    read_model_facts,
)
from kvpool.worker.models.tensor_parallel import shard_model

__all__ = [
    "ModelFacts",
    "TransformersModel",
    "UnsupportedModelError",
    "load_pretrained",
    "read_kv_cache_groups",
    "read_model_facts",
]

ATTENTION_NAME = "kvpool"
# Arguments of layers that change nothing in what attention computes.
IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
KNOWN_ARGUMENTS = {"s_aux": "attention sinks", "position_bias": "a bias by position"}


class TransformersModel:
    """A decoder whose layers attend to the paged cache. For one thread.

    Args:
        model: a ``PreTrainedModel`` with a head for the next token. It is put into eval mode, and its attention is
            replaced, see ``own_attention``.

    Attributes:
        model: the same.
        config: the configuration of its decoder.
        vocab_size: token ids are below it.
        device, dtype: of its weights; keys and values are kept in that dtype.

    Raises:
        UnsupportedModelError: its attention does not go through ``AttentionInterface``, or see
            ``find_attention_modules``.
    """

    def __init__(self, model: Any) -> None:
        modules = find_attention_modules(model)
        self.model = model.eval()
        stock_attention = model.config._attn_implementation
        self._stock_attention: str = "sdpa" if stock_attention == ATTENTION_NAME else stock_attention
        model.set_attn_implementation(ATTENTION_NAME)
        self.config: Any = model.config.get_text_config(decoder=True)
        if self.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(f"the attention of {type(model).__name__} can't be replaced")
        self.vocab_size: int = self.config.vocab_size
        self.device = torch.device(model.device)
        self.dtype: torch.dtype = model.dtype
        self._layers = {module.module: _Layer(module) for module in modules}

    @classmethod
    def load(cls, path: str | Path, *, dtype: str = "float32", device: torch.device | str = "cpu") -> TransformersModel:
        """A model from files, see ``load_pretrained``."""
        return cls(load_pretrained(path, dtype=dtype, device=device))

    @property
    def max_model_len(self) -> int:
        """See ``longest_sequence``."""
        return longest_sequence(self.config)

    def kv_cache_groups(self, block_size: int) -> list[KVCacheGroupSpec]:
        """The layers in groups, see ``group_layers``, with the KV heads of this rank.

        Args:
            block_size: tokens of a block.
        """
        return group_layers(
            {layer.module.name: self._spec(layer.module, block_size) for layer in self._layers.values()}
        )

    def _spec(self, module: AttentionModule, block_size: int) -> KVCacheSpec:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = {"block_size": block_size, "num_kv_heads": module.num_kv_heads, "head_size": module.head_size}
        if module.sliding_window is None:
            return FullAttentionSpec(**sizes, dtype=dtype)
        return SlidingWindowSpec(**sizes, dtype=dtype, sliding_window=module.sliding_window)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: PagedAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Computes the tokens of a step.

        Args:
            input_ids, positions: int64 [n], on the device.
            attention: with the step started.
            logit_rows: int64 [k], of the tokens whose logits are wanted.

        Returns:
            Logits [k, vocab_size].

        Raises:
            UnsupportedModelError: a layer asks for what its attention here can't do, or has not called it.
        """
        with torch.inference_mode():
            output = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_rows,
                kvpool_step=_Step(attention, self._layers),
            )
        if attention.num_attended != len(self._layers):
            raise UnsupportedModelError(
                f"{attention.num_attended} of {len(self._layers)} layers of {type(self.model).__name__} have called "
                "their attention"
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def own_attention(self) -> Iterator[Any]:
        """The model with the attention that it came with, until the block ends: for ``generate`` of transformers.

        Where scores have a soft cap it is "eager", as transformers' "sdpa" leaves the cap out.
        """
        is_capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        self.model.set_attn_implementation("eager" if is_capped else self._stock_attention)
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)


@dataclass
class _Layer:
    """A layer, and what it asked for last with the arguments that it asked by."""

    module: AttentionModule
    arguments: tuple[Any, ...] | None = None
    asked: AttentionLayer = field(default_factory=lambda: AttentionLayer(1.0))


@dataclass(frozen=True)
class _Step:
    """What the layers of a model are handed through it."""

    attention: PagedAttention
    layers: dict[Any, _Layer]


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    kvpool_step: _Step | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: [1, num_heads, n, head_size]; key, value: [1, num_kv_heads, n, head_size].
        attention_mask: must be None: what is masked follows from positions and window.

    Returns:
        [1, n, num_heads, head_size], and no weights.
    """
    if kvpool_step is None:
        raise UnsupportedModelError(
            f"layer {getattr(module, 'layer_idx', None)}, a {type(module).__name__}, was called without its step: "
            "either outside a TransformersModel, or by a model that does not hand keyword arguments on to attention"
        )
    layer = kvpool_step.layers.get(module)
    if layer is None:
        raise UnsupportedModelError(f"a {type(module).__name__} is no attention layer of this model")
    if attention_mask is not None:
        raise UnsupportedModelError(f"layer {layer.module.name!r} has an attention mask of its own")
    if (scaling, sliding_window, softcap) != layer.arguments:
        _note_arguments(layer, query, (scaling, sliding_window, softcap))
    for name, argument in arguments.items():
        if name not in IGNORED_ARGUMENTS and argument is not None and argument is not False:
            raise _unsupported(layer, KNOWN_ARGUMENTS.get(name, repr(name)))
    if is_causal is False:
        raise _unsupported(layer, "attention in both directions")
    result = kvpool_step.attention.attend(
        layer.module.name, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), layer.asked
    )
    return result.unsqueeze(0), None


def _note_arguments(layer: _Layer, query: torch.Tensor, arguments: tuple[Any, ...]) -> None:
    name = layer.module.name
    scaling, sliding_window, softcap = arguments
    if sliding_window != layer.module.sliding_window:
        raise UnsupportedModelError(
            f"layer {name!r} asks for a sliding window of {sliding_window} tokens, and its configuration says "
            f"{layer.module.sliding_window}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer.asked = AttentionLayer(scale, sliding_window, softcap)
    layer.arguments = arguments


def _unsupported(layer: _Layer, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.module.name!r} asks for {what}, which attention on the paged cache does not do"
    )


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def read_kv_cache_groups(path: Path, block_size: int, dtype: str, world_size: int) -> list[KVCacheGroupSpec]:
    """The KV cache groups of the model in a folder or a ``.gguf`` file, with the heads that each rank has.

    Raises:
        InvalidArgumentError: there is no model, it is not supported, or so many ranks can't divide it evenly.
    """
    with model_errors(path):
        model = make_without_weights(path, read_config(path), getattr(torch, dtype))
    shard_model(model, 0, world_size)
    return TransformersModel(model).kv_cache_groups(block_size)
