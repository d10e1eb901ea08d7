"""The stubs of the compiled modules say what the binaries have, and what the Python half says of the same calls."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from conftest import IS_PURE_PYTHON

import kvpool
from kvpool import reference
from kvpool.cache.manager import KVCacheManagerBase
from kvpool.pool import list_tables
from kvpool.recording import told
from kvpool.reference.request import TokenList

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kvpool").rglob("*.pyx"))
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES]
TYPED_USE = ROOT / "tests" / "support" / "typed_use.py"

# Cython's own, and what only keeps an object from being copied.
ALLOWED = r""".*\.__(reduce|setstate)_cython__
.*\.__(deep)?copy__
"""
# The Python half of each class and function: the annotations are the same.
TWINS: dict[str, Any] = {
    "BlockAllocator": reference.BlockPool,
    "PrefixCache": reference.BlockPool,
    "BlockPoolCore": reference.BlockPool,
    "KVCacheBlock": reference.KVCacheBlock,
    "FreeKVCacheBlockQueue": reference.FreeKVCacheBlockQueue,
    "BlockHashToBlockMap": reference.BlockHashToBlockMap,
    "RequestCore": reference.Request,
    "TokenList": TokenList,
    "KVCacheManagerCore": KVCacheManagerBase,
    **{name: value for name, value in vars(list_tables).items() if inspect.isfunction(value)},
}
if IS_PURE_PYTHON:
    TWINS |= {name: getattr(told, name) for name in told.__all__}
# The native classes where the twin has its own, or a plain list.
OTHER_TYPES = {"BlockSequence": "list[KVCacheBlock]", "'GPU'": "MEDIUM_GPU"}
# Types of rooms above native/, which its stubs can't name.
FROM_ABOVE = r"\b(Request|KVCacheBlocks|BlockPoolBase)\b"

Parameters = list[tuple[str, str, bool]]  # name, kind, whether there is a default


def read_stub(path: Path) -> ast.Module:
    return ast.parse(path.with_suffix(".pyi").read_text())


def functions_of(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    """By name, the getter where a property has a setter too."""
    found: dict[str, ast.FunctionDef] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def parameters_of(arguments: ast.arguments) -> Parameters:
    plain = [*arguments.posonlyargs, *arguments.args]
    num_required = len(plain) - len(arguments.defaults)
    found = [(each.arg, "POSITIONAL_OR_KEYWORD", place >= num_required) for place, each in enumerate(plain)]
    found += [
        (each.arg, "KEYWORD_ONLY", default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    return [each for each in found if each[0] != "self"]


def constructor_in(source: str, name: str) -> ast.arguments | None:
    """What a compiled class is made with, read from its source: C types are dropped."""
    body = re.split(rf"^cdef class {name}\b", source, maxsplit=1, flags=re.M)[1]
    body = re.split(r"^\S", body, maxsplit=1, flags=re.M)[0]
    found = re.search(r"^    def __init__\((.*?)\):$", body, flags=re.M | re.S)
    if found is None:
        return None
    arguments = re.sub(r" not None\b", "", found[1])
    arguments = re.sub(r"\b(?:unsigned |const )?\w+ (?=\w+\s*(?:[,=]|$))", "", arguments)
    function = ast.parse(f"def __init__({arguments}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def classes_with_constructors() -> list[Any]:
    found = []
    for path, name in zip(SOURCES, NAMES):
        for node in read_stub(path).body:
            if isinstance(node, ast.ClassDef) and f"cdef class {node.name}" in path.read_text():
                constructor = functions_of(node.body).get("__init__")
                if constructor is not None:
                    found.append(pytest.param(path, name, node.name, constructor.args, id=node.name))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_a_compiled_module_has_a_stub_with_the_same_public_names(path: Path) -> None:
    pattern = r"^__all__(?:: list\[str\])? = (\[[^\]]*\])"
    public = [re.search(pattern, path.with_suffix(suffix).read_text(), flags=re.M) for suffix in (".pyx", ".pyi")]
    assert public[0] and public[1], f"{path.name} or its stub has no __all__"
    assert ast.literal_eval(public[0][1]) == ast.literal_eval(public[1][1])


def test_there_is_no_stub_without_a_module() -> None:
    assert sorted((ROOT / "kvpool").rglob("*.pyi")) == [path.with_suffix(".pyi") for path in SOURCES]


@pytest.mark.skipif(IS_PURE_PYTHON, reason="there are no binaries")
def test_the_stubs_agree_with_the_binaries(tmp_path: Path) -> None:
    """Those of the package that is imported, which may be an installed one."""
    pytest.importorskip("mypy.stubtest")
    installed = Path(kvpool.__file__).parents[1]
    allowed = tmp_path / "allowed"
    allowed.write_text(ALLOWED)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy.stubtest", *NAMES, "--concise"),
            *("--mypy-config-file", ROOT / "pyproject.toml"),
            *("--ignore-disjoint-bases", "--allowlist", allowed, "--ignore-unused-allowlist"),
        ],
        env={**os.environ, "MYPYPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(IS_PURE_PYTHON, reason="there are no binaries")
@pytest.mark.parametrize(("path", "module", "name", "stub"), classes_with_constructors())
def test_a_compiled_class_is_made_with_what_its_signature_and_its_stub_say(
    path: Path, module: str, name: str, stub: ast.arguments
) -> None:
    shown = inspect.signature(getattr(import_module(module), name)).parameters.values()
    of_binary = [(p.name, p.kind.name, p.default is not p.empty) for p in shown]
    of_stub = parameters_of(stub)
    assert of_binary == of_stub
    source = constructor_in(path.read_text(), name)
    assert source is None or parameters_of(source) == of_stub


@pytest.mark.parametrize(("path", "name"), list(zip(SOURCES, NAMES)), ids=NAMES)
def test_the_stub_has_the_types_of_the_python_half(path: Path, name: str) -> None:
    for node in read_stub(path).body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name not in TWINS:
            continue
        twin = TWINS[node.name]
        members = functions_of(node.body) if isinstance(node, ast.ClassDef) else {node.name: node}
        for member, stub in members.items():
            other = twin if isinstance(node, ast.FunctionDef) else inspect.getattr_static(twin, member, None)
            function = other.fget if isinstance(other, property) else getattr(other, "__func__", other)
            if not inspect.isfunction(function):
                continue  # a plain attribute of the twin
            theirs = ast.parse(dedent(inspect.getsource(function))).body[0]
            assert isinstance(theirs, ast.FunctionDef)
            ours = f"({ast.unparse(stub.args)}) -> {ast.unparse(stub.returns)}".replace("/, ", "").replace(", /", "")
            for native, python in OTHER_TYPES.items():
                ours = re.sub(rf"(?<!\w){native}(?!\w)", python, ours)
            wanted = f"({ast.unparse(theirs.args)}) -> {ast.unparse(theirs.returns)}"
            assert ours == re.sub(FROM_ABOVE, "Any", wanted).replace("Any | None", "Any"), f"{node.name}.{member}"


@pytest.mark.parametrize(("checker", "python"), [("mypy", "--python-executable"), ("pyright", "--pythonpath")])
def test_type_checkers_see_the_types_of_each_public_class(checker: str, python: str) -> None:
    pytest.importorskip(checker)
    command = [checker, python, sys.executable, *(["--strict"] if checker == "mypy" else [])]
    done = subprocess.run(
        [sys.executable, "-m", *command, TYPED_USE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_type_checkers_read_also_runs() -> None:
    done = subprocess.run([sys.executable, TYPED_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
