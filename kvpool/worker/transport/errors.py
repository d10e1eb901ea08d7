"""What can go wrong between a scheduler and its workers. Which of them leave a ``Broadcaster`` usable: see there."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import KvpoolError


class WorkerError(KvpoolError, RuntimeError):
    """A worker could not execute a step, or sent what is no answer.

    Attributes:
        rank: of the worker.
        remote_traceback: of the exception in the worker; empty if there was none.
    """

    def __init__(self, text: str, rank: int, remote_traceback: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.remote_traceback = remote_traceback


class WorkerMismatchError(KvpoolError, RuntimeError):
    """Ranks disagree: on what they reported of themselves, or on the block ids of a step."""


class WorkerTimeoutError(KvpoolError, TimeoutError):
    """Ranks did not report or answer in time.

    Attributes:
        ranks: which.
    """

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class WorkerLostError(WorkerTimeoutError):
    """Ranks that will not answer any more: their connection is gone."""


class BroadcasterStateError(KvpoolError, RuntimeError):
    """A call that a ``Broadcaster`` can't serve now: before its workers are there, after an error, after ``close``."""


class WorkerRefusedError(KvpoolError, RuntimeError):
    """The scheduler does not take this worker; the message has its reason."""


class SchedulerLostError(KvpoolError, ConnectionError):
    """A worker has lost its scheduler: there is no connection, or what comes can't be read."""
