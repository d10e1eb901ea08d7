"""Allocation, freeing, touching: the free list's order and the reference counts.

`pool of n` has n - 1 usable blocks, with ids 1 to n - 1; the expected orders are from head to tail.
"""

from __future__ import annotations

from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of

from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError


def cache(pool: Any, request: Any, blocks: list[Any], first: int = 0, past: int | None = None) -> None:
    pool.cache_full_blocks(request, blocks, first, len(blocks) if past is None else past, 4, 0)


# Creation


def test_a_new_pool_has_all_blocks_but_the_null_block(make_pool: Any) -> None:
    pool = make_pool(5)
    assert free_ids(pool) == [1, 2, 3, 4]
    assert pool.get_num_free_blocks() == 4
    assert pool.get_usage() == 0.0
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null and pool.null_block.block_id == 0
    assert not any(block.is_null for block in pool.blocks[1:])
    assert (pool.num_gpu_blocks, pool.hash_block_size) == (5, 4)
    assert pool.enable_caching is True and pool.enable_kv_cache_events is False
    assert pool.metrics_collector is None and pool.medium == "GPU"
    assert pool.uncached_first is True and pool.on_invalid_free == "raise"
    assert pool.take_events() == [] and pool.kv_event_queue == []


@pytest.mark.parametrize("size", [True, False, None, 2.0, "4"])
def test_a_pool_size_is_an_int(make_pool: Any, size: Any) -> None:
    with pytest.raises(TypeError):
        make_pool(size)


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_size_is_positive(make_pool: Any, size: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        make_pool(size)
    assert isinstance(raised.value, (ValueError, AssertionError))


def test_a_pool_of_one_has_nothing_to_give(make_pool: Any) -> None:
    pool = make_pool(1)
    assert pool.get_usage() == 0
    assert pool.get_num_free_blocks() == 0
    assert pool.get_new_blocks(0) == []
    with pytest.raises(NoFreeBlocksError):
        pool.get_new_blocks(1)
    assert pool.reset_prefix_cache() is True


def test_an_unknown_policy_for_invalid_frees_is_refused(make_pool: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make_pool(4, on_invalid_free="ignore")


# Allocation


def test_blocks_come_from_the_head(make_pool: Any) -> None:
    pool = make_pool(6)
    blocks = pool.get_new_blocks(3)
    assert block_ids(blocks) == [1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert free_ids(pool) == [4, 5]
    assert pool.get_num_free_blocks() == 2


def test_more_than_is_free_is_refused(make_pool: Any) -> None:
    pool = make_pool(4)
    before = state_of(pool)
    with pytest.raises(ValueError, match=r"^Cannot get 4 free blocks from the pool$") as raised:
        pool.get_new_blocks(4)
    assert type(raised.value) is NoFreeBlocksError
    with pytest.raises(AssertionError):
        pool.free_block_queue.popleft_n(4)
    assert pool.get_new_blocks(0) == []
    assert state_of(pool) == before
    assert free_ids(pool) == [1, 2, 3]


def test_an_allocated_block_has_no_links(make_pool: Any) -> None:
    pool = make_pool(9)
    five = pool.get_new_blocks(5)
    for block in five:
        assert block.prev_free_block is None and block.next_free_block is None
    pool.free_blocks(five)
    blocks = pool.get_new_blocks(8)
    assert pool.get_num_free_blocks() == 0
    for block in blocks:
        assert block.prev_free_block is None and block.next_free_block is None
    pool.free_blocks(sorted(blocks, key=lambda block: -block.block_id))
    assert pool.get_num_free_blocks() == 8
    assert free_ids(pool) == [8, 7, 6, 5, 4, 3, 2, 1]


# Freeing


def test_null_blocks_in_a_batch_are_skipped(make_pool: Any) -> None:
    pool = make_pool(5)
    a, _ = pool.get_new_blocks(2)
    pool.free_blocks([pool.null_block] * 3 + [a])
    assert pool.get_num_free_blocks() == 3
    assert free_ids(pool) == [1, 3, 4]
    assert pool.null_block.ref_cnt == 0
    pool.touch([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == 0
    pool.free_blocks([pool.null_block])
    assert pool.null_block.ref_cnt == 0 and free_ids(pool) == [1, 3, 4]


def test_a_shared_block_may_be_freed_as_often_as_it_is_used_in_one_batch(make_pool: Any) -> None:
    pool = make_pool(5)
    a, b = pool.get_new_blocks(2)
    pool.touch([a, a])
    pool.free_blocks([a, b, a])
    assert a.ref_cnt == 1 and free_ids(pool) == [2, 3, 4]
    pool.free_blocks([a])
    assert free_ids(pool) == [1, 2, 3, 4]


def test_a_batch_may_be_any_iterable(make_pool: Any) -> None:
    pool = make_pool(5)
    blocks = pool.get_new_blocks(3)
    pool.touch(tuple(blocks))
    pool.free_blocks(iter(blocks))
    pool.free_blocks(block for block in blocks[::-1])
    assert free_ids(pool) == [3, 2, 1, 4]
    pool.free_blocks([])
    pool.free_blocks(())
    assert free_ids(pool) == [3, 2, 1, 4]


def test_blocks_without_a_hash_go_to_the_head_and_those_with_one_to_the_tail(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(7)
    blocks = pool.get_new_blocks(4)
    cache(pool, make_request(range(8)), blocks, past=2)
    pool.free_blocks(blocks[::-1])
    assert free_ids(pool) == [4, 3, 5, 6, 2, 1]


def test_all_blocks_go_to_the_tail_without_uncached_first(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(7, uncached_first=False)
    blocks = pool.get_new_blocks(4)
    cache(pool, make_request(range(8)), blocks, past=2)
    pool.free_blocks(blocks[::-1])
    assert free_ids(pool) == [5, 6, 4, 3, 2, 1]


def test_prepend_puts_all_blocks_to_the_head(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(7)
    blocks = pool.get_new_blocks(4)
    cache(pool, make_request(range(8)), blocks, past=2)
    pool.free_blocks([blocks[1], blocks[3], blocks[0]], prepend=True)
    assert free_ids(pool) == [2, 4, 1, 5, 6]


def test_the_last_freed_is_the_first_reused_with_caching_off(make_pool: Any) -> None:
    pool = make_pool(5, enable_caching=False)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    assert free_ids(pool) == [1, 2, 3, 4]
    assert block_ids(pool.get_new_blocks(2)) == [1, 2]


def test_all_blocks_go_to_the_tail_with_caching_off_and_without_uncached_first(make_pool: Any) -> None:
    pool = make_pool(5, enable_caching=False, uncached_first=False)
    pool.free_blocks(pool.get_new_blocks(2)[::-1])
    assert free_ids(pool) == [3, 4, 2, 1]


def test_the_last_block_of_a_chain_is_evicted_first(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(12))
    blocks = pool.get_new_blocks(3)
    cache(pool, request, blocks)
    pool.free_blocks(blocks[::-1])
    assert free_ids(pool) == [3, 2, 1]
    assert block_ids(pool.get_new_blocks(1)) == [3]
    assert [block_ids(pool.get_cached_block(h, [0])) for h in request.block_hashes] == [[1], [2], None]
    assert pool.stats.evictions == 1


def test_a_burst_of_one_shot_prompts_evicts_a_hot_prefix(make_pool: Any, make_request: Any) -> None:
    """Plain least-recently-used order is the default, whatever was hit how often."""
    pool = make_pool(9)
    prefix = make_request(range(8))
    blocks = pool.get_new_blocks(2)
    cache(pool, prefix, blocks)
    for _ in range(100):
        pool.touch(blocks)
        pool.free_blocks(blocks)
    pool.free_blocks(blocks[::-1])
    for first_token in (100, 200, 300, 400):
        one_shot = pool.get_new_blocks(2)
        cache(pool, make_request(range(first_token, first_token + 8)), one_shot)
        pool.free_blocks(one_shot[::-1])
    assert [pool.get_cached_block(h, [0]) for h in prefix.block_hashes] == [None, None]


def test_blocks_of_another_pool_go_back_to_it(make_pool: Any) -> None:
    one, other = make_pool(5), make_pool(4)
    mine, theirs = one.get_new_blocks(2), other.get_new_blocks(2)
    one.free_blocks([mine[0], theirs[1], other.null_block, mine[1], theirs[0]])
    assert free_ids(one) == [1, 2, 3, 4]
    assert free_ids(other) == [2, 1, 3]
    assert block_ids(other.get_new_blocks(3)) == [2, 1, 3]


def test_blocks_of_another_pool_are_prepended_there(make_pool: Any, make_request: Any) -> None:
    one, other = make_pool(5), make_pool(5)
    theirs = other.get_new_blocks(2)
    cache(other, make_request(range(8)), theirs)
    one.free_blocks(theirs, prepend=True)
    assert free_ids(other) == [1, 2, 3, 4]


# Touching


def test_a_touch_takes_a_free_block_out_of_the_list(make_pool: Any) -> None:
    pool = make_pool(5)
    pool.touch([pool.blocks[3], pool.blocks[1]])
    assert free_ids(pool) == [2, 4]
    assert pool.blocks[3].ref_cnt == pool.blocks[1].ref_cnt == 1
    pool.touch([pool.blocks[3], pool.blocks[2], pool.blocks[2]])
    assert free_ids(pool) == [4]
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 2, 2, 0]


def test_a_double_free_does_not_hand_a_block_out_twice(make_pool: Any) -> None:
    pool = make_pool(5)
    a, b = pool.get_new_blocks(2)
    pool.free_blocks([a])
    with pytest.raises(BlockStateError):
        pool.free_blocks([a])
    pool.touch([a])
    assert free_ids(pool) == [3, 4] and a.ref_cnt == 1
    new = pool.get_new_blocks(2)
    assert block_ids(new) == [3, 4]
    assert {a, b}.isdisjoint(new)


# Numbers


def test_usage_counts_references_not_cached_contents(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(5)
    assert pool.get_usage() == 0.0
    blocks = pool.get_new_blocks(2)
    assert pool.get_usage() == 0.5 and pool.num_evictable_blocks == 0
    cache(pool, make_request(range(8)), blocks)
    assert pool.get_usage() == 0.5 and pool.num_evictable_blocks == 0
    pool.free_blocks(blocks)
    assert pool.get_usage() == 0.0 and pool.num_evictable_blocks == 2
    pool.get_new_blocks(4)
    assert pool.get_usage() == 1.0 and pool.num_evictable_blocks == 0


def test_shared_prefixes_are_counted_once(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(17)
    first, second = make_request(range(19)), make_request([*range(16), 90, 91, 92])
    table = pool.get_new_blocks(5)
    cache(pool, first, table, past=4)
    hits = [pool.get_cached_block(h, [0])[0] for h in second.block_hashes]
    assert block_ids(hits) == [1, 2, 3, 4]
    pool.touch(hits)
    second_table = hits + pool.get_new_blocks(1)
    assert 16 - pool.get_num_free_blocks() == 6
    pool.free_blocks(table[::-1])
    assert 16 - pool.get_num_free_blocks() == 5
    pool.free_blocks(second_table[::-1])
    assert pool.get_num_free_blocks() == 16
    assert sum(block.ref_cnt for block in pool.blocks) == 0


def test_writable_is_one_user_and_no_hash(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(5)
    a, b = pool.get_new_blocks(2)
    assert pool.is_block_writable(a)
    pool.touch([a])
    assert not pool.is_block_writable(a)
    cache(pool, make_request(range(4)), [b])
    assert not pool.is_block_writable(b)
    assert not pool.is_block_writable(pool.null_block)
    assert not pool.is_block_writable(pool.blocks[3])


def test_memory_is_counted(make_pool: Any, backend: Any) -> None:
    small, large = make_pool(10), make_pool(10_001)
    per_block = (large.nbytes - small.nbytes) / 9_991
    assert 40 < per_block < 400
    if backend.name == "native":
        assert per_block <= 96


# Unpinning


def test_unpinned_blocks_are_free_and_tell_their_reader_when_they_are_reused(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(5)
    blocks = pool.get_new_blocks(3)
    cache(pool, make_request(range(8)), blocks, past=2)
    told: list[int] = []
    pool.unpin_blocks([blocks[1]], lambda block: told.append(block.block_id))
    assert free_ids(pool) == [4, 2] and pool.get_num_free_blocks() == 2
    pool.touch([blocks[1]])  # a hit
    assert told == []
    pool.free_blocks([blocks[1]])
    assert block_ids(pool.get_new_blocks(1)) == [4]
    assert told == []
    assert pool.get_new_blocks(1) == [blocks[1]]
    assert told == [2]
    pool.free_blocks([blocks[1]])
    pool.get_new_blocks(1)
    assert told == [2]


def test_unpinned_blocks_go_to_the_tail_without_a_hash_too(make_pool: Any) -> None:
    pool = make_pool(5)
    blocks = pool.get_new_blocks(2)
    pool.unpin_blocks(blocks, lambda block: None)
    assert free_ids(pool) == [3, 4, 1, 2]


def test_a_watcher_that_raises_takes_no_block_away(make_pool: Any) -> None:
    pool = make_pool(4)
    blocks = pool.get_new_blocks(3)

    def fail(block: Any) -> None:
        raise RuntimeError("reader is gone")

    pool.unpin_blocks(blocks[1:2], fail)
    with pytest.raises(RuntimeError, match="reader is gone"):
        pool.get_new_blocks(1)
    assert free_ids(pool) == [2] and pool.blocks[2].ref_cnt == 0
    assert block_ids(pool.get_new_blocks(1)) == [2]


def test_a_reset_tells_readers_of_unpinned_blocks(make_pool: Any) -> None:
    pool = make_pool(4)
    told: list[int] = []
    pool.unpin_blocks(pool.get_new_blocks(2), lambda block: told.append(block.block_id))
    assert pool.reset_prefix_cache() is True
    assert told == [1, 2]
    pool.get_new_blocks(3)
    assert told == [1, 2]
