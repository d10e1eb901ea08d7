"""How large a KV cache can be and how much it holds: blocks for given memory, requests of a length, blocks of one size.

All groups draw from one pool, and a block of the pool serves any one of them: it must have room for all layers of the
largest group. A request takes blocks for each group, so the groups' needs add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpool.cache.spec import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec, ceil_div
from kvpool.errors import InvalidArgumentError

# Up to this ratio of the largest to the smallest kind of layers, small groups are left partly empty rather than large
# kinds divided.
MAX_UNDIVIDED_RATIO = 1.5


def bytes_per_block(kv_cache_groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block of the pool: of all layers of the largest group. 0 for no groups."""
    return max((group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in kv_cache_groups), default=0)


def num_blocks_for_memory(kv_cache_groups: Sequence[KVCacheGroupSpec], available_bytes: int) -> int:
    """Number of blocks that fit, the null block included; 1 without groups, as a pool has a null block at least.

    Raises:
        InvalidArgumentError: not even one block fits, or the groups have no layers.

    vLLM: the division in ``get_kv_cache_config_from_groups``.
    """
    if not kv_cache_groups:
        return 1
    block_bytes = bytes_per_block(kv_cache_groups)
    if block_bytes == 0:
        raise InvalidArgumentError("the KV cache groups have no layers")
    if available_bytes < block_bytes:
        raise InvalidArgumentError(f"a block needs {block_bytes} bytes, {max(available_bytes, 0)} are available")
    return available_bytes // block_bytes


def num_blocks_per_request(
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    max_model_len: int,
    max_in_flight_tokens: int | None = None,
    max_encoder_tokens: int = 0,
) -> int:
    """Blocks of the pool that one request of max_model_len tokens holds at most, over all groups; the arguments are
    those of ``KVCacheSpec.max_blocks_per_request``, in tokens."""
    return sum(
        group.kv_cache_spec.max_blocks_per_request(max_model_len, max_in_flight_tokens, max_encoder_tokens)
        for group in kv_cache_groups
    )


def max_concurrency(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_in_flight_tokens: int | None = None,
    max_encoder_tokens: int = 0,
) -> float:
    """How many requests of max_model_len tokens the pool holds at once, without shared prefixes.

    A fraction below 1 means that not even one fits; the null block is counted as a block, as vLLM does, so that a
    value of exactly 1.0 is one block short.

    Raises:
        InvalidArgumentError: a request needs no blocks.

    vLLM: ``get_max_concurrency_for_kv_cache_config``.
    """
    needed = num_blocks_per_request(
        kv_cache_config.kv_cache_groups, max_model_len, max_in_flight_tokens, max_encoder_tokens
    )
    if needed <= 0:
        raise InvalidArgumentError("a request needs no blocks: there is no bound on their number")
    return kv_cache_config.num_blocks / needed


def token_capacity(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_in_flight_tokens: int | None = None,
    max_encoder_tokens: int = 0,
) -> int:
    """Tokens that the pool holds in requests of max_model_len tokens. vLLM: ``get_kv_cache_capacity``."""
    return int(
        max_concurrency(kv_cache_config, max_model_len, max_in_flight_tokens, max_encoder_tokens) * max_model_len
    )


def unify_kv_cache_spec_page_size(kv_cache_spec: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Give all layers of a hybrid model blocks of the same number of bytes, that of the largest.

    An attention layer whose blocks fit a whole number of times gets longer blocks (more tokens); where they do not,
    and for Mamba layers, whose state has its size whatever the number of tokens, the block is padded.

    Args:
        kv_cache_spec: spec by layer name.

    Returns:
        The specs by layer name, in the same order.

    Raises:
        InvalidArgumentError: a layer is of a kind that can't be padded.

    vLLM: the function of this name.
    """
    target = max((spec.page_size_bytes for spec in kv_cache_spec.values()), default=0)
    return {name: _with_block_bytes(name, spec, target) for name, spec in kv_cache_spec.items()}


def _with_block_bytes(layer_name: str, spec: KVCacheSpec, target: int) -> KVCacheSpec:
    num_bytes = spec.page_size_bytes
    if num_bytes == target:
        return spec
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=target)
    if isinstance(spec, AttentionSpec):
        # A block that is padded already keeps its number of tokens: longer ones need not fit.
        if target % num_bytes == 0 and spec.page_size_padded is None:
            return replace(spec, block_size=spec.block_size * (target // num_bytes))
        return replace(spec, page_size_padded=target)
    raise InvalidArgumentError(f"blocks of layer {layer_name!r} can't be padded: {spec!r}")


def group_layers(kv_cache_specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Groups of layers with equal specs and, as nearly as possible, of equal size.

    A block of the pool has room for the layers of the largest group, and serves any of them: what smaller groups leave
    of it is lost. So a kind of layers is divided into groups of the size of the smallest kind: one full layer among
    five sliding ones makes six groups of one layer, ten among fifty-two seven of at most ten. Where all kinds are
    nearly of one size they stay whole, since every group has block tables of its own.

    Args:
        kv_cache_specs: spec by layer name.

    Returns:
        The groups, kinds in the order in which they appear first; layers of a divided kind in turn.

    Raises:
        InvalidArgumentError: there are no layers.

    vLLM: ``_get_kv_cache_groups_uniform_page_size``.
    """
    if not kv_cache_specs:
        raise InvalidArgumentError("there are no layers to group")
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in kv_cache_specs.items():
        kinds.setdefault(spec, []).append(name)
    sizes = [len(names) for names in kinds.values()]
    smallest, largest = min(sizes), max(sizes)
    group_size = largest if largest < MAX_UNDIVIDED_RATIO * smallest else smallest
    groups = []
    for spec, names in kinds.items():
        num_groups = ceil_div(len(names), group_size)
        groups += [KVCacheGroupSpec(names[first::num_groups], spec) for first in range(num_groups)]
    return groups
