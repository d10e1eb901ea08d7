"""A fault, and the tests that have to notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleFaultError(Exception):
    """The text that a fault replaces is not in the tree, or more often than it should be."""


@dataclass(frozen=True)
class Edit:
    """One replacement.

    Attributes:
        path: of the file, from the root of the tree.
        old, new: exact text, and what comes in its place.
        count: how often ``old`` is there; all of them are replaced.
    """

    path: str
    old: str
    new: str
    count: int = 1

    def apply(self, root: Path) -> None:
        """StaleFaultError, and nothing has changed, if the text isn't there ``count`` times."""
        file = root / self.path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        found = text.count(self.old)
        if found != self.count:
            raise StaleFaultError(f"{self.path}: expected {self.count} times, found {found} times:\n{self.old}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a mutant.

    Attributes:
        name: what it does, in a few words.
        edits: how it comes about, applied in this order.
        killers: tests, as pytest takes them, each of which has to fail; of those in a tuple, one has to.
        is_quick: whether it is one of the few that are run where time is short; these are Python only.
    """

    name: str
    edits: tuple[Edit, ...]
    killers: tuple[str | tuple[str, ...], ...]
    is_quick: bool = False

    @property
    def native_paths(self) -> list[str]:
        """Edited files that have to be compiled."""
        return list(dict.fromkeys(edit.path for edit in self.edits if not edit.path.endswith(".py")))

    @property
    def killer_ids(self) -> list[list[str]]:
        """The killers, each as the tests that are run together."""
        return [[killer] if isinstance(killer, str) else list(killer) for killer in self.killers]


EVERY_TOKEN = "test_every_token_is_read_as_it_was_written"


def manager(kind: str, half: str) -> str:
    """The contents of the histories of a cache manager."""
    return f"tests/cache/test_contents_manager.py::{EVERY_TOKEN}[{kind}-{half}]"


def scheduler(cache: str, half: str, policy: str = "fcfs") -> str:
    """The contents of the histories of a scheduler."""
    return f"tests/scheduler/test_contents_scheduler.py::{EVERY_TOKEN}[{cache}-{policy}-{half}]"


def engine(cache: str) -> str:
    """The contents of the histories of an engine."""
    return f"tests/worker/test_contents_engine.py::{EVERY_TOKEN}[{cache}]"


EVERY_FAILURE = "test_steps_that_fail_leave_no_wrong_token"


def scheduler_fails(cache: str, half: str, policy: str = "fcfs") -> str:
    """The same with steps that fail and are withdrawn."""
    return f"tests/scheduler/test_contents_scheduler.py::{EVERY_FAILURE}[{cache}-{policy}-{half}]"


def engine_fails(cache: str) -> str:
    """The same with steps that fail."""
    return f"tests/worker/test_contents_engine.py::{EVERY_FAILURE}[{cache}]"
