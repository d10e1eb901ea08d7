"""BlockPool: allocates, shares, caches, evicts and frees the blocks of one KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import _backend

if TYPE_CHECKING or _backend.BACKEND == "reference":
    from kvpool.reference import BlockPool
else:
    from kvpool._pool_operations import PoolOperations

    class BlockPool(PoolOperations, _backend.BlockPoolBase):
        __doc__ = PoolOperations.__doc__


__all__ = ["BlockPool"]
