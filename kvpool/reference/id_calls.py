"""The calls of a pool that take and give ids instead of block objects."""

from __future__ import annotations

import logging
from typing import Any

from kvpool.errors import BlockStateError, InvalidArgumentError, KvpoolError
from kvpool.hashing.block_hash import BlockHashList, BlockHashWithGroupId
from kvpool.reference.block import KVCacheBlock
from kvpool.reference.free_queue import check_num_blocks
from kvpool.reference.id_buffer import empty_id_array, ids_of_buffer, write_ids
from kvpool.reference.parse import check_digest, group_suffix
from kvpool.reference.prefix_cache import PrefixCache

_DIGESTS_AT_A_TIME = 128  # that are checked before the first is looked up

logger = logging.getLogger("kvpool")


class PoolStats:
    """Counters of a pool since its creation.

    Attributes:
        evictions: free blocks that lost a hash because they were reused.
        invalid_frees: entries that ``free_blocks`` skipped under ``on_invalid_free="warn"``.
    """

    __slots__ = ("evictions", "invalid_frees")

    def __init__(self) -> None:
        self.evictions = 0
        self.invalid_frees = 0


class IdCalls(PrefixCache):
    """The calls of a pool by ids, over those that take block objects."""

    on_invalid_free: str
    stats: PoolStats

    def allocate_ids(self, n: int, out: Any = None) -> Any:
        """Take blocks as ``get_new_blocks`` does, and return their ids. O(n).

        Args:
            n: number of blocks.
            out: a writable int32 buffer of exactly n items to fill, or None.

        Returns:
            out, or a new int32 array of shape (n,).

        Raises:
            NoFreeBlocksError: fewer are free (a ValueError, as in vLLM); nothing has changed.
            TypeError: n is no int, or out no writable int32 buffer.
            InvalidArgumentError: n is negative, or out of another length.
        """
        n = check_num_blocks(n)
        if out is not None and len(ids_of_buffer(out, is_written=True)) != n:
            raise InvalidArgumentError(f"out must have exactly {n} items")
        blocks = self.get_new_blocks(n)
        try:
            if out is None:
                out = empty_id_array(n)
            # Whoever watches may have changed the array.
            if len(ids_of_buffer(out, is_written=True)) != len(blocks):
                raise InvalidArgumentError(f"out must have exactly {len(blocks)} items")
            write_ids(out, [block._block_id for block in blocks])
        except BaseException:
            self.free_blocks(blocks, prepend=True)
            raise
        return out

    def free_ids(self, ids: Any, prepend: bool = False) -> None:
        """Give references back as ``free_blocks`` does, by ids: an int32 buffer of shape (n,). An id outside the pool
        is an invalid entry like any other: BlockStateError, or skipped. O(n)."""
        if self.on_invalid_free == "warn":
            ids = self._without_strange_ids(ids)
        self.free_blocks(self._blocks_of_ids(ids), prepend)

    def get_ref_counts(self) -> Any:
        """``ref_cnt`` of every block, a new int32 array of shape (num_gpu_blocks,). O(blocks)."""
        counts = empty_id_array(self.num_gpu_blocks)
        write_ids(counts, [block.ref_cnt for block in self.blocks])
        return counts

    def touch_ids(self, ids: Any) -> None:
        """Add references as ``touch`` does, by ids: an int32 buffer of shape (n,). BlockStateError names an id outside
        the pool. O(n)."""
        self.touch(self._blocks_of_ids(ids))

    def find_prefix_ids(self, block_hashes: BlockHashList, group_id: int = 0, max_blocks: int | None = None) -> Any:
        """Ids of the first cached block of each hash, up to the first miss.

        Args:
            block_hashes: digests in token order.
            group_id: KV cache group.
            max_blocks: where to stop at the latest, None for no limit.

        Returns:
            An int32 array of shape (hits,). O(hits).
        """
        suffix = group_suffix(group_id)
        limit = None if max_blocks is None else check_num_blocks(max_blocks)
        digests = list(block_hashes)[:limit]
        hash_map = self.cached_block_hash_to_block
        found: list[int] = []
        for start in range(0, len(digests), _DIGESTS_AT_A_TIME):
            chunk = digests[start : start + _DIGESTS_AT_A_TIME]
            for digest in chunk:
                check_digest(digest)
            for digest in chunk:
                block = hash_map.get_one_block(BlockHashWithGroupId(digest + suffix))
                if block is None:
                    break
                found.append(block._block_id)
            if len(found) < start + len(chunk):
                break
        ids = empty_id_array(len(found))
        write_ids(ids, found)
        return ids

    def cache_ids(self, block_hashes: BlockHashList, ids: Any, group_id: int = 0) -> None:
        """Make blocks reachable by their hashes. Null blocks and blocks that have the hash already are skipped. O(n).

        Args:
            block_hashes: one digest per id.
            ids: int32 buffer of shape (n,).
            group_id: KV cache group.

        Raises:
            BlockStateError: a block carries another hash or is in the batch twice, an id is not of the pool. Nothing
                has changed.
            InvalidArgumentError: not one digest per id, or one over 32 bytes.
            KvpoolError: events are enabled; they name tokens, which this call does not know.
        """
        if self.enable_kv_cache_events:
            raise KvpoolError("cache_ids cannot publish events, which name tokens: use cache_full_blocks")
        suffix = group_suffix(group_id)
        digests = list(block_hashes)
        num_ids = len(ids_of_buffer(ids))
        if len(digests) != num_ids:
            raise InvalidArgumentError(f"{len(digests)} block hashes for {num_ids} ids")
        blocks = self._blocks_of_ids(ids)
        for digest in digests:
            check_digest(digest)
        planned: dict[KVCacheBlock, BlockHashWithGroupId] = {}
        for block, digest in zip(blocks, digests):
            if block._is_null:
                continue
            key: Any = digest + suffix
            if block in planned:
                raise BlockStateError(f"the block is in the batch twice: {block!r}")
            if block._block_hash is not None and block._block_hash != key:
                raise BlockStateError(f"the block carries another hash: {block!r}")
            planned[block] = key
        for block, key in planned.items():
            if block._block_hash is None:
                self._insert_block_hash(key, block, None)
            else:
                self._attach_key(key, block)  # reachable again, if it was popped from the map by hand

    def _without_strange_ids(self, ids: Any) -> Any:
        num_blocks = len(self.blocks)
        known = [block_id for block_id in ids_of_buffer(ids) if 0 <= block_id < num_blocks]
        num_strange = len(ids) - len(known)
        if num_strange:
            self.stats.invalid_frees += num_strange
            logger.warning("Skipped the free of %d ids outside the pool of %d blocks", num_strange, num_blocks)
        array = empty_id_array(len(known))
        write_ids(array, known)
        return array

    def _blocks_of_ids(self, ids: Any) -> list[KVCacheBlock]:
        blocks = self.blocks
        num_blocks = len(blocks)
        found = []
        for block_id in ids_of_buffer(ids):
            if not 0 <= block_id < num_blocks:
                raise BlockStateError(f"block id {block_id} is outside the pool of {num_blocks} blocks")
            found.append(blocks[block_id])
        return found
