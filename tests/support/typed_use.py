"""Each public class, used as an engine written in Python would, with the types that checkers must see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvpool
from kvpool import (
    BlockHash,
    BlockHasher,
    BlockHashToBlockMap,
    BlockHashWithGroupId,
    BlockPool,
    FreeKVCacheBlockQueue,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    KVCacheGroupSpec,
    KVCacheManager,
    PrefixCacheStats,
    Request,
    RequestStatus,
    Scheduler,
    SlidingWindowSpec,
)
from kvpool.list_tables import allocate_table, free_table
from kvpool.scheduler import RequestOutput, SchedulerOutput

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, kind):
        return value


BLOCK_SIZE = 16


def use_pool() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK_SIZE, enable_kv_cache_events=True)
    hasher = BlockHasher("sha256", BLOCK_SIZE)
    request = Request("r", list(range(40)), hasher, max_tokens=4)
    blocks = assert_type(pool.get_new_blocks(2), list[KVCacheBlock])
    assert_type(pool.null_block, KVCacheBlock)
    assert_type(blocks[0].ref_cnt, int)
    assert_type(blocks[0].block_hash, BlockHashWithGroupId | None)
    pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, 0)
    assert_type(pool.get_cached_block(request.block_hashes[0], [0]), list[KVCacheBlock] | None)
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    pool.free_blocks(blocks, prepend=True)
    assert_type(pool.get_num_free_blocks(), int)
    assert_type(pool.get_usage(), float)
    assert_type(pool.take_events(), list[KVCacheEvent])
    assert_type(pool.reset_prefix_cache(), bool)
    pool.check()
    table = assert_type(allocate_table(pool, 2), list[int])
    free_table(pool, table)
    assert_type(hasher.hash_token_ids(range(40)), list[BlockHash])
    assert_type(hasher(request), list[BlockHash])


def use_stand_alone_parts() -> None:
    queue = FreeKVCacheBlockQueue([KVCacheBlock(0), KVCacheBlock(1)])
    block = assert_type(queue.popleft(), KVCacheBlock)
    assert_type(queue.num_free_blocks, int)
    queue.append(block)
    prefix_map = BlockHashToBlockMap()
    key = kvpool.make_block_hash_with_group_id(BlockHash(b"digest"), 0)
    prefix_map.insert(key, block)
    assert_type(prefix_map.get_one_block(key), KVCacheBlock | None)
    assert_type(len(prefix_map), int)


def make_manager() -> KVCacheManager:
    shape = {"num_kv_heads": 2, "head_size": 64}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(BLOCK_SIZE, dtype="float16", **shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(BLOCK_SIZE, dtype="float16", sliding_window=32, **shape)),
    ]
    assert_type(kvpool.num_blocks_for_memory(groups, 1 << 30), int)
    return KVCacheManager(KVCacheConfig(64, groups), 1024, log_stats=True, watermark=0.1)


def use_manager() -> None:
    manager = make_manager()
    request = Request("r", range(40), BlockHasher("sha256", BLOCK_SIZE))
    hit, num_hit_tokens = manager.get_computed_blocks(request)
    assert_type(hit, KVCacheBlocks)
    assert_type(num_hit_tokens, int)
    new = assert_type(manager.allocate_slots(request, 40, num_hit_tokens, hit), KVCacheBlocks | None)
    if new is not None:
        assert_type(new.get_block_ids(), tuple[list[int], ...])
    assert_type(manager.allocate_decode([request]), list[KVCacheBlocks | None])
    assert_type(manager.get_block_ids("r"), tuple[list[int], ...])
    assert_type(manager.make_prefix_cache_stats(), PrefixCacheStats | None)
    assert_type(manager.can_ever_fit(40), bool)
    manager.free(request)


def use_scheduler() -> None:
    scheduler = Scheduler(make_manager())
    request = Request("r", list(range(40)), BlockHasher("sha256", BLOCK_SIZE), max_tokens=1)
    scheduler.add_request(request)
    step = assert_type(scheduler.schedule(), SchedulerOutput)
    sampled = {request_id: [7] for request_id in step.sampled_request_ids}
    assert_type(scheduler.update_from_output(step, sampled), list[RequestOutput])
    assert_type(request.status, RequestStatus)
    assert_type(request.is_finished(), bool)
    assert_type(request.num_tokens, int)


if __name__ == "__main__":
    for use in (use_pool, use_stand_alone_parts, use_manager, use_scheduler):
        use()
