"""How messages lie in a file: a magic text, then for each message its length, a checksum, and itself.

A file is written front to back and never changed, so that what a process has written before it was killed is whole but
for the last frame at most.
"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

import msgspec

MAGIC = b"kvpool operations\n"
HEAD = struct.Struct("<II")  # bytes of the message, their CRC-32
MAX_FRAME_BYTES = 1 << 25

_encode = msgspec.msgpack.Encoder().encode
_pack_head = HEAD.pack


class FrameTooLargeError(ValueError):
    """A message of more than ``MAX_FRAME_BYTES``."""


def frame_parts(message: Any) -> tuple[bytes, bytes]:
    """A message, or the tuple of its name and fields, as it is in the file: what is before it, and itself.

    Raises:
        TypeError, ValueError, OverflowError: what has no place in a message.
    """
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(f"a message of {len(body)} bytes")
    return _pack_head(len(body), crc32(body)), body


def frame(message: Any) -> bytes:
    """Both parts."""
    return b"".join(frame_parts(message))
