"""Temporary folders that outlive nobody: not those of processes that are killed, either."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.worker.transport.local_workers import LocalWorkers
from kvpool.worker.transport.scratch_folder import scratch_folder

pytestmark = [
    pytest.mark.dataplane,
    pytest.mark.skipif(not Path("/bin/sh").exists(), reason="needs a shell"),
]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20.0
USERS = {
    "a folder": "from kvpool.worker.transport.scratch_folder import scratch_folder as use; arguments = ()",
    "workers": "from kvpool.worker.transport.local_workers import LocalWorkers as use\n"
    "arguments = 2, [], \nuse = __import__('functools').partial(use, command=[sys.executable, '-c', RANK])",
}
RANK = """
import sys, time
from pathlib import Path
from kvpool.worker.transport.lifeline import end_with
end_with(int(sys.argv[sys.argv.index("--parent-pipe") + 1]))
meeting = Path(sys.argv[sys.argv.index("--rendezvous") + 1])
meeting.write_text("here")
time.sleep(600)
"""
# Who starts the tests in the background has SIGINT ignored.
USER = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
RANK = {rank!r}
{user}
with use(*arguments) as used:
    if isinstance(used, str):
        (Path(used) / "a file").write_text("text")
        (Path(used) / "a folder").mkdir()
    print("ready", flush=True)
    {act}
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, now and by new processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def start(user: str, act: str = "time.sleep(600)") -> subprocess.Popen[bytes]:
    source = USER.format(user=USERS[user], rank=RANK, act=act)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def wait_for(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, "stopped"])
@pytest.mark.parametrize("user", USERS)
def test_nothing_is_left_of_a_process_that_is_killed(user: str, how: Any, temporary: Path) -> None:
    process = start(user)
    try:
        wait_for(lambda: any(temporary.glob("kvpool-*/*")))
        if how == "stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            assert any(temporary.iterdir())
            how = signal.SIGKILL
        process.send_signal(how)
        process.wait(SECONDS)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(temporary.iterdir()))


@pytest.mark.parametrize("act", ["pass", "sys.exit(3)", "raise RuntimeError", "os._exit(4)"])
def test_nothing_is_left_of_a_process_that_ends(act: str, temporary: Path) -> None:
    process = start("a folder", act)
    process.communicate()
    wait_for(lambda: not any(temporary.iterdir()))


def test_a_forked_copy_does_not_keep_it(temporary: Path) -> None:
    process = start(
        "a folder", "os.fork() or (time.sleep(6), os._exit(0)); print('forked', flush=True); time.sleep(600)"
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        assert stdout.readline() == b"forked\n"
        process.kill()
        process.wait()
        wait_for(lambda: not any(temporary.iterdir()))
        os.set_blocking(stdout.fileno(), False)
        assert stdout.read() is None, "the copy is gone as well"


def test_it_is_gone_behind_the_with(temporary: Path) -> None:
    with scratch_folder() as folder:
        path = Path(folder)
        assert path.parent == temporary and path.name.startswith("kvpool-")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "-rf").write_text("a name that looks like an option")
    assert not any(temporary.iterdir())
    with pytest.raises(KeyError), scratch_folder() as folder:
        os.rmdir(folder)  # somebody else has cleaned up
        raise KeyError
    assert not any(temporary.iterdir())


def test_workers_that_cannot_be_started_leave_nothing(temporary: Path) -> None:
    with pytest.raises(OSError):
        LocalWorkers(2, [], command=["/nonexistent/program"])
    assert not any(temporary.iterdir())
