"""What the commands share: exit codes, errors as one line, the console, progress and JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

STDOUT = "-"
MAX_NUM_BLOCKS = 2**31 - 1
_PROGRESS_SECONDS = 0.1


class UsageError(Exception):
    """Options that don't go together, or an output that can't be written."""


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turns every expected failure into one line on stderr and an exit code."""
    from kvpool.errors import KvpoolError

    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except MemoryError:
        fail("error: not enough memory; try fewer blocks (--blocks)", EXIT_FAILURE)
    except (UsageError, KvpoolError) as error:
        is_mismatch = type(error).__name__ == "ReplayMismatchError"
        fail(f"error: {error}", EXIT_FAILURE if is_mismatch else EXIT_USAGE)


def fail(line: str, code: int) -> None:
    typer.echo(line, err=True)
    raise typer.Exit(code)


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

    return Console(stderr=is_stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def check_output(path: str | Path | None) -> None:
    """Fails before long work rather than after it: UsageError where a file can't be written."""
    if path is None or path == STDOUT:
        return
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")


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
