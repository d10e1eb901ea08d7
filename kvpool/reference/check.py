"""The checker of the reference pool: every invariant of its modules, recomputed from the blocks."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvpool.hashing.block_hash import BlockHashWithGroupId
from kvpool.reference.block import KVCacheBlock
from kvpool.reference.free_queue import PoolFreeQueue
from kvpool.reference.prefix_map import PoolHashMap


class CheckedPool(Protocol):
    """What is checked: the parts of a pool, and how many of its blocks are detached."""

    num_gpu_blocks: int
    blocks: list[KVCacheBlock]
    null_block: KVCacheBlock
    free_block_queue: PoolFreeQueue
    cached_block_hash_to_block: PoolHashMap
    _num_detached: int
    _secondary_keys: dict[int, dict[BlockHashWithGroupId, None]]
    _unmapped_ids: set[int]


def find_violation(pool: CheckedPool) -> str | None:
    """The first broken invariant, by its number and in words; None if all hold."""
    return _find_in_blocks(pool) or _find_in_free_list(pool) or _find_in_references(pool) or _find_in_hashes(pool)


def _find_in_blocks(pool: CheckedPool) -> str | None:
    if len(pool.blocks) != pool.num_gpu_blocks:
        return f"P1: {len(pool.blocks)} blocks in a pool of {pool.num_gpu_blocks}"
    for block_id, block in enumerate(pool.blocks):
        if block._block_id != block_id or block._pool is not pool or block._queue is not pool.free_block_queue:
            return f"P1: block {block_id} is not what its place says: {block!r}"
        if block._is_null != (block_id == 0):
            return f"P1: is_null of {block!r} is {block._is_null}"
    null_block = pool.blocks[0]
    if pool.null_block is not null_block or null_block._ref_cnt or null_block._next or null_block._prev:
        return f"P1: the null block is in use or queued: {null_block!r}"
    return None


def _find_in_free_list(pool: CheckedPool) -> str | None:
    queue = pool.free_block_queue
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    forward: list[KVCacheBlock] = []
    before, block = head, head._next
    while block is not tail:
        if block is None or block._pool is not pool:
            return f"F1: the free list leaves the pool behind {before!r}"
        if block._prev is not before:
            return f"F1: {block!r} does not point back at {before!r}"
        forward.append(block)
        if len(forward) > queue._num_free:
            return f"F2: more than {queue._num_free} blocks from the head"
        before, block = block, block._next
    if tail._prev is not before:
        return f"F1: the tail does not point back at {before!r}"
    if len(forward) != queue._num_free:
        return f"F2: {len(forward)} blocks from the head, {queue._num_free} counted"
    if len(set(forward)) != len(forward):
        return "F2: a block is in the free list twice"
    num_linked = sum(block._next is not None or block._prev is not None for block in pool.blocks)
    if num_linked != len(forward):
        return f"F1: {num_linked} blocks have links, {len(forward)} are in the free list"
    return None


def _find_in_references(pool: CheckedPool) -> str | None:
    num_detached = 0
    for block in pool.blocks:
        if block._ref_cnt < 0:
            return f"P2: negative ref_cnt: {block!r}"
        if block._ref_cnt and block._next is not None:
            return f"P2: in use and in the free list: {block!r}"
        num_detached += block._ref_cnt == 0 and block._next is None and not block._is_null
    if num_detached != pool._num_detached:
        return f"P3: {num_detached} detached blocks, {pool._num_detached} counted"
    return None


def _find_in_hashes(pool: CheckedPool) -> str | None:
    carried: Counter[tuple[bytes, int]] = Counter()
    for block in pool.blocks:
        block_id = block._block_id
        if block._block_hash is None:
            if block._block_hash_num_tokens is not None or block_id in pool._unmapped_ids:
                return f"P4: no hash, but its number of tokens or a note of it: {block!r}"
        elif block_id not in pool._unmapped_ids:
            carried[block._block_hash, block_id] += 1
        secondary_keys = pool._secondary_keys.get(block_id)
        if secondary_keys is not None and not secondary_keys:
            return f"P5: an empty list of secondary hashes: {block!r}"
        carried.update((key, block_id) for key in secondary_keys or ())
    if any(block_id == 0 for _, block_id in carried) or pool.blocks[0]._block_hash is not None:
        return "P1: the null block has a hash"
    if any(count > 1 for count in carried.values()):
        return "M2: a block carries a key twice"
    reachable: set[tuple[bytes, int]] = set()
    for key, entry in pool.cached_block_hash_to_block._cache.items():
        blocks = entry if isinstance(entry, dict) else {entry._block_id: entry}
        if not blocks:
            return f"M1: key {key!r} leads to no block"
        for block_id, block in blocks.items():
            if not 0 <= block_id < len(pool.blocks) or pool.blocks[block_id] is not block:
                return f"M1: key {key!r} has {block!r} as block {block_id}"
            reachable.add((key, block_id))
    if reachable != carried.keys():
        return f"M2: keys of the map and hashes of the blocks differ in {sorted(reachable ^ carried.keys())[:3]}"
    if not pool._secondary_keys.keys() <= set(range(len(pool.blocks))):
        return "M2: secondary hashes of a block outside the pool"
    return None
