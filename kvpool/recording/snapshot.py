"""The whole state of a KV cache manager: taken from one, as messages, and put into another that is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvpool.cache.managers import MambaManager
from kvpool.hashing.block_hash import BlockHashWithGroupId
from kvpool.recording.key_order import order_of_insertion
from kvpool.recording.operations import (
    IS_LITTLE_ENDIAN,
    MAX_IDS,
    MAX_KEYS,
    GroupState,
    HashesState,
    Message,
    PoolState,
    SnapshotEnd,
    TableState,
    pack,
    unpack,
)
from kvpool.recording.setup import NotRecordableError

UNKNOWN_TOKENS = -1
START, RING, GAP = "start", "ring", "gap"


@dataclass(frozen=True)
class Snapshot:
    """The messages of a state. Two states are the same if these are equal, but for ``pool.reason``.

    Attributes:
        pool, hashes, groups: of all requests together.
        tables: of each group and request, by group and number of the request.
    """

    pool: PoolState
    hashes: HashesState | None
    groups: list[GroupState]
    tables: list[TableState]

    def messages(self) -> Iterator[Message]:
        """In the order in which they are in a file; of limited size each."""
        yield self.pool
        if self.hashes is not None:
            yield from _pieces(self.hashes)
        yield from self.groups
        yield from self.tables
        yield SnapshotEnd()


def _pieces(hashes: HashesState) -> Iterator[HashesState]:
    num_bytes = len(pack([0]))
    for start in range(0, len(hashes.keys), MAX_KEYS):
        part = slice(start * num_bytes, (start + MAX_KEYS) * num_bytes)
        yield HashesState(hashes.block_ids[part], hashes.num_tokens[part], hashes.keys[start : start + MAX_KEYS])


def take_snapshot(manager: Any, number_of: Callable[[Any], int], reason: str, num_operations: int) -> Snapshot:
    """The state of a manager. O(blocks), in Python: for now and then.

    Args:
        number_of: the number of a request, by its id.
        reason, num_operations: see ``PoolState``.

    Raises:
        NotRecordableError: it is too large, or can't have come about by calls of the pool.
    """
    pool = manager.block_pool
    if pool.num_gpu_blocks > MAX_IDS:
        raise NotRecordableError(f"a pool of {pool.num_gpu_blocks} blocks")
    counts = pool.get_ref_counts().tolist()
    counts[pool.null_block.block_id] = 0
    used = [block_id for block_id, count in enumerate(counts) if count]
    pool_state = PoolState(
        reason=reason,
        num_operations=num_operations,
        free_ids=pack(block.block_id for block in pool.free_block_queue.get_all_free_blocks()),
        used_ids=pack(used),
        ref_cnts=pack(counts[block_id] for block_id in used),
        watched_ids=pack(sorted(pool._reuse_watchers)),
    )
    groups = manager.coordinator.single_type_managers
    tables = [table for group in groups for table in _tables_of(group, number_of)]
    tables.sort(key=lambda table: (table.group_id, table.request))
    return Snapshot(pool_state, _hashes_of(pool), [_group_of(group) for group in groups], tables)


def _hashes_of(pool: Any) -> HashesState | None:
    keys_of_block: dict[int, list[bytes]] = {}
    blocks_of_key: dict[bytes, list[int]] = {}
    for key, found in pool.cached_block_hash_to_block._cache.items():
        if isinstance(found, dict):
            block_ids = [block.block_id for block in found.values()]
            if len(block_ids) > 1:
                blocks_of_key[key] = block_ids
            for block_id in block_ids:
                keys_of_block.setdefault(block_id, []).append(key)
        else:
            keys_of_block.setdefault(found.block_id, []).append(key)
    for block_id, keys in keys_of_block.items():
        if len(keys) > 1 or pool.blocks[block_id].block_hash != keys[0]:
            keys[:] = pool._cached_block_hashes(pool.blocks[block_id])
            if pool.blocks[block_id].block_hash != keys[0]:
                raise NotRecordableError(f"block {block_id} has a hash that no lookup finds")
    try:
        entries = order_of_insertion(keys_of_block, blocks_of_key)
    except ValueError as error:
        raise NotRecordableError(str(error)) from None
    if not entries:
        return None
    num_tokens = {block_id: pool.blocks[block_id].block_hash_num_tokens for block_id in keys_of_block}
    return HashesState(
        pack(block_id for block_id, _ in entries),
        pack(UNKNOWN_TOKENS if (n := num_tokens[block_id]) is None else n for block_id, _ in entries),
        [key for _, key in entries],
    )


def _group_of(group: Any) -> GroupState:
    copies = group.pending_cow_copies
    return GroupState(
        group_id=group.kv_cache_group_id,
        new_block_ids=pack(group.new_block_ids),
        copy_source_ids=pack(source.block_id for source, _ in copies),
        copy_target_ids=pack(target.block_id for _, target in copies),
        keys_of_step=sorted(group.cached_blocks_this_step) if isinstance(group, MambaManager) else [],
    )


def _tables_of(group: Any, number_of: Callable[[Any], int]) -> Iterator[TableState]:
    tables, num_cached, partial_hits = group.req_to_blocks, group.num_cached_block, group._partial_hit_reqs
    request_ids = dict.fromkeys([*tables, *num_cached, *partial_hits])
    retired: dict[Any, int] = {}
    checkpoints: dict[Any, tuple[int, int]] = {}
    allocated: set[Any] = set()
    if isinstance(group, MambaManager):
        retired, checkpoints, allocated = group._num_retired_blocks, group._checkpoints, group._allocated_block_reqs
        request_ids |= dict.fromkeys([*retired, *checkpoints, *allocated])
    for request_id in request_ids:
        hit = partial_hits.get(request_id)
        yield TableState(
            group_id=group.kv_cache_group_id,
            request=number_of(request_id),
            block_ids=ids_of(tables[request_id]) if request_id in tables else None,
            num_cached_blocks=num_cached.get(request_id),
            partial_hit=None if hit is None else (hit[0], hit[1].block_id),
            num_retired_blocks=retired.get(request_id),
            has_allocated=request_id in allocated,
            checkpoint=checkpoints.get(request_id),
        )


def ids_of(blocks: Any) -> bytes:
    """The packed ids of a table or any other row of blocks."""
    id_bytes = getattr(blocks, "id_bytes", None) if IS_LITTLE_ENDIAN else None
    if id_bytes is not None:
        packed: bytes = id_bytes()
        return packed
    return pack(block.block_id for block in blocks)


class InvalidSnapshotError(ValueError):
    """A snapshot that no manager of this setup can have."""


def restore(manager: Any, snapshot: Snapshot, request_id_of: Callable[[int], Any]) -> None:
    """Gives a manager that is new this state. O(blocks).

    Raises:
        InvalidSnapshotError: it is none of this manager's.
    """
    pool = manager.block_pool
    _check_pool(snapshot, pool.num_gpu_blocks)
    _restore_pool(pool, snapshot)
    groups = manager.coordinator.single_type_managers
    if [state.group_id for state in snapshot.groups] != list(range(len(groups))):
        raise InvalidSnapshotError(f"the state of {len(snapshot.groups)} groups in a row, not {len(groups)}")
    blocks = pool.blocks
    for group, state in zip(groups, snapshot.groups):
        group.new_block_ids = unpack(state.new_block_ids)
        sources, targets = unpack(state.copy_source_ids), unpack(state.copy_target_ids)
        if len(sources) != len(targets):
            raise InvalidSnapshotError("copies of blocks without a target")
        group._pending_cow_copies = [(blocks[source], blocks[target]) for source, target in zip(sources, targets)]
        if isinstance(group, MambaManager):
            group.cached_blocks_this_step.update(map(BlockHashWithGroupId, state.keys_of_step))
    for table in snapshot.tables:
        if table.group_id >= len(groups):
            raise InvalidSnapshotError(f"a table of group {table.group_id}")
        _restore_table(pool, groups[table.group_id], table, request_id_of(table.request))


def _check_pool(snapshot: Snapshot, num_blocks: int) -> None:
    """That ids are those of blocks, and counts such that there can be."""
    free, used = unpack(snapshot.pool.free_ids), unpack(snapshot.pool.used_ids)
    ids = free + used
    if len(set(ids)) != len(ids) or not all(0 < block_id < num_blocks for block_id in ids):
        raise InvalidSnapshotError("free and used blocks that are not those of the pool")
    counts = unpack(snapshot.pool.ref_cnts)
    if len(counts) != len(used) or not all(count > 0 for count in counts):
        raise InvalidSnapshotError("counts of references that are not those of the used blocks")
    other = [unpack(snapshot.pool.watched_ids)]
    if snapshot.hashes is not None:
        hashed = unpack(snapshot.hashes.block_ids)
        num_tokens = unpack(snapshot.hashes.num_tokens)
        keys = snapshot.hashes.keys
        if not len(hashed) == len(num_tokens) == len(keys) or 0 in hashed or min(num_tokens) < UNKNOWN_TOKENS:
            raise InvalidSnapshotError("hashes without blocks")
        if len(set(zip(hashed, keys))) != len(keys):
            raise InvalidSnapshotError("the same hash of the same block twice")
        other.append(hashed)
    other += [unpack(ids) for state in snapshot.groups for ids in (state.copy_source_ids, state.copy_target_ids)]
    other += [unpack(state.new_block_ids) for state in snapshot.groups]
    other += [unpack(table.block_ids) for table in snapshot.tables if table.block_ids is not None]
    other += [[table.partial_hit[1]] for table in snapshot.tables if table.partial_hit is not None]
    if not all(0 <= block_id < num_blocks for row in other for block_id in row):
        raise InvalidSnapshotError("a block that the pool does not have")


def _restore_pool(pool: Any, snapshot: Snapshot) -> None:
    blocks, state = pool.blocks, snapshot.pool
    free = unpack(state.free_ids)
    ids = pool.allocate_ids(pool.num_gpu_blocks - 1)
    if snapshot.hashes is not None:
        rows = zip(unpack(snapshot.hashes.block_ids), unpack(snapshot.hashes.num_tokens), snapshot.hashes.keys)
        for block_id, num_tokens, key in rows:
            pool._insert_block_hash(key, blocks[block_id], None if num_tokens == UNKNOWN_TOKENS else num_tokens)
    used = dict(zip(unpack(state.used_ids), unpack(state.ref_cnts)))
    for block_id in set(ids.tolist()).difference(free):
        if used.get(block_id, 0) != 1:
            blocks[block_id].ref_cnt = used.get(block_id, 0)
    for block_id in unpack(state.watched_ids):
        pool._reuse_watchers[block_id] = _do_nothing
    pool.free_blocks([blocks[block_id] for block_id in free], prepend=True)
    pool.take_events()


def _do_nothing(block: Any) -> None:
    pass


def _restore_table(pool: Any, group: Any, state: TableState, request_id: Any) -> None:
    blocks = pool.blocks
    if state.block_ids is not None:
        if request_id in group.req_to_blocks:
            raise InvalidSnapshotError(f"two tables of request {state.request} in group {state.group_id}")
        table = pool.new_block_table()
        table += [blocks[block_id] for block_id in unpack(state.block_ids)]
        group.req_to_blocks[request_id] = table
    if state.num_cached_blocks is not None:
        group.num_cached_block[request_id] = state.num_cached_blocks
    if state.partial_hit is not None:
        index, block_id = state.partial_hit
        group._partial_hit_reqs[request_id] = (index, blocks[block_id])
    if isinstance(group, MambaManager):
        if state.num_retired_blocks is not None:
            group._num_retired_blocks[request_id] = state.num_retired_blocks
        if state.has_allocated:
            group._allocated_block_reqs.add(request_id)
        if state.checkpoint is not None:
            group._checkpoints[request_id] = state.checkpoint
