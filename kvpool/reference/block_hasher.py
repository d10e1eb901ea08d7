"""The block hasher in plain Python: serializer and digest, block by block."""

from __future__ import annotations

from typing import Any

from kvpool.hashing.block_hash import BlockHash
from kvpool.hashing.hashing import (
    Algorithm,
    BlockHasherBase,
    Digest,
    plain_int,
    serialize_cbor,
    serialize_pickle,
)

_PLAIN = {int}


class BlockHasher(BlockHasherBase):
    __doc__ = BlockHasherBase.__doc__

    def _create(self, block_size: int, algorithm: Algorithm, digest: Digest) -> None:
        self.block_size = block_size
        self._plain_digest = digest
        self._plain_serialize = serialize_cbor if algorithm.is_cbor else serialize_pickle

    def _hash_plain_block(self, parent: BlockHash, tokens: list[Any]) -> BlockHash:
        """The hash of one block of any length without extra keys."""
        block = tuple(tokens)
        if not _PLAIN.issuperset(map(type, block)):
            block = tuple(map(plain_int, block))
        return BlockHash(self._plain_digest(self._plain_serialize((parent, block, None))))

    def _hash_plain_blocks(self, parent: BlockHash, tokens: list[Any], start: int, hashes: list[BlockHash]) -> None:
        """Appends to ``hashes`` those of the full blocks from token ``start`` on."""
        size, digest, serialize = self.block_size, self._plain_digest, self._plain_serialize
        for first in range(start, len(tokens) - size + 1, size):
            block = tuple(tokens[first : first + size])
            if not _PLAIN.issuperset(map(type, block)):
                block = tuple(map(plain_int, block))
            parent = BlockHash(digest(serialize((parent, block, None))))
            hashes.append(parent)
