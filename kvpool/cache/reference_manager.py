"""The cache manager over the pure-Python pool: the same code as everywhere, nothing of it compiled."""

from __future__ import annotations

from typing import Any

from kvpool.cache.manager import KVCacheManagerOperations
from kvpool.reference import BlockPool


class KVCacheManager(KVCacheManagerOperations):
    __doc__ = KVCacheManagerOperations.__doc__

    def __init__(self, *args: Any, block_pool_class: Any = None, **options: Any) -> None:
        super().__init__(*args, block_pool_class=block_pool_class or BlockPool, **options)
