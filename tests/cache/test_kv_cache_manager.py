"""KVCacheManager on both backends: admission, tables, hits, refusals, statistics, events. Hash size and block size are
4 tokens unless said; block 0 is the null block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, NO_REALS, REALS
from manager_layouts import Layout, ManagerRequest, OwnManagerRequest, Status, make_config
from pool_state import block_ids, free_ids, state_of

from kvpool import backend
from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.kv_cache_manager import KVCacheBlocks, KVCacheManager
from kvpool.requests.status import RequestStatus

FULL = ("full", 4, 0, False)
WINDOW = ("window", 4, 5, False)


@pytest.fixture
def make_manager(backend: SimpleNamespace) -> Any:
    """Makes managers of a number of blocks, for one full-attention group by default; checked at the end."""
    managers: list[KVCacheManager] = []

    def make(num_blocks: int, groups: Any = (FULL,), max_model_len: int = 1000, **options: Any) -> KVCacheManager:
        config = make_config(Layout(list(groups), num_blocks))
        managers.append(KVCacheManager(config, max_model_len, block_pool_class=backend.BlockPool, **options))
        return managers[-1]

    yield make
    for manager in managers:
        manager.block_pool.check()


def tokens(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def visible(manager: KVCacheManager, *request_ids: str) -> Any:
    """What a call that fails must not change."""
    tables = {name: manager.get_block_ids(name) for name in request_ids}
    counts = [dict(one.num_cached_block) for one in manager.coordinator.single_type_managers]
    return state_of(manager.block_pool), tables, counts, manager.prefix_cache_stats


def allocate(manager: KVCacheManager, request: ManagerRequest, num_new: int | None = None, **options: Any) -> Any:
    """Look up and allocate: ids of the new blocks, or None."""
    blocks, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit if num_new is None else num_new
    new = manager.allocate_slots(request, num_new, num_hit, blocks, **options)
    return None if new is None else new.get_block_ids()


def publish_and_free(manager: KVCacheManager, token_ids: list[int], **attributes: Any) -> ManagerRequest:
    """A request that comes and goes, and leaves its blocks in the cache."""
    request = ManagerRequest("gone", token_ids, **attributes)
    assert allocate(manager, request) is not None
    manager.free(request)
    return request


# Tables


def test_freeing_what_holds_nothing(make_manager: Any) -> None:
    manager = make_manager(10)
    stranger, request = ManagerRequest("x", tokens(8)), ManagerRequest("r", tokens(8))
    manager.free(stranger)
    assert manager.get_block_ids("x") == ([],) and manager.get_blocks("x").get_block_ids(allow_none=True) is None
    assert manager.pop_blocks_for_free(stranger) == []
    manager.allocate_slots(request, 8)
    manager.free(request)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 9
    assert not manager.coordinator.single_type_managers[0].req_to_blocks


def test_a_freed_block_cannot_be_freed_by_hand(make_manager: Any) -> None:
    manager = make_manager(10)
    request = ManagerRequest("r", tokens(8))
    manager.allocate_slots(request, 8)
    blocks = manager.pop_blocks_for_free(request)
    assert block_ids(blocks) == [1, 2]
    manager.block_pool.free_blocks(reversed(blocks))
    with pytest.raises(BlockStateError):
        manager.block_pool.free_blocks(reversed(blocks))


def test_preemption_and_return(make_manager: Any) -> None:
    manager = make_manager(10, log_stats=True)
    request = ManagerRequest("r", tokens(10))
    assert allocate(manager, request) == ([1, 2, 3],)
    manager.record_prefix_cache_stats(request, 0)
    request.num_computed_tokens = 10
    request.append([50, 51])
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions, request.status = 0, 1, Status.PREEMPTED
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (blocks.get_block_ids(), num_hit) == (([1, 2],), 8)
    assert manager.allocate_slots(request, 4, num_hit, blocks).get_block_ids() == ([3],)
    manager.record_prefix_cache_stats(request, num_hit)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 12, 8)
    assert manager.make_prefix_cache_stats().requests == 0


def test_an_admission_that_fails_again_and_again(make_manager: Any) -> None:
    manager = make_manager(5, log_stats=True)
    publish_and_free(manager, tokens(4))
    manager.make_prefix_cache_stats()
    big, late = ManagerRequest("big", tokens(12, 100)), ManagerRequest("late", tokens(9))
    assert allocate(manager, big) == ([2, 3, 4],)
    before = visible(manager, "big", "late")
    for _ in range(3):
        assert allocate(manager, late) is None
        assert visible(manager, "big", "late") == before
    assert manager.make_prefix_cache_stats().requests == 0


def test_the_same_prompt_twice_in_a_step(make_manager: Any) -> None:
    manager = make_manager(10)
    one, two = ManagerRequest("1", tokens(8)), ManagerRequest("2", tokens(8))
    hits = [manager.get_computed_blocks(request) for request in (one, two)]
    assert [n for _, n in hits] == [0, 0]
    for request, (blocks, _) in zip((one, two), hits):
        manager.allocate_slots(request, 8, 0, blocks)
    assert manager.get_block_ids("1") == ([1, 2],) and manager.get_block_ids("2") == ([3, 4],)
    assert manager.get_computed_blocks(ManagerRequest("3", tokens(8)))[0].get_block_ids() == ([1],)
    manager.free(one)
    manager.free(two)
    assert free_ids(manager.block_pool) == [5, 6, 7, 8, 9, 2, 1, 4, 3]


def test_a_request_id_comes_again_with_another_prompt(make_manager: Any) -> None:
    manager = make_manager(10)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("gone", tokens(9, 50))
    assert allocate(manager, request) == ([3, 4, 5],)
    assert manager.estimate_cached_tokens(request) == 8
    assert manager.get_computed_blocks(ManagerRequest("x", tokens(9, 50)))[1] == 8


def test_a_shared_prefix_is_counted_once(make_manager: Any) -> None:
    manager = make_manager(17)
    one, two = ManagerRequest("1", tokens(19)), ManagerRequest("2", [*tokens(16), 90, 91, 92])
    allocate(manager, one)
    assert allocate(manager, two) == ([6],)
    assert manager.block_pool.get_num_free_blocks() == 16 - 6
    manager.free(one)
    assert manager.block_pool.get_num_free_blocks() == 16 - 5
    manager.free(two)
    assert manager.block_pool.get_num_free_blocks() == 16
    assert all(block.ref_cnt == 0 for block in manager.block_pool.blocks)


def test_caching_off(make_manager: Any) -> None:
    manager = make_manager(6, enable_caching=False)
    cached = make_manager(6)
    publish_and_free(cached, tokens(8))
    request = ManagerRequest("r", tokens(8))
    assert allocate(manager, request) == ([1, 2],)
    assert all(block.block_hash is None for block in manager.block_pool.blocks)
    manager.free(request)
    assert free_ids(manager.block_pool) == [2, 1, 3, 4, 5]
    assert manager.get_computed_blocks(request) == (manager.empty_kv_cache_blocks, 0)
    hits, num_hit = cached.get_computed_blocks(ManagerRequest("r", tokens(8)))
    before = visible(manager, "r")
    with pytest.raises(AssertionError, match="Computed blocks should be empty when prefix caching is disabled"):
        manager.allocate_slots(request, 4, num_hit, hits)
    assert visible(manager, "r") == before


def test_no_groups_at_all(make_manager: Any) -> None:
    manager = make_manager(3, (), enable_caching=False)
    request = ManagerRequest("r", tokens(8))
    assert allocate(manager, request) == ()
    assert manager.get_block_ids("r") == ()
    manager.free(request)


# Room


@pytest.mark.parametrize(("num_tokens", "fits"), [(0, True), (16, True), (17, False), (20, False)])
def test_what_can_never_fit(make_manager: Any, num_tokens: int, fits: bool) -> None:
    manager = make_manager(5)
    assert manager.can_ever_fit(num_tokens) is fits
    assert manager.get_num_required_blocks(num_tokens) == math.ceil(num_tokens / 4)
    if num_tokens:
        new = allocate(manager, ManagerRequest("r", tokens(num_tokens)), full_sequence_must_fit=True)
        assert new == (([1, 2, 3, 4],) if fits else None)


def test_a_pool_of_the_null_block_alone(make_manager: Any) -> None:
    manager = make_manager(1)
    assert allocate(manager, ManagerRequest("r", [1])) is None
    assert not manager.can_ever_fit(1)
    assert manager.usage == 0.0


@pytest.mark.parametrize(
    "groups", [(WINDOW,), (("local", 4, 8, False),), (FULL, WINDOW), (("mamba_align", 4, 0, False),)]
)
def test_what_can_ever_fit_is_what_the_empty_pool_admits(make_manager: Any, groups: Any) -> None:
    manager = make_manager(8, groups, max_in_flight_tokens=8)
    for num_tokens in range(1, 60):
        request = ManagerRequest("r", tokens(num_tokens))
        admitted = manager.allocate_slots(request, min(8, num_tokens), full_sequence_must_fit=True) is not None
        assert manager.can_ever_fit(num_tokens) is admitted
        manager.free(request)
    assert not any(one.req_to_blocks for one in manager.coordinator.single_type_managers)


def test_a_question_does_not_leave_a_table(make_manager: Any) -> None:
    manager = make_manager(8, (FULL, ("mamba_align", 4, 0, False)))
    manager.can_ever_fit(12)
    assert all(not one.req_to_blocks for one in manager.coordinator.single_type_managers)


@pytest.mark.parametrize(
    ("watermark", "num_blocks", "status", "has_scheduled_reqs", "fits"),
    [
        (0.25, 8, Status.WAITING, True, True),
        (0.25, 9, Status.WAITING, True, False),
        (0.25, 9, Status.PREEMPTED, True, False),
        (0.25, 9, Status.WAITING, False, True),
        (0.25, 9, Status.RUNNING, True, True),
        (1.0, 1, Status.WAITING, True, False),
        (1.0, 10, Status.WAITING, False, True),
    ],
)
def test_watermark(
    make_manager: Any, watermark: float, num_blocks: int, status: Status, has_scheduled_reqs: bool, fits: bool
) -> None:
    manager = make_manager(11, watermark=watermark)
    request = ManagerRequest("r", tokens(num_blocks * 4), status=status)
    for full_sequence_must_fit in (True, False):
        new = allocate(
            manager, request, has_scheduled_reqs=has_scheduled_reqs, full_sequence_must_fit=full_sequence_must_fit
        )
        assert (new is not None) is fits
        manager.free(request)


def test_watermarks_that_make_no_sense(make_manager: Any) -> None:
    for watermark in (-0.1, float("nan"), float("inf"), *HUGE):
        with pytest.raises(AssertionError, match=r"watermark (must be non-negative|is finite)"):
            make_manager(11, watermark=watermark)


def test_numbers_of_all_types_and_what_is_none(make_manager: Any) -> None:
    for value in INTEGERS:
        assert type(make_manager(11, max_model_len=value, max_in_flight_tokens=value).max_model_len) is int
    for value in REALS:
        assert make_manager(11, watermark=value).watermark_blocks == 5
    assert make_manager(11, watermark=1e308).watermark_blocks == 11  # nobody is admitted while others run
    for name in ("max_model_len", "max_in_flight_tokens"):
        for value in NO_INTEGERS:
            with pytest.raises(TypeError, match=f"{name} is an integer, not "):
                make_manager(11, **{name: value})
        for value in HUGE:
            with pytest.raises(InvalidArgumentError, match=f"{name} is at (most|least) "):
                make_manager(11, **{name: value})
    for value in NO_REALS:
        with pytest.raises(TypeError, match="watermark is a number, not "):
            make_manager(11, watermark=value)


def test_reserved_blocks_prevent_a_deadlock(make_manager: Any) -> None:
    """Two requests, each holding its first part of what both need: neither goes on, and nothing changes. A reserve
    keeps the second one out."""
    manager = make_manager(8)
    one, two = ManagerRequest("1", tokens(20)), ManagerRequest("2", tokens(16, 100))
    manager.allocate_slots(one, 16)
    manager.allocate_slots(two, 12)
    one.num_computed_tokens, two.num_computed_tokens = 16, 12
    assert manager.block_pool.get_num_free_blocks() == 0
    before = visible(manager, "1", "2")
    assert manager.allocate_slots(one, 4) is None and manager.allocate_slots(two, 4) is None
    assert visible(manager, "1", "2") == before
    manager.free(two)
    two.num_computed_tokens = 0
    assert manager.allocate_slots(two, 12, reserved_blocks=1) is None
    assert manager.allocate_slots(one, 4) is not None


def test_slots_end_with_the_model(make_manager: Any) -> None:
    manager = make_manager(10, max_model_len=10)
    request = ManagerRequest("r", tokens(9))
    assert manager.allocate_slots(request, 9, num_lookahead_tokens=20).get_block_ids() == ([1, 2, 3],)
    assert manager.get_num_required_blocks(1000) == 3


# What is published


def test_drafts_are_not_published(make_manager: Any) -> None:
    manager = make_manager(10)
    request = ManagerRequest("r", tokens(6))
    num_cached = manager.coordinator.single_type_managers[0].num_cached_block
    manager.allocate_slots(request, 6, num_lookahead_tokens=3)
    assert (manager.get_block_ids("r"), num_cached["r"]) == (([1, 2, 3],), 1)
    request.num_computed_tokens = 6
    request.append([10])
    manager.allocate_slots(request, 4, num_lookahead_tokens=3)
    assert (manager.get_block_ids("r"), num_cached["r"]) == (([1, 2, 3, 4],), 1)
    request.num_computed_tokens = 9
    request.append([11, 12, 13])
    manager.allocate_slots(request, 1)
    assert (manager.get_block_ids("r"), num_cached["r"]) == (([1, 2, 3, 4],), 2)


def test_delayed_caching(make_manager: Any) -> None:
    manager = make_manager(10)
    request, other = ManagerRequest("r", tokens(8)), ManagerRequest("o", tokens(9))
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    assert manager.get_computed_blocks(other)[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(other)[1] == 8
    with pytest.raises(ValueError, match="nothing to allocate"):
        manager.allocate_slots(request, 0)


def test_a_hit_in_the_same_step(make_manager: Any) -> None:
    manager = make_manager(10)
    allocate(manager, ManagerRequest("a", tokens(8)))
    assert manager.get_computed_blocks(ManagerRequest("b", tokens(12)))[1] == 8


def test_a_mamba_state_of_the_same_step_is_no_hit_yet(make_manager: Any) -> None:
    manager = make_manager(10, (FULL, ("mamba_align", 4, 0, False)))
    manager.new_step_starts()
    allocate(manager, ManagerRequest("a", tokens(8)))
    other = ManagerRequest("b", tokens(12))
    assert allocate(manager, other) is None
    manager.new_step_starts()
    assert allocate(manager, other) is not None


def test_requests_that_skip_the_cache(make_manager: Any) -> None:
    manager = make_manager(10, log_stats=True)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("r", tokens(9), skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(request) == (manager.empty_kv_cache_blocks, 0)
    assert allocate(manager, request) == ([3, 4, 5],)
    manager.record_prefix_cache_stats(request, 0)
    assert manager.make_prefix_cache_stats().requests == 0
    assert manager.estimate_cached_tokens(request) == 8


@pytest.mark.parametrize(("length", "num_hit"), [(12, 8), (13, 12), (11, 8), (4, 0), (3, 0)])
def test_one_token_at_least_is_computed(make_manager: Any, length: int, num_hit: int) -> None:
    manager = make_manager(10)
    publish_and_free(manager, tokens(12))
    blocks, found = manager.get_computed_blocks(ManagerRequest("r", tokens(13)[:length]))
    assert (blocks.get_block_ids(), found) == (([1, 2, 3][: num_hit // 4],), num_hit)


def test_cache_salt_keeps_requests_apart(make_manager: Any) -> None:
    manager = make_manager(10)
    publish_and_free(manager, tokens(9), cache_salt="A")
    found = [
        manager.get_computed_blocks(ManagerRequest("r", tokens(9), cache_salt=salt))[1] for salt in ("A", "B", None)
    ]
    assert found == [8, 0, 0]


# Windows


def test_blocks_behind_the_window_are_given_back(make_manager: Any) -> None:
    manager = make_manager(12, (WINDOW,))
    request = ManagerRequest("r", tokens(16))
    manager.allocate_slots(request, 16)
    request.num_computed_tokens = 16
    manager.remove_skipped_blocks("r", -5)
    assert manager.get_block_ids("r") == ([1, 2, 3, 4],)
    request.num_in_flight_tokens = 8  # a step in flight still reads from token 4 on
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("r") == ([0, 2, 3, 4, 5],)
    request.num_in_flight_tokens = 0
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("r") == ([0, 0, 0, 4, 5],)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 11


def test_a_window_answers_none_and_still_gives_back_what_it_left(make_manager: Any) -> None:
    """The one thing that a failed allocation does."""
    manager = make_manager(6, (WINDOW,))
    request = ManagerRequest("r", tokens(36))
    manager.allocate_slots(request, 16)
    request.num_computed_tokens = 16
    assert manager.allocate_slots(request, 20) is None
    assert manager.get_block_ids("r") == ([0, 0, 0, 4],)
    assert manager.block_pool.get_num_free_blocks() == 4


def test_encoder_and_decoder(make_manager: Any) -> None:
    manager = make_manager(12, (FULL, ("cross", 4, 0, False)), enable_caching=False)
    request = ManagerRequest("r", tokens(5))
    assert manager.allocate_slots(request, 5, num_encoder_tokens=9).get_block_ids() == ([1, 2], [3, 4, 5])
    request.num_computed_tokens = 5
    request.append([7])
    assert manager.allocate_slots(request, 1, num_encoder_tokens=9).get_block_ids(allow_none=True) is None
    assert manager.get_num_required_blocks(5, num_encoder_tokens=9) == 5


# Tokens from elsewhere


def test_hits_of_all_groups_are_held_before_blocks_for_external_tokens_are_taken(make_manager: Any) -> None:
    manager = make_manager(17, (FULL, FULL), hash_block_size=4, scheduler_block_size=4)
    publish_and_free(manager, tokens(20))
    filler = ManagerRequest("filler", tokens(12, 200))
    manager.allocate_slots(filler, 12, delay_cache_blocks=True)  # the untouched blocks 11 .. 16
    manager.free(filler)
    pool = manager.block_pool
    pool.free_block_queue.append_n(pool.free_block_queue.popleft_n(6))
    assert sorted(free_ids(pool)[:10]) == list(range(1, 11))  # the hits would be reused first
    request = ManagerRequest("r", tokens(32))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (blocks.get_block_ids(), num_hit) == (([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), 20)
    assert manager.allocate_slots(request, 4, num_hit, blocks, num_external_computed_tokens=8) is not None
    one, two = manager.get_block_ids("r")
    assert (one[:5], two[:5]) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert len({*one, *two}) == 16
    assert all(pool.blocks[i].ref_cnt == 1 for i in one + two)


def test_hits_and_external_tokens_of_two_groups(make_manager: Any) -> None:
    """E20 of the cases, with the order of ids that it names."""
    manager = make_manager(17, (FULL, FULL), verify_hits=False)
    request = ManagerRequest("r", tokens(32))
    blocks = manager.block_pool.blocks
    hits = KVCacheBlocks(([blocks[i] for i in range(1, 6)], [blocks[i] for i in range(6, 11)]))
    assert manager.allocate_slots(request, 4, 20, hits, num_external_computed_tokens=8) is not None
    assert manager.get_block_ids("r") == ([1, 2, 3, 4, 5, 11, 12, 15], [6, 7, 8, 9, 10, 13, 14, 16])
    assert all(block.ref_cnt == 1 for block in blocks[1:])


# Hits that are stale


def give_away(manager: KVCacheManager) -> None:
    allocate(manager, ManagerRequest("thief", tokens(28, 500)))


@pytest.mark.parametrize(
    "interfere",
    [
        give_away,
        lambda manager: publish_and_free(manager, tokens(28, 500)),
        lambda manager: manager.evict_blocks({2}),
        lambda manager: manager.reset_prefix_cache(),
    ],
    ids=["in use", "cached for another", "evicted", "reset"],
)
def test_a_stale_hit_is_refused(make_manager: Any, interfere: Callable[[KVCacheManager], Any]) -> None:
    manager = make_manager(9, log_stats=True)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("r", tokens(9))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 8
    interfere(manager)
    before = visible(manager, "r")
    with pytest.raises(BlockStateError, match=r"block \d of the prefix hit of request 'r' in group 0 was given away"):
        manager.allocate_slots(request, 1, num_hit, blocks)
    assert visible(manager, "r") == before
    manager.free(ManagerRequest("thief", []))
    assert allocate(manager, request) is not None  # a new lookup puts it right


def test_verification_can_be_turned_off(make_manager: Any) -> None:
    manager = make_manager(9, verify_hits=False)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("r", tokens(9))
    blocks, num_hit = manager.get_computed_blocks(request)
    publish_and_free(manager, tokens(28, 500))
    assert manager.allocate_slots(request, 1, num_hit, blocks) is not None  # with another request's tokens


def test_a_hit_that_came_back_to_the_same_block_is_good(make_manager: Any) -> None:
    manager = make_manager(4)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("r", tokens(9))
    blocks, num_hit = manager.get_computed_blocks(request)
    manager.evict_blocks({1, 2, 3})
    again = ManagerRequest("again", tokens(9))
    taken = manager.block_pool.get_new_blocks(3)
    manager.block_pool.cache_full_blocks(again, sorted(taken, key=lambda b: b.block_id), 0, 2, 4, 0)
    manager.block_pool.free_blocks(taken)
    assert manager.allocate_slots(request, 1, num_hit, blocks) is not None


def test_stale_blocks_behind_the_window_do_not_matter(make_manager: Any) -> None:
    manager = make_manager(20, (FULL, WINDOW))
    publish_and_free(manager, tokens(13))
    request = ManagerRequest("r", tokens(13))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (blocks.get_block_ids(), num_hit) == (([1, 2, 3], [0, 0, 7]), 12)
    manager.evict_blocks({5, 6})
    assert manager.allocate_slots(request, 1, num_hit, blocks) is not None
    manager.free(request)
    blocks, num_hit = manager.get_computed_blocks(request)
    manager.evict_blocks({7})
    with pytest.raises(BlockStateError, match="in group 1"):
        manager.allocate_slots(request, 1, num_hit, blocks)


def make_with_hit_inside_block(make_manager: Any, length: int) -> tuple[KVCacheManager, ManagerRequest]:
    """Blocks of 8 tokens, hashes of 4, 12 tokens cached; and a request of some tokens that begins with these."""
    manager = make_manager(30, (("full", 8, 0, False), ("mamba_align", 8, 0, False)), hash_block_size=4)
    assert manager.coordinator.enable_partial_hash_hits
    request = ManagerRequest("gone", tokens(14))
    for num_new in (8, 4, 2):  # steps end with a block, and at the last place that can be hit
        manager.new_step_starts()
        manager.allocate_slots(request, num_new)
        request.num_computed_tokens += num_new
    copies, held = manager.take_kv_cache_block_copies()
    assert len(copies) == 1
    manager.block_pool.free_blocks(held)
    manager.free(request)
    manager.new_step_starts()
    return manager, ManagerRequest("r", tokens(length))


def test_a_hit_inside_a_block_goes_on_in_a_copy(make_manager: Any) -> None:
    manager, request = make_with_hit_inside_block(make_manager, 13)
    blocks, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 12
    assert manager.allocate_slots(request, 1, num_hit, blocks) is not None
    copies, held = manager.take_kv_cache_block_copies()
    assert [copy.src_block_id for copy in copies] == [ids[1] for ids in blocks.get_block_ids()]
    assert [copy.dst_block_id for copy in copies] == [ids[1] for ids in manager.get_block_ids("r")]
    manager.block_pool.free_blocks(held)


@pytest.mark.parametrize("group", [0, 1])
def test_stale_ends_inside_blocks(make_manager: Any, group: int) -> None:
    manager, request = make_with_hit_inside_block(make_manager, 13)
    blocks, num_hit = manager.get_computed_blocks(request)
    manager.evict_blocks({blocks.get_block_ids()[group][1]})
    before = visible(manager, "r")
    with pytest.raises(BlockStateError, match=rf"block 1 .* in group {group}"):
        manager.allocate_slots(request, 1, num_hit, blocks)
    assert visible(manager, "r") == before


@pytest.mark.parametrize(("group", "is_stale"), [(0, False), (1, True)])
def test_a_block_that_was_filled_since_the_lookup(make_manager: Any, group: int, is_stale: bool) -> None:
    """Keys and values stay where they are while a block is filled; a state is another one."""
    manager, request = make_with_hit_inside_block(make_manager, 17)
    blocks, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 12
    block = blocks.blocks[group][1]
    manager.block_pool.cache_partial_block(request, block, 16, group, 8, replace_existing_hashes=True)
    if is_stale:
        with pytest.raises(BlockStateError, match=r"block 1 .* in group 1"):
            manager.allocate_slots(request, 5, num_hit, blocks)
    else:
        assert manager.allocate_slots(request, 5, num_hit, blocks) is not None
        manager.block_pool.free_blocks(manager.take_kv_cache_block_copies()[1])


def test_stale_blocks_that_external_tokens_push_out_of_the_window_do_not_matter(make_manager: Any) -> None:
    manager = make_manager(20, (WINDOW,))
    publish_and_free(manager, tokens(13))
    request = ManagerRequest("r", tokens(21))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (blocks.get_block_ids(), num_hit) == (([0, 0, 3],), 12)
    manager.evict_blocks({3})
    with pytest.raises(BlockStateError):
        manager.allocate_slots(request, 1, num_hit, blocks)
    assert manager.allocate_slots(request, 1, num_hit, blocks, num_external_computed_tokens=8) is not None
    assert manager.get_block_ids("r")[0][:4] == [0, 0, 0, 0]


# Refusals

NUMBERS = (
    "num_new_tokens",
    "num_new_computed_tokens",
    "num_external_computed_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "reserved_blocks",
)


@pytest.mark.parametrize("name", NUMBERS)
def test_negative_numbers(make_manager: Any, name: str) -> None:
    manager = make_manager(9)
    request = ManagerRequest("r", tokens(9))
    before = visible(manager, "r")
    with pytest.raises(InvalidArgumentError, match=f"{name} must not be negative: -3"):
        manager.allocate_slots(**{"request": request, "num_new_tokens": 4, name: -3})
    assert visible(manager, "r") == before


@pytest.mark.parametrize("num_tokens", [2**31, 2**63, 2**70])
def test_more_computed_tokens_than_a_request_can_have(make_manager: Any, num_tokens: int) -> None:
    manager = make_manager(20, (WINDOW,))
    request = ManagerRequest("r", tokens(9))
    before = visible(manager, "r")
    with pytest.raises(InvalidArgumentError, match="computed tokens"):
        manager.allocate_slots(request, 1, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
    assert visible(manager, "r") == before


def test_tokens_without_blocks_are_not_published(make_manager: Any) -> None:
    manager = make_manager(20, (FULL, WINDOW))
    request = ManagerRequest("r", tokens(16))
    assert manager.allocate_slots(request, 8, delay_cache_blocks=True) is not None
    before = visible(manager, "r")
    with pytest.raises(InvalidArgumentError, match="16 tokens"):
        manager.cache_blocks(request, 16)
    assert visible(manager, "r") == before
    manager.cache_blocks(request, 8)
    assert visible(manager, "r") != before


def test_other_negative_numbers(make_manager: Any) -> None:
    manager = make_manager(9)
    with pytest.raises(InvalidArgumentError, match="-1"):
        manager.cache_blocks(ManagerRequest("r", tokens(9)), -1)
    with pytest.raises(InvalidArgumentError, match="-1"):
        manager.can_ever_fit(-1)
    with pytest.raises(InvalidArgumentError, match="max_model_len is at least 1, not 0"):
        make_manager(9, max_model_len=0)


def test_computed_blocks_for_a_request_that_has_blocks(make_manager: Any) -> None:
    manager = make_manager(9)
    publish_and_free(manager, tokens(9))
    request = ManagerRequest("r", tokens(9))
    blocks, num_hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 1, num_hit, blocks)
    before = visible(manager, "r")
    with pytest.raises(InvalidArgumentError, match="request 'r' has blocks already"):
        manager.allocate_slots(request, 1, num_hit, blocks)
    assert visible(manager, "r") == before


def test_computed_blocks_of_another_number_of_groups(make_manager: Any) -> None:
    manager = make_manager(9)
    with pytest.raises(InvalidArgumentError, match="computed blocks of 2 groups, but there are 1"):
        manager.allocate_slots(ManagerRequest("r", tokens(9)), 1, 0, KVCacheBlocks(([], [])))


def test_fewer_hashes_than_tokens(make_manager: Any) -> None:
    manager = make_manager(19)
    good, bad = ManagerRequest("good", tokens(12)), ManagerRequest("bad", tokens(12))
    for request in (good, bad):
        manager.allocate_slots(request, 3)
        request.num_computed_tokens = 3
    bad.block_hashes.clear()
    before = visible(manager, "good", "bad")
    with pytest.raises(InvalidArgumentError, match="request 'bad' has 0 block hashes of 4 tokens"):
        manager.allocate_slots(bad, 5)
    with pytest.raises(InvalidArgumentError, match="request 'bad'"):
        manager.allocate_decode([good, bad])
    with pytest.raises(InvalidArgumentError, match="request 'bad'"):
        manager.cache_blocks(bad, 4)
    assert visible(manager, "good", "bad") == before


def test_blocks_cannot_be_zeroed_from_inside(make_manager: Any) -> None:
    manager = make_manager(19, (FULL, ("mamba_align", 4, 0, False)))
    request = ManagerRequest("r", tokens(8))
    manager.allocate_slots(request, 8)
    with pytest.raises(InvalidArgumentError, match="token 3 begins no block"):
        manager.record_blocks_for_zeroing("r", 3)


# Decode


def test_decode_of_all_requests_is_one_after_the_other(backend: SimpleNamespace, make_manager: Any) -> None:
    answers = []
    for at_once in (False, True):
        manager = make_manager(15)
        requests = [ManagerRequest(str(i), tokens(4 + i, 100 * i)) for i in range(5)]
        log: list[Any] = []
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
        for step in range(8):
            for request in requests:
                request.append([step])
            if at_once:
                new = manager.allocate_decode(iter(requests))
            else:
                new = [manager.allocate_slots(request, 1) for request in requests]
            log.append([None if blocks is None else blocks.get_block_ids() for blocks in new])
            for request, blocks in zip(requests, new):
                if blocks is None:
                    request.all_token_ids.pop()
                    del request.block_hashes[request.num_tokens // 4 :]
                else:
                    request.num_computed_tokens += 1
            log.append(state_of(manager.block_pool))
        answers.append(log)
    assert answers[0] == answers[1]
    assert any(None in log for log in answers[0] if isinstance(log, list))


def test_a_decode_that_needs_no_block_makes_nothing(make_manager: Any) -> None:
    manager = make_manager(9)
    request = ManagerRequest("r", tokens(5))
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    request.append([9])
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    assert manager.allocate_decode([request])[0] is manager.empty_kv_cache_blocks
    assert manager.allocate_decode([]) == []


# Common prefixes


def test_common_prefix_of_all_requests(make_manager: Any) -> None:
    manager = make_manager(40)
    assert manager.get_num_common_prefix_blocks("nobody") == [0]
    one = ManagerRequest("1", tokens(20))
    allocate(manager, one)
    assert manager.get_num_common_prefix_blocks("1") == [5]
    two, three = ManagerRequest("2", tokens(12) + [7] * 9), ManagerRequest("3", tokens(8) + [8] * 9)
    allocate(manager, two)
    assert [manager.get_num_common_prefix_blocks(name) for name in "12"] == [[3], [3]]
    allocate(manager, three)
    assert [manager.get_num_common_prefix_blocks(name) for name in "123"] == [[2], [2], [2]]
    manager.block_pool.touch(manager.get_blocks("1").blocks[0])  # a reference of somebody else's
    assert manager.get_num_common_prefix_blocks("1") == [2]
    manager.block_pool.free_blocks(manager.get_blocks("1").blocks[0])
    manager.free(three)
    assert manager.get_num_common_prefix_blocks("1") == [3]
    stranger = ManagerRequest("4", tokens(9, 300))
    allocate(manager, stranger)
    assert manager.get_num_common_prefix_blocks("1") == [0]


def test_common_prefix_is_that_of_full_attention(make_manager: Any) -> None:
    manager = make_manager(40, (WINDOW, FULL))
    request = ManagerRequest("1", tokens(20))
    allocate(manager, request)
    assert manager.get_num_common_prefix_blocks("1") == [0, 5]


# Statistics, events, news


def test_reset_waits_until_nothing_is_in_use(make_manager: Any) -> None:
    manager = make_manager(5, log_stats=True, enable_kv_cache_events=True)
    request = ManagerRequest("r", tokens(8))
    allocate(manager, request)
    manager.take_events()
    assert manager.reset_prefix_cache() is False
    assert manager.take_events() == [] and not manager.make_prefix_cache_stats().reset
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    assert [type(event).__name__ for event in manager.take_events()] == ["AllBlocksCleared"]
    assert manager.take_events() == []
    assert manager.make_prefix_cache_stats().reset
    assert free_ids(manager.block_pool) == [3, 4, 2, 1]
    assert manager.get_computed_blocks(ManagerRequest("x", tokens(8)))[1] == 0


def test_no_statistics_unless_asked_for(make_manager: Any) -> None:
    manager = make_manager(5)
    manager.record_prefix_cache_stats(ManagerRequest("r", tokens(8)), 0)
    assert manager.make_prefix_cache_stats() is None
    assert manager.reset_prefix_cache()


def test_events_tell_the_kind_of_group(make_manager: Any) -> None:
    manager = make_manager(30, (FULL, WINDOW, ("mamba_align", 4, 0, False)), enable_kv_cache_events=True)
    allocate(manager, ManagerRequest("r", tokens(8)))
    told = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in manager.take_events()]
    assert told == [(0, "full_attention", None), (1, "sliding_window", 5), (2, "mamba", None)]


def test_reused_blocks_are_reported_to_who_wants_all(make_manager: Any) -> None:
    manager = make_manager(10, enable_kv_cache_events=True)
    publish_and_free(manager, tokens(9))
    manager.take_events()
    manager.get_computed_blocks(ManagerRequest("r", tokens(9)))
    assert manager.take_events() == []
    manager.get_computed_blocks(ManagerRequest("r", tokens(9), kv_cache_report_mode="full"))
    (event,) = manager.take_events()
    assert event.token_ids == tokens(8) and len(event.block_hashes) == 2


def test_reused_blocks_of_kvpools_own_requests_are_reported_too(make_manager: Any) -> None:
    class TellsAll(OwnManagerRequest):
        kv_cache_report_mode = "full"

    manager = make_manager(10, enable_kv_cache_events=True)
    publish_and_free(manager, tokens(9))
    manager.take_events()
    manager.get_computed_blocks(OwnManagerRequest("r", tokens(9), 4, Status.WAITING))
    assert manager.take_events() == []
    for look_up in (manager.get_computed_blocks, manager.get_computed_blocks_and_boundary):
        look_up(TellsAll("r", tokens(9), 4, Status.WAITING))
        (event,) = manager.take_events()
        assert event.token_ids == tokens(8) and len(event.block_hashes) == 2


def test_both_lookups_find_the_same(make_manager: Any) -> None:
    manager = make_manager(10)
    publish_and_free(manager, tokens(9))
    for length, num_hit in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 8)):
        request = OwnManagerRequest("r", tokens(length), 4, Status.WAITING)
        blocks, *numbers = manager.get_computed_blocks_and_boundary(request)
        assert numbers == [num_hit, 0]
        pair = manager.get_computed_blocks(request)
        assert (pair[0].get_block_ids(), pair[1]) == (blocks.get_block_ids(), num_hit)
        assert (blocks is manager.empty_kv_cache_blocks) == (num_hit == 0)
    skips = OwnManagerRequest("r", tokens(9), 4, Status.WAITING, skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks_and_boundary(skips) == (manager.empty_kv_cache_blocks, 0, 0)


@pytest.mark.skipif(backend.BACKEND != "native", reason="of the compiled calls")
def test_a_schedulers_lookup_is_compiled(make_manager: Any, backend: SimpleNamespace) -> None:
    """Its hit is a table, not a list of blocks: with a list, the allocation would go to the general code as well."""
    manager = make_manager(10)
    publish_and_free(manager, tokens(9))
    blocks, _, _ = manager.get_computed_blocks_and_boundary(OwnManagerRequest("r", tokens(9), 4, Status.WAITING))
    assert (type(blocks.blocks[0]) is list) == (backend.name == "reference")


@pytest.mark.skipif(backend.BACKEND != "native", reason="of the compiled calls")
def test_a_request_that_takes_the_pool_away_while_it_is_looked_up(make_manager: Any) -> None:
    class Taking:
        def __bool__(self) -> bool:
            manager._unbind()
            return False

    manager = make_manager(10)
    publish_and_free(manager, tokens(9))
    request = OwnManagerRequest("r", tokens(9), 4, Status.WAITING)
    request.skip_reading_prefix_cache = Taking()
    for look_up in (manager.get_computed_blocks, manager.get_computed_blocks_and_boundary):
        assert look_up(request)[1] == 8


def test_new_blocks_to_zero(make_manager: Any) -> None:
    plain = make_manager(10)
    allocate(plain, ManagerRequest("r", tokens(9)))
    assert plain.take_new_block_ids() == []
    manager = make_manager(20, (FULL, ("mamba_align", 4, 0, False)))
    request = ManagerRequest("r", tokens(9))
    allocate(manager, request)
    table = manager.get_block_ids("r")[0]
    assert manager.take_new_block_ids() == table and manager.take_new_block_ids() == []
    manager.record_blocks_for_zeroing("r", 4)
    assert manager.take_new_block_ids() == table[1:]
    assert manager.block_pool.null_block.block_id == 0


def test_blocks_that_a_load_fills_need_no_zeros(backend: SimpleNamespace) -> None:
    """Groups of two dtypes; one of them is told to leave external blocks out."""
    config = make_config(Layout([FULL, FULL], 20))
    config.kv_cache_groups[1].kv_cache_spec = replace(config.kv_cache_groups[1].kv_cache_spec, dtype="float16")
    manager = KVCacheManager(config, 100, block_pool_class=backend.BlockPool)
    request = ManagerRequest("r", tokens(9))
    manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True, skip_zeroing_group_ids=(0,)
    )
    assert manager.take_new_block_ids() == manager.get_block_ids("r")[1] == [3, 4]


def test_a_partial_end_is_registered_once(make_manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again at each decoded token: blocks of 8 tokens with hashes of 4."""
    manager = make_manager(20, (("full", 8, 0, False), ("full", 4, 0, False)), hash_block_size=4)
    calls = []
    original = manager.block_pool.cache_partial_block
    monkeypatch.setattr(
        type(manager.block_pool), "cache_partial_block", lambda *a, **k: calls.append(k) or original(**k)
    )
    request = ManagerRequest("r", tokens(16))
    allocate(manager, request)
    for _ in range(6):
        request.num_computed_tokens = request.num_tokens
        request.append([1])
        manager.allocate_slots(request, 1)
    assert len(calls) == 1


def test_pool_options_pass_through(backend: SimpleNamespace) -> None:
    from functools import partial

    config = make_config(Layout([FULL], 10))
    pool_class = partial(backend.BlockPool, uncached_first=False)
    manager = KVCacheManager(config, 100, enable_caching=True, block_pool_class=pool_class)
    assert manager.block_pool.uncached_first is False
    assert KVCacheManager(config, 100).block_pool.num_gpu_blocks == 10


# Results


def test_results(make_manager: Any) -> None:
    manager = make_manager(20, (FULL, WINDOW))
    request = ManagerRequest("r", tokens(9))
    new = manager.allocate_slots(request, 9)
    assert new.get_block_ids() == manager.get_block_ids("r") == ([1, 2, 3], [4, 5, 6])
    assert new.get_block_ids(group_ids=[1]) == ([4, 5, 6],)
    assert new.get_unhashed_block_ids_all_groups() == [[3], [6]]
    assert (new + new).get_block_ids() == ([1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6])
    empty = new.new_empty()
    assert empty == manager.empty_kv_cache_blocks and empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert new == KVCacheBlocks(new.blocks)
    with pytest.raises(InvalidArgumentError, match="2"):
        new.get_unhashed_block_ids()
    assert KVCacheBlocks((new.blocks[0],)).get_unhashed_block_ids() == [3]
    with pytest.raises(InvalidArgumentError, match="2 and of 1 groups"):
        new + KVCacheBlocks(([],))


def test_part_of_a_hit(make_manager: Any) -> None:
    manager = make_manager(20, (FULL, WINDOW))
    publish_and_free(manager, tokens(13))
    blocks, num_hit = manager.get_computed_blocks(ManagerRequest("r", tokens(13)))
    assert num_hit == 12
    assert manager.truncate_computed_blocks(blocks, 8).get_block_ids() == ([1, 2], [0, 0])
    assert blocks.get_block_ids() == ([1, 2, 3], [0, 0, 7])
    assert manager.truncate_computed_blocks(blocks, 0) is manager.empty_kv_cache_blocks
    for num_tokens in (16, 6, -4):
        with pytest.raises(InvalidArgumentError, match=str(num_tokens)):
            manager.truncate_computed_blocks(blocks, num_tokens)


# Compiled calls


@pytest.mark.skipif(backend.BACKEND != "native", reason="the twin has none")
@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW), (("local", 4, 8, False),)])
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_step_that_changes_nothing_asks_no_group(groups: Any, in_batch: bool) -> None:
    """Blocks of 4 are filled by token 24 and 28; 25 and 29 need a new one, and leave one behind the window;
    22 is the first to leave the prompt behind."""
    manager = KVCacheManager(make_config(Layout(list(groups), 40)), 1000)
    request = OwnManagerRequest("r", tokens(21), 4, RequestStatus.RUNNING)
    assert manager.allocate_slots(request, 21) is not None
    request.num_computed_tokens = 21
    asked = set()
    general = manager.coordinator.get_num_blocks_to_allocate

    def note(*arguments: Any, **what: Any) -> int:
        asked.add(request.num_tokens)
        return general(*arguments, **what)

    manager.coordinator.get_num_blocks_to_allocate = note
    for _ in range(8):
        request.append([7])
        new = manager.allocate_decode([request])[0] if in_batch else manager.allocate_slots(request, 1)
        assert sum(map(len, new.get_block_ids())) == (len(groups) if request.num_tokens in (25, 29) else 0)
        request.num_computed_tokens += 1
        manager.block_pool.check()
    assert asked == (set() if groups == (FULL,) else {22, 24, 25, 28, 29})
