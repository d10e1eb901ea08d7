"""What a recording may cost whoever plays it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError, KvpoolError


class RecordingError(KvpoolError, ValueError):
    """A file that is no recording, is damaged, or costs more than the limits allow. The message begins with the file
    and the place in it."""


@dataclass(frozen=True)
class PlaybackLimits:
    """Limits of one file.

    Attributes:
        max_bytes: of the file.
        max_blocks: of the pool. The twin takes some hundred bytes for each.
        max_tokens: of ``max_model_len`` and of one request.
        max_total_tokens: of all requests that live at a time; 8 bytes each.
        max_requests: that live at a time.
        max_table_blocks: in the tables of all requests; some ten bytes each.

    Raises:
        InvalidArgumentError: a limit below 1.
    """

    max_bytes: int = 1 << 32
    max_blocks: int = 1 << 22
    max_tokens: int = 1 << 24
    max_total_tokens: int = 1 << 27
    max_requests: int = 1 << 18
    max_table_blocks: int = 1 << 26

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InvalidArgumentError(f"{field.name} is at least 1, not {show(getattr(self, field.name))}")


DEFAULT_LIMITS = PlaybackLimits()
