"""Calls that take and give block ids: which buffers they accept, and that they do what the block calls do."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pool_state import free_ids, state_of
from token_requests import lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize


def ctypes_array(ids: list[int]) -> Any:
    return (ctypes.c_int32 * len(ids))(*ids)


def strided_view(ids: list[int]) -> Any:
    """Contiguous memory in the middle of a larger array."""
    whole = np.zeros(len(ids) + 4, np.int32)
    whole[2:-2] = ids
    return whole[2:-2]


BUFFERS: dict[str, Callable[[list[int]], Any]] = {
    "numpy": lambda ids: np.array(ids, np.int32),
    "numpy slice": strided_view,
    "numpy subclass": lambda ids: np.array(ids, np.int32).view(np.recarray),
    "numpy, explicit byte order": lambda ids: np.array(ids, np.dtype(np.int32).newbyteorder("=")),
    "array": lambda ids: array("i", ids),
    "memoryview": lambda ids: memoryview(array("i", ids)),
    "memoryview cast of bytes": lambda ids: memoryview(bytearray(array("i", ids).tobytes())).cast("i"),
    "ctypes": ctypes_array,
}
if array("l").itemsize == 4:
    BUFFERS["array of long"] = lambda ids: array("l", ids)

FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"

REFUSED: dict[str, Callable[[list[int]], Any]] = {
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "float32": lambda ids: np.array(ids, np.float32),
    "bool": lambda ids: np.array(ids, np.bool_),
    "int16 pairs": lambda ids: np.array(ids * 2, np.int16),
    "other byte order": lambda ids: np.array(ids, FOREIGN_ORDER + "i4"),
    "two-dimensional": lambda ids: np.array([ids, ids], np.int32),
    "zero-dimensional": lambda ids: np.array(ids[0], np.int32),
    "every second": lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
    "backwards": lambda ids: np.array(ids, np.int32)[::-1],
    "a structure": lambda ids: np.array(ids, np.dtype([("id", np.int32)])),
    "bytes": lambda ids: array("i", ids).tobytes(),
    "list": lambda ids: ids,
    "tuple": tuple,
    "None": lambda ids: None,
    "an int": lambda ids: ids[0],
}


@pytest.fixture(params=BUFFERS)
def buffer(request: pytest.FixtureRequest) -> Callable[[list[int]], Any]:
    return BUFFERS[request.param]


# Buffers


def test_every_int32_buffer_is_read(make_pool: Any, buffer: Any) -> None:
    pool = make_pool(8)
    pool.allocate_ids(4)
    pool.free_ids(buffer([2, 4, 1]))
    assert free_ids(pool) == [2, 4, 1, 5, 6, 7]
    pool.touch_ids(buffer([5, 3, 4, 4]))
    assert [block.ref_cnt for block in pool.blocks] == [0, 0, 0, 2, 2, 1, 0, 0]
    pool.cache_ids([b"a", b"b"], buffer([3, 6]))
    assert pool.find_prefix_ids([b"a", b"b", b"c"]).tolist() == [3, 6]
    pool.free_ids(buffer([3, 3, 4, 4]), prepend=True)
    assert free_ids(pool) == [3, 4, 2, 1, 6, 7]
    for empty in (pool.free_ids, pool.touch_ids, lambda ids: pool.cache_ids([], ids)):
        empty(buffer([]))


def test_every_writable_int32_buffer_is_filled(make_pool: Any, buffer: Any) -> None:
    pool = make_pool(8)
    out = buffer([9, 9, 9])
    assert pool.allocate_ids(3, out=out) is out
    assert list(out) == [1, 2, 3]
    nothing = buffer([])
    assert pool.allocate_ids(0, nothing) is nothing
    assert free_ids(pool) == [4, 5, 6, 7]


@pytest.mark.parametrize("name", REFUSED)
def test_other_buffers_are_refused(make_pool: Any, name: str) -> None:
    pool = make_pool(8)
    pool.allocate_ids(3)
    ids = REFUSED[name]([1, 2])
    before = state_of(pool)
    for call in (
        lambda: pool.free_ids(ids),
        lambda: pool.touch_ids(ids),
        lambda: pool.cache_ids([b"a", b"b"], ids),
    ):
        with pytest.raises(TypeError):
            call()
        assert state_of(pool) == before
    if name != "None":
        with pytest.raises(TypeError):
            pool.allocate_ids(2, out=ids)
    assert state_of(pool) == before


def test_a_read_only_buffer_is_read_but_not_filled(make_pool: Any) -> None:
    pool = make_pool(8)
    frozen = np.array([1, 2], np.int32)
    frozen.flags.writeable = False
    for ids in (
        frozen,
        memoryview(array("i", [1, 2])).toreadonly(),
        memoryview(array("i", [1, 2]).tobytes()).cast("i"),
    ):
        with pytest.raises(TypeError):
            pool.allocate_ids(2, out=ids)
        assert free_ids(pool) == [1, 2, 3, 4, 5, 6, 7]
        pool.touch_ids(ids)
        pool.free_ids(ids)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_out_has_exactly_the_wanted_length(make_pool: Any, length: int) -> None:
    pool = make_pool(8)
    out = np.full(length, 77, np.int32)
    with pytest.raises(InvalidArgumentError):
        pool.allocate_ids(2, out=out)
    assert out.tolist() == [77] * length and pool.get_num_free_blocks() == 7


def test_a_refused_allocation_writes_nothing(make_pool: Any) -> None:
    pool = make_pool(4)
    out = np.full(4, 77, np.int32)
    with pytest.raises(ValueError, match=r"^Cannot get 4 free blocks from the pool$") as raised:
        pool.allocate_ids(4, out)
    assert type(raised.value) is NoFreeBlocksError
    assert out.tolist() == [77] * 4 and free_ids(pool) == [1, 2, 3]


# What the calls do


def test_new_ids_are_an_int32_array(make_pool: Any) -> None:
    pool = make_pool(8)
    ids = pool.allocate_ids(3)
    assert isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.shape == (3,)
    assert ids.flags.c_contiguous and ids.flags.writeable
    assert ids.tolist() == [1, 2, 3]
    assert pool.allocate_ids(0).tolist() == []
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 1, 1, 0, 0, 0, 0]
    assert pool.allocate_ids(np.int64(2)).tolist() == [4, 5]
    del pool
    assert ids.tolist() == [1, 2, 3]


def test_null_ids_are_skipped(make_pool: Any) -> None:
    pool = make_pool(4)
    pool.touch_ids(array("i", [0, 2, 0]))
    assert [block.ref_cnt for block in pool.blocks] == [0, 0, 1, 0]
    pool.cache_ids([b"a", b"b"], array("i", [0, 2]))
    assert pool.find_prefix_ids([b"a"]).tolist() == []
    assert pool.find_prefix_ids([b"b"]).tolist() == [2]
    pool.free_ids(array("i", [0, 2, 0]))
    assert free_ids(pool) == [1, 3, 2]


def test_ids_follow_the_rules_of_blocks(make_pool: Any, make_request: Any) -> None:
    by_ids, by_blocks = make_pool(9), make_pool(9)
    request = make_request(range(12))
    ids, blocks = by_ids.allocate_ids(5), by_blocks.get_new_blocks(5)
    for pool in (by_ids, by_blocks):
        pool.cache_full_blocks(request, list(pool.blocks[1:6]), 0, 3, 4, 0)
    by_ids.free_ids(ids[::-1].copy())
    by_blocks.free_blocks(blocks[::-1])
    assert free_ids(by_ids) == free_ids(by_blocks) == [5, 4, 6, 7, 8, 3, 2, 1]
    assert by_ids.allocate_ids(6).tolist() == [block.block_id for block in by_blocks.get_new_blocks(6)]
    assert state_of(by_ids) == state_of(by_blocks)
    assert by_ids.stats.evictions == 1


@pytest.mark.parametrize("n", [511, 512, 513, 5000])
def test_batches_of_any_size(make_pool: Any, n: int) -> None:
    pool = make_pool(n + 1)
    digests = [i.to_bytes(8, "big") for i in range(n)]
    ids = pool.allocate_ids(n)
    pool.cache_ids(digests, ids)
    assert pool.find_prefix_ids(digests).tolist() == list(range(1, n + 1))
    pool.free_ids(ids[::-1].copy())
    blocks = pool.get_new_blocks(n)
    assert [block.block_id for block in blocks] == list(range(n, 0, -1))
    assert len(pool.find_prefix_ids(digests)) == 0
    assert pool.stats.evictions == n
    pool.touch(blocks)
    pool.free_blocks(blocks + blocks)
    with pytest.raises(BlockStateError):
        pool.free_ids(ids)
    assert pool.get_num_free_blocks() == n


def test_prefixes_end_at_the_first_miss(make_pool: Any) -> None:
    pool = make_pool(200)
    digests = [i.to_bytes(2, "big") for i in range(190)]
    pool.cache_ids(digests, np.arange(1, 191, dtype=np.int32), 6)
    found = pool.find_prefix_ids(digests, 6)
    assert found.dtype == np.int32 and found.tolist() == list(range(1, 191))
    assert pool.find_prefix_ids(tuple(digests), group_id=6, max_blocks=130).tolist() == list(range(1, 131))
    assert pool.find_prefix_ids(digests, 6, 0).tolist() == []
    assert pool.find_prefix_ids([], 6).tolist() == []
    assert pool.find_prefix_ids(digests).tolist() == []
    pool.evict_blocks([150])
    assert pool.find_prefix_ids(digests, 6).tolist() == list(range(1, 150))
    assert pool.find_prefix_ids(BlockHashListWithBlockSize(digests, 1, 2), 6).tolist() == list(range(2, 150, 2))
    for max_blocks, error in ((-1, InvalidArgumentError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            pool.find_prefix_ids(digests, 6, max_blocks)


def test_the_first_inserted_copy_is_found(make_pool: Any) -> None:
    pool = make_pool(5)
    for block_id in (3, 1, 4):
        pool.cache_ids([b"a"], array("i", [block_id]))
    assert pool.find_prefix_ids([b"a"]).tolist() == [3]
    pool.evict_blocks([3])
    assert pool.find_prefix_ids([b"a"]).tolist() == [1]


def test_cached_ids_have_a_hash_of_unknown_length(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    pool.cache_ids([b"a"], array("i", [2]), 1)
    assert (pool.blocks[2].block_hash, pool.blocks[2].block_hash_num_tokens) == (lookup_key(b"a", 1), None)
    before = state_of(pool)
    pool.cache_ids([b"a"], array("i", [2]), 1)
    assert state_of(pool) == before
    for digest, group_id in ((b"b", 1), (b"a", 2)):
        with pytest.raises(BlockStateError):
            pool.cache_ids([b"x", digest], array("i", [1, 2]), group_id)
    with pytest.raises(BlockStateError):
        pool.cache_full_blocks(make_request(range(8)), pool.blocks[1:3], 0, 2, 4, 0)
    with pytest.raises(BlockStateError):
        pool.cache_ids([b"x", b"x"], array("i", [1, 1]))
    assert state_of(pool) == before


def test_a_key_popped_by_hand_is_reachable_again_when_it_is_cached_again(make_pool: Any) -> None:
    pool = make_pool(4)
    pool.cache_ids([b"a"], array("i", [2]))
    pool.cached_block_hash_to_block.pop(lookup_key(b"a"), 2)
    assert pool.find_prefix_ids([b"a"]).tolist() == []
    pool.cache_ids([b"a"], array("i", [2]))
    assert pool.find_prefix_ids([b"a"]).tolist() == [2]


def test_ids_are_observed_like_blocks(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4, True, 4, True)
    request = make_request(range(4))
    ids = pool.allocate_ids(1)
    pool.cache_full_blocks(request, [pool.blocks[1]], 0, 1, 4, 0)
    told: list[int] = []
    pool.unpin_blocks([pool.blocks[1]], lambda block: told.append(block.block_id))
    pool.take_events()
    out = np.zeros(3, np.int32)
    assert pool.allocate_ids(3, out).tolist() == [2, 3, 1]
    assert told == [1] and [type(event).__name__ for event in pool.take_events()] == ["BlockRemoved"]
    assert ids.tolist() == [1]
