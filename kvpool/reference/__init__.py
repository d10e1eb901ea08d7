"""The pure-Python twin of the native pool: same classes, same order of eviction.

It is the oracle of the differential tests, the baseline of the benchmarks, and what ``KVPOOL_PURE_PYTHON=1`` selects.
"""

from __future__ import annotations

from kvpool.reference.block import KVCacheBlock
from kvpool.reference.block_hasher import BlockHasher
from kvpool.reference.free_queue import FreeKVCacheBlockQueue
from kvpool.reference.id_calls import PoolStats
from kvpool.reference.pool import BlockPool
from kvpool.reference.prefix_map import BlockHashToBlockMap
from kvpool.reference.request import Request

__all__ = [
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockPool",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "PoolStats",
    "Request",
]
