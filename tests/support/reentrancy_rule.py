"""The rule of docs/reentrancy.md as a program: where Cython code borrows from Python objects, nothing is called that
may run code of the caller.

A function borrows where it takes an item, a pointer or an address out of an object without holding it (``BORROWS``).
From the first look at a size or an item to the last item, innermost loops included, it may call only what is C
(``HARMLESS``), and read attributes only of typed names; so with a ``PyObject *`` up to its last use. What it calls to
raise an exception doesn't count: nothing borrowed is used behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KVPOOL = Path(__file__).resolve().parents[2] / "kvpool"
DOCUMENT = KVPOOL.parent / "docs" / "reentrancy.md"

BORROWS = re.compile(
    r"\b(PyList_GET_ITEM|PyTuple_GET_ITEM|kvpool_array_data|kvpool_ids_data|data_of|read_ids|PyBytes_AS_STRING)\s*\("
    r"|\bbuffer\.data\b"
)
SIZES = re.compile(r"\b(PyList_GET_SIZE|PyTuple_GET_SIZE|kvpool_array_size)\s*\(")
HARMLESS = re.compile(
    r"(kvp_\w+|kvpool_(?!import|new)\w+|Py(List|Tuple|Bytes)_(GET_\w+|Check\w*|AS_STRING)|PyLong_(Check\w*|AsLongAndOverflow)"
    r"|Py_INCREF|Py_TYPE|PyMem_\w+|memcpy|memset|sizeof|range|min|max|len|type|prefetch|incref|set_item|set_new_item"
    # Of kvpool, all in C unless they raise:
    r"|node_in|parse_digest|parse_key|view_of|borrowed_view|data_of|size_of|read_ids|read_id|plain_number|ids_of_size"
    r"|keys_of_size|release_batch|raise_status|raise_table_status|ints_of|slots_out|int_at|num_hashes_of|is_null_block|is_plain_number|new_counts|reserve_ids|check_same|self\.own_ids|self\.find_prefix|self\.make_room_in_map|group\.num_skipped"
    r"|sha256_\w+|self\.sha256_\w+|blocks_for|num_skipped|refuse\w*|too_few_blocks|raise_outside|write_compressed|num_common|write_query_slots|isinstance)"
)
RAISING = re.compile(r"\s*(raise\b|self\.refuse\w*\()")
LINE_OF_TEXT = re.compile(r"(?s)(\"\"\".*?\"\"\"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#[^\n]*)")
HEADER = re.compile(r"^(\s*)(?:cdef|cpdef|def)\s(?!class\b)[^=]*?\b(\w+)\(")
CALL = re.compile(r"(?<![\w.])((?:\w+\.)*\w+)\s*\(|\)\.(\w+)\s*\(")
ATTRIBUTE = re.compile(r"(?<![\w.)\]])([A-Za-z_]\w*)\.(\w+)")
KEYWORDS = {"if", "elif", "while", "and", "or", "not", "in", "is", "return", "for", "else", "yield", "lambda", "print"}
PYTHON_TYPES = {"object", "list", "tuple", "dict", "bytes", "str", "set"}
LIST_METHODS = {"append", "extend"}


@dataclass
class Function:
    """A function of a .pyx or .pxd file: its qualified name, header and body, without texts and comments."""

    name: str
    header: str
    body: list[str] = field(default_factory=list)


def functions_of(path: str, source: str) -> Iterator[Function]:
    blank = LINE_OF_TEXT.sub(lambda text: '""' + "\n" * text.group().count("\n"), source)
    lines = blank.split("\n")
    owner, i = "", 0
    while i < len(lines):
        if lines[i].startswith(("cdef class ", "class ")):
            owner = re.split(r"[(:]", lines[i].removeprefix("cdef ").removeprefix("class "))[0].strip() + "."
        elif lines[i] and not lines[i][0].isspace():
            owner = ""
        match = HEADER.match(lines[i])
        if match is None or lines[i].lstrip().startswith("cdef extern"):
            i += 1
            continue
        header = lines[i]
        while not header.rstrip().endswith(":") and i + 1 < len(lines) and header.count("(") != header.count(")"):
            i += 1
            header += " " + lines[i].strip()
        function = Function(f"{path}: {owner}{match.group(2)}", header)
        indent = len(match.group(1))
        i += 1
        while i < len(lines) and (not lines[i].strip() or len(lines[i]) - len(lines[i].lstrip()) > indent):
            function.body.append(lines[i])
            i += 1
        yield function


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def loop_around(body: list[str], place: int) -> tuple[int, int]:
    """First and last line of the innermost loop around a line; the line itself where there is none."""
    inner = indent_of(body[place])
    for i in range(place, -1, -1):
        if body[i].strip() and (i == place or indent_of(body[i]) < inner):
            inner = indent_of(body[i])
            if re.match(r"\s*(for|while)\b", body[i]):
                ends = [j for j in range(place + 1, len(body)) if body[j].strip() and indent_of(body[j]) <= inner]
                return i, (ends[0] if ends else len(body)) - 1
    return place, place


def borrowing_region(body: list[str]) -> range:
    """Lines from the first look at a size or an item to the last item, with the innermost loops around items."""
    places = [i for i, line in enumerate(body) if BORROWS.search(line)]
    if not places:
        return range(0)
    spans = [loop_around(body, place) for place in places]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    sizes = [i for i, line in enumerate(body[:first]) if SIZES.search(line)]
    return range(sizes[0] if sizes else first, last + 1)


def borrowed_pointers(body: list[str]) -> Iterator[range]:
    """Lines behind each assignment to a ``PyObject *`` up to the last use of it."""
    names = {name for line in body for name in re.findall(r"cdef PyObject \*\s*(\w+)", line)}
    for name in names:
        places = [i for i, line in enumerate(body) if re.search(rf"\b{name}\b", line)]
        starts = [i for i in places if re.search(rf"\b{name} = (?!NULL)", body[i])]
        for number, start in enumerate(starts):
            past = starts[number + 1] if number + 1 < len(starts) else len(body)
            uses = [i for i in places if start < i < past]
            if uses:
                yield range(start + 1, uses[-1] + 1)


def typed_names(function: Function) -> dict[str, str]:
    """Names with a type, and the type: parameters and declarations."""
    names = {"self": "self"}
    for declaration in re.findall(
        r"(?:^|[(,])\s*((?:const\s+)?[\w.]+)\s+\**(\w+)(?:\s+not None)?\s*(?=[,)=])", function.header
    ):
        names[declaration[1]] = declaration[0]
    for line in function.body:
        match = re.match(r"\s*cdef\s+((?:const\s+|unsigned\s+|long\s+)*[\w.]+)\s*(?:\[.*?\])?\s*(.*)", line)
        if match:
            for name in re.findall(r"(?:^|,)\s*\**\s*(\w+)", match.group(2)):
                names[name] = match.group(1)
    return names


def is_last_act(body: list[str], i: int) -> bool:
    """Whether the function returns right behind the line."""
    return (
        i + 1 < len(body) and indent_of(body[i + 1]) == indent_of(body[i]) and body[i + 1].strip().startswith("return")
    )


def violations(function: Function) -> list[str]:
    """What may run code of the caller while something is borrowed."""
    found: list[str] = []
    for region in (borrowing_region(function.body), *borrowed_pointers(function.body)):
        found += (what for what in violations_in(function, region) if what not in found)
    return found


def violations_in(function: Function, region: range) -> Iterator[str]:
    names = typed_names(function)
    is_raising, depth = False, 0
    for i in region:
        line = function.body[i]
        is_raising = is_raising if depth > 0 else RAISING.match(line) is not None or is_last_act(function.body, i)
        depth += line.count("(") - line.count(")")
        if is_raising:
            continue
        for match in CALL.finditer(line):
            called = match.group(1) or "." + match.group(2)
            base, _, method = called.rpartition(".")
            is_of_list = names.get(base) == "list" and method in LIST_METHODS
            if called not in KEYWORDS and not HARMLESS.fullmatch(called) and not is_of_list:
                yield f"{function.name}: calls {called}() in {line.strip()!r}"
        for match in ATTRIBUTE.finditer(line):
            if names.get(match.group(1), "object") in PYTHON_TYPES and match.group(2) not in LIST_METHODS:
                yield f"{function.name}: reads {match.group()} in {line.strip()!r}"


def borrowing_functions(path: str, source: str) -> dict[str, list[str]]:
    """Functions that borrow, and what each does wrong."""
    functions = list(functions_of(path, source))
    return {f.name: violations(f) for f in functions if borrowing_region(f.body) or any(borrowed_pointers(f.body))}


def all_sources() -> dict[str, str]:
    paths = [path for pattern in ("*.pyx", "*.pxd") for path in KVPOOL.rglob(pattern)]
    return {path.relative_to(KVPOOL).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def excused() -> set[str]:
    """Functions that docs/reentrancy.md gives another reason for: rows of its last table."""
    rows = re.findall(r"^\| `([^`]+: [^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return set(rows)
