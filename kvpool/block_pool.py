"""BlockPool: allocates, shares, caches, evicts and frees the blocks of one KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import backend

if TYPE_CHECKING or backend.BACKEND == "reference":
    from kvpool.reference import BlockPool
else:
    from kvpool.pool.observed import PoolOperations

    class BlockPool(PoolOperations, backend.BlockPoolBase):
        __doc__ = PoolOperations.__doc__


__all__ = ["BlockPool"]
