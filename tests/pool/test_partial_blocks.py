"""Partial blocks and secondary hashes, and hashes that move to a copy of their block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from pool_state import free_ids, state_of
from test_cache_blocks import found
from token_requests import lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError


def test_partial_entries(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4, hash_block_size=2)
    request = make_request(range(8), 2)
    h = request.block_hashes
    block = pool.get_new_blocks(1)[0]
    assert pool.cache_partial_block(request, block, 2, 0, 4) == lookup_key(h[0])
    assert (block.block_hash, block.block_hash_num_tokens) == (lookup_key(h[0]), 2)
    assert pool.cache_partial_block(request, block, 4, 0, 4) == lookup_key(h[1])
    assert (block.block_hash, block.block_hash_num_tokens) == (lookup_key(h[1]), 4)
    assert found(pool, request) == [None, 1, None, None]
    assert pool.cache_partial_block(request, block, 2, 0, 4, replace_existing_hashes=True) == lookup_key(h[0])
    assert found(pool, request) == [1, None, None, None]
    before = state_of(pool)
    for num_tokens in (3, 10, 0, -2):
        with pytest.raises(AssertionError) as raised:
            pool.cache_partial_block(request, block, num_tokens, 0, 4)
        assert type(raised.value) is InvalidArgumentError
    with pytest.raises(InvalidArgumentError):
        pool.cache_partial_block(request, block, 2, 0, 3)
    assert pool.cache_partial_block(request, pool.null_block, 2, 0, 4) is None
    assert state_of(pool) == before


def test_a_shorter_prefix_becomes_a_secondary_hash(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4, hash_block_size=2)
    request = make_request(range(8), 2)
    h = request.block_hashes
    block = pool.get_new_blocks(1)[0]
    pool.cache_partial_block(request, block, 8, 0, 8)
    pool.cache_partial_block(request, block, 4, 0, 8)
    pool.cache_partial_block(request, block, 6, 0, 8)
    pool.cache_partial_block(request, block, 4, 0, 8)
    assert (block.block_hash, block.block_hash_num_tokens) == (lookup_key(h[3]), 8)
    assert list(pool.cached_block_hashes_by_block) == [1]
    assert pool.cached_block_hashes_by_block[1] == {lookup_key(h[1]), lookup_key(h[2])}
    assert found(pool, request) == [None, 1, 1, 1]
    pool.free_blocks([block])
    assert free_ids(pool) == [2, 3, 1]
    pool.get_new_blocks(3)
    assert found(pool, request) == [None] * 4
    assert 1 not in pool.cached_block_hashes_by_block
    assert pool.cached_block_hashes_by_block.get(1) is None
    with pytest.raises(KeyError):
        pool.cached_block_hashes_by_block[1]
    assert pool.stats.evictions == 1


def test_secondary_hashes_are_a_read_only_mapping(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6, hash_block_size=2)
    secondary = pool.cached_block_hashes_by_block
    assert secondary == {} and not secondary
    request = make_request(range(8), 2)
    for block in pool.get_new_blocks(2):
        pool.cache_partial_block(request, block, 8, 0, 8)
        pool.cache_partial_block(request, block, 2, 0, 8)
    key = lookup_key(request.block_hashes[0])
    assert isinstance(secondary, Mapping)
    assert dict(secondary) == {1: {key}, 2: {key}} == secondary
    assert (list(secondary.keys()), list(secondary.values())) == ([1, 2], [{key}, {key}])
    assert secondary.get(1) == {key} and secondary.get(3) is None and secondary.get(3, "none") == "none"
    assert 3 not in secondary and -1 not in secondary and 99 not in secondary and "1" not in secondary
    assert secondary[True] == secondary[np.int64(1)] == {key}
    assert 1.0 not in secondary and None not in secondary and [1] not in secondary
    with pytest.raises(TypeError):
        secondary[3] = {key}
    with pytest.raises(KeyError):
        secondary[99]


def test_a_key_that_was_popped_by_hand_stays_out_of_the_map_as_in_vllm(make_pool: Any, make_request: Any) -> None:
    """The block carries it already, so that caching it again is no change, and no event tells of one."""
    pool = make_pool(4, True, 2, True)
    request = make_request(range(8), 2)
    block = pool.get_new_blocks(1)[0]
    key = pool.cache_partial_block(request, block, 4, 0, 4)
    pool.cached_block_hash_to_block.pop(key, block.block_id)
    pool.take_events()
    before = state_of(pool)
    assert pool.cache_partial_block(request, block, 4, 0, 4) == key
    assert state_of(pool) == before


def test_many_secondary_hashes_of_many_blocks(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(21, hash_block_size=1)
    requests = [make_request(range(100 * i, 100 * i + 16), 1) for i in range(20)]
    blocks = pool.get_new_blocks(20)
    for block, request in zip(blocks, requests):
        for num_tokens in (16, *range(1, 16)):
            pool.cache_partial_block(request, block, num_tokens, 0, 16)
    pool.check()
    assert len(pool.cached_block_hash_to_block) == 320
    assert [found(pool, request) for request in requests] == [[i] * 16 for i in range(1, 21)]
    pool.evict_blocks(range(1, 21, 2))
    pool.check()
    assert [found(pool, r) for r in requests] == [[None] * 16 if i % 2 else [i] * 16 for i in range(1, 21)]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() is True
    assert len(pool.cached_block_hash_to_block) == 0 and len(pool.cached_block_hashes_by_block) == 0


def test_a_dead_partial_hash_returns_as_in_vllm_unless_strict(make_pool: Any, make_request: Any) -> None:
    for strict, wanted in ((False, [None, 1, 2, 2]), (True, [None, 1, None, 2])):
        pool = make_pool(4, hash_block_size=2, strict_partial=strict)
        prompt = make_request(range(7), 2)
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(prompt, blocks, 0, 1, 4, 0)
        pool.cache_partial_block(prompt, blocks[1], 6, 0, 4)
        grown = make_request(range(8), 2)
        pool.cache_full_blocks(grown, blocks, 1, 2, 4, 0)
        before = state_of(pool)
        key = pool.cache_partial_block(grown, blocks[1], 6, 0, 4)
        assert found(pool, grown) == wanted
        if strict:
            assert key is None and state_of(pool) == before
        else:
            assert key == lookup_key(grown.block_hashes[2])


def test_strict_lets_new_boundaries_and_replaced_contents_pass(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4, hash_block_size=2, strict_partial=True)
    request = make_request(range(8), 2)
    block = pool.get_new_blocks(1)[0]
    assert pool.cache_partial_block(request, block, 4, 0, 8) is not None
    assert pool.cache_partial_block(request, block, 4, 0, 8) is None
    assert pool.cache_partial_block(request, block, 6, 0, 8) is not None
    assert pool.cache_partial_block(request, block, 2, 0, 8, replace_existing_hashes=True) is not None
    assert found(pool, request) == [1, None, None, None]


# Moved hashes


def test_hashes_move_to_a_copy(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(5, hash_block_size=2)
    request = make_request(range(8), 2)
    h = request.block_hashes
    source, target = pool.get_new_blocks(2)
    pool.cache_partial_block(request, source, 8, 0, 8)
    pool.cache_partial_block(request, source, 4, 0, 8)
    pool.move_block_hashes(source, target)
    assert found(pool, request) == [None, 2, None, 2]
    assert source.block_hash is None and source.block_hash_num_tokens is None
    assert (target.block_hash, target.block_hash_num_tokens) == (lookup_key(h[3]), 8)
    assert pool.cached_block_hashes_by_block[2] == {lookup_key(h[1])}
    assert list(pool.cached_block_hashes_by_block) == [2]
    before = state_of(pool)
    with pytest.raises(AssertionError):
        pool.move_block_hashes(source, target)
    with pytest.raises(BlockStateError):
        pool.move_block_hashes(target, pool.null_block)
    assert state_of(pool) == before
    pool.move_block_hashes(source, pool.blocks[3])  # nothing to move
    assert state_of(pool) == before


def test_a_reference_more_for_a_copy_under_way(make_pool: Any, make_request: Any, backend: Any) -> None:
    pool = make_pool(5, hash_block_size=2, enable_kv_cache_events=True)
    block, other = pool.get_new_blocks(2)
    pool.add_reference(block)
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (2, 2)
    pool.free_blocks([block])
    pool.free_blocks([other])
    before = state_of(pool)
    for wrong in (other, pool.null_block, backend.KVCacheBlock(1), make_pool(3).get_new_blocks(1)[0]):
        with pytest.raises(BlockStateError):
            pool.add_reference(wrong)
    assert state_of(pool) == before


def test_a_block_with_only_secondary_hashes_is_no_target(make_pool: Any) -> None:
    pool = make_pool(4)
    pool.cached_block_hash_to_block.insert(lookup_key(b"x"), pool.blocks[2])
    with pytest.raises(BlockStateError):
        pool.move_block_hashes(pool.blocks[1], pool.blocks[2])
