"""A pytest plugin that writes the outcome of each test to a file as it becomes known: -p outcome_recorder.

KVPOOL_OUTCOMES names the file. One JSON object a line, so that what ran before a crash of the interpreter is not lost:
`{"started": NODE}` before a test, `{"test": NODE, "outcome": ...}` after it, `{"collected": FILE, "outcome": ...}` for
a file that can't be imported or is skipped as a whole, and `{"exit": STATUS, "block_pool": MODULE}` at the end:
pytest's exit status, and the module of the class that vLLM's name BlockPool then leads to, stock or not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

RECORD_VARIABLE = "KVPOOL_OUTCOMES"


class Recorder:
    """Outcome of a test: failed if its body failed, error if its set-up or clean-up did, skipped (also for one that was
    expected to fail and did), else passed."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")
        self.worst: dict[str, str] = {}

    def write(self, **entry: Any) -> None:
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.worst[report.nodeid] = "failed"
        elif report.failed:
            self.worst.setdefault(report.nodeid, "error")
        elif report.skipped:
            self.worst.setdefault(report.nodeid, "skipped")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(test=nodeid, outcome=self.worst.pop(nodeid, "passed"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self.write(collected=report.nodeid, outcome="error" if report.failed else "skipped")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        module = sys.modules.get("vllm.v1.core.block_pool")
        self.write(exit=int(exitstatus), block_pool=module.BlockPool.__module__ if module else None)
        self.file.close()


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(RECORD_VARIABLE)
    # A test may start pytest itself, or fork: only the session that was asked for records.
    if path:
        del os.environ[RECORD_VARIABLE]
        config.pluginmanager.register(Recorder(Path(path)), "kvpool-outcome-recorder")
