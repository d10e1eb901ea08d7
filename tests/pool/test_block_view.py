"""KVCacheBlock: identity, representation, and what may be set on a block by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from pool_state import free_ids, state_of
from token_requests import lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError

KEY = lookup_key(b"\x01" * 32, 5)
OTHER_KEY = lookup_key(b"\x02" * 32, 5)


def test_a_block_is_one_object(make_pool: Any) -> None:
    pool = make_pool(6)
    assert pool.blocks[5] is pool.blocks[5]
    assert pool.blocks[-1] is pool.blocks[5]
    assert pool.get_new_blocks(1)[0] is pool.blocks[1]
    assert pool.free_block_queue.get_all_free_blocks()[0] is pool.blocks[2]
    assert list(pool.blocks)[3] is pool.blocks[3]
    assert pool.blocks[2:4] == [pool.blocks[2], pool.blocks[3]]
    assert pool.blocks[::-2] == [pool.blocks[5], pool.blocks[3], pool.blocks[1]]
    assert len(pool.blocks) == 6
    for index in (6, -7):
        with pytest.raises(IndexError):
            pool.blocks[index]


def test_equality_is_identity(make_pool: Any, backend: Any) -> None:
    pool, other = make_pool(4), make_pool(4)
    assert pool.blocks[1] != other.blocks[1]
    assert backend.KVCacheBlock(1) != backend.KVCacheBlock(1)
    assert len({pool.blocks[1], pool.blocks[1], other.blocks[1], backend.KVCacheBlock(1)}) == 3


def test_blocks_know_their_pool(make_pool: Any, backend: Any) -> None:
    pool = make_pool(3)
    assert [block.pool for block in pool.blocks] == [pool] * 3
    assert backend.KVCacheBlock(1).pool is None


def test_a_new_hand_made_block(backend: Any) -> None:
    block = backend.KVCacheBlock(17)
    assert (block.block_id, block.ref_cnt, block.is_null) == (17, 0, False)
    assert block.block_hash is None and block.block_hash_num_tokens is None
    assert block._block_hash is None and block._block_hash_num_tokens is None
    assert block.prev_free_block is None and block.next_free_block is None
    assert backend.KVCacheBlock(3, 4).ref_cnt == 4
    assert backend.KVCacheBlock(block_id=3, ref_cnt=1, is_null=True).is_null is True
    with pytest.raises(InvalidArgumentError):
        backend.KVCacheBlock(3, -1)


def test_repr_is_that_of_vllm(make_pool: Any, backend: Any) -> None:
    pool = make_pool(5)
    used = pool.get_new_blocks(1)[0]
    pool.blocks[3].set_block_hash(b"hash\0\0\0\1", 16)
    assert repr(used) == (
        "KVCacheBlock(block_id=1, ref_cnt=1, _block_hash=None, _block_hash_num_tokens=None, "
        "prev_free_block=None, next_free_block=None)"
    )
    assert repr(pool.blocks[3]) == (
        "KVCacheBlock(block_id=3, ref_cnt=0, _block_hash=b'hash\\x00\\x00\\x00\\x01', _block_hash_num_tokens=16, "
        "prev_free_block=2, next_free_block=4)"
    )
    assert repr(pool.blocks[2]).endswith("prev_free_block=-1, next_free_block=3)")
    assert repr(pool.blocks[4]).endswith("prev_free_block=3, next_free_block=-1)")
    assert repr(backend.KVCacheBlock(9, 2)).startswith("KVCacheBlock(block_id=9, ref_cnt=2, ")


def test_a_block_has_no_dict(make_pool: Any, backend: Any) -> None:
    for block in (make_pool(3).blocks[1], backend.KVCacheBlock(1)):
        assert not hasattr(block, "__dict__")
        with pytest.raises(AttributeError):
            block.color = "red"
        with pytest.raises(AttributeError):
            block.block_id = 2


def test_native_blocks_are_not_tracked_by_the_garbage_collector(make_pool: Any, backend: Any) -> None:
    pool = make_pool(3)
    tracked = [gc.is_tracked(block) for block in (*pool.blocks, backend.KVCacheBlock(1))]
    if backend.name == "native":
        assert tracked == [False] * 4
    else:
        assert tracked == [True] * 4


# ref_cnt


def test_the_count_of_a_hand_made_block_is_any_int_from_0(backend: Any) -> None:
    block = backend.KVCacheBlock(1)
    for count in (5, 0, 1_000_000):
        block.ref_cnt = count
        assert block.ref_cnt == count
    block.ref_cnt += 1
    assert block.ref_cnt == 1_000_001
    with pytest.raises(BlockStateError):
        block.ref_cnt = -1
    for count in (None, "1", 1.5):
        with pytest.raises(TypeError):
            block.ref_cnt = count
    assert block.ref_cnt == 1_000_001


def test_a_used_block_set_to_0_is_detached_until_it_is_used_again(make_pool: Any) -> None:
    pool = make_pool(4)
    block = pool.get_new_blocks(1)[0]
    block.ref_cnt = 3
    pool.check()
    block.ref_cnt = 0
    pool.check()
    assert free_ids(pool) == [2, 3]
    for refused in (lambda: pool.free_blocks([block]), lambda: pool.touch([block])):
        with pytest.raises(BlockStateError):
            refused()
    assert pool.get_usage() == pytest.approx(1 / 3)
    block.ref_cnt = 2
    pool.check()
    pool.free_blocks([block, block])
    assert free_ids(pool) == [1, 2, 3]


def test_a_queued_or_null_block_cannot_be_put_into_use(make_pool: Any) -> None:
    pool = make_pool(4)
    before = state_of(pool)
    for block in (pool.null_block, pool.blocks[2]):
        block.ref_cnt = 0
        for count in (1, -1, 7):
            with pytest.raises(BlockStateError):
                block.ref_cnt = count
    used = pool.get_new_blocks(1)[0]
    with pytest.raises(BlockStateError):
        used.ref_cnt = -1
    assert used.ref_cnt == 1
    pool.free_blocks([used])
    assert state_of(pool) == before


# Hashes


def test_a_hash_is_set_once_and_can_be_reset(make_pool: Any, backend: Any) -> None:
    for block in (make_pool(3).blocks[1], backend.KVCacheBlock(1)):
        block.set_block_hash(KEY)
        assert (block.block_hash, block.block_hash_num_tokens) == (KEY, None)
        for key in (KEY, OTHER_KEY):
            with pytest.raises(AssertionError) as raised:
                block.set_block_hash(key, 8)
            assert type(raised.value) is BlockStateError
        assert (block.block_hash, block.block_hash_num_tokens) == (KEY, None)
        block.reset_hash()
        assert (block.block_hash, block.block_hash_num_tokens) == (None, None)
        block.reset_hash()
        block.set_block_hash(OTHER_KEY, num_tokens=12)
        assert (block.block_hash, block.block_hash_num_tokens) == (OTHER_KEY, 12)
        assert (block._block_hash, block._block_hash_num_tokens) == (OTHER_KEY, 12)


def test_what_is_no_hash(make_pool: Any, backend: Any) -> None:
    for block in (make_pool(3).blocks[1], backend.KVCacheBlock(1)):
        for key, error in ((b"\0" * 37, InvalidArgumentError), (b"abc", InvalidArgumentError), ("abcd", TypeError)):
            with pytest.raises(error):
                block.set_block_hash(key)
        assert block.block_hash is None


def test_the_null_block_never_has_a_hash(make_pool: Any) -> None:
    pool = make_pool(3)
    with pytest.raises(BlockStateError):
        pool.null_block.set_block_hash(KEY)
    assert pool.null_block.block_hash is None


def test_a_hash_that_is_reset_by_hand_leaves_the_map(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(4))
    blocks = pool.get_new_blocks(2)
    for block in blocks:
        pool.cache_full_blocks(request, [block], 0, 1, 4, 0)
    blocks[0].reset_hash()
    pool.check()
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [blocks[1]]
    blocks[1].reset_hash()
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
