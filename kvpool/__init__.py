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
    from kvpool.prometheus import KVCacheExporter
    from kvpool.request import Request, RequestStatus
    from kvpool.stats import PrefixCacheStats

_IMPORTED_LATER = {
    "BlockHasher": "block_hasher",
    "EventPublisherFactory": "event_publisher",
    "KVCacheExporter": "prometheus",
    "KVEventsConfig": "event_publisher",
    "PrefixCacheStats": "stats",
    "Request": "request",
    "RequestStatus": "request",
    "ZmqEventPublisher": "event_publisher",
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
    "EventPublisherFactory",
    "FreeKVCacheBlockQueue",
    "InvalidArgumentError",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheEvent",
    "KVCacheExporter",
    "KVCacheMetricsCollector",
    "KVEventBatch",
    "KVEventsConfig",
    "KvpoolError",
    "NoFreeBlocksError",
    "PrefixCacheStats",
    "Request",
    "RequestStatus",
    "ZmqEventPublisher",
    "__version__",
    "get_block_hash",
    "get_group_id",
    "make_block_hash_with_group_id",
]


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"kvpool.{_IMPORTED_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
