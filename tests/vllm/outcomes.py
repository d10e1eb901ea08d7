"""What became of each test of a run, and the comparison of two runs test by test.

The runs are read from the files that pytest_plugins/outcome_recorder.py writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PASSED, FAILED, ERROR, SKIPPED = "passed", "failed", "error", "skipped"
# The interpreter died in this test, or was killed: the recording has its start only.
CRASHED = "crashed"
# One run knows this test, the other doesn't: it did not get that far, or it collected other tests.
ABSENT = "absent"
# pytest's exit statuses of a run that came to its end.
ALL_PASSED, SOME_FAILED = 0, 1
COUNTED = (PASSED, FAILED, ERROR, SKIPPED, CRASHED)


@dataclass
class Outcomes:
    """One run.

    tests: node id to outcome; a file that can't be imported counts as one test with the outcome "error"
    block_pool: module of the class that vLLM's name BlockPool led to when the run ended; None if the run never imported
        it, or did not end
    exit_status: pytest's, None if the interpreter died before it had one
    """

    tests: dict[str, str] = field(default_factory=dict)
    block_pool: str | None = None
    exit_status: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every test had its turn: pytest was neither interrupted nor failed itself."""
        return self.exit_status in (ALL_PASSED, SOME_FAILED)

    def count(self, outcome: str) -> int:
        return Counter(self.tests.values())[outcome]


@dataclass(frozen=True)
class Difference:
    test: str
    stock: str
    kvpool: str

    @property
    def is_regression(self) -> bool:
        """Whether a test that passes on stock vLLM doesn't with kvpool."""
        return self.stock == PASSED

    def __str__(self) -> str:
        return f"{self.test}: {self.stock} on stock, {self.kvpool} with kvpool"


def read_outcomes(path: Path) -> Outcomes:
    """Read a recording, also one that a crash cut short. Raises OSError if there is none."""
    outcomes = Outcomes()
    for entry in _entries(path.read_text()):
        if "started" in entry:
            outcomes.tests[entry["started"]] = CRASHED
        elif "test" in entry:
            outcomes.tests[entry["test"]] = entry["outcome"]
        elif "collected" in entry:
            outcomes.tests[entry["collected"]] = entry["outcome"]
        elif "exit" in entry:
            outcomes.block_pool = entry["block_pool"]
            outcomes.exit_status = entry["exit"]
    return outcomes


def _entries(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            # Half a line, as a kill leaves it: always the last one.
            return


def compare(stock: Outcomes, kvpool: Outcomes) -> list[Difference]:
    """Every test whose outcome differs, regressions first, each kind by name. O(tests log tests)."""
    names = stock.tests.keys() | kvpool.tests.keys()
    pairs = (Difference(name, stock.tests.get(name, ABSENT), kvpool.tests.get(name, ABSENT)) for name in names)
    return sorted(
        (pair for pair in pairs if pair.stock != pair.kvpool), key=lambda pair: (not pair.is_regression, pair.test)
    )


def with_second_run(first: Outcomes, second: Outcomes) -> Outcomes:
    """The first run, with what the second says of the tests that it ran."""
    return replace(first, tests=first.tests | second.tests)
