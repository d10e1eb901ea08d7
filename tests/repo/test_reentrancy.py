"""The rule of docs/reentrancy.md: nothing that may run code of the caller stands between a look and the use of what was
seen. That the rule catches what it is for is shown by code that breaks it."""

from __future__ import annotations

import re

import pytest
from reentrancy_rule import all_sources, borrowing_functions, excused

SOURCES = all_sources()
BORROWING = {
    name: wrong for path, source in SOURCES.items() for name, wrong in borrowing_functions(path, source).items()
}

GOOD = """
cdef class Pool:
    cdef int read(self, list blocks, int32_t *ids) except -1:
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(blocks)):
            ids[i] = node_in(self.home, PyList_GET_ITEM(blocks, i))
            if ids[i] < 0:
                self.refuse(blocks[i], i)
        return 0

    cdef object find(self, object tables, object key):
        cdef PyObject *found = PyDict_GetItemWithError(tables, key)
        cdef object table
        if found is NULL:
            return None
        table = <object>found
        return table.copy()
"""
BROKEN = {
    "a conversion in the loop": (
        "node_in(self.home, PyList_GET_ITEM(blocks, i))",
        "int(<object>PyList_GET_ITEM(blocks, i))",
    ),
    "a parser that may call __index__": (
        "node_in(self.home, PyList_GET_ITEM(blocks, i))",
        "parse_group(<object>PyList_GET_ITEM(blocks, i))",
    ),
    "a log line in the loop": ("            if ids[i] < 0:", "            logger.debug(i)\n            if ids[i] < 0:"),
    "an attribute of an object": (
        "        cdef Py_ssize_t i\n",
        "        cdef Py_ssize_t i, n = PyList_GET_SIZE(blocks)\n        hashes = request.block_hashes\n",
    ),
    "a call between size and item": (
        "        cdef Py_ssize_t i\n",
        "        cdef Py_ssize_t i, n = PyList_GET_SIZE(blocks)\n        self.collector.on_read(n)\n",
    ),
    "a call before a borrowed pointer is held": (
        "        table = <object>found",
        "        key.note()\n        table = <object>found",
    ),
    "an iteration": ("            if ids[i] < 0:", "            first = next(others)\n            if ids[i] < 0:"),
}


def test_nothing_runs_between_a_look_and_a_use() -> None:
    assert len(BORROWING) > 40
    reasons = excused()
    wrong = [what for name, violations in BORROWING.items() if name not in reasons for what in violations]
    assert not wrong, "\n".join(wrong)


def test_no_reason_outlives_its_function() -> None:
    assert excused() == {name for name in excused() if BORROWING.get(name)}


def test_indexing_is_checked_everywhere() -> None:
    for path, source in SOURCES.items():
        assert not re.search(r"boundscheck\s*(=|\()\s*False", source), path


@pytest.mark.parametrize("name", BROKEN)
def test_the_rule_catches(name: str) -> None:
    before, after = BROKEN[name]
    assert borrowing_functions("good", GOOD) == {"good: Pool.read": [], "good: Pool.find": []}
    assert before in GOOD
    assert any(borrowing_functions("broken", GOOD.replace(before, after)).values())


def test_the_rule_catches_what_used_to_crash() -> None:
    """The lookup whose groups emptied their list, and the ids that a collector resized, as they once stood."""
    lookup = """
cdef class Cache:
    def get_cached_block(self, block_hash, groups):
        cdef Py_ssize_t i, n = PyList_GET_SIZE(groups)
        for i in range(n):
            parse_digest(block_hash, parse_group(<object>PyList_GET_ITEM(groups, i)), &key)
"""
    touch = """
cdef class Core:
    def touch_ids(self, ids):
        buffer = read_ids(ids, &data, &n)
        self.touch_nodes(buffer.data, n, "touch_ids")
        for i in range(n):
            self.metrics_collector.on_block_accessed(view_of(self.home, buffer.data[i]))
"""
    for source in (lookup, touch):
        assert all(borrowing_functions("old", source).values())
