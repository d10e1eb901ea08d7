"""The one place that chooses: the compiled classes, or the pure-Python twin with KVPOOL_PURE_PYTHON=1.

Each class has a base that both halves share: ``BlockPoolBase``, ``BlockHasherBase``, ``RequestBase``,
``KVCacheManagerBase``. The twin's class, in ``kvpool.reference``, is the base and, in Python, what runs at every step.
The native class is the compiled core, in ``kvpool.native`` (``BlockPoolCore``, ``BlockHasherCore``, ``RequestCore``,
``KVCacheManagerCore``), in front of the same base: what the core has comes first, and both have the same methods.
``kvpool.kv_cache_manager`` puts the cache manager together, which stands higher than this module.

A broken or missing extension is an ImportError, never a silent change to the slow twin. A value of the variable that is
neither 0 nor 1 is an InvalidArgumentError, never a silent choice of one of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvpool.common.environment import read_switch

VARIABLE = "KVPOOL_PURE_PYTHON"
PURE_PYTHON = read_switch(VARIABLE)
BACKEND = "reference" if PURE_PYTHON else "native"

if TYPE_CHECKING or PURE_PYTHON:
    from kvpool.pool.list_tables import (
        allocate_table,
        cache_completed_blocks,
        find_prefix_of_tokens,
        free_table,
        touch_table,
    )
    from kvpool.reference import (
        BlockHasher,
        BlockHashToBlockMap,
        BlockPool,
        FreeKVCacheBlockQueue,
        KVCacheBlock,
        Request,
    )
else:
    from kvpool.native.pool import BlockHashToBlockMap, BlockPoolCore, FreeKVCacheBlockQueue, KVCacheBlock
    from kvpool.pool.observed import BlockPoolBase

    class BlockPool(BlockPoolCore, BlockPoolBase):
        __doc__ = BlockPoolBase.__doc__

    def _make_block_hasher():
        from kvpool.hashing.hashing import BlockHasherBase
        from kvpool.native.block_hasher import BlockHasherCore

        return type("BlockHasher", (BlockHasherCore, BlockHasherBase), _body(BlockHasherBase))

    def _make_request():
        from kvpool.native.request import RequestCore
        from kvpool.requests.request_base import RequestBase

        return type("Request", (RequestCore, RequestBase), _body(RequestBase))

    def _body(base):
        return {"__doc__": base.__doc__, "__module__": __name__}

    def __getattr__(name):
        """What a pool alone does not need is put together when it is first asked for."""
        if name == "Request":
            value = _make_request()
        elif name == "BlockHasher":
            value = _make_block_hasher()
        elif name in __all__:
            value = getattr(import_module("kvpool.native.list_tables"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, value)


__all__ = [
    "BACKEND",
    "PURE_PYTHON",
    "VARIABLE",
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockPool",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "Request",
    "allocate_table",
    "cache_completed_blocks",
    "find_prefix_of_tokens",
    "free_table",
    "touch_table",
]
