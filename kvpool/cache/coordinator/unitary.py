"""Coordinators for the simple cases: no prefix cache with any number of groups, and one group with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.cache.coordinator.base import CacheHit, CoordinatorSettings, KVCacheCoordinator
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.hashing.block_hash import BlockHash


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, 0 included; nothing is ever hit.

    vLLM: ``KVCacheCoordinatorNoPrefixCache``.
    """

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """No blocks, 0 tokens."""
        return tuple([] for _ in self.single_type_managers), 0, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group, whose blocks are as long as the hashes'.

    vLLM: ``UnitaryKVCacheCoordinator``.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        groups = settings.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise InvalidArgumentError(f"a unitary coordinator has one KV cache group, not {len(groups)}")
        super().__init__(settings)
        self.kv_cache_spec = groups[0].kv_cache_spec
        self._manager = self.single_type_managers[0]
        self.block_size = self._manager.block_size
        if settings.enable_caching and self.hash_block_size != self.block_size:
            raise InvalidArgumentError(
                f"with one group, the hash block size {self.hash_block_size} must be its block size {self.block_size}"
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
