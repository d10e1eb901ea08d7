"""What environment variables say, read strictly: a value that means nothing is refused by name, never taken for one
that does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvpool.errors import InvalidArgumentError


def read_switch(variable: str, default: bool = False) -> bool:
    """Whether a variable is on: ``1`` is, ``0`` is not, unset or empty is the default.

    Raises:
        InvalidArgumentError: any other value; the message has the variable and the value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise InvalidArgumentError(f"{variable} is 0 or 1, not {shown(value)}")
    return value == "1" if value else default


def read_choice(variable: str, choices: Sequence[str]) -> str:
    """The one of some words that a variable has, the first if it is unset or empty.

    Raises:
        InvalidArgumentError: any other value; the message has the variable, the value and the words.
    """
    value = os.environ.get(variable, "") or choices[0]
    if value not in choices:
        raise InvalidArgumentError(f"{variable} is {' or '.join(choices)}, not {shown(value)}")
    return value


def shown(value: str) -> str:
    """A value as messages show it: quoted, and cut if it is long."""
    return repr(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!r}..."


_MOST_SHOWN = 60
