"""kvpool: a native block pool and KV cache manager for LLM inference engines.

The pool is here at once; what stands above it is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpool._version import __version__
from kvpool.backend import BACKEND, BlockHashToBlockMap, BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from kvpool.errors import BlockStateError, InvalidArgumentError, InvariantError, KvpoolError, NoFreeBlocksError
from kvpool.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvpool.hashing.block_hash import (
    BlockHash,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvpool.metrics.residency import KVCacheMetricsCollector

if TYPE_CHECKING:
    from kvpool.backend import BlockHasher, Request
    from kvpool.cache.blocks import KVCacheBlocks
    from kvpool.cache.sizing import max_concurrency, num_blocks_for_memory, unify_kv_cache_spec_page_size
    from kvpool.cache.spec import (
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
    from kvpool.events.publisher import EventPublisherFactory, KVEventsConfig, ZmqEventPublisher
    from kvpool.kv_cache_manager import KVCacheManager
    from kvpool.metrics.prometheus import KVCacheExporter
    from kvpool.metrics.stats import PrefixCacheStats
    from kvpool.requests.status import RequestStatus
    from kvpool.scheduler import Scheduler

_IMPORTED_LATER = {
    "BlockHasher": "backend",
    "ChunkedLocalAttentionSpec": "cache.spec",
    "CrossAttentionSpec": "cache.spec",
    "EventPublisherFactory": "events.publisher",
    "FullAttentionSpec": "cache.spec",
    "KVCacheBlocks": "cache.blocks",
    "KVCacheConfig": "cache.spec",
    "KVCacheExporter": "metrics.prometheus",
    "KVCacheGroupSpec": "cache.spec",
    "KVCacheManager": "kv_cache_manager",
    "KVCacheSpec": "cache.spec",
    "KVEventsConfig": "events.publisher",
    "MambaSpec": "cache.spec",
    "PrefixCacheStats": "metrics.stats",
    "Request": "backend",
    "RequestStatus": "requests.status",
    "Scheduler": "scheduler",
    "SinkFullAttentionSpec": "cache.spec",
    "SlidingWindowSpec": "cache.spec",
    "ZmqEventPublisher": "events.publisher",
    "max_concurrency": "cache.sizing",
    "num_blocks_for_memory": "cache.sizing",
    "unify_kv_cache_spec_page_size": "cache.sizing",
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
