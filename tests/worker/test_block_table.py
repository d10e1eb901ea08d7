"""Rows of block ids and what is derived from them, against the obvious implementation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_table import PAD, NaiveTable

from kvpool.errors import InvalidArgumentError, InvariantError
from kvpool.native.block_rows import BlockRowGroups, BlockRows
from kvpool.native.step_outputs import (
    PAD_SLOT_ID,
    QuerySlots,
    compress_rows,
    compute_kv_rows,
    compute_slots,
    num_common_blocks,
)

ROWS, WIDTH, IDS = 5, 6, 40


class Pair:
    """The native rows and the obvious ones, edited alike."""

    def __init__(self, block_size: int = 4, ratio: int = 1, width: int = WIDTH) -> None:
        self.native = BlockRows(ROWS, width, block_size, ratio, IDS)
        self.naive = NaiveTable(ROWS, width, block_size, ratio)

    def edit(self, name: str, *arguments: Any) -> None:
        ids_fit = name not in ("append_row", "add_row") or (
            len(arguments[0]) * self.naive.ratio + (len(self.naive.rows[arguments[1]]) if name == "append_row" else 0)
            <= self.naive.width
        )
        if ids_fit:
            getattr(self.native, name)(*arguments)
            getattr(self.naive, name)(*arguments)
        else:
            with pytest.raises(InvalidArgumentError, match="more than it has room for"):
                getattr(self.native, name)(*arguments)

    def check(self) -> None:
        self.native.check()
        assert np.array_equal(self.native.block_ids, self.naive.padded())
        assert self.native.num_blocks_per_row.tolist() == [len(row) for row in self.naive.rows]


rows_ = st.integers(0, ROWS - 1)
ids_ = st.lists(st.integers(0, IDS - 1), max_size=WIDTH)
edits_ = st.one_of(
    st.tuples(st.sampled_from(["append_row", "add_row"]), ids_, rows_),
    st.tuples(st.sampled_from(["move_row", "swap_row"]), rows_, rows_),
    st.tuples(st.just("clear_row"), rows_),
)


def edited(edits: list[Any], block_size: int = 4, ratio: int = 1) -> Pair:
    pair = Pair(block_size, ratio)
    for edit in edits:
        pair.edit(*edit)
    return pair


@given(st.lists(edits_, max_size=25), st.sampled_from([1, 2, 3]))
def test_rows_are_those_of_the_obvious_table(edits: list[Any], ratio: int) -> None:
    pair = Pair(ratio=ratio)
    for edit in edits:
        pair.edit(*edit)
        pair.check()


@given(st.lists(st.tuples(edits_, st.integers(0, ROWS)), max_size=25))
def test_taken_changes_keep_a_copy_equal(steps: list[Any]) -> None:
    pair = Pair()
    device = np.zeros(ROWS * WIDTH, np.int32)
    for edit, num_rows in steps:
        pair.edit(*edit)
        pairs = np.full(2 * pair.native.num_changes(num_rows), -7, np.int32)
        taken = pair.native.take_changes(num_rows, pairs)
        assert 2 * taken == pairs.size and pair.native.num_changes(num_rows) == 0
        device[pairs[::2]] = pairs[1::2]
        cells = num_rows * WIDTH
        assert np.array_equal(device[:cells], pair.native.block_ids.reshape(-1)[:cells])


def test_an_append_changes_no_more_than_its_cells() -> None:
    table = Pair().native
    table.add_row([1, 2, 3], 2)
    table.drop_changes(ROWS)
    table.append_row([4], 2)
    out = np.zeros(2, np.int32)
    assert table.take_changes(ROWS, out) == 1 and out.tolist() == [2 * WIDTH + 3, 4]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@given(st.lists(edits_, max_size=12), st.data())
def test_slots(block_size: int, dtype: Any, edits: list[Any], data: st.DataObject) -> None:
    pair = edited(edits, block_size)
    places = [(r, p) for r, row in enumerate(pair.naive.rows) for p in range(len(row) * block_size)]
    tokens = data.draw(st.lists(st.sampled_from(places), max_size=20)) if places else []
    rows, positions = np.array([t[0] for t in tokens], dtype), np.array([t[1] for t in tokens], dtype)
    slots = compute_slots(pair.native, rows, positions)
    assert slots.dtype == np.int64 and slots.tolist() == [pair.naive.slot(*token) for token in tokens]
    assert compute_slots(pair.native, rows.tolist(), positions[::1].tolist()).tolist() == slots.tolist()
    keys, values = np.empty_like(slots), np.empty_like(slots)
    compute_kv_rows(slots, block_size, keys, values)
    cache = np.arange(IDS * 2 * block_size).reshape(IDS, 2, block_size)
    offsets = positions % block_size
    assert np.array_equal(keys, cache[slots // block_size, 0, offsets])
    assert np.array_equal(values, cache[slots // block_size, 1, offsets])


def test_kernel_blocks_have_the_slots_of_the_managers_blocks() -> None:
    plain, fine = BlockRows(1, 4, 48), BlockRows(1, 12, 16, 3)
    for table in (plain, fine):
        table.add_row([9, 2, 5], 0)
    rows, positions = np.zeros(144, np.int32), np.arange(144)
    assert fine.block_ids[0].tolist() == [27, 28, 29, 6, 7, 8, 15, 16, 17, 0, 0, 0]
    assert np.array_equal(compute_slots(plain, rows, positions), compute_slots(fine, rows, positions))


@pytest.mark.parametrize(("row", "position"), [(0, 8), (0, -1), (1, 0), (0, 2**40)])
def test_a_token_without_a_block_is_refused_and_nothing_written(row: int, position: int) -> None:
    table = Pair().native
    table.add_row([3, 5], 0)
    out = np.full(2, -7, np.int64)
    with pytest.raises(InvalidArgumentError, match=f"token 1: its row has no block for position {position}"):
        compute_slots(table, [0, row], [1, position], out)
    assert out.tolist() == [-7, -7]
    with pytest.raises(InvalidArgumentError, match="no row 5"):
        compute_slots(table, [0, 5], [1, 1], out)
    assert compute_slots(table, None, [7], out).tolist() == [5 * 4 + 3] and out.tolist() == [23, -7]


def write_query_slots(table: BlockRows, starts: Any, positions: Any, out: Any) -> None:
    QuerySlots(table, out).write(len(starts) - 1, starts.ctypes.data, positions.ctypes.data, len(positions))


@given(st.lists(edits_, max_size=12), st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), st.data())
def test_query_slots_read_unused_cells_as_the_null_block(edits: list[Any], lengths: list[int], data: Any) -> None:
    pair = edited(edits)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    n = int(starts[-1])
    position_ = st.integers(-2, WIDTH * 4 + 3)
    positions = np.array(data.draw(st.lists(position_, min_size=n, max_size=n)), np.int64)
    wanted = []
    for row, length in enumerate(lengths):
        for position in positions[starts[row] : starts[row] + length].tolist():
            inside = 0 <= position < WIDTH * 4
            wanted.append(pair.naive.padded()[row][position // 4] * 4 + position % 4 if inside else PAD)
    out = np.full(n + 3, -7, np.int64)
    write_query_slots(pair.native, starts, positions, out)
    assert out.tolist() == [*wanted, PAD, PAD, PAD]


def test_query_slots_by_address_keep_the_tail_padded() -> None:
    table = Pair().native
    for row in range(ROWS):
        table.add_row([row + 1], row)
    out = np.zeros(8, np.int64)
    writer = QuerySlots(table, out)
    for num_rows in (2, 5, 1, 3):
        starts, positions = np.arange(num_rows + 1, dtype=np.int32), np.full(num_rows, 3, np.int64)
        writer.write(num_rows, starts.ctypes.data, positions.ctypes.data, num_rows)
        assert out.tolist() == [4 * (row + 1) + 3 for row in range(num_rows)] + [PAD] * (8 - num_rows)
    with pytest.raises(InvalidArgumentError, match="9 tokens do not fit"):
        writer.write(1, starts.ctypes.data, positions.ctypes.data, 9)
    assert PAD_SLOT_ID == PAD


def test_query_starts_must_not_fall_nor_pass_the_tokens() -> None:
    table, out = Pair().native, np.zeros(4, np.int64)
    for starts in ([0, 2, 1], [0, 5], [-1, 1]):
        with pytest.raises(InvalidArgumentError, match="query start"):
            write_query_slots(table, np.array(starts, np.int32), np.zeros(4, np.int64), out)
    with pytest.raises(InvalidArgumentError, match="no row 6"):
        write_query_slots(table, np.zeros(ROWS + 2, np.int32), np.zeros(4, np.int64), out)


@pytest.mark.parametrize("block_size", [1, 3, 4])
@given(st.lists(edits_, max_size=12), st.data())
def test_compressed_rows(block_size: int, edits: list[Any], data: st.DataObject) -> None:
    pair = edited(edits, block_size)
    used = [row for row in range(ROWS) if pair.naive.rows[row]]
    batch = data.draw(st.lists(st.sampled_from(used), max_size=6)) if used else []
    lengths = [data.draw(st.integers(1, len(pair.naive.rows[row]) * block_size)) for row in batch]
    starts, blocks, last = compress_rows(pair.native, batch, lengths)
    counts = [-(-length // block_size) for length in lengths]
    assert starts.tolist() == np.cumsum([0, *counts]).tolist()
    assert blocks.tolist() == [b for row, n in zip(batch, counts) for b in pair.naive.rows[row][:n]]
    assert last.tolist() == [length - (n - 1) * block_size for length, n in zip(lengths, counts)]


@pytest.mark.parametrize("num_tokens", [0, -1, 9])
def test_compressed_rows_hold_at_least_a_token_and_no_more_than_their_blocks(num_tokens: int) -> None:
    table = Pair().native
    table.add_row([3, 5], 1)
    with pytest.raises(InvalidArgumentError, match=f"request 1: {num_tokens} tokens"):
        compress_rows(table, [1, 1], [4, num_tokens])


shared_rows_ = st.lists(st.lists(st.integers(0, 2), max_size=WIDTH), min_size=ROWS, max_size=ROWS)


@given(shared_rows_, st.lists(rows_, max_size=4), st.integers(0, WIDTH + 1))
def test_blocks_in_common(tables: list[list[int]], batch: list[int], limit: int) -> None:
    pair = edited([("add_row", ids, row) for row, ids in enumerate(tables)])
    assert num_common_blocks(pair.native, batch, limit) == pair.naive.num_common(batch, limit)


@pytest.mark.parametrize("bad", [-1, ROWS])
def test_rows_outside_the_table_are_refused(bad: int) -> None:
    pair = edited([("add_row", [1, 2], 0)])
    for call in (
        lambda: pair.native.append_row([1], bad),
        lambda: pair.native.add_row([], bad),
        lambda: pair.native.clear_row(bad),
        lambda: pair.native.move_row(0, bad),
        lambda: pair.native.swap_row(bad, 0),
        lambda: num_common_blocks(pair.native, [0, bad], 2),
    ):
        with pytest.raises(InvalidArgumentError, match=f"no row {bad}"):
            call()
    pair.check()


@pytest.mark.parametrize("bad", [-1, IDS, 2**31, -(2**70)])
def test_ids_outside_the_pool_are_refused(bad: int) -> None:
    pair = edited([("add_row", [1, 2], 0)])
    with pytest.raises(InvalidArgumentError, match=f"no block {bad} in the pool"):
        pair.native.append_row([3, bad], 0)
    pair.check()


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_ids_that_are_no_ints_are_type_errors(bad: Any) -> None:
    pair = edited([("add_row", [1, 2], 0)])
    with pytest.raises(TypeError, match="a block id is an int"):
        pair.native.append_row([3, bad], 0)
    pair.check()


@pytest.mark.parametrize(
    "ids",
    [
        [7, 8, 9],
        (7, 8, 9),
        np.array([7, 8, 9], np.int32),
        [np.int64(7), 8, np.int32(9)],
        memoryview(np.int32([7, 8, 9])),
    ],
    ids=["list", "tuple", "int32", "numpy ints", "buffer"],
)
def test_ids_come_as_lists_and_as_int32_buffers(ids: Any) -> None:
    pair = Pair()
    pair.native.append_row(ids, 1)
    pair.native.append_row(None, 1)
    assert pair.native.block_ids[1, :4].tolist() == [7, 8, 9, 0] and pair.native.num_blocks_per_row[1] == 3
    with pytest.raises(TypeError):
        pair.native.append_row(np.array([1], np.int64), 1)
    with pytest.raises(TypeError):
        pair.native.append_row(np.array([[1]], np.int32), 1)


def test_rows_longer_than_the_room_on_the_stack() -> None:
    table = BlockRows(300, 1000, 16)
    many = list(range(1000))
    for row in range(300):
        table.append_row(many, row)
    assert (table.block_ids == np.arange(1000)).all()
    table.check()


def test_the_memory_is_the_callers() -> None:
    memory = np.full((3, 4), 9, np.int32)
    table = BlockRows(3, 4, 16, memory=memory)
    assert not memory.any()
    table.append_row([5], 2)
    assert memory[2, 0] == 5 and np.shares_memory(table.block_ids, memory)
    view = np.asarray(memoryview(table))
    assert view.shape == (3, 4) and view.dtype == np.int32 and np.shares_memory(view, memory)
    with pytest.raises(InvalidArgumentError, match="holds 12"):
        BlockRows(3, 5, 16, memory=memory)
    for bad in (memory.astype(np.int64), memory.T, b"\0" * 48):
        with pytest.raises(TypeError, match="writable C-contiguous int32"):
            BlockRows(3, 4, 16, memory=bad)
    memory.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        BlockRows(3, 4, 16, memory=memory)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1), (2**16, 2**15, 1), (1, 1, 1, 0)])
def test_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be at least 1"):
        BlockRows(*shape)


def test_tables_are_equal_by_content_and_never_copied() -> None:
    one, other = edited([("add_row", [1, 2], 0)]).native, edited([("add_row", [1, 2], 0)]).native
    assert one == other and one != edited([]).native and one != 5
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be pickled or copied"):
            copying(one)
        with pytest.raises(TypeError, match="can't be pickled or copied"):
            copying(BlockRowGroups([one]))


def test_the_checker_names_the_invariant() -> None:
    table = Pair().native
    table.block_ids[1, 2] = 5
    with pytest.raises(InvariantError, match="T2: cell 2 of row 1"):
        table.check()


# ---- groups ----


def make_groups() -> tuple[BlockRowGroups, list[NaiveTable]]:
    native = [BlockRows(ROWS, WIDTH, 4, 1, IDS), BlockRows(ROWS, 2 * WIDTH, 8, 2, IDS)]
    return BlockRowGroups(native), [NaiveTable(ROWS, WIDTH, 4), NaiveTable(ROWS, 2 * WIDTH, 8, 2)]


@given(st.lists(edits_, max_size=15), st.data())
def test_groups_are_edited_together(edits: list[Any], data: st.DataObject) -> None:
    groups, naive = make_groups()
    for name, *arguments in edits:
        if name in ("append_row", "add_row"):
            lists = (arguments[0], data.draw(ids_))
            held = [len(table.rows[arguments[1]]) if name == "append_row" else 0 for table in naive]
            fits = all(n + len(ids) * t.ratio <= t.width for n, ids, t in zip(held, lists, naive))
            if not fits:
                with pytest.raises(InvalidArgumentError):
                    getattr(groups, name)(lists, arguments[1])
                continue
            getattr(groups, name)(lists, arguments[1])
            for table, ids in zip(naive, lists):
                getattr(table, name)(ids, arguments[1])
        else:
            for table in (groups, *naive):
                getattr(table, name)(*arguments)
        for rows, table in zip(groups.groups, naive):
            rows.check()
            assert np.array_equal(rows.block_ids, table.padded())


def test_groups_refuse_what_does_not_fit_together() -> None:
    groups, _ = make_groups()
    one = BlockRows(2, 3, 4)
    with pytest.raises(InvalidArgumentError, match="ids of 1 groups"):
        groups.append_row(([1],), 0)
    with pytest.raises(InvalidArgumentError, match="same number of rows"):
        BlockRowGroups([one, BlockRows(3, 3, 4)])
    with pytest.raises(InvalidArgumentError, match="different tables"):
        BlockRowGroups([one, one])
    for bad in ([], [None]):
        with pytest.raises(TypeError):
            BlockRowGroups(bad)
    with pytest.raises(InvalidArgumentError, match="made once"):
        groups.__init__([one])
