"""What goes wrong with a recording does not with the run; a process that dies leaves a recording that can be played."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from manager_layouts import Layout, ManagerRequest, make_config
from recordings import finish, play, recording_to

import kvpool
from kvpool import reference
from kvpool.playback.player import play_recording

POOLS = {"native": kvpool.BlockPool, "reference": reference.BlockPool}
needs_root_not = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def make_manager(path: Path, **options: Any) -> Any:
    with recording_to(path) as manager_class:
        return manager_class(make_config(Layout([("full", 4, 0, False)], 40)), 1000, **options)


def do_something(manager: Any, num_times: int = 5) -> int:
    """The number of calls."""
    for i in range(num_times):
        request = ManagerRequest(f"r{i}", [i % 7] * 9 + [i] * 9)
        hit, num_tokens, _ = manager.get_computed_blocks_and_boundary(request)
        assert manager.allocate_slots(request, 18 - num_tokens, num_tokens, hit) is not None
        manager.free(request)
    manager.block_pool.check()
    return 3 * num_times


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "kvpool" and record.levelname == "WARNING"]


# ---- a process that dies ----

RUN = """
import os, signal, sys
from pathlib import Path
from test_recording_faults import *
path, number = Path(sys.argv[1]), int(sys.argv[2])

class Deadly(kvpool.BlockPool):
    def touch_ids(self, ids):
        if len(self.stopped) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        self.stopped.append(0)
        super().touch_ids(ids)

Deadly.stopped = []
manager = make_manager(path, block_pool_class=Deadly)
for i in range(100):
    do_something(manager, 1)
    ids = manager.block_pool.allocate_ids(2)
    manager.block_pool.touch_ids(ids)
    manager.block_pool.free_ids(ids)
    manager.block_pool.free_ids(ids)
"""


def run_child(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("number", [0, 1, 13])
def test_what_was_recorded_survives_kill_9(number: int, path: Path) -> None:
    done = run_child(RUN, path, number)
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = play(path)
    last = 7 * number + 5  # the fifth of seven calls a round
    assert report.num_operations == last
    assert report.notes == [f"{path}: ends in operation {last}, whose result is not in it"]


EXIT = """
import sys
from pathlib import Path
from test_recording_faults import *
manager = make_manager(Path(sys.argv[1]))
print(do_something(manager))
if len(sys.argv) > 2:
    raise SystemExit(sys.argv[2])
"""


@pytest.mark.parametrize("arguments", [[], ["an error"]])
def test_a_process_that_ends_leaves_every_result(arguments: list[str], path: Path) -> None:
    done = run_child(EXIT, path, *arguments)
    report = play(path)
    assert (report.num_operations, report.notes) == (int(done.stdout), [])


FORK = """
import os, sys
from pathlib import Path
from test_recording_faults import *
path = Path(sys.argv[1])
manager = make_manager(path)
num_calls = do_something(manager)
size = path.stat().st_size
child = os.fork()
do_something(manager)
if not child:
    manager._recorder.close()
    sys.exit(0 if not manager._recorder.takes_calls and path.stat().st_size >= size else 1)
_, status = os.waitpid(child, 0)
do_something(manager)
print(3 * num_calls, status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_recording_is_the_parents(path: Path) -> None:
    done = run_child(FORK, path)
    num_calls, status = map(int, done.stdout.split())
    assert status == 0, done.stderr
    report = play(path)
    assert (report.num_operations, report.notes) == (num_calls, [])
    assert os.listdir(path.parent) == [path.name]


# ---- a disk that is full ----

LIMITED = """
import resource, sys
from pathlib import Path
from test_recording_faults import *
path, limit = Path(sys.argv[1]), int(sys.argv[2])
manager = make_manager(path)
do_something(manager)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
do_something(manager, 200)
print(manager._recorder.takes_calls)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("limit", [5_000, 5_001, 5_017, 12_345])
def test_a_limit_on_the_files_size_ends_the_recording_with_one_line(limit: int, path: Path) -> None:
    done = run_child(LIMITED, path, limit)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
    assert done.stderr.strip() == f"{path}: the recording ends here: File too large"
    assert 4_000 < path.stat().st_size <= limit
    report = play(path)
    assert report.num_operations > 20
    assert not [note for note in report.notes if "ends within" in note]  # cut back to the last message that is whole


@pytest.mark.parametrize("num_written", [0, 1, 10, 40])
@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_a_full_disk_ends_the_recording_and_not_the_run(
    backend_name: str, num_written: int, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(path, block_pool_class=POOLS[backend_name])
    num_calls = do_something(manager)
    size = path.stat().st_size
    pwrite = os.pwrite

    def write_a_part(descriptor: int, data: Any, place: int) -> int:
        if place > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        if num_written == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[:num_written], place)

    monkeypatch.setattr(os, "pwrite", write_a_part)
    do_something(manager)
    monkeypatch.setattr(os, "pwrite", pwrite)
    do_something(manager)
    assert warnings_of(caplog) == [f"{path}: the recording ends here: No space left on device"]
    assert path.stat().st_size == size
    report = play(path)  # the last result went with what could not be written
    assert report.num_operations == num_calls
    assert report.notes == [f"{path}: ends in operation {num_calls}, whose result is not in it"]


def test_a_next_file_that_can_not_be_made_leaves_the_last_one(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(path)
    num_calls = do_something(manager)
    (path.parent / "recording.new").mkdir()
    manager._recorder._max_bytes = 0
    do_something(manager)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{path}: the recording ends here: ")
    assert play(path).num_operations == num_calls


def test_a_folder_that_is_gone_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    manager = make_manager(folder / "recording")
    do_something(manager)
    (folder / "recording").unlink()
    folder.rmdir()
    do_something(manager)  # into the file that has no name any more
    manager._recorder._max_bytes = 0
    do_something(manager)
    assert warnings_of(caplog) == [f"{folder / 'recording'}: the recording ends here: No such file or directory"]


# ---- a file that can't be made ----


def make_strange(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "victim")
    return {
        "no folder": (tmp_path / "absent" / "recording", "No such file or directory"),
        "a folder": (tmp_path, "is no regular file"),
        "a device": (Path("/dev/null"), "is no regular file"),
        "a link": (link, "is no regular file"),
        "a long name": (tmp_path / ("x" * 300), "File name too long"),
    }


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("kind", ["no folder", "a folder", "a device", "a link", "a long name"])
def test_where_no_file_can_be_made_the_run_goes_on(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, reason = make_strange(tmp_path)[kind]
    manager = make_manager(path)
    do_something(manager)
    (warning,) = warnings_of(caplog)
    assert "nothing is recorded: " in warning and reason in warning
    assert not (tmp_path / "victim").exists()


@needs_root_not
def test_a_folder_that_may_not_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    do_something(make_manager(tmp_path / "recording"))
    assert warnings_of(caplog) == [f"{tmp_path / 'recording'}: nothing is recorded: Permission denied"]


def test_groups_of_other_classes_are_not_recorded(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.cache import managers
    from kvpool.cache.spec import FullAttentionSpec

    class OwnManager(managers.FullAttentionManager):
        pass

    monkeypatch.setitem(managers.MANAGER_OF_SPEC, FullAttentionSpec, OwnManager)
    do_something(make_manager(path))
    assert warnings_of(caplog) == [f"{path}: nothing is recorded: a group of OwnManager for FullAttentionSpec"]
    assert not path.exists()


# ---- calls that can't be told ----


def test_what_can_not_be_told_is_a_gap_and_the_state_comes_after_it(path: Path) -> None:
    manager = make_manager(path)
    do_something(manager)
    strangers = kvpool.BlockPool(9, True, 4)
    strange = strangers.get_new_blocks(2)
    own = manager.block_pool.get_new_blocks(3)
    manager.block_pool.free_blocks([*strange, own[0]])  # to the pools that they are of
    request = ManagerRequest("hashes", range(9))
    request.block_hashes = ["no bytes", "no bytes"]
    with pytest.raises(TypeError):
        manager.allocate_slots(request, 9)
    with pytest.raises(TypeError):
        manager.block_pool.touch([None])
    do_something(manager)
    assert strangers.get_num_free_blocks() == 8
    report = play(finish(manager))
    assert report.num_operations == 15 + 1 + 15
    assert manager._recorder._num_gaps >= 2


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("error", [Stop, MemoryError, OSError, RuntimeError])
def test_a_call_that_ends_otherwise_is_left_out(error: type[BaseException], path: Path) -> None:
    class Collector:
        is_failing = False

        def on_block_allocated(self, block: Any) -> None:
            if self.is_failing:
                raise error("for a test")

        def on_block_accessed(self, block: Any) -> None:
            pass

        on_block_evicted = on_block_accessed

        def reset(self) -> None:
            pass

    collector = Collector()
    manager = make_manager(path, metrics_collector=collector)
    do_something(manager)
    collector.is_failing = True
    with pytest.raises(error):
        do_something(manager)
    collector.is_failing = False
    manager.release_orphans()
    do_something(manager)
    report = play(finish(manager))
    assert report.num_skipped == 1
    assert report.num_operations == 15 + 1 + (error is RuntimeError) + 1 + 15


def test_a_recording_ends_at_its_first_defect_and_is_played_up_to_there(path: Path) -> None:
    manager = make_manager(path)
    do_something(manager)
    manager._recorder.stop(ValueError("a test"))
    do_something(manager)
    assert play_recording(path).finding is None
