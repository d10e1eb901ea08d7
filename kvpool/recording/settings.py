"""What the environment says about recordings."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvpool.common.environment import shown
from kvpool.errors import InvalidArgumentError

FILE_VARIABLE = "KVPOOL_RECORD"
SIZE_VARIABLE = "KVPOOL_RECORD_MB"
DEFAULT_MB = 64
MAX_MB = 1 << 20


@dataclass(frozen=True)
class RecordingSettings:
    """Where a recording goes, and how much of it is kept.

    Attributes:
        path: of the newer of its two files; the older one has ``.1`` behind the name.
        max_mb: megabytes of operations in both files together; a snapshot of the state comes to each.
    """

    path: str
    max_mb: int = DEFAULT_MB

    @classmethod
    def from_environment(cls) -> RecordingSettings | None:
        """None where no recording is asked for.

        Raises:
            InvalidArgumentError: ``KVPOOL_RECORD_MB`` is no number of megabytes.
        """
        path = os.environ.get(FILE_VARIABLE, "")
        return cls(path, _read_size()) if path else None


def _read_size() -> int:
    value = os.environ.get(SIZE_VARIABLE, "") or str(DEFAULT_MB)
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(MAX_MB)) and 1 <= int(value) <= MAX_MB):
        raise InvalidArgumentError(f"{SIZE_VARIABLE} is a number of megabytes from 1 to {MAX_MB}, not {shown(value)}")
    return int(value)
