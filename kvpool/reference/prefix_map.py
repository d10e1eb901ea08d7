"""The prefix map: from a key (digest and group id) to the blocks that hold its tokens.

Nearly every key has one block, which then is the dict's value itself; several blocks share an inner dict by id, in
insertion order. That saves an object per key that the garbage collector would have to visit.

Invariants (``kvpool.reference.check`` names them):
M1. A key leads to at least one block; an inner dict knows its blocks by their ids.
M2. In a pool, a key leads to exactly the blocks that carry it, as primary hash or as a secondary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, Protocol

from kvpool.hashing.block_hash import BlockHashWithGroupId, check_key
from kvpool.reference.block import KVCacheBlock, refuse_copy


class KeyOwner(Protocol):
    """What the map of a pool asks of it: the blocks know their keys as well."""

    def _attach_key(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None: ...

    def _detach_key(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None: ...


Entry = KVCacheBlock | dict[int, KVCacheBlock]


def wanted_id(block_id: object) -> int | None:
    """An id to look for; None for what is no int, which is found nowhere. Never runs code of the caller."""
    return int.__index__(block_id) if isinstance(block_id, int) else None


class BlockHashToBlockMap:
    """The blocks that hold the tokens of a hash: from a key (digest and group id) to blocks in insertion order.

    ``pool.cached_block_hash_to_block`` is that of a pool and changes the pool. ``BlockHashToBlockMap()`` stands alone
    and takes hand-made blocks. Keys are bytes, 4 to 36 long (``make_block_hash_with_group_id``): else TypeError or
    InvalidArgumentError. ``len`` is the number of keys. All methods are O(1).

    vLLM: ``BlockHashToBlockMap``.
    """

    __slots__ = ("_cache",)

    def __init__(self) -> None:
        self._cache: dict[BlockHashWithGroupId, Entry] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The first inserted of the key's blocks, None if there is none."""
        entry = self._cache.get(key)
        if entry is None:
            # A bad key can never be in the map, so hits need no check.
            check_key(key)
            return None
        if type(entry) is dict:
            return next(iter(entry.values()))
        return entry  # type: ignore[return-value]

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Whether the key leads to the block with this id."""
        entry = self._cache.get(key)
        if entry is None:
            check_key(key)
            return False
        wanted = wanted_id(block_id)
        if type(entry) is dict:
            return wanted in entry
        return entry._block_id == wanted  # type: ignore[union-attr]

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Make the key lead to the block, behind those it leads to already; the same id twice is one entry."""
        check_key(key)
        if not isinstance(block, KVCacheBlock):
            raise TypeError(f"a prefix map holds KVCacheBlock, not {type(block).__name__}")
        self._insert(key, block)

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Take one block from under the key. None, and nothing changed, if the key does not lead to that id."""
        check_key(key)
        wanted = wanted_id(block_id)
        return None if wanted is None else self._pop(key, wanted)

    def __len__(self) -> int:
        return len(self._cache)

    def __reduce__(self) -> NoReturn:
        refuse_copy("BlockHashToBlockMap")

    # Unchecked, for the pool.

    def _insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        entry = self._cache.setdefault(key, block)
        if type(entry) is dict:
            entry[block._block_id] = block
        elif entry is not block:
            self._cache[key] = {entry._block_id: entry, block._block_id: block}  # type: ignore[dict-item,union-attr]

    def _pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        entry = self._cache.get(key)
        if entry is None:
            return None
        if type(entry) is dict:
            block = entry.pop(block_id, None)
            if not entry:
                del self._cache[key]
            return block
        if entry._block_id != block_id:  # type: ignore[union-attr]
            return None
        del self._cache[key]
        return entry  # type: ignore[return-value]

    def _blocks(self) -> Iterator[KVCacheBlock]:
        for entry in self._cache.values():
            if type(entry) is dict:
                yield from entry.values()
            else:
                yield entry  # type: ignore[misc]


class PoolHashMap(BlockHashToBlockMap):
    """The prefix map of a pool. Its methods change the pool, so that no block is reused with a key still leading
    to it.

    ``insert`` takes the pool's own blocks (BlockStateError): the key becomes a secondary hash of the block unless it
    is the primary one. ``pop`` takes the key out of the map and from the block's secondary hashes; a primary hash
    stays on the block.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: KeyOwner) -> None:
        super().__init__()
        self._pool = pool

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        check_key(key)
        self._pool._attach_key(key, block)

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        check_key(key)
        wanted = wanted_id(block_id)
        return None if wanted is None else self._pool._detach_key(key, wanted)
