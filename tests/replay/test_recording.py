"""Recordings: whatever a manager is made to do can be played again, on both halves, to the same result."""

from __future__ import annotations

import gc
import os
import stat
import struct
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import manager_histories
import msgspec
import numpy as np
import pytest
import scheduler_runs
from conftest import BACKEND_NAMES
from engine_contents import EngineHistory
from manager_histories import History, Stack
from manager_layouts import MAKERS, Layout, ManagerRequest, OwnManagerRequest, Status, make_config
from recordings import file_of, finish, messages_of, play, recording_to
from scheduler_contents import SPECS, SchedulerHistory

import kvpool
from kvpool import reference
from kvpool.cache.manager import KVCacheManagerBase
from kvpool.engine import engine as engine_module
from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.kv_cache_manager import PlainKVCacheManager
from kvpool.playback import player
from kvpool.playback.limits import DEFAULT_LIMITS
from kvpool.playback.player import play_recording
from kvpool.playback.reader import RecordingReader
from kvpool.recording.operations import (
    NAME_OF,
    OPERATIONS,
    Failure,
    NewHashes,
    PlainAllocations,
    Result,
    pack,
)
from kvpool.recording.settings import RecordingSettings

NUM_SEEDS = max(3, int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40")) // 10)
POOLS = {"native": kvpool.BlockPool, "reference": reference.BlockPool}
FULL = ("full", 4, 0, False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def make_manager(path: Path, backend_name: str, *groups: Any, num_blocks: int = 20, **options: Any) -> Any:
    with recording_to(path) as manager_class:
        return manager_class(
            make_config(Layout(list(groups or [FULL]), num_blocks)),
            1000,
            block_pool_class=options.pop("block_pool_class", POOLS[backend_name]),
            **options,
        )


# ---- whole runs ----


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_histories_of_managers_can_be_played(
    kind: str, events: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for seed in range(NUM_SEEDS):
        with recording_to(tmp_path / str(seed)) as manager_class:
            monkeypatch.setattr(manager_histories, "KVCacheManager", manager_class)
            history = History(
                seed, lambda layout: [Stack(name, layout, events=events) for name in BACKEND_NAMES], kinds=(kind,)
            )
        history.run()
        for stack in history.stacks:
            num_operations = stack.manager._recorder._num_operations
            report = play(finish(stack.manager))
            assert (report.num_operations, report.num_skipped, report.notes) == (num_operations, 0, [])
            seen.add(num_operations > 50)
    assert True in seen


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("cache", SPECS)
@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_runs_of_a_scheduler_can_be_played(
    backend_name: str, cache: str, is_interrupted: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_interrupted and backend_name == "reference":
        pytest.skip("the calls of the twin are not atomic")
    with recording_to(path) as manager_class:
        make = partial(manager_class, block_pool_class=POOLS[backend_name])
        stack = SimpleNamespace(**{**vars(scheduler_runs.STACKS[backend_name]), "make_manager": make})
        monkeypatch.setitem(scheduler_runs.STACKS, backend_name, stack)
        history = SchedulerHistory(1, backend_name, cache, fails=True, is_interrupted=is_interrupted)
    manager = history.scheduler.kv_cache_manager
    if is_interrupted:
        manager._recorder._max_bytes = 30_000  # a next file is begun now and then
    history.run()
    num_gaps = manager._recorder._num_gaps
    assert (manager._recorder._segment > 1) == is_interrupted
    report = play(finish(manager))
    assert report.num_operations > 30
    assert (num_gaps > 0, report.num_skipped > 0) == (is_interrupted, is_interrupted)


@pytest.mark.parametrize("cache", ["full", "full and window", "hits inside blocks"])
def test_a_run_of_an_engine_can_be_played(cache: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording_to(path) as manager_class:
        monkeypatch.setattr(engine_module, "KVCacheManager", manager_class)
        history = EngineHistory(3, cache, fails=True)
        history.run()
    report = play(finish(history.engine.scheduler.kv_cache_manager))
    assert report.num_operations > 100


# ---- every call ----


def drive_all(manager: Any) -> None:
    """Every call that is recorded, at least once, and what they refuse."""
    pool = manager.block_pool
    one, other, third = (ManagerRequest(f"SECRET {i}", range(100 * i, 100 * i + 19)) for i in range(3))
    manager.new_step_starts()
    assert manager.get_num_required_blocks(19) == 5
    assert manager.get_computed_blocks(one)[1] == 0
    manager.allocate_slots(one, 19)
    one.num_computed_tokens = 19
    again = ManagerRequest("again", range(19))
    hit, num_tokens, _ = manager.get_computed_blocks_and_boundary(again)
    assert num_tokens == 16
    manager.allocate_slots(again, np.int64(3), num_tokens, hit, has_scheduled_reqs=np.True_)
    again.num_computed_tokens = 19
    for request in (one, again):
        request.append([7])
    manager.allocate_decode(iter([one, again]))
    manager.allocate_slots(other, 19, new_computed_blocks=manager.empty_kv_cache_blocks, delay_cache_blocks=True)
    manager.cache_blocks(other, 16)
    manager.take_back(other, 9)
    manager.allocate_slots(third, 5)
    manager.remove_skipped_blocks("SECRET 0", 8, 19)
    manager.record_blocks_for_zeroing("SECRET 0", 0)
    manager.take_new_block_ids()
    manager.take_kv_cache_block_copies()
    manager.drop_pending()
    pool.free_blocks(reversed(manager.pop_blocks_for_free(again)))
    manager.evict_blocks({3, 2})
    assert not manager.reset_prefix_cache()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(third, blocks, 0, 2, 4, 0, block_mask=[True, False])
    pool.cache_partial_block(third, blocks[1], 8, 0, 4)
    pool.move_block_hashes(blocks[1], blocks[2])
    pool.add_reference(blocks[2])
    pool.free_blocks([blocks[2]])
    pool.touch(blocks[:1])
    pool.unpin_blocks(blocks[:1], print)
    pool.evict_blocks([blocks[0].block_id])
    assert manager.release_orphans() == 3
    ids = pool.allocate_ids(2)
    pool.touch_ids(ids)
    pool.cache_ids([b"a" * 32, b"b" * 16], ids)
    pool.free_ids(ids, prepend=True)
    pool.free_ids(ids)
    for request in (one, other, third):
        manager.free(request)
    assert pool.reset_prefix_cache()
    for refused in (
        lambda: manager.allocate_slots(one, -1),
        lambda: manager.evict_blocks([99]),
        lambda: manager.allocate_slots(one, 1, 4, hit),
        lambda: pool.free_ids(ids),
    ):
        with pytest.raises((InvalidArgumentError, BlockStateError)):
            refused()
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_every_call_can_be_played(backend_name: str, path: Path) -> None:
    manager = make_manager(path, backend_name)
    drive_all(manager)
    played = Counter()
    with RecordingReader(finish(manager), DEFAULT_LIMITS) as reader:
        for placed in reader:
            played[type(placed.message)] += 1
    assert set(OPERATIONS) <= played.keys()
    assert played[Failure] == 4
    assert play(path).num_operations == sum(played[kind] for kind in OPERATIONS)


def own_request(number: int, num_tokens: int, num_hashes: int | None = None) -> OwnManagerRequest:
    request = OwnManagerRequest(f"own {number}", [number] * num_tokens, 4, Status.RUNNING)
    if num_hashes is not None:
        request.block_hashes = request.block_hashes[:num_hashes]
    return request


@pytest.mark.parametrize("groups", [[FULL], [FULL, ("window", 4, 6, False)]], ids=["one group", "two groups"])
def test_allocations_of_one_request_after_the_other_can_be_played(groups: list[Any], path: Path) -> None:
    """Natively they are written together, whatever else happens between them."""
    manager = make_manager(path, BACKEND_NAMES[0], *groups, num_blocks=300)
    requests = [own_request(i, 6) for i in range(12)]
    for request in requests:
        manager.allocate_slots(request, 6)
        request.num_computed_tokens = 6
    for step in range(40):
        for i, request in enumerate(requests):
            request.append([step])
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
            if i == 3 and step % 5 == 0:  # the same one twice; one that nobody knows; one that is refused; none
                manager.allocate_slots(request, 1)
                newcomer = own_request(100 + step, 6)
                manager.allocate_slots(newcomer, 6)
                manager.free(newcomer)
                with pytest.raises(InvalidArgumentError):
                    manager.allocate_slots(own_request(200 + step, 6, num_hashes=0), 6)
                with pytest.raises(InvalidArgumentError):
                    manager.allocate_slots(request, -1)
                with pytest.raises(TypeError):
                    manager.allocate_slots(request, "1")
                request.shared_prefix_boundary = step
            if i == 7 and step == 20:
                manager.free(request)
        if step % 2:
            manager.take_new_block_ids()
    assert manager.allocate_slots(own_request(900, 900), 900) is None
    num_operations = manager._recorder._num_operations
    num_waiting = manager._recorder.plain.num_calls
    report = play(finish(manager))
    assert (report.num_operations, report.num_skipped) == (num_operations + num_waiting, 0)
    assert report.num_operations > 12 * 41
    if kvpool.BACKEND == "native":
        together = [message for message in messages_of(path) if isinstance(message, PlainAllocations)]
        assert sum(len(message.requests) // 4 for message in together) > 400
        assert any(isinstance(message, NewHashes) for message in messages_of(path))


def test_many_allocations_are_no_more_than_a_message_holds(path: Path) -> None:
    manager = make_manager(path, BACKEND_NAMES[0], num_blocks=1_000)
    request = own_request(1, 3)
    manager.allocate_slots(request, 3)
    for _ in range(3_000):
        manager.allocate_slots(request, 1)
    assert play(finish(manager)).num_operations == 3_001
    if kvpool.BACKEND == "native":
        rows = [len(message.requests) // 4 for message in messages_of(path) if isinstance(message, PlainAllocations)]
        assert 64 <= max(rows) <= 256 and path.stat().st_size < 100_000


# What changes nothing that a later call depends on, or only what a call that is recorded returns.
NOT_RECORDED = {
    *("can_ever_fit", "create_kv_cache_blocks", "estimate_cached_tokens", "find_copy_target_ids"),
    *("find_miscounted_block", "get_num_free_blocks", "free_copied_blocks"),  # the last: its pool's call is
    *("find_own_cached_ids", "find_uncomputed_ids", "get_block_ids", "get_blocks", "get_num_common_prefix_blocks"),
    *("make_prefix_cache_stats", "prefix_cache_lookup_enabled", "record_prefix_cache_stats", "take_events"),
    "truncate_computed_blocks",
}
POOL_NOT_RECORDED = {
    *("check", "emit_cached_block_events", "find_prefix_ids", "get_cached_block", "get_num_free_blocks"),
    *("get_ref_counts", "get_usage", "is_block_writable", "new_block_table", "take_events"),
}


def test_a_new_call_is_recorded_or_said_to_need_none() -> None:
    names = {NAME_OF[kind] for kind in OPERATIONS}
    for plain, prefix, others in (
        (PlainKVCacheManager, "", NOT_RECORDED),
        (kvpool.BlockPool, "pool.", POOL_NOT_RECORDED),
    ):
        calls = {name for name in dir(plain) if not name.startswith("_") and callable(getattr(plain, name))}
        wanted = {name.removeprefix(prefix) for name in names if ("pool." in name) == bool(prefix)}
        assert wanted <= calls and not wanted & others
        assert calls - wanted - others <= {"event_format"}


def test_what_a_recording_tells_and_what_it_does_not(path: Path) -> None:
    manager = make_manager(path, BACKEND_NAMES[0])
    request = ManagerRequest("SECRET 1", [1_234_567_890] * 9)
    manager.allocate_slots(request, 9)
    data = finish(manager).read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert request.block_hashes[1] in data
    assert b"SECRET" not in data and b"layer" not in data
    assert not any(struct.pack(order, 1_234_567_890) in data for order in ("<I", ">I", "<q", ">q"))


# ---- off, and on ----

WHICH = """
import sys
from kvpool.kv_cache_manager import KVCacheManager, PlainKVCacheManager
print(KVCacheManager is PlainKVCacheManager, "kvpool.recording.calls" in sys.modules, "kvpool.playback" in sys.modules)
"""


@pytest.mark.parametrize(
    ("value", "answer"), [(None, "True False False"), ("", "True False False"), ("f", "False True False")]
)
def test_without_the_variable_the_class_is_the_plain_one(value: str | None, answer: str, tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "KVPOOL_RECORD"}
    if value is not None:
        environment["KVPOOL_RECORD"] = value
    done = subprocess.run(
        [sys.executable, "-c", WHICH], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (answer, "")
    assert os.listdir(tmp_path) == []  # a file comes with a manager


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 50, "\u0663"])
def test_a_size_that_is_none_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_RECORD", "f")
    monkeypatch.setenv("KVPOOL_RECORD_MB", value)
    with pytest.raises(InvalidArgumentError, match="KVPOOL_RECORD_MB is a number of megabytes from 1 to"):
        RecordingSettings.from_environment()


def test_a_recording_is_never_written_over(path: Path) -> None:
    managers = [make_manager(path, BACKEND_NAMES[0]) for _ in range(3)]
    assert [finish(manager) for manager in managers] == [path, Path(f"{path}-2"), Path(f"{path}-3")]
    Path(f"{path}-4.1").touch()  # the rest of another one
    assert finish(make_manager(path, BACKEND_NAMES[0])) == Path(f"{path}-5")


def test_a_recording_ends_with_its_manager(path: Path) -> None:
    manager = make_manager(path, BACKEND_NAMES[0])
    request = ManagerRequest("r", range(9))
    manager.allocate_slots(request, 9)
    del manager
    gc.collect()
    report = play(path)
    assert (report.num_operations, report.notes) == (1, [])


# ---- what a playback finds ----


def a_recording(path: Path) -> list[Any]:
    manager = make_manager(path, BACKEND_NAMES[0])
    drive_all(manager)
    return messages_of(finish(manager))


def test_an_answer_that_was_not_recorded_so_is_named(path: Path) -> None:
    messages = a_recording(path)
    results = [i for i, message in enumerate(messages) if isinstance(message, (Result, Failure))]
    num_tried = 0
    for number, place in enumerate(results, 1):
        answer = messages[place]
        if isinstance(answer, Failure):
            wrong: Any = Failure("refused", "NoFreeBlocksError")
        elif answer.block_ids:
            wrong = Result([*answer.block_ids[:-1], answer.block_ids[-1] + pack([5])], answer.numbers)
        else:
            wrong = Result(answer.block_ids, [*answer.numbers, 1])
        path.write_bytes(file_of([*messages[:place], wrong, *messages[place + 1 :]]))
        report = play_recording(path)
        assert report.finding is not None and report.finding.operation == number
        assert report.finding.call.startswith(NAME_OF[type(messages[place - 1])] + "(")
        assert "recorded: " in report.finding.reason
        num_tried += 1
    assert num_tried > 40


def faulty_pool(base: Any, block_id: int) -> Any:
    """A pool that frees blocks in the wrong order, if the last one of them is this one."""

    class FaultyPool(base):  # type: ignore[misc]
        def free_blocks(self, ordered_blocks: Any, prepend: bool = False) -> None:
            blocks = list(ordered_blocks)
            is_wrong = not prepend and len(blocks) > 1 and blocks[0].block_id == block_id
            super().free_blocks(blocks[::-1] if is_wrong else blocks, prepend)

    return FaultyPool


@pytest.mark.parametrize("check_every", [1, 7, 1000])
def test_an_implementation_that_goes_wrong_is_named_at_the_operation(
    check_every: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(path, BACKEND_NAMES[0], FULL, ("window", 4, 5, False))
    requests = [ManagerRequest(f"r{i}", range(50 * i, 50 * i + 10)) for i in range(4)]
    for request in requests:  # operations 1 to 4
        manager.allocate_slots(request, 10)
    for request in requests:  # 5 to 8
        manager.free(request)
    for _ in range(20):
        manager.new_step_starts()
    finish(manager)
    assert play_recording(path, check_every=check_every).finding is None
    if len(BACKEND_NAMES) == 1:
        return
    monkeypatch.setattr(player, "BlockPool", faulty_pool(kvpool.BlockPool, 9))
    report = play_recording(path, check_every=check_every)
    assert report.finding is not None
    assert (report.finding.operation, report.finding.call) == (6, "free(request=1)")
    assert "native and reference differ in the free list" in report.finding.reason


def test_a_broken_invariant_is_named_at_the_operation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(path, BACKEND_NAMES[0])
    drive_all(manager)
    finish(manager)

    class Broken(reference.BlockPool):
        def touch_ids(self, ids: Any) -> None:
            super().touch_ids(ids)
            self.free_block_queue._num_free -= 1

    monkeypatch.setattr(player.reference, "BlockPool", Broken)
    report = play_recording(path)
    assert report.finding is not None and report.finding.call.startswith("pool.touch_ids(block_ids=[")
    assert report.finding.reason.startswith("reference is broken: ")


def test_a_manager_that_went_wrong_when_it_was_recorded_is_named(path: Path) -> None:
    """Not at the fault, which nobody has seen, but where it first shows."""
    pool_class = faulty_pool(POOLS[BACKEND_NAMES[0]], 3)
    window = ("window", 4, 50, False)
    manager = make_manager(path, BACKEND_NAMES[0], window, num_blocks=8, block_pool_class=pool_class)
    one, other = ManagerRequest("one", range(9)), ManagerRequest("other", range(100, 109))
    manager.allocate_slots(one, 9)
    manager.free(one)
    manager.new_step_starts()
    manager.allocate_slots(other, 9)
    manager.allocate_slots(ManagerRequest("third", range(200, 209)), 9)
    report = play_recording(finish(manager))
    assert report.finding is not None and report.finding.operation == 5
    words = report.finding.reason.split("; ")
    assert len(words) == len(BACKEND_NAMES) + 1 and words[-1].startswith("recorded: blocks [[")
    assert words[0].removeprefix(f"{BACKEND_NAMES[0]}: ") != words[-1].removeprefix("recorded: ")


def test_a_defect_that_shows_again_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of kvpool's refusals; code of the caller's that failed is not here, and so not named."""
    messages = a_recording(path)
    place = next(i for i, message in enumerate(messages) if isinstance(message, Result))
    path.write_bytes(file_of([*messages[:place], Failure("failed", "AssertionError")]))
    report = play_recording(path)
    assert (report.finding, report.num_skipped) == (None, 1)

    def fail(self: Any) -> None:
        raise AssertionError("no such step")

    monkeypatch.setattr(KVCacheManagerBase, "new_step_starts", fail)
    report = play_recording(path)
    assert str(report.finding) == (
        "operation 1, new_step_starts(): it fails as recorded, with AssertionError: no such step"
    )


def test_events_do_not_change_what_is_given(path: Path) -> None:
    """A recording with events, played without them."""
    manager = make_manager(path, BACKEND_NAMES[0], FULL, ("full", 8, 0, False), enable_kv_cache_events=True)
    requests = [ManagerRequest(f"r{i}", [i % 3] * 30) for i in range(9)]
    for request in requests:
        hit, num_tokens, _ = manager.get_computed_blocks_and_boundary(request)
        if manager.allocate_slots(request, 30 - num_tokens, num_tokens, hit) is None:
            manager.free(requests[0])
    assert len(manager.take_events()) > 5
    head, *rest = messages_of(finish(manager))
    assert head.setup.enable_kv_cache_events and play(path).num_operations > 15
    setup = msgspec.structs.replace(head.setup, enable_kv_cache_events=False)
    path.write_bytes(file_of([msgspec.structs.replace(head, setup=setup), *rest]))
    assert play(path).num_operations > 15
