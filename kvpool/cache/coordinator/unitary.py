"""Coordinators for the simple cases: no prefix cache with any number of groups, and one group with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.coordinator.base import CacheHit, KVCacheCoordinator
from kvpool.cache.spec import KVCacheConfig
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.hashing.block_hash import BlockHash
    from kvpool.metrics.residency import KVCacheMetricsCollector


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, 0 included; nothing is ever hit. See ``KVCacheCoordinator`` for the arguments.

    vLLM: ``KVCacheCoordinatorNoPrefixCache``.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        use_eagle: bool,
        enable_kv_cache_events: bool,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: KVCacheMetricsCollector | None = None,
        num_prefill_lookahead: int = 0,
        block_pool_class: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            kv_cache_config,
            max_model_len,
            max_in_flight_tokens,
            use_eagle,
            enable_caching=False,
            enable_kv_cache_events=enable_kv_cache_events,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            metrics_collector=metrics_collector,
            num_prefill_lookahead=num_prefill_lookahead,
            block_pool_class=block_pool_class,
        )

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """No blocks, 0 tokens."""
        return tuple([] for _ in self.single_type_managers), 0, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group, whose blocks are as long as the hashes'. See ``KVCacheCoordinator`` for the arguments.

    vLLM: ``UnitaryKVCacheCoordinator``.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        use_eagle: bool,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: KVCacheMetricsCollector | None = None,
        num_prefill_lookahead: int = 0,
        block_pool_class: Callable[..., Any] | None = None,
    ) -> None:
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise InvalidArgumentError(
                f"a unitary coordinator has one KV cache group, not {len(kv_cache_config.kv_cache_groups)}"
            )
        super().__init__(
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
            block_pool_class,
        )
        self.kv_cache_spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._manager = self.single_type_managers[0]
        self.block_size = self._manager.block_size
        if enable_caching and hash_block_size != self.block_size:
            raise InvalidArgumentError(
                f"with one group, the hash block size {hash_block_size} must be its block size {self.block_size}"
            )
        self._manager.use_eagle = 0 in self.eagle_group_ids

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The group's own longest hit."""
        blocks, hit_length = self._manager.find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_cache_hit_length,
            kv_cache_group_ids=[0],
            block_pool=self.block_pool,
            kv_cache_spec=self.kv_cache_spec,
            drop_eagle_block=0 in self.eagle_group_ids,
            alignment_tokens=self.block_size,
        )
        return blocks, hit_length, 0
