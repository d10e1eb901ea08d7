"""vLLM's source as it lies on the disk: where a dotted name is defined, and a fingerprint of what is defined there.

Nothing is imported; the folder may hold an unpacked wheel of another version.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

# Where nothing of what a program does is said, and how Python's versions differ in what they say.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment"})
PACKAGE = "vllm"
MAX_ALIASES = 8

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def installed_sources() -> Path:
    """The folder in which the installed package ``vllm`` lies; the package is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:  # no origin: just some folder of that name
        raise ModuleNotFoundError("vLLM is not installed")
    return Path(spec.origin).parents[1]


def is_installed() -> bool:
    """Whether ``installed_sources`` finds something."""
    try:
        return installed_sources().is_dir()
    except ModuleNotFoundError:
        return False


class Place(NamedTuple):
    """Where a dotted name points.

    Attributes:
        path: source file of the longest prefix that is a module.
        names: what follows that prefix.
    """

    path: Path
    names: tuple[str, ...]


def place_of(target: str, sources: Path) -> Place | None:
    """Where a dotted name points, None if no part of it is a module."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        path = module_file(".".join(parts[:length]), sources)
        if path is not None:
            return Place(path, tuple(parts[length:]))
    return None


def module_file(module: str, sources: Path) -> Path | None:
    """The source of a module or package."""
    base = sources.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def module_name(path: Path, sources: Path) -> str:
    """The name of the module in a file."""
    return module_of_file(path.relative_to(sources).as_posix())


def module_of_file(path: str) -> str:
    """The name of the module in a file below the folder of the package, with ``/`` between the parts of its path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---- definitions ----


def node_of(target: str, sources: Path) -> ast.stmt | None:
    """The statement that gives a dotted name its value: a definition, an assignment, or where its module imports it."""
    place = place_of(target, sources)
    if place is None or not place.names:
        return None
    node: ast.AST | None = tree_of(place.path)
    for name in place.names:
        node = None if node is None else defined_in(node, name)
    return node if isinstance(node, ast.stmt) else None


def bindings_of(target: str, sources: Path) -> list[ast.stmt]:
    """All statements of its module or class that give a dotted name a value; of several the last one counts, or which
    one it is depends on the process."""
    owner, _, name = target.rpartition(".")
    place = place_of(owner, sources)
    if place is None:
        return []
    scope = node_of(owner, sources) if place.names else tree_of(place.path)
    return [] if scope is None else [part for part in statements_of(scope) if name in names_bound_by(part)]


@lru_cache(maxsize=64)
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file; ``tree_of.cache_clear()`` forgets all trees."""
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_in(scope: ast.AST, name: str) -> ast.stmt | None:
    """The last statement of a module or class, also below if and try, that gives a name its value."""
    last = None
    for statement in statements_of(scope):
        if name in names_bound_by(statement):
            last = statement
    return last


def statements_of(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, also below if and try."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(scope, field, []):
            if isinstance(child, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                yield from statements_of(child)
            else:
                yield child


def names_bound_by(statement: ast.stmt) -> list[str]:
    """The names to which a statement gives values."""
    if isinstance(statement, (*Function, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def is_set_later(target: str, sources: Path) -> bool:
    """Whether some function of its module gives a global another value (``global``)."""
    place = place_of(target, sources)
    if place is None:
        return False
    parts = ast.walk(tree_of(place.path))
    return any(isinstance(part, ast.Global) and place.names[-1] in part.names for part in parts)


def definition_of(target: str, sources: Path) -> str | None:
    """The name under which something is defined, wherever the target's module has it from.

    Returns:
        The target itself if its module defines it; a module's name for a module; None for what is not in vLLM.
    """
    for _ in range(MAX_ALIASES):
        place = place_of(target, sources) if target.partition(".")[0] == PACKAGE else None
        if place is None:
            return None
        if not place.names:
            return module_name(place.path, sources)
        first = place.names[0]
        statement = defined_in(tree_of(place.path), first)
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            return None if statement is None else target
        target = ".".join((_origin(statement, first, place, sources), *place.names[1:]))
    return None


def origin_of(target: str, sources: Path) -> str:
    """The dotted name that a module imports as the target."""
    place, statement = place_of(target, sources), node_of(target, sources)
    if place is None or not isinstance(statement, (ast.Import, ast.ImportFrom)):
        raise ValueError(f"{target} is not imported where it is")
    return _origin(statement, place.names[-1], place, sources)


def _origin(statement: ast.Import | ast.ImportFrom, name: str, place: Place, sources: Path) -> str:
    taken = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    if isinstance(statement, ast.Import):
        return taken
    return f"{_module_of_import(statement, module_name(place.path, sources), place.path)}.{taken}"


def imported_names(statement: ast.ImportFrom, module: str, path: Path) -> list[str]:
    """The dotted names that a ``from`` import in a module takes."""
    origin = _module_of_import(statement, module, path)
    return [f"{origin}.{alias.name}" for alias in statement.names]


def _module_of_import(statement: ast.ImportFrom, module: str, path: Path) -> str:
    if not statement.level:
        return statement.module or ""
    package = module.split(".")
    above = statement.level - (1 if path.name == "__init__.py" else 0)
    parts = package[: len(package) - above]
    return ".".join([*parts, statement.module] if statement.module else parts)


# ---- fingerprints ----


def signature_of(node: ast.AST) -> str:
    """Parameters with their defaults, of a class those of its ``__init__``; "" where there are none."""
    if isinstance(node, ast.ClassDef):
        init = defined_in(node, "__init__")
        return "" if init is None else signature_of(init)
    if not isinstance(node, Function):
        return ""
    bare = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    for part in ast.walk(bare):
        if isinstance(part, ast.arg):
            part.annotation = None
    assert isinstance(bare, ast.FunctionDef)
    return f"({ast.unparse(bare.args)})"


def hash_of_node(node: ast.AST) -> str:
    """The same for sources that do the same, whichever Python has parsed them: no docstrings, no empty fields."""
    return hash_of_bytes(repr(_normal_form(node)).encode())


def hash_of_bytes(data: bytes) -> str:
    """What ``known.json`` holds of a file."""
    return hashlib.sha256(data).hexdigest()[:32]


def _normal_form(node: Any) -> Any:
    if isinstance(node, list):
        return tuple(_normal_form(item) for item in node)
    if not isinstance(node, ast.AST):
        return (type(node).__name__, repr(node))
    fields = []
    has_docstring = isinstance(node, (*Function, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None
    for name, held in ast.iter_fields(node):
        value = held[1:] if name == "body" and has_docstring else held
        if name not in _IGNORED_FIELDS and value is not None and value != []:
            fields.append((name, _normal_form(value)))
    return (type(node).__name__, *fields)
