"""The scheduler's end of the line to its workers: each step goes to all ranks, and their answers come back.

Order of things: the scheduler's process makes a ``Broadcaster``, which binds; workers connect, before or after that,
and report; ``wait_for_workers`` returns when all ranks are there and agree; ``execute`` sends a step and collects the
answers; ``close`` ends the workers. The other end is ``WorkerConnection``.

Only the tokens of rank 0 are taken. All other ranks get them back with the next step, as ``new_token_ids``, so that
ranks can't drift apart. Each answer carries digests of the block tables that the rank used; they have to be the same on
all ranks.

Trust: see ``kvpool/worker/transport/link.py``. Whoever can connect can report as a rank that is still missing.
Afterwards what anybody else sends is refused once, counted and dropped.

What can go wrong, and what then holds:

- A worker is killed: WorkerLostError as soon as its connection has been gone for ``RECONNECT_SECONDS``. It can't be
  replaced, as its keys and values are gone: the broadcaster says so from then on.
- A worker is stopped, or late: WorkerTimeoutError after ``timeout_seconds``. Steps may go on; when the worker does, it
  executes what it has missed in order, and its late answers are dropped. Once it is ``MAX_UNANSWERED_STEPS`` behind, no
  more is sent. Without a heartbeat for 30 s it counts as lost; a machine that is gone does so after 30 s anyhow.
- A connection breaks and comes back in time: nothing is noticed. Steps are sent again as far as they were not executed.
- A call is interrupted by an exception (Ctrl-C): the step counts as sent, and its answer is dropped when it comes.
  Whatever was interrupted is completed by the next call.
- A step has a token outside the vocabulary, or is larger than the workers have room for: InvalidArgumentError that
  names the request. Nothing was sent, and steps go on.
- A worker fails, sends what is no answer, a token outside the vocabulary, or has other blocks than the others: an
  error that names it, and the broadcaster is of no more use.
- The clock is set: no time is measured by it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec

from kvpool._version import __version__
from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.output import SchedulerOutput, StepResult
from kvpool.worker.executor import ExecutorLimits
from kvpool.worker.transport.connection import WorkerConnection
from kvpool.worker.transport.errors import (
    BroadcasterStateError,
    WorkerError,
    WorkerLostError,
    WorkerMismatchError,
    WorkerTimeoutError,
)
from kvpool.worker.transport.link import RECONNECT_SECONDS, Deadline, Keys, Link
from kvpool.worker.transport.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REPORT_BYTES,
    FromWorker,
    MalformedMessageError,
    Refusal,
    Shutdown,
    StepAnswer,
    StepMessage,
    Welcome,
    WorkerFailure,
    WorkerInfo,
    WorkerReturn,
    decode,
    find_disagreements,
    find_faults,
    max_answer_bytes,
)

__all__ = ["Broadcaster", "WorkerConnection"]

logger = logging.getLogger("kvpool")

_POLL_SECONDS = 0.25  # how often to look whether workers that say nothing are there
MAX_UNANSWERED_STEPS = 8
"""Steps that a worker may be behind."""

_DROP_SECONDS = 0.005
_NUM_REFUSED_TOLD = 4
_NUM_REFUSED_REMEMBERED = 256
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
        keys, insecure: see ``Link``. The folder has the scheduler's secret key and the public one of each worker, or
            the one that they share.

    Attributes:
        address: with the port that the system chose, where it was asked to.
        world_size, timeout_seconds: as given.

    Raises:
        InvalidArgumentError: no such address, in use, one that needs keys and has none, bad keys, or no rank.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        address: str,
        world_size: int,
        *,
        timeout_seconds: float = 60.0,
        check_workers: Callable[[], None] | None = None,
        keys: Keys = None,
        insecure: bool = False,
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
        self._unanswered: dict[int, bytes] = {}  # steps that not all ranks have answered, by sequence
        self._answered: dict[int, int] = {}  # the last sequence that a rank has answered
        self._is_interrupted = False
        self._infos: dict[int, WorkerInfo] = {}
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._refused: deque[str] = deque(maxlen=_NUM_REFUSED_TOLD)
        self._refused_identities: dict[bytes, None] = {}  # oldest first
        self._num_refused = 0
        self._unreachable_since: dict[int, float] = {}
        self._next_look = 0.0
        self._is_ready = False
        self._broken = ""
        self._link = Link(address, num_workers=world_size, keys=keys, insecure=insecure)
        self.address = self._link.address

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache of each rank. BroadcasterStateError before the workers are there."""
        self._check_ready()
        return self._infos[0].num_blocks

    @property
    def limits(self) -> ExecutorLimits:
        """What every rank has room for. BroadcasterStateError before the workers are there."""
        self._check_ready()
        info = self._infos[0]
        return ExecutorLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            num_blocks=info.num_blocks,
        )

    @property
    def num_refused(self) -> int:
        """Messages so far that nobody was waited for to send, or that were none."""
        return self._num_refused + self._link.num_ignored

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
                raise self._missing_ranks_error(seconds)
            received = self._receive(deadline)
            if received is not None:
                self._admit(*received)
                self._link.taken(is_of_worker=received[0] in self._ranks)
            if len(self._infos) == self.world_size:
                self._next_look = 0.0  # one that reported and went away must not be among them
            for rank in self._lost_ranks(grace_seconds=0):
                self._forget(rank)
        self._check_agreement()
        if not self._is_ready:
            self._send_all(self._encoder.encode(Welcome()))  # who gets it twice takes no harm
            self._is_ready = True
        return self._infos[0]

    def _missing_ranks_error(self, seconds: float) -> WorkerTimeoutError:
        missing = [rank for rank in range(self.world_size) if rank not in self._infos]
        text = f"{_name(missing)} of {self.world_size} did not report to {self.address} within {seconds:g} s"
        text = "; refused: ".join([text, *self._refused])
        if self._link.has_keys:
            num_refused = self._link.num_refused_keys
            text += f" (connections with a key that is not admitted: {num_refused}; workers without keys, or with"
            text += " another key of the scheduler, don't get as far: compare the keys of both sides)"
        return WorkerTimeoutError(text, missing)

    def _admit(self, identity: bytes, payload: bytes) -> None:
        if len(payload) > MAX_REPORT_BYTES:
            self._refuse(identity, f"a message of {len(payload)} bytes is no report of a worker")
            return
        try:
            info = decode(self._decoder, payload)
        except MalformedMessageError as error:
            self._refuse(identity, f"what it sent is no report of a worker of this version of kvpool ({error})")
            return
        if isinstance(info, WorkerFailure):
            raise self._break(WorkerError(f"rank {info.rank} can't start: {info.text}", info.rank, info.traceback))
        if not isinstance(info, WorkerInfo):
            self._refuse(identity, "it belongs to another scheduler, which had this address before")
            return
        rank, faults = info.rank, find_faults(info)
        if faults:
            self._refuse(identity, f"a report that can't be true: {'; '.join(faults)}")
            return
        if info.world_size != self.world_size:
            reason = f"world_size is {info.world_size} for rank {rank}, and {self.world_size} for the scheduler"
            self._refuse(identity, reason)
            self._send_all(self._encoder.encode(Refusal(reason)))
            raise self._break(WorkerMismatchError(reason))
        if not 0 <= rank < self.world_size:
            self._refuse(identity, f"there is no rank {rank}, but 0 to {self.world_size - 1}")
        elif self._identities.get(rank, identity) != identity and self._link.send(b"", self._identities[rank]):
            self._refuse(identity, f"there is a worker of rank {rank} already")
        elif self._link.send(b"", identity):  # else it has gone away since
            self._forget(rank)
            self._infos[rank] = info
            self._identities[rank] = identity
            self._ranks[identity] = rank

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Tells a peer once that it is not taken; what it sends from then on is only counted."""
        self._num_refused += 1
        if len(self._refused_identities) >= _NUM_REFUSED_REMEMBERED:
            del self._refused_identities[next(iter(self._refused_identities))]
        self._refused_identities[identity] = None
        if self._num_refused.bit_count() == 1:  # 1, 2, 4, ...: a flood does not fill the log
            logger.warning("A worker was refused, the %d. one: %s", self._num_refused, reason)
        self._refused.append(reason)
        self._link.send(self._encoder.encode(Refusal(reason)), identity)

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

        After a WorkerTimeoutError that is no WorkerLostError, and after an exception from outside such as
        KeyboardInterrupt, steps may go on: the workers execute this one all the same, and its answers are dropped.
        After any other error nothing can: some ranks have executed the step and some have not, and every further call
        is a BroadcasterStateError that has the reason.

        Returns:
            The tokens that rank 0 sampled, and its errors.

        Raises:
            WorkerError: a worker raised an exception, or its answer makes no sense.
            WorkerLostError: the connection of a rank is gone.
            WorkerTimeoutError: ranks have not answered in time, or are too far behind for another step.
            WorkerMismatchError: ranks used different blocks.
            InvalidArgumentError: a token outside the vocabulary, or a step larger than the workers have room for, see
                ``ExecutorLimits.check``; a message larger than ``MAX_MESSAGE_BYTES``. Nothing was sent: steps go on
                once the scheduler has withdrawn this one and ended the request.
            BroadcasterStateError: the workers are not there yet, or closed or broken.
        """
        self.limits.check(output)
        sequence = self._sequence + 1
        payload = self._encoder.encode(StepMessage(sequence, output))
        if len(payload) > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"step {output.step} is a message of {len(payload)} bytes; {MAX_MESSAGE_BYTES} is the most"
            )
        deadline, num_refused = Deadline(self.timeout_seconds), self.num_refused
        self._wait_for_room(output.step, deadline)
        if self._is_interrupted:
            for identity in self._identities.values():
                self._send_unanswered(identity)
        self._is_interrupted = True
        self._unanswered[sequence] = payload
        self._sequence = sequence  # from here on it has been sent, if not now then by the next call
        self._send_all(payload)
        try:
            answers = self._collect(output.step, deadline)
        except WorkerTimeoutError:
            self._is_interrupted = False
            raise
        self._compare(output, answers)
        if self.num_refused > num_refused:
            self._drop_strangers_messages()
        self._is_interrupted = False
        return StepResult(answers[0].tokens or {}, answers[0].errors)

    def _drop_strangers_messages(self) -> None:
        """For some milliseconds at most: more may have come than were read while the workers were waited for."""
        deadline = Deadline(_DROP_SECONDS)
        while not deadline.is_over:
            received = self._link.receive(0, self._refused_identities)
            if received is None and not self._link.is_readable:
                return
            if received is not None:
                if received[0] in self._ranks:
                    return  # of a worker, which the next step reads
                self._refuse(received[0], "the scheduler has all its workers, and a new one has an empty cache")
                self._link.taken()

    def _send_all(self, payload: bytes) -> None:
        """Whoever has no connection now gets it when he is back, or is lost."""
        for rank, identity in self._identities.items():
            self._note_reach(rank, self._link.send(payload, identity))

    def _send_unanswered(self, identity: bytes, executed: int = 0) -> None:
        """Every step behind ``executed``, in order, to one rank; what it has executed already it drops."""
        executed = max(executed, self._answered.get(self._ranks[identity], 0))
        for sequence, payload in sorted(self._unanswered.items()):
            if sequence > executed:
                self._link.send(payload, identity)

    def _wait_for_room(self, step: int, deadline: Deadline) -> None:
        """Waits until no rank is too far behind for another step."""
        while True:
            behind = [
                rank
                for rank in range(self.world_size)
                if self._sequence - self._answered.get(rank, 0) >= MAX_UNANSWERED_STEPS
            ]
            if not behind:
                return
            if deadline.is_over:
                raise WorkerTimeoutError(
                    f"step {step} was not sent: {_name(behind)} did not answer the {MAX_UNANSWERED_STEPS} before it",
                    behind,
                )
            self._receive_answer(step, deadline)

    def _collect(self, step: int, deadline: Deadline) -> dict[int, StepAnswer]:
        answers: dict[int, StepAnswer] = {}
        while len(answers) < self.world_size:
            if deadline.is_over:
                pending = [rank for rank in range(self.world_size) if rank not in answers]
                raise WorkerTimeoutError(
                    f"step {step}: {_name(pending)} did not answer within {self.timeout_seconds:g} s", pending
                )
            received = self._receive_answer(step, deadline)
            if received is not None:
                rank, answer = received
                answers[rank] = answer
        return answers

    def _receive_answer(self, step: int, deadline: Deadline) -> tuple[int, StepAnswer] | None:
        """A rank and its answer to the step that was sent last, or None now and then.

        Raises:
            WorkerError: see ``execute``.
            WorkerLostError: a rank that has not answered is gone.
        """
        received, answer = self._receive(deadline), None
        if received is not None:
            answer = self._read_answer(step, *received)
            self._link.taken(is_of_worker=received[0] in self._ranks)
        lost = [rank for rank in self._lost_ranks(RECONNECT_SECONDS) if self._answered.get(rank, 0) < self._sequence]
        if lost:
            raise self._break(WorkerLostError(f"step {step}: the connection of {_name(lost)} is gone", lost))
        return answer

    def _read_answer(self, step: int, identity: bytes, payload: bytes) -> tuple[int, StepAnswer] | None:
        """The answer of a worker, if this is the one to the step that was sent last."""
        rank = self._ranks.get(identity)
        if rank is None:
            self._refuse(identity, "the scheduler has all its workers, and a new one has an empty cache")
            return None
        message = self._read_message(step, rank, payload)
        if isinstance(message, WorkerFailure):
            text = f"step {step}: rank {rank} failed: {message.text}"
            raise self._break(WorkerError(text, rank, message.traceback))
        if isinstance(message, WorkerInfo):  # once more: so it has not got its welcome
            self._link.send(self._encoder.encode(Welcome()), identity)
            message = WorkerReturn(0)
        if message.sequence > self._sequence:
            raise self._break(WorkerError(f"step {step}: rank {rank} answered a step that was not sent", rank))
        if isinstance(message, WorkerReturn):
            self._send_unanswered(identity, message.sequence)
            return None
        self._note_answer(rank, message.sequence)
        if message.sequence < self._sequence:
            logger.warning("An answer of rank %d to an earlier step came late", rank)
            return None
        return rank, message

    def _read_message(self, step: int, rank: int, payload: bytes) -> FromWorker:
        longest = max(map(len, self._unanswered.values()), default=0)
        limit = max(MAX_REPORT_BYTES, max_answer_bytes(self._infos[rank].max_num_seqs, longest))
        try:
            if len(payload) > limit:
                raise MalformedMessageError(f"{len(payload)} bytes, of {limit} at most")
            return decode(self._decoder, payload)
        except MalformedMessageError as error:
            raise self._break(WorkerError(f"step {step}: rank {rank} sent what is no answer: {error}", rank)) from None

    def _note_answer(self, rank: int, sequence: int) -> None:
        self._answered[rank] = max(sequence, self._answered.get(rank, 0))
        by_all = min(self._answered.get(rank, 0) for rank in range(self.world_size))
        for answered in [sequence for sequence in self._unanswered if sequence <= by_all]:
            del self._unanswered[answered]

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
        vocab_size = self._infos[0].vocab_size
        every = list(chain.from_iterable(tokens.values()))
        if not all(tokens.values()) or (every and not 0 <= min(every) <= max(every) < vocab_size):
            request_id = next(each for each, ids in tokens.items() if not ids or min(ids) < 0 or max(ids) >= vocab_size)
            text = f"step {output.step}: rank 0 sent the tokens {tokens[request_id][:8]} for {request_id!r}, in a"
            raise self._break(WorkerError(f"{text} vocabulary of {vocab_size}", 0))

    # ---- the line ----

    def _receive(self, deadline: Deadline) -> tuple[bytes, bytes] | None:
        """The next message and who sent it, or None now and then."""
        frames = self._link.receive(min(deadline.seconds_left, _POLL_SECONDS), self._refused_identities)
        if frames is None:
            return None
        return frames[0], frames[1] if len(frames) == 2 else b"".join(frames[1:])

    def _lost_ranks(self, grace_seconds: float) -> list[int]:
        """Ranks that have had no connection for so long. Looks a few times a second, by a message of no bytes; also
        has the caller check the workers."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + _POLL_SECONDS
        if self._check_workers is not None:
            try:
                self._check_workers()
            except Exception as error:
                self._break(error)
                raise
        for rank, identity in self._identities.items():
            self._note_reach(rank, self._link.send(b"", identity))
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
            self._link.taken()
        payload = self._encoder.encode(Shutdown())
        for identity in peers:
            self._link.send(payload, identity)
        self._link.close()

    def __enter__(self) -> Broadcaster:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _name(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
