"""The scheduler's end of the line to its workers: each step goes to all ranks, and their answers come back.

Order of things: the scheduler's process makes a ``Broadcaster``, which binds; workers connect, before or after that,
and report; ``wait_for_workers`` returns when all ranks are there and agree; ``execute`` sends a step and collects the
answers; ``close`` ends the workers. The other end is ``WorkerConnection``.

Only the tokens of rank 0 are taken. All other ranks get them back with the next step, as ``new_token_ids``, so that
ranks can't drift apart. Each answer carries digests of the block tables that the rank used; they have to be the same on
all ranks.

Trust: see ``kvpool/worker/link.py``. Whoever can connect to the address can report as a rank that is still missing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvpool._version import __version__
from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.output import SchedulerOutput, StepResult
from kvpool.worker.connection import WorkerConnection
from kvpool.worker.link import RECONNECT_SECONDS, Deadline, Link, LinkChange
from kvpool.worker.messages import (
    MAX_MESSAGE_BYTES,
    FromWorker,
    Refusal,
    Shutdown,
    StepAnswer,
    StepMessage,
    Welcome,
    WorkerFailure,
    WorkerInfo,
    WorkerReturn,
    find_disagreements,
)
from kvpool.worker.worker_errors import (
    BroadcasterStateError,
    WorkerError,
    WorkerLostError,
    WorkerMismatchError,
    WorkerTimeoutError,
)

__all__ = ["Broadcaster", "WorkerConnection"]

logger = logging.getLogger("kvpool")

_POLL_SECONDS = 0.25  # between two looks at what no message tells
_NUM_REFUSED_TOLD = 4
_NUM_UNREAD_TOLD = 1000  # whose messages have not been read: told of the end as well


class Broadcaster:
    """Sends steps to the workers of all ranks; an executor. For one thread, and a context manager.

    Args:
        address: where to bind: ``ipc://PATH`` (the file is removed in the end), ``tcp://HOST:PORT``, or
            ``tcp://HOST:*`` for a free port.
        world_size: number of ranks.
        timeout_seconds: how long all answers to a step may take, and by default all reports of the workers.
        check_workers: called a few times a second while answers are awaited; raises what then ends the waiting, where
            the caller knows that a worker has ended, say.

    Attributes:
        address: with the port that the system chose, where it was asked to.
        world_size, timeout_seconds: as given.

    Raises:
        InvalidArgumentError: no such address, in use, or no rank.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        address: str,
        world_size: int,
        *,
        timeout_seconds: float = 60.0,
        check_workers: Callable[[], None] | None = None,
    ) -> None:
        if world_size < 1:
            raise InvalidArgumentError(f"world_size is {world_size}, and has to be at least 1")
        if not timeout_seconds > 0:
            raise InvalidArgumentError(f"timeout_seconds is {timeout_seconds}, and has to be above 0")
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._check_workers = check_workers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._sequence = 0
        self._infos: dict[int, WorkerInfo] = {}
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._refused: deque[str] = deque(maxlen=_NUM_REFUSED_TOLD)
        self._unreachable_since: dict[int, float] = {}
        self._looks_until = 0.0
        self._is_ready = False
        self._broken = ""
        self._link = Link(address, is_scheduler=True)
        self.address = self._link.address

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache of each rank. BroadcasterStateError before the workers are there."""
        self._check_ready()
        return self._infos[0].num_blocks

    # ---- the workers come ----

    def wait_for_workers(self, timeout_seconds: float | None = None) -> WorkerInfo:
        """Waits until all ranks have reported, and lets them start.

        A second worker of a rank is refused while the first one is there, and so is a rank that doesn't exist; the
        others are waited for all the same.

        Args:
            timeout_seconds: for all of them together, their time to load a model included; None for the one given at
                first.

        Returns:
            What rank 0 reported, which is what all did.

        Raises:
            WorkerTimeoutError: ranks are missing; they may be waited for again.
            WorkerMismatchError: ranks differ in what they reported; all are refused.
            WorkerError: a worker has failed before it could report.
            BroadcasterStateError: closed or broken.
        """
        self._check_usable()
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = Deadline(seconds)
        while len(self._infos) < self.world_size:
            if deadline.is_over:
                missing = [rank for rank in range(self.world_size) if rank not in self._infos]
                text = f"{_name(missing)} of {self.world_size} did not report to {self.address} within {seconds:g} s"
                raise WorkerTimeoutError("; refused: ".join([text, *self._refused]), missing)
            received = self._receive(deadline)
            for rank in self._unreachable_ranks(grace_seconds=0):
                self._forget(rank)
            if received is not None:
                self._admit(*received)
        self._check_agreement()
        if not self._is_ready:
            self._is_ready = True
            self._send_all(self._encoder.encode(Welcome()))
        return self._infos[0]

    def _admit(self, identity: bytes, payload: bytes) -> None:
        try:
            info = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self._refuse(identity, f"what it sent is no report of a worker of this version of kvpool ({error})")
            return
        if isinstance(info, WorkerFailure):
            raise self._break(WorkerError(f"rank {info.rank} can't start: {info.text}", info.rank, info.traceback))
        if not isinstance(info, WorkerInfo):
            self._refuse(identity, "it belongs to another scheduler, which had this address before")
            return
        rank = info.rank
        if info.world_size != self.world_size:
            reason = f"world_size is {info.world_size} for rank {rank}, and {self.world_size} for the scheduler"
            self._refuse(identity, reason)
            self._send_all(self._encoder.encode(Refusal(reason)))
            raise self._break(WorkerMismatchError(reason))
        if not 0 <= rank < self.world_size:
            self._refuse(identity, f"there is no rank {rank}, but 0 to {self.world_size - 1}")
        elif self._identities.get(rank, identity) != identity and self._link.send(self._identities[rank], b""):
            self._refuse(identity, f"there is a worker of rank {rank} already")
        else:
            self._forget(rank)
            self._infos[rank] = info
            self._identities[rank] = identity
            self._ranks[identity] = rank

    def _refuse(self, identity: bytes, reason: str) -> None:
        logger.warning("A worker was refused: %s", reason)
        self._refused.append(reason)
        self._link.send(identity, self._encoder.encode(Refusal(reason)))

    def _forget(self, rank: int) -> None:
        if rank in self._identities:
            del self._ranks[self._identities.pop(rank)], self._infos[rank]
            self._unreachable_since.pop(rank, None)

    def _check_agreement(self) -> None:
        lines = find_disagreements([self._infos[rank] for rank in range(self.world_size)])
        if not lines and self._infos[0].version != __version__:
            lines = [f"version (scheduler: {__version__!r}, workers: {self._infos[0].version!r})"]
        if lines:
            reason = f"workers disagree on {'; '.join(lines)}"
            self._send_all(self._encoder.encode(Refusal(reason)))
            raise self._break(WorkerMismatchError(reason))

    # ---- a step ----

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Has all ranks execute a step. One message of the size of the step to each, one answer from each.

        After a WorkerTimeoutError steps may go on: the late rank takes them in order, and its late answer is dropped.
        After any other error nothing can: some ranks have executed the step and some have not.

        Returns:
            The tokens that rank 0 sampled, and its errors.

        Raises:
            WorkerError: a worker raised an exception, or its answer makes no sense.
            WorkerLostError: the connection of a rank is gone.
            WorkerTimeoutError: ranks have not answered in time.
            WorkerMismatchError: ranks used different blocks.
            InvalidArgumentError: the message is larger than ``MAX_MESSAGE_BYTES``; nothing was sent.
            BroadcasterStateError: the workers are not there yet, or closed or broken.
        """
        self._check_ready()
        payload = self._encoder.encode(StepMessage(self._sequence + 1, output))
        if len(payload) > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"step {output.step} is a message of {len(payload)} bytes; {MAX_MESSAGE_BYTES} is the most"
            )
        self._sequence += 1
        self._send_all(payload)
        answers = self._collect(output.step, payload)
        self._compare(output, answers)
        return StepResult(answers[0].tokens or {}, answers[0].errors)

    def _send_all(self, payload: bytes) -> None:
        """Whoever has no connection now gets it when he is back, or is lost."""
        for rank, identity in self._identities.items():
            self._note_reach(rank, self._link.send(identity, payload))

    def _collect(self, step: int, payload: bytes) -> dict[int, StepAnswer]:
        answers: dict[int, StepAnswer] = {}
        deadline = Deadline(self.timeout_seconds)
        while len(answers) < self.world_size:
            pending = [rank for rank in range(self.world_size) if rank not in answers]
            if deadline.is_over:
                raise WorkerTimeoutError(
                    f"step {step}: {_name(pending)} did not answer within {self.timeout_seconds:g} s", pending
                )
            received = self._receive(deadline)
            if received is not None:
                identity, answer = received[0], self._read_answer(step, *received)
                if isinstance(answer, StepAnswer):
                    answers[self._ranks[identity]] = answer
                elif answer is not None and answer.sequence < self._sequence:
                    self._link.send(identity, payload)
            lost = [rank for rank in self._unreachable_ranks(RECONNECT_SECONDS) if rank not in answers]
            if lost:
                raise self._break(WorkerLostError(f"step {step}: the connection of {_name(lost)} is gone", lost))
        return answers

    def _read_answer(self, step: int, identity: bytes, payload: bytes) -> StepAnswer | WorkerReturn | None:
        """A message of a worker, as far as it is about this step."""
        rank = self._ranks.get(identity)
        if rank is None:
            self._refuse(identity, "the scheduler has all its workers, and a new one has an empty cache")
            return None
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise self._break(WorkerError(f"step {step}: rank {rank} sent what is no answer: {error}", rank)) from None
        if isinstance(message, WorkerFailure):
            text = f"step {step}: rank {rank} failed: {message.text}"
            raise self._break(WorkerError(text, rank, message.traceback))
        if isinstance(message, WorkerInfo):  # once more: so it has not got its welcome
            self._link.send(identity, self._encoder.encode(Welcome()))
            message = WorkerReturn(0)
        if message.sequence > self._sequence:
            raise self._break(WorkerError(f"step {step}: rank {rank} answered a step that was not sent", rank))
        if isinstance(message, StepAnswer) and message.sequence < self._sequence:
            logger.warning("An answer of rank %d to an earlier step came late", rank)
            return None
        return message

    def _compare(self, output: SchedulerOutput, answers: dict[int, StepAnswer]) -> None:
        first = answers[0].block_digests
        for rank in range(1, self.world_size):
            digests = answers[rank].block_digests
            if digests != first:
                pairs = zip(output.num_scheduled_tokens, first, digests)
                differing = [request_id for request_id, one, other in pairs if one != other]
                told = ", ".join(map(repr, differing[:3])) or "a number of requests"
                text = f"step {output.step}: ranks 0 and {rank} have different block ids for {told}"
                raise self._break(WorkerMismatchError(text))
        tokens, errors, sampled = answers[0].tokens, answers[0].errors, output.sampled_request_ids
        if tokens is None or tokens.keys() & errors.keys() or tokens.keys() | errors.keys() != set(sampled):
            raise self._break(WorkerError(f"step {output.step}: rank 0 sent no tokens, or not those asked for", 0))

    # ---- the line ----

    def _receive(self, deadline: Deadline) -> tuple[bytes, bytes] | None:
        """The next message and who sent it, or None now and then; strange frames are dropped."""
        if self._check_workers is not None:
            try:
                self._check_workers()
            except Exception as error:
                self._break(error)
                raise
        frames = self._link.receive(min(deadline.seconds_left, _POLL_SECONDS))
        if frames is None or len(frames) != 2:
            return None
        return frames[0], frames[1]

    def _unreachable_ranks(self, grace_seconds: float) -> list[int]:
        """Ranks that have had no connection for so long. Looks only for a while after a connection has broken."""
        if LinkChange.DOWN in self._link.take_changes():
            # ZeroMQ may tell of it before it takes the connection for broken.
            self._looks_until = time.monotonic() + RECONNECT_SECONDS
        now = time.monotonic()
        if now >= self._looks_until and not self._unreachable_since:
            return []
        for rank, identity in self._identities.items():
            self._note_reach(rank, self._link.send(identity, b""))
        return [rank for rank, since in self._unreachable_since.items() if now - since >= grace_seconds]

    def _note_reach(self, rank: int, is_reached: bool) -> None:
        if is_reached:
            self._unreachable_since.pop(rank, None)
        else:
            self._unreachable_since.setdefault(rank, time.monotonic())

    def _break(self, error: Exception) -> Exception:
        self._broken = str(error)
        return error

    def _check_usable(self) -> None:
        if self._link.is_closed:
            raise BroadcasterStateError("the broadcaster is closed")
        if self._broken:
            raise BroadcasterStateError(f"the broadcaster can't go on after an error: {self._broken}")

    def _check_ready(self) -> None:
        self._check_usable()
        if not self._is_ready:
            raise BroadcasterStateError("the workers have not reported yet: call wait_for_workers first")

    def close(self) -> None:
        """Ends the workers and the connections; a second call does nothing. Takes a second at most."""
        if self._link.is_closed:
            return
        peers = set(self._identities.values())
        for _ in range(_NUM_UNREAD_TOLD):
            frames = self._link.receive(0)
            if frames is None:
                break
            peers.add(frames[0])
        payload = self._encoder.encode(Shutdown())
        for identity in peers:
            self._link.send(identity, payload)
        self._link.close()

    def __enter__(self) -> Broadcaster:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _name(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
