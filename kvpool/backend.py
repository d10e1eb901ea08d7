"""Which implementation carries the classes: the extension, or the pure-Python twin with KVPOOL_PURE_PYTHON=1.

A broken or missing extension is an ImportError, never a silent change to the slow twin. A value of the variable that is
neither 0 nor 1 is an InvalidArgumentError, never a silent choice of one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.common.environment import read_switch

VARIABLE = "KVPOOL_PURE_PYTHON"
PURE_PYTHON = read_switch(VARIABLE)
BACKEND = "reference" if PURE_PYTHON else "native"

if TYPE_CHECKING or PURE_PYTHON:
    from kvpool.reference import BlockHashToBlockMap, BlockPoolBase, FreeKVCacheBlockQueue, KVCacheBlock
else:
    from kvpool.native.pool import BlockHashToBlockMap, BlockPoolBase, FreeKVCacheBlockQueue, KVCacheBlock

__all__ = ["BACKEND", "BlockHashToBlockMap", "BlockPoolBase", "FreeKVCacheBlockQueue", "KVCacheBlock"]
