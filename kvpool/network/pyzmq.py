"""The one place that imports pyzmq: when a socket is made, never with the package."""

from __future__ import annotations

from typing import Any


def import_zmq(what: str) -> Any:
    """The module ``zmq``. ImportError that says what needs it, and how to install it."""
    try:
        import zmq
    except ImportError as error:
        raise ImportError(f"{what} pyzmq: pip install kvpool[events]") from error
    return zmq
