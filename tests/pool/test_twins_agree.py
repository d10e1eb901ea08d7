"""Corners where the two implementations once answered differently: the same call, the same answer, on both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pool_state import state_of

from kvpool.errors import BlockStateError, InvalidArgumentError

KEY = b"\x01" * 32 + b"\0\0\0\0"
OTHER_KEY = b"\x02" * 32 + b"\0\0\0\0"


def test_an_id_outside_the_pool_is_skipped_and_counted_under_warn(make_pool: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    (block,) = pool.get_new_blocks(1)
    pool.free_ids(np.array([99, block.block_id, -7, block.block_id], np.int32))
    assert pool.stats.invalid_frees == 3
    assert pool.get_num_free_blocks() == 4


def test_a_primary_set_over_an_equal_secondary_leaves_the_secondary(make_pool: Any) -> None:
    pool = make_pool(5)
    block = pool.blocks[1]
    pool.cached_block_hash_to_block.insert(KEY, block)
    block.set_block_hash(KEY)
    assert pool.cached_block_hashes_by_block[1] == {KEY}
    block.reset_hash()
    assert pool.cached_block_hash_to_block.get_one_block(KEY) is block
    pool.check()
    assert pool.cached_block_hash_to_block.pop(KEY, 1) is block
    assert len(pool.cached_block_hash_to_block) == 0 and not pool.cached_block_hashes_by_block


def test_a_stand_alone_map_keeps_the_last_object_of_an_id(backend: Any) -> None:
    hash_map = backend.BlockHashToBlockMap()
    first, second = backend.KVCacheBlock(3), backend.KVCacheBlock(3)
    hash_map.insert(KEY, first)
    hash_map.insert(KEY, second)
    assert hash_map.get_one_block(KEY) is second
    assert hash_map.pop(KEY, 3) is second and len(hash_map) == 0


@pytest.mark.parametrize("block_id", [None, 2**40, -(2**40), "3", 3.0, np.array([3, 3])])
def test_an_id_that_no_block_can_have_is_found_nowhere(make_pool: Any, backend: Any, block_id: Any) -> None:
    alone = backend.BlockHashToBlockMap()
    alone.insert(KEY, backend.KVCacheBlock(3))
    pool = make_pool(5)
    pool.cached_block_hash_to_block.insert(KEY, pool.blocks[3])
    for hash_map in (alone, pool.cached_block_hash_to_block):
        assert not hash_map.contain(KEY, block_id)
        assert hash_map.pop(KEY, block_id) is None
        assert len(hash_map) == 1


@pytest.mark.parametrize(
    ("hash_block_size", "error"),
    [(0, InvalidArgumentError), (-4, InvalidArgumentError), (True, TypeError), (None, TypeError)],
)
def test_hash_block_size_is_a_positive_int(backend: Any, hash_block_size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        backend.BlockPool(5, True, hash_block_size)


def test_a_queue_holds_blocks_and_nothing_else(make_pool: Any, backend: Any) -> None:
    for queue in (backend.FreeKVCacheBlockQueue([backend.KVCacheBlock(0)]), make_pool(2).free_block_queue):
        with pytest.raises(TypeError):
            queue.remove(None)
        assert len(queue) == 1
        assert [block.block_id for block in queue.popleft_n(np.int64(0))] == []


def test_a_walk_starts_in_its_own_queue(make_pool: Any, backend: Any) -> None:
    one, other = make_pool(4), make_pool(4)
    with pytest.raises(BlockStateError):
        list(one.free_block_queue.iter_blocks_after(other.blocks[2]))
    with pytest.raises(BlockStateError):
        list(backend.FreeKVCacheBlockQueue([]).iter_blocks_after(one.blocks[2]))
    assert list(one.free_block_queue.iter_blocks_after(one.blocks[2])) == [one.blocks[3]]


def test_a_hand_made_block_may_become_null_and_a_pools_own_may_not(make_pool: Any, backend: Any) -> None:
    block = backend.KVCacheBlock(7)
    block.is_null = True
    assert block.is_null
    with pytest.raises((BlockStateError, AttributeError)):
        make_pool(3).blocks[1].is_null = True


def test_a_count_of_references_is_no_bool(make_pool: Any, backend: Any) -> None:
    (block,) = make_pool(3).get_new_blocks(1)
    for counted in (block, backend.KVCacheBlock(1)):
        with pytest.raises(TypeError):
            counted.ref_cnt = True


class Proxy:
    """An object whose attributes can't be read now."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("call", ["free_blocks", "touch", "cache_full_blocks"])
def test_an_entry_that_can_not_be_read_changes_nothing(make_pool: Any, make_request: Any, call: str) -> None:
    pool = make_pool(8)
    blocks = pool.get_new_blocks(2)
    before = state_of(pool)
    given = [blocks[0], pool.blocks[5], Proxy()] if call == "touch" else [blocks[0], blocks[1], Proxy()]
    with pytest.raises(TypeError):
        if call == "cache_full_blocks":
            pool.cache_full_blocks(make_request(range(12)), given, 0, 3, 4, 0)
        else:
            getattr(pool, call)(given)
    assert state_of(pool) == before


def test_blocks_of_an_iterator_are_touched(make_pool: Any) -> None:
    pool = make_pool(4)
    pool.touch(iter(pool.blocks[1:3]))
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 1, 0]


def test_the_null_block_of_a_pool_is_its_own_matter(make_pool: Any) -> None:
    pool = make_pool(4)
    for block in pool.blocks:
        for value in (True, False):
            with pytest.raises(BlockStateError):
                block.is_null = value


def test_arguments_are_read_though_nothing_is_looked_up(make_pool: Any, make_request: Any) -> None:
    pool, request = make_pool(4), make_request(range(8))
    missing = b"\x09" * 32
    for hashes in ([missing, "text"], [missing, b"x" * 33]):
        with pytest.raises((TypeError, InvalidArgumentError)):
            pool.find_prefix_ids(hashes)
    with pytest.raises(TypeError):
        pool.find_prefix_ids([], "0")
    with pytest.raises(OverflowError):
        pool.get_cached_block(missing, [2**40])
    with pytest.raises(TypeError):
        pool.cache_full_blocks(request, [], 0, 0, "4", 0)
    with pytest.raises(OverflowError):
        pool.cache_full_blocks(request, [], 0, 2**70, 4, 0)
    with pytest.raises(InvalidArgumentError):
        pool.cache_ids([missing], np.array([1, 99], np.int32))
    assert pool.find_prefix_ids(iter(request.block_hashes)).size == 0


def test_a_key_that_came_back_as_a_secondary_one_is_in_the_map_once(make_pool: Any) -> None:
    pool = make_pool(5)
    pool.cached_block_hash_to_block.insert(KEY, pool.blocks[1])
    pool.blocks[1].set_block_hash(KEY)
    pool.cache_ids([KEY[:32]], np.array([1], np.int32))
    pool.check()
    assert len(pool.cached_block_hash_to_block) == 1
    pool.evict_blocks([1])
    assert len(pool.cached_block_hash_to_block) == 0


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, "1", 1.0, None, True, -1])
def test_counts_of_blocks_are_31_bits(make_pool: Any, value: Any) -> None:
    (block,) = make_pool(3).get_new_blocks(1)
    with pytest.raises((TypeError, OverflowError, BlockStateError)):
        block.ref_cnt = value
    assert block.ref_cnt == 1
    if value is not None and value is not True:
        with pytest.raises((TypeError, OverflowError, InvalidArgumentError)):
            block.set_block_hash(KEY, value)
        assert block.block_hash is None
