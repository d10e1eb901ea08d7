"""The fuzzers themselves: each target runs, kept inputs stay clean, and what a target must notice, it notices."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import IS_PURE_PYTHON

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

if not (ROOT / "fuzz").is_dir():
    pytest.skip("no fuzzers beside these tests", allow_module_level=True)
if IS_PURE_PYTHON:
    pytest.skip("the fuzzers compare the twin with the native half", allow_module_level=True)

from fuzz import c_targets, pairs, soak  # noqa: E402
from fuzz import run as fuzz_run  # noqa: E402
from fuzz.decisions import Decisions, Finding  # noqa: E402

NUM_INPUTS = 25


@pytest.mark.parametrize("name", fuzz_run.TARGETS)
def test_a_target_runs_on_random_and_on_kept_inputs(name: str) -> None:
    run, rng = fuzz_run.load(name), random.Random(f"{name} 1")
    for data in [*fuzz_run.seeds_of(name), b"", *(rng.randbytes(1 << rng.randint(4, 9)) for _ in range(NUM_INPUTS))]:
        run(Decisions(data))


def test_the_same_bytes_make_the_same_history() -> None:
    first, again = Decisions(bytes(range(40))), Decisions(bytes(range(40)))
    for each in (first, again):
        assert [each.below(7) for _ in range(30)] and each.chance(50) in (True, False)
    assert first.at == again.at
    assert Decisions(b"").byte() == 0 and Decisions(b"").is_empty


class Half:
    """A half whose answers and state the test says."""

    def __init__(self, answer: Any, changes: bool = False) -> None:
        self.answer, self.changes, self.value, self.disturbed = answer, changes, 0, False

    def call(self) -> Any:
        if self.changes:
            self.value += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    ("native", "twin", "is_hostile"),
    [
        (Half(1), Half(2), False),
        (Half(1), Half(ValueError()), False),
        (Half(1), Half(ValueError()), True),
        (Half(TypeError()), Half(ValueError()), False),
        (Half(None, changes=True), Half(None), False),
        (Half(ValueError(), changes=True), Half(ValueError(), changes=True), False),
    ],
    ids=["answers", "raises", "raises, hostile", "exceptions", "states", "a refusal that changes"],
)
def test_differences_are_found(native: Half, twin: Half, is_hostile: bool) -> None:
    with pytest.raises(Finding):
        pairs.call_both([native, twin], Half.call, "call", lambda half: half.value, is_hostile)


def test_two_refusals_of_strange_values_need_not_be_the_same() -> None:
    halves = [Half(TypeError()), Half(ValueError())]
    assert pairs.call_both(halves, Half.call, "call", lambda half: half.value, True) == ("raised", "TypeError")


def test_a_finding_leaves_its_input_and_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(decisions: Decisions) -> None:
        if decisions.byte() > 100:
            raise Finding("found")

    monkeypatch.setattr(fuzz_run, "load", lambda name: fails)
    monkeypatch.setattr(fuzz_run, "seeds_of", lambda name: [])
    assert not fuzz_run.run_target("block_pool", 1.0, 5, tmp_path)
    (path,) = tmp_path.iterdir()
    with pytest.raises(Finding):
        fails(Decisions(path.read_bytes()))


@pytest.mark.slow
def test_a_round_of_the_soak() -> None:
    assert soak.run_round(3, 0, soak.make_digests()) > 100_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("name", c_targets.C_TARGETS)
def test_a_target_of_the_core_runs(name: str, tmp_path: Path) -> None:
    assert c_targets.run(name, 0.02, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_standalone_driver_keeps_what_it_finds(tmp_path: Path) -> None:
    target = tmp_path / "target.c"
    target.write_text(
        '#include "input.h"\nint LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n'
        '    if (size > 3 && data[0] == 7) { FOUND("seven"); }\n    return 0;\n}\n'
    )
    program = tmp_path / "target"
    folder = ROOT / "fuzz" / "c"
    command = ["cc", "-std=gnu11", "-O1", f"-I{folder}", str(target), str(folder / "standalone.c"), "-o", str(program)]
    subprocess.run(command, check=True, env=c_targets.ENVIRONMENT)
    done = subprocess.run(
        [program, "-seconds=20", "-seed=3"], cwd=tmp_path, capture_output=True, check=False, env=c_targets.ENVIRONMENT
    )
    assert done.returncode != 0 and b"seven" in done.stderr
    (crash,) = tmp_path.glob("crash-3-*")
    assert crash.read_bytes()[0] == 7
    assert (
        subprocess.run(
            [program, crash], cwd=tmp_path, capture_output=True, check=False, env=c_targets.ENVIRONMENT
        ).returncode
        != 0
    )
