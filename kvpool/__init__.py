"""kvpool: a native block pool and KV cache manager for LLM inference engines."""

from __future__ import annotations

from kvpool._backend import BACKEND, BlockHashToBlockMap, FreeKVCacheBlockQueue, KVCacheBlock
from kvpool._version import __version__
from kvpool.block_hash import (
    BlockHash,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvpool.block_pool import BlockPool
from kvpool.errors import BlockStateError, InvalidArgumentError, InvariantError, KvpoolError, NoFreeBlocksError
from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvpool.metrics import KVCacheMetricsCollector

__all__ = [
    "BACKEND",
    "AllBlocksCleared",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHashWithGroupId",
    "BlockPool",
    "BlockRemoved",
    "BlockStateError",
    "BlockStored",
    "FreeKVCacheBlockQueue",
    "InvalidArgumentError",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheEvent",
    "KVCacheMetricsCollector",
    "KVEventBatch",
    "KvpoolError",
    "NoFreeBlocksError",
    "__version__",
    "get_block_hash",
    "get_group_id",
    "make_block_hash_with_group_id",
]
