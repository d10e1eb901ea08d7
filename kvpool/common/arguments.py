"""What callers pass, made plain: exact ints, floats and texts, or an error that names the argument and the value.

Values from outside may be numpy's scalars, bools, enum members or subclasses with methods of their own. Whatever is
compared, stored, or encoded for workers later is what these functions return; so convert first, then check, then
change. An exception that a value's own method raises comes through, with nothing changed.
"""

from __future__ import annotations

import math
from numbers import Real
from operator import index
from reprlib import Repr
from typing import Any

from kvpool.errors import InvalidArgumentError

_MOST_BITS_SHOWN = 256
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def show(value: object) -> str:
    """A value for an error message: never long, whatever the value is, and never an error of its own."""
    try:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
            return f"an integer of {value.bit_length()} bits"
        return _SHORT.repr(value)
    except Exception:  # of the value's methods; and an int inside it may have too many digits to be shown
        return f"a {type(value).__name__}"


def to_int(name: str, value: Any, lowest: int | None = None, highest: int | None = None) -> int:
    """An integer of any type as an exact int: bools, numpy's ints and enum members become what they stand for.

    Args:
        name: of the argument.
        value: what was passed.
        lowest, highest: the range it has to be in, both ends included; None: no limit.

    Raises:
        TypeError: no integer.
        InvalidArgumentError: out of range.
    """
    if type(value) is int:
        number = value
    else:
        try:
            number = int(index(value))
        except TypeError as error:
            raise TypeError(f"{name} is an integer, not {show(value)}") from error
    if lowest is not None and number < lowest:
        raise InvalidArgumentError(f"{name} is at least {lowest}, not {show(number)}")
    if highest is not None and number > highest:
        raise InvalidArgumentError(f"{name} is at most {highest}, not {show(number)}")
    return number


def to_float(name: str, value: Any) -> float:
    """A real number of any type as an exact float, which is finite.

    Raises:
        TypeError: no real number; a text is none.
        InvalidArgumentError: infinite, NaN, or too large for a float.
    """
    if type(value) is not float and not isinstance(value, Real):
        raise TypeError(f"{name} is a number, not {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{name} is finite, not {show(value)}")
    return number


def to_bool(name: str, value: Any) -> bool:
    """A truth value.

    Raises:
        TypeError: a value that is neither true nor false, as an array.
    """
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is true or false, not {show(value)}") from error


def to_text(name: str, value: Any) -> str:
    """A text as an exact str that UTF-8 can encode, as messages are.

    Raises:
        TypeError: no str.
        InvalidArgumentError: half a surrogate pair in it.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is a str, not {show(value)}")
    text = str.__str__(value)
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} {show(text)} can't be encoded: {error.reason}") from None
    return text
