"""Every allocation of the native code fails once, in each call that makes one: MemoryError, nothing has
changed, nothing is lost. Needs a debug build (make test-debug); that a pool which can't be had says so holds in all."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from conftest import IS_PURE_PYTHON
from manager_layouts import Layout, OwnManagerRequest, make_config
from pool_state import state_of
from token_requests import TokenRequest, lookup_key

import kvpool
from kvpool import backend
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.requests.status import RequestStatus

pytestmark = pytest.mark.skipif(IS_PURE_PYTHON, reason="needs the extension modules")
memory = pytest.importorskip("kvpool.native.memory")
can_fail = pytest.mark.skipif(not memory.CAN_FAIL, reason="needs a build with KVPOOL_DEBUG=1")

N = 700  # more than what a batch keeps on the stack
REQUEST = TokenRequest(range(4 * N))
OTHER = TokenRequest(range(9000, 9000 + 4 * N))


def make_pool(**options: Any) -> Any:
    return kvpool.BlockPool(2 * N, True, 4, **options)


class Deaf:
    """A metrics collector."""

    def on_block_allocated(self, block: Any) -> None:
        pass

    on_block_accessed = on_block_evicted = on_block_allocated


class PoolStage:
    """A pool in use, and what of it a call that fails must leave alone."""

    def __init__(self, num_used: int = N, num_cached: int = 0, **options: Any) -> None:
        self.pool = make_pool(**options)
        self.blocks = self.pool.get_new_blocks(num_used)
        self.ids = numpy.array([block.block_id for block in self.blocks], numpy.int32)
        if num_cached:
            self.pool.cache_full_blocks(REQUEST, self.blocks, 0, num_cached, 4, 0)
        self.table = self.pool.new_block_table()
        self.table.extend(self.blocks[:2])

    def seen(self) -> Any:
        self.pool.check()
        return state_of(self.pool), list(self.table), len(self.pool.cached_block_hash_to_block)


POOL_CALLS: dict[str, tuple[dict[str, Any], Callable[[PoolStage], Any]]] = {
    "get_new_blocks": ({"num_used": 1}, lambda s: s.pool.get_new_blocks(N)),
    "get_new_blocks, watched": ({"num_used": 1, "enable_kv_cache_events": True}, lambda s: s.pool.get_new_blocks(N)),
    "free_blocks": ({}, lambda s: s.pool.free_blocks(s.blocks)),
    "free_blocks, warn": ({"on_invalid_free": "warn"}, lambda s: s.pool.free_blocks(s.blocks + s.blocks)),
    "touch": ({}, lambda s: s.pool.touch(s.blocks)),
    "unpin_blocks": ({}, lambda s: s.pool._free_blocks_to_tail(s.blocks)),
    "cache_full_blocks": ({}, lambda s: s.pool.cache_full_blocks(REQUEST, s.blocks, 0, N, 4, 0)),
    "cache_full_blocks, table": ({}, lambda s: s.pool.cache_full_blocks(REQUEST, s.table, 0, 2, 4, 0)),
    "cache_partial_block": ({"num_cached": 1}, lambda s: s.pool.cache_partial_block(OTHER, s.blocks[0], 4, 1, 4)),
    "insert": (
        {"num_cached": 1},
        lambda s: s.pool.cached_block_hash_to_block.insert(lookup_key(b"another", 3), s.blocks[0]),
    ),
    "allocate_ids": ({"num_used": 1}, lambda s: s.pool.allocate_ids(N)),
    "free_ids": ({}, lambda s: s.pool.free_ids(s.ids)),
    "touch_ids": ({}, lambda s: s.pool.touch_ids(s.ids)),
    "touch_ids, watched": (
        {"metrics_collector": Deaf()},
        lambda s: s.pool.touch_ids(s.ids),
    ),
    "find_prefix_ids": ({"num_cached": N}, lambda s: s.pool.find_prefix_ids(REQUEST.block_hashes)),
    "cache_ids": ({}, lambda s: s.pool.cache_ids(REQUEST.block_hashes, s.ids)),
    "popleft_n": ({}, lambda s: s.pool.free_block_queue.popleft_n(N - 1)),
    "append_n": ({"num_used": 1}, lambda s: s.pool.free_block_queue.append_n([])),
    "table.append": ({}, lambda s: s.table.append(s.blocks[3])),
    "table.extend": ({}, lambda s: s.table.extend(s.blocks)),
    "allocate_table": ({"num_used": 1}, lambda s: backend.allocate_table(s.pool, N)),
    "touch_table": ({}, lambda s: backend.touch_table(s.pool, s.ids.tolist())),
    "free_table": ({}, lambda s: backend.free_table(s.pool, s.ids.tolist())),
}


@pytest.fixture(autouse=True)
def no_records() -> Any:
    """Log records that are kept keep the blocks that they name."""
    logger = logging.getLogger("kvpool")
    logger.disabled = True
    yield
    logger.disabled = False


def walk(make_stage: Callable[[], Any], call: Callable[[Any], Any]) -> int:
    """Has the 1st, 2nd ... allocation of the call fail until none is left; returns how many there were."""
    for n in itertools.count(1):
        gc.collect()
        before_all = memory.num_live_allocations()
        stage = make_stage()
        before = stage.seen()
        error: BaseException | None = None
        memory.fail_allocation(n)
        try:
            call(stage)
        except MemoryError as raised:
            error = raised.with_traceback(None)
        finally:
            num_failed = memory.fail_allocation(0)
        if num_failed:
            assert error is not None, f"allocation {n} failed, and the call says nothing"
            assert stage.seen() == before
        else:
            assert error is None
        stage = before = None
        gc.collect()
        assert memory.num_live_allocations() == before_all, f"allocation {n} failed: memory is lost"
        if not num_failed:
            return n - 1
    raise RuntimeError("unreachable")


@can_fail
@pytest.mark.parametrize("name", POOL_CALLS)
def test_calls_of_a_pool(name: str) -> None:
    options, call = POOL_CALLS[name]
    walk(lambda: PoolStage(**options), call)


@can_fail
def test_the_calls_of_a_pool_do_allocate() -> None:
    counts = {name: walk(lambda: PoolStage(**options), call) for name, (options, call) in POOL_CALLS.items()}  # noqa: B023
    assert sum(count > 0 for count in counts.values()) >= 15, counts


class Nothing:
    """For calls that make something new."""

    def seen(self) -> None:
        return None


def make_tables() -> Any:
    from kvpool.native.block_rows import BlockRowGroups, BlockRows

    rows = [BlockRows(40, 2 * N, 4) for _ in range(2)]
    return BlockRowGroups(rows), rows


def make_outputs() -> Any:
    from kvpool.native.step_outputs import StepOutputs

    return StepOutputs(make_tables()[0], 16, with_kv_rows=True, with_compressed=True)


@can_fail
@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda: kvpool.BlockPool(50, True, 4), 2),
        (kvpool.BlockHashToBlockMap, 2),
        (lambda: kvpool.FreeKVCacheBlockQueue([kvpool.KVCacheBlock(i) for i in range(100)]), 5),
        (lambda: make_tables()[0], 4),
        (make_outputs, 8),
        (lambda: kvpool.BlockHasher("sha256", 512)._hash_plain_block(b"p", list(range(512))), 2),
    ],
    ids=["pool", "map", "queue", "tables", "outputs", "hasher"],
)
def test_what_is_made(make: Callable[[], Any], least: int) -> None:
    assert walk(Nothing, lambda _: make()) >= least


class MapStage:
    def __init__(self) -> None:
        self.map = kvpool.BlockHashToBlockMap()
        self.blocks = [kvpool.KVCacheBlock(i) for i in range(200)]

    def seen(self) -> Any:
        return len(self.map), self.map._keys()


class QueueStage:
    def __init__(self) -> None:
        self.blocks = [kvpool.KVCacheBlock(i) for i in range(60)]
        self.queue = kvpool.FreeKVCacheBlockQueue(self.blocks[:8])

    def seen(self) -> Any:
        return [block.block_id for block in self.queue.get_all_free_blocks()]


class TableStage:
    def __init__(self) -> None:
        self.groups, self.rows = make_tables()
        self.groups.append_row(([1, 2, 3], [4]), 2)

    def seen(self) -> Any:
        for rows in self.rows:
            rows.check()
        return [(rows.block_ids.tolist(), rows.num_blocks_per_row.tolist()) for rows in self.rows]


@can_fail
def test_maps_queues_and_tables() -> None:
    def fill(stage: MapStage) -> None:
        for block in stage.blocks:
            stage.map.insert(lookup_key(b"%d" % block.block_id), block)

    for n in itertools.count(1):  # some insertions may be done when one fails: the map is sound
        stage = MapStage()
        memory.fail_allocation(n)
        with contextlib.suppress(MemoryError):
            fill(stage)
        if memory.fail_allocation(0) == 0:
            break
        assert len(stage.map) == len(stage.map._keys()) < 200
        fill(stage)
        assert len(stage.map) == 200
    assert n > 2
    assert walk(QueueStage, lambda s: s.queue.append_n(s.blocks[8:])) > 2
    assert walk(QueueStage, lambda s: s.queue.popleft_n(5)) > 0
    assert walk(TableStage, lambda s: s.groups.append_row((list(range(N)), array("i", range(N))), 2)) > 1
    assert walk(TableStage, lambda s: s.rows[0].append_row([1, 2] * N, 3)) > 0


class ManagerStage:
    """A manager with a request that runs, and the blocks of one that is gone. Of several groups, some have their blocks
    when one finds no memory: they are given back, but to the head of the free list, and what they evicted is gone."""

    def __init__(self, num_before: int = 4, groups: Any = (("full", 4, 0, False),)) -> None:
        self.is_exact = len(groups) == 1
        self.manager = KVCacheManager(make_config(Layout(list(groups), 2 * N)), 10**6)
        self.running = OwnManagerRequest("r", range(4 * N), 4, RequestStatus.RUNNING)
        self.manager.allocate_slots(self.running, num_before)
        self.running.num_computed_tokens = num_before
        gone = OwnManagerRequest("gone", range(7000, 7000 + 2 * N), 4, RequestStatus.RUNNING)
        self.manager.allocate_slots(gone, 2 * N)
        self.manager.free(gone)
        self.new = OwnManagerRequest("new", range(7000, 7000 + 2 * N), 4, RequestStatus.RUNNING)

    def seen(self) -> Any:
        self.manager.block_pool.check()
        managers = self.manager.coordinator.single_type_managers
        tables = [
            {name: [block.block_id for block in table] for name, table in one.req_to_blocks.items()} for one in managers
        ]
        pool = self.manager.block_pool
        used = state_of(pool) if self.is_exact else [(b.ref_cnt, b.ref_cnt and b.block_hash) for b in pool.blocks]
        return used, tables, [dict(one.num_cached_block) for one in managers]

    def adopt(self) -> Any:
        blocks, num_hit = self.manager.get_computed_blocks(self.new)
        return self.manager.allocate_slots(self.new, 2 * N - num_hit, num_hit, blocks)


@can_fail
@pytest.mark.parametrize("groups", [[("full", 4, 0, False)], [("full", 4, 0, False), ("window", 4, 20, False)]])
def test_calls_of_a_manager(groups: Any) -> None:
    def stage() -> ManagerStage:
        return ManagerStage(groups=groups)

    walk(stage, lambda s: s.manager.allocate_slots(s.running, 4))
    walk(stage, lambda s: s.manager.allocate_slots(s.running, 4 * N - 4))
    walk(stage, lambda s: s.manager.allocate_decode([s.running]))
    walk(stage, lambda s: s.manager.get_computed_blocks(s.new))
    walk(stage, lambda s: s.adopt())


def test_a_pool_that_cannot_be_had_says_so() -> None:
    if memory.CAN_FAIL:
        memory.fail_allocation(1)
        with pytest.raises(MemoryError, match=r"^no memory for a pool of 5 blocks$"):
            kvpool.BlockPool(5, True, 4)
        return
    resource = pytest.importorskip("resource")
    size, (soft, hard) = 2**31 - 2, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**35, hard))
    try:
        with pytest.raises(MemoryError, match=f"^no memory for a pool of {size} blocks$"):
            kvpool.BlockPool(size, True, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
