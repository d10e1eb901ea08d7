"""The command `kvpool replay-ops`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from manager_layouts import Layout, ManagerRequest, make_config
from recordings import file_of, finish, recording_to
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.playback.limits import DEFAULT_LIMITS
from kvpool.playback.reader import RecordingReader
from kvpool.recording.operations import Result, pack


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    with recording_to(path) as manager_class:
        manager = manager_class(make_config(Layout([("full", 4, 0, False)], 10)), 100)
    request = ManagerRequest("r", range(9))
    manager.allocate_slots(request, 9)
    manager.reset_prefix_cache()
    manager.free(request)
    return finish(manager)


def tamper(path: Path) -> None:
    """The first result is another one."""
    with RecordingReader(path, DEFAULT_LIMITS) as reader:
        messages: list[Any] = [reader.head, *(placed.message for placed in reader)]
    place = next(i for i, message in enumerate(messages) if isinstance(message, Result))
    messages[place] = Result([pack([1, 2, 7])], [])
    path.write_bytes(file_of(messages))


def test_what_is_right_is_said_in_a_few_lines(path: Path) -> None:
    done = CliRunner().invoke(app, ["replay-ops", str(path)])
    assert (done.exit_code, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"{path}: recorded with kvpool ")
    assert second == f"operations 1 to 3 on {' and '.join(BACKEND_NAMES)}"
    assert third == "all the same, and as recorded; states compared and invariants checked after each operation"


def test_a_divergence_is_named_and_the_exit_code_is_1(path: Path) -> None:
    tamper(path)
    done = CliRunner().invoke(app, ["replay-ops", str(path)])
    assert (done.exit_code, done.stderr) == (1, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("operation 1, allocate_slots(request=0, num_new_tokens=9, ")
    halves = "; ".join(f"{name}: blocks [[1, 2, 3]]" for name in BACKEND_NAMES)
    assert last.endswith(f": {halves}; recorded: blocks [[1, 2, 7]]")


def test_the_same_as_json(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert CliRunner().invoke(app, ["replay-ops", str(path), "--json", str(out)]).exit_code == 0
    report = json.loads(out.read_text())
    assert (report["num_operations"], report["finding"], report["implementations"]) == (3, None, BACKEND_NAMES)
    tamper(path)
    done = CliRunner().invoke(app, ["replay-ops", str(path), "--json", "-"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["finding"]["operation"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-bytes", "100"], "bytes, more than 100 (--max-bytes raises the limit)"),
        (["--max-blocks", "9"], "a pool of 10 blocks, more than 9 (--max-blocks raises the limit)"),
        (["--max-tokens", "8"], "request 0 has 9 tokens, more than 8 (--max-tokens raises the limit)"),
    ],
)
def test_limits_are_named_with_their_options(path: Path, options: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["replay-ops", str(path), *options])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {path}: ") and done.stderr.endswith(f"{reason}\n")


def test_a_pool_that_memory_has_no_room_for_is_known_before_it_is_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.cli.memory.free_bytes", lambda: 500)
    done = CliRunner().invoke(app, ["replay-ops", str(path)])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: not enough memory: 10 blocks of native take at least")


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    for name, contents in (("empty", b""), ("other", b"x" * 100), ("begun", b"kvpool operations\n")):
        (tmp_path / name).write_bytes(contents)
        done = CliRunner().invoke(app, ["replay-ops", str(tmp_path / name)])
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: {tmp_path / name}: ")
