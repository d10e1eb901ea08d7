"""Layers of a model in KV cache groups that share one pool of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.cache.spec import KVCacheGroupSpec, KVCacheSpec, ceil_div
from kvpool.errors import InvalidArgumentError

# Up to this ratio of the largest to the smallest kind of layers, small groups are left partly empty rather than large
# kinds divided.
MAX_UNDIVIDED_RATIO = 1.5


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
