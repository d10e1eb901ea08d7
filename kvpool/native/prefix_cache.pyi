from collections.abc import Sequence
from typing import Any

from kvpool.hashing.block_hash import BlockHash
from kvpool.native.allocator import BlockAllocator
from kvpool.native.block import KVCacheBlock

__all__ = ["PrefixCache"]

class PrefixCache(BlockAllocator):
    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None: ...
    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None: ...
