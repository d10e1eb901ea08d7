"""The comparison that conformance.py rests on, on recordings made here: needs no vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import halves
import pytest
from halves import PLUGINS, Half, HalfError, check_half
from outcomes import ABSENT, CRASHED, ERROR, FAILED, PASSED, SKIPPED, Difference, Outcomes, compare, read_outcomes

SESSION = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip()

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

@pytest.fixture
def broken(): raise OSError

def test_with_broken_set_up(broken): pass

@pytest.fixture
def breaks_later():
    yield
    raise OSError

def test_with_broken_clean_up(breaks_later): pass
def test_fails_with_broken_clean_up(breaks_later): assert False
"""
CRASH = "import os\ndef test_ends_the_interpreter(): os._exit(1)\ndef test_after(): pass\n"


def record(folder: Path, **files: str) -> Outcomes:
    """Run pytest with the recorder over files of these names and texts."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    recording = folder / "recording.jsonl"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "outcome_recorder",
            "-p",
            "no:cacheprovider",
            *map("{}.py".format, files),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PLUGINS), "KVPOOL_OUTCOMES": str(recording)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return read_outcomes(recording)


def test_records_each_kind_of_outcome(tmp_path: Path) -> None:
    outcomes = record(tmp_path, test_kinds=SESSION)
    assert outcomes.complete and outcomes.block_pool is None
    assert {name.removeprefix("test_kinds.py::test_"): outcome for name, outcome in outcomes.tests.items()} == {
        "passes": PASSED,
        "fails": FAILED,
        "is_skipped": SKIPPED,
        "is_expected_to_fail": SKIPPED,
        "with_broken_set_up": ERROR,
        "with_broken_clean_up": ERROR,
        "fails_with_broken_clean_up": FAILED,
    }


def test_records_files_that_do_not_load(tmp_path: Path) -> None:
    skipped = "import pytest\npytest.importorskip('no_such_module')"
    assert record(tmp_path, test_broken="import no_such_module", test_optional=skipped).tests == {
        "test_broken.py": ERROR,
        "test_optional.py": SKIPPED,
    }


def test_records_what_ran_before_a_crash(tmp_path: Path) -> None:
    outcomes = record(tmp_path, test_crash=CRASH)
    assert outcomes.tests == {"test_crash.py::test_ends_the_interpreter": CRASHED}
    assert not outcomes.complete


def test_an_interrupted_run_is_not_complete(tmp_path: Path) -> None:
    interrupt = "import pytest\ndef test_passes(): pass\ndef test_ends_the_session(): pytest.exit('enough')\n"
    outcomes = record(tmp_path, test_interrupt=interrupt)
    assert outcomes.exit_status is not None and not outcomes.complete


def test_reads_a_recording_cut_in_a_line(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    recording.write_text('{"started": "a"}\n{"test": "a", "outcome": "passed"}\n{"started": "b"}\n{"test": "b", "outc')
    assert read_outcomes(recording) == Outcomes({"a": PASSED, "b": CRASHED})


def test_equal_runs_do_not_differ() -> None:
    tests = {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": ERROR, "e": CRASHED}
    assert compare(Outcomes(tests), Outcomes(dict(reversed(tests.items())))) == []


@pytest.mark.parametrize("outcome", [FAILED, ERROR, SKIPPED, CRASHED, ABSENT])
def test_a_lost_pass_is_a_regression(outcome: str) -> None:
    kvpool = Outcomes({} if outcome == ABSENT else {"a": outcome})
    (difference,) = compare(Outcomes({"a": PASSED}), kvpool)
    assert difference == Difference("a", PASSED, outcome) and difference.is_regression


def test_other_changes_differ_without_being_regressions() -> None:
    stock = Outcomes({"fixed": FAILED, "worse": FAILED, "lost": PASSED})
    kvpool = Outcomes({"fixed": PASSED, "worse": CRASHED, "lost": FAILED, "new": PASSED})
    differences = compare(stock, kvpool)
    assert [(each.test, each.is_regression) for each in differences] == [
        ("lost", True),
        ("fixed", False),
        ("new", False),
        ("worse", False),
    ]


def is_running(process_id: int) -> bool:
    state = Path(f"/proc/{process_id}/stat")
    try:
        return not state.read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ends_what_a_run_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(halves, "EXIT_PATIENCE", 0.2)
    recording = tmp_path / "recording.jsonl"
    recording.write_text('{"exit": 1, "block_pool": null}\n')
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    run = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert run.stdout is not None
    left_behind = int(run.stdout.readline())
    halves.wait_for_end(run, recording)
    assert run.returncode == -signal.SIGKILL
    # A killed process takes a moment to go.
    deadline = time.monotonic() + 10
    while is_running(left_behind) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(left_behind)


@pytest.mark.parametrize("header", ["", "kvpool: off", "seen elsewhere kvpool: active"])
def test_a_run_without_kvpool_does_not_count_as_one_with_it(tmp_path: Path, header: str) -> None:
    log = tmp_path / "log"
    log.write_text(header + "\n")
    with pytest.raises(HalfError, match="lacks"):
        check_half(Outcomes({"a": PASSED}, "kvpool.integrations.vllm.pool", 0), Half.KVPOOL, log)


@pytest.mark.parametrize(
    ("half", "header", "block_pool"),
    [
        (Half.STOCK, "kvpool: active (pool) on vLLM 0.32.0", "vllm.v1.core.block_pool"),
        (Half.STOCK, "", "kvpool.integrations.vllm.pool"),
        (Half.KVPOOL, "kvpool: active (pool) on vLLM 0.32.0", "vllm.v1.core.block_pool"),
    ],
)
def test_a_run_on_the_wrong_block_pool_is_refused(tmp_path: Path, half: Half, header: str, block_pool: str) -> None:
    log = tmp_path / "log"
    log.write_text(header + "\n")
    with pytest.raises(HalfError):
        check_half(Outcomes({"a": PASSED}, block_pool, 0), half, log)


def test_a_run_without_tests_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    with pytest.raises(HalfError, match="no test ran"):
        check_half(Outcomes(), Half.STOCK, log)


def test_hub_cache_holds_the_model_where_the_hub_looks(tmp_path: Path) -> None:
    from offline_hub import write_hub_cache

    write_hub_cache(tmp_path)
    write_hub_cache(tmp_path)
    repository = tmp_path / "hub" / "models--facebook--opt-125m"
    snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text()
    assert json.loads((snapshot / "config.json").read_text())["model_type"] == "opt"
