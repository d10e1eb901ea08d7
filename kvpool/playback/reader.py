"""Reads the messages of a recording, one after the other. The file comes from a stranger.

Memory is that of one message, of ``MAX_FRAME_BYTES``. What a frame's length says is compared with the file before it is
read, every field has a type and a range, and nothing but plain values is made of them. The last frame may be cut short,
as it is when the process was killed or the disk was full.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union
from zlib import crc32

import msgspec

from kvpool.common.one_line import one_line
from kvpool.playback.limits import PlaybackLimits, RecordingError
from kvpool.recording.frames import HEAD, MAGIC, MAX_FRAME_BYTES
from kvpool.recording.operations import FORMAT_VERSION, MESSAGES, Message, Recording

_decode = msgspec.msgpack.Decoder(Union[MESSAGES]).decode  # noqa: UP007


@dataclass(frozen=True)
class Placed:
    """A message and where it begins, in bytes."""

    place: int
    message: Message


class RecordingReader:
    """The messages of a file.

    Attributes:
        path: the file.
        head: its first message.
        torn_at: place of a last message that is cut short; None until it is met.

    Raises:
        RecordingError: the file can't be read, is too large, or does not begin as a recording does.
    """

    def __init__(self, path: str | Path, limits: PlaybackLimits) -> None:
        self.path = str(path)
        self.torn_at: int | None = None
        self._file = self._open()
        try:
            self._num_bytes = os.fstat(self._file.fileno()).st_size
            if self._num_bytes > limits.max_bytes:
                raise RecordingError(
                    f"{self.path}: has {self._num_bytes:,} bytes, more than {limits.max_bytes:,} (--max-bytes raises"
                    " the limit)"
                )
            if self._read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{self.path}: is no recording of kvpool's operations")
            self._place = len(MAGIC)
            self.head = self._read_head()
        except BaseException:
            self.close()
            raise

    def _open(self) -> BinaryIO:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise RecordingError(f"{self.path}: is no regular file")
            return open(self.path, "rb")
        except OSError as error:
            raise RecordingError(f"{self.path}: {one_line(error.strerror or str(error))}") from None
        except ValueError as error:  # a zero byte in a path
            if isinstance(error, RecordingError):
                raise
            raise RecordingError(f"{self.path}: {one_line(str(error))}") from None

    def _read_head(self) -> Recording:
        for placed in self:
            if not isinstance(placed.message, Recording):
                break
            version = placed.message.format_version
            if version != FORMAT_VERSION:
                raise self.error(placed.place, f"a recording of version {version}; this kvpool reads {FORMAT_VERSION}")
            return placed.message
        raise RecordingError(f"{self.path}: does not say what was recorded")

    def __iter__(self) -> Iterator[Placed]:
        """The messages from here on. RecordingError for what is none."""
        while True:
            place = self._place
            head = self._read(HEAD.size)
            if not head:
                return
            if len(head) < HEAD.size:
                self.torn_at = place
                return
            num_bytes, checksum = HEAD.unpack(head)
            if num_bytes > MAX_FRAME_BYTES:
                raise self.error(place, f"a message of {num_bytes:,} bytes; {MAX_FRAME_BYTES:,} is the most")
            if num_bytes > self._num_bytes - place - HEAD.size:
                self.torn_at = place
                return
            body = self._read(num_bytes)
            if len(body) < num_bytes:
                self.torn_at = place
                return
            if crc32(body) != checksum:
                raise self.error(place, "damaged: the checksum is not that of the message")
            self._place = place + HEAD.size + num_bytes
            yield Placed(place, self._decode(place, body))

    def _decode(self, place: int, body: bytes) -> Message:
        try:
            message: Message = _decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise self.error(place, f"no message: {one_line(str(error), 200)}") from None
        return message

    def _read(self, num_bytes: int) -> bytes:
        try:
            return self._file.read(num_bytes)
        except OSError as error:
            raise RecordingError(f"{self.path}: {one_line(error.strerror or str(error))}") from None

    def error(self, place: int, reason: str) -> RecordingError:
        """An error that names the file and the place."""
        return RecordingError(f"{self.path}: byte {place:,}: {reason}")

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The file is of no use any more."""
        self._file.close()
