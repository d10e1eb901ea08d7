"""What the levels rely on in vLLM, and what that relies on: each name of it, changed in the source or replaced in the
process, leaves vLLM as it is, with one warning that names it."""

from __future__ import annotations

import ast
import functools
import logging
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import announcement, closure, drift, levels, sources
from kvpool.integrations.vllm.members import Member

HAS_VLLM = sources.is_installed()
VERSION = levels.vllm_version() if HAS_VLLM else ""
MEMBERS = drift.known_versions()[VERSION].members if VERSION in drift.known_versions() else {}
REFUSED = "kvpool: not active, vLLM runs as it is: "

# ---- the walk ----

MODULES = {
    "vllm/v1/request.py": """
from vllm.plain import outside as inside, unused
from vllm import envs, logger as logs
import collections
from . import pieces
from .pieces import half

LIMIT = 3

class Base:
    def inherited(self): return LIMIT

class Target(Base):
    def method(self, number: Annotated) -> Annotated:
        return self.inherited() + self.other() + number.attribute

    def other(self):
        from vllm.plain import late
        return half(late()) + pieces.whole() + collections.OrderedDict() + envs.X + logs.y

    def third(self): return inside()

class Annotated: pass
""",
    "vllm/v1/pieces.py": """
def half(): return _quarter()
def whole(): pass
def _quarter(): pass
""",
    "vllm/v1/__init__.py": "",
    "vllm/__init__.py": "",
    "vllm/plain.py": """
def outside(): return further()
def further(): pass
def late(): pass
def unused(): pass
""",
    "vllm/envs.py": "X = 1",
    "vllm/logger.py": "y = 1",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for path, text in MODULES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(closure, "FOLLOWED", ("vllm.v1.request", "vllm.v1.pieces"))
    yield tmp_path
    sources.tree_of.cache_clear()


def test_names_are_followed_through_imports_modules_and_self(folder: Path) -> None:
    module = "vllm.v1.request"
    assert closure.closure_of([f"{module}.Target.other"], folder).keys() == {
        f"{module}.Target.other",
        f"{module}.half",
        "vllm.v1.pieces.half",
        "vllm.v1.pieces._quarter",
        "vllm.v1.pieces.whole",
        "vllm.plain.late",
    }
    of_method = closure.closure_of([f"{module}.Target.method"], folder)
    assert {f"{module}.Base.inherited", f"{module}.LIMIT", "vllm.plain.late"} <= of_method.keys()
    assert not {f"{module}.Annotated", f"{module}.Target.third"} & of_method.keys()


def test_a_class_is_taken_as_a_whole_and_the_border_holds(folder: Path) -> None:
    found = closure.closure_of(["vllm.v1.request.Target"], folder)
    assert {"vllm.v1.request.Base", "vllm.v1.request.inside", "vllm.plain.outside", "vllm.v1.request.half"} <= set(
        found
    )
    assert "vllm.plain.further" not in found, "named in a module that is not followed"
    assert "vllm.plain.unused" not in found
    assert not [name for name in found if name.startswith(("vllm.envs", "vllm.logger"))]


# ---- each member, changed in the source ----


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The files of the installed vLLM in which a member is."""
    if not MEMBERS:
        pytest.skip("no vLLM that is known")
    return list(drift.known_versions()[VERSION].files)


@pytest.fixture
def lines(files: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the plugin logs, with a stock vLLM before and after."""
    integration.unregister()
    for path in files:
        import_module(sources.module_of_file(path))  # what is imported later would take what a test has put there
    monkeypatch.setenv(levels.VARIABLE, "1")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    announcement.logger.addHandler(handler)
    yield records
    announcement.logger.removeHandler(handler)
    integration.unregister()


def warning(lines: list[logging.LogRecord]) -> str:
    """The one line of a registration that left vLLM as it is."""
    integration.register()
    status = integration.status()
    assert status is not None and status.is_refusal and status.levels == ()
    (line,) = lines
    assert line.levelno == logging.WARNING and line.getMessage().startswith(REFUSED)
    return line.getMessage().removeprefix(REFUSED)


def names_in(message: str) -> list[str]:
    return [part.split()[0].rstrip(":") for part in message.split("; ")]


@pytest.fixture(scope="module")
def copied(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of vLLM in which a member is."""
    folder = tmp_path_factory.mktemp("sources")
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources.installed_sources() / path, folder / path)
    return folder


def changed_text(text: str, node: ast.stmt, member: Member) -> str:
    """A source in which what a member is is another."""
    rows = text.splitlines(keepends=True)
    body = getattr(node, "body", None)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        before = "".join(rows[node.lineno - 1 : node.end_lineno])
        module = getattr(node, "module", "") or ""
        after = before.replace(module, f"{module}_of_others", 1)
        rows[node.lineno - 1 : node.end_lineno] = [after]
    elif body is not None:
        last = body[-1]
        rows.insert(last.end_lineno, " " * last.col_offset + "patched = 1\n")
    elif getattr(node, "value", None) is not None:
        rows[node.lineno - 1 : node.end_lineno] = [
            " " * node.col_offset + ast.unparse(node).replace(" = ", " = 0 or ", 1) + "\n"
        ]
    else:
        rows[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + ast.unparse(node) + " = None\n"]
    return "".join(rows)


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if member.exists])
@pytest.mark.vllm
def test_a_member_that_was_patched_in_the_source(
    name: str, copied: Path, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, node = sources.place_of(name, copied), sources.node_of(name, copied)
    assert place is not None and node is not None
    monkeypatch.setattr(integration, "installed_sources", lambda: copied)
    # A change moves no other member, so that only the member itself, and a class around it, may be named.
    allowed = {name, name.rpartition(".")[0]}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        allowed |= {f"{name.rpartition('.')[0]}.{taken}" for taken in sources.names_bound_by(node)}
    elif isinstance(node, ast.ClassDef):
        allowed |= {other for other in MEMBERS if other.startswith(f"{name}.")}
    stock = place.path.read_text()
    try:
        place.path.write_text(changed_text(stock, node, MEMBERS[name]))
        sources.tree_of.cache_clear()
        monkeypatch.setattr(drift, "MAX_NAMED", 100)
        named = names_in(warning(lines))
        assert name in named and set(named) <= allowed
    finally:
        place.path.write_text(stock)
        sources.tree_of.cache_clear()


@pytest.mark.vllm
def test_a_member_that_is_new_in_the_source(
    copied: Path, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [name for name, member in MEMBERS.items() if not member.exists]
    monkeypatch.setattr(integration, "installed_sources", lambda: copied)
    for name in absent:
        place = sources.place_of(name, copied)
        assert place is not None
        with place.path.open("a") as file:
            file.write(f"\ndef {place.names[-1]}(): pass\n")
    if absent:
        assert names_in(warning(lines)) == absent


# ---- each member, replaced in the process ----


def wrapped(function: Any) -> Any:
    """A function in the place of another, with its name, as plugins make them; descriptors as descriptors."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(wrapped(function.__func__))
    if isinstance(function, property):
        return property(wrapped(function.fget), function.fset)
    if isinstance(function, functools.cached_property):
        return functools.cached_property(wrapped(function.func))

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


def holder_of(name: str) -> tuple[Any, str, Any]:
    """Where a member is in this process: its owner, its name there, and what it is."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if sources.module_file(module, sources.installed_sources()) is not None:
            owner: Any = import_module(module)
            for part in parts[length:-1]:
                owner = getattr(owner, part)
            return owner, parts[-1], vars(owner)[parts[-1]]
    raise AssertionError(name)


def replaceable() -> list[str]:
    """Members that can be told in a process; those of modules that exist for type checkers alone have no value."""
    return [name for name, member in MEMBERS.items() if member.definition is not None or member.is_definition]


@pytest.mark.parametrize("name", replaceable())
@pytest.mark.vllm
def test_a_member_that_another_plugin_has_replaced(
    name: str, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = MEMBERS[name]
    try:
        owner, attribute, value = holder_of(name)
    except KeyError:
        assert member.definition is not None, "only an import can be for type checkers"
        pytest.skip("imported for type checkers alone")
    monkeypatch.setattr(drift, "MAX_NAMED", 100)
    if member.functions is not None or isinstance(value, type):
        # One with functions is told by them, whatever it calls itself.
        module = value.__module__ if member.functions else "plugin"
        other: Any = type(value.__name__, (), {"__module__": module, "__qualname__": value.__qualname__})
    elif member.value is not None:
        other = f"not {value}"
    else:
        other = wrapped(value)
    monkeypatch.setattr(owner, attribute, other)
    named = names_in(warning(lines))
    if member.functions:
        assert any(each.startswith(f"{name}.") for each in named)
    else:
        assert name in named


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if member.functions])
@pytest.mark.vllm
def test_a_method_that_another_plugin_has_replaced(
    name: str, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, class_name = name.rpartition(".")
    owner = getattr(import_module(module), class_name)
    for function in MEMBERS[name].functions or ():
        stock = vars(owner)[function]
        try:
            setattr(owner, function, wrapped(stock))
            assert f"{name}.{function}" in names_in(warning(lines))
        finally:
            setattr(owner, function, stock)
            integration.unregister()
            lines.clear()


@pytest.mark.vllm
def test_a_method_that_another_plugin_has_added(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = import_module("vllm.v1.core.single_type_kv_cache_manager").FullAttentionManager
    assert "allocate_new_blocks" not in vars(manager)
    monkeypatch.setattr(manager, "allocate_new_blocks", wrapped(manager.allocate_new_blocks), raising=False)
    (named,) = names_in(warning(lines))
    assert named == "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.allocate_new_blocks"


@pytest.mark.vllm
def test_a_level_is_not_hindered_by_what_another_relies_on(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = import_module("vllm.v1.worker.block_table")
    monkeypatch.setattr(tables, "get_block_table_width", wrapped(tables.get_block_table_width))
    monkeypatch.setenv(levels.VARIABLE, "pool,manager,hasher")
    integration.register()
    status = integration.status()
    assert status is not None and status.levels == ("pool", "manager", "hasher")
