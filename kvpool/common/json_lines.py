"""Text files of one JSON object a line, as they come from outside: plain, ``.gz`` or ``.zst``.

Lines end at newlines and nowhere else: U+2028, U+2029 and U+0085 are legal within JSON strings. A file is decompressed
while it is read, in pieces of bounded size, and reading takes time in proportion to what is read. What a hostile file
can cost is limited by ``ReadLimits``; the error names the limit and the option of the command line that raises it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvpool.common.arguments import show
from kvpool.common.one_line import one_line
from kvpool.errors import InvalidArgumentError, KvpoolError

MakeError = Callable[[str], KvpoolError]

_READ_SIZE = 1 << 20
_COMPRESSED_READ_SIZE = 1 << 9
"""zstd makes at most 32,768 times as much of its input, and hands it out whole: 16 MiB of this."""


@dataclass(frozen=True)
class ReadLimits:
    """max_bytes: of a whole file, decompressed. max_line_bytes: of one line, its newline excluded. Raises
    InvalidArgumentError for numbers below 1."""

    max_bytes: int = 1 << 30
    max_line_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_line_bytes < 1:
            raise InvalidArgumentError(
                f"limits of bytes are at least 1, not {show(self.max_bytes)} and {show(self.max_line_bytes)}"
            )


DEFAULT_READ_LIMITS = ReadLimits()


def source_name(source: str | Path | BinaryIO) -> str:
    """How messages name a file or stream."""
    return str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "<stream>"))


def numbered_lines(
    source: str | Path | BinaryIO, limits: ReadLimits, make_error: MakeError
) -> Generator[tuple[int, bytes], None, None]:
    """The lines that are not blank, with their 1-based numbers.

    Args:
        source: a file, decompressed if its name ends in ``.gz`` or ``.zst``, or a binary stream of plain text.
        make_error: makes the exception from a message ``FILE:LINE: reason`` (``FILE: reason`` where no line is to
            blame). It is raised where the file can't be read, is damaged or cut short, or exceeds a limit.
    """
    name = source_name(source)
    try:
        yield from _split_lines(_pieces(source), limits)
    except _LineError as error:
        raise make_error(f"{name}:{error.line}: {error}") from None
    except ImportError as error:
        raise make_error(f"{name}: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        raise make_error(f"{name}: {one_line(getattr(error, 'strerror', None) or str(error))}") from None


def parse_object(text: bytes, place: str, make_error: MakeError) -> dict[str, Any]:
    """The JSON object that a line holds.

    Args:
        place: ``FILE:LINE``, what the message begins with.
        make_error: makes the exception for what is no UTF-8, no JSON, or no object.
    """
    try:
        document = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise make_error(f"{place}: not UTF-8 text (byte {error.start} of the line)") from None
    except RecursionError:
        raise make_error(f"{place}: not valid JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise make_error(f"{place}: not valid JSON: {one_line(str(error))}") from None
    except ValueError:  # the only other one: int() refuses what would take it quadratic time
        raise make_error(f"{place}: an integer has more digits than can be read (4,300)") from None
    if not isinstance(document, dict):
        raise make_error(f"{place}: must be a JSON object, not {type_name(document)}")
    return document


def type_name(value: object) -> str:
    """A value's type, as messages about JSON call it."""
    return "null" if value is None else type(value).__name__


class _DamagedError(Exception):
    """Compressed data that can't be decompressed, at the line that is being read."""


class _LineError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def _split_lines(pieces: Iterator[bytes], limits: ReadLimits) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers. O(bytes): the parts of a long line are joined once."""
    number = 1  # of the line that has begun
    begun: list[bytes] = []
    num_begun = num_bytes = 0
    try:
        for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > limits.max_bytes:
                limit = f"{limits.max_bytes:,} bytes (--max-bytes raises the limit)"
                raise _LineError(number, f"the text is longer than {limit}")
            end, *lines = piece.split(b"\n")
            begun.append(end)
            num_begun += len(end)
            _check_line(number, num_begun, limits)
            if not lines:
                continue
            rest = lines.pop()
            lines.insert(0, b"".join(begun))
            begun, num_begun = [rest], len(rest)
            if not any(lines):  # a megabyte of newlines, say, at the cost of one
                number += len(lines)
                continue
            for line in lines:
                if line and not line.isspace():
                    _check_line(number, len(line), limits)
                    yield number, line
                number += 1
    except _DamagedError as error:
        raise _LineError(number, str(error)) from None
    line = b"".join(begun)
    if line and not line.isspace():
        _check_line(number, len(line), limits)
        yield number, line


def _check_line(number: int, num_bytes: int, limits: ReadLimits) -> None:
    if num_bytes > limits.max_line_bytes:
        raise _LineError(
            number, f"the line is longer than {limits.max_line_bytes:,} bytes (--max-line-bytes raises the limit)"
        )


def _pieces(source: str | Path | BinaryIO) -> Iterator[bytes]:
    if not isinstance(source, str | Path):
        while piece := source.read(_READ_SIZE):
            yield piece
        return
    path = Path(source)
    if path.suffix == ".zst":
        yield from _zstd_pieces(path)
        return
    is_gzip = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as file:
            while piece := file.read(_READ_SIZE):
                yield piece
    except gzip.BadGzipFile as error:
        raise _DamagedError(f"bad gzip data: {error}") from None
    except (EOFError, zlib.error) as error:
        raise _DamagedError(f"bad or truncated gzip data: {error}") from None


def _zstd_pieces(path: Path) -> Iterator[bytes]:
    """Decompressed data of one or several frames; a frame cut short is an error, which a stream reader would hide."""
    try:
        import zstandard
    except ImportError:
        raise ImportError("reading .zst needs the zstandard package: pip install zstandard") from None
    frame = None
    with path.open("rb") as file:
        while data := file.read(_COMPRESSED_READ_SIZE):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    text = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise _DamagedError(f"bad zstd data: {error}") from None
                for start in range(0, len(text), _READ_SIZE):
                    yield text[start : start + _READ_SIZE]
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    if frame is not None:
        raise _DamagedError("truncated zstd data")
