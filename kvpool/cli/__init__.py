"""The ``kvpool`` command: ``replay`` runs request traces, ``replay-ops`` recorded operations, ``generate`` a model on
the paged cache, ``doctor`` describes the installation, ``keygen`` makes keys for connections.

Exit codes: 0 done; 1 implementations differ, or from what was recorded, or memory is short; 2 wrong usage, an input
that can't be read or an output that can't be written; 130 interrupted; 141 nobody reads stdout any more.
Errors are one line on stderr. Whatever is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvpool._version import __version__
from kvpool.cli.doctor_command import doctor
from kvpool.cli.generate_command import generate
from kvpool.cli.keygen_command import keygen
from kvpool.cli.replay_command import replay
from kvpool.cli.replay_ops_command import replay_ops
from kvpool.common.clean_exit import EXIT_INTERRUPTED, CleanGroup

app = typer.Typer(
    name="kvpool",
    cls=CleanGroup,
    help="Cache manager and block pool for LLM KV caches: replay request traces, generate with a model, inspect the"
    " installation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (replay, replay_ops, generate, doctor, keygen):
    app.command()(command)


def main() -> None:
    """Entry point; an interrupt outside of a command (during imports, say) ends as cleanly as one inside."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
