"""The command ``kvpool keygen``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.common import EXIT_USAGE, clean_errors, fail


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go; made if it is missing.")],
    client: Annotated[
        str | None,
        typer.Option(
            "--client", metavar="NAME", help="Add the keys of one more client to a folder that has a server's."
        ),
    ] = None,
) -> None:
    """Make CURVE keys for connections over TCP: a server's and a client's.

    The side that listens (a scheduler, an event publisher) needs server.key_secret and the clients' .key files; the
    side that connects (a worker, a subscriber) needs server.key and client.key_secret. Secret files are for their
    owner alone; nothing is overwritten.
    """
    from kvpool.network.curve import make_key_folder

    with clean_errors():
        try:
            made = make_key_folder(folder, client)
        except ImportError as error:
            fail(f"error: {error}", EXIT_USAGE)
        for path in made:
            typer.echo(path)
