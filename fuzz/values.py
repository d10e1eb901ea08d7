"""Arguments that no caller should pass, and that some caller will.

A maker is a function of a half (see ``pairs``): both halves get a value of their own that behaves alike. Values that
call back into the half, or change what is being read, mark it as ``disturbed``: from then on only crashes and broken
invariants count, since the order in which two implementations ask for a number is nobody's promise.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fuzz.decisions import Decisions

Maker = Callable[[Any], Any]


class FuzzError(Exception):
    """Raised by hostile values; it has to come out of the call as it is."""


EDGES = (-1, -(2**31), 10**5, 2**64, 2**70)


def constant(value: Any) -> Maker:
    return lambda half: value


class Index:
    """An int by ``__index__``, which first does something."""

    def __init__(self, value: int, half: Any, action: Maker | None) -> None:
        self.value, self.half, self.action = value, half, action

    def __index__(self) -> int:
        if self.action is not None:
            self.action(self.half)
        return self.value


class IntSubclass(int):
    pass


def raises(half: Any) -> None:
    raise FuzzError("from a callback")


def any_int(d: Decisions, first: int, last: int, action: Maker | None = None) -> Maker:
    """Mostly a plain int of first .. last."""
    how = d.byte()
    value = first + d.below(last - first + 1)
    if how < 215:
        return constant(value)
    d.num_hostile += 1
    kind = how % 14
    simple: list[Any] = [
        True,
        False,
        None,
        str(value),
        float(value),
        np.int64(value),
        np.int32(value),
        IntSubclass(value),
    ]
    if kind < len(simple):
        return constant(simple[kind])
    if kind == 8:
        return constant(d.choose(EDGES))
    if kind == 9:
        return lambda half: Index(value, half, None)
    if kind == 10:
        return lambda half: Index(value, half, raises)
    if kind == 11:
        return constant(np.array([value, value]))
    if kind == 12:
        return constant(float("nan"))
    return lambda half: Index(value, half, action)


class Raising:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise FuzzError(name)

    def __eq__(self, other: object) -> bool:
        raise FuzzError("==")

    def __hash__(self) -> int:
        raise FuzzError("hash")

    def __len__(self) -> int:
        raise FuzzError("len")

    def __iter__(self) -> Iterator[Any]:
        raise FuzzError("iter")

    def __bool__(self) -> bool:
        raise FuzzError("bool")


class Reading(list):  # type: ignore[type-arg]
    """A list that does something when it is iterated over, by index or length."""

    def __init__(self, items: list[Any], half: Any, action: Maker) -> None:
        super().__init__(items)
        self.half, self.action = half, action

    def __iter__(self) -> Iterator[Any]:
        for index in range(list.__len__(self)):
            if index == 1:
                self.action(self.half)
                list.clear(self)
            if index < list.__len__(self):
                yield list.__getitem__(self, index)

    def __len__(self) -> int:
        self.action(self.half)
        return list.__len__(self)


class NotAList:
    """A sequence by ``__getitem__`` and ``__len__`` alone, which may lie about its length."""

    def __init__(self, items: list[Any], lie: int) -> None:
        self.items, self.lie = items, lie

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return max(len(self.items) + self.lie, 0)


def junk(d: Decisions) -> Maker:
    d.num_hostile += 1
    values: list[Maker] = [
        constant(None),
        constant(3),
        constant("block"),
        constant(b""),
        constant(object),
        lambda half: Raising(),
        lambda half: object(),
        lambda half: half.backend.KVCacheBlock(2),
        lambda half: half.stranger,
        constant([]),
        constant({}),
        constant(float("inf")),
    ]
    return d.choose(values)


def any_sequence(d: Decisions, makers: list[Maker], action: Maker) -> Maker:
    """The items in a list, mostly."""
    how = d.byte()
    if how < 200:
        return lambda half: [make(half) for make in makers]
    d.num_hostile += 1
    kind, lie = how % 8, d.below(3) - 1

    def make_sequence(half: Any) -> Any:
        items = [make(half) for make in makers]
        if kind == 0:
            return tuple(items)
        if kind == 1:
            return iter(items)
        if kind == 2:
            return (item for item in items)
        if kind == 3:
            return Reading(items, half, action)
        if kind == 4:
            return NotAList(items, lie)
        if kind == 5:
            return dict.fromkeys(range(len(items)))
        if kind == 6:
            return Raising()
        return None

    return make_sequence


def any_id_array(d: Decisions, ids: list[int]) -> Maker:
    """The ids as an int32 array, mostly."""
    how = d.byte()
    if how < 180:
        return lambda half: np.array(ids, np.int32)
    d.num_hostile += 1
    kind = how % 14

    def make_ids(half: Any) -> Any:
        plain = np.array(ids, np.int32)
        if kind == 0:
            return np.array(ids, np.int64)
        if kind == 1:
            return np.array(ids, np.float64)
        if kind == 2:
            return np.repeat(plain, 2)[::2]
        if kind == 3:
            return plain.reshape(1, -1)
        if kind == 4:
            plain.flags.writeable = False
            return plain
        if kind == 5:
            return plain.astype(">i4")
        if kind == 6:
            return array("i", ids)
        if kind == 7:
            return memoryview(plain)
        if kind == 8:
            return plain.tobytes()
        if kind == 9:
            return list(ids)
        if kind == 10:
            return plain.view(np.uint32)
        if kind == 11:
            return plain[::-1]
        if kind == 12:
            return np.zeros((), np.int32)
        return Raising()

    return make_ids
