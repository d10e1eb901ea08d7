"""``BlockPoolBase``: events, metrics, partial blocks, moves of hashes and resets, the same for both pools.

``get_new_blocks``, ``free_blocks`` and ``touch`` come here only while events or metrics are on. It is written over the
calls of ``BlockPoolHalf``; each method checks its arguments and computes its events before it calls one that changes
something.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from operator import index
from typing import Any

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.events.wire import MEDIUM_GPU
from kvpool.hashing.block_hash import BlockHashWithGroupId, make_block_hash_with_group_id
from kvpool.pool.event_stream import PoolEvents
from kvpool.pool.interface import BlockT

logger = logging.getLogger("kvpool")


class BlockPoolBase(PoolEvents[BlockT]):
    """The blocks of one KV cache: allocates, shares, caches, evicts and frees them.

    A block that nobody uses any more is free, but keeps its hash, to be found again until it is reused. Every call that
    changes something is all or nothing. Creation is O(num_gpu_blocks).

    Args:
        num_gpu_blocks: size of the pool, at least 1; block 0 is the null block, so one less can be allocated.
        enable_caching: whether blocks keep their hashes when they are freed, to be hit again.
        hash_block_size: tokens per block hash of a request.
        enable_kv_cache_events: whether to record what is stored and removed, see ``take_events``.
        metrics_collector: told of allocations, accesses and evictions; see ``KVCacheMetricsCollector``.
        medium: medium that events name.
        uncached_first: freed blocks without a hash are reused first and last in, first out; False sends all freed
            blocks to the tail.
        on_invalid_free: "raise", or "warn" to skip, log and count the offending entries of a free.
        strict_partial: ``cache_partial_block`` refuses a boundary that is not beyond the one that the block stands
            for; by default (as vLLM) it makes the shorter, dead prefix reachable again.
        dedup_events: publish a hash when its first copy is stored and when its last copy is removed, not for each
            copy. Implies ``dense_events``.
        dense_events: one BlockStored per run of blocks that were stored, with the parent and the tokens of the run,
            and none without a hash; by default (as vLLM) one per call, whose tokens include skipped blocks.
        max_queued_events: cap of the event queue, None for none. When it is full, new events are dropped and counted
            in ``dropped_events``; what is queued stays, so the stream is right up to the gap. A reset replaces a
            full queue by its AllBlocksCleared, which is where a consumer is in step again.

    Attributes:
        blocks: all blocks by id, read-only.
        null_block: block 0, which stands in tables for what is not kept; never allocated, freed or cached.
        free_block_queue: the free list, a ``FreeKVCacheBlockQueue``.
        cached_block_hash_to_block: the prefix map, a ``BlockHashToBlockMap``.
        cached_block_hashes_by_block: block id to the keys that lead to the block beside its ``block_hash``; read-only.
        stats: counters since creation, ``evictions`` (free blocks that lost a hash because they were reused) and
            ``invalid_frees`` (entries that a free skipped under ``on_invalid_free="warn"``).
        dropped_events: events lost to ``max_queued_events``.
        event_format: what events are made of, an ``EventFormat``; an engine puts its own there.

    Raises:
        TypeError: num_gpu_blocks or hash_block_size is no int.
        InvalidArgumentError: one of them or max_queued_events is below 1, or on_invalid_free is unknown.

    vLLM: ``BlockPool``, which has none of the options behind ``medium``.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = MEDIUM_GPU,
        *,
        uncached_first: bool = True,
        on_invalid_free: str = "raise",
        strict_partial: bool = False,
        dedup_events: bool = False,
        dense_events: bool = False,
        max_queued_events: int | None = None,
    ) -> None:
        if max_queued_events is not None and max_queued_events < 1:
            raise InvalidArgumentError(f"max_queued_events must be at least 1, not {max_queued_events}")
        if enable_kv_cache_events:
            # What the environment says about hashes in events is read anew for each event: refused now if it means
            # nothing, not in the midst of a later call.
            self.event_format.hash_converter()(b"")
        self._create(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            medium,
            uncached_first,
            on_invalid_free,
        )
        self.kv_event_queue = []
        self.strict_partial = strict_partial
        self.dedup_events = dedup_events
        self.dense_events = dense_events
        self.max_queued_events = max_queued_events
        self.dropped_events = 0

    # Allocation with somebody watching

    def _get_new_blocks_observed(self, num_blocks: int) -> list[BlockT]:
        """``get_new_blocks`` that tells reuse watchers and the metrics collector, and queues BlockRemoved events.

        If one of those it tells raises, the blocks go back to the head of the free list; hashes that are evicted by
        then, and the events that say so, stay.
        """
        blocks = self._take_blocks(num_blocks)
        try:
            if self._reuse_watchers:
                self._notify_reuse(blocks)
            collector = self.metrics_collector
            for block in blocks:
                if self.enable_caching and self._maybe_evict_cached_block(block):
                    self._count_eviction()
                if collector is not None:
                    collector.on_block_allocated(block)
        except BaseException:
            self.free_blocks(blocks, prepend=True)
            raise
        return blocks

    def _notify_reuse(self, blocks: Iterable[BlockT]) -> None:
        for block in blocks:
            watcher = self._reuse_watchers.pop(block.block_id, None)
            if watcher is not None:
                watcher(block)

    def _maybe_evict_cached_block(self, block: BlockT) -> bool:
        """Take every hash of a block, whoever uses it. False if no hash led to it."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        removed = self._remove_cached_block_hashes(block)
        self._emit_block_removed_events(removed)
        return bool(removed)

    def cache_partial_block(
        self,
        request: Any,
        block: BlockT,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> BlockHashWithGroupId | None:
        """Make a block reachable by the prefix that ends inside it, at a boundary of the hash block size.

        The key becomes the block's primary hash if it has none or one of fewer tokens (which goes away, with all
        others); else a secondary hash.

        Args:
            request: whose tokens the block holds.
            block: the block; nothing happens for a null block.
            num_tokens: length of the prefix, a positive multiple of ``hash_block_size`` that the request's
                ``block_hashes`` cover.
            kv_cache_group_id: group of the block.
            block_size: tokens per block of the group, a multiple of ``hash_block_size``.
            replace_existing_hashes: the block was overwritten: all its hashes go first.

        Returns:
            The key; None for a null block and where ``strict_partial`` refuses the boundary.

        Raises:
            InvalidArgumentError: num_tokens or block_size does not fit.
            BlockStateError: the block belongs to another pool or to none.
        """
        self._refuse_other_types(block)
        if block.is_null:
            return None
        hash_size = self.hash_block_size
        if block_size <= 0 or block_size % hash_size:
            raise InvalidArgumentError(f"block size {block_size} is not a multiple of the hash block size {hash_size}")
        num_hashes = num_tokens // hash_size
        if num_tokens % hash_size or not 0 < num_hashes <= len(request.block_hashes):
            raise InvalidArgumentError(
                f"a prefix of {num_tokens} tokens does not end at one of {len(request.block_hashes)} block hashes "
                f"of {hash_size} tokens"
            )
        self._refuse_foreign(block)
        kv_cache_group_id = int(index(kv_cache_group_id))
        key = make_block_hash_with_group_id(request.block_hashes[num_hashes - 1], kv_cache_group_id)
        carried_tokens = block.block_hash_num_tokens
        is_beyond = carried_tokens is None or num_tokens > carried_tokens
        if self.strict_partial and not replace_existing_hashes and not is_beyond:
            return None
        is_new = replace_existing_hashes or not (
            block.block_hash == key or self.cached_block_hash_to_block.contain(key, block.block_id)
        )
        is_promotion = is_new and carried_tokens is not None and is_beyond
        event = None
        if self.enable_kv_cache_events and is_new:
            event = self._build_partial_block_event(request, key, num_hashes, kv_cache_group_id)
        removed = self._remove_cached_block_hashes(block) if replace_existing_hashes or is_promotion else []
        self._insert_block_hash(key, block, num_tokens)
        self._emit_block_removed_events(removed)
        if event is not None:
            self._queue_event(event)
        return key

    # Hashes and references of given blocks

    def move_block_hashes(self, src_block: BlockT, dst_block: BlockT) -> None:
        """Make what leads to one block lead to another, which holds a copy of its tokens. No events: the hashes stay
        cached.

        Raises:
            BlockStateError: dst_block has a hash, is null, or one of the blocks is not of this pool.
        """
        self._refuse_foreign(src_block)
        self._refuse_foreign(dst_block)
        if dst_block.is_null or dst_block.block_hash is not None:
            raise BlockStateError(f"hashes can be moved only to a block that can have some and has none: {dst_block!r}")
        if dst_block.block_id in self.cached_block_hashes_by_block:
            raise BlockStateError(f"hashes can be moved only to a block that has none, not {dst_block!r}")
        num_tokens = src_block.block_hash_num_tokens
        for key in self._remove_cached_block_hashes(src_block):
            # The first one is the primary hash, and only for that does the number of tokens count.
            self._insert_block_hash(key, dst_block, num_tokens)

    def add_reference(self, block: BlockT) -> None:
        """One more reference to a block in use: for a copy under way, which no metrics collector is told of. O(1).

        Raises:
            BlockStateError: the block is free, null, of another pool or of none.
        """
        self._refuse_foreign(block)
        if block.is_null or block.ref_cnt < 1:
            raise BlockStateError(f"only a block in use can have one reference more, not {block!r}")
        block.ref_cnt += 1

    def unpin_blocks(self, blocks: Iterable[BlockT], on_reuse: Callable[[BlockT], None]) -> None:
        """Give one reference of each entry back while the contents are still being read by somebody.

        Blocks that reach 0 go to the tail of the free list in the given order, hash or not, and count as free.

        Args:
            blocks: blocks in use.
            on_reuse: called with a block when it is handed out again, or when the cache is reset; once.

        Raises:
            BlockStateError: a null block, one of another pool or of none, or more entries than references.
        """
        blocks = list(blocks)
        if not callable(on_reuse):
            raise TypeError("on_reuse must be callable")
        for block, num_entries in Counter(blocks).items():
            self._refuse_foreign(block)
            if block.is_null or block.ref_cnt < num_entries:
                raise BlockStateError(f"the block cannot be unpinned {num_entries} times: {block!r}")
        for block in blocks:
            self._reuse_watchers[block.block_id] = on_reuse
        self._free_blocks_to_tail(blocks)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take the hashes of blocks, by id, free or in use; those in use stay allocated.

        Raises:
            TypeError: an id is no int.
            BlockStateError: an id is outside the pool.
        """
        checked: list[int] = []
        for block_id in block_ids:
            if isinstance(block_id, bool):
                raise TypeError("a block id must be an int, not bool")
            checked.append(index(block_id))
            if not 0 <= checked[-1] < self.num_gpu_blocks:
                raise BlockStateError(f"block id {block_id} is outside the pool of {self.num_gpu_blocks} blocks")
        for block_id in checked:
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Take the hashes of all blocks, if none is in use.

        Returns:
            False, with a warning in the log and nothing changed, while blocks are in use. Else True: reuse watchers
            are called, the metrics collector is reset, and one AllBlocksCleared is queued.
        """
        num_used = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        if num_used:
            logger.warning("The prefix cache was not reset: %d blocks are in use", num_used)
            return False
        self._reset_hashes()
        try:
            self._notify_reuse([self.blocks[block_id] for block_id in list(self._reuse_watchers)])
        finally:
            # The hashes are gone, whatever a watcher does.
            if self.metrics_collector is not None:
                self.metrics_collector.reset()
            if self.enable_kv_cache_events:
                self._queue_all_blocks_cleared()
        logger.debug("The prefix cache was reset")
        return True
