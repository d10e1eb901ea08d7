"""What a GGUF file says of itself, checked against its size.

The reader of the package gguf trusts counts: one array of 2^62 numbers keeps it busy for ever behind the end of the
file. Here every count and length has to lie within the file, and reading takes time in proportion to the header.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

from kvpool.errors import InvalidArgumentError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 2**48
_MIN_FIELD_BYTES = 13  # an empty name, a type, one byte
_MIN_TENSOR_BYTES = 24  # an empty name, no dimension, a type, a place


class GgufError(InvalidArgumentError):
    """A GGUF file that is cut short or contradicts itself."""


def check_gguf(path: str | Path) -> None:
    """Raises GgufError for a header that can't be read to its end, OSError where the file can't be. O(header)."""
    with Path(path).open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise GgufError("the file is empty") from None
        with data:
            check_gguf_header(data)


def check_gguf_header(data: bytes | mmap.mmap) -> None:
    """The same for what a file holds, or its beginning up to the tensors and any number of bytes behind."""
    _HeaderReader(data).check()


class _HeaderReader:
    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self._place = 0

    def check(self) -> None:
        if self._data[:4] != _MAGIC:
            raise GgufError("this is no GGUF file")
        self._place = 4
        version = self._number("<I", "version")
        if version not in _VERSIONS:
            raise GgufError(f"GGUF version {version} is not supported")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_fields = self._count("fields", _MIN_FIELD_BYTES)
        for _ in range(num_fields):
            name = self._string("name of a field")
            self._value(self._number("<I", name), name, _MAX_DEPTH)
        for _ in range(num_tensors):
            self._tensor()

    def _tensor(self) -> None:
        name = self._string("name of a tensor")
        num_dimensions = self._number("<I", name)
        if num_dimensions > _MAX_DIMENSIONS:
            raise GgufError(f"tensor {name} has {num_dimensions} dimensions, more than {_MAX_DIMENSIONS}")
        shape = [self._number("<Q", name) for _ in range(num_dimensions)]
        if prod(shape) > _MAX_ELEMENTS:
            raise GgufError(f"tensor {name} has the shape {shape}, which is too large")
        self._skip(12, name)  # type and place

    def _value(self, kind: int, name: str, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind], name)
        elif kind == _STRING:
            self._string(name)
        elif kind == _ARRAY and depth > 0:
            entry_kind = self._number("<I", name)
            length = self._count(name, _SCALAR_BYTES.get(entry_kind, 8))
            if entry_kind in _SCALAR_BYTES:
                self._skip(length * _SCALAR_BYTES[entry_kind], name)
            else:
                for _ in range(length):
                    self._value(entry_kind, name, depth - 1)
        else:
            raise GgufError(f"field {name} has a type that does not exist: {kind}")

    def _count(self, name: str, min_bytes: int) -> int:
        count = self._number("<Q", name)
        if count * min_bytes > len(self._data) - self._place:
            raise GgufError(f"{name}: {count} of them do not fit into a file of {len(self._data):,} bytes")
        return count

    def _string(self, name: str) -> str:
        length = self._count(name, 1)
        start = self._skip(length, name)
        return self._data[start : min(start + length, start + 64)].decode(errors="replace")

    def _number(self, form: str, name: str) -> int:
        start = self._skip(struct.calcsize(form), name)
        number: int = struct.unpack_from(form, self._data, start)[0]
        return number

    def _skip(self, num_bytes: int, name: str) -> int:
        start = self._place
        if num_bytes > len(self._data) - start:
            raise GgufError(f"the file ends within {name}")
        self._place += num_bytes
        return start
