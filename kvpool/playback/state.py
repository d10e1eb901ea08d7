"""The state of the implementations, read from a recording and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.playback.limits import PlaybackLimits
from kvpool.playback.requests import CostError
from kvpool.playback.words import row_in_words
from kvpool.recording.operations import GroupState, HashesState, Message, PoolState, TableState
from kvpool.recording.snapshot import InvalidSnapshotError, Snapshot


class SnapshotParts:
    """The messages of a snapshot, while they come."""

    def __init__(self, pool: PoolState, limits: PlaybackLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._hashes: list[HashesState] = []
        self._groups: list[GroupState] = []
        self._tables: list[TableState] = []
        self._num_keys = self._num_table_bytes = 0

    def add(self, message: Message) -> None:
        """The next one.

        Raises:
            CostError: more than the limits allow.
            InvalidSnapshotError: none that belongs to a snapshot.
        """
        if isinstance(message, HashesState):
            self._hashes.append(message)
            self._num_keys += len(message.keys)
        elif isinstance(message, GroupState):
            self._groups.append(message)
        elif isinstance(message, TableState):
            self._tables.append(message)
            self._num_table_bytes += len(message.block_ids or b"")
        else:
            raise InvalidSnapshotError(f"a {type(message).__name__} in the middle of a snapshot")
        too_many_keys = self._num_keys > 2 * self._limits.max_blocks
        too_many_tables = len(self._tables) > 4 * self._limits.max_requests
        if too_many_keys or too_many_tables or self._num_table_bytes > 4 * self._limits.max_table_blocks:
            raise CostError("a snapshot of more hashes or tables than the limits allow")

    def joined(self) -> Snapshot:
        """All of them."""
        hashes = None
        if self._hashes:
            hashes = HashesState(
                b"".join(part.block_ids for part in self._hashes),
                b"".join(part.num_tokens for part in self._hashes),
                [key for part in self._hashes for key in part.keys],
            )
        return Snapshot(self._pool, hashes, self._groups, self._tables)


def difference(one: Snapshot, other: Snapshot) -> str | None:
    """Where two states part, in words; None if they are the same."""
    for name, words in (
        ("free_ids", "the free list"),
        ("used_ids", "the blocks in use"),
        ("ref_cnts", "the counts of references"),
        ("watched_ids", "the blocks whose reuse is waited for"),
    ):
        mine, theirs = getattr(one.pool, name), getattr(other.pool, name)
        if mine != theirs:
            return f"{words}: {_first_difference(mine, theirs)}"
    if one.hashes != other.hashes:
        return f"the hashes of blocks{_different_hash(one.hashes, other.hashes)}"
    for mine, theirs in zip(one.groups, other.groups):
        if mine != theirs:
            return f"what group {mine.group_id} will tell workers of blocks to zero and to copy"
    if len(one.groups) != len(other.groups):
        return f"{len(one.groups)} and {len(other.groups)} groups"
    for table, other_table in zip(one.tables, other.tables):
        if table != other_table:
            return _different_table(table, other_table)
    if len(one.tables) != len(other.tables):
        return f"{len(one.tables)} and {len(other.tables)} block tables"
    return None


def _first_difference(mine: bytes, theirs: bytes) -> str:
    width = 4
    place = next((i for i in range(0, len(mine), width) if mine[i : i + width] != theirs[i : i + width]), len(mine))
    here, there = (row_in_words(row[place : place + width]) for row in (mine, theirs))
    return f"{here} and {there} at place {place // width}, of {len(mine) // width:,} and {len(theirs) // width:,}"


def _different_hash(mine: HashesState | None, theirs: HashesState | None) -> str:
    if mine is None or theirs is None:
        return ": one has none"
    return f": {_first_difference(mine.block_ids, theirs.block_ids)}" if mine.block_ids != theirs.block_ids else ""


def _different_table(mine: TableState, theirs: TableState) -> str:
    if (mine.group_id, mine.request) != (theirs.group_id, theirs.request):
        return f"requests {mine.request} and {theirs.request} have block tables"
    names: Sequence[str] = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(theirs, name)]
    where = f"request {mine.request} in group {mine.group_id}"
    if names[0] == "block_ids":
        return f"the block table of {where}: {_table(mine.block_ids)} and {_table(theirs.block_ids)}"
    return f"{names[0]} of {where}: {getattr(mine, names[0])} and {getattr(theirs, names[0])}"


def _table(packed: bytes | None) -> Any:
    return None if packed is None else row_in_words(packed)
