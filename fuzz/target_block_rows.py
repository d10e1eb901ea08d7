"""Worker tables (BlockRows, BlockRowGroups, and what is read of them) against rows in lists.

A call that the lists can say the answer to is compared with them; one with arguments of a wrong kind may raise, and has
then changed nothing. After each call the tables are checked, and a copy that only takes changes must follow them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.decisions import Decisions, Finding
from fuzz.pairs import outcome, plain
from fuzz.values import Maker, any_id_array, any_int, any_sequence, constant, junk
from kvpool import reference
from kvpool.native import step_outputs as outputs
from kvpool.native.block_rows import BlockRowGroups, BlockRows

MAX_STEPS = 50


class Tables:
    """One or two groups; the model: per group and row the ids of the manager."""

    def __init__(self, num_rows: int, width: int, block_size: int, ratios: list[int], num_ids: int) -> None:
        self.backend = reference
        self.stranger = object()
        self.disturbed = False
        self.num_rows, self.width, self.block_size, self.num_ids = num_rows, width, block_size, num_ids
        self.ratios = ratios
        self.groups = [BlockRows(num_rows, width, block_size, ratio, num_ids) for ratio in ratios]
        self.all = BlockRowGroups(self.groups)
        self.rows: list[list[list[int]]] = [[[] for _ in range(num_rows)] for _ in ratios]
        self.copies = [np.zeros(num_rows * width, np.int32) for _ in ratios]

    def cells(self, group: int, row: int) -> list[int]:
        ratio = self.ratios[group]
        return [block * ratio + part for block in self.rows[group][row] for part in range(ratio)]

    def check(self) -> None:
        for number, group in enumerate(self.groups):
            group.check()
            for row in range(self.num_rows):
                wanted = self.cells(number, row)
                if group.block_ids[row].tolist() != wanted + [0] * (self.width - len(wanted)):
                    raise Finding(f"group {number}, row {row}: {group.block_ids[row].tolist()}, wanted {wanted}")
                if group.num_blocks_per_row[row] != len(wanted):
                    raise Finding(
                        f"group {number}, row {row}: {group.num_blocks_per_row[row]} blocks, not {len(wanted)}"
                    )

    def follow_tables(self) -> None:
        """After a call with strange arguments that went through: the lists become what the tables hold."""
        for number, group in enumerate(self.groups):
            ratio = self.ratios[number]
            for row in range(self.num_rows):
                cells = group.block_ids[row, : group.num_blocks_per_row[row]].tolist()
                self.rows[number][row] = [cell // ratio for cell in cells[::ratio]]

    def fits(self, group: int, ids: list[int], num_before: int) -> bool:
        return all(0 <= i < self.num_ids for i in ids) and (num_before + len(ids)) * self.ratios[group] <= self.width


Call = Callable[[Tables], Any]


class Step:
    """A call, and what the lists say: whether it is one that must succeed, and how they follow."""

    def __init__(self, call: Call, is_valid: bool | None, follow: Callable[[], Any]) -> None:
        self.call, self.is_valid, self.follow = call, is_valid, follow


def an_action(d: Decisions) -> Maker:
    which, row = d.below(3), d.below(8)

    def act(tables: Tables) -> None:
        tables.disturbed = True
        row_in = row % tables.num_rows
        if which == 0:
            tables.groups[0].clear_row(row_in)
        elif which == 1:
            tables.groups[0].append_row([1], row_in)
        else:
            tables.groups[0].clear()

    return act


def a_row(d: Decisions, tables: Tables) -> tuple[Maker, int | None]:
    """The argument, and the row it is; None: no row."""
    how = d.byte()
    if how < 235:
        row = d.below(tables.num_rows)
        return constant(row), row
    d.num_hostile += 1
    return d.choose(
        [constant(tables.num_rows), constant(-1), constant(2**31), constant(None), constant("0"), junk(d)]
    ), None


def some_ids(d: Decisions, tables: Tables) -> tuple[Maker, list[int]]:
    ids = [
        d.below(tables.num_ids) if d.byte() < 250 else d.choose([-1, tables.num_ids, 2**31 - 1])
        for _ in range(d.below(5))
    ]
    if d.chance(60):
        return constant(ids), ids
    if d.chance(60):
        return any_id_array(d, ids), ids
    d.num_hostile += 1
    return any_sequence(d, [any_int(d, 0, tables.num_ids - 1, an_action(d)) for _ in ids], an_action(d)), ids


def edit_one(d: Decisions, tables: Tables) -> Step:
    group, replaces = d.below(len(tables.groups)), d.chance(40)
    (row_of, row), (ids_of, ids) = a_row(d, tables), some_ids(d, tables)
    method = "add_row" if replaces else "append_row"
    held = tables.rows[group]
    before = 0 if replaces or row is None else len(held[row])
    is_valid = row is not None and tables.fits(group, ids, before)

    def follow() -> None:
        assert row is not None
        held[row] = ids if replaces else held[row] + ids

    return Step(lambda t: getattr(t.groups[group], method)(ids_of(t), row_of(t)), is_valid, follow)


def edit_all(d: Decisions, tables: Tables) -> Step:
    replaces = d.chance(40)
    row_of, row = a_row(d, tables)
    ids = [some_ids(d, tables) for _ in tables.groups]
    method = "add_row" if replaces else "append_row"
    is_valid = row is not None and all(
        tables.fits(group, each, 0 if replaces else len(tables.rows[group][row])) for group, (_, each) in enumerate(ids)
    )
    is_tuple = d.chance(50)

    def call(t: Tables) -> Any:
        given = [make(t) for make, _ in ids]
        return getattr(t.all, method)(tuple(given) if is_tuple else given, row_of(t))

    def follow() -> None:
        assert row is not None
        for group, (_, each) in enumerate(ids):
            held = tables.rows[group]
            held[row] = each if replaces else held[row] + each

    return Step(call, is_valid, follow)


def two_rows(d: Decisions, tables: Tables) -> Step:
    (one_of, one), (other_of, other), swaps = a_row(d, tables), a_row(d, tables), d.chance(50)
    method = "swap_row" if swaps else "move_row"

    def follow() -> None:
        assert one is not None and other is not None
        for rows in tables.rows:
            if swaps:
                rows[one], rows[other] = rows[other], rows[one]
            elif one != other:
                rows[other], rows[one] = rows[one], []

    return Step(lambda t: getattr(t.all, method)(one_of(t), other_of(t)), one is not None and other is not None, follow)


def clear_row(d: Decisions, tables: Tables) -> Step:
    row_of, row = a_row(d, tables)

    def follow() -> None:
        assert row is not None
        for rows in tables.rows:
            rows[row] = []

    return Step(lambda t: t.all.clear_row(row_of(t)), row is not None, follow)


def take_changes(d: Decisions, tables: Tables) -> Step:
    group = d.below(len(tables.groups))
    table = tables.groups[group]
    room = any_id_array(d, [0] * (2 * tables.num_rows * tables.width if d.chance(90) else 3))

    def call(t: Tables) -> Any:
        out = room(t)
        n = table.take_changes(t.num_rows, out)
        pairs = np.asarray(out)[: 2 * n].reshape(n, 2)
        t.copies[group][pairs[:, 0]] = pairs[:, 1]
        if t.copies[group].tolist() != table.block_ids.reshape(-1).tolist():
            raise Finding("a copy that took all changes is another table")
        return n

    return Step(call, None, lambda: None)


def ints(d: Decisions, values: list[int]) -> Any:
    how = d.byte()
    if how < 160:
        return np.array(values, d.choose([np.int32, np.int64]))
    if how < 200:
        return values
    d.num_hostile += 1
    plain_values = np.array(values, np.int64)
    kinds = ("float64", "uint64", "uint32", ">i4", "int8", "bool", "object")
    strange = [plain_values.reshape(1, -1), None, "ab", np.repeat(plain_values, 2)[::2], tuple(values), 3, object()]
    return plain_values.astype(d.choose(kinds)) if d.chance(50) else d.choose(strange)


def slots(d: Decisions, tables: Tables) -> Step:
    group, n = d.below(len(tables.groups)), d.below(8)
    table, size = tables.groups[group], tables.block_size
    rows = [d.below(tables.num_rows) if d.byte() < 250 else d.choose([-1, 99]) for _ in range(n)]
    places = [d.below(tables.width * size) if d.byte() < 200 else d.choose([-1, 2**31 - 1, 0]) for _ in range(n)]
    given_rows, given_places = ints(d, rows), ints(d, places)
    known = [tables.cells(group, row) if 0 <= row < tables.num_rows else [] for row in rows]
    is_valid = all(0 <= place // size < len(cells) for cells, place in zip(known, places)) and d.num_hostile == 0
    wanted = [cells[place // size] * size + place % size for cells, place in zip(known, places)] if is_valid else []

    def call(t: Tables) -> Any:
        got = outputs.compute_slots(table, given_rows, given_places)
        if d.num_hostile == 0 and got.tolist() != wanted:
            raise Finding(f"slots {got.tolist()}, not {wanted}")
        return got

    return Step(call, is_valid, lambda: None)


def num_common(d: Decisions, tables: Tables) -> Step:
    group, n, limit = d.below(len(tables.groups)), 1 + d.below(4), d.below(12)
    rows = [d.below(tables.num_rows) for _ in range(n)]
    given, table = ints(d, rows), tables.groups[group]
    cells = [tables.cells(group, row) for row in rows]
    common = 0
    while common < min(limit, *map(len, cells)) and all(each[common] == cells[0][common] != 0 for each in cells):
        common += 1

    def call(t: Tables) -> Any:
        same = outputs.num_common_blocks(table, given, limit)
        if d.num_hostile == 0 and same != common:
            raise Finding(f"{same} common blocks, not {common}")
        return same

    return Step(call, None, lambda: None)


def compress(d: Decisions, tables: Tables) -> Step:
    group, n, size = d.below(len(tables.groups)), d.below(5), tables.block_size
    rows = [d.below(tables.num_rows) for _ in range(n)]
    cells = [tables.cells(group, row) for row in rows]
    tokens = [1 + d.below(max(1, len(each) * size)) if d.byte() < 220 else d.choose([0, -1, 999]) for each in cells]
    table, given, given_tokens = tables.groups[group], ints(d, rows), ints(d, tokens)
    is_valid = all(0 < count <= len(each) * size for count, each in zip(tokens, cells)) and d.num_hostile == 0

    def call(t: Tables) -> Any:
        starts, blocks, last = (each.tolist() for each in outputs.compress_rows(table, given, given_tokens))
        if d.num_hostile == 0:
            wanted = [each[: -(-count // size)] for each, count in zip(cells, tokens)]
            if blocks != list(chain.from_iterable(wanted)) or last != [(count - 1) % size + 1 for count in tokens]:
                raise Finding(f"compressed {blocks}, {last}, not {wanted}")
            if starts != [sum(map(len, wanted[:i])) for i in range(n + 1)]:
                raise Finding(f"starts {starts}")
        return starts

    return Step(call, is_valid, lambda: None)


def a_step(d: Decisions, tables: Tables) -> Step:
    """StepOutputs.apply_step with a plan that may be wrong anywhere."""
    new_rows = {f"n{i}": d.below(tables.num_rows) for i in range(d.below(3))}
    ids = list(new_rows)
    plan = SimpleNamespace(
        scheduled_new_requests=[
            SimpleNamespace(
                request_id=each,
                block_ids=tuple(some_ids(d, tables)[0](tables) for _ in tables.groups),
                num_computed_tokens=any_int(d, 0, 4)(tables),
            )
            for each in ids
        ],
        scheduled_cached_requests=SimpleNamespace(
            request_ids=["old"] if d.chance(30) else [],
            resumed=[False] * d.below(3),
            new_block_ids=[None] * d.below(3),
            num_computed_tokens=[d.below(4)] * d.below(3),
        ),
        num_scheduled_tokens={each: any_int(d, 1, 4)(tables) for each in ids},
    )
    row_of: Any = dict(new_rows) if d.byte() < 220 else d.choose([{}, dict.fromkeys(ids, 99), dict.fromkeys(ids, "x")])
    row_of["old"] = 0
    with_kv, compressed = d.chance(50), d.chance(50)
    d.num_hostile += 1

    def call(t: Tables) -> Any:
        steps = outputs.StepOutputs(t.all, 16, with_kv_rows=with_kv, with_compressed=compressed)
        steps.apply_step(plan, row_of)

    def follow() -> None:
        for new in plan.scheduled_new_requests:
            for group, given in enumerate(new.block_ids):
                rows = tables.rows[group]
                rows[row_of[new.request_id]] = [int(i) for i in given]

    return Step(call, None, follow)


STEPS: list[Callable[[Decisions, Tables], Step]] = [
    *[edit_one] * 4,
    *[edit_all] * 3,
    two_rows,
    clear_row,
    take_changes,
    *[slots] * 2,
    num_common,
    compress,
    a_step,
]


def run(d: Decisions) -> None:
    ratios = [1 + d.below(3) for _ in range(1 + d.below(2))]
    tables = Tables(1 + d.below(6), 1 + d.below(12), 1 + d.below(8), ratios, 1 + d.below(20))
    for _ in range(MAX_STEPS):
        if d.is_empty or tables.disturbed:
            break
        d.num_hostile = 0
        make_step = d.choose(STEPS)
        step = make_step(d, tables)
        what, answer = outcome(step.call, tables)
        if tables.disturbed:
            for group in tables.groups:
                group.check()
            return
        if d.num_hostile == 0 and step.is_valid is not None and step.is_valid != (what == "returned"):
            raise Finding(f"{make_step.__name__} {what} {plain(answer)!r}, the lists say {step.is_valid}")
        if what == "returned" and d.num_hostile == 0:
            step.follow()
        elif what == "returned" or make_step is a_step:
            # A step whose tokens have no block is refused with its appends applied.
            tables.follow_tables()
        tables.check()
