"""Where a request is in its life."""

from __future__ import annotations

import enum


class RequestStatus(enum.IntEnum):
    """Status of a request. All that are greater than PREEMPTED are final.

    Values are those of vLLM 0.32's ``RequestStatus``, which has some between WAITING and RUNNING for parts of its
    engine that do not exist here.
    """

    WAITING = 1
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11
    FINISHED_REPETITION = 12

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether no request with this status runs again."""
        return status > RequestStatus.PREEMPTED
