"""Recordings of managers in this process, where the environment of the tests asks for none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpool.kv_cache_manager import PlainKVCacheManager
from kvpool.playback.limits import DEFAULT_LIMITS
from kvpool.playback.player import PlaybackReport, play_recording
from kvpool.playback.reader import RecordingReader
from kvpool.recording.calls import recorded
from kvpool.recording.frames import MAGIC, frame
from kvpool.recording.settings import FILE_VARIABLE, SIZE_VARIABLE

RecordingKVCacheManager = recorded(PlainKVCacheManager)


@contextmanager
def recording_to(path: Path, megabytes: int | None = None) -> Iterator[Any]:
    """The class of managers that are recorded here; they are so to their ends."""
    before = {name: os.environ.get(name) for name in (FILE_VARIABLE, SIZE_VARIABLE)}
    os.environ[FILE_VARIABLE] = str(path)
    if megabytes is not None:
        os.environ[SIZE_VARIABLE] = str(megabytes)
    try:
        yield RecordingKVCacheManager
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def finish(manager: Any) -> Path:
    """Ends a manager's recording; returns the file."""
    recorder = manager._recorder
    assert recorder is not None and recorder._file is not None, "it is not recorded any more"
    recorder.close()
    return Path(recorder.path)


def play(path: Path, **options: Any) -> PlaybackReport:
    """Plays a recording in which nothing may be wrong."""
    report = play_recording(path, **options)
    assert report.finding is None, str(report.finding)
    return report


def messages_of(path: Path) -> list[Any]:
    """All of a file, the head first."""
    with RecordingReader(path, DEFAULT_LIMITS) as reader:
        return [reader.head, *(placed.message for placed in reader)]


def file_of(messages: list[Any]) -> bytes:
    """A file of these messages."""
    return MAGIC + b"".join(map(frame, messages))
