"""KVCacheManager: what a scheduler asks for blocks, and tells of tokens that are computed.

``KVCacheManagerBase`` is the general code. Where the pool is native, the calls of every step are compiled and come
first, as ``kvpool.backend`` says; with KVPOOL_RECORD set, calls are recorded as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool import backend
from kvpool.cache.blocks import KVCacheBlockCopy, KVCacheBlocks
from kvpool.cache.coordinator import HybridKVCacheCoordinator
from kvpool.cache.manager import KVCacheManagerBase
from kvpool.cache.managers import ChunkedLocalAttentionManager, FullAttentionManager, SlidingWindowManager
from kvpool.cache.spec import FullAttentionSpec
from kvpool.recording.settings import RecordingSettings

if TYPE_CHECKING or backend.BACKEND == "reference":
    from kvpool.cache.reference_manager import KVCacheManager
else:
    from kvpool.native.kv_cache_manager import KVCacheManagerCore
    from kvpool.native.pool import BlockPoolCore

    class KVCacheManager(KVCacheManagerCore, KVCacheManagerBase):
        __doc__ = KVCacheManagerBase.__doc__

        def _bind(self) -> None:
            if self._is_plain_full_attention():
                self._bind_full_attention(
                    self.block_pool,
                    self.coordinator.single_type_managers[0],
                    KVCacheBlocks,
                    self.empty_kv_cache_blocks,
                    self.max_model_len,
                    self.watermark_blocks,
                )
            elif isinstance(self.block_pool, BlockPoolCore):
                groups = [self._steady_group(manager) for manager in self.coordinator.single_type_managers]
                if None not in groups:
                    self._bind_groups(
                        self.block_pool,
                        groups,
                        self.empty_kv_cache_blocks,
                        self.max_model_len,
                        self.watermark_blocks,
                        self.enable_caching,
                        self.hash_block_size,
                    )

        def _steady_group(self, manager: Any) -> tuple[Any, int, int, int] | None:
            """What ``_bind_groups`` takes of a group whose steps mostly change nothing; None for another."""
            coordinator, aligned = self.coordinator, 1
            if isinstance(coordinator, HybridKVCacheCoordinator) and not (
                coordinator.enable_partial_hash_hits or manager.use_eagle
            ):
                aligned = coordinator.scheduler_block_size
            if type(manager) is SlidingWindowManager:
                return manager, manager.sliding_window + manager.extra_retained_tokens, 0, aligned
            if type(manager) is ChunkedLocalAttentionManager:
                return manager, 0, manager.attention_chunk_size, aligned
            # Where hashes are finer than blocks, a step can cache the end of the prompt.
            if type(manager) is FullAttentionManager and manager.block_size == self.hash_block_size:
                return manager, 0, 0, aligned
            return None

        def _is_plain_full_attention(self) -> bool:
            """One group whose blocks are as long as the hashes', with nothing special about hits and caching."""
            managers = self.coordinator.single_type_managers
            return (
                isinstance(self.block_pool, BlockPoolCore)
                and len(managers) == 1
                and type(managers[0]) is FullAttentionManager
                and type(managers[0].kv_cache_spec) is FullAttentionSpec
                and managers[0].kv_cache_spec.prefix_cacheable
                and managers[0].max_admission_blocks_per_request is None
                and not managers[0].records_new_block_ids
                and (managers[0].block_size == self.hash_block_size or not self.enable_caching)
                and not self.coordinator.eagle_group_ids
                and self.coordinator.retention_interval is None
                and self.coordinator.num_reprefillable_tokens == 0
            )


PlainKVCacheManager = KVCacheManager
if not TYPE_CHECKING and RecordingSettings.from_environment() is not None:
    from kvpool.recording.calls import recorded

    KVCacheManager = recorded(KVCacheManager)

__all__ = ["KVCacheBlockCopy", "KVCacheBlocks", "KVCacheManager", "PlainKVCacheManager"]
