"""Block tables as lists of ints: the native calls and those over id arrays do the same, and refuse the same."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import BACKEND_NAMES, make_backend

import kvpool
from kvpool import BlockStateError, KvpoolError, NoFreeBlocksError, backend
from kvpool.backend import BlockHasher
from kvpool.pool import list_tables as operations

SIZE = 4  # tokens a block
NUM_STEPS = 150
CALLS = {"native": backend, "reference": operations}


@pytest.fixture
def hasher() -> BlockHasher:
    return BlockHasher("sha256", SIZE, "seed")


@pytest.fixture
def calls(backend: SimpleNamespace) -> Any:
    return CALLS[backend.name]


def state(pool: Any) -> list[Any]:
    """All that a caller can tell of a pool."""
    return [
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
    ]


def test_a_table_is_a_new_list_of_ints(make_pool: Any, calls: Any) -> None:
    pool = make_pool(600)
    for n in (0, 1, 3, 555):
        table = calls.allocate_table(pool, n)
        assert type(table) is list and len(table) == n and {type(block_id) for block_id in table} <= {int}
        assert [pool.blocks[block_id].ref_cnt for block_id in table] == [1] * n
        calls.touch_table(pool, table)
        calls.free_table(pool, table)
        calls.free_table(pool, table)
        assert pool.get_num_free_blocks() == 599


def test_the_last_block_is_reused_first(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    pool = make_pool(6)
    table = calls.allocate_table(pool, 4)
    calls.cache_completed_blocks(pool, hasher, table, list(range(16)), 4)
    calls.free_table(pool, table)
    calls.allocate_table(pool, 3)  # the fifth block, which nobody had, then blocks 4 and 3 of the table
    assert calls.find_prefix_of_tokens(pool, hasher, list(range(16)), 4) == table[:2]
    assert pool.stats.evictions == 2


def test_a_prefix_is_found_up_to_the_first_miss(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    pool = make_pool(20)
    tokens = list(range(18))
    table = calls.allocate_table(pool, 5)
    calls.cache_completed_blocks(pool, hasher, table, tokens, 1)
    assert calls.find_prefix_of_tokens(pool, hasher, tokens, 9) == table[:1]
    calls.cache_completed_blocks(pool, hasher, table, tokens, 9)  # the fifth has two tokens
    assert calls.find_prefix_of_tokens(pool, hasher, tokens, 9) == table[:4]
    assert calls.find_prefix_of_tokens(pool, hasher, tokens, 2) == table[:2]
    assert calls.find_prefix_of_tokens(pool, hasher, [*tokens[:9], 77, 10, 11], 9) == table[:2]
    assert calls.find_prefix_of_tokens(pool, hasher, tokens[:3], 9) == []
    assert calls.find_prefix_of_tokens(pool, hasher, tokens[1:], 9) == []


def test_a_block_gives_way_to_its_twin(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    pool = make_pool(20)
    first, second = calls.allocate_table(pool, 3), calls.allocate_table(pool, 3)
    calls.cache_completed_blocks(pool, hasher, first, list(range(12)), 2)
    given_back = second[:2]
    calls.cache_completed_blocks(pool, hasher, second, list(range(12)), 3)
    assert second[:2] == first[:2] and second[2] != first[2]
    assert [pool.blocks[block_id].ref_cnt for block_id in second] == [2, 2, 1]
    assert [pool.blocks[block_id].ref_cnt for block_id in given_back] == [0, 0]
    calls.free_table(pool, first)
    calls.free_table(pool, second)
    assert pool.get_num_free_blocks() == 19


@pytest.mark.parametrize("size", [1, 16, 256, 300, 9000])
def test_blocks_of_all_sizes(make_pool: Any, calls: Any, size: int) -> None:
    pool, hasher = make_pool(9), BlockHasher("sha256", size, "seed")
    tokens = list(range(3 * size))
    table = calls.allocate_table(pool, 3)
    calls.cache_completed_blocks(pool, hasher, table, tokens, 3)
    assert calls.find_prefix_of_tokens(pool, hasher, tokens, 3) == table
    expected = hasher.hash_token_ids(tokens)
    assert [kvpool.get_block_hash(pool.blocks[block_id].block_hash) for block_id in table] == expected


def test_tokens_that_are_no_plain_ints(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    import numpy as np

    pool = make_pool(9)
    table = calls.allocate_table(pool, 2)
    calls.cache_completed_blocks(pool, hasher, table, list(np.arange(8)), 2)
    assert calls.find_prefix_of_tokens(pool, hasher, [False, True, *range(2, 8)], 2) == table


def test_a_list_that_shrinks_meanwhile(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    class Shrinks:
        def __index__(self) -> int:
            del tokens[4:], table[1:]
            return 0

    pool = make_pool(9)
    table = calls.allocate_table(pool, 3)
    lost = table[1:]
    tokens: list[Any] = [Shrinks(), *range(1, 12)]
    calls.cache_completed_blocks(pool, hasher, table, tokens, 1)
    calls.find_prefix_of_tokens(pool, hasher, tokens, 3)
    calls.free_table(pool, [*table, *lost])
    assert pool.get_num_free_blocks() == 8


@pytest.mark.parametrize("bad", [[3, 3], [2], [1, 2], [9], [-1], [2**40], [-(2**70)]])
def test_what_is_not_in_use_cannot_be_freed(make_pool: Any, calls: Any, bad: list[int]) -> None:
    pool = make_pool(9)
    for block_id in calls.allocate_table(pool, 3):
        if block_id == 2:
            calls.free_table(pool, [2])
    before = state(pool)
    with pytest.raises((BlockStateError, OverflowError)):
        calls.free_table(pool, bad)
    assert state(pool) == before


@pytest.mark.parametrize("bad", [[1, 9], [1, -1], [1, 2**40]])
def test_what_is_no_block_cannot_be_touched(make_pool: Any, calls: Any, bad: list[int]) -> None:
    pool = make_pool(9)
    before = state(pool)
    with pytest.raises((BlockStateError, OverflowError)):
        calls.touch_table(pool, bad)
    assert state(pool) == before


def test_a_table_holds_ints(make_pool: Any, calls: Any) -> None:
    pool = make_pool(9)
    table = calls.allocate_table(pool, 2)
    for call in (calls.free_table, calls.touch_table):
        with pytest.raises(TypeError):
            call(pool, [table[0], "1"])
    assert [pool.blocks[block_id].ref_cnt for block_id in table] == [1, 1]


def test_too_few_blocks(make_pool: Any, calls: Any) -> None:
    pool = make_pool(4)
    calls.allocate_table(pool, 1)
    with pytest.raises(NoFreeBlocksError):
        calls.allocate_table(pool, 3)
    assert pool.get_num_free_blocks() == 2


def test_the_null_block_stays(make_pool: Any, calls: Any) -> None:
    pool = make_pool(4)
    calls.touch_table(pool, [0, 1])
    calls.free_table(pool, [0, 1])
    assert pool.null_block.ref_cnt == 0 and pool.get_num_free_blocks() == 3


def test_a_lenient_pool_skips_and_counts(make_pool: Any, calls: Any) -> None:
    pool = make_pool(9, on_invalid_free="warn")
    table = calls.allocate_table(pool, 2)
    calls.free_table(pool, [*table, table[0]])
    assert pool.stats.invalid_frees == 1 and pool.get_num_free_blocks() == 8


def test_who_observes_a_pool_sees_it(make_pool: Any, calls: Any, hasher: BlockHasher) -> None:
    seen: list[tuple[str, int]] = []
    collector = SimpleNamespace(
        on_block_allocated=lambda block: seen.append(("new", block.block_id)),
        on_block_accessed=lambda block: seen.append(("touch", block.block_id)),
        on_block_evicted=lambda block: None,
    )
    pool = make_pool(9, metrics_collector=collector)
    table = calls.allocate_table(pool, 2)
    calls.touch_table(pool, table)
    assert seen == [(word, block_id) for word in ("new", "touch") for block_id in table]
    pool.enable_kv_cache_events = True
    with pytest.raises(KvpoolError):
        calls.cache_completed_blocks(pool, hasher, table, list(range(8)), 2)


@pytest.mark.skipif(len(BACKEND_NAMES) < 2, reason="there is one backend")
@pytest.mark.parametrize("seed", range(30))
def test_both_do_the_same(seed: int, hasher: BlockHasher) -> None:
    rng = random.Random(seed)
    num_blocks = 12 if seed % 2 else 40
    pools = {name: make_backend(name).BlockPool(num_blocks, True, SIZE) for name in BACKEND_NAMES}
    requests: dict[str, list[tuple[list[int], list[int]]]] = {name: [] for name in BACKEND_NAMES}
    for _ in range(NUM_STEPS):
        word, place = rng.choice("nngcf"), rng.random()
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        results = {}
        for name, pool in pools.items():
            results[name] = play(CALLS[name], pool, hasher, requests[name], word, place, tokens)
            pool.check()
        assert results["native"] == results["reference"]
        assert requests["native"] == requests["reference"]
        assert state(pools["native"]) == state(pools["reference"])
    assert pools["native"].stats.evictions == pools["reference"].stats.evictions > 0


def play(calls: Any, pool: Any, hasher: Any, requests: list[Any], word: str, place: float, tokens: list[int]) -> Any:
    """One random operation, decided before, so that it is the same for every backend."""
    if word == "n":
        found = calls.find_prefix_of_tokens(pool, hasher, tokens, (len(tokens) - 1) // SIZE)
        calls.touch_table(pool, found)
        num_new = -(-len(tokens) // SIZE) - len(found)
        if num_new > pool.get_num_free_blocks():
            calls.free_table(pool, found)
            return found
        requests.append((found + calls.allocate_table(pool, num_new), list(tokens)))
        return found
    if not requests:
        return None
    table, known = requests[int(place * len(requests))]
    if word == "f":
        requests.remove((table, known))
        calls.free_table(pool, table)
    elif word == "g":
        missing = -(-(len(known) + len(tokens)) // SIZE) - len(table)
        if missing <= pool.get_num_free_blocks():
            table += calls.allocate_table(pool, missing)
            known += tokens
    else:
        calls.cache_completed_blocks(pool, hasher, table, known, 1 + int(place * 4))
    return list(table)
