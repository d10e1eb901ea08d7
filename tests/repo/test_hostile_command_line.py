"""Every option of every command with values that nobody should pass, and what becomes of an output that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import IS_PURE_PYTHON
from manager_layouts import Layout, ManagerRequest, make_config
from recordings import finish, recording_to

pytest.importorskip("numpy")

import typer.main
from typer.testing import CliRunner

from kvpool.cli import app

pytestmark = pytest.mark.skipif(IS_PURE_PYTHON, reason="the command line is the same, its replays take minutes")

PURE_PYTHON = os.environ.get("KVPOOL_PURE_PYTHON") == "1"
FASTEST = "reference" if PURE_PYTHON else "native"
REQUEST = {"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [7, 8]}
MAX_LINE = 1_100

HOSTILE = {
    "nothing": "",
    "0": "0",
    "-1": "-1",
    "largest int32": str(2**31 - 1),
    "2**31": str(2**31),
    "2**40": str(2**40),
    "2**63": str(2**63),
    "2**70": str(2**70),
    "-2**70": str(-(2**70)),
    "4,000 digits": "9" * 4_000,
    "5,000 digits": "9" * 5_000,
    "fraction": "1.5",
    "nan": "nan",
    "inf": "inf",
    "-inf": "-inf",
    "1e400": "1e400",
    "1e308": "1e308",
    "5e-324": "5e-324",
    "text": "xyz",
    "zero byte": "a\0b",
    "newlines": "a\nb\n\nc",
    "escapes": "\x1b[31m\x07\x7f",
    "half a pair": "x\udc80y",
    "commas": "1,2,,x",
    "3 MB": "x" * 3_000_000,
    "long numbers": "7," * 300_000,
    "folder": "/proc",
    "full disk": "/dev/full",
    "endless": "/dev/zero",
    "absent": "/nonexistent/folder/file",
    "no folder": "/dev/null/file",
    "unreadable": "/proc/self/mem",
    "stdout": "-",
    "option": "--help-me",
}

# Arguments of a run that is short and works, to which one hostile value is added. A new command has a row here.
RUNS: dict[str, list[list[str]]] = {
    "replay": [
        ["--limit", "5", "--blocks", "1000", "--compare", FASTEST],
        ["{folder}/trace.jsonl", "--compare", FASTEST, "--json", "out.json"],
    ],
    "generate": [["--model", "{folder}/model", "--max-new-tokens", "1", "Hi"]],
    "replay-ops": [["{folder}/recording", "--json", "out.json"]],
    "doctor": [[]],
    "keygen": [["keys"]],
}
ONLY_FLAGS = {"doctor"}
COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
LOADS_MODELS = {"generate", "worker"}
# A program of its own, whose run ends for want of a scheduler.
WORKER = "worker"
if importlib.util.find_spec("zmq") is not None:
    from kvpool.worker.__main__ import app as worker_app

    COMMANDS[WORKER] = typer.main.get_command(worker_app)
    RUNS[WORKER] = [["--address", "ipc://{folder}/nobody", "--model", "{folder}/model", "--timeout", "0.1"]]
# They would reach for what this process has inherited, or start processes.
IN_A_PROCESS = {(WORKER, "--parent-pipe"), (WORKER, "--tensor-parallel")}
OPTIONS = [
    pytest.param(
        name,
        parameter.opts[0] if parameter.param_type_name == "option" else None,
        marks=[pytest.mark.dataplane] if name in LOADS_MODELS else [],
    )
    for name, command in sorted(COMMANDS.items())
    for parameter in command.params
    if not getattr(parameter, "is_flag", False) and "--help" not in parameter.opts
    if (name, parameter.opts[0]) not in IN_A_PROCESS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "trace.jsonl").write_text(json.dumps(REQUEST) + "\n")
    record_a_run(folder / "recording")
    return folder


def record_a_run(path: Path) -> None:
    with recording_to(path) as manager_class:
        manager = manager_class(make_config(Layout([("full", 4, 0, False)], 10)), 100)
    request = ManagerRequest("r", range(9))
    manager.allocate_slots(request, 9)
    manager.free(request)
    finish(manager)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    pytest.importorskip("transformers")
    from kvpool.worker.models.random_model import write_random_llama

    write_random_llama(folder / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    return folder / "model"


def check_clean(result: Any, what: str, *failures: str) -> None:
    """It worked, or it ended with one short line and an exit code that says why; 1 for want of memory, or one of the
    failures."""
    assert result.exception is None or isinstance(result.exception, SystemExit), (what, repr(result.exception))
    if result.exit_code == 0:
        return
    is_failure = result.exit_code == 1 and any(word in result.stderr for word in ("memory", *failures))
    assert result.exit_code == 2 or is_failure, (what, result.stderr[:500])
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), (what, result.stderr[:500])
    assert len(result.stderr) <= MAX_LINE and "Traceback" not in result.output, what
    assert all(char.isprintable() for char in result.stderr[:-1]), what


def test_every_command_has_a_run() -> None:
    assert set(COMMANDS) <= set(RUNS), "a new command needs a run in RUNS, so that its options are tried"
    tried = {option.values[0] for option in OPTIONS}
    assert tried >= set(COMMANDS) - ONLY_FLAGS and len(OPTIONS) > 30


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.dataplane] if name in LOADS_MODELS else []) for name in sorted(COMMANDS)],
)
def test_the_runs_work(name: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> None:
    def works(result: Any) -> bool:
        told = "SchedulerLostError: the scheduler at ipc://" if name == WORKER else ""
        return result.exit_code == (1 if told else 0) and (told in result.stderr if told else not result.stderr)

    run_all(name, folder, request, tmp_path, monkeypatch, works)


def run_all(
    name: str,
    folder: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_right: Callable[[Any], bool],
    *more: str,
) -> None:
    if name in LOADS_MODELS:
        request.getfixturevalue("model")
    if name == WORKER:
        monkeypatch.setattr("kvpool.worker.transport.link._LINGER_SECONDS", 0.0)  # there is nobody to be told
    monkeypatch.chdir(tmp_path)
    for run in RUNS[name]:
        arguments = [*(word.format(folder=folder) for word in run), *more]
        result = CliRunner().invoke(*((worker_app, arguments) if name == WORKER else (app, [name, *arguments])))
        assert is_right(result), (arguments, result.stderr[:500], result.exception)


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda value: value or "argument")
def test_a_hostile_value_is_one_line_or_works(
    name: str, option: str | None, folder: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch
) -> None:
    for label, value in HOSTILE.items():
        if name == "keygen" and value.startswith("/"):
            continue  # it would make keys there, if it may

        def is_clean(result: Any, label: str = label, value: str = value) -> bool:
            if name == WORKER:
                check_clean(result, f"{name} {option} {label}", "SchedulerLostError", "CacheMemoryError")
                # What is wrong, or as much of it as is shown.
                told = (option, repr(value)[1:20], value.strip()[:15])
                assert result.exit_code == 1 or any(word and word in result.stderr for word in told), result.stderr
            else:
                check_clean(result, f"{name} {option} {label}")
            return True

        more = [value] if option is None else [option, value]
        run_all(name, folder, request, tmp_path, monkeypatch, is_clean, *more)


@pytest.mark.dataplane
@pytest.mark.parametrize("option", sorted(option for name, option in IN_A_PROCESS if name == WORKER))
def test_a_worker_that_is_told_nonsense_ends_with_one_line(option: str, folder: Path, model: Path) -> None:
    """In processes, which would end with what they take for the pipe of who has started them."""
    pytest.importorskip("zmq")
    usual = [sys.executable, "-m", "kvpool.worker", "--address", f"ipc://{folder}/nobody", "--model", str(model)]
    for label in (
        "nothing",
        "0",
        "-1",
        "largest int32",
        "2**31",
        "2**70",
        "4,000 digits",
        "fraction",
        "text",
        "escapes",
    ):
        done = subprocess.run(
            [*usual, "--timeout", "0.1", option, HOSTILE[label]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), (label, done.stderr[-500:])
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), (label, done.stderr[-500:])
        assert option in done.stderr or HOSTILE[label][:15] in done.stderr, (label, done.stderr)


@pytest.mark.parametrize("arguments", [["x" * 3_000_000], ["--" + "x" * 3_000_000], ["replay", "--nothing\n\n"]])
def test_hostile_commands_are_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    check_clean(result, "")
    assert result.exit_code == 2


def test_without_arguments_there_is_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "replay" in result.output and result.exit_code in (0, 2)


# ---- files that are written ----


def test_a_plot_goes_to_the_file_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, magic in (("plot", b"\x89PNG"), ("PLOT.SVG", b"<?xml"), ("a.b.pdf", b"%PDF")):
        result = CliRunner().invoke(app, ["replay", "--limit", "5", "--compare", FASTEST, "--plot", name])
        assert result.exit_code == 0, result.stderr
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert sorted(os.listdir(tmp_path)) == ["PLOT.SVG", "a.b.pdf", "plot"]


def test_an_unknown_kind_of_plot_is_found_before_the_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvpool.replay.simulator.simulate", None)
    result = CliRunner().invoke(app, ["replay", "--plot", "plot.xyz"])
    check_clean(result, "")
    assert "'xyz' is not supported" in result.stderr and os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_may_not_be_written_is_found_before_the_replay(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = CliRunner().invoke(app, ["replay", "--json", str(tmp_path / "out.json"), "--limit", "5"])
    assert (result.exit_code, result.stdout) == (2, "") and "can't be written" in result.stderr


# ---- outputs that fail, in a process of their own ----

KVPOOL = [sys.executable, "-m", "kvpool.cli"]
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVPOOL, *map(str, arguments)], stderr=subprocess.PIPE, text=True, timeout=300, check=False, **options
    )


@NEEDS_FULL
@pytest.mark.parametrize("arguments", [["--version"], ["doctor"], ["replay", "--limit", "5"], ["replay", "--help"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: output: No space left on device\n")
    with open("/dev/full", "w") as full, open("/dev/full", "w") as also_full:
        done = subprocess.run([*KVPOOL, *arguments], stdout=full, stderr=also_full, timeout=300, check=False)
    assert done.returncode == 2


@NEEDS_FULL
def test_a_full_disk_does_not_cost_the_files(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("replay", "--limit", 5, "--json", tmp_path / "out.json", stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: output: No space left on device\n")
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 5
    done = run("replay", "--limit", 5, "--json", "/dev/full", stdout=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (2, "error: /dev/full: No space left on device\n")


@pytest.mark.dataplane
@pytest.mark.parametrize("prompts", [["Hi"], ["Hi", "Ho"]])
def test_what_was_generated_is_not_lost_with_stdout(model: Path, tmp_path: Path, prompts: list[str]) -> None:
    usual = ["generate", "--model", model, "--max-new-tokens", 4, "--ignore-eos"]
    ends = {"closed": (141, "")}
    if Path("/dev/full").exists():
        ends["full"] = (2, "error: output: No space left on device\n")
    for kind, end in ends.items():
        path = tmp_path / f"{kind}.json"
        stdout = open("/dev/full", "w") if kind == "full" else closed_pipe()  # noqa: SIM115
        with stdout:
            done = run(*usual, "--json", path, *prompts, stdout=stdout)
        assert (done.returncode, done.stderr) == end
        assert [len(tokens) for tokens in json.loads(path.read_text())["tokens"]] == [4] * len(prompts)


def closed_pipe() -> Any:
    """The end of a pipe that is written to, where nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["replay", "--limit", "5"]])
def test_a_reader_that_goes_away_ends_it_quietly(arguments: list[str]) -> None:
    with closed_pipe() as stdout:
        done = run(*arguments, stdout=stdout)
    assert done.stderr == ""
    assert done.returncode == 141 or (arguments == ["--help"] and done.returncode == 1)  # rich ends the program itself


@pytest.mark.dataplane
def test_text_that_stdout_can_not_encode_is_shown_as_far_as_it_can_be(model: Path) -> None:
    usual = ["generate", "--model", model, "--max-new-tokens", 20, "--ignore-eos", "Hi"]
    lines = {}
    for encoding in ("utf-8", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        done = subprocess.run(
            [*KVPOOL, *map(str, usual)], capture_output=True, env=environment, timeout=300, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        lines[encoding] = done.stdout.decode(encoding)
    assert "\N{REPLACEMENT CHARACTER}" in lines["utf-8"]  # random bytes are no text
    assert "\\ufffd" in lines["ascii"] and "blocks of 16 tokens" in lines["ascii"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.dataplane
def test_an_interrupt_ends_generate_with_one_line(model: Path) -> None:
    usual = ["generate", "--model", str(model), "--max-new-tokens", "2000", "--ignore-eos", "Hi"]
    with subprocess.Popen(
        [*KVPOOL[:1], "-u", *KVPOOL[1:], *usual],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"model: ")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, b"interrupted\n")
