"""Managers of one KV cache group, on scenarios computed by hand. Blocks have 4 tokens unless said; a pool hands its
blocks out as 1, 2, 3, ..; 0 is the null block."""

from __future__ import annotations

from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of
from token_requests import TokenRequest, chained_digests

from kvpool.cache.managers import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from kvpool.cache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize

NUMBERS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float16"}
FULL = FullAttentionSpec(4, **NUMBERS)
CROSS = CrossAttentionSpec(4, **NUMBERS)


def window(num_tokens: int, **more: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(4, sliding_window=num_tokens, **more, **NUMBERS)


def local(num_tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(4, attention_chunk_size=num_tokens, **NUMBERS)


def mamba(mode: str = "align", **more: int) -> MambaSpec:
    return MambaSpec(4, shapes=((2,),), dtypes=("float32",), mamba_cache_mode=mode, **more)


def make_manager(spec: KVCacheSpec, pool: Any, **more: Any) -> Any:
    defaults = {"enable_caching": pool.enable_caching, "kv_cache_group_id": 0, "scheduler_block_size": spec.block_size}
    return get_manager_for_kv_cache_spec(spec, 8, 100, block_pool=pool, **{**defaults, **more})


def make_request(name: str, token_ids: Any, hash_block_size: int = 4, **more: Any) -> Any:
    token_ids = range(token_ids) if isinstance(token_ids, int) else token_ids
    request = TokenRequest(list(token_ids), hash_block_size, request_id=name, **more)
    request.num_prompt_tokens = len(request.all_token_ids)
    request.num_computed_tokens = 0
    return request


def append_tokens(request: Any, *token_ids: int, hash_block_size: int = 4) -> None:
    request.all_token_ids += token_ids
    request.block_hashes = chained_digests(request.all_token_ids, hash_block_size)


def count(
    manager: Any, name: str, num_tokens: int, hits: Any = (), local: int = 0, external: int = 0, **more: Any
) -> int:
    return int(
        manager.get_num_blocks_to_allocate(name, num_tokens, list(hits), local + external, local, num_tokens, **more)
    )


def allocate(manager: Any, name: str, num_tokens: int) -> list[int] | None:
    return block_ids(manager.allocate_new_blocks(name, num_tokens, num_tokens))


def table(manager: Any, name: str) -> list[int] | None:
    return block_ids(manager.req_to_blocks.get(name, []))


def cache(manager: Any, request: Any, num_tokens: int | None = None, interval: int | None = None) -> None:
    num_tokens = len(request.all_token_ids) if num_tokens is None else num_tokens
    boundaries = (request.num_prompt_tokens - 1,)
    manager.cache_blocks(request, num_tokens, retention_interval=interval, replay_boundaries=boundaries)


def find(manager: Any, request: Any, max_length: int, drop: bool = False, alignment: int | None = None) -> Any:
    (hits,), length = manager.find_longest_cache_hit(
        block_hashes=request.block_hashes,
        max_length=max_length,
        kv_cache_group_ids=[manager.kv_cache_group_id],
        block_pool=manager.block_pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=drop,
        alignment_tokens=manager.block_size if alignment is None else alignment,
    )
    return hits, length


def found(*arguments: Any, **more: Any) -> tuple[list[int] | None, int]:
    hits, length = find(*arguments, **more)
    return block_ids(hits), length


def run_once(manager: Any, request: Any) -> list[int] | None:
    """A whole prompt in one step; the request ends, what it cached stays. Returns its blocks."""
    num_tokens = len(request.all_token_ids)
    allocate(manager, request.request_id, num_tokens)
    cache(manager, request)
    blocks = table(manager, request.request_id)
    manager.free(request.request_id)
    return blocks


# What all types have in common, on full attention


def test_slots_are_given_block_by_block(make_pool: Any) -> None:
    manager = make_manager(FULL, make_pool(10))
    assert count(manager, "a", 10) == 3
    assert allocate(manager, "a", 10) == [1, 2, 3]
    assert count(manager, "a", 12) == 0 and allocate(manager, "a", 12) == []
    assert count(manager, "a", 13) == 1 and allocate(manager, "a", 13) == [4]
    assert count(manager, "a", 5) == 0 and allocate(manager, "a", 5) == []  # draft tokens were rejected
    assert table(manager, "a") == [1, 2, 3, 4]
    assert count(manager, "b", 0) == 0 and allocate(manager, "b", 0) == []


def test_blocks_come_back_last_first(make_pool: Any) -> None:
    pool = make_pool(6)
    manager = make_manager(FULL, pool)
    request = make_request("a", 12)
    allocate(manager, "a", 12)
    cache(manager, request)
    manager.free("a")
    assert free_ids(pool) == [4, 5, 3, 2, 1]
    assert manager.req_to_blocks == {} and manager.num_cached_block == {}
    manager.free("a")
    manager.free("never seen")
    assert manager.pop_blocks_for_free("never seen") == []
    assert pool.get_num_free_blocks() == 5 and manager.req_to_blocks == {}


def test_a_hit_starts_the_table(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(FULL, pool)
    run_once(manager, make_request("a", 12))
    request = make_request("b", 14)
    hits, length = find(manager, request, 13)
    assert (block_ids(hits), length) == ([1, 2, 3], 12)
    # One new block, and three that leave the free list.
    assert count(manager, "b", 14, hits, 12) == 4
    manager.add_local_computed_blocks("b", hits, 12, 0)
    assert table(manager, "b") == [1, 2, 3] and manager.num_cached_block == {"b": 3}
    assert allocate(manager, "b", 14) == [4]
    assert [block.ref_cnt for block in hits] == [1, 1, 1]
    # A third request shares the blocks: none of them is free now.
    assert count(manager, "c", 14, hits, 12) == 1
    for misuse in (
        lambda: manager.add_local_computed_blocks("b", hits, 12, 0),
        lambda: count(manager, "b", 14, hits, 12),
    ):
        with pytest.raises(InvalidArgumentError, match="'b'"):
            misuse()
    assert [block.ref_cnt for block in hits] == [1, 1, 1]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(12, ([1, 2], 8)), (13, ([1, 2, 3], 12)), (11, ([1, 2], 8)), (4, ([], 0)), (3, ([], 0))],
)
def test_a_token_is_left_to_compute(make_pool: Any, num_tokens: int, expected: Any) -> None:
    manager = make_manager(FULL, make_pool(10))
    run_once(manager, make_request("a", 12))
    assert found(manager, make_request("b", num_tokens), num_tokens - 1) == expected


def test_hits_end_where_they_may(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(FULL, pool)
    request = make_request("a", 20)
    run_once(manager, request)
    assert found(manager, request, 20) == ([1, 2, 3, 4, 5], 20)
    assert found(manager, request, 20, alignment=8) == ([1, 2, 3, 4], 16)
    assert found(manager, request, 20, drop=True) == ([1, 2, 3, 4], 16)
    assert found(manager, request, 20, drop=True, alignment=8) == ([1, 2, 3, 4], 16)
    assert found(manager, request, 19, drop=True, alignment=8) == ([1, 2], 8)
    assert found(manager, request, 3, drop=True) == ([], 0)
    assert found(manager, request, 0) == found(manager, request, -1) == ([], 0)
    pool.evict_blocks([3])
    assert found(manager, request, 20) == ([1, 2], 8)
    pool.evict_blocks([1])
    assert found(manager, request, 20) == ([], 0)


def test_groups_are_hit_together(make_pool: Any) -> None:
    pool = make_pool(10)
    request = make_request("a", 8)
    for group_id in (0, 1):
        run_once(make_manager(FULL, pool, kv_cache_group_id=group_id), request)
    arguments = (request.block_hashes, 8, [1, 0], pool, FULL, False, 4)
    tables, length = FullAttentionManager.find_longest_cache_hit(*arguments)
    assert ([block_ids(blocks) for blocks in tables], length) == ([[3, 4], [1, 2]], 8)
    pool.evict_blocks([2])
    tables, length = FullAttentionManager.find_longest_cache_hit(*arguments)
    assert ([block_ids(blocks) for blocks in tables], length) == ([[3], [1]], 4)


def test_without_caching_there_are_no_hits(make_pool: Any) -> None:
    pool = make_pool(10, False)
    manager = make_manager(FULL, pool)
    blocks = pool.get_new_blocks(2)
    with pytest.raises(AssertionError, match="Computed blocks should be empty when prefix caching is disabled"):
        manager.add_local_computed_blocks("a", blocks, 8, 0)
    assert table(manager, "a") == [] and blocks[0].ref_cnt == 1
    manager.add_local_computed_blocks("a", [], 0, 0)
    assert "a" in manager.num_cached_block


def test_a_failed_allocation_changes_nothing(make_pool: Any) -> None:
    pool = make_pool(5)
    manager = make_manager(FULL, pool)
    allocate(manager, "a", 8)
    before = state_of(pool), table(manager, "a"), dict(manager.num_cached_block)
    for name in ("a", "b"):
        with pytest.raises(NoFreeBlocksError):
            allocate(manager, name, 20)
        with pytest.raises(NoFreeBlocksError):
            manager.allocate_external_computed_blocks(name, 0, 20)
    assert (state_of(pool), table(manager, "a"), dict(manager.num_cached_block)) == before
    assert list(manager.req_to_blocks) == ["a"]


def test_external_tokens_get_blocks(make_pool: Any) -> None:
    pool = make_pool(12)
    manager = make_manager(FULL, pool, needs_kv_cache_zeroing=True)
    run_once(manager, make_request("a", 8))
    assert manager.take_new_block_ids() == [1, 2] and manager.take_new_block_ids() == []
    hits, length = find(manager, make_request("b", 30), 29)
    assert count(manager, "b", 25, hits, length, 12) == 7
    manager.add_local_computed_blocks("b", hits, 8, 12)
    manager.allocate_external_computed_blocks("b", 8, 12)
    assert table(manager, "b") == [1, 2, 3, 4, 5]
    assert allocate(manager, "b", 25) == [6, 7]
    assert manager.records_new_block_ids and manager.take_new_block_ids() == [3, 4, 5, 6, 7]
    manager.allocate_external_computed_blocks("c", 0, 4, record_for_zeroing=False)
    manager.allocate_external_computed_blocks("c", 0, 0)
    assert table(manager, "c") == [8] and manager.take_new_block_ids() == []


def test_only_full_blocks_are_cached_and_only_once(make_pool: Any) -> None:
    pool = make_pool(10, True, 4, True)
    manager = make_manager(FULL, pool)
    request = make_request("a", 10)
    allocate(manager, "a", 10)
    cache(manager, request)
    assert manager.num_cached_block == {"a": 2} and len(pool.take_events()) == 1
    cache(manager, request)
    cache(manager, request, 5)
    assert manager.num_cached_block == {"a": 2} and pool.take_events() == []
    append_tokens(request, 50, 51)
    cache(manager, request)
    (event,) = pool.take_events()
    assert manager.num_cached_block == {"a": 3} and event.token_ids == [8, 9, 50, 51]


def test_an_id_can_be_used_again(make_pool: Any) -> None:
    manager = make_manager(FULL, make_pool(10))
    run_once(manager, make_request("a", 8))
    other = make_request("a", range(50, 58))
    assert run_once(manager, other) == [3, 4]
    assert found(manager, other, 8) == ([3, 4], 8)


def test_context_parallelism_is_refused(make_pool: Any) -> None:
    pool = make_pool(4)
    for spec in (FULL, window(4), local(4), mamba(), CROSS):
        for more in ({"dcp_world_size": 2}, {"pcp_world_size": 2}):
            with pytest.raises(InvalidArgumentError, match="context parallelism"):
                make_manager(spec, pool, **more)
            if spec is not CROSS:
                with pytest.raises(InvalidArgumentError, match="context parallelism"):
                    type(make_manager(spec, pool)).find_longest_cache_hit([], 4, [0], pool, spec, False, 4, **more)


def test_what_is_not_offered_is_empty(make_pool: Any) -> None:
    manager = make_manager(mamba(), make_pool(4))
    assert manager.take_pending_boundary_state_offloads() == []
    assert manager.finalize_partial_tail_offload("a", 4, 0) is None
    assert manager.take_pending_cow_copies() == [] and manager.take_new_block_ids() == []


# Full attention with hashes finer than blocks


def fine_pool(make_pool: Any, num_blocks: int = 10, **more: Any) -> Any:
    return make_pool(num_blocks, True, 2, True, **more)


def test_a_hit_inside_a_block_is_continued_in_a_copy(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(FULL, pool)
    first = make_request("a", 7, 2)
    allocate(manager, "a", 7)
    cache(manager, first)  # 4 tokens as a block, 6 as a part of the second
    assert pool.blocks[2].block_hash_num_tokens == 6

    second = make_request("b", 9, 2)
    hits, length = find(manager, second, 8, alignment=2)
    assert (block_ids(hits), length) == ([1, 2], 6)
    assert count(manager, "b", 9, hits, 6) == 2  # the copy, and the third block
    manager.add_local_computed_blocks("b", hits, 6, 0)
    assert manager.num_cached_block["b"] == 1
    assert allocate(manager, "b", 9) == [3, 4]
    assert table(manager, "b") == [1, 3, 4]
    ((source, copy),) = manager.take_pending_cow_copies()
    assert (source.block_id, source.ref_cnt, copy.block_id, copy.ref_cnt) == (2, 2, 3, 2)
    assert manager.take_new_block_ids() == [3] and manager.take_pending_cow_copies() == []
    assert allocate(manager, "b", 12) == []
    cache(manager, second)
    assert found(manager, second, 8, alignment=2) == ([1, 3], 8)

    manager.free("a")
    manager.free("b")
    assert pool.get_num_free_blocks() == 7  # the two sides of the copy are held
    pool.free_blocks([source, copy])
    assert pool.get_num_free_blocks() == 9


def test_a_request_that_ends_before_its_copy_is_made_leaves_nothing(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(FULL, pool)
    request = make_request("a", 7, 2)
    run_once(manager, request)
    hits, length = find(manager, request, 6, alignment=2)
    manager.add_local_computed_blocks("b", hits, length, 0)
    manager.free("b")
    assert allocate(manager, "b", 4) == [3]
    assert manager.take_pending_cow_copies() == []


def test_the_longest_part_of_a_block_is_hit(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(FullAttentionSpec(8, **NUMBERS), pool)
    request = make_request("a", 16, 2)
    allocate(manager, "a", 16)
    cache(manager, request, 8)
    for num_tokens in (10, 14):
        pool.cache_partial_block(request, pool.blocks[2], num_tokens, 0, 8)
    assert found(manager, request, 15, alignment=2) == ([1, 2], 14)
    assert found(manager, request, 13, alignment=2) == ([1], 8)  # 14 took the place of 10
    assert found(manager, request, 15, alignment=2, drop=True) == ([1, 2], 12)
    assert found(manager, request, 15, alignment=8) == ([1], 8)
    assert found(manager, request, 9, alignment=2, drop=True) == ([1], 6)


@pytest.mark.parametrize(
    ("num_tokens", "use_eagle", "boundary"),
    [
        (8, False, 6),
        (7, False, 6),
        (6, False, None),
        (5, False, None),
        (8, True, None),
        (7, True, 6),
        (2, False, None),
        (3, False, 2),
    ],
)
def test_the_end_of_a_prompt_is_cached(make_pool: Any, num_tokens: int, use_eagle: bool, boundary: int | None) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(FULL, pool)
    manager.use_eagle = use_eagle
    request = make_request("a", num_tokens, 2)
    allocate(manager, "a", num_tokens)
    cache(manager, request)
    hashes = [pool.get_cached_block(digest, [0]) for digest in request.block_hashes]
    partial = [2 * (i + 1) for i, blocks in enumerate(hashes) if blocks and 2 * (i + 1) % 4]
    assert partial == ([] if boundary is None else [boundary])


def test_the_end_of_a_prompt_is_cached_once_and_not_in_every_step(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(FULL, pool)
    calls = []
    cache_partial_block = pool.cache_partial_block
    pool.cache_partial_block = lambda **arguments: calls.append(1) or cache_partial_block(**arguments)
    request = make_request("a", 7, 2)
    allocate(manager, "a", 30)
    cache(manager, request, 5)
    assert calls == []  # not computed yet
    for _ in range(6):
        cache(manager, request)
        append_tokens(request, 9, hash_block_size=2)
    assert len(calls) == 2  # again, when the block has filled up
    assert found(manager, request, 7, alignment=2) == ([1, 2], 6)


def test_hits_inside_blocks_need_hashes_there(make_pool: Any) -> None:
    manager = make_manager(FullAttentionSpec(8, **NUMBERS), make_pool(10, True, 2))
    request = make_request("a", 16, 2)
    with pytest.raises(InvalidArgumentError, match="block hashes of 4 tokens are needed"):
        find(manager, request, 15, alignment=4)
    request.block_hashes = BlockHashListWithBlockSize(request.block_hashes, 2, 8)
    with pytest.raises(InvalidArgumentError, match="block hashes of 2 tokens are needed"):
        find(manager, request, 15, alignment=2)
    assert found(manager, request, 15, alignment=8) == ([], 0)


# Sliding window


def test_tokens_before_the_window_are_skipped(make_pool: Any) -> None:
    manager = make_manager(window(4), make_pool(4))
    assert [manager.get_num_skipped_tokens(n) for n in (-5, 0, 3, 4, 7)] == [0, 0, 0, 1, 4]
    manager = make_manager(window(4, extra_retained_tokens=2), make_pool(4))
    assert [manager.get_num_skipped_tokens(n) for n in (-5, 0, 4, 5, 6, 7)] == [0, 0, 0, 0, 1, 2]


def test_blocks_before_the_window_are_given_back(make_pool: Any) -> None:
    pool = make_pool(8)
    manager = make_manager(window(5), pool)
    allocate(manager, "a", 16)
    # 12 tokens computed, the last 3 of them in flight: 5 tokens are skipped, one block.
    manager.remove_skipped_blocks("a", 9)
    assert table(manager, "a") == [0, 2, 3, 4]
    manager.remove_skipped_blocks("a", 16)
    assert table(manager, "a") == [0, 0, 0, 4]
    assert free_ids(pool) == [3, 2, 1, 5, 6, 7]  # last first; without a hash they are reused first
    for num_tokens in (16, 3, 0, -7):
        manager.remove_skipped_blocks("a", num_tokens)
    assert table(manager, "a") == [0, 0, 0, 4]
    manager.remove_skipped_blocks("a", 100)  # further than the table
    assert table(manager, "a") == [0, 0, 0, 0]
    manager.remove_skipped_blocks("never seen", 100)
    assert "never seen" not in manager.req_to_blocks
    assert allocate(manager, "a", 17) == [4]
    manager.free("a")
    assert pool.get_num_free_blocks() == 7


def test_a_hit_needs_the_blocks_of_the_window_only(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(window(5), pool)
    request = make_request("a", 12)
    run_once(manager, request)
    assert found(manager, request, 12) == ([0, 0, 3], 12)
    assert found(manager, request, 11) == ([0, 2], 8)
    pool.evict_blocks([3])
    assert found(manager, request, 12) == ([0, 2], 8)
    pool.evict_blocks([2])
    assert found(manager, request, 12) == ([1], 4)
    pool.evict_blocks([1])
    assert found(manager, request, 12) == ([], 0)


def test_enough_blocks_in_a_row_or_all_from_the_start(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(window(10), pool)  # 9 tokens before the next one: 3 blocks
    request = make_request("a", 28)
    run_once(manager, request)
    pool.evict_blocks([6])
    assert found(manager, request, 28) == ([0, 0, 3, 4, 5], 20)
    assert found(manager, request, 28, drop=True) == ([0, 2, 3, 4], 16)  # 4 in a row, one is dropped
    pool.evict_blocks([3])
    assert found(manager, request, 28) == ([1, 2], 8)
    assert found(manager, request, 28, drop=True) == ([1], 4)
    assert found(manager, request, 28, alignment=16) == ([], 0)


def test_hits_of_a_window_end_where_they_may(make_pool: Any) -> None:
    pool = make_pool(12)
    manager = make_manager(window(5), pool)
    request = make_request("a", 28)
    run_once(manager, request)
    assert found(manager, request, 28, alignment=12) == ([0, 0, 0, 0, 0, 6], 24)
    assert found(manager, request, 28, alignment=12, drop=True) == ([0, 0, 0, 0, 0, 6], 24)  # block 7 is dropped
    pool.evict_blocks([6])
    assert found(manager, request, 28, alignment=12) == ([0, 0, 3], 12)
    pool.evict_blocks([4])
    assert found(manager, request, 28, alignment=12, drop=True) == ([], 0)


def test_a_short_row_of_blocks_is_aligned_before_and_after_one_is_dropped(make_pool: Any) -> None:
    manager = make_manager(window(20), make_pool(12))  # 5 blocks
    request = make_request("a", 20)
    allocate(manager, "a", 12)
    cache(manager, request, 12)
    assert found(manager, request, 20, alignment=8) == ([1, 2], 8)
    # Three blocks in a row, of which two are an even number, of which one is dropped.
    assert found(manager, request, 20, alignment=8, drop=True) == ([], 0)
    assert found(manager, request, 20, drop=True) == ([1, 2], 8)


def test_skipped_blocks_of_a_hit_stay_free(make_pool: Any) -> None:
    pool = make_pool(12)
    manager = make_manager(window(5), pool)
    request = make_request("a", 16)
    run_once(manager, request)
    (hits,), length = manager.find_longest_cache_hit(request.block_hashes, 16, [0], pool, window(20), False, 4)
    assert (block_ids(hits), length) == ([1, 2, 3, 4], 16)
    # As if all had been found: 12 of 16 tokens are skipped, so that block 4 alone is taken, and one for new tokens.
    assert count(manager, "b", 20, hits, 16) == 2
    manager.add_local_computed_blocks("b", hits, 16, 0)
    assert table(manager, "b") == [0, 0, 0, 4] and [block.ref_cnt for block in hits] == [0, 0, 0, 1]
    assert manager.num_cached_block == {"b": 4}
    # External tokens that are skipped get no blocks either.
    manager.add_local_computed_blocks("c", [], 0, 24)
    manager.allocate_external_computed_blocks("c", 0, 24)
    assert table(manager, "c")[:5] == [0] * 5 and len(table(manager, "c")) == 6  # type: ignore[index,arg-type]


def test_admission_counts_what_a_window_can_hold(make_pool: Any) -> None:
    manager = make_manager(window(9), make_pool(30))  # 8 tokens in flight: (8 + 8) / 4 + 1
    assert manager.max_admission_blocks_per_request == 5
    assert count(manager, "a", 80) == 20
    assert count(manager, "a", 80, apply_admission_cap=True) == 5
    assert count(manager, "a", 12, apply_admission_cap=True) == 3


def mask(manager: Any, first: int, past: int, alignment: int | None, *, eagle: bool = False, **more: Any) -> Any:
    kept = manager.reachable_block_mask(first, past, alignment, manager.kv_cache_spec, eagle, **more)
    if kept is None:
        return None
    assert len(kept) == past - first
    return [first + i for i, is_kept in enumerate(kept) if is_kept]


def test_blocks_of_a_window_that_a_hit_can_use(make_pool: Any) -> None:
    manager = make_manager(window(5), make_pool(4))  # one block
    assert mask(manager, 0, 9, 16) == [3, 7]
    assert mask(manager, 4, 7, 16) == []
    assert mask(manager, 0, 10, 16, eagle=True) == [3, 4, 7, 8]
    assert mask(manager, 0, 9, 4) is None  # every block
    assert mask(manager, 0, 9, None) is None
    assert mask(manager, 0, 9, 6) is None  # no multiple of a block: no way to tell
    assert mask(manager, 0, 9, 16, retention_interval=0) == []
    assert mask(manager, 0, 20, 16, retention_interval=32) == [7, 15]
    assert mask(manager, 0, 9, 16, retention_interval=0, reachable_boundaries=[23, 40]) == [3, 7]
    assert mask(manager, 0, 9, 16, retention_interval=0, reachable_boundaries=[23], eagle=True) == [3, 4]
    assert mask(manager, 0, 9, 16, reachable_boundaries=[23]) == [3, 7]  # they are covered
    assert mask(manager, 0, 9, 16, final_segment_end_block=6) == [3, 5, 7]
    wide = make_manager(window(10), make_pool(4))  # three blocks
    assert mask(wide, 0, 9, 16) == [1, 2, 3, 5, 6, 7]
    assert mask(wide, 2, 6, 16) == [2, 3, 5]
    assert mask(wide, 0, 9, 12) is None
    assert mask(wide, 0, 9, 16, retention_interval=0, reachable_boundaries=[4, 30]) == [1, 2, 3]


def test_a_sparse_window_caches_what_the_mask_keeps(make_pool: Any) -> None:
    pool = make_pool(12, True, 4, True)
    manager = make_manager(window(5), pool)
    manager.cache_hit_alignment_tokens = 8
    request = make_request("a", 30)
    request.shared_prefix_boundary = 8
    allocate(manager, "a", 30)
    cache(manager, request, 28, interval=0)
    (event,) = pool.take_events()
    assert [block.block_id for block in pool.blocks if block.block_hash] == [2, 6]  # 8 tokens shared, 24 of 29
    assert len(event.block_hashes) == 2 and manager.num_cached_block == {"a": 7}
    assert found(manager, request, 29, alignment=8) == ([0, 0, 0, 0, 0, 6], 24)


# Chunked local attention


def test_tokens_before_the_stretch_are_skipped(make_pool: Any) -> None:
    pool = make_pool(8)
    manager = make_manager(local(8), pool)
    assert [manager.get_num_skipped_tokens(n) for n in (-3, 0, 7, 8, 13, 16)] == [0, 0, 0, 8, 8, 16]
    allocate(manager, "a", 14)
    manager.remove_skipped_blocks("a", 7)
    assert table(manager, "a") == [1, 2, 3, 4]
    manager.remove_skipped_blocks("a", 13)
    assert table(manager, "a") == [0, 0, 3, 4]
    assert count(manager, "b", 40, apply_admission_cap=True) == 4  # 8 tokens and 8 in flight


def test_a_hit_needs_the_blocks_of_the_stretch_only(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(local(8), pool)
    request = make_request("a", 16)
    assert found(manager, request, 15) == ([0, 0], 8)  # nothing is cached, and nothing before is needed
    assert found(manager, request, 16) == ([0, 0, 0, 0], 16)
    assert found(manager, request, 7) == ([], 0)
    run_once(manager, request)
    assert found(manager, request, 15) == ([0, 0, 3], 12)
    assert found(manager, request, 7) == ([1], 4)
    assert found(manager, request, 0) == ([], 0)
    pool.evict_blocks([1])
    assert found(manager, request, 7) == ([], 0)
    assert found(manager, request, 15) == ([0, 0, 3], 12)
    with pytest.raises(InvalidArgumentError, match="EAGLE"):
        find(manager, request, 15, drop=True)
    with pytest.raises(InvalidArgumentError, match="other block sizes"):
        find(manager, request, 15, alignment=8)
    assert mask(manager, 0, 9, 16) is None


def test_a_hit_in_the_stretch_ends_at_a_hole(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(local(16), pool)
    request = make_request("a", 16)
    run_once(manager, request)
    pool.evict_blocks([2])
    assert found(manager, request, 15) == ([1], 4)


# Mamba


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_beside_each_other(make_pool: Any, mode: str) -> None:
    pool = make_pool(10)
    manager = make_manager(mamba(mode, num_speculative_blocks=2), pool)
    assert count(manager, "a", 6) == 4 and allocate(manager, "a", 6) == [1, 2, 3, 4]
    assert count(manager, "a", 9) == 1 and allocate(manager, "a", 9) == [5]
    manager.remove_skipped_blocks("a", 9)  # the state of 8 tokens is in the second block
    assert table(manager, "a") == [0, 0, 3, 4, 5]
    assert manager.has_positionally_stable_blocks


def test_one_running_state(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(mamba(), pool)
    assert not manager.has_positionally_stable_blocks
    assert [manager.get_num_skipped_tokens(n) for n in (0, 1, 9)] == [0, 0, 8]
    assert count(manager, "a", 4) == 1 and allocate(manager, "a", 4) == [1]
    manager.remove_skipped_blocks("a", 4)
    assert count(manager, "a", 8) == 1 and allocate(manager, "a", 8) == [2]
    assert table(manager, "a") == [1, 2]  # the step reads the first and writes the second
    manager.remove_skipped_blocks("a", 8)
    assert table(manager, "a") == [0, 2]
    assert allocate(manager, "a", 10) == [1]  # reused
    manager.remove_skipped_blocks("a", 10)
    assert table(manager, "a") == [0, 0, 1]
    assert count(manager, "a", 12) == 0 and allocate(manager, "a", 12) == []
    # A long step still fills one block.
    assert count(manager, "b", 20) == 1 and allocate(manager, "b", 20) == [0, 0, 0, 0, 2]
    manager.free("a")
    manager.free("b")
    assert pool.get_num_free_blocks() == 9 and manager._num_retired_blocks == {}


def test_scratch_states_move_along(make_pool: Any) -> None:
    manager = make_manager(mamba(num_speculative_blocks=2), make_pool(12))
    assert count(manager, "a", 4) == 3 and allocate(manager, "a", 4) == [1, 2, 3]
    assert count(manager, "a", 8) == 1 and allocate(manager, "a", 8) == [4]
    assert table(manager, "a") == [1, 2, 3, 4]  # 2 holds the state now, 3 and 4 are scratch
    # Two blocks further: 3 is behind the state and moves to the end, 4 is where the state goes.
    assert count(manager, "a", 16) == 1 and allocate(manager, "a", 16) == [3, 5]
    assert table(manager, "a") == [1, 2, 0, 4, 3, 5]
    # Far: both move.
    assert count(manager, "a", 40) == 1 and allocate(manager, "a", 40) == [0, 0, 0, 3, 5, 6]
    assert table(manager, "a") == [1, 2, 0, 4, 0, 0, 0, 0, 0, 3, 5, 6]
    assert count(manager, "a", 30) == 0  # shorter than the table, and not below 0


def test_a_shared_scratch_state_is_refused_before_anything_changes(make_pool: Any) -> None:
    pool = make_pool(12)
    manager = make_manager(mamba(num_speculative_blocks=1), pool)
    allocate(manager, "a", 4)
    pool.touch([pool.blocks[2]])
    before = state_of(pool), table(manager, "a")
    with pytest.raises(BlockStateError, match="scratch block of request 'a'"):
        allocate(manager, "a", 16)
    assert (state_of(pool), table(manager, "a")) == before


def test_the_last_cached_state_is_the_hit(make_pool: Any) -> None:
    pool = make_pool(12)
    manager = make_manager(mamba(), pool)
    request = make_request("a", 13)
    for num_tokens in (4, 8, 12):
        allocate(manager, "a", num_tokens)
        cache(manager, request, num_tokens)
        manager.new_step_starts()
    assert table(manager, "a") == [1, 2, 3]
    assert found(manager, request, 12) == ([0, 0, 3], 12)
    assert found(manager, request, 11) == ([0, 2], 8)
    assert found(manager, request, 12, alignment=8) == ([0, 2], 8)
    assert found(manager, request, 12, drop=True) == ([0, 0, 3], 12)
    pool.evict_blocks([3])
    hits, length = find(manager, request, 12)
    assert (block_ids(hits), length) == ([0, 2], 8)
    manager.free("a")
    assert count(manager, "b", 13, hits, 8) == 2  # one to write, and the one that is hit
    manager.add_local_computed_blocks("b", hits, 8, 0)
    assert allocate(manager, "b", 13) == [0, 3]  # 3 was evicted, so that it is reused first
    assert table(manager, "b") == [0, 2, 0, 3]


def test_a_state_of_this_step_can_not_be_hit_yet(make_pool: Any) -> None:
    manager = make_manager(mamba(), make_pool(12))
    request = make_request("a", 9)
    allocate(manager, "a", 8)
    cache(manager, request, 8)
    hits, length = find(manager, request, 8)
    assert length == 8
    assert count(manager, "b", 9, hits, 8) == 13  # more than the pool has: it has to wait
    manager.new_step_starts()
    assert count(manager, "b", 9, hits, 8) == 1


def test_a_state_from_elsewhere_has_a_block(make_pool: Any) -> None:
    manager = make_manager(mamba(num_speculative_blocks=2), make_pool(5))
    assert count(manager, "a", 13, external=8) == 4
    manager.add_local_computed_blocks("a", [], 0, 8)
    manager.allocate_external_computed_blocks("a", 0, 8)
    assert allocate(manager, "a", 13) == [0, 2, 3, 4]
    assert table(manager, "a") == [0, 1, 0, 2, 3, 4]


def test_a_running_state_is_kept_in_a_copy(make_pool: Any) -> None:
    """The end of the prompt lies inside a block: the next step writes over it."""
    pool = fine_pool(make_pool)
    manager = make_manager(mamba(), pool)
    manager.cache_hit_alignment_tokens = 2
    request = make_request("a", 7, 2)
    allocate(manager, "a", 6)
    cache(manager, request, 6)
    assert table(manager, "a") == [0, 1] and pool.blocks[1].block_hash_num_tokens == 6
    assert count(manager, "a", 7) == 1
    assert allocate(manager, "a", 7) == []  # the table of the worker stays
    ((source, copy),) = manager.take_pending_cow_copies()
    assert (source.block_id, source.ref_cnt, copy.block_id, copy.ref_cnt) == (1, 2, 2, 1)
    assert source.block_hash is None and copy.block_hash_num_tokens == 6
    hits, length = find(manager, request, 6, alignment=2)
    assert (block_ids(hits), length) == ([0, 2], 6)
    assert count(manager, "b", 7, hits, 6) == 11  # the copy is made in this step
    manager.new_step_starts()
    assert count(manager, "b", 7, hits, 6) == 1
    manager.add_local_computed_blocks("b", hits, 6, 0)
    assert allocate(manager, "b", 7) == [3]
    assert table(manager, "b") == [0, 3]
    (pair,) = manager.take_pending_cow_copies()
    assert block_ids(pair) == [2, 3] and [block.ref_cnt for block in pair] == [2, 2]


def test_the_block_that_the_end_of_a_prompt_shares_is_cached_when_it_is_full(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(mamba(), pool)
    manager.cache_hit_alignment_tokens = 2
    request = make_request("a", 7, 2)
    allocate(manager, "a", 6)
    cache(manager, request, 6)
    assert manager.num_cached_block == {"a": 1}
    allocate(manager, "a", 8)
    append_tokens(request, 7, hash_block_size=2)
    cache(manager, request, 8)
    assert pool.blocks[1].block_hash_num_tokens == 8
    assert found(manager, request, 8, alignment=2) == ([0, 1], 8)
    assert found(manager, request, 7, alignment=2) == ([0, 2], 6)


def test_a_state_from_the_middle_of_a_step(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(mamba(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=2), pool)
    manager.cache_hit_alignment_tokens = 2
    request = make_request("a", 15, 2)
    assert count(manager, "a", 15, apply_admission_cap=True) == 2
    assert count(manager, "a", 15, prefill_end=16) == 1  # the prefill goes on
    assert count(manager, "a", 15, prefill_end=15) == 2
    assert allocate(manager, "a", 15) == [0, 0, 1, 2]
    cache(manager, request)
    assert pool.blocks[1].block_hash_num_tokens == 14
    assert found(manager, request, 14, alignment=2) == ([0, 0, 0, 1], 14)
    assert found(manager, request, 12, alignment=2) == ([], 0)
    # A transient one is not kept where only the prompt's end is, unless others resume there.
    other = make_request("b", range(20, 50), 2)
    assert count(manager, "b", 15) == 2
    assert allocate(manager, "b", 15) == [0, 0, 3, 4]
    cache(manager, other, 15, interval=0)
    assert pool.blocks[3].block_hash is None
    other = make_request("c", range(60, 90), 2)
    other.shared_prefix_boundary = 14
    count(manager, "c", 15)
    assert allocate(manager, "c", 15) == [0, 0, 5, 6]
    cache(manager, other, 15, interval=0)
    assert pool.blocks[5].block_hash_num_tokens == 14


def test_a_transient_state_is_not_taken_for_that_of_its_block(make_pool: Any) -> None:
    pool = fine_pool(make_pool, 20)
    manager = make_manager(mamba(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=2), pool)
    manager.cache_hit_alignment_tokens = 2
    request = make_request("a", 40, 2)
    count(manager, "a", 15)
    allocate(manager, "a", 15)
    # Block 1 is the one of the tokens 8 .. 11, and would be kept at 12 if it held that state and not that of 14.
    cache(manager, request, 12, interval=12)
    assert pool.blocks[1].block_hash is None and found(manager, request, 12, alignment=2) == ([], 0)
    assert [type(event).__name__ for event in pool.take_events()] == ["BlockStored", "BlockRemoved"]


@pytest.mark.parametrize(
    ("start", "end", "alignment", "makes_one"),
    [
        (0, 15, 2, True),
        (0, 15, 4, False),  # 14 is no multiple
        (0, 17, 4, True),
        (2, 15, 4, True),
        (1, 16, 1, False),  # the step doesn't start at a hash
        (8, 11, 2, False),  # the state that it starts from is there
        (12, 15, 2, False),
        (0, 4, 2, False),  # no block before the last
    ],
)
def test_where_a_step_can_write_a_state_out(
    make_pool: Any, start: int, end: int, alignment: int, makes_one: bool
) -> None:
    manager = make_manager(
        mamba(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=alignment), fine_pool(make_pool)
    )
    manager.cache_hit_alignment_tokens = 2
    if start:
        manager.add_local_computed_blocks("a", [], 0, 0)
        allocate(manager, "a", start)
    num_new = int(-(-end // 4) > -(-start // 4))
    assert count(manager, "a", end, local=start) == num_new + makes_one


def test_only_the_end_of_the_prompt_is_cached_inside_a_block(make_pool: Any) -> None:
    pool = fine_pool(make_pool)
    manager = make_manager(mamba(), pool)
    manager.cache_hit_alignment_tokens = 2
    request = make_request("a", 20, 2)
    for num_tokens in (6, 14):
        allocate(manager, "a", num_tokens)
        cache(manager, request, num_tokens, interval=0)
    assert all(block.block_hash is None for block in pool.blocks)


def test_a_state_that_is_there_is_not_written_over(make_pool: Any) -> None:
    spec = mamba(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=2)
    manager = make_manager(spec, fine_pool(make_pool))
    manager.cache_hit_alignment_tokens = 2
    for num_tokens in (8, 12):
        allocate(manager, "a", num_tokens)
    assert table(manager, "a") == [0, 1, 2]
    count(manager, "a", 15, local=4)  # computed again from 4 on: block 2 of the table is a state and not vacant
    assert manager._checkpoints == {}


def test_states_that_a_hit_can_use(make_pool: Any) -> None:
    manager = make_manager(mamba(), make_pool(4))
    assert mask(manager, 0, 9, 16) is None
    assert mask(manager, 0, 9, 16, retention_interval=0) == []
    assert mask(manager, 0, 9, 16, retention_interval=16) == [3, 7]
    assert mask(manager, 4, 7, 16, retention_interval=16) == []
    assert mask(manager, 0, 9, 4, retention_interval=4) is None
    assert mask(manager, 0, 9, 4, retention_interval=0, reachable_boundaries=[3, 15, 40]) == [2]
    assert mask(manager, 0, 9, 4, retention_interval=16, reachable_boundaries=[23]) == [3, 4, 7]


# Cross attention, sinks, the choice of a manager


def test_cross_attention_is_allocated_once(make_pool: Any) -> None:
    pool = make_pool(10, False)
    manager = make_manager(CROSS, pool)
    manager.add_local_computed_blocks("a", [], 0, 0)
    assert count(manager, "a", 15) == 4 and allocate(manager, "a", 15) == [1, 2, 3, 4]
    assert count(manager, "a", 15) == 0 and allocate(manager, "a", 0) == []
    manager.allocate_external_computed_blocks("a", 0, 40)
    manager.remove_skipped_blocks("a", 100)
    assert table(manager, "a") == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="never cached"):
        cache(manager, make_request("a", 8))
    with pytest.raises(InvalidArgumentError, match="no computed blocks"):
        manager.add_local_computed_blocks("b", pool.get_new_blocks(1), 4, 0)
    with pytest.raises(NotImplementedError):
        find(manager, make_request("a", 8), 8)
    manager.free("a")
    assert free_ids(pool)[:4] == [4, 3, 2, 1]


def test_sinks_fill_whole_blocks(make_pool: Any) -> None:
    pool = make_pool(10)
    manager = make_manager(SinkFullAttentionSpec(4, sink_len=8, **NUMBERS), pool, needs_kv_cache_zeroing=True)
    request = make_request("a", 9)
    assert run_once(manager, request) == [1, 2, 3]
    assert found(manager, request, 8) == ([1, 2], 8)
    for sink_len in (None, 0, 6):
        with pytest.raises(InvalidArgumentError, match="positive multiple of 4"):
            make_manager(SinkFullAttentionSpec(4, sink_len=sink_len, **NUMBERS), pool)


def test_each_spec_has_its_manager(make_pool: Any) -> None:
    pool = make_pool(4)

    class OwnSpec(FullAttentionSpec):
        pass

    chosen = {
        FULL: FullAttentionManager,
        OwnSpec(4, **NUMBERS): FullAttentionManager,
        window(4): SlidingWindowManager,
        local(4): ChunkedLocalAttentionManager,
        mamba(): MambaManager,
        CROSS: CrossAttentionManager,
        SinkFullAttentionSpec(4, sink_len=4, **NUMBERS): SinkFullAttentionManager,
    }
    for spec, manager_class in chosen.items():
        manager = make_manager(spec, pool, role="default")
        assert type(manager) is manager_class and manager.kv_cache_spec is spec
        is_recycling = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
        assert (manager.max_admission_blocks_per_request is not None) == is_recycling
    with pytest.raises(InvalidArgumentError, match="role 'hisparse_source'"):
        make_manager(FULL, pool, role="hisparse_source")
    with pytest.raises(InvalidArgumentError, match="no manager for a KVCacheSpec"):
        make_manager(KVCacheSpec(4), pool)


@pytest.mark.parametrize(
    "manager_class",
    [FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager, CrossAttentionManager],
)
def test_lookups_for_another_spec_are_refused(make_pool: Any, manager_class: Any) -> None:
    wrong = mamba() if manager_class is not MambaManager else FULL
    with pytest.raises(InvalidArgumentError, match="another spec"):
        manager_class.find_longest_cache_hit([], 4, [0], make_pool(4), wrong, False, 4)
