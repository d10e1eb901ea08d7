"""BlockHashToBlockMap on its own over hand-made blocks and as the prefix map of a pool, and the lookups of a pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pool_state import block_ids, state_of
from token_requests import lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.hashing.block_hash import get_block_hash, get_group_id, make_block_hash_with_group_id

DIGEST = bytes(range(32))
KEY = lookup_key(DIGEST)


@pytest.fixture
def prefix_map(backend: Any) -> Any:
    return backend.BlockHashToBlockMap()


# On its own


def test_an_empty_map(prefix_map: Any) -> None:
    assert len(prefix_map) == 0
    assert prefix_map.get_one_block(KEY) is None
    assert prefix_map.contain(KEY, 1) is False
    assert prefix_map.pop(KEY, 1) is None


def test_one_block_of_a_key(prefix_map: Any, backend: Any) -> None:
    block = backend.KVCacheBlock(10)
    prefix_map.insert(KEY, block)
    assert prefix_map.get_one_block(KEY) is block
    assert prefix_map.contain(KEY, 10) and not prefix_map.contain(KEY, 11)
    assert prefix_map.get_one_block(lookup_key(DIGEST, 1)) is None
    assert prefix_map.pop(KEY, 11) is None
    assert prefix_map.get_one_block(KEY) is block and len(prefix_map) == 1
    assert prefix_map.pop(KEY, 10) is block
    assert prefix_map.get_one_block(KEY) is None and len(prefix_map) == 0
    assert prefix_map.pop(KEY, 10) is None


def test_the_same_block_twice_is_one_entry(prefix_map: Any, backend: Any) -> None:
    block = backend.KVCacheBlock(10)
    prefix_map.insert(KEY, block)
    prefix_map.insert(KEY, block)
    assert len(prefix_map) == 1
    assert prefix_map.pop(KEY, 10) is block
    assert prefix_map.get_one_block(KEY) is None and len(prefix_map) == 0


def test_blocks_of_a_key_are_found_in_insertion_order(prefix_map: Any, backend: Any) -> None:
    blocks = {i: backend.KVCacheBlock(i) for i in (7, 3, 9, 1)}
    for block in blocks.values():
        prefix_map.insert(KEY, block)
    assert len(prefix_map) == 1
    assert prefix_map.get_one_block(KEY) is blocks[7]
    prefix_map.insert(KEY, blocks[3])  # does not move it
    assert prefix_map.pop(KEY, 8) is None
    assert prefix_map.pop(KEY, 3) is blocks[3]
    assert prefix_map.get_one_block(KEY) is blocks[7]
    assert prefix_map.pop(KEY, 7) is blocks[7]
    assert prefix_map.get_one_block(KEY) is blocks[9]
    prefix_map.insert(KEY, blocks[7])
    assert prefix_map.pop(KEY, 9) is blocks[9]
    assert prefix_map.get_one_block(KEY) is blocks[1]
    assert prefix_map.pop(KEY, 1) is blocks[1]
    assert prefix_map.get_one_block(KEY) is blocks[7]
    assert len(prefix_map) == 1


def test_many_blocks_of_one_key(prefix_map: Any, backend: Any) -> None:
    blocks = [backend.KVCacheBlock(i) for i in range(500)]
    for block in blocks:
        prefix_map.insert(KEY, block)
    order = list(range(500))
    random.Random(3).shuffle(order)
    left = dict.fromkeys(range(500))
    for i in order:
        assert prefix_map.get_one_block(KEY) is blocks[next(iter(left))]
        assert prefix_map.contain(KEY, i)
        assert prefix_map.pop(KEY, i) is blocks[i]
        assert not prefix_map.contain(KEY, i)
        del left[i]
    assert prefix_map.get_one_block(KEY) is None and len(prefix_map) == 0


def test_random_churn_equals_a_dict(prefix_map: Any, backend: Any) -> None:
    """Insertions and removals at every load, so that probe runs wrap, grow and close again."""
    rng = random.Random(9)
    blocks = [backend.KVCacheBlock(i) for i in range(40)]
    keys = [lookup_key(rng.randbytes(rng.randint(0, 32)), rng.choice([0, 1, 2**32 - 1])) for _ in range(300)]
    expected: dict[bytes, dict[int, Any]] = {}
    for step in range(12_000):
        key, block = rng.choice(keys), rng.choice(blocks)
        if rng.random() < (0.7 if step // 3000 % 2 == 0 else 0.3):
            prefix_map.insert(key, block)
            expected.setdefault(key, {}).setdefault(block.block_id, block)
        else:
            assert prefix_map.pop(key, block.block_id) is expected.get(key, {}).pop(block.block_id, None)
            if not expected.get(key, True):
                del expected[key]
        assert len(prefix_map) == len(expected)
        asked = rng.choice(keys)
        first = next(iter(expected.get(asked, {}).values()), None)
        assert prefix_map.get_one_block(asked) is first
        assert prefix_map.contain(asked, 5) == (5 in expected.get(asked, {}))
    for key in keys:
        assert prefix_map.get_one_block(key) is next(iter(expected.get(key, {}).values()), None)


def test_length_and_padding_of_a_digest_belong_to_the_key(prefix_map: Any, backend: Any) -> None:
    keys = [lookup_key(b"\0" * n, group) for n in range(33) for group in (0, 1, 256, 2**31, 2**32 - 1)]
    assert len(set(keys)) == 165
    for i, key in enumerate(keys):
        assert prefix_map.get_one_block(key) is None
        prefix_map.insert(key, backend.KVCacheBlock(i))
    assert [prefix_map.get_one_block(key).block_id for key in keys] == list(range(165))
    assert len(prefix_map) == 165


@pytest.mark.parametrize(
    "key, error",
    [
        (b"\0" * 37, InvalidArgumentError),
        (b"\0" * 3, InvalidArgumentError),
        (b"", InvalidArgumentError),
        ("text", TypeError),
        (bytearray(36), TypeError),
        (None, TypeError),
        (12, TypeError),
    ],
)
def test_what_is_no_key(prefix_map: Any, backend: Any, key: Any, error: type[Exception]) -> None:
    for refused in (
        lambda: prefix_map.get_one_block(key),
        lambda: prefix_map.contain(key, 1),
        lambda: prefix_map.insert(key, backend.KVCacheBlock(1)),
        lambda: prefix_map.pop(key, 1),
    ):
        with pytest.raises(error):
            refused()
    assert len(prefix_map) == 0


def test_only_blocks_are_mapped(prefix_map: Any) -> None:
    with pytest.raises(TypeError):
        prefix_map.insert(KEY, 5)
    assert len(prefix_map) == 0


def test_group_ids_are_four_bytes_big_endian() -> None:
    assert make_block_hash_with_group_id(b"ab", 0x01020304) == b"ab\x01\x02\x03\x04"
    assert make_block_hash_with_group_id(b"", 2**32 - 1) == b"\xff\xff\xff\xff"
    key = make_block_hash_with_group_id(DIGEST, 70_000)
    assert get_block_hash(key) == DIGEST and get_group_id(key) == 70_000
    for group_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            make_block_hash_with_group_id(DIGEST, group_id)


# Of a pool


def cache(pool: Any, request: Any, blocks: list[Any], group_id: int = 0) -> None:
    pool.cache_full_blocks(request, blocks, 0, len(blocks), pool.hash_block_size, group_id)


def test_no_stale_hash_after_eviction(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(3)
    request, another = make_request(range(8)), make_request(range(50, 58))
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks)
    pool.free_blocks(blocks)
    again = pool.get_new_blocks(2)
    assert set(again) == set(blocks)
    assert [(block.block_hash, block.block_hash_num_tokens) for block in again] == [(None, None)] * 2
    assert len(pool.cached_block_hash_to_block) == 0
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    cache(pool, another, again)
    assert pool.get_cached_block(another.block_hashes[1], [0]) == [again[1]]
    assert len(pool.cached_block_hash_to_block) == 2


def test_the_first_copy_is_found_until_it_is_evicted(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    request = make_request(range(4))
    one, two = pool.get_new_blocks(2)
    cache(pool, request, [one])
    cache(pool, make_request(range(4)), [two])
    assert one.block_hash == two.block_hash == lookup_key(request.block_hashes[0])
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [one]
    assert len(pool.cached_block_hash_to_block) == 1
    pool.free_blocks([one])
    pool.get_new_blocks(4)
    assert one.block_hash is None
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [two]
    pool.evict_blocks([two.block_id])
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert len(pool.cached_block_hash_to_block) == 0


def test_hundreds_of_copies_of_one_prefix(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(301)
    request = make_request(range(4))
    digest = request.block_hashes[0]
    blocks = pool.get_new_blocks(300)
    for block in blocks:
        cache(pool, request, [block])
    assert len(pool.cached_block_hash_to_block) == 1
    pool.free_blocks(blocks)
    for i in range(1, 301):
        assert block_ids(pool.get_cached_block(digest, [0])) == [i]
        pool.get_new_blocks(1)
        if i % 60 == 0:
            pool.check()
    assert pool.get_cached_block(digest, [0]) is None
    assert pool.stats.evictions == 300


def test_all_groups_must_hit(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(6)
    request = make_request(range(4))
    digest = request.block_hashes[0]
    one, two = pool.get_new_blocks(2)
    cache(pool, request, [one], group_id=3)
    cache(pool, request, [two], group_id=0)
    assert pool.get_cached_block(digest, [0, 3]) == [two, one]
    assert pool.get_cached_block(digest, [3, 0]) == [one, two]
    assert pool.get_cached_block(digest, [0, 1]) is None
    assert pool.get_cached_block(digest, []) == []
    for group_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            pool.get_cached_block(digest, [group_id])


def test_a_lookup_takes_nothing(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(4))
    blocks = pool.get_new_blocks(1)
    cache(pool, request, blocks)
    pool.free_blocks(blocks)
    before = state_of(pool)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks
    assert pool.find_prefix_ids(request.block_hashes).tolist() == [1]
    assert state_of(pool) == before


def test_digests_up_to_32_bytes(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(40)
    request = make_request([])
    request.block_hashes = [b"\0" * n for n in range(33)]
    blocks = pool.get_new_blocks(33)
    cache(pool, request, blocks)
    assert pool.find_prefix_ids(request.block_hashes).tolist() == block_ids(blocks)
    with pytest.raises(InvalidArgumentError):
        pool.get_cached_block(b"\0" * 33, [0])
    for digest in ("text", None, 5):
        with pytest.raises(TypeError):
            pool.get_cached_block(digest, [0])


def test_the_map_of_a_pool_changes_the_pool(make_pool: Any) -> None:
    pool = make_pool(4)
    prefix_map = pool.cached_block_hash_to_block
    block, other_key = pool.blocks[2], lookup_key(DIGEST, 1)
    block.set_block_hash(KEY, 4)
    assert prefix_map.get_one_block(KEY) is None
    prefix_map.insert(KEY, block)
    prefix_map.insert(other_key, block)
    pool.check()
    assert prefix_map.get_one_block(KEY) is block and prefix_map.get_one_block(other_key) is block
    assert pool.cached_block_hashes_by_block[2] == {other_key}
    assert prefix_map.pop(KEY, 1) is None
    assert prefix_map.pop(KEY, 2) is block
    assert (block.block_hash, block.block_hash_num_tokens) == (KEY, 4)
    assert prefix_map.pop(other_key, 2) is block
    assert 2 not in pool.cached_block_hashes_by_block
    assert len(prefix_map) == 0
    prefix_map.insert(KEY, block)
    block.reset_hash()
    assert prefix_map.get_one_block(KEY) is None and block.block_hash is None


def test_an_inserted_key_leaves_with_the_block_it_leads_to(make_pool: Any) -> None:
    pool = make_pool(3)
    prefix_map = pool.cached_block_hash_to_block
    prefix_map.insert(KEY, pool.blocks[1])
    assert pool.blocks[1].block_hash is None
    assert pool.num_evictable_blocks == 1
    assert block_ids(pool.get_new_blocks(1)) == [1]
    assert prefix_map.get_one_block(KEY) is None and len(prefix_map) == 0
    assert pool.stats.evictions == 1


def test_what_the_map_of_a_pool_refuses(make_pool: Any, backend: Any) -> None:
    pool, other = make_pool(4), make_pool(4)
    before = state_of(pool)
    for block in (pool.null_block, other.blocks[1], backend.KVCacheBlock(1)):
        with pytest.raises(BlockStateError):
            pool.cached_block_hash_to_block.insert(KEY, block)
    assert state_of(pool) == before
