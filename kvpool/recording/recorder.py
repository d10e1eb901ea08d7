"""What is behind the calls of one manager while they are recorded: the messages, the requests as they were told last,
the file, and when it has to begin anew.

A call that takes or gives blocks is written before it is made, with what has changed in its requests, and its result
together with the next one. So the call in which a process dies is in the file; but for calls of ``allocate_slots`` for
one running request after the other, which are written together.

Nothing in here may disturb the run. What can't be recorded leaves a gap, after which the state is told anew; what can't
be written ends the recording, with one warning. So does a fork in the child: the file is the parent's.
"""

from __future__ import annotations

import logging
import os
import platform
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from kvpool._version import __version__
from kvpool.backend import BACKEND, Request
from kvpool.common.one_line import one_line
from kvpool.errors import KvpoolError
from kvpool.recording.files import RecordingFile
from kvpool.recording.frames import frame, frame_parts
from kvpool.recording.operations import (
    FAILED,
    FORMAT_VERSION,
    INTERRUPTED,
    LAST_HIT,
    NO_HIT,
    REFUSED,
    ManagerSetup,
    Recording,
    number,
    pack,
)
from kvpool.recording.settings import RecordingSettings
from kvpool.recording.setup import NotRecordableError
from kvpool.recording.snapshot import GAP, RING, START, ids_of, take_snapshot
from kvpool.recording.told import PlainCalls, Told, pack_batch
from kvpool.requests.status import RequestStatus

logger = logging.getLogger("kvpool")

MAX_GAPS = 1_000
"""So often the state is told anew after something that can't be recorded; then the recording ends."""

_BYTES_PER_MB = 1 << 20
_ID_BYTES = 16
_STATUS_CODES = {"WAITING": 1, "PREEMPTED": 2}
# What a manager reads of a request, beside its id and hashes: what changes at every step, and the rest.
_TOKENS = attrgetter("num_tokens", "num_computed_tokens")
_REST = attrgetter(
    "num_prompt_tokens", "num_in_flight_tokens", "shared_prefix_boundary", "skip_reading_prefix_cache", "status"
)

Parts = tuple[bytes, bytes]
MakeMessage = Callable[[], tuple[Any, ...]]
Fields = tuple["list[bytes] | None", "list[int]"]
MakeResult = Callable[[Any], Fields]

_NOTHING: Fields = (None, [])
_EMPTY_RESULT = frame_parts(("result", *_NOTHING))
_MAX_QUIET_PARTS = 200
_DEFAULTS = (0, None, 0, 0, False, 0, False, 0, True, ())  # of allocate_slots, behind the number of new tokens

_recorders: weakref.WeakSet[OperationRecorder] = weakref.WeakSet()


class OperationRecorder:
    """Records the calls of one manager and its pool, those from outside: what they call themselves is theirs.

    Args:
        manager: it is not kept alive.
        setup: how it was made.
        settings: where to.

    Attributes:
        takes_calls: whether the next call is to be recorded; False inside of one, and when the recording has ended.
        is_on: whether it has not ended.
        is_settled: whether the recording says what has happened; else the state is told anew before the next call.
        told: the requests, by id; caches: whether their hashes count.
        plain: calls that are written together.
        path: the file.

    Raises:
        OSError, NotRecordableError: there can be no recording.
    """

    def __init__(self, manager: Any, setup: ManagerSetup, settings: RecordingSettings) -> None:
        self._manager = weakref.ref(manager)
        self._setup = setup
        self.caches = setup.enable_caching
        self._recording_id = os.urandom(_ID_BYTES)
        self._segment = 0
        self._max_bytes = settings.max_mb * _BYTES_PER_MB // 2
        self.told: dict[Any, Told] = {}
        self.plain = PlainCalls(self.told, self.caches)
        self._has_plain = False  # among what waits to be written
        self._numbers: dict[Any, int] = {}
        self._next_number = 0
        self._pending: list[bytes] = []
        self._last_hit: Any = None
        self._num_operations = 0
        self._num_gaps = 0
        self.is_settled = True
        self._file: RecordingFile | None = None
        beginning = self._beginning(START)
        self._file = RecordingFile(settings.path)
        self.path = self._file.path
        self._write(beginning)
        self._num_bytes_before = self._file.num_bytes
        self.takes_calls = self.is_on = self._file is not None
        _recorders.add(self)
        weakref.finalize(manager, self.close)

    # ---- calls ----

    def call(self, run: Callable[[], Any], make_message: MakeMessage, make_result: MakeResult) -> Any:
        """``run()``, recorded.

        Args:
            make_message: the name and fields of the operation.
            make_result: the fields of its ``Result``.
        """
        self.takes_calls = False
        try:
            is_told = self._begin(make_message)
            self.is_settled = False
            try:
                result = run()
            except BaseException as error:
                if is_told:
                    self._note_failure(error)
                raise
            if is_told:
                self._note_result(make_result, result)
            return result
        finally:
            self.takes_calls = self.is_on

    def add_plain(self, request: Any, num_new_tokens: Any) -> bool:
        """``PlainCalls.add`` where the request is told first, and where there is no room. False if the call has to be
        recorded alone. Whatever the request raises comes through."""
        plain, known = self.plain, self.told.get(request.request_id)
        if plain.is_full or (known is not None and plain.has(known)):
            self._end_plain()  # what has changed of a request is told before all calls of a batch
        if plain.num_calls == 0 and (len(self._pending) > _MAX_QUIET_PARTS or self._is_full()):
            return False  # time to write
        self.tell(request)
        return plain.add(request, num_new_tokens)

    def settle_plain(self, blocks: Any) -> None:
        """What the call has returned. It is recorded from here on."""
        try:
            self.plain.settle(None if blocks is None else [ids_of(group) for group in blocks.blocks])
            self.is_settled = True
        except Exception as error:
            self._note_gap(error)

    def _end_plain(self) -> None:
        if self.plain.is_empty:
            return
        self._tell_grown(*self.plain.take_grown())
        num_calls = self.plain.num_calls
        if num_calls:
            self._has_plain = True
            self._pending += frame_parts(("plain_allocations", *self.plain.take()))
            self._num_operations += num_calls

    def note_plain_failure(self, request: Any, num_new_tokens: Any, error: BaseException) -> None:
        """The call was one of many, and is one alone by now; it was not made, as far as the others know."""
        try:
            self._end_plain()
            self.told[request.request_id].forget_tokens()
            message = ("allocate_slots", self.tell(request).number, num_new_tokens, *_DEFAULTS)
            self._pending += frame_parts(message)
            self._num_operations += 1
            self._note_failure(error)
        except Exception as other:
            self._note_gap(other)

    def _is_full(self) -> bool:
        return self._file is not None and self._file.num_bytes - self._num_bytes_before > self._max_bytes

    def call_quietly(self, run: Callable[[], Any], message: Parts, make_result: Callable[[Any], Parts]) -> Any:
        """``run()``, which takes and gives no blocks and refuses nothing: written with the next call that does.

        Args:
            message: the operation as it is in the file.
            make_result: the same of its ``Result``.
        """
        self.takes_calls = False
        try:
            try:
                if self._has_plain or not self.plain.is_empty or len(self._pending) > _MAX_QUIET_PARTS:
                    self._prepare()
                    self._write_pending()
                else:
                    self._prepare()
                self._pending += message
                self._num_operations += 1
            except Exception as error:
                self.stop(error)
            result = run()
            try:
                self._pending += make_result(result)
                self.is_settled = True
            except Exception as error:
                self._note_gap(error)
            return result
        finally:
            self.takes_calls = self.is_on

    def _prepare(self) -> None:
        """The state is told anew, or the next file is begun, where it is time to."""
        was_settled = self.is_settled
        self.is_settled = False
        if not was_settled:
            self._resume()
        elif self._is_full():
            self._start_next_file()

    def _begin(self, make_message: MakeMessage) -> bool:
        """Whether the file has the call now."""
        try:
            self._prepare()
            if self._file is None:
                return False
            try:
                self._end_plain()
                self._pending += frame_parts(make_message())
            except Exception as error:  # of what the caller has passed
                self._note_gap(error)
                return False
            self._num_operations += 1
            self._write_pending()
        except Exception as error:
            self.stop(error)
        return self._file is not None

    def _note_result(self, make_result: MakeResult, result: Any) -> None:
        try:
            fields = make_result(result)
            self._pending += _EMPTY_RESULT if fields == _NOTHING else frame_parts(("result", *fields))
            self.is_settled = True
        except Exception as error:
            self._note_gap(error)

    def _note_failure(self, error: BaseException) -> None:
        how = FAILED
        if isinstance(error, KvpoolError):
            how = REFUSED
        elif not isinstance(error, Exception) or isinstance(error, (MemoryError, OSError)):
            how = INTERRUPTED
        try:
            self._pending += frame_parts(("failure", how, one_line(type(error).__name__, 80)))
            self.is_settled = how == REFUSED
        except Exception as other:
            self._note_gap(other)

    def _note_gap(self, error: Exception) -> None:
        logger.debug("A call can't be recorded: %s", one_line(f"{type(error).__name__}: {error}"))

    # ---- requests ----

    def number_of(self, request_id: Any) -> int:
        """The number that stands for a request's id."""
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._next_number
            self._next_number += 1
        return number

    def tell(self, request: Any) -> Told:
        """The request as the file has it; what has changed of it goes before the call."""
        told = self.told.get(request.request_id)
        if told is not None and told.is_current(request, self.caches):
            return told
        tokens = _TOKENS(request)
        rest = _rest_of(request)
        hashes: Sequence[Any] = request.block_hashes if self.caches else ()
        if told is None:
            told = Told(self.number_of(request.request_id))
        elif (
            (told.num_tokens, told.num_computed_tokens) == tokens
            and (
                told.num_prompt_tokens,
                told.num_in_flight_tokens,
                told.shared_prefix_boundary,
                told.skips_cache,
                told.status,
            )
            == rest
            and told.num_hashes == len(hashes)
            and (not told.num_hashes or hashes[-1] == told.last_hash)
        ):
            return told
        num_kept = told.num_hashes
        if num_kept > len(hashes) or (num_kept and hashes[num_kept - 1] != told.last_hash):
            num_kept = 0  # a hash stands for all before it, so they are others too
        new_hashes = hashes[num_kept:] if num_kept else hashes
        b"".join(new_hashes)  # TypeError for other hashes
        num_tokens, num_computed_tokens = map(number, tokens)
        num_prompt_tokens, num_in_flight_tokens, boundary, skips_cache, status = rest
        message = (
            "request",
            told.number,
            isinstance(request, Request),
            type(status) is RequestStatus,
            _STATUS_CODES.get(status.name, 0),
            num_tokens,
            num_computed_tokens,
            number(num_prompt_tokens),
            number(num_in_flight_tokens),
            number(boundary),
            bool(skips_cache),
            num_kept,
            new_hashes,
        )
        self._pending += frame_parts(message)
        told.num_tokens, told.num_computed_tokens = num_tokens, num_computed_tokens
        told.num_prompt_tokens, told.num_in_flight_tokens = num_prompt_tokens, num_in_flight_tokens
        told.shared_prefix_boundary, told.skips_cache, told.status = boundary, skips_cache, status
        told.num_hashes = len(hashes)
        told.last_hash = hashes[-1] if hashes else None
        self.told[request.request_id] = told
        return told

    def tell_batch(self, requests: Iterable[Any]) -> tuple[bytes, ...]:
        """Packed numbers, tokens and computed tokens of requests that are told together: only what else has changed of
        them goes before the call."""
        *rows, grown, hashes = pack_batch(self.told, requests, self.caches, self.tell)
        self._tell_grown(grown, hashes)
        return tuple(rows)

    def _tell_grown(self, grown: list[int], hashes: list[bytes]) -> None:
        if grown:
            self._pending += frame_parts(("new_hashes", pack(grown), hashes))

    def forget(self, request: Any, result: Fields) -> Fields:
        """The result of the call by which a request leaves: its id may come again with another one."""
        self.told.pop(request.request_id, None)
        self._numbers.pop(request.request_id, None)
        return result

    # ---- blocks ----

    def describe_hit(self, blocks: Any, no_blocks: Any) -> Any:
        """``AllocateSlots.new_computed_blocks``."""
        if blocks is None:
            return None
        if blocks is no_blocks:
            return NO_HIT
        if blocks is self._last_hit:
            return LAST_HIT
        return [ids_of(group) for group in blocks.blocks]

    def keep_hit(self, blocks: Any) -> list[bytes]:
        """The ids of what a lookup has found, which is used next."""
        self._last_hit = blocks
        return [ids_of(group) for group in blocks.blocks]

    # ---- the file ----

    def _beginning(self, reason: str) -> bytes:
        head = Recording(
            format_version=FORMAT_VERSION,
            kvpool=__version__,
            backend=BACKEND,
            python=platform.python_version(),
            recording_id=self._recording_id,
            segment=self._segment,
            setup=self._setup,
        )
        return frame(head) + self._snapshot(reason)

    def _snapshot(self, reason: str) -> bytes:
        """The state; all requests are told anew, and those that have nothing get new numbers."""
        snapshot = take_snapshot(self._manager(), self.number_of, reason, self._num_operations)
        numbers = {table.request for table in snapshot.tables}
        self._numbers = {request_id: number for request_id, number in self._numbers.items() if number in numbers}
        self.told.clear()
        self._last_hit = None
        return b"".join(map(frame, snapshot.messages()))

    def _resume(self) -> None:
        """After a gap."""
        self._num_gaps += 1
        if self._num_gaps > MAX_GAPS:
            raise NotRecordableError(f"more than {MAX_GAPS} calls that can't be recorded")
        self._write_pending()
        if self._file is not None:
            self._file.cut()
            self._write(self._snapshot(GAP))

    def _start_next_file(self) -> None:
        self._write_pending()
        if self._file is None:
            return
        self._segment += 1
        beginning = self._beginning(RING)
        self._file.start_anew(beginning)
        self._num_bytes_before = self._file.num_bytes

    def _write_pending(self) -> None:
        self._end_plain()
        self._has_plain = False
        parts, self._pending = self._pending, []  # before, so that nothing is written twice, whatever interrupts it
        self._write(*parts)

    def _write(self, *parts: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(*parts)
        except Exception as error:
            self.stop(error)

    def stop(self, error: Exception) -> None:
        """Ends the recording with a warning."""
        file = self._let_go()
        if file is None:
            return
        try:
            file.cut()
            file.close()
        except OSError:
            pass  # there is no more to be done about the file
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        logger.warning("%s: the recording ends here: %s", file.path, one_line(reason))

    def close(self) -> None:
        """Writes what is left, and ends the recording."""
        if self._file is None:
            return
        self._write_pending()
        file = self._let_go()
        if file is not None:
            file.close()

    def leave_to_parent(self) -> None:
        """In a child after a fork: the file is left as it is."""
        file = self._let_go()
        if file is not None:
            file.close()

    def _let_go(self) -> RecordingFile | None:
        self.takes_calls = self.is_on = False
        file, self._file = self._file, None
        self._pending = []
        self.told.clear()
        self.plain = PlainCalls(self.told, self.caches)
        self._numbers.clear()
        self._last_hit = None
        return file


def _rest_of(request: Any) -> tuple[Any, ...]:
    rest: tuple[Any, ...]
    try:
        rest = _REST(request)
    except AttributeError:  # of another engine's class, which need not have the boundary
        boundary = getattr(request, "shared_prefix_boundary", 0)
        skips_cache = request.skip_reading_prefix_cache
        rest = request.num_prompt_tokens, request.num_in_flight_tokens, boundary, skips_cache, request.status
    return rest


def _leave_all_to_parent() -> None:
    for recorder in list(_recorders):
        recorder.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
