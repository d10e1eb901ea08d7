"""BlockHasher: the hashes under which full blocks of tokens are found in the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import backend
from kvpool.hashing.hashing import ALGORITHMS, DEFAULT_SEED, resolve_none_hash_seed

if TYPE_CHECKING or backend.BACKEND == "reference":
    from kvpool.reference.block_hasher import BlockHasher
else:
    from kvpool.hashing.hashing import BlockHashing
    from kvpool.native.block_hasher import BlockHasherBase

    class BlockHasher(BlockHashing, BlockHasherBase):
        __doc__ = BlockHashing.__doc__


__all__ = ["ALGORITHMS", "DEFAULT_SEED", "BlockHasher", "resolve_none_hash_seed"]
