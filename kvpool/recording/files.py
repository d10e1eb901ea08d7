"""The two files of a recording: the newer one is being written, the older one is whole.

Whoever reads them needs no more than one: each begins with the state. A file that is full becomes the older one, and
the one that was older is gone. Files of earlier recordings are never written over, and what goes wrong here ends the
recording, never the run.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from kvpool.recording.frames import MAGIC

MAX_NUMBERED_FILES = 1_000
_MODE = 0o600
_MOST_JOINED = 1 << 14  # bytes: what is more is not copied for a single write
_MOST_PARTS = 500  # that the system takes at once
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def older(path: str) -> str:
    """Name of the file with what was before."""
    return path + ".1"


def create_unused(path: str) -> tuple[int, str]:
    """Makes ``path``, or ``path-2`` and so on if there is a recording already; returns the descriptor and the name.

    Raises:
        OSError: it can't be made; it is there and no regular file; there are too many.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileExistsError(None, "is no regular file", path)
    for number in range(1, MAX_NUMBERED_FILES + 1):
        name = path if number == 1 else f"{path}-{number}"
        if os.path.lexists(older(name)):
            continue
        with suppress(FileExistsError):
            return os.open(name, _FLAGS, _MODE), name
    raise FileExistsError(
        None, f"and {MAX_NUMBERED_FILES - 1} files with a number behind the name are there already", path
    )


class RecordingFile:
    """The file that is being written.

    Every write goes to the place behind the last one that came to its end, so that one which was interrupted leaves
    nothing in between. Its methods raise OSError.

    Attributes:
        path: its name.
        num_bytes: written so far.
    """

    def __init__(self, path: str) -> None:
        self._descriptor, self.path = create_unused(path)
        self.num_bytes = 0
        self.write(MAGIC)

    def write(self, *parts: bytes) -> None:
        """All of them, to where the system keeps them when the process is killed."""
        place = self.num_bytes
        num_bytes = sum(map(len, parts))
        num_written = 0
        if num_bytes > _MOST_JOINED and len(parts) <= _MOST_PARTS and hasattr(os, "pwritev"):
            num_written = os.pwritev(self._descriptor, parts, place)
        rest = memoryview(b"".join(parts) if num_written < num_bytes else b"")[num_written:]
        place += num_written
        while rest:
            num_written = os.pwrite(self._descriptor, rest, place)
            rest = rest[num_written:]
            place += num_written
        self.num_bytes = place

    def cut(self) -> None:
        """Takes away what an interrupted write has left behind the end."""
        os.ftruncate(self._descriptor, self.num_bytes)

    def start_anew(self, beginning: bytes) -> None:
        """What there is becomes the older file; the newer one begins with this. At any time one of them is whole."""
        name = self.path + ".new"
        with suppress(FileNotFoundError):
            os.unlink(name)
        full, num_bytes = self._descriptor, self.num_bytes
        self._descriptor, self.num_bytes = os.open(name, _FLAGS, _MODE), 0
        try:
            self.write(MAGIC + beginning)
        except BaseException:
            new, self._descriptor, self.num_bytes = self._descriptor, full, num_bytes
            os.close(new)
            with suppress(OSError):
                os.unlink(name)
            raise
        os.close(full)
        os.replace(self.path, older(self.path))
        os.replace(name, self.path)

    def close(self) -> None:
        """Nothing is written any more."""
        os.close(self._descriptor)
