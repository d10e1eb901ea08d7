"""Coordinators: the managers of all KV cache groups over one shared block pool, and their common prefix hits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.cache.coordinator.base import CoordinatorSettings, KVCacheCoordinator, replay_boundaries
from kvpool.cache.coordinator.block_sizes import resolve_kv_cache_block_sizes
from kvpool.cache.coordinator.hybrid import HybridKVCacheCoordinator, SpecGroup
from kvpool.cache.coordinator.unitary import KVCacheCoordinatorNoPrefixCache, UnitaryKVCacheCoordinator
from kvpool.cache.spec import KVCacheConfig
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.metrics.residency import KVCacheMetricsCollector

__all__ = [
    "CoordinatorSettings",
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "SpecGroup",
    "UnitaryKVCacheCoordinator",
    "get_kv_cache_coordinator",
    "replay_boundaries",
    "resolve_kv_cache_block_sizes",
]


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_in_flight_tokens: int,
    use_eagle: bool,
    enable_caching: bool,
    enable_kv_cache_events: bool,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    *,
    scheduler_block_size: int,
    hash_block_size: int,
    metrics_collector: KVCacheMetricsCollector | None = None,
    num_prefill_lookahead: int = 0,
    allow_partial_hash_hits: bool = True,
    enable_mamba_shared_prefix_checkpoint: bool = False,
    block_pool_class: Callable[..., Any] | None = None,
) -> KVCacheCoordinator:
    """The coordinator that fits: none cached, one group, or several. See ``CoordinatorSettings`` for the arguments.

    Raises:
        InvalidArgumentError: the sizes do not fit together, or context parallelism is asked for.

    vLLM: ``get_kv_cache_coordinator``.
    """
    if dcp_world_size != 1 or pcp_world_size != 1:
        raise InvalidArgumentError(
            f"context parallelism is not supported: dcp_world_size {dcp_world_size}, pcp_world_size {pcp_world_size}"
        )
    settings = CoordinatorSettings(
        kv_cache_config,
        max_model_len,
        max_in_flight_tokens,
        use_eagle,
        enable_caching,
        enable_kv_cache_events,
        scheduler_block_size,
        hash_block_size,
        metrics_collector,
        num_prefill_lookahead,
        enable_mamba_shared_prefix_checkpoint,
        allow_partial_hash_hits,
        block_pool_class,
    )
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(settings)
    if len(kv_cache_config.kv_cache_groups) == 1:
        return UnitaryKVCacheCoordinator(settings)
    return HybridKVCacheCoordinator(settings)
