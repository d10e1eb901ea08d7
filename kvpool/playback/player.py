"""Plays a recording: each call on every implementation, which have to do the same as one another and as was recorded.

What they return is compared at every operation. The invariants of the pools, and the whole states, are compared after
every ``check_every`` operations; where that finds something, the recording is played once more up to there, and looked
at after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvpool import backend, reference
from kvpool.backend import BlockPool
from kvpool.cache.managers import FullAttentionManager
from kvpool.cache.reference_manager import KVCacheManager as ReferenceManager
from kvpool.common.one_line import one_line
from kvpool.errors import InvariantError, KvpoolError
from kvpool.kv_cache_manager import PlainKVCacheManager
from kvpool.playback.calls import Implementation, MalformedCallError, Outcome
from kvpool.playback.limits import DEFAULT_LIMITS, PlaybackLimits, RecordingError
from kvpool.playback.reader import RecordingReader
from kvpool.playback.requests import CostError, Requests, UnknownRequestError
from kvpool.playback.state import SnapshotParts, difference
from kvpool.playback.words import call_in_words, outcome_in_words
from kvpool.recording.files import older
from kvpool.recording.operations import (
    FAILED,
    INTERRUPTED,
    ITEM_BYTES,
    MAX_KEYS,
    AllocateDecode,
    AllocateSlots,
    Failure,
    Free,
    ManagerSetup,
    Message,
    NewHashes,
    NotPackedError,
    Operation,
    PlainAllocations,
    PoolCacheFullBlocks,
    PoolState,
    PopBlocksForFree,
    Recording,
    RequestState,
    Result,
    SnapshotEnd,
    unpack,
)
from kvpool.recording.setup import make_manager
from kvpool.recording.snapshot import RING, InvalidSnapshotError, Snapshot, restore, take_snapshot

CHECKED_BLOCKS = 4_096
"""Pools up to this size are checked after every operation; others less often in proportion."""


@dataclass(frozen=True)
class Finding:
    """What is wrong.

    Attributes:
        operation: number of the first one at which it shows, from 1.
        call: it and its arguments.
        reason: what is wrong there.
    """

    operation: int
    call: str
    reason: str

    def __str__(self) -> str:
        return f"operation {self.operation}, {self.call}: {self.reason}"


@dataclass
class PlaybackReport:
    """What a playback has found.

    Attributes:
        paths: the files, in the order in which they were played.
        recorded_with: version and backend of the kvpool that made them.
        implementations: names of those that the calls were made on.
        first_operation, num_operations: number of the first one, and how many were played.
        num_skipped: operations whose effect isn't known: they were interrupted, or failed by code that is not here.
        finding: None: all did the same, and the invariants hold.
        notes: what else there is to say of the files.
        check_every: operations between looks at the whole state.
    """

    paths: list[str]
    recorded_with: str
    implementations: list[str]
    first_operation: int = 1
    num_operations: int = 0
    num_skipped: int = 0
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    check_every: int = 1


class _DivergenceError(Exception):
    pass


# What making a manager, or giving it a state or requests, raises for values that are those of none.
_MADE_BY_LIES = (ArithmeticError, AssertionError, AttributeError, KvpoolError, LookupError, TypeError, ValueError)


def play_recording(
    path: str | Path,
    limits: PlaybackLimits = DEFAULT_LIMITS,
    *,
    check_every: int | None = None,
    advance: Callable[[int], None] | None = None,
    before_pool: Callable[[ManagerSetup], None] | None = None,
) -> PlaybackReport:
    """Plays a recording: the file, and the older one of it first if that is there.

    Args:
        path: of the newer file, or of the older one alone.
        limits: of what it may cost.
        check_every: operations between looks at the whole state; None for what suits the pool.
        advance: called with the number of operations that are done, now and then.
        before_pool: called with how the manager was made, before one is made; may raise.

    Raises:
        RecordingError: it is none, or damaged, or costs too much.
    """
    paths = [name for name in (older(str(path)), str(path)) if name == str(path) or os.path.lexists(name)]
    report, checked_to = _play_files(paths, limits, check_every, None, advance, before_pool)
    finding = report.finding
    if finding is not None and checked_to is not None and checked_to < finding.operation - 1:
        again, _ = _play_files(paths, limits, report.check_every, checked_to, advance, before_pool)
        again.check_every = report.check_every
        report = again if again.finding is not None else report
    return report


def _play_files(
    paths: list[str],
    limits: PlaybackLimits,
    check_every: int | None,
    checks_all_after: int | None,
    advance: Callable[[int], None] | None,
    before_pool: Callable[[ManagerSetup], None] | None,
) -> tuple[PlaybackReport, int | None]:
    """The report, and the last operation up to which the state was right; None if it needs no second look."""
    player: _Player | None = None
    notes: list[str] = []
    for path in paths:
        with RecordingReader(path, limits) as reader:
            if player is not None and not player.continues_with(reader.head):
                notes.append(f"{paths[0]}: is not of the same recording, or not what was before: left out")
                player = None
            if player is None:
                player = _Player(reader.head, limits, check_every, checks_all_after, advance, before_pool)
            player.play(reader)
        if player.report.finding is not None:
            break
    assert player is not None
    player.report.notes[:0] = notes
    return player.report, player.checked_to if player.found_by_check else None


class _Player:
    def __init__(
        self,
        head: Recording,
        limits: PlaybackLimits,
        check_every: int | None,
        checks_all_after: int | None,
        advance: Callable[[int], None] | None,
        before_pool: Callable[[ManagerSetup], None] | None,
    ) -> None:
        self._head = head
        self._limits = limits
        self._advance = advance
        self._before_pool = before_pool
        self._requests = Requests(limits)
        self._on: list[Implementation] = []
        self._parts: SnapshotParts | None = None
        self._pending: Operation | None = None
        self._last: Operation | None = None
        self._is_lost = True  # until there is a snapshot
        self._number = 0  # of the last operation
        self._num_table_blocks: dict[int, int] = {}
        self._num_table_blocks_of_all = 0
        self._check_every = check_every or max(1, head.setup.num_blocks // CHECKED_BLOCKS)
        self._checks_all_after = checks_all_after
        self.checked_to = 0
        self.found_by_check = False
        names = ["native", "reference"] if backend.BACKEND == "native" else ["reference"]
        self.report = PlaybackReport(
            [],
            one_line(f"kvpool {head.kvpool} ({head.backend}), Python {head.python}"),
            names,
            check_every=self._check_every,
        )

    def continues_with(self, head: Recording) -> bool:
        """Whether a file is the next one of the recording."""
        is_same = (head.recording_id, head.setup) == (self._head.recording_id, self._head.setup)
        return is_same and head.segment == self._head.segment + 1

    # ---- messages ----

    def play(self, reader: RecordingReader) -> None:
        """All of a file, or up to the first finding."""
        self._head = reader.head
        self.report.paths.append(reader.path)
        for placed in reader:
            try:
                self._take(placed.message)
            except _DivergenceError:
                return
            except CostError as error:
                raise reader.error(placed.place, str(error)) from None
            except (UnknownRequestError, MalformedCallError, NotPackedError, InvalidSnapshotError) as error:
                raise reader.error(placed.place, f"not of one piece: {one_line(str(error))}") from None
            except _MADE_BY_LIES as error:
                reason = one_line(f"{type(error).__name__}: {error}")
                raise reader.error(placed.place, f"not of one piece: {reason}") from None
        if reader.torn_at is not None:
            self.report.notes.append(
                f"{reader.path}: ends within a message, at byte {reader.torn_at:,}: that is left out"
            )
        self._finish(reader)

    def _finish(self, reader: RecordingReader) -> None:
        """The last call of a process that ended in it has no result; it is made all the same."""
        operation, self._pending = self._pending, None
        if self._is_lost or self._parts is not None:
            return
        if operation is None:
            self._check_last()
            return
        self.report.notes.append(f"{reader.path}: ends in operation {self._number + 1}, whose result is not in it")
        try:
            self._make_call(operation, None)
            self._check(operation, is_forced=True)
        except _DivergenceError:
            return
        except (UnknownRequestError, MalformedCallError, NotPackedError, CostError) as error:
            raise RecordingError(f"{reader.path}: the last operation: {one_line(str(error))}") from None

    def _check_last(self) -> None:
        if self.checked_to < self._number and self._last is not None:
            with suppress(_DivergenceError):
                self._check(self._last, is_forced=True)

    def _take(self, message: Message) -> None:
        if self._parts is not None:
            self._take_part(message)
        elif isinstance(message, PoolState):
            if self._pending is not None:
                self._skip()
            self._parts = SnapshotParts(message, self._limits)
        elif self._is_lost:
            return
        elif isinstance(message, (Result, Failure)):
            operation, self._pending = self._pending, None
            if operation is None:
                raise MalformedCallError("the result of no call")
            self._make_call(operation, message)
        elif self._pending is not None:
            self._skip()  # nobody knows what became of it; a snapshot will come
        elif isinstance(message, RequestState):
            self._requests.update(message)
        elif isinstance(message, NewHashes):
            self._requests.add_hashes(message)
        elif isinstance(message, PlainAllocations):
            self._make_plain_calls(message)
        elif isinstance(message, Operation):
            self._pending = message
        else:
            raise MalformedCallError(f"a {type(message).__name__} out of its place")

    def _skip(self) -> None:
        self._pending = None
        self._is_lost = True
        self._number += 1
        self.report.num_skipped += 1

    def _take_part(self, message: Message) -> None:
        assert self._parts is not None
        if not isinstance(message, SnapshotEnd):
            self._parts.add(message)
            return
        snapshot, self._parts = self._parts.joined(), None
        is_first = not self._on
        if is_first:
            self.report.first_operation = snapshot.pool.num_operations + 1
            self.checked_to = snapshot.pool.num_operations
        goes_on = snapshot.pool.reason == RING and not self._is_lost
        if goes_on and not is_first:
            self._compare_with(snapshot)
        else:
            self._begin_with(snapshot)
        self._requests.forget_all()
        self._number = snapshot.pool.num_operations
        self._is_lost = False

    # ---- states ----

    def _begin_with(self, snapshot: Snapshot) -> None:
        setup = self._head.setup
        if setup.num_blocks > self._limits.max_blocks:
            raise CostError(
                f"a pool of {setup.num_blocks:,} blocks, more than {self._limits.max_blocks:,} (--max-blocks raises the"
                " limit)"
            )
        if self._before_pool is not None:
            self._before_pool(setup)
        self._on = []  # those of before are gone first
        self._on = [self._make(name, setup) for name in self.report.implementations]
        for one in self._on:
            restore(one.manager, snapshot, Requests.id_of)
        sizes: dict[int, int] = {}
        for table in snapshot.tables:
            sizes[table.request] = sizes.get(table.request, 0) + len(table.block_ids or b"") // 4
        self._num_table_blocks = sizes
        self._num_table_blocks_of_all = sum(sizes.values())
        self._check_pools(None)

    @staticmethod
    def _make(name: str, setup: ManagerSetup) -> Implementation:
        is_native = name == "native"
        manager_class: Any = PlainKVCacheManager if is_native else ReferenceManager
        pool_class: Any = BlockPool if is_native else reference.BlockPool
        return Implementation(name, make_manager(setup, manager_class, pool_class))

    def _snapshots(self) -> list[Snapshot]:
        return [take_snapshot(one.manager, _number_of, "", self._number) for one in self._on]

    def _compare_with(self, recorded: Snapshot) -> None:
        """A file that goes on from the one before: its state has to be what the calls have led to."""
        self._check_pools(None)
        for one, state in zip(self._on, self._snapshots()):
            found = difference(state, recorded)
            if found is not None:
                self._found("the state behind it", f"{one.name} and the recording differ in {found}", self._number)

    # ---- calls ----

    def _make_call(self, operation: Operation, recorded: Result | Failure | None) -> None:
        self._number += 1
        if isinstance(recorded, Failure) and recorded.how == INTERRUPTED:
            self.report.num_skipped += 1
            self._is_lost = True
            return
        self.report.num_operations += 1
        if self._advance is not None:
            self._advance(self.report.num_operations)
        if isinstance(operation, AllocateDecode):
            self._update_batch(operation)
        elif isinstance(operation, AllocateSlots):
            self._require_room(
                self._requests.get(operation.request).num_computed_tokens,
                operation.num_new_tokens,
                operation.num_new_computed_tokens,
                operation.num_lookahead_tokens,
                operation.num_external_computed_tokens,
            )
        elif isinstance(operation, PoolCacheFullBlocks):
            self._require_range(operation)
        outcomes = [_try_call(one, operation, self._requests) for one in self._on]
        self._compare(operation, outcomes, recorded)
        if isinstance(recorded, Failure) and recorded.how == FAILED:
            self.report.num_skipped += 1
            self._is_lost = True
            return
        if isinstance(operation, (Free, PopBlocksForFree)) and isinstance(recorded, Result):
            self._requests.forget(operation.request)
        self._count_table_blocks(operation)
        self._last = operation
        for one in self._on:
            one.pool.take_events()
        self._check(operation)

    def _make_plain_calls(self, calls: PlainAllocations) -> None:
        """Each as an operation."""
        rows = [unpack(row) for row in (calls.requests, calls.num_tokens, calls.num_computed_tokens)]
        num_new_tokens = unpack(calls.num_new_tokens)
        if len({*map(len, rows), len(num_new_tokens)}) > 1:
            raise MalformedCallError("calls in rows of unequal length")
        num_groups = len(self._head.setup.groups)
        blocks = iter(calls.block_ids)
        given = dict.fromkeys(calls.numbers)
        for place, (number, num_tokens, num_computed) in enumerate(zip(*rows)):
            self._requests.set_tokens(number, num_tokens)
            self._requests.get(number).num_computed_tokens = num_computed
            operation = AllocateSlots(number, num_new_tokens[place], 0, None, 0, 0, False, 0, False, 0, True, [])
            result = Result([b""] * num_groups, [])
            if place in given:
                result = Result(list(islice(blocks, num_groups)), [])
            elif -1 - place in given:
                result = Result(None, [])
            self._make_call(operation, result)

    def _require_room(self, *numbers: int) -> None:
        """Tables of groups that skip blocks get as long as a call says, whatever the pool has."""
        manager = self._on[0].manager
        num_tokens = min(sum(max(number, 0) for number in numbers), manager.max_model_len)
        skips = any(not isinstance(one, FullAttentionManager) for one in manager.coordinator.single_type_managers)
        if skips and num_tokens > self._limits.max_tokens:
            raise CostError(
                f"a table for {num_tokens:,} tokens, more than {self._limits.max_tokens:,} (--max-tokens raises the"
                " limit)"
            )

    @staticmethod
    def _require_range(operation: PoolCacheFullBlocks) -> None:
        num_blocks = len(operation.block_ids) // ITEM_BYTES
        if operation.num_full_blocks > 2 * num_blocks + MAX_KEYS:
            raise CostError(f"{operation.num_full_blocks:,} blocks are to be full, of {num_blocks:,}")

    def _update_batch(self, operation: AllocateDecode) -> None:
        numbers, tokens = unpack(operation.requests), unpack(operation.num_tokens)
        computed = unpack(operation.num_computed_tokens)
        if not len(numbers) == len(tokens) == len(computed):
            raise MalformedCallError("a batch of rows of unequal length")
        for number, num_tokens, num_computed in zip(numbers, tokens, computed):
            self._requests.set_tokens(number, num_tokens)
            self._requests.get(number).num_computed_tokens = num_computed
            self._require_room(num_computed, 1)

    def _compare(self, operation: Operation, outcomes: list[Any], recorded: Result | Failure | None) -> None:
        told = {one.name: _in_words(outcome) for one, outcome in zip(self._on, outcomes)}
        wanted: Any = None
        if isinstance(recorded, Result):
            wanted = (recorded.block_ids, recorded.numbers)
        elif isinstance(recorded, Failure):
            wanted = _Raised(one_line(recorded.error, 80), "")
        if isinstance(recorded, Failure) and recorded.how == FAILED:
            raised = [outcome for outcome in outcomes if outcome == wanted]
            if len(raised) == len(outcomes):
                self._found(call_in_words(operation), f"it fails as recorded, with {raised[0].words()}")
            if raised:
                told["recorded"] = wanted.words()
            else:
                return  # it was code of the caller that failed, which is not here
        elif recorded is not None:
            told["recorded"] = _in_words(wanted)
            outcomes = [*outcomes, wanted]
        is_other = "recorded" in told and wanted not in outcomes
        if is_other or any(outcome != outcomes[0] for outcome in outcomes[1:]):
            self._found(call_in_words(operation), "; ".join(f"{name}: {words}" for name, words in told.items()))
        for one, outcome in zip(self._on, outcomes):
            if isinstance(outcome, _Raised) and not outcome.is_refusal and recorded is None:
                self._found(call_in_words(operation), f"{one.name} fails with {outcome.words()}")

    def _count_table_blocks(self, operation: Operation) -> None:
        """Keeps what the tables take within the limits: those of the requests which the operation is about."""
        numbers = unpack(operation.requests) if isinstance(operation, AllocateDecode) else [_request_of(operation)]
        groups = self._on[0].manager.coordinator.single_type_managers
        for number in numbers:
            if number is None:
                continue
            request_id = Requests.id_of(number)
            num_blocks = sum(len(group.req_to_blocks.get(request_id, ())) for group in groups)
            self._num_table_blocks_of_all += num_blocks - self._num_table_blocks.pop(number, 0)
            if num_blocks:
                self._num_table_blocks[number] = num_blocks
        if self._num_table_blocks_of_all > self._limits.max_table_blocks:
            raise CostError(f"tables of more than {self._limits.max_table_blocks:,} blocks")

    # ---- checks ----

    def _check(self, operation: Operation, *, is_forced: bool = False) -> None:
        is_due = is_forced or self._number % self._check_every == 0
        if not is_due and (self._checks_all_after is None or self._number <= self._checks_all_after):
            return
        self._check_pools(operation)
        self.checked_to = self._number

    def _check_pools(self, operation: Operation | None) -> None:
        call = "the state that it begins with" if operation is None else call_in_words(operation)
        for one in self._on:
            try:
                one.pool.check()
            except InvariantError as error:
                self._found(call, f"{one.name} is broken: {one_line(str(error))}", by_check=True)
        first, *others = self._snapshots()
        for one, state in zip(self._on[1:], others):
            found = difference(first, state)
            if found is not None:
                reason = f"{self._on[0].name} and {one.name} differ in {found}"
                self._found(call, reason, by_check=True)

    def _found(self, call: str, reason: str, number: int | None = None, *, by_check: bool = False) -> None:
        self.report.finding = Finding(self._number if number is None else number, call, reason)
        self.found_by_check = by_check
        raise _DivergenceError


@dataclass(frozen=True)
class _Raised:
    """An exception of a call; two are the same if their classes have the same name."""

    name: str
    message: str = field(compare=False)
    is_refusal: bool = field(compare=False, default=True)

    def words(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


def _try_call(one: Implementation, operation: Operation, requests: Requests) -> Outcome | _Raised:
    try:
        return one.call(operation, requests)
    except (UnknownRequestError, MalformedCallError, NotPackedError, MemoryError, RecursionError):
        raise
    except Exception as error:
        return _Raised(one_line(type(error).__name__, 80), one_line(str(error), 200), isinstance(error, KvpoolError))


def _in_words(outcome: Any) -> str:
    return outcome.words() if isinstance(outcome, _Raised) else outcome_in_words(outcome)


def _request_of(operation: Operation) -> int | None:
    number: int | None = getattr(operation, "request", None)
    return number


def _number_of(request_id: Any) -> int:
    return int(str(request_id).rpartition(" ")[2])
