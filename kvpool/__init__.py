"""kvpool: a native block pool and KV cache manager for LLM inference engines.

The pool is here at once; what stands above it is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from kvpool.block_hasher import BlockHasher
    from kvpool.event_publisher import EventPublisherFactory, KVEventsConfig, ZmqEventPublisher
    from kvpool.kv_cache_blocks import KVCacheBlocks
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.kv_cache_spec import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
    )
    from kvpool.prometheus import KVCacheExporter
    from kvpool.request import Request, RequestStatus
    from kvpool.scheduler import Scheduler
    from kvpool.sizing import max_concurrency, num_blocks_for_memory, unify_kv_cache_spec_page_size
    from kvpool.stats import PrefixCacheStats

_IMPORTED_LATER = {
    "BlockHasher": "block_hasher",
    "ChunkedLocalAttentionSpec": "kv_cache_spec",
    "CrossAttentionSpec": "kv_cache_spec",
    "EventPublisherFactory": "event_publisher",
    "FullAttentionSpec": "kv_cache_spec",
    "KVCacheBlocks": "kv_cache_blocks",
    "KVCacheConfig": "kv_cache_spec",
    "KVCacheExporter": "prometheus",
    "KVCacheGroupSpec": "kv_cache_spec",
    "KVCacheManager": "kv_cache_manager",
    "KVCacheSpec": "kv_cache_spec",
    "KVEventsConfig": "event_publisher",
    "MambaSpec": "kv_cache_spec",
    "PrefixCacheStats": "stats",
    "Request": "request",
    "RequestStatus": "request",
    "Scheduler": "scheduler",
    "SinkFullAttentionSpec": "kv_cache_spec",
    "SlidingWindowSpec": "kv_cache_spec",
    "ZmqEventPublisher": "event_publisher",
    "max_concurrency": "sizing",
    "num_blocks_for_memory": "sizing",
    "unify_kv_cache_spec_page_size": "sizing",
}

__all__ = [
    "BACKEND",
    "AllBlocksCleared",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHashWithGroupId",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStateError",
    "BlockStored",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EventPublisherFactory",
    "FreeKVCacheBlockQueue",
    "FullAttentionSpec",
    "InvalidArgumentError",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheExporter",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCacheSpec",
    "KVEventBatch",
    "KVEventsConfig",
    "KvpoolError",
    "MambaSpec",
    "NoFreeBlocksError",
    "PrefixCacheStats",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "ZmqEventPublisher",
    "__version__",
    "get_block_hash",
    "get_group_id",
    "make_block_hash_with_group_id",
    "max_concurrency",
    "num_blocks_for_memory",
    "unify_kv_cache_spec_page_size",
]


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"kvpool.{_IMPORTED_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
