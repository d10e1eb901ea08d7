"""The pure-Python twin of the native pool: same classes, same order of eviction.

It is the oracle of the differential tests, the baseline of the benchmarks, and what ``KVPOOL_PURE_PYTHON=1`` selects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpool.pool.observed import PoolOperations
from kvpool.reference.block import KVCacheBlock
from kvpool.reference.block_hasher import BlockHasher
from kvpool.reference.free_queue import FreeKVCacheBlockQueue
from kvpool.reference.pool import BlockPoolBase, PoolStats
from kvpool.reference.prefix_map import BlockHashToBlockMap
from kvpool.reference.request import Request

if TYPE_CHECKING:
    from kvpool.cache.reference_manager import KVCacheManager


class BlockPool(PoolOperations, BlockPoolBase):
    __doc__ = PoolOperations.__doc__


__all__ = [
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockPool",
    "BlockPoolBase",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheManager",
    "PoolStats",
    "Request",
]


def __getattr__(name: str) -> Any:
    # It stands far above the pool, which is what this package is imported for by those below.
    if name == "KVCacheManager":
        return import_module("kvpool.cache.reference_manager").KVCacheManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
