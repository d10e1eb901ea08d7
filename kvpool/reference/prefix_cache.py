"""Which hashes lead to which blocks of a pool: caching full blocks, looking hashes up, taking them away.

A block has at most one primary hash, which is an attribute of the block, and any number of secondary ones, kept
beside it: partial blocks are reachable from several boundaries.

Invariants (``kvpool.reference.check`` names them):
P4. A primary hash is in the map unless the block's id is in ``_unmapped_ids`` (set by hand, or popped from the map).
P5. Secondary hashes are in the map, and the lists of them are not empty.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.hashing.block_hash import (
    MAX_KEY_BYTES,
    BlockHash,
    BlockHashWithGroupId,
    check_key,
    select_block_hashes,
)
from kvpool.pool.observed import BlockPoolBase
from kvpool.reference.block import KVCacheBlock, to_long
from kvpool.reference.parse import check_digest, group_suffix
from kvpool.reference.prefix_map import PoolHashMap

_MOST_TOKENS = 2**31 - 1


class SecondaryHashes(Mapping[int, "frozenset[BlockHashWithGroupId]"]):
    """Read-only: block id to the keys that lead to the block besides its primary hash; absent when there are none."""

    __slots__ = ("_keys_by_id",)

    def __init__(self, keys_by_id: dict[int, dict[BlockHashWithGroupId, None]]) -> None:
        self._keys_by_id = keys_by_id

    def __getitem__(self, block_id: int) -> frozenset[BlockHashWithGroupId]:
        try:
            # The number itself, whatever its class makes of a comparison.
            number = int.__index__(block_id if isinstance(block_id, int) else operator.index(block_id))
        except TypeError:
            raise KeyError(block_id) from None
        if number not in self._keys_by_id:
            raise KeyError(block_id)
        return frozenset(self._keys_by_id[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys_by_id)

    def __len__(self) -> int:
        return len(self._keys_by_id)


class PrefixCache(BlockPoolBase[KVCacheBlock]):
    """The part of a pool that knows hashes."""

    blocks: list[KVCacheBlock]
    cached_block_hash_to_block: PoolHashMap

    def _create_prefix_cache(self) -> None:
        self.cached_block_hash_to_block = PoolHashMap(self)
        self._secondary_keys: dict[int, dict[BlockHashWithGroupId, None]] = {}
        self.cached_block_hashes_by_block = SecondaryHashes(self._secondary_keys)
        self._unmapped_ids: set[int] = set()

    def get_cached_block(self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """The first cached block with this hash in each group, or None if one of the groups has none. O(groups).

        Raises:
            TypeError, InvalidArgumentError: block_hash is not bytes, or over 32 long.
            OverflowError: a group id is negative or needs over 4 bytes.
        """
        cache = self.cached_block_hash_to_block._cache
        found = []
        for group_id in list(kv_cache_group_ids):
            suffix = group_suffix(group_id)
            check_digest(block_hash)
            key: Any = block_hash + suffix
            entry = cache.get(key)
            if entry is None:
                return None
            found.append(next(iter(entry.values())) if type(entry) is dict else entry)
        return found  # type: ignore[return-value]

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Make the full blocks [num_cached_blocks, num_full_blocks) of a request reachable by their hashes.

        A block that carries the hash of fewer tokens (a partial block that has filled up) loses it first.
        O(num_full_blocks - num_cached_blocks).

        Args:
            request: its ``block_hashes`` has one digest per ``hash_block_size`` tokens.
            blocks: all blocks of the request in token order. Null blocks are skipped.
            num_cached_blocks, num_full_blocks: how many were cached before and are to be cached after.
            block_size: tokens per block, a multiple of ``hash_block_size``.
            kv_cache_group_id: group that the blocks belong to.
            block_mask: one entry per block of the range; False skips the block.

        Raises:
            BlockStateError: a block carries the hash of as many tokens or of an unknown number, is in the range
                twice, or belongs to another pool or to none. Nothing has changed.
            InvalidArgumentError: too few blocks or hashes, a mask or a block size that does not fit.
        """
        if self.enable_kv_cache_events:
            self._cache_full_blocks_observed(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
            )
            return
        self._cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )

    def _cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """``cache_full_blocks`` without events."""
        num_cached_blocks, num_full_blocks = to_long(num_cached_blocks), to_long(num_full_blocks)
        block_size = to_long(block_size)
        if num_cached_blocks >= num_full_blocks:
            return
        suffix = group_suffix(kv_cache_group_id)
        if num_cached_blocks < 0 or block_size < 1 or num_full_blocks * block_size > _MOST_TOKENS:
            raise InvalidArgumentError(f"blocks [{num_cached_blocks}, {num_full_blocks}) of {block_size} tokens")
        num_new_blocks = num_full_blocks - num_cached_blocks
        mask = [True] * num_new_blocks if block_mask is None else [bool(is_wanted) for is_wanted in block_mask]
        if len(mask) != num_new_blocks:
            raise InvalidArgumentError(f"a mask of {len(mask)} entries for {num_new_blocks} blocks")
        if type(blocks) is not list:
            blocks = list(blocks)
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        if len(new_blocks) != num_new_blocks:
            raise InvalidArgumentError(f"{num_full_blocks} full blocks, but the request has {len(blocks)} blocks")
        hashes = select_block_hashes(
            request.block_hashes, self.hash_block_size, block_size, num_cached_blocks, num_full_blocks
        )
        hash_map = self.cached_block_hash_to_block
        cache = hash_map._cache
        secondary_keys = self._secondary_keys
        null_block = self.null_block
        num_tokens = num_cached_blocks * block_size
        stored: list[KVCacheBlock] = []
        for block, digest, is_wanted in zip(new_blocks, hashes, mask):
            num_tokens += block_size
            if block is null_block or not is_wanted:
                continue
            # What is neither is for the careful loop; its attributes and sums may be code of the caller.
            if type(block) is not KVCacheBlock or type(digest) is not bytes:
                break
            if block._block_hash is not None or block._pool is not self:
                break
            key: Any = digest + suffix
            if len(key) > MAX_KEY_BYTES or (secondary_keys and block._block_id in secondary_keys):
                break
            if cache.setdefault(key, block) is not block:
                hash_map._insert(key, block)
            block._block_hash = key
            block._block_hash_num_tokens = num_tokens
            stored.append(block)
        else:
            if len(hashes) == num_new_blocks:
                return
        for block in stored:
            hash_map._pop(block._block_hash, block._block_id)  # type: ignore[arg-type]
            block._block_hash = block._block_hash_num_tokens = None
        self._cache_carefully(new_blocks, hashes, mask, num_cached_blocks, block_size, suffix)

    def _cache_carefully(
        self,
        new_blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        mask: Sequence[bool],
        num_cached_blocks: int,
        block_size: int,
        suffix: bytes,
    ) -> None:
        """``_cache_full_blocks`` for a range with promotions, several hashes a block or invalid entries."""
        planned: dict[KVCacheBlock, tuple[BlockHashWithGroupId, int]] = {}
        for index, (block, is_wanted) in enumerate(zip(new_blocks, mask, strict=True)):
            if not is_wanted or (isinstance(block, KVCacheBlock) and block._is_null):
                continue
            self._check_own(block)
            if block in planned:
                raise BlockStateError(f"the block is in the range twice: {block!r}")
            if index >= len(hashes):
                raise InvalidArgumentError(f"block {num_cached_blocks + index} of the request has no hash yet")
            check_digest(hashes[index])
            key: Any = hashes[index] + suffix
            num_tokens = (num_cached_blocks + index + 1) * block_size
            if block._block_hash is not None:
                num_hashed_tokens = block._block_hash_num_tokens
                if num_hashed_tokens is None or num_hashed_tokens >= num_tokens:
                    raise BlockStateError(f"the block carries a hash that is not of a shorter prefix: {block!r}")
            planned[block] = key, num_tokens
        for block, (key, num_tokens) in planned.items():
            if block._block_hash is not None:
                self._remove_cached_block_hashes(block)
            self._insert_block_hash(key, block, num_tokens)

    def _check_own(self, block: KVCacheBlock) -> None:
        if not isinstance(block, KVCacheBlock):
            raise TypeError(f"a pool works on KVCacheBlock, not {type(block).__name__}")
        if block._pool is not self:
            raise BlockStateError(f"the block belongs to {'no' if block._pool is None else 'another'} pool: {block!r}")

    # Calls for BlockPoolBase

    def _cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """Keys that lead to the block: the primary one, then the secondary ones in the order of their insertion."""
        self._check_own(block)
        block_id = block._block_id
        keys = [] if block._block_hash is None or block_id in self._unmapped_ids else [block._block_hash]
        keys += self._secondary_keys.get(block_id, ())
        return keys

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """Take every hash from the block; returns ``_cached_block_hashes``, which lead nowhere now."""
        self._check_own(block)
        keys = self._cached_block_hashes(block)
        block_id = block._block_id
        for key in keys:
            self.cached_block_hash_to_block._pop(key, block_id)
        self._secondary_keys.pop(block_id, None)
        self._unmapped_ids.discard(block_id)
        block._block_hash = block._block_hash_num_tokens = None
        return keys

    def _insert_block_hash(self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
        """Make the key lead to the block: as its primary hash, standing for num_tokens, if it has none yet; else as a
        secondary one. Nothing happens if the block has the key already."""
        check_key(key)
        self._check_cacheable(block)
        if block._block_hash == key or self.cached_block_hash_to_block.contain(key, block._block_id):
            return
        if block._block_hash is None:
            block._block_hash = key
            block._block_hash_num_tokens = num_tokens
            self.cached_block_hash_to_block._insert(key, block)
        else:
            self._attach_key(key, block)

    def _reset_hashes(self) -> None:
        """Take every hash of every block; the caller has checked that none is in use."""
        blocks = list(self.cached_block_hash_to_block._blocks())
        blocks += [self.blocks[block_id] for block_id in self._unmapped_ids]
        for block in blocks:
            block._block_hash = block._block_hash_num_tokens = None
        self.cached_block_hash_to_block._cache.clear()
        self._secondary_keys.clear()
        self._unmapped_ids.clear()

    # Hashes that are set, reset, inserted or popped by hand

    def _check_cacheable(self, block: KVCacheBlock) -> None:
        self._check_own(block)
        if block._is_null:
            raise BlockStateError("the null block is never cached")

    def _attach_key(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        self._check_cacheable(block)
        if self.cached_block_hash_to_block.contain(key, block._block_id):
            return
        if block._block_hash == key:
            self._unmapped_ids.discard(block._block_id)
        else:
            self._secondary_keys.setdefault(block._block_id, {})[key] = None
        self.cached_block_hash_to_block._insert(key, block)

    def _detach_key(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        block = self.cached_block_hash_to_block._pop(key, block_id)
        if block is None:
            return None
        if key in self._secondary_keys.get(block_id, ()):
            self._drop_secondary_key(key, block_id)
        else:
            self._unmapped_ids.add(block_id)
        return block

    def _drop_secondary_key(self, key: BlockHashWithGroupId, block_id: int) -> None:
        keys = self._secondary_keys[block_id]
        del keys[key]
        if not keys:
            del self._secondary_keys[block_id]

    def _note_hash_set_by_hand(self, block: KVCacheBlock) -> None:
        self._unmapped_ids.add(block._block_id)

    def _forget_primary_hash(self, block: KVCacheBlock) -> None:
        if block._block_hash is None:
            return
        if block._block_id in self._unmapped_ids:
            self._unmapped_ids.discard(block._block_id)
        else:
            self.cached_block_hash_to_block._pop(block._block_hash, block._block_id)
