"""What a command shows, and what becomes of it where that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvpool.cli.common import make_console


class Output:
    """Tables and lines to stdout or stderr, text to stdout.

    Args:
        is_stderr: whether tables and lines go there.
        keeps_going: a disk that is full or a reader that went away waits for ``raise_failure``, with nothing shown any
            more: there are files to be written that matter more. Else it is raised at once.
    """

    def __init__(self, *, is_stderr: bool = False, keeps_going: bool = False) -> None:
        self._console = make_console(is_stderr)
        self._keeps_going = keeps_going
        self._failure: OSError | None = None

    def print(self, *shown: Any, **options: Any) -> None:
        """As rich's console prints."""
        self._try(lambda: self._console.print(*shown, **options))

    def write(self, text: str) -> None:
        """Text to stdout as it is, now."""

        def write() -> None:
            sys.stdout.write(text)  # not typer's echo, which goes around a bar
            sys.stdout.flush()

        self._try(write)

    def raise_failure(self) -> None:
        """Raises what went wrong on the way, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _try(self, show: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            show()
        except OSError as error:
            if not self._keeps_going:
                raise
            self._failure = error
