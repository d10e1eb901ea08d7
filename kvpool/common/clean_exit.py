"""How a command line ends, whatever happens: errors are one line on stderr, and the exit code says which kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool.common.one_line import one_line

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell says of a process that SIGPIPE has ended


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
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        fail(f"error: not enough memory{reason}; try fewer blocks (--blocks)", EXIT_FAILURE)
    except (UsageError, KvpoolError) as error:
        is_mismatch = type(error).__name__ == "ReplayMismatchError"
        fail(f"error: {error}", EXIT_FAILURE if is_mismatch else EXIT_USAGE)
    except BrokenPipeError:  # whoever read the output has seen enough
        _drop_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except OSError as error:
        fail(f"error: {describe_os_error(error)}", EXIT_USAGE)


def fail(line: str, code: int) -> NoReturn:
    with suppress(OSError):  # there is nowhere else to say it
        typer.echo(one_line(line), err=True)
    raise typer.Exit(code)


def describe_os_error(error: OSError) -> str:
    """Which file, and what is wrong with it; files that were not opened by name are outputs."""
    where = "output" if error.filename is None else str(error.filename)
    return f"{where}: {error.strerror or error}"


class _Clean:
    """Mixed in front of typer's class: nothing ends in a traceback for what the user or the system did."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with clean_errors():  # of what the program's own options do, such as --version
            return super().make_context(*arguments, **options)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        with clean_errors():
            return super().invoke(ctx)  # type: ignore[misc]

    def main(self, args: Any = None, prog_name: str | None = None, *more: Any, **options: Any) -> Any:
        if options.get("standalone_mode") is False or more:
            return super().main(args, prog_name, *more, **options)  # type: ignore[misc]
        for stream in (sys.stdout, sys.stderr):
            _show_anything(stream)
        code = self._run(args, prog_name, **{**options, "standalone_mode": False})
        sys.exit(_flush_stdout(code))

    def _run(self, args: Any, prog_name: str | None, **options: Any) -> int:
        try:
            code = super().main(args, prog_name, **options)  # type: ignore[misc]
        except typer.Abort:
            return EXIT_INTERRUPTED
        except Exception as error:
            # Wrong usage. Its class is click's or, by version, typer's own.
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                with suppress(OSError):
                    typer.echo(one_line(f"error: {error.format_message()}"), err=True)
            return int(getattr(error, "exit_code", EXIT_USAGE))
        return code if isinstance(code, int) else 0


class CleanGroup(_Clean, TyperGroup):
    """The commands of a program."""


class CleanCommand(_Clean, TyperCommand):
    """The only command of a program."""


def _show_anything(stream: TextIO) -> None:
    """What the stream's encoding lacks is escaped from now on, rather than an error."""
    with suppress(AttributeError, OSError, ValueError):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]


def _flush_stdout(code: int) -> int:
    """Writes out what is left. An error says so, unless there has been another one; the code is returned."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return code or EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_stdout()
        if code:
            return code
        with suppress(OSError):
            typer.echo(one_line(f"error: {describe_os_error(error)}"), err=True)
        return EXIT_USAGE
    return code


def _drop_stdout() -> None:
    """What is still buffered goes nowhere; else Python would try again at its end, and say so."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
