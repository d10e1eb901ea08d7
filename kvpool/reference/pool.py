"""The block pool in plain Python: allocation, reference counts and lazy eviction, over the prefix cache.

This is the specification of the native core, its oracle in tests and the baseline of its benchmarks. What is common
and hot is here; events, partial blocks, moves and reset are in ``BlockPoolBase``, written over the calls at the end of
the class.

Every mutating call is all or nothing. The hot loops change blocks as they go and stop at the first entry that is
out of the ordinary; what they did is then undone, and a careful loop over the same batch either raises or finishes
the job. So a valid batch pays for no second look, and a block that appears twice is met in the state that its first
appearance left.

A pool is for one thread at a time; unlike the native one, its calls are not atomic.

Invariants (``kvpool.reference.check`` names them, with those of the free list and of the map):
P1. Block 0 is the null block: not queued, ref_cnt 0, no hash.
P2. A queued block has ref_cnt 0; a block with ref_cnt > 0 is not queued.
P3. Blocks with ref_cnt 0 that are not queued and not null number ``_num_detached``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import length_hint
from typing import Any, NoReturn

from kvpool.errors import BlockStateError, InvalidArgumentError, InvariantError, NoFreeBlocksError
from kvpool.pool.observed import BlockPoolBase
from kvpool.pool.skipped_frees import MOST_LINES, log_skipped
from kvpool.reference.block import KVCacheBlock, refuse_copy
from kvpool.reference.check import find_violation
from kvpool.reference.free_queue import PoolFreeQueue, check_num_blocks
from kvpool.reference.id_calls import IdCalls, PoolStats
from kvpool.reference.parse import check_types

INVALID_FREE_POLICIES = ("raise", "warn")


class BlockPool(IdCalls):
    __doc__ = BlockPoolBase.__doc__

    def _create(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool,
        metrics_collector: Any,
        medium: str,
        uncached_first: bool,
        on_invalid_free: str,
    ) -> None:
        if not isinstance(num_gpu_blocks, int) or isinstance(num_gpu_blocks, bool):
            raise TypeError(f"num_gpu_blocks must be an int, not {type(num_gpu_blocks).__name__}")
        if num_gpu_blocks < 1:
            raise InvalidArgumentError(f"a pool has at least 1 block, not {num_gpu_blocks}")
        if not isinstance(hash_block_size, int) or isinstance(hash_block_size, bool):
            raise TypeError(f"hash_block_size must be an int, not {type(hash_block_size).__name__}")
        if hash_block_size < 1:
            raise InvalidArgumentError(f"hash_block_size must be positive, not {hash_block_size}")
        if on_invalid_free not in INVALID_FREE_POLICIES:
            raise InvalidArgumentError(f"on_invalid_free is one of {INVALID_FREE_POLICIES}, not {on_invalid_free!r}")
        self._create_prefix_cache()
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.medium = medium
        self.uncached_first = uncached_first
        self.on_invalid_free = on_invalid_free
        self.stats = PoolStats()
        self._reuse_watchers = {}

        self.free_block_queue = queue = PoolFreeQueue(self)
        self._num_detached = 0
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        for block in self.blocks:
            block._pool = self
            block._queue = queue
        self.null_block = self.blocks[0]
        self.null_block._is_null = True
        queue._link_at_tail(self.blocks[1:])

    # Allocation, reference counts

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the head of the free list, each with one reference. Hashes that they still carry are
        evicted now, not earlier. O(num_blocks).

        Raises:
            NoFreeBlocksError: fewer are free (a ValueError, as in vLLM); nothing has changed.
            TypeError, InvalidArgumentError: num_blocks is no int, or negative.
        """
        if self.enable_kv_cache_events or self.metrics_collector is not None or self._reuse_watchers:
            return self._get_new_blocks_observed(num_blocks)
        taken = self._take_blocks(num_blocks)
        if self.enable_caching:
            secondary_keys = self._secondary_keys
            for block in taken:
                carries_hash = block._block_hash is not None or (secondary_keys and block._block_id in secondary_keys)
                if carries_hash and self._remove_cached_block_hashes(block):
                    self.stats.evictions += 1
        return taken

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], prepend: bool = False) -> None:
        """Give one reference of each entry back. Blocks that nobody uses any more become free, in the given order:
        those with a hash at the tail, the others at the head (see ``uncached_first``). O(len).

        Args:
            ordered_blocks: the block to be reused first comes first; null blocks are skipped, blocks of another pool
                are given back to it.
            prepend: all of them to the head.

        Raises:
            BlockStateError: an entry has no reference left to give back (a double free, also within the batch), or
                belongs to no pool; nothing has changed. With ``on_invalid_free="warn"`` such entries are skipped,
                logged and counted.
        """
        blocks = ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
        check_types(blocks, "frees")
        null_block = self.null_block
        with_hash: list[KVCacheBlock] = []
        is_one_list = prepend or not (self.uncached_first and self.enable_caching)
        without_hash: list[KVCacheBlock] = with_hash if is_one_list else []
        pending = iter(blocks)
        for block in pending:
            if block._pool is not self:
                break
            ref_cnt = block._ref_cnt
            if ref_cnt > 1:
                block._ref_cnt = ref_cnt - 1
            elif ref_cnt == 1:
                block._ref_cnt = 0
                if block._block_hash is None:
                    without_hash.append(block)
                else:
                    with_hash.append(block)
            elif block is not null_block:
                break
        else:
            if without_hash:
                if prepend or self.uncached_first:
                    self.free_block_queue._link_at_head(without_hash)
                else:
                    self.free_block_queue._link_at_tail(without_hash)
            if with_hash and not is_one_list:
                self.free_block_queue._link_at_tail(with_hash)
            return
        num_done = len(blocks) - length_hint(pending) - 1
        for block in blocks[:num_done]:
            if block is not null_block:
                block._ref_cnt += 1
        self._free_carefully(blocks, prepend)

    def _free_carefully(self, blocks: Sequence[KVCacheBlock], prepend: bool) -> None:
        """``free_blocks`` for a batch with blocks of other pools or invalid entries."""
        batches: dict[BlockPool, list[KVCacheBlock]] = {self: []}
        references_left: dict[KVCacheBlock, int] = {}
        invalid: list[tuple[BlockPool, int, KVCacheBlock]] = []
        for place, block in enumerate(blocks):
            pool = block._pool
            if pool is None:
                invalid.append((self, place, block))
                continue
            if not block._is_null:
                left = references_left.get(block, block._ref_cnt)
                if left == 0:
                    invalid.append((pool, place, block))
                    continue
                references_left[block] = left - 1
            batches.setdefault(pool, []).append(block)
        for pool, _, block in invalid:
            if pool.on_invalid_free == "raise":
                raise BlockStateError(f"free of a block {_reason_for_invalid_free(block)}: {block!r}")
        for pool, _, _ in invalid:
            pool.stats.invalid_frees += 1
        for pool, batch in batches.items():
            pool.free_blocks(batch, prepend)
        log_skipped("free_blocks", [(place, block) for _, place, block in invalid[:MOST_LINES]], len(invalid))

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each entry; free ones leave the free list. Null blocks are skipped. O(len).

        Raises:
            BlockStateError: a block of another pool or of none, or a detached one; nothing has changed.
        """
        if type(blocks) is not list:
            blocks = list(blocks)
        check_types(blocks, "works on")
        null_block = self.null_block
        # Blocks on their way out keep their own links until all went well: backwards, these put them back in place.
        unlinked: list[KVCacheBlock] = []
        pending = iter(blocks)
        for block in pending:
            if block._pool is not self:
                break
            ref_cnt = block._ref_cnt
            if ref_cnt == 0:
                if block is null_block:
                    continue
                after = block._next
                if after is None:
                    break
                before = block._prev
                before._next = after
                after._prev = before
                unlinked.append(block)
            block._ref_cnt = ref_cnt + 1
        else:
            for block in unlinked:
                block._prev = block._next = None
            self.free_block_queue._num_free -= len(unlinked)
            if self.metrics_collector is not None:
                for block in list(blocks):  # a collector is code of the caller
                    self.metrics_collector.on_block_accessed(block)
            return
        num_done = len(blocks) - length_hint(pending) - 1
        for block in blocks[:num_done]:
            if block is not null_block:
                block._ref_cnt -= 1
        for block in reversed(unlinked):
            block._prev._next = block  # type: ignore[union-attr]
            block._next._prev = block  # type: ignore[union-attr]
        offender = blocks[num_done]
        self._check_own(offender)
        raise BlockStateError(f"touch of a detached block: {offender!r}")

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Whether the block has one user and no hash, so that this user may write into it."""
        return block._ref_cnt == 1 and block._block_hash is None and not block._is_null

    def new_block_table(self) -> list[KVCacheBlock]:
        """An empty block table, which a request's blocks are kept in."""
        return []

    def get_num_free_blocks(self) -> int:
        """Number of blocks that can be taken now, cached ones that nobody uses included. O(1)."""
        return self.free_block_queue._num_free

    def get_usage(self) -> float:
        """Share of the allocatable blocks that are not free, 0.0 to 1.0. Cached blocks without users are free."""
        num_allocatable = self.num_gpu_blocks - 1
        if num_allocatable == 0:
            return 0.0
        return 1.0 - self.free_block_queue._num_free / num_allocatable

    @property
    def num_evictable_blocks(self) -> int:
        """Number of free blocks that carry a hash: what a look-up can still find and an allocation may evict.
        O(free blocks)."""
        secondary_keys = self._secondary_keys
        return sum(
            block._block_hash is not None or block._block_id in secondary_keys
            for block in self.free_block_queue.iter_blocks_after(None)
        )

    @property
    def nbytes(self) -> int:
        """Memory that the pool takes for its bookkeeping, bytes: its arrays and its table of block objects; in plain
        Python an estimate, the size of one block object times their number."""
        return sys.getsizeof(self.null_block) * self.num_gpu_blocks

    # Checks

    def check(self) -> None:
        """Recompute every invariant of the pool; InvariantError says what is wrong. O(num_gpu_blocks + hashes)."""
        reason = find_violation(self)
        if reason is not None:
            raise InvariantError(reason)

    def __reduce__(self) -> NoReturn:
        refuse_copy("BlockPool")

    # Calls for BlockPoolBase

    def _take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """``get_new_blocks`` without eviction: the blocks keep their hashes."""
        if type(num_blocks) is not int or num_blocks < 0:
            num_blocks = check_num_blocks(num_blocks)
        queue = self.free_block_queue
        if num_blocks > queue._num_free:
            raise NoFreeBlocksError(f"Cannot get {num_blocks} free blocks from the pool")
        head = queue.fake_free_list_head
        block: Any = head._next
        taken = []
        for _ in range(num_blocks):
            after = block._next
            block._prev = block._next = None
            block._ref_cnt = 1
            taken.append(block)
            block = after
        head._next = block
        block._prev = head
        queue._num_free -= num_blocks
        return taken

    def _free_blocks_to_tail(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One reference less for each (valid) entry; those that reach 0 go to the tail in the given order."""
        released = []
        for block in blocks:
            block._ref_cnt -= 1
            if block._ref_cnt == 0:
                released.append(block)
        self.free_block_queue._link_at_tail(released)

    def _count_eviction(self) -> None:
        self.stats.evictions += 1


def _reason_for_invalid_free(block: KVCacheBlock) -> str:
    return "that belongs to no pool" if block._pool is None else "that has no reference left"
