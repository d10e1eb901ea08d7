"""The events of a block pool: what it queues, in which order, and the options that make the stream easier to follow.

By default the stream equals vLLM's event for event. Events are computed before the change that they tell of, so that
a request that cannot be described leaves the pool as it was; they are queued after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    KVCacheEvent,
    external_block_hash_converter,
)
from kvpool.hashing.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    select_block_hashes,
)
from kvpool.hashing.extra_keys import (
    ExtraKeys,
    generate_block_hash_extra_keys,
    has_extra_keys,
    to_event_extra_keys,
)
from kvpool.pool.interface import BlockPoolHalf, BlockT


@dataclass(frozen=True)
class EventFormat:
    """What a pool makes its events of; an engine puts its own classes and functions in the place of kvpool's.

    Attributes:
        stored, removed, cleared: makers of the three events, called with the fields of kvpool's classes as keywords.
        hash_converter: called once per event or loop; returns what turns a digest into what events publish.
        has_extra_keys: whether any block of a request can have extra keys.
        extra_keys: as ``generate_block_hash_extra_keys``.
        to_event_extra_keys: extra keys as events publish them.
    """

    stored: Callable[..., Any] = BlockStored
    removed: Callable[..., Any] = BlockRemoved
    cleared: Callable[[], Any] = AllBlocksCleared
    hash_converter: Callable[[], Callable[[bytes], ExternalBlockHash]] = external_block_hash_converter
    has_extra_keys: Callable[[Any], bool] = has_extra_keys
    extra_keys: Callable[[Any, int, int, int], tuple[ExtraKeys, int]] = generate_block_hash_extra_keys
    to_event_extra_keys: Callable[[list[ExtraKeys]], list[ExtraKeys] | None] = to_event_extra_keys


class PoolEvents(BlockPoolHalf[BlockT]):
    """What a pool queues as events, and when; part of ``BlockPoolBase``, which documents the options."""

    event_format = EventFormat()

    dedup_events: bool
    dense_events: bool
    max_queued_events: int | None
    dropped_events: int

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, in order; the queue is empty then. Always [] with events off."""
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events

    def _queue_event(self, event: KVCacheEvent) -> None:
        if self.max_queued_events is not None and len(self.kv_event_queue) >= self.max_queued_events:
            self.dropped_events += 1
            return
        self.kv_event_queue.append(event)

    def _queue_all_blocks_cleared(self) -> None:
        if self.max_queued_events is not None and len(self.kv_event_queue) >= self.max_queued_events:
            self.dropped_events += len(self.kv_event_queue)
            self.kv_event_queue.clear()
        self.kv_event_queue.append(self.event_format.cleared())

    def _is_cached(self, key: BlockHashWithGroupId) -> bool:
        return self.cached_block_hash_to_block.get_one_block(key) is not None

    def _emit_block_removed_events(self, block_hashes: Iterable[BlockHashWithGroupId]) -> None:
        """One BlockRemoved per key that no longer leads to a block (``dedup_events``: to any block)."""
        if not self.enable_kv_cache_events:
            return
        to_external = self.event_format.hash_converter()
        make_event = self.event_format.removed
        for key in block_hashes:
            if self.dedup_events and self._is_cached(key):
                continue
            removed = to_external(get_block_hash(key))
            self._queue_event(make_event(block_hashes=[removed], medium=self.medium, group_idx=get_group_id(key)))

    def _build_block_stored_event(
        self,
        request: Any,
        hashes: list[ExternalBlockHash],
        parent: ExternalBlockHash | None,
        tokens: slice,
        block_size: int,
        kv_cache_group_id: int,
        extra_keys: list[ExtraKeys],
    ) -> BlockStored:
        lora = getattr(request, "lora_request", None)
        stored: BlockStored = self.event_format.stored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=request.all_token_ids[tokens],
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=self.medium,
            lora_name=lora.name if lora else None,
            extra_keys=self.event_format.to_event_extra_keys(extra_keys),
            group_idx=kv_cache_group_id,
            session_id=getattr(request, "session_id", None),
        )
        return stored

    def _cache_full_blocks_observed(
        self,
        request: Any,
        blocks: Sequence[BlockT],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """``cache_full_blocks`` with events: BlockRemoved of promoted blocks in block order, then BlockStored."""
        # Plain ints, which is what events are to hold.
        num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id = (
            int(index(number)) for number in (num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
        )
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = select_block_hashes(
            request.block_hashes, self.hash_block_size, block_size, num_cached_blocks, num_full_blocks
        )
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        # A mask or a range that does not fit is refused below, by the base, before anything has changed.
        mask = [True] * len(new_blocks) if block_mask is None else block_mask
        stored: list[int] = []
        removed: list[BlockHashWithGroupId] = []
        known: set[BlockHashWithGroupId] = set()
        for offset, (block, is_wanted) in enumerate(zip(new_blocks, mask, strict=False)):
            if not is_wanted or offset >= len(hashes):
                continue
            self._refuse_other_types(block)
            if block.is_null:
                continue
            if block.block_hash is not None:
                removed += self._cached_block_hashes(block)
            if self.dedup_events:
                key = make_block_hash_with_group_id(hashes[offset], kv_cache_group_id)
                if key in known or self._is_cached(key):
                    continue
                known.add(key)
            stored.append(num_cached_blocks + offset)
        parents: Sequence[BlockHash] = ()
        if num_cached_blocks > 0:
            parents = select_block_hashes(
                request.block_hashes, self.hash_block_size, block_size, num_cached_blocks - 1, num_cached_blocks
            )
            if not parents:
                raise InvalidArgumentError(f"block {num_cached_blocks - 1} of the request has no hash")
        events = [
            self._build_full_blocks_event(
                request, hashes, parents, num_cached_blocks, run, first, past, block_size, kv_cache_group_id
            )
            for run, first, past in self._runs(stored, num_cached_blocks, num_full_blocks)
        ]
        self._cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        self._emit_block_removed_events(removed)
        for event in events:
            self._queue_event(event)

    def _runs(self, stored: list[int], first: int, past: int) -> list[tuple[list[int], int, int]]:
        """Stored blocks as events publish them: (block indices, first block, block after the last one) per event."""
        if not (self.dense_events or self.dedup_events):
            return [(stored, first, past)]
        runs: list[list[int]] = []
        for i in stored:
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        return [(run, run[0], run[-1] + 1) for run in runs]

    def _build_full_blocks_event(
        self,
        request: Any,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash],
        num_cached_blocks: int,
        run: list[int],
        first: int,
        past: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> BlockStored:
        """The event of the blocks ``run``, which lie in [first, past); hashes starts at block num_cached_blocks and
        parents holds the hash before it."""
        to_external = self.event_format.hash_converter()
        parent = None
        if first > num_cached_blocks:
            parent = to_external(hashes[first - 1 - num_cached_blocks])
        elif parents:
            parent = to_external(parents[0])
        return self._build_block_stored_event(
            request,
            [to_external(hashes[i - num_cached_blocks]) for i in run],
            parent,
            slice(first * block_size, past * block_size),
            block_size,
            kv_cache_group_id,
            self._extra_keys_of_blocks(request, run, block_size),
        )

    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        """Publish the first blocks of a request as stored although they were cached before: a hit, for consumers that
        follow what a request uses. Changes nothing in the pool.

        Args:
            request: whose prefix was hit.
            num_cached_blocks: length of the hit in blocks.
            block_size: tokens per block, a multiple of ``hash_block_size``.
            kv_cache_group_id: group of the blocks.

        Raises:
            InvalidArgumentError: a negative number of blocks, or more than the request has hashes.
        """
        if not self.enable_kv_cache_events or num_cached_blocks == 0:
            return
        if num_cached_blocks < 0:
            raise InvalidArgumentError(f"a number of cached blocks must be at least 0, not {num_cached_blocks}")
        hashes = select_block_hashes(request.block_hashes, self.hash_block_size, block_size, 0, num_cached_blocks)
        if len(hashes) < num_cached_blocks:
            raise InvalidArgumentError(f"{num_cached_blocks} cached blocks, but {len(hashes)} block hashes")
        run = list(range(num_cached_blocks))
        self._queue_event(
            self._build_full_blocks_event(
                request, hashes, (), 0, run, 0, num_cached_blocks, block_size, kv_cache_group_id
            )
        )

    def _build_partial_block_event(
        self, request: Any, key: BlockHashWithGroupId, num_hashes: int, kv_cache_group_id: int
    ) -> BlockStored | None:
        """The event of the last hash block of a prefix of num_hashes hash blocks."""
        if self.dedup_events and self._is_cached(key):
            return None
        hash_size = self.hash_block_size
        start, end = (num_hashes - 1) * hash_size, num_hashes * hash_size
        to_external = self.event_format.hash_converter()
        extra_keys, _ = self.event_format.extra_keys(request, start, end, 0)
        return self._build_block_stored_event(
            request,
            [to_external(get_block_hash(key))],
            to_external(request.block_hashes[num_hashes - 2]) if num_hashes > 1 else None,
            slice(start, end),
            hash_size,
            kv_cache_group_id,
            [extra_keys],
        )

    def _refuse_other_types(self, block: BlockT) -> None:
        if not isinstance(block, type(self.null_block)):
            raise TypeError(f"a pool works on KVCacheBlock, not {type(block).__name__}")

    def _refuse_foreign(self, block: BlockT) -> None:
        self._refuse_other_types(block)
        if block.pool is not self:
            raise BlockStateError(f"the block belongs to {'no' if block.pool is None else 'another'} pool: {block!r}")

    def _extra_keys_of_blocks(self, request: Any, block_indices: Sequence[int], block_size: int) -> list[ExtraKeys]:
        if not self.event_format.has_extra_keys(request):
            return [None] * len(block_indices)
        extra_keys: list[ExtraKeys] = []
        next_mm_idx = 0
        for i in block_indices:
            keys, next_mm_idx = self.event_format.extra_keys(request, i * block_size, (i + 1) * block_size, next_mm_idx)
            extra_keys.append(keys)
        return extra_keys
