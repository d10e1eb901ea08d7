"""A recording that has gone round: whatever is left of it can be played, from the state that each file begins with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import manager_histories
import pytest
from conftest import BACKEND_NAMES
from manager_histories import History, Stack
from manager_layouts import MAKERS, Layout, ManagerRequest, make_config
from recordings import file_of, finish, messages_of, play, recording_to

from kvpool.playback.player import play_recording
from kvpool.recording import recorder as recorder_module
from kvpool.recording.files import RecordingFile, older
from kvpool.recording.operations import FORMAT_VERSION, Operation, PoolState, Recording, Result

SMALL = 3_000  # bytes of operations in a file
NUM_SEEDS = max(2, int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40")) // 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


@pytest.fixture
def kept_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies of the files as they were when they were full, by the recording."""
    start_anew = RecordingFile.start_anew
    kept: dict[str, list[Path]] = {}

    def keep(self: RecordingFile, beginning: bytes) -> None:
        copies = kept.setdefault(self.path, [])
        copies.append(tmp_path / f"kept {Path(self.path).name} {len(copies)}")
        shutil.copy(self.path, copies[-1])
        start_anew(self, beginning)

    monkeypatch.setattr(RecordingFile, "start_anew", keep)
    return kept


@pytest.mark.parametrize("kind", MAKERS)
def test_every_file_of_a_history_can_be_played_alone(
    kind: str, path: Path, kept_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_files = 0
    for seed in range(NUM_SEEDS):
        with recording_to(path) as manager_class:
            monkeypatch.setattr(manager_histories, "KVCacheManager", manager_class)
            history = History(100 + seed, lambda layout: [Stack(name, layout) for name in BACKEND_NAMES], kinds=(kind,))
        for stack in history.stacks:
            stack.manager._recorder._max_bytes = SMALL
        history.run()
        for stack in history.stacks:
            num_operations = stack.manager._recorder._num_operations
            last = finish(stack.manager)
            files = [*kept_files.pop(str(last), []), last.with_name("last")]
            shutil.copy(last, files[-1])
            next_operation = 1
            for file in files:
                report = play(file)
                assert (report.first_operation, report.num_skipped) == (next_operation, 0)
                next_operation += report.num_operations
            assert next_operation == num_operations + 1
            num_files += len(files)
    assert num_files > 3 * len(BACKEND_NAMES)


def make_manager(path: Path, *groups: Any, megabytes: int | None = None) -> Any:
    with recording_to(path, megabytes) as manager_class:
        return manager_class(make_config(Layout(list(groups or [("full", 4, 0, False)]), 40)), 1000)


def do_something(manager: Any, num_times: int) -> None:
    for i in range(num_times):
        request = ManagerRequest(f"r{i}", [i % 7] * 9 + [i] * 9)
        hit, num_tokens, _ = manager.get_computed_blocks_and_boundary(request)
        assert manager.allocate_slots(request, 18 - num_tokens, num_tokens, hit) is not None
        manager.free(request)


def test_two_files_of_bounded_size_are_left(path: Path) -> None:
    manager = make_manager(path, megabytes=1)
    do_something(manager, 4_000)
    recorder = manager._recorder
    finish(manager)
    assert recorder._segment >= 2 and sorted(os.listdir(path.parent)) == ["recording", "recording.1"]
    for file in (path, Path(older(str(path)))):
        assert file.stat().st_mode & 0o777 == 0o600
        assert 1_000 < file.stat().st_size < 2**19 + 10_000
    both = play(path)
    assert both.paths == [older(str(path)), str(path)]
    assert both.first_operation + both.num_operations == recorder._num_operations + 1
    newer_alone = path.with_name("alone")
    shutil.copy(path, newer_alone)
    alone, before = play(newer_alone), play(Path(older(str(path))))
    assert (before.first_operation, before.num_operations + alone.num_operations) == (
        both.first_operation,
        both.num_operations,
    )


def test_a_file_that_does_not_go_on_from_the_one_before_is_named(path: Path) -> None:
    """What is between them is the state: it has to be what the operations have led to."""
    manager = make_manager(path)
    manager._recorder._max_bytes = SMALL
    while manager._recorder._segment == 0:
        do_something(manager, 1)
    finish(manager)
    assert play(path).num_operations > 10
    messages = messages_of(path)
    place = next(i for i, message in enumerate(messages) if isinstance(message, PoolState))
    free = messages[place].free_ids
    messages[place].free_ids = free[4:8] + free[:4] + free[8:]
    path.write_bytes(file_of(messages))
    report = play_recording(path)
    assert report.finding is not None and report.finding.call == "the state behind it"
    assert report.finding.operation == messages[place].num_operations
    assert f"{BACKEND_NAMES[0]} and the recording differ in the free list" in report.finding.reason


def test_an_older_file_of_another_recording_is_left_out(path: Path) -> None:
    manager = make_manager(path)
    do_something(manager, 2)
    finish(manager)
    other = make_manager(path.with_name("other"))
    do_something(other, 3)
    shutil.copy(finish(other), older(str(path)))
    report = play(path)
    assert (report.first_operation, report.num_operations) == (1, 6)
    assert report.notes == [f"{older(str(path))}: is not of the same recording, or not what was before: left out"]


def test_a_state_that_is_recorded_anew_is_that_of_the_requests_that_live(path: Path) -> None:
    """Requests that left have no part in it, and those that stay are told once more."""
    manager = make_manager(path)
    requests = [ManagerRequest(f"r{i}", [i] * 9) for i in range(3)]
    for request in requests:
        manager.allocate_slots(request, 9)
        request.num_computed_tokens = 9
    manager.free(requests[0])
    manager._recorder._max_bytes = 0
    manager.allocate_slots(requests[1], 4)
    manager.free(requests[2])
    manager.get_computed_blocks_and_boundary(requests[0])
    assert manager._recorder._segment >= 3
    report = play(finish(manager))
    assert report.num_operations >= 1


def test_the_format_is_known_by_its_version(path: Path) -> None:
    manager = make_manager(path)
    do_something(manager, 1)
    head, *rest = messages_of(finish(manager))
    assert isinstance(head, Recording) and head.format_version == FORMAT_VERSION
    assert sum(isinstance(message, Operation) for message in rest) == sum(isinstance(m, Result) for m in rest) == 3
    head.format_version += 1
    path.write_bytes(file_of([head, *rest]))
    with pytest.raises(ValueError, match=f"a recording of version {FORMAT_VERSION + 1}; this kvpool reads"):
        play_recording(path)


def test_gaps_are_bounded(path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose every call is one that can't be told would have the state told at each."""
    monkeypatch.setattr(recorder_module, "MAX_GAPS", 3)
    manager = make_manager(path)
    for _ in range(10):
        with pytest.raises(TypeError):
            manager.block_pool.touch([None])
        do_something(manager, 1)
    assert not manager._recorder.takes_calls
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"{path}: the recording ends here: more than 3 calls that can't be recorded"
    ]
    assert play(path).num_operations == 9
