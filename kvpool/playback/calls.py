"""Makes a recorded call again, on one implementation.

What a call returns is told as in its ``Result``: rows of packed block ids, None where there was no room, and numbers:

    get_computed_blocks                 rows by group; tokens of the hit
    get_computed_blocks_and_boundary    the same, and the boundary
    allocate_slots                      rows of new blocks by group, or None
    allocate_decode                     rows of new blocks by group, for each place among the requests that is a number;
                                        -1 - place where there was no room
    reset_prefix_cache                  1 or 0
    take_kv_cache_block_copies          rows of sources, targets, and blocks that are held
    others                              the row of blocks, or the number, that they return
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvpool.cache.blocks import KVCacheBlocks
from kvpool.playback.requests import Requests
from kvpool.recording import operations as ops
from kvpool.recording.operations import LAST_HIT, NO_HIT, Operation, pack, unpack
from kvpool.recording.snapshot import ids_of

Outcome = tuple[list[bytes] | None, list[int]]
NOTHING: Outcome = (None, [])


class MalformedCallError(ValueError):
    """A call that nobody can have made on this manager."""


class Implementation:
    """One of those that the calls are made on.

    Attributes:
        name: "native" or "reference".
        manager, pool: as they were made anew.
        last_hit: what the last lookup has found.
    """

    def __init__(self, name: str, manager: Any) -> None:
        self.name = name
        self.manager = manager
        self.pool = manager.block_pool
        self.last_hit: KVCacheBlocks | None = None

    def blocks_of(self, packed: bytes) -> list[Any]:
        """MalformedCallError for an id that is not in the pool."""
        blocks, ids = self.pool.blocks, unpack(packed)
        if ids and not (min(ids) >= 0 and max(ids) < len(blocks)):
            raise MalformedCallError(f"a pool of {len(blocks)} blocks has no block {max(ids)} or none {min(ids)}")
        return [blocks[block_id] for block_id in ids]

    def block(self, block_id: int) -> Any:
        """The same for one."""
        if block_id >= len(self.pool.blocks):
            raise MalformedCallError(f"a pool of {len(self.pool.blocks)} blocks has no block {block_id}")
        return self.pool.blocks[block_id]

    def call(self, operation: Operation, requests: Requests) -> Outcome:
        """Makes the call. Whatever it raises comes through."""
        return _CALLS[type(operation)](self, operation, requests)


def _groups(blocks: Any) -> list[bytes]:
    return [ids_of(group) for group in blocks.blocks]


def _int32(packed: bytes) -> array[int]:
    return array("i", unpack(packed))


def _do_nothing(block: Any) -> None:
    pass


# ---- the manager ----


def _get_computed_blocks(on: Implementation, op: ops.GetComputedBlocks, requests: Requests) -> Outcome:
    blocks, num_tokens = on.manager.get_computed_blocks(requests.get(op.request))
    on.last_hit = blocks
    return _groups(blocks), [num_tokens]


def _get_computed_blocks_and_boundary(
    on: Implementation, op: ops.GetComputedBlocksAndBoundary, requests: Requests
) -> Outcome:
    blocks, num_tokens, boundary = on.manager.get_computed_blocks_and_boundary(requests.get(op.request))
    on.last_hit = blocks
    return _groups(blocks), [num_tokens, boundary]


def _hit(on: Implementation, told: Any) -> KVCacheBlocks | None:
    if told is None:
        return None
    if told == NO_HIT:
        nothing: KVCacheBlocks = on.manager.empty_kv_cache_blocks
        return nothing
    if told == LAST_HIT:
        if on.last_hit is None:
            raise MalformedCallError("the hit of a lookup that was not made")
        return on.last_hit
    tables = []
    for packed in told:
        table = on.pool.new_block_table()
        table += on.blocks_of(packed)
        tables.append(table)
    return KVCacheBlocks(tuple(tables))


def _allocate_slots(on: Implementation, op: ops.AllocateSlots, requests: Requests) -> Outcome:
    blocks = on.manager.allocate_slots(
        requests.get(op.request),
        op.num_new_tokens,
        op.num_new_computed_tokens,
        _hit(on, op.new_computed_blocks),
        op.num_lookahead_tokens,
        op.num_external_computed_tokens,
        op.delay_cache_blocks,
        op.num_encoder_tokens,
        op.full_sequence_must_fit,
        op.reserved_blocks,
        op.has_scheduled_reqs,
        tuple(op.skip_zeroing_group_ids),
    )
    return (None if blocks is None else _groups(blocks)), []


def _allocate_decode(on: Implementation, op: ops.AllocateDecode, requests: Requests) -> Outcome:
    batch = [requests.get(number) for number in unpack(op.requests)]
    rows: list[bytes] = []
    numbers: list[int] = []
    nothing = on.manager.empty_kv_cache_blocks
    for place, blocks in enumerate(on.manager.allocate_decode(batch)):
        if blocks is None:
            numbers.append(-1 - place)
        elif blocks is not nothing:
            numbers.append(place)
            rows += _groups(blocks)
    return rows, numbers


def _cache_blocks(on: Implementation, op: ops.CacheBlocks, requests: Requests) -> Outcome:
    on.manager.cache_blocks(requests.get(op.request), op.num_computed_tokens)
    return NOTHING


def _free(on: Implementation, op: ops.Free, requests: Requests) -> Outcome:
    on.manager.free(requests.named(op.request))
    return NOTHING


def _pop_blocks_for_free(on: Implementation, op: ops.PopBlocksForFree, requests: Requests) -> Outcome:
    return [ids_of(on.manager.pop_blocks_for_free(requests.named(op.request)))], []


def _remove_skipped_blocks(on: Implementation, op: ops.RemoveSkippedBlocks, requests: Requests) -> Outcome:
    request_id = requests.id_of(op.request)
    on.manager.remove_skipped_blocks(request_id, op.processed_computed_tokens, op.num_prompt_tokens)
    return NOTHING


def _evict_blocks(on: Implementation, op: ops.EvictBlocks, requests: Requests) -> Outcome:
    on.manager.evict_blocks(unpack(op.block_ids))
    return NOTHING


def _reset_prefix_cache(on: Implementation, op: ops.ResetPrefixCache, requests: Requests) -> Outcome:
    return None, [int(on.manager.reset_prefix_cache())]


def _new_step_starts(on: Implementation, op: ops.NewStepStarts, requests: Requests) -> Outcome:
    on.manager.new_step_starts()
    return NOTHING


def _take_back(on: Implementation, op: ops.TakeBack, requests: Requests) -> Outcome:
    on.manager.take_back(requests.get(op.request), op.num_computed_tokens)
    return NOTHING


def _drop_pending(on: Implementation, op: ops.DropPending, requests: Requests) -> Outcome:
    on.manager.drop_pending()
    return NOTHING


def _release_orphans(on: Implementation, op: ops.ReleaseOrphans, requests: Requests) -> Outcome:
    return None, [on.manager.release_orphans()]


def _record_blocks_for_zeroing(on: Implementation, op: ops.RecordBlocksForZeroing, requests: Requests) -> Outcome:
    on.manager.record_blocks_for_zeroing(requests.id_of(op.request), op.start_token)
    return NOTHING


def _take_new_block_ids(on: Implementation, op: ops.TakeNewBlockIds, requests: Requests) -> Outcome:
    return [pack(on.manager.take_new_block_ids())], []


def _take_copies(on: Implementation, op: ops.TakeKVCacheBlockCopies, requests: Requests) -> Outcome:
    copies, blocks = on.manager.take_kv_cache_block_copies()
    sources, targets = (pack(copy[i] for copy in copies) for i in range(2))
    return [sources, targets, ids_of(blocks)], []


def _get_num_required_blocks(on: Implementation, op: ops.GetNumRequiredBlocks, requests: Requests) -> Outcome:
    return None, [on.manager.get_num_required_blocks(op.num_tokens, op.num_encoder_tokens)]


# ---- its pool ----


def _pool_get_new_blocks(on: Implementation, op: ops.PoolGetNewBlocks, requests: Requests) -> Outcome:
    return [ids_of(on.pool.get_new_blocks(op.num_blocks))], []


def _pool_free_blocks(on: Implementation, op: ops.PoolFreeBlocks, requests: Requests) -> Outcome:
    on.pool.free_blocks(on.blocks_of(op.block_ids), op.prepend)
    return NOTHING


def _pool_touch(on: Implementation, op: ops.PoolTouch, requests: Requests) -> Outcome:
    on.pool.touch(on.blocks_of(op.block_ids))
    return NOTHING


def _pool_cache_full_blocks(on: Implementation, op: ops.PoolCacheFullBlocks, requests: Requests) -> Outcome:
    on.pool.cache_full_blocks(
        requests.get(op.request),
        on.blocks_of(op.block_ids),
        op.num_cached_blocks,
        op.num_full_blocks,
        op.block_size,
        op.kv_cache_group_id,
        op.block_mask,
    )
    return NOTHING


def _pool_cache_partial_block(on: Implementation, op: ops.PoolCachePartialBlock, requests: Requests) -> Outcome:
    key = on.pool.cache_partial_block(
        requests.get(op.request),
        on.block(op.block_id),
        op.num_tokens,
        op.kv_cache_group_id,
        op.block_size,
        op.replace_existing_hashes,
    )
    return None, [int(key is not None)]


def _pool_move_block_hashes(on: Implementation, op: ops.PoolMoveBlockHashes, requests: Requests) -> Outcome:
    on.pool.move_block_hashes(on.block(op.src_block_id), on.block(op.dst_block_id))
    return NOTHING


def _pool_add_reference(on: Implementation, op: ops.PoolAddReference, requests: Requests) -> Outcome:
    on.pool.add_reference(on.block(op.block_id))
    return NOTHING


def _pool_unpin_blocks(on: Implementation, op: ops.PoolUnpinBlocks, requests: Requests) -> Outcome:
    on.pool.unpin_blocks(on.blocks_of(op.block_ids), _do_nothing)
    return NOTHING


def _pool_evict_blocks(on: Implementation, op: ops.PoolEvictBlocks, requests: Requests) -> Outcome:
    on.pool.evict_blocks(unpack(op.block_ids))
    return NOTHING


def _pool_reset_prefix_cache(on: Implementation, op: ops.PoolResetPrefixCache, requests: Requests) -> Outcome:
    return None, [int(on.pool.reset_prefix_cache())]


def _pool_allocate_ids(on: Implementation, op: ops.PoolAllocateIds, requests: Requests) -> Outcome:
    return [pack(on.pool.allocate_ids(op.n).tolist())], []


def _pool_free_ids(on: Implementation, op: ops.PoolFreeIds, requests: Requests) -> Outcome:
    on.pool.free_ids(_int32(op.block_ids), op.prepend)
    return NOTHING


def _pool_touch_ids(on: Implementation, op: ops.PoolTouchIds, requests: Requests) -> Outcome:
    on.pool.touch_ids(_int32(op.block_ids))
    return NOTHING


def _pool_cache_ids(on: Implementation, op: ops.PoolCacheIds, requests: Requests) -> Outcome:
    on.pool.cache_ids(op.block_hashes, _int32(op.block_ids), op.group_id)
    return NOTHING


_CALLS: dict[type[Operation], Callable[[Implementation, Any, Requests], Outcome]] = {
    ops.GetComputedBlocks: _get_computed_blocks,
    ops.GetComputedBlocksAndBoundary: _get_computed_blocks_and_boundary,
    ops.AllocateSlots: _allocate_slots,
    ops.AllocateDecode: _allocate_decode,
    ops.CacheBlocks: _cache_blocks,
    ops.Free: _free,
    ops.PopBlocksForFree: _pop_blocks_for_free,
    ops.RemoveSkippedBlocks: _remove_skipped_blocks,
    ops.EvictBlocks: _evict_blocks,
    ops.ResetPrefixCache: _reset_prefix_cache,
    ops.NewStepStarts: _new_step_starts,
    ops.TakeBack: _take_back,
    ops.DropPending: _drop_pending,
    ops.ReleaseOrphans: _release_orphans,
    ops.RecordBlocksForZeroing: _record_blocks_for_zeroing,
    ops.TakeNewBlockIds: _take_new_block_ids,
    ops.TakeKVCacheBlockCopies: _take_copies,
    ops.GetNumRequiredBlocks: _get_num_required_blocks,
    ops.PoolGetNewBlocks: _pool_get_new_blocks,
    ops.PoolFreeBlocks: _pool_free_blocks,
    ops.PoolTouch: _pool_touch,
    ops.PoolCacheFullBlocks: _pool_cache_full_blocks,
    ops.PoolCachePartialBlock: _pool_cache_partial_block,
    ops.PoolMoveBlockHashes: _pool_move_block_hashes,
    ops.PoolAddReference: _pool_add_reference,
    ops.PoolUnpinBlocks: _pool_unpin_blocks,
    ops.PoolEvictBlocks: _pool_evict_blocks,
    ops.PoolResetPrefixCache: _pool_reset_prefix_cache,
    ops.PoolAllocateIds: _pool_allocate_ids,
    ops.PoolFreeIds: _pool_free_ids,
    ops.PoolTouchIds: _pool_touch_ids,
    ops.PoolCacheIds: _pool_cache_ids,
}
