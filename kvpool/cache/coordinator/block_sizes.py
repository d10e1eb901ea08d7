"""Block sizes that all KV cache groups of a pool share: where schedules and hits may end, and what a hash covers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.cache.managers import SingleTypeKVCacheManager

logger = logging.getLogger("kvpool")


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig,
    enable_caching: bool,
    scheduler_block_size: int | None = None,
    hash_block_size: int | None = None,
) -> tuple[int, int]:
    """The scheduler's and the hashes' block size, in tokens.

    Args:
        kv_cache_config: its groups; a ``hash_block_size`` of its own is taken if the argument is None.
        enable_caching: without caching nothing is hashed, and both sizes are the same.
        scheduler_block_size: None for the least common multiple of the groups' block sizes.
        hash_block_size: None for one group's block size, for the greatest common divisor of several groups', or for
            the scheduler's where a Mamba group keeps no aligned states (it cannot be hit inside its blocks).

    Raises:
        InvalidArgumentError: a size is below 1, the scheduler's is no multiple of the hashes' or of a group's, or a
            group to be cached has a block size that the hashes' does not divide.

    vLLM: ``resolve_kv_cache_block_sizes``, which takes its choices from the engine's configuration.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if scheduler_block_size is None:
        scheduler_block_size = math.lcm(*(spec.block_size for spec in specs))
    if hash_block_size is None:
        hash_block_size = getattr(kv_cache_config, "hash_block_size", None)
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    if hash_block_size is None:
        has_unaligned_states = any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs)
        if len(specs) == 1:
            hash_block_size = specs[0].block_size
        elif not enable_caching or has_unaligned_states or not cacheable:
            hash_block_size = scheduler_block_size
        else:
            hash_block_size = math.gcd(*cacheable)
    if scheduler_block_size < 1 or hash_block_size < 1:
        raise InvalidArgumentError(
            f"block sizes are at least 1 token: scheduler {scheduler_block_size}, hash {hash_block_size}"
        )
    for what, size in (("hash", hash_block_size), *(("group's", spec.block_size) for spec in specs)):
        if scheduler_block_size % size:
            raise InvalidArgumentError(
                f"the scheduler's block size {scheduler_block_size} is not a multiple of the {what} block size {size}"
            )
    if enable_caching:
        _refuse_coarse_hashes(cacheable, hash_block_size)
    return scheduler_block_size, hash_block_size


def _refuse_coarse_hashes(block_sizes: Iterable[int], hash_block_size: int) -> None:
    for size in block_sizes:
        if size % hash_block_size:
            raise InvalidArgumentError(
                f"the block size {size} of a group is not a multiple of the hash block size {hash_block_size}"
            )


def partial_hash_hits_enabled(
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    hash_block_size: int,
    manager_classes: Sequence[type[SingleTypeKVCacheManager]],
) -> bool:
    """Whether hits may end inside a block, at any hash: some Mamba group keeps aligned states in blocks larger than
    a hash, and every group that is cached can look that deep, or has blocks of one hash.

    Args:
        kv_cache_groups: the groups.
        hash_block_size: tokens per hash.
        manager_classes: the class of each group's manager.

    vLLM: ``partial_hash_hits_enabled``.
    """
    if not any(
        isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" and spec.block_size > hash_block_size
        for spec in (group.kv_cache_spec for group in kv_cache_groups)
    ):
        return False
    unable = sorted(
        {
            manager_class.__name__
            for group, manager_class in zip(kv_cache_groups, manager_classes)
            if group.kv_cache_spec.prefix_cacheable
            and not manager_class.supports_fine_grained_hash_lookup
            and group.kv_cache_spec.block_size != hash_block_size
        }
    )
    if unable:
        logger.warning("Prefix hits end at whole blocks only, because of %s", ", ".join(unable))
    return not unable


def eagle_proof_margin(block_size: int, hash_block_size: int, is_fine_grained: bool) -> int:
    """Tokens that an EAGLE group must match beyond a hit, to drop them again: a hash's where it can be hit inside a
    block, else a block's."""
    return min(block_size, hash_block_size) if is_fine_grained else block_size
