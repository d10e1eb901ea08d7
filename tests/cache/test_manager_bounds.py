"""Numbers far out in a cache manager's calls: sums that would overflow, tokens beyond the longest sequence, state that
somebody else has written. Both backends answer alike, and what is refused has changed nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from manager_layouts import Layout, OwnManagerRequest, make_config
from pool_state import state_of

import kvpool
from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.requests.status import RequestStatus

HUGE = 2**63 - 1
LAYOUTS = {
    "full": [("full", 2, 0, False)],
    "window": [("window", 2, 6, False)],
    "local": [("local", 2, 8, False)],
    "hybrid": [("full", 2, 0, False), ("window", 2, 6, False)],
}


class Stage:
    """A manager of blocks of 2 tokens and its requests of kvpool's own class, which the compiled calls are for."""

    def __init__(self, backend: Any, groups: Any, max_model_len: int = 24, block_size: int = 2, **options: Any) -> None:
        layout = Layout([(kind, block_size, number, eagle) for kind, _, number, eagle in groups], 200)
        self.block_size = block_size
        self.manager = KVCacheManager(
            make_config(layout),
            max_model_len,
            block_pool_class=backend.BlockPool,
            hash_block_size=block_size,
            **options,
        )

    def request(self, name: str, num_tokens: int = 40, start: int = 0) -> OwnManagerRequest:
        tokens = range(start, start + num_tokens)
        return OwnManagerRequest(name, tokens, self.block_size, RequestStatus.RUNNING)

    def visible(self) -> Any:
        managers = self.manager.coordinator.single_type_managers
        tables = [{name: [block.block_id for block in t] for name, t in one.req_to_blocks.items()} for one in managers]
        return state_of(self.manager.block_pool), tables, [dict(one.num_cached_block) for one in managers]


@pytest.fixture
def make_stage(backend: SimpleNamespace) -> Any:
    stages: list[Stage] = []

    def make(groups: str = "full", **options: Any) -> Stage:
        stages.append(Stage(backend, LAYOUTS[groups], **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.manager.block_pool.check()


@pytest.mark.parametrize("groups", LAYOUTS)
def test_no_block_beyond_the_longest_sequence_is_published(make_stage: Any, groups: str) -> None:
    stage = make_stage(groups)
    owner = stage.request("owner", 20, start=500)
    assert stage.manager.allocate_slots(owner, 20) is not None
    before = stage.visible()
    with pytest.raises(InvalidArgumentError, match=r"26 tokens of request 'r' .* slots for 24"):
        stage.manager.allocate_slots(stage.request("r"), 26)
    assert stage.visible() == before
    hit = stage.manager.get_computed_blocks(stage.request("q"))[0]
    assert {block_id for ids in hit.get_block_ids() for block_id in ids} <= {0}  # placeholders at most


@pytest.mark.parametrize("groups", LAYOUTS)
def test_a_decode_ends_with_the_longest_sequence(make_stage: Any, groups: str) -> None:
    stage = make_stage(groups, block_size=1)
    one, two = stage.request("1"), stage.request("2", start=300)
    for request in (one, two):
        assert stage.manager.allocate_slots(request, 20) is not None
        request.num_computed_tokens = 20
    one.num_computed_tokens = 24
    assert stage.manager.allocate_slots(stage.request("3", 24, start=600), 24) is not None
    before = stage.visible()
    with pytest.raises(InvalidArgumentError, match="25 tokens of request '1'"):
        stage.manager.allocate_decode([two, one])
    assert stage.visible() == before


def test_tokens_beyond_the_longest_sequence_that_fill_no_block_are_no_error(make_stage: Any) -> None:
    stage = make_stage()
    request = stage.request("r")
    assert len(stage.manager.allocate_slots(request, 25).get_block_ids()[0]) == 12
    request.num_computed_tokens = 24
    assert stage.manager.allocate_decode([request])[0].get_block_ids() == ([],)


def test_without_caching_slots_just_end(make_stage: Any) -> None:
    stage = make_stage(enable_caching=False)
    assert len(stage.manager.allocate_slots(stage.request("r"), 26).get_block_ids()[0]) == 12


@pytest.mark.parametrize("number", [2**29, 2**31, 2**62, HUGE, 2**64, 2**200])
@pytest.mark.parametrize("groups", LAYOUTS)
def test_sums_do_not_overflow(make_stage: Any, groups: str, number: int) -> None:
    stage = make_stage(groups)
    manager = stage.manager
    assert len(manager.allocate_slots(stage.request("a", 10), 10, num_lookahead_tokens=number).get_block_ids()[0]) == 12
    running = stage.request("a", 10)
    running.num_computed_tokens = 10
    before = stage.visible()
    assert manager.allocate_slots(stage.request("b", 10, start=50), 4, reserved_blocks=number) is None
    for options in (
        {"num_new_tokens": number},
        {"num_new_tokens": 4, "num_new_computed_tokens": number},
        {"num_new_tokens": number, "num_new_computed_tokens": number, "num_lookahead_tokens": number},
    ):
        with pytest.raises(InvalidArgumentError, match="slots for 24"):
            manager.allocate_slots(stage.request("c", 40, start=100), **options)
    assert manager.allocate_slots(stage.request("d", 10, start=200), 4, full_sequence_must_fit=True,
                                  reserved_blocks=number) is None  # fmt: skip
    assert stage.visible() == before


@pytest.mark.parametrize("number", [2**29, 2**31, 2**62, HUGE])
@pytest.mark.parametrize("groups", LAYOUTS)
def test_numbers_of_a_request_do_not_overflow(make_stage: Any, groups: str, number: int) -> None:
    stage = make_stage(groups)
    request = stage.request("r", 10)
    assert stage.manager.allocate_slots(request, 10) is not None
    before = stage.visible()
    request.num_in_flight_tokens = number
    request.num_computed_tokens = number
    assert len(stage.manager.allocate_slots(request, 1, num_lookahead_tokens=number).get_block_ids()[0]) == 7
    assert stage.visible() != before
    request.num_computed_tokens = number
    long = stage.request("long")
    long.num_computed_tokens = number
    before = stage.visible()
    for call in (lambda: stage.manager.allocate_slots(long, 4), lambda: stage.manager.allocate_slots(long, number)):
        with pytest.raises(InvalidArgumentError, match="slots for 24"):
            call()
        assert stage.visible() == before


@pytest.mark.parametrize("number", [-1, -(2**62), -(2**63)])
@pytest.mark.parametrize("groups", LAYOUTS)
def test_negative_numbers_are_refused_by_name(make_stage: Any, groups: str, number: int) -> None:
    stage = make_stage(groups)
    request = stage.request("r", 10)
    assert stage.manager.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 4
    before = stage.visible()
    for name in ("num_new_tokens", "num_new_computed_tokens", "num_lookahead_tokens", "reserved_blocks"):
        with pytest.raises(InvalidArgumentError, match=f"{name} must not be negative: {number}"):
            stage.manager.allocate_slots(request, **{"num_new_tokens": 1, name: number})
    request.num_computed_tokens = number
    for call in (
        lambda: stage.manager.allocate_slots(request, 1),
        lambda: stage.manager.allocate_decode([stage.request("s"), request]),
    ):
        with pytest.raises(InvalidArgumentError, match=f"num_computed_tokens must not be negative: {number}"):
            call()
    assert stage.visible() == before


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("limit", [2**31, 2**53, 2**62])
def test_the_longest_sequence_and_the_watermark_may_be_as_good_as_infinite(
    make_stage: Any, groups: str, limit: int
) -> None:
    stage = make_stage(groups, max_model_len=limit, watermark=1e30)
    stage.manager.block_pool.check()
    request = stage.request("r", 10)
    assert len(stage.manager.allocate_slots(request, 10, num_lookahead_tokens=20).get_block_ids()[0]) == 15
    assert stage.manager.allocate_slots(stage.request("s", 4), HUGE) is None


def test_a_table_that_somebody_shortened_is_not_read_past_its_end(make_stage: Any) -> None:
    stage = make_stage()
    request = stage.request("r", 20)
    stage.manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    tables = stage.manager.coordinator.single_type_managers[0].req_to_blocks
    tables["r"], kept = stage.manager.block_pool.new_block_table(), tables["r"]
    stage.manager.coordinator.single_type_managers[0].num_cached_block["r"] = 2
    assert stage.manager.allocate_slots(request, 2) is not None
    tables["r"] = kept
    stage.manager.coordinator.single_type_managers[0].num_cached_block["r"] = 9
    assert stage.manager.allocate_slots(request, 2) is not None


@pytest.mark.skipif(kvpool.BACKEND != "native", reason="tables of the twin are lists")
def test_a_table_of_another_pool_is_refused() -> None:
    stage, other = Stage(kvpool, LAYOUTS["full"]), Stage(kvpool, LAYOUTS["full"])
    request, theirs = stage.request("r", 20), other.request("r", 20)
    stage.manager.allocate_slots(request, 4)
    other.manager.allocate_slots(theirs, 4)
    tables = stage.manager.coordinator.single_type_managers[0].req_to_blocks
    their_tables = other.manager.coordinator.single_type_managers[0].req_to_blocks
    tables["r"], their_tables["r"] = their_tables["r"], tables["r"]
    before = stage.visible()
    request.num_computed_tokens = 4
    with pytest.raises(BlockStateError, match="another pool"):
        stage.manager.allocate_slots(request, 4)
    assert stage.visible() == before
    stage.manager.free(request)
    assert other.manager.block_pool.get_num_free_blocks() == 199
    stage.manager.block_pool.check()
    other.manager.block_pool.check()


class Strange:
    """An integer by its word only."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


NUMBERS = [
    "num_new_tokens",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "num_encoder_tokens",
    "reserved_blocks",
]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("groups", LAYOUTS)
def test_numbers_of_other_types_count_as_what_they_are(make_stage: Any, groups: str, name: str) -> None:
    """What is kept of them is an exact int, which compiled calls read later."""
    tables = []
    for make in (int, numpy.int32, Strange):
        stage = make_stage(groups)
        request = stage.request("a", 12)
        arguments = {"num_new_tokens": 6, name: make(6)}
        stage.manager.allocate_slots(request, **arguments)
        request.num_computed_tokens = 6
        stage.manager.allocate_slots(request, 1)
        tables.append(stage.visible())
        for counts in tables[-1][2]:
            assert {type(count) for count in counts.values()} <= {int}
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("groups", LAYOUTS)
def test_what_is_no_integer_is_refused_and_nothing_has_changed(make_stage: Any, groups: str, name: str) -> None:
    stage = make_stage(groups)
    request = stage.request("a", 12)
    stage.manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    before = stage.visible()
    for value in (2.0, "2", None, float("nan"), numpy.float32(1), [1]):
        with pytest.raises(TypeError, match=name):
            stage.manager.allocate_slots(request, **{"num_new_tokens": 2, name: value})
        assert stage.visible() == before, value


def test_a_mamba_table_ends_with_the_longest_sequence(backend: SimpleNamespace) -> None:
    stage = Stage(backend, [("mamba_align", 4, 0, False)], block_size=4)
    request = stage.request("a", 12)
    stage.manager.allocate_slots(request, HUGE)
    assert len(stage.manager.get_block_ids("a")[0]) == 24 // 4


def test_a_state_that_is_to_be_copied_may_not_leave_its_table(backend: SimpleNamespace) -> None:
    """The hash of a prompt's end moves to a copy at the next step, unless that step is said to be far beyond it."""
    config = make_config(Layout([("full", 2, 0, False), ("mamba_align", 8, 0, False)], 200))
    manager = KVCacheManager(config, 24, block_pool_class=backend.BlockPool, hash_block_size=2)
    request = OwnManagerRequest("a", range(7), 2, RequestStatus.RUNNING)
    manager.allocate_slots(request, 6)
    assert manager.get_block_ids("a")[1] == [4]
    request.append_output_token_ids(list(range(15)))
    num_free = manager.block_pool.get_num_free_blocks()
    request.num_computed_tokens = 20
    with pytest.raises(BlockStateError, match=r"block 0 of request .a., which .* with 20 computed"):
        manager.allocate_slots(request, 1)
    other = OwnManagerRequest("b", range(100, 107), 2, RequestStatus.RUNNING)
    with pytest.raises(BlockStateError, match=r"request .a."):
        manager.allocate_decode([other, request])
    assert manager.get_block_ids("b") == ([], [])
    assert manager.get_block_ids("a") == ([1, 2, 3], [4])
    assert manager.block_pool.get_num_free_blocks() == num_free
    manager.block_pool.check()
    manager.free(request)
    manager.block_pool.check()


@pytest.mark.parametrize("is_running", [True, False])
def test_an_allocation_that_fails_in_the_middle_is_undone(
    make_stage: Any, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    stage = make_stage("hybrid")
    manager = stage.manager
    first = stage.request("first", 9)
    manager.allocate_slots(first, 9)
    request = stage.request("a", 16)
    hit, num_hit_tokens = manager.get_computed_blocks(request)
    assert num_hit_tokens == 8
    arguments = {"num_new_computed_tokens": num_hit_tokens, "new_computed_blocks": hit}
    if is_running:
        manager.allocate_slots(request, 1, **arguments)
        request.num_computed_tokens = 9
        manager.remove_skipped_blocks("a", 9)  # is not undone: no token attends to these blocks any more
        arguments = {}
    before = stage.visible()
    last_manager = manager.coordinator.single_type_managers[-1]
    for name in ("allocate_new_blocks", "cache_blocks"):
        original = getattr(last_manager, name)

        def fail(*args: Any, original: Any = original, **options: Any) -> None:
            original(*args, **options)
            raise RuntimeError("in the middle")

        with monkeypatch.context() as patch:
            patch.setattr(last_manager, name, fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                manager.allocate_slots(request, 5, **arguments)
        pool, tables, counts = stage.visible()
        assert (tables, counts) == before[1:]
        for part in ("ref_cnt", "hash", "lookups", "num_free"):
            assert pool[part] == before[0][part], part
        manager.block_pool.check()
    assert manager.allocate_slots(request, 5, **arguments) is not None
