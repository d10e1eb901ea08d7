"""What the commands share: limits of numbers, the console, progress, paths and JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENAMETOOLONG
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpool.common.arguments import show
from kvpool.common.clean_exit import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    UsageError,
    clean_errors,
    fail,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "EXIT_FAILURE",
    "EXIT_INTERRUPTED",
    "EXIT_USAGE",
    "UsageError",
    "check_output",
    "check_path",
    "clean_errors",
    "fail",
    "make_console",
    "progress",
    "write_json",
]

STDOUT = "-"
MAX_NUM_BLOCKS = 2**31 - 1
MAX_BLOCK_SIZE = 2**20
"""Tokens."""

MAX_COUNT = 2**31 - 1
"""Of requests, tokens, bytes: what has no smaller limit of its own."""

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1

_PROGRESS_SECONDS = 0.1


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal; yields a function that takes the number of things done."""
    if not sys.stderr.isatty():
        yield lambda num_done: None
        return
    from time import monotonic

    from rich.progress import Progress

    # Drawn from here and not by the bar's own thread, which would take time from the calls that are being timed. What
    # is printed goes above the bar if it is shown on the same terminal, and else to where stdout leads.
    with Progress(
        console=make_console(is_stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task(label, total=total)
        last_drawn = 0.0

        def advance(num_done: int) -> None:
            nonlocal last_drawn
            bar.update(task, completed=num_done)
            if monotonic() - last_drawn > _PROGRESS_SECONDS:
                last_drawn = monotonic()
                bar.refresh()

        yield advance


def make_console(is_stderr: bool = False) -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        """Raises the BrokenPipeError that it is called for, where rich would end the program."""

        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704

    return PipeConsole(stderr=is_stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def check_path(path: str | Path | None) -> None:
    """UsageError for what no file can be named: a text with a zero byte, or one that the system finds too long."""
    if path is None:
        return
    try:
        Path(path).stat()
    except ValueError:
        raise UsageError(f"{show(str(path))} is no path") from None
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            raise UsageError(f"{show(str(path))} is no path: {error.strerror}") from None


def check_output(path: str | Path | None) -> None:
    """Fails before long work rather than after it: UsageError where a file can't be written."""
    if path is None or path == STDOUT:
        return
    check_path(path)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: can't be written")


def write_json(document: Any, path: str) -> None:
    import json

    text = json.dumps(document, indent=2)
    if path == STDOUT:
        typer.echo(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
