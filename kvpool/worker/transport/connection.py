"""A worker's end of the line to its scheduler.

The worker ends when the scheduler says so, and when it has had no connection for ``RECONNECT_SECONDS``: a process that
is gone, however it ended, closes its connections, and a machine that is gone stops sending heartbeats (30 s). A
scheduler may have nothing to do for as long as it likes. While a step is being executed nobody looks; what has happened
meanwhile is seen after the step.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.output import SchedulerOutput, StepResult
from kvpool.worker.transport.errors import SchedulerLostError, WorkerRefusedError
from kvpool.worker.transport.link import RECONNECT_SECONDS, Deadline, Keys, Link, LinkChange
from kvpool.worker.transport.messages import (
    MalformedMessageError,
    Refusal,
    Shutdown,
    StepAnswer,
    StepMessage,
    ToWorker,
    Welcome,
    WorkerFailure,
    WorkerInfo,
    WorkerReturn,
    decode,
    max_answer_bytes,
)

logger = logging.getLogger("kvpool")

_POLL_SECONDS = 0.5
_TOLD_CHARACTERS, _TRACEBACK_CHARACTERS = 10_000, 100_000  # of the exception that ends a worker
_IDENTITY_BYTES = 8

Execute = Callable[[SchedulerOutput], StepResult]
DigestBlocks = Callable[[SchedulerOutput], Sequence[int]]


class WorkerConnection:
    """A worker that takes steps from a ``Broadcaster``. For one thread, and a context manager.

    Args:
        address: of the scheduler, which may be started later.
        rank: of this worker.
        timeout_seconds: how long ``say_hello`` waits for the scheduler and the other ranks.
        keys, insecure: see ``Link``. The folder has this worker's secret key and the scheduler's public one.

    Raises:
        InvalidArgumentError: no such address, one that needs keys and has none, or bad keys.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self, address: str, rank: int, *, timeout_seconds: float = 60.0, keys: Keys = None, insecure: bool = False
    ) -> None:
        self.address = address
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._info: WorkerInfo | None = None
        self._is_welcome = False
        self._sequence = 0
        self._last_answer = b""
        self._message_bytes = 0  # of the message received last
        self._is_connected = False
        self._has_failed_handshake = False
        self._lost: Deadline | None = None
        # Kept over interruptions, so that the scheduler knows the worker again; no two processes have the same.
        identity = f"{rank}-{secrets.token_hex(_IDENTITY_BYTES)}".encode()
        self._link = Link(address, identity=identity, keys=keys, insecure=insecure)

    def say_hello(self, info: WorkerInfo) -> None:
        """Reports to the scheduler, and waits until all ranks are there and agree.

        Raises:
            InvalidArgumentError: the report is of another rank.
            WorkerRefusedError: ranks disagree, or the scheduler has no place for this worker.
            SchedulerLostError: no scheduler, or not all ranks, within ``timeout_seconds``; or the scheduler ends.
        """
        if info.rank != self.rank:
            raise InvalidArgumentError(f"a report of rank {info.rank} from the worker of rank {self.rank}")
        self._info = info
        if self._is_connected:
            self._report()
        deadline = Deadline(self.timeout_seconds)
        while True:
            message = self._receive(min(deadline.seconds_left, _POLL_SECONDS))
            if isinstance(message, Welcome):
                self._is_welcome = True
                return
            if message is not None:
                raise SchedulerLostError(f"the scheduler at {self.address} ended before it had all its workers")
            if deadline.is_over:
                raise SchedulerLostError(
                    f"the scheduler at {self.address} {self._explain()} within {self.timeout_seconds:g} s"
                    f" (rank {self.rank})"
                )

    def _explain(self) -> str:
        if self._is_connected:
            return "has not got all its workers"
        if self._link.has_keys and self._has_failed_handshake:
            return "can't be reached (something is there, but not with these keys: compare those of both sides)"
        if self._has_failed_handshake:
            return "can't be reached (something is there that this worker, without keys, can't talk to)"
        return "can't be reached"

    def serve(self, execute: Execute, digest_blocks: DigestBlocks) -> None:
        """Executes steps and answers them until the scheduler ends it.

        Args:
            execute: a step to the tokens, or errors, of ``sampled_request_ids``.
            digest_blocks: called after each step, unless there is one rank only; for each of ``num_scheduled_tokens``,
                in that order, a digest of the request's block tables as they are used here, non-negative and below
                2**64.

        Raises:
            SchedulerLostError: the connection is gone, a step was lost with one, or what comes can't be read.
            WorkerRefusedError: another scheduler has taken the address.
            Exception: what ``execute`` raised; the scheduler has been told.
        """
        if self._info is None or not self._is_welcome:
            raise InvalidArgumentError("say_hello comes before serve")
        if self._info.world_size == 1:
            digest_blocks = _no_digests  # there is nobody to compare with
        while True:
            message = self._receive(_POLL_SECONDS)
            if isinstance(message, Shutdown):
                return
            if isinstance(message, StepMessage) and message.sequence > self._sequence:
                self._last_answer = self._answer(message, execute, digest_blocks)
                self._sequence = message.sequence
                self._link.send(self._last_answer)

    def _answer(self, message: StepMessage, execute: Execute, digest_blocks: DigestBlocks) -> bytes:
        try:
            if message.sequence != self._sequence + 1:
                raise SchedulerLostError(f"step {message.output.step} came, but one before it did not")
            result = execute(message.output)
            digests = list(digest_blocks(message.output))
            told = (result.tokens, result.errors) if self.rank == 0 else ()
            answer = self._encoder.encode(StepAnswer(message.sequence, digests, *told))
            limit = max_answer_bytes(self._info.max_num_seqs if self._info else 0, self._message_bytes)
            if len(answer) > limit:
                raise InvalidArgumentError(f"an answer of {len(answer)} bytes; {limit} is the most")
            return answer
        except BaseException as error:
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Tells the scheduler that this worker ends by an exception; ``serve`` does so if ``execute`` raises one."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_TOLD_CHARACTERS]
        told = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        failure = WorkerFailure(self.rank, text, told)
        self._link.send(self._encoder.encode(failure))

    def _receive(self, seconds: float) -> ToWorker | None:
        """The next message; None if there is none in this time. A refusal is raised."""
        frames = self._link.receive(seconds)
        if frames is None:
            self._watch()
            return None
        self._link.taken()
        self._message_bytes = sum(map(len, frames))
        payload = frames[0] if len(frames) == 1 else b"".join(frames)
        if not payload:
            return None
        try:
            message = decode(self._decoder, payload)
        except MalformedMessageError as error:
            raise SchedulerLostError(f"what the scheduler at {self.address} sent is no message: {error}") from None
        if isinstance(message, Refusal):
            raise WorkerRefusedError(f"the scheduler at {self.address} refused rank {self.rank}: {message.reason}")
        return message

    def _watch(self) -> None:
        """Reports on each new connection; ends the worker when there is none for too long."""
        for change in self._link.take_changes():
            if change is LinkChange.HANDSHAKE_FAILED:
                self._has_failed_handshake = True
                continue
            self._is_connected = change is LinkChange.UP
            if not self._is_connected:
                self._lost = Deadline(RECONNECT_SECONDS)
                continue
            self._lost = None
            self._report()
        if self._lost is not None and self._lost.is_over:
            raise SchedulerLostError(f"the scheduler at {self.address} is gone (rank {self.rank})")

    def _report(self) -> None:
        """Says who this is, on a new connection. The scheduler sends a step once more that has not been executed."""
        if self._is_welcome:
            self._link.send(self._encoder.encode(WorkerReturn(self._sequence)))
            if self._last_answer:
                self._link.send(self._last_answer)
        elif self._info is not None:
            self._link.send(self._encoder.encode(self._info))

    def close(self) -> None:
        """Ends the connection; a second call does nothing. Takes a second at most."""
        self._link.close()

    def __enter__(self) -> WorkerConnection:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _no_digests(output: SchedulerOutput) -> list[int]:
    return []
