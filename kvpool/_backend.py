"""Which implementation carries the classes: the extension, or the pure-Python twin with KVPOOL_PURE_PYTHON=1.

A broken or missing extension is an ImportError, never a silent change to the slow twin.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

PURE_PYTHON = os.environ.get("KVPOOL_PURE_PYTHON") == "1"
BACKEND = "reference" if PURE_PYTHON else "native"

if TYPE_CHECKING or PURE_PYTHON:
    from kvpool.reference import BlockHashToBlockMap, BlockPoolBase, FreeKVCacheBlockQueue, KVCacheBlock
else:
    from kvpool._core import BlockHashToBlockMap, BlockPoolBase, FreeKVCacheBlockQueue, KVCacheBlock

__all__ = ["BACKEND", "BlockHashToBlockMap", "BlockPoolBase", "FreeKVCacheBlockQueue", "KVCacheBlock"]
