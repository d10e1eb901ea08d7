"""The attention modules of a transformers model: where they are, and what each keeps in the KV cache.

Modules are known by the names that transformers uses throughout: ``layer_idx``, ``head_dim`` and the projection that
computes keys. Heads are counted in the projection, not in the configuration: a rank of several has a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvpool.errors import InvalidArgumentError

KEY_PROJECTIONS = ("k_proj", "key_proj")
FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn")
COMPRESSED_PROJECTIONS = ("kv_a_proj_with_mqa", "kv_b_proj", "kv_a_proj")
FULL, SLIDING = "full_attention", "sliding_attention"


class UnsupportedModelError(InvalidArgumentError):
    """A model, or one of its layers, does what can't be computed on the paged cache. The message names it."""


@dataclass(frozen=True)
class AttentionModule:
    """One attention layer.

    Attributes:
        name: path of the module in the model.
        module: the module.
        num_kv_heads: of this rank.
        head_size: elements of a key and of a value.
        sliding_window: tokens, None for full attention.
    """

    name: str
    module: nn.Module
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


def find_attention_modules(model: Any) -> list[AttentionModule]:
    """The attention layers of a decoder in the order of its layers. O(modules).

    Raises:
        UnsupportedModelError: an encoder, a layer without attention or with one that the paged cache can't serve: two
            directions, chunks, recurrent states, compressed keys, sinks, keys of another layer; layers whose heads
            differ in number or size.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{type(model).__name__} has an encoder; only decoders are supported")
    _refuse_layer_types(config)
    found: dict[int, AttentionModule] = {}
    for name, module in model.named_modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and _has_projection(module):
            if layer_idx in found:
                raise UnsupportedModelError(
                    f"layer {layer_idx} has two attention modules, {found[layer_idx].name!r} and {name!r}"
                )
            found[layer_idx] = _describe(name, module, layer_idx, config)
    num_layers = config.num_hidden_layers
    missing = sorted(set(range(num_layers)) - found.keys())
    if missing or len(found) != num_layers:
        what = f"layer {missing[0]} has no" if missing else f"{len(found)} layers, not {num_layers}, have an"
        raise UnsupportedModelError(f"{type(model).__name__}: {what} attention module that is known here")
    if num_layers == 0:
        raise UnsupportedModelError(f"{type(model).__name__} has no layers")
    modules = [found[layer_idx] for layer_idx in range(num_layers)]
    _refuse_unequal(modules)
    return modules


def _refuse_layer_types(config: Any) -> None:
    for layer_idx, layer_type in enumerate(getattr(config, "layer_types", None) or []):
        if layer_type not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"layer {layer_idx} is of type {layer_type!r}; on the paged cache there are {FULL} and {SLIDING}"
            )
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    if num_shared:
        raise UnsupportedModelError(f"the last {num_shared} layers use the keys and values of other layers")


def _has_projection(module: nn.Module) -> bool:
    names = KEY_PROJECTIONS + FUSED_PROJECTIONS + COMPRESSED_PROJECTIONS
    return any(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _describe(name: str, module: Any, layer_idx: int, config: Any) -> AttentionModule:
    if any(hasattr(module, projection) for projection in COMPRESSED_PROJECTIONS):
        raise UnsupportedModelError(f"layer {name!r} keeps compressed keys and values (multi-head latent attention)")
    if getattr(module, "sinks", None) is not None:
        raise UnsupportedModelError(f"layer {name!r} has attention sinks")
    if getattr(module, "is_causal", True) is False or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"layer {name!r} attends in both directions")
    if getattr(module, "is_cross_attention", False):
        raise UnsupportedModelError(f"layer {name!r} attends to an encoder")
    head_size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if not isinstance(head_size, int):
        raise UnsupportedModelError(f"layer {name!r} has no head_dim")
    num_kv_heads = _num_kv_heads(name, module, head_size)
    return AttentionModule(name, module, num_kv_heads, head_size, _sliding_window(name, module, layer_idx, config))


def _num_kv_heads(name: str, module: Any, head_size: int) -> int:
    for projection in KEY_PROJECTIONS:
        if hasattr(module, projection):
            num_heads, rest = divmod(_num_outputs(getattr(module, projection)), head_size)
            break
    else:
        projection = next(projection for projection in FUSED_PROJECTIONS if hasattr(module, projection))
        # Each KV head comes with its query heads, a key and a value.
        queries_per_head = getattr(module, "num_key_value_groups", 1)
        num_heads, rest = divmod(_num_outputs(getattr(module, projection)), head_size * (queries_per_head + 2))
    if rest or not num_heads:
        raise UnsupportedModelError(f"the {projection} of layer {name!r} makes no whole number of heads of {head_size}")
    return num_heads


def _num_outputs(projection: Any) -> int:
    """0 for a module that doesn't tell."""
    for name in ("out_features", "nf"):  # of nn.Linear, and of the Conv1D of GPT-2
        if hasattr(projection, name):
            return int(getattr(projection, name))
    weight = getattr(projection, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def _sliding_window(name: str, module: Any, layer_idx: int, config: Any) -> int | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        window = config.sliding_window if layer_types[layer_idx] == SLIDING else None
        is_missing = window is None and layer_types[layer_idx] == SLIDING
    else:
        # Any configuration may carry such a number; it means something where the class has it.
        of_model = getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None
        window = getattr(module, "sliding_window", of_model)
        is_missing = False
    if is_missing or (window is not None and (not isinstance(window, int) or window < 1)):
        raise UnsupportedModelError(f"layer {name!r} has a sliding window of {window} tokens")
    return window


def _refuse_unequal(modules: list[AttentionModule]) -> None:
    first = modules[0]
    for module in modules:
        if (module.num_kv_heads, module.head_size) != (first.num_kv_heads, first.head_size):
            raise UnsupportedModelError(
                f"layer {module.name!r} has {module.num_kv_heads} KV heads of {module.head_size} elements, "
                f"{first.name!r} {first.num_kv_heads} of {first.head_size}; all layers have to be equal in that"
            )
