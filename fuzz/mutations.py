"""Alters valid encodings: what a broken disk, a wrong version or an attacker makes of them."""

from __future__ import annotations

import json
from typing import Any

from fuzz.decisions import Decisions

# Of msgpack: claims of 2**32 - 1 items or bytes, 2**16 - 1 items, nothing at all, ends of numbers.
MSGPACK_PIECES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc1",
    b"\xc0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xa0",
    b"\x90",
    b"\x80",
)
TEXT_PIECES = (
    b"[" * 2000,
    b'{"a":' * 500,
    b"9" * 5000,
    b"1e999",
    b"-1",
    b"NaN",
    b"null",
    b"true",
    b'"\\ud800"',
    "\u2028\u0085".encode(),
    b"\x00",
    b"\xff\xfe",
    b"\r\n",
    b"{}",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**64 - 1,
    1.5,
    float("inf"),
    "",
    "x" * 300,
    b"\xff",
    [],
    {},
    [[]],
    {"": None},
)


def altered_bytes(d: Decisions, data: bytes, pieces: tuple[bytes, ...], most: int = 6) -> bytes:
    """Bits flipped, parts cut, doubled, or replaced by pieces that mean something."""
    changed = bytearray(data)
    for _ in range(d.below(most)):
        at = d.below(len(changed) + 1)
        how = d.below(8)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << d.below(8)
        elif how == 1:
            del changed[at:]
        elif how == 2:
            del changed[at : at + 1 + d.below(8)]
        elif how == 3:
            changed[at:at] = d.choose(pieces)
        elif how == 4:
            piece = d.choose(pieces)
            changed[at : at + len(piece)] = piece
        elif how == 5:
            changed[at:at] = changed[at : at + d.below(64)]
        elif how == 6:
            changed[at:at] = bytes([0x91 + d.below(3)]) * d.choose([1, 3, 100, 1000, 5000])
        elif at < len(changed):
            changed[at] = d.byte()
    return bytes(changed)


def altered_value(d: Decisions, value: Any, chance: int = 10, depth: int = 0) -> Any:
    """The value with parts of it of another type, missing, doubled or out of range."""
    if d.chance(chance):
        return d.choose(VALUES)
    if depth > 8:
        return value
    if isinstance(value, dict):
        changed = {
            (d.choose(["", "type", "x" * 50]) if d.chance(2) and isinstance(key, str) else key): altered_value(
                d, item, chance, depth + 1
            )
            for key, item in value.items()
            if not d.chance(3)
        }
        return changed
    if isinstance(value, (list, tuple)):
        items = [altered_value(d, item, chance, depth + 1) for item in value]
        return items * d.below(4) if d.chance(5) else items
    if isinstance(value, int) and not isinstance(value, bool) and d.chance(20):
        return value + d.choose([1, -1, 2**31, -(2**31), 2**32, 10**6])
    return value


def json_lines(d: Decisions, documents: list[Any]) -> bytes:
    """A file of JSON lines, of which some are altered as values and some as texts."""
    lines = [json.dumps(altered_value(d, each, 6), default=repr).encode() for each in documents]
    return altered_bytes(d, b"\n".join(lines) + b"\n", TEXT_PIECES, 4)
