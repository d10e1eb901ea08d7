"""Arguments whose own code runs in the middle of a call: it changes what is being read, resizes arrays, calls back into
the same object, lies about its value, raises. A call gives a right result or an exception; the process goes on, and the
pool stays sound. The twin is asked the same."""

from __future__ import annotations

import logging
import subprocess
import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from conftest import IS_PURE_PYTHON
from manager_layouts import Layout, OwnManagerRequest, make_config
from token_requests import TokenRequest, lookup_key

import kvpool
from kvpool.backend import Request
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.requests.status import RequestStatus

native_only = pytest.mark.skipif(IS_PURE_PYTHON, reason="needs the extension modules")
REQUEST = TokenRequest(range(4000))
MANY = 600  # more than what a batch keeps on the stack


class Index:
    """An integer that does something when it is asked for its value."""

    def __init__(self, value: int, action: Callable[[], Any]) -> None:
        self.value, self.action = value, action

    def __index__(self) -> int:
        self.action()
        return self.value


class Liar(int):
    """An int that is in every range, whatever its value."""

    def _yes(self, other: object) -> bool:
        return True

    __lt__ = __le__ = __gt__ = __ge__ = _yes

    def __index__(self) -> int:
        return 1


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or the exception: both are right."""
    try:
        return call()
    except Exception as error:
        return error


class Collector:
    """A metrics collector that does something whenever it is told of a block."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def on_block_allocated(self, block: Any) -> None:
        self.action()

    on_block_accessed = on_block_evicted = on_block_allocated

    def reset(self) -> None:
        self.action()


# Pool


@pytest.mark.parametrize("num_groups", [1, 2, 3, MANY])
def test_groups_that_empty_their_list(make_pool: Any, num_groups: int) -> None:
    pool = make_pool(5)
    pool.cache_full_blocks(REQUEST, pool.get_new_blocks(1), 0, 1, 4, 0)
    groups: list[Any] = [0] * num_groups
    groups[0] = Index(0, groups.clear)
    attempt(lambda: pool.get_cached_block(REQUEST.block_hashes[0], groups))
    again: list[Any] = [0] * num_groups
    again.insert(0, Index(0, lambda: pool.evict_blocks([1])))
    attempt(lambda: pool.get_cached_block(REQUEST.block_hashes[0], again))


@pytest.mark.parametrize("num_hashes", [4, MANY])
def test_a_limit_that_empties_the_hashes(make_pool: Any, num_hashes: int) -> None:
    pool = make_pool(num_hashes + 1)
    pool.cache_full_blocks(REQUEST, pool.get_new_blocks(num_hashes), 0, num_hashes, 4, 0)
    hashes = list(REQUEST.block_hashes[:num_hashes])
    found = attempt(lambda: pool.find_prefix_ids(hashes, 0, Index(num_hashes, hashes.clear)))
    assert isinstance(found, Exception) or len(found) == 0
    hashes = list(REQUEST.block_hashes[:num_hashes])
    attempt(lambda: pool.find_prefix_ids(hashes, Index(0, hashes.clear)))


@pytest.mark.parametrize("n", [4, MANY])
def test_a_collector_that_changes_the_ids_it_is_told_of(make_pool: Any, n: int) -> None:
    pool = make_pool(n + 1)
    ids = numpy.arange(1, n + 1, dtype=numpy.int32)
    seen = []

    def change() -> None:
        seen.append(ids.size)
        if ids.size:
            ids[:] = 2**30
            attempt(lambda: ids.resize(0, refcheck=False))

    pool.touch_ids(ids)
    ids = numpy.arange(1, n + 1, dtype=numpy.int32)
    pool.metrics_collector = Collector(change)
    pool.touch_ids(ids)
    assert len(seen) == n
    assert [block.ref_cnt for block in pool.blocks] == [0] + [2] * n


@pytest.mark.parametrize("n", [4, MANY])
@pytest.mark.parametrize("kind", ["numpy", "array"])
def test_a_collector_that_takes_the_output_away(make_pool: Any, n: int, kind: str) -> None:
    pool = make_pool(n + 1)
    out: Any = numpy.zeros(n, numpy.int32) if kind == "numpy" else array("i", [0] * n)

    def shrink() -> None:
        if kind == "numpy":
            attempt(lambda: out.resize(0, refcheck=False))
        else:
            attempt(lambda: out.__delitem__(slice(0, n)))

    pool.metrics_collector = Collector(shrink)
    result = attempt(lambda: pool.allocate_ids(n, out))
    assert pool.get_num_free_blocks() == (n if isinstance(result, Exception) else 0)


def test_more_blocks_than_the_output_holds(make_pool: Any, backend: Any) -> None:
    class Generous(backend.BlockPool):  # type: ignore[misc,name-defined]
        def _get_new_blocks_observed(self, num_blocks: int) -> Any:
            return super()._get_new_blocks_observed(min(num_blocks + 300, self.get_num_free_blocks()))

        def get_new_blocks(self, num_blocks: int) -> Any:
            return super().get_new_blocks(min(num_blocks + 300, self.get_num_free_blocks()))

    pool = Generous(500, True, 4, False, Collector(lambda: None))
    attempt(lambda: pool.allocate_ids(2, numpy.zeros(2, numpy.int32)))
    attempt(lambda: pool.allocate_ids(2))
    pool.check()


@pytest.mark.parametrize("n", [4, MANY])
def test_a_request_that_changes_the_blocks_it_is_cached_for(make_pool: Any, n: int) -> None:
    pool = make_pool(n + 1)
    blocks = pool.get_new_blocks(n)
    kept = list(blocks)

    class Changing(TokenRequest):
        @property
        def block_hashes(self) -> Any:
            blocks.clear()
            return list(REQUEST.block_hashes)

        @block_hashes.setter
        def block_hashes(self, value: Any) -> None:
            pass

    attempt(lambda: pool.cache_full_blocks(Changing(range(16)), blocks, 0, n, 4, 0))
    blocks[:] = kept
    mask: list[Any] = [True] * n

    class Truth:
        def __bool__(self) -> bool:
            mask.clear()
            blocks.clear()
            return True

    mask[0] = Truth()
    attempt(lambda: pool.cache_full_blocks(REQUEST, blocks, 0, n, 4, 0, mask))
    blocks[:] = kept

    class ShortMask(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return n

    attempt(lambda: pool.cache_full_blocks(REQUEST, blocks, 0, n, 4, 0, ShortMask([True])))
    pool.free_blocks([block for block in kept if block.ref_cnt])


@pytest.mark.parametrize(
    "numbers", [(0, 2**62, 4), (2**62, 2**62 + 1, 4), (0, 1, 2**62), (-1, 1, 4), (0, 2**61, 8), (5, 9, 4)]
)
def test_ranges_far_out(make_pool: Any, numbers: tuple[int, int, int]) -> None:
    pool = make_pool(5)
    first, past, size = numbers
    error = attempt(lambda: pool.cache_full_blocks(REQUEST, pool.get_new_blocks(4), first, past, size, 0))
    assert isinstance(error, Exception)
    assert pool.find_prefix_ids(REQUEST.block_hashes).tolist() == []


def test_a_hash_block_size_that_somebody_wrote(make_pool: Any) -> None:
    for size in (0, -4, 2**70):
        pool = make_pool(5)
        pool.hash_block_size = size
        attempt(lambda: pool.cache_full_blocks(REQUEST, pool.get_new_blocks(2), 0, 2, 4, 0))  # noqa: B023


@pytest.mark.parametrize("value", [-(2**40), -1, 7, 2**31, 2**40, 2**70])
def test_integers_that_lie(make_pool: Any, value: int) -> None:
    pool = make_pool(5)
    pool.get_new_blocks(1)
    liar = Liar(value)
    for call in (
        lambda: pool.get_new_blocks(liar),
        lambda: pool.allocate_ids(liar),
        lambda: pool.cached_block_hashes_by_block[liar],
        lambda: pool.blocks[liar],
        lambda: pool.find_prefix_ids(REQUEST.block_hashes, 0, liar),
        lambda: pool.cached_block_hash_to_block.contain(lookup_key(b"x"), liar),
        lambda: pool.cached_block_hash_to_block.pop(lookup_key(b"x"), liar),
        lambda: pool.get_cached_block(b"x", [liar]),
        lambda: pool.evict_blocks([liar]),
        lambda: pool.free_block_queue.popleft_n(liar),
        lambda: setattr(pool.blocks[1], "ref_cnt", liar),
        lambda: setattr(pool.free_block_queue, "num_free_blocks", liar),
    ):
        attempt(call)


def test_a_pool_of_a_size_that_lies(backend: Any) -> None:
    for value in (-5, 0, 2**31, 2**70):
        assert isinstance(attempt(lambda: backend.BlockPool(Liar(value), True, 4)), Exception)  # noqa: B023


def test_a_log_handler_that_changes_what_is_freed(make_pool: Any, backend: Any) -> None:
    pool, other = make_pool(9, on_invalid_free="warn"), make_pool(9)
    batch = pool.get_new_blocks(4)
    batch += [*batch, backend.KVCacheBlock(3), *other.get_new_blocks(3), *batch]

    class Clearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            batch.clear()
            if len(records) < 10:
                records.append(record)
                attempt(lambda: pool.free_blocks(pool.blocks[1:3]))

    records: list[logging.LogRecord] = []
    handler, logger = Clearing(), logging.getLogger("kvpool")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        attempt(lambda: pool.free_blocks(batch))
        attempt(lambda: pool.free_ids(numpy.array([1, 1, 2, 2, 77], numpy.int32)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert pool.get_num_free_blocks() == other.get_num_free_blocks() == 8


def test_a_pool_of_another_class_that_changes_what_is_freed(make_pool: Any, backend: Any) -> None:
    batch: list[Any] = []

    class Changing(backend.BlockPool):  # type: ignore[misc,name-defined]
        def _check_free(self, blocks: Any) -> None:
            batch.clear()

        @property
        def pool(self) -> Any:
            batch.clear()
            return self

    mine, theirs = make_pool(MANY), Changing(MANY, True, 4)
    batch += [*mine.get_new_blocks(300), *theirs.get_new_blocks(300)]
    attempt(lambda: mine.free_blocks(batch))
    theirs.check()


def test_overridden_hooks(backend: Any) -> None:
    class Hooked(backend.BlockPool):  # type: ignore[misc,name-defined]
        def _cached_block_hashes(self, block: Any) -> Any:
            return [b"not a key", None]

        def _remove_cached_block_hashes(self, block: Any) -> Any:
            return super()._remove_cached_block_hashes(block)

    pool = Hooked(5, True, 4, True)
    for what in (None, 3, object(), backend.KVCacheBlock(2), backend.BlockPool(3, True, 4).blocks[1]):
        assert isinstance(attempt(lambda: pool._remove_cached_block_hashes(what)), Exception)  # noqa: B023
    attempt(lambda: pool.get_new_blocks(2))


# Tables of a request


def test_slices_that_change_the_table(make_pool: Any) -> None:
    pool = make_pool(MANY)
    blocks = pool.get_new_blocks(MANY - 1)
    table = pool.new_block_table()
    table.extend(blocks[:3])
    for bound in (slice(Index(0, lambda: table.extend(blocks)), 3), slice(0, Index(3, lambda: table.extend(blocks)))):
        attempt(lambda: table[bound])  # noqa: B023
        attempt(lambda: table.__setitem__(bound, blocks[:3]))  # noqa: B023

    class Lying(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            table.extend(blocks)
            return len(table)

        def __getitem__(self, index: Any) -> Any:
            return blocks[0]

    attempt(lambda: table == Lying(blocks))
    attempt(lambda: table.__setitem__(slice(0, 2), Lying(blocks[:2])))
    turned = pool.new_block_table()
    turned.extend(blocks[:4])
    turned[::-1] = turned
    assert list(turned) == blocks[3::-1]


def test_a_truth_value_that_drops_the_hashes() -> None:
    hasher = kvpool.BlockHasher("sha256", 4)
    request = Request("r", list(range(64)), hasher)

    class Adapter:
        lora_name, lora_path, lora_int_id = "a", "/a", 1

        def __bool__(self) -> bool:
            request.block_hashes.clear()
            del request._all_token_ids[8:]
            return False

    request.lora_request = Adapter()
    attempt(lambda: request.append_output_token_ids([1, 2, 3, 4]))
    request.lora_request = None
    request.update_block_hashes()
    assert len(request.block_hashes) == request.num_tokens // 4


@pytest.mark.skipif(IS_PURE_PYTHON, reason="the twin counts from any start, however long that takes")
def test_a_digest_that_is_none_or_changes_the_tokens() -> None:
    tokens = list(range(4000))

    class Algorithm:
        is_cbor, is_sha256 = True, False

    def digest(data: bytes) -> bytes:
        tokens.clear()
        return b"d" * 32

    from kvpool.native.block_hasher import BlockHasherCore

    for function in (digest, lambda data: None, lambda data: 3):
        hasher = BlockHasherCore()
        hasher._create(4, Algorithm(), function)
        hashes: list[Any] = []
        attempt(lambda: hasher._hash_plain_blocks(b"p", tokens, 0, hashes))  # noqa: B023
        attempt(lambda: hasher._hash_plain_blocks(b"p", tokens, -(2**40), hashes))  # noqa: B023
        attempt(lambda: hasher._hash_plain_block(b"p", [1, 2, 3]))  # noqa: B023
        tokens[:] = range(4000)


class RequestId(str):
    """An id that does something when it is compared."""

    action: Callable[[], Any] = staticmethod(lambda: None)

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        self.action()
        return str.__eq__(self, other)


@pytest.mark.parametrize("groups", [[("full", 2, 0, False)], [("window", 2, 6, False), ("full", 2, 0, False)]])
def test_request_ids_whose_comparison_changes_the_manager(backend: SimpleNamespace, groups: Any) -> None:
    manager = KVCacheManager(make_config(Layout(groups, 300)), 1000, block_pool_class=backend.BlockPool)
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    requests = []
    for name in ("a", "b", "c"):
        request = OwnManagerRequest(RequestId(name), range(100), 2, RequestStatus.RUNNING)
        request.request_id = RequestId(name)
        manager.allocate_slots(request, 10)
        request.num_computed_tokens = 10
        requests.append(request)
    depth = 0

    def change() -> None:
        nonlocal depth
        depth += 1
        if depth < 3:
            attempt(lambda: manager.block_pool.get_new_blocks(20))
            attempt(lambda: [table.extend(table[:3]) for table in list(tables.values()) if len(table) < 500])
            attempt(requests[0].block_hashes.clear)
        depth -= 1

    RequestId.action = staticmethod(change)
    try:
        for _ in range(3):
            for request in requests:
                attempt(lambda: manager.allocate_slots(request, 6))  # noqa: B023
            attempt(lambda: manager.allocate_decode(requests))
            attempt(lambda: manager.get_computed_blocks(requests[1]))
        for request in requests:
            attempt(lambda: manager.free(request))  # noqa: B023
    finally:
        RequestId.action = staticmethod(lambda: None)
    manager.block_pool.check()


def test_computed_blocks_that_change_the_manager(backend: SimpleNamespace) -> None:
    manager = KVCacheManager(
        make_config(Layout([("full", 2, 0, False)], 300)), 1000, block_pool_class=backend.BlockPool
    )
    first = OwnManagerRequest("a", range(100), 2, RequestStatus.RUNNING)
    manager.allocate_slots(first, 100)
    manager.free(first)
    second = OwnManagerRequest("b", range(100), 2, RequestStatus.RUNNING)
    hits, num_hit = manager.get_computed_blocks(second)

    class Changing:
        @property
        def blocks(self) -> Any:
            attempt(lambda: manager.block_pool.get_new_blocks(260))
            second.block_hashes.clear()
            return hits.blocks

    assert isinstance(attempt(lambda: manager.allocate_slots(second, 2, num_hit, Changing())), Exception)
    manager.block_pool.check()


def test_requests_are_neither_pickled_nor_copied() -> None:
    import copy
    import pickle

    from kvpool import reference

    for cls in {Request, reference.Request}:
        request = cls("r", [1, 2, 3])
        for call in (lambda: pickle.dumps(request), lambda: copy.copy(request), lambda: copy.deepcopy(request)):  # noqa: B023
            with pytest.raises(TypeError, match="'r' can't be pickled or copied"):
                call()


# Tables of a worker


def make_rows(**options: Any) -> Any:
    from kvpool.native.block_rows import BlockRows

    return BlockRows(4, 8, 4, **options)


@native_only
def test_what_the_core_goes_by_is_read_only() -> None:
    rows = make_rows()
    rows.append_row([1, 2, 3], 0)
    counts = rows.num_blocks_per_row
    for call in (
        lambda: counts.__setitem__(0, 10**6),
        lambda: setattr(counts.flags, "writeable", True),
        lambda: setattr(rows, "num_blocks_per_row", counts),
        lambda: counts.resize(0, refcheck=False),
        lambda: memoryview(counts.base).__setitem__(0, 1),
    ):
        assert isinstance(attempt(call), Exception)
    assert counts.tolist() == [3, 0, 0, 0]
    rows.check()


@native_only
@pytest.mark.parametrize("own", [False, True])
def test_memory_of_a_table_stays_where_it_is(own: bool) -> None:
    memory = numpy.zeros(32, numpy.int32) if own else None
    rows = make_rows(memory=memory)
    owner = rows.block_ids
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    with pytest.raises(ValueError, match="cannot resize"):
        owner.resize(0, refcheck=False)
    rows.append_row([1, 2, 3], 3)
    rows.check()


@native_only
def test_tables_are_initialised_once() -> None:
    from kvpool.native.block_rows import BlockRowGroups
    from kvpool.native.step_outputs import QuerySlots, StepOutputs

    rows = make_rows()
    groups = BlockRowGroups([rows])
    outputs = StepOutputs(groups, 16)
    slots = QuerySlots(rows, numpy.zeros(8, numpy.int64))
    rows.append_row([1, 2, 3, 4, 5, 6, 7, 8], 3)
    for call in (
        lambda: rows.__init__(1, 1, 1),
        lambda: groups.__init__([make_rows()]),
        lambda: outputs.__init__(groups, 1),
        lambda: slots.__init__(rows, numpy.zeros(1, numpy.int64)),
    ):
        assert isinstance(attempt(call), Exception)
    rows.clear()
    rows.check()


@native_only
@pytest.mark.parametrize("n", [3, MANY])
def test_ids_that_change_their_lists(n: int) -> None:
    from kvpool.native.block_rows import BlockRowGroups, BlockRows

    rows = [BlockRows(4, 2 * n, 4) for _ in range(3)]
    groups = BlockRowGroups(rows)
    by_group: list[Any] = [[], [], []]
    by_group[0] = [Index(1, by_group.clear), *range(n - 1)]
    attempt(lambda: groups.append_row(by_group, 0))
    ids: list[Any] = list(range(n))
    ids[1] = Index(1, ids.clear)
    attempt(lambda: rows[0].append_row(ids, 1))
    ids = list(range(n))
    ids[1] = Index(1, lambda: ids.extend(range(n)))
    attempt(lambda: rows[0].add_row(ids, 1))
    ids = [Index(1, lambda: rows[0].append_row([5, 6], 1)), 2]
    attempt(lambda: rows[0].append_row(ids, 1))
    for each in rows:
        each.check()


def step(ids: Any, computed: Any, tokens: dict[str, Any], blocks: Any, resumed: Any, new: Any = ()) -> Any:
    cached = SimpleNamespace(request_ids=ids, num_computed_tokens=computed, new_block_ids=blocks, resumed=resumed)
    return SimpleNamespace(scheduled_cached_requests=cached, num_scheduled_tokens=tokens, scheduled_new_requests=new)


@native_only
@pytest.mark.parametrize("compressed", [False, True])
def test_a_step_that_changes_its_own_lists_and_arrays(compressed: bool) -> None:
    from kvpool.native.block_rows import BlockRowGroups, BlockRows
    from kvpool.native.step_outputs import StepOutputs

    rows = [BlockRows(4, 8, 4) for _ in range(2)]
    outputs = StepOutputs(BlockRowGroups(rows), 16, with_kv_rows=True, with_compressed=compressed)
    row_of = {"a": 0, "b": 1, "c": 2}

    def fresh() -> tuple[Any, ...]:
        ids, blocks, resumed = ["a", "b", "c"], [([1], [1]), ([2], [2]), ([3], [3])], [False] * 3
        return ids, [0, 0, 0], {"a": 2, "b": 3, "c": 4}, blocks, resumed

    def scribble() -> None:
        for each in (outputs.query_starts, outputs.rows, outputs.seq_lens, outputs.positions, outputs.token_rows):
            each[:] = 2**30
            attempt(lambda: each.resize(0, refcheck=False))  # noqa: B023

    for place in range(3):
        for action in ("clear", "scribble", "again", "raise"):
            ids, computed, tokens, blocks, resumed = fresh()

            def act(action: str = action, lists: Any = (ids, computed, tokens, blocks, resumed)) -> None:
                if action == "clear":
                    for each in lists:
                        each.clear()
                elif action == "scribble":
                    scribble()
                elif action == "again":
                    outputs.apply_step(step(*fresh()), row_of)
                else:
                    raise RuntimeError("no")

            if place == 0:
                computed[0] = Index(0, act)
            elif place == 1:
                tokens["a"] = Index(2, act)
            else:
                blocks[0] = ([Index(1, act)], [1])
            attempt(lambda: outputs.apply_step(step(ids, computed, tokens, blocks, resumed), row_of))  # noqa: B023
            for each in rows:
                each.check()
                each.clear()
    del outputs.num_common_blocks[:]
    outputs.apply_step(step(*fresh()), row_of)
    assert outputs.num_requests == 3 and outputs.num_tokens == 9
    assert outputs.query_starts[:4].tolist() == [0, 2, 5, 9]
    assert outputs.slots[0][:9].tolist() == [4, 5, 8, 9, 10, 12, 13, 14, 15]
    for bad in (2**62, 2**63 - 1, 2**70, -1):
        for at in ("computed", "tokens"):
            ids, computed, tokens, blocks, resumed = fresh()
            if at == "computed":
                computed[1] = bad
            else:
                tokens["b"] = bad
            before = [each.block_ids.copy() for each in rows]
            error = attempt(lambda: outputs.apply_step(step(ids, computed, tokens, blocks, resumed), row_of))  # noqa: B023
            assert isinstance(error, Exception)
            assert all((each.block_ids == old).all() for each, old in zip(rows, before))


@native_only
@pytest.mark.parametrize(
    "make_array",
    [
        lambda n, dtype: None,
        lambda n, dtype: [0] * n,
        lambda n, dtype: numpy.zeros(0, dtype),
        lambda n, dtype: numpy.zeros(max(n - 1, 0), dtype),
        lambda n, dtype: numpy.zeros(n, numpy.int8),
        lambda n, dtype: numpy.zeros((n, 1), dtype),
        lambda n, dtype: numpy.zeros(2 * n, dtype)[::2],
        lambda n, dtype: numpy.frombuffer(bytes(16 * n), dtype),
    ],
)
def test_arrays_that_are_no_such_arrays(make_array: Any) -> None:
    from kvpool.native.block_rows import BlockRowGroups
    from kvpool.native.step_outputs import StepOutputs

    with pytest.raises(TypeError, match="make_array"):
        StepOutputs(BlockRowGroups([make_rows()]), 16, with_kv_rows=True, with_compressed=True, make_array=make_array)


@native_only
def test_batches_that_are_resized_while_they_are_read() -> None:
    from kvpool.native import step_outputs

    rows = make_rows()
    rows.append_row([1, 2, 3], 0)
    batch = numpy.zeros(2000, numpy.int64)

    class Positions(list):  # type: ignore[type-arg]
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            batch.resize(0, refcheck=False)
            return numpy.zeros(2000, numpy.int64)

    for call in (step_outputs.compute_slots, step_outputs.compress_rows):
        batch = numpy.zeros(2000, numpy.int64)
        attempt(lambda: call(rows, batch, Positions()))  # noqa: B023
    assert isinstance(attempt(lambda: step_outputs.QuerySlots(rows, None)), TypeError)
    assert isinstance(attempt(lambda: step_outputs.QuerySlots(rows, [1, 2])), TypeError)
    out = numpy.zeros(8, numpy.int64)
    slots = step_outputs.QuerySlots(rows, out)
    assert isinstance(attempt(lambda: out.resize(0, refcheck=False)), ValueError)
    assert isinstance(attempt(lambda: slots.write(0, 0, 0, -5)), Exception)


# Objects that nobody initialised, and objects that are initialised twice

POKE = """
import sys, importlib, numpy
names = ("batch", "block", "block_sequence", "free_queue", "prefix_map", "views", "allocator", "prefix_cache", "pool",
         "block_hasher", "request", "list_tables", "kv_cache_manager", "block_rows", "step_outputs")
import kvpool
values = (None, 0, -1, 1, 2**31, b"k" * 8, "x", [], [1], {}, (), numpy.zeros(2, numpy.int32), object())
UNSAFE = {("QuerySlots", "write")}  # takes addresses
num_calls = 0
def poke(what, make):
    global num_calls
    for name in dir(what):
        if name in ("__class__", "__init_subclass__", "__subclasshook__", "__new__") or (what.__name__, name) in UNSAFE:
            continue
        for arguments in ((), *((v,) for v in values), *((v, w) for v in values[:6] for w in values[4:9]),
                          *((v,) * n for v in values[:10] for n in range(3, 8))):
            try:
                thing = getattr(make(), name)
                num_calls += 1
                if callable(thing):
                    result = thing(*arguments)
                    if hasattr(result, "__next__"):
                        list(zip(range(3), result))
                elif not arguments:
                    setattr(make(), name, thing)
            except Exception:
                pass
for name in names:
    module = importlib.import_module("kvpool.native." + name)
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and cls.__module__ == module.__name__ and not issubclass(cls, Exception):
            def bare(cls=cls):
                return cls.__new__(cls)
            try:
                bare()
            except TypeError:
                continue
            poke(cls, bare)
print("called", num_calls)
"""


@native_only
def test_objects_that_nobody_initialised_answer_with_exceptions() -> None:
    done = subprocess.run([sys.executable, "-c", POKE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 10_000


def test_a_pool_is_initialised_once(backend: SimpleNamespace) -> None:
    if backend.name == "reference":
        pytest.skip("a new pool under an old name: nothing native behind it")
    pool = backend.BlockPool(9, True, 4)
    blocks = pool.get_new_blocks(4)
    with pytest.raises(Exception, match="initialised already"):
        pool.__init__(3, True, 4)

    class Truth:
        def __bool__(self) -> bool:
            attempt(lambda: fresh.__init__(3, True, 4))
            return True

    pool.free_blocks(blocks)
    pool.check()
    fresh = backend.BlockPool.__new__(backend.BlockPool)
    attempt(lambda: fresh.__init__(9, Truth(), 4))
    fresh.check()
    queue, prefix_map, block = pool.free_block_queue, pool.cached_block_hash_to_block, pool.blocks[1]
    for call in (lambda: queue.__init__([]), prefix_map.__init__, lambda: block.__init__(5)):
        assert isinstance(attempt(call), Exception)
    pool.check()


@native_only
def test_a_handle_table_without_a_home() -> None:
    from kvpool.native.block import ViewTable

    for _ in range(100):
        assert isinstance(attempt(lambda: ViewTable.__new__(ViewTable)), TypeError)


def test_a_manager_that_is_made_again(backend: SimpleNamespace) -> None:
    config = make_config(Layout([("full", 2, 0, False)], 30))
    manager = KVCacheManager(config, 100, block_pool_class=backend.BlockPool)
    manager.allocate_slots(OwnManagerRequest("a", range(20), 2, RequestStatus.RUNNING), 20)
    manager.__init__(config, 100, block_pool_class=backend.BlockPool)  # type: ignore[misc]
    manager.allocate_slots(OwnManagerRequest("a", range(20), 2, RequestStatus.RUNNING), 20)
    assert manager.block_pool.get_num_free_blocks() == 19
    manager.block_pool.check()
