"""Values that callers may pass by mistake, or on purpose: numbers of foreign types, and objects whose methods fail."""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Any

import numpy as np


class Three(int):
    """An int whose own methods lie or fail."""

    def __index__(self) -> int:
        raise RuntimeError("__index__ of an int")

    def __int__(self) -> int:
        return 77

    def __lt__(self, other: object) -> bool:
        raise RuntimeError("__lt__")

    __le__ = __gt__ = __ge__ = __lt__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("__eq__")

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        raise RuntimeError("__repr__")


class Index:
    """Stands for an integer, as numpy's do."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Kind(enum.IntEnum):
    THREE = 3


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("__repr__")


# All stand for 3.
INTEGERS = [
    3,
    Three(3),
    Index(3),
    Kind.THREE,
    *(dtype(3) for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)),
    np.array(3),
]

# All stand for 0.5.
REALS = [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble(0.5), Fraction(1, 2)]

NO_INTEGERS = [
    3.0,
    np.float64(3.0),
    float("nan"),
    float("inf"),
    "3",
    b"3",
    bytearray(b"3"),
    [3],
    (3,),
    {3},
    {"a": 3},
    3j,
    Fraction(3),
    object(),
    Unshowable(),
    Index("3"),
    np.array([3, 4]),
    np.array([3.0]),
    int,
    lambda: 3,
    "x" * 10_000_000,
    [[[[[]]]]] * 1000,
    [10**5000],
]

NO_REALS = ["0.5", b"0.5", None, [0.5], 0.5j, object(), Unshowable(), np.array([0.5, 0.5]), "nan", float]

HUGE = [10**400, -(10**400), 10**5000, -(10**5000)]  # str() refuses the last ones
