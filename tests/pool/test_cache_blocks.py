"""Caching: full blocks, partial blocks, moved hashes, eviction by id, reset."""

from __future__ import annotations

from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of
from token_requests import lookup_key

from kvpool.errors import BlockStateError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize


def found(pool: Any, request: Any, group_id: int = 0) -> list[int | None]:
    """The id of the block that each hash of the request leads to."""
    hits = [pool.get_cached_block(digest, [group_id]) for digest in request.block_hashes]
    return [None if hit is None else hit[0].block_id for hit in hits]


# Full blocks


def test_full_blocks_become_reachable(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    request = make_request(range(14))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 7)
    assert found(pool, request, 7) == [1, 2, None]
    assert [block.block_hash for block in blocks] == [*(lookup_key(h, 7) for h in request.block_hashes[:2]), None, None]
    assert [block.block_hash_num_tokens for block in blocks] == [4, 8, None, None]
    pool.cache_full_blocks(request, blocks, 2, 3, 4, 7)
    assert found(pool, request, 7) == [1, 2, 3]
    assert blocks[2].block_hash_num_tokens == 12
    assert pool.cached_block_hashes_by_block == {} or len(pool.cached_block_hashes_by_block) == 0


@pytest.mark.parametrize("first, past", [(0, 0), (2, 2), (3, 1)])
def test_an_empty_range_changes_nothing(make_pool: Any, make_request: Any, first: int, past: int) -> None:
    pool = make_pool(6, True, 4, True)
    blocks = pool.get_new_blocks(3)
    before = state_of(pool)
    pool.cache_full_blocks(make_request(range(12)), blocks, first, past, 4, 0)
    assert state_of(pool) == before


def test_null_and_masked_blocks_are_skipped(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    request = make_request(range(16))
    a, b, c = pool.get_new_blocks(3)
    blocks = [a, pool.null_block, b, c]
    pool.cache_full_blocks(request, blocks, 0, 4, 4, 0, block_mask=[True, True, False, True])
    assert found(pool, request) == [1, None, None, 3]
    assert pool.null_block.block_hash is None
    assert b.block_hash is None and c.block_hash_num_tokens == 16
    pool.cache_full_blocks(request, [pool.null_block] * 4, 0, 4, 4, 0)
    assert found(pool, request) == [1, None, None, 3]


def test_a_masked_block_may_carry_any_hash(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    old, new = make_request(range(4)), make_request(range(20, 28))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(old, blocks, 0, 1, 4, 0)
    pool.cache_full_blocks(new, blocks, 0, 2, 4, 0, [False, True])
    assert found(pool, old) == [1] and found(pool, new) == [None, 2]


def test_skipped_entries_may_be_of_any_pool(make_pool: Any, make_request: Any, backend: Any) -> None:
    pool, other = make_pool(6), make_pool(3)
    request = make_request(range(20))
    a, b = pool.get_new_blocks(2)
    blocks = [a, other.null_block, other.blocks[1], backend.KVCacheBlock(0, is_null=True), b]
    pool.cache_full_blocks(request, blocks, 0, 5, 4, 0, block_mask=[True, True, False, True, True])
    assert found(pool, request) == [1, None, None, None, 2]
    assert other.blocks[1].block_hash is None


def test_coarse_blocks_take_the_hash_of_their_last_fine_block(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(5, hash_block_size=2)
    request = make_request(range(8), 2)
    assert len(request.block_hashes) == 4
    pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0)
    assert found(pool, request) == [None, 1, None, 2]
    assert [pool.blocks[i].block_hash_num_tokens for i in (1, 2)] == [4, 8]


@pytest.mark.parametrize("kind", [list, tuple])
def test_hashes_may_be_a_view_or_any_sequence(make_pool: Any, make_request: Any, kind: type) -> None:
    pool = make_pool(7, hash_block_size=2)
    request = make_request(range(12), 2)
    digests = request.block_hashes
    request.block_hashes = kind(digests)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, kind(blocks), 1, 3, 4, 0)
    assert [block.block_hash for block in blocks] == [None, lookup_key(digests[3]), lookup_key(digests[5]), None]
    request.block_hashes = BlockHashListWithBlockSize(digests, 2, 4)
    pool.cache_full_blocks(request, blocks[3:], 0, 1, 4, 1)
    assert blocks[3].block_hash == lookup_key(digests[1], 1)


def test_a_large_range(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(3001)
    request = make_request(range(12_000))
    blocks = pool.get_new_blocks(3000)
    pool.cache_full_blocks(request, blocks, 0, 3000, 4, 0)
    assert pool.find_prefix_ids(request.block_hashes).tolist() == list(range(1, 3001))
    pool.free_blocks(blocks[::-1])
    assert block_ids(pool.get_new_blocks(1000)) == list(range(3000, 2000, -1))
    assert len(pool.find_prefix_ids(request.block_hashes)) == 2000
    assert pool.stats.evictions == 1000


def test_a_whole_prompt_is_found_and_no_more(make_pool: Any, make_request: Any) -> None:
    """A request asks for all tokens but its last; the pool finds the full blocks of those."""
    pool = make_pool(8)
    pool.cache_full_blocks(make_request(range(12)), pool.get_new_blocks(3), 0, 3, 4, 0)
    for length, ids in ((12, [1, 2]), (13, [1, 2, 3]), (11, [1, 2]), (4, []), (3, [])):
        hashes = make_request(range(length)).block_hashes
        assert pool.find_prefix_ids(hashes, max_blocks=(length - 1) // 4).tolist() == ids


# Blocks that carry a hash already


def test_a_partial_block_that_is_full_now_loses_its_hashes(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4, hash_block_size=2)
    request = make_request(range(8), 2)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.cache_partial_block(request, blocks[1], 6, 0, 4)
    assert found(pool, request) == [None, 1, 2, None]
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    assert found(pool, request) == [None, 1, None, 2]
    assert blocks[1].block_hash_num_tokens == 8
    assert len(pool.cached_block_hash_to_block) == 2


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_dirty_block_is_refused_before_anything_changes(
    make_pool: Any, make_request: Any, place: int, events: bool
) -> None:
    pool = make_pool(6, True, 4, events)
    blocks = pool.get_new_blocks(3)
    other = make_request(range(50, 62))
    pool.cache_full_blocks(other, blocks, place, place + 1, 4, 0)
    before = state_of(pool)
    with pytest.raises(AssertionError) as raised:
        pool.cache_full_blocks(make_request(range(12)), blocks, 0, 3, 4, 0)
    assert type(raised.value) is BlockStateError
    assert state_of(pool) == before
    assert len(pool.cached_block_hash_to_block) == 1


def test_a_block_with_a_hash_of_fewer_tokens_is_promoted_whosever_it_was(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    blocks = pool.get_new_blocks(3)
    old, new = make_request(range(50, 54)), make_request(range(12))
    pool.cache_full_blocks(old, [blocks[1]], 0, 1, 4, 0)
    pool.cache_full_blocks(new, blocks, 0, 3, 4, 0)
    assert found(pool, old) == [None] and found(pool, new) == [1, 2, 3]


def test_a_hash_of_unknown_length_is_never_replaced(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(8))
    blocks = pool.get_new_blocks(2)
    blocks[1].set_block_hash(lookup_key(b"x"))
    with pytest.raises(BlockStateError):
        pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    assert found(pool, request) == [None, None]


# Eviction by id, reset


def test_eviction_by_id_leaves_blocks_where_they_are(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    request = make_request(range(12))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
    pool.free_blocks([blocks[2]])
    pool.evict_blocks({2, 3, 4})
    assert found(pool, request) == [1, None, None]
    assert [block.ref_cnt for block in blocks] == [1, 1, 0, 1]
    assert free_ids(pool) == [5, 3]
    assert pool.stats.evictions == 0
    pool.evict_blocks(set())
    pool.evict_blocks([0, 2])
    assert found(pool, request) == [1, None, None]


def test_a_reset_waits_until_nothing_is_in_use(make_pool: Any, make_request: Any, caplog: Any) -> None:
    pool = make_pool(5)
    request = make_request(range(8))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    before = state_of(pool)
    with caplog.at_level("WARNING", logger="kvpool"):
        assert pool.reset_prefix_cache() is False
    assert "2 blocks" in caplog.text
    assert state_of(pool) == before
    pool.free_blocks(blocks[::-1])
    assert pool.reset_prefix_cache() is True
    assert found(pool, request) == [None, None]
    assert free_ids(pool) == [3, 4, 2, 1]
    assert [block.block_hash for block in pool.blocks] == [None] * 5
    assert len(pool.cached_block_hash_to_block) == 0
    assert pool.reset_prefix_cache() is True
    assert free_ids(pool) == [3, 4, 2, 1]


def test_a_reset_takes_hashes_that_were_set_by_hand(make_pool: Any) -> None:
    pool = make_pool(4)
    pool.blocks[1].set_block_hash(lookup_key(b"x"), 4)
    pool.cached_block_hash_to_block.insert(lookup_key(b"y"), pool.blocks[2])
    pool.blocks[3].set_block_hash(lookup_key(b"z"), 4)
    pool.cached_block_hash_to_block.insert(lookup_key(b"z"), pool.blocks[3])
    pool.cached_block_hash_to_block.pop(lookup_key(b"z"), 3)
    assert pool.reset_prefix_cache() is True
    assert [block.block_hash for block in pool.blocks] == [None] * 4
    assert len(pool.cached_block_hash_to_block) == 0 and len(pool.cached_block_hashes_by_block) == 0


def test_hashes_stay_on_reused_blocks_with_caching_off(make_pool: Any, make_request: Any) -> None:
    """As in vLLM, where nothing calls the cache of such a pool."""
    pool = make_pool(4, enable_caching=False)
    request = make_request(range(4))
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.free_blocks(blocks)
    assert free_ids(pool) == [1, 2, 3]
    assert pool.get_new_blocks(1) == blocks
    assert found(pool, request) == [1]
    assert pool.stats.evictions == 0


# Blocks reused by the same request


def test_the_same_prompt_twice_in_one_step(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(10)
    requests = [make_request(range(8)), make_request(range(8))]
    tables = [pool.get_new_blocks(2), pool.get_new_blocks(2)]
    for request, table in zip(requests, tables):
        pool.cache_full_blocks(request, table, 0, 2, 4, 0)
    assert found(pool, requests[1]) == [1, 2]
    assert len(pool.cached_block_hash_to_block) == 2
    for table in tables:
        pool.free_blocks(table[::-1])
    assert pool.get_num_free_blocks() == 9
    assert free_ids(pool) == [5, 6, 7, 8, 9, 2, 1, 4, 3]
