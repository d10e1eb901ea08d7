"""The cache manager over the pure-Python pool: the same code as everywhere, nothing of it compiled."""

from __future__ import annotations

from kvpool.cache.manager import KVCacheManagerBase
from kvpool.reference import BlockPool


class KVCacheManager(KVCacheManagerBase):
    __doc__ = KVCacheManagerBase.__doc__

    _block_pool_class = BlockPool
