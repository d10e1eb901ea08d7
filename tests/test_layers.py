"""Imports point one way. The layers, lowest first; a module imports only from layers below its own, a
package from itself too.

Every module has a place here: a new one is added to the layer where it belongs, or to a new layer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvpool"
CSRC = PACKAGE.parent / "csrc"

LAYERS = [
    ["errors", "_version", "one_line", "request_status", "token_ids", "byte_budget", "held_listener"],
    ["arguments", "environment", "curve", "event_replay", "peer_limits"],
    ["json_lines", "sampling_params", "clean_exit"],
    ["_kvp", "_kvp_block_hash", "_kvp_block_table", "_memory", "_numpy", "_int_arrays", "_openssl"],
    ["stats", "dtypes", "event_endpoints", "prometheus", "_skipped_frees"],
    ["watched_socket"],
    ["block_hash", "events", "metrics", "event_sockets", "kv_cache_spec"],
    ["event_publisher", "sizing", "kv_cache_blocks", "_block_hashing"],
    ["_batch", "_block", "_hash", "_list_table_operations", "_map_entries", "_request_operations"],
    ["_block_sequence", "_queue", "_map", "_pool_views", "_request", "_tables"],
    ["_allocator", "_table_outputs"],
    ["_prefix_cache"],
    ["_core", "_list_tables", "_manager", "_told"],
    ["_pool_events"],
    ["_pool_operations"],
    ["reference"],
    ["_backend"],
    ["block_pool", "block_hasher", "list_tables", "request"],
    ["managers"],
    ["coordinator"],
    ["allocation_checks", "kv_cache_queries"],
    ["kv_cache_withdrawal"],
    ["_manager_operations"],
    ["recording"],
    ["reference.kv_cache_manager"],
    ["kv_cache_manager"],
    ["scheduler"],
    ["replay", "worker", "integrations"],
    ["doctor", "generation", "playback"],
    ["cli", "__main__"],
    ["__init__"],
]
LAYER_OF = {name: place for place, names in enumerate(LAYERS) for name in names}
# The tables of workers, who have numpy; nothing that a scheduler imports needs them.
WITH_NUMPY = {"_tables.pyx", "_table_outputs.pyx"}
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
    found = [path for pattern in ("*.py", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern)]
    assert len(found) > 30
    return sorted(found)


def part_of(path: Path) -> str:
    """The name of the layers that a source belongs to: its package below kvpool, or its module."""
    relative = path.relative_to(PACKAGE)
    if relative.as_posix() == "reference/kv_cache_manager.py":
        return "reference.kv_cache_manager"  # the twin's pool is below the managers, its cache manager above them
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def names_in(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
    """Imports of a syntax tree, without those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in {
            n.id for n in ast.walk(child.test) if isinstance(n, ast.Name)
        }:
            is_only_for_types = isinstance(child.test, ast.Name)
            for statement in child.orelse if is_only_for_types else [*child.body, *child.orelse]:
                yield from names_in(ast.Module([statement], []), is_lazy)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            if child.module == "kvpool":
                yield from (Import(f"kvpool.{alias.name}", is_lazy) for alias in child.names)
            else:
                yield Import(child.module or "", is_lazy)
        else:
            yield from names_in(child, is_lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def imports_of(path: Path) -> list[Import]:
    text = path.read_text()
    if path.suffix == ".py":
        return list(names_in(ast.parse(text), False))
    lines = re.findall(r"^( *)(?:from (\S+) c?import|c?import (\S+))", text, re.MULTILINE)
    return [Import(one or other, bool(indent)) for indent, one, other in lines]


def test_every_module_has_a_layer() -> None:
    assert {part_of(path) for path in sources()} <= LAYER_OF.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    part = part_of(path)
    for imported in imports_of(path):
        if imported.module == "kvpool":
            pytest.fail(f"{path.name} imports the package itself")
        if imported.module.startswith("kvpool."):
            other = imported.module.split(".")[1]
            is_below = LAYER_OF[other] < LAYER_OF[part]
            assert other == part or is_below, f"{part} imports {imported.module} from above or beside it"


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        graph.setdefault(name, set()).update(
            i.module.removeprefix("kvpool.") for i in imports_of(path) if i.module.startswith("kvpool.")
        )
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a cycle: {' -> '.join((*above, name))}"
        if name not in done:
            for other in graph.get(name, graph.get(f"{name}.__init__", set())) - {name}:
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
                is_driver = where == "replay/drivers.py" and imported.is_lazy
                assert where.startswith("integrations/vllm/") or is_driver, f"{where} imports vllm"
            if top == "numpy" and "/" not in where and where not in WITH_NUMPY:
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
