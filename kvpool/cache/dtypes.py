"""Element types by name, and their sizes: nothing here imports torch or numpy, whose dtype objects are accepted."""

from __future__ import annotations

from typing import Any

from kvpool.errors import InvalidArgumentError

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
DTYPE_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given by name or as an object of torch or numpy. InvalidArgumentError if it is unknown."""
    name = str(dtype).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"unknown dtype {dtype!r}: one of {', '.join(DTYPE_BYTES)}")
    return name
