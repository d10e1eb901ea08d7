"""Imports point one way. The rooms of the package, lowest first: a module imports from rooms below its own and from
its own, and no modules import each other, however many stand between them. What only a type checker reads counts too.

Every room has a place here: a new one is added where it belongs. docs/architecture.md says what is in each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "kvpool"
CSRC = PACKAGE.parent / "csrc"

# Rooms beside each other know nothing of each other.
ROOMS = [
    ["_version", "errors"],
    ["common"],
    ["network", "hashing"],
    ["requests", "events"],
    ["pool"],
    ["metrics"],
    ["native", "reference"],
    ["backend"],
    ["cache", "list_tables"],
    ["recording"],
    ["kv_cache_manager"],
    ["scheduler"],
    ["worker"],
    ["engine"],
    ["replay", "playback", "integrations"],
    ["cli"],
    ["__init__"],
]
PLACE_OF = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}
# The tables of workers, who have numpy; nothing that a scheduler imports needs them.
WITH_NUMPY = {"native/block_rows", "native/step_outputs"}
LIBC = {
    "assert.h",
    "errno.h",
    "limits.h",
    "stdarg.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",
    "stdlib.h",
    "string.h",
    "sys/mman.h",
    "unistd.h",
}


class Import:
    def __init__(self, module: str, is_lazy: bool) -> None:
        self.module, self.is_lazy = module, is_lazy


def sources() -> list[Path]:
    found = [path for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern)]
    assert len(found) > 30
    return sorted(found)


def room_of(path: Path) -> str:
    """The first folder below the package, or the module where there is none."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    return ".".join(("kvpool", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path) for path in sources()}


def imports_in(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from members(child.module or "", (alias.name for alias in child.names), is_lazy)
        else:
            yield from imports_in(child, is_lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def members(module: str, names: Iterator[str], is_lazy: bool) -> Iterator[Import]:
    """``from module import names``: modules themselves where the names are modules."""
    for name in names:
        yield Import(f"{module}.{name}" if f"{module}.{name}" in MODULES else module, is_lazy)


FROM = re.compile(r"^( *)from (\S+) c?import +(?:\(([^)]*)\)|([^\n#]*(?:\\\n[^\n#]*)*))", re.MULTILINE)
PLAIN = re.compile(r"^( *)c?import (\S+)", re.MULTILINE)


def imports_of(path: Path) -> list[Import]:
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        return list(imports_in(ast.parse(text), False))
    found = [Import(module, bool(indent)) for indent, module in PLAIN.findall(text)]
    for indent, module, in_parentheses, plain in FROM.findall(text):
        names = re.findall(r"(\w+)(?:\s+as\s+\w+)?\s*(?:,|$)", in_parentheses or plain)
        found.extend(members(module, iter(names), bool(indent)))
    return found


def own_imports(path: Path) -> set[str]:
    found = {each.module for each in imports_of(path)}
    return {module for module in found if module == "kvpool" or module.startswith("kvpool.")}


def test_every_room_has_a_place() -> None:
    assert {room_of(path) for path in sources()} == PLACE_OF.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    for module in own_imports(path) - {name_of(path)}:
        assert module != "kvpool" or room == "cli", f"{path.name} imports the package itself"
        other = module.split(".")[1] if module != "kvpool" else "_version"
        assert other == room or PLACE_OF[other] < PLACE_OF[room], f"{room} imports {module} from above or beside it"


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        graph.setdefault(name_of(path), set()).update(own_imports(path) - {name_of(path)})
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join((*above[above.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_only_workers_and_integrations_import_torch_and_only_the_integration_imports_vllm() -> None:
    seen = 0
    for path in sources():
        where = path.relative_to(PACKAGE).as_posix()
        for imported in imports_of(path):
            top = imported.module.split(".")[0]
            seen += 1
            if top == "torch":
                assert where.startswith(("worker/", "integrations/")), f"{where} imports torch"
            if top == "vllm":
                is_lazy_target = where == "replay/implementations.py" and imported.is_lazy
                assert where.startswith("integrations/vllm/") or is_lazy_target, f"{where} imports vllm"
            is_low = PLACE_OF[room_of(path)] < PLACE_OF["scheduler"]
            if top == "numpy" and is_low and where.partition(".")[0] not in WITH_NUMPY:
                assert imported.is_lazy, f"{where} imports numpy with the package"
    assert seen > 100


def test_the_core_knows_no_python() -> None:
    files = [path for path in CSRC.rglob("*") if path.suffix in (".c", ".h")]
    assert len(files) >= 5
    for path in files:
        for line in re.findall(r"^\s*#\s*include\s+(.+?)\s*(?://.*|/\*.*)?$", path.read_text(), re.MULTILINE):
            own = re.fullmatch(r'"(kvp\w*\.h)"', line)
            libc = re.fullmatch(r"<([\w/]+\.h)>", line)
            assert (own and (CSRC / own[1]).exists()) or (libc and libc[1] in LIBC), f"{path.name} includes {line}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_leading_underscore_keeps_a_name_within_its_room(path: Path) -> None:
    room, text = room_of(path), path.read_text()
    for module, names in re.findall(r"^ *from (kvpool[\w.]*) c?import ([^(\n]+|\([^)]*\))", text, flags=re.M):
        if module.split(".")[1:2] in ([room], ["_version"]):  # a version has one by custom
            continue
        imported = module + " " + re.sub(r" as \w+", "", names)
        private = [name for name in re.split(r"[\s,.()]+", imported) if name[:1] == "_" and name != "_version"]
        assert not private, f"{path.name} imports {private} of {module}"
