"""Whether the vLLM at hand is one that kvpool was checked against: fingerprints of all that the levels touch.

``known.json`` holds, for each version, a hash of every source file that has a target and a fingerprint of every target
(signature, and a hash of its syntax tree without docstrings). A file of known bytes needs no look at its targets; in
another one (patched by a distributor, say) each target must still be what it was.

    python -m kvpool.integrations.vllm.drift --record                       the installed vLLM
    python -m kvpool.integrations.vllm.drift --record --sources FOLDER --version 0.33.0    an unpacked wheel

record a version; do it after vLLM's own tests have passed with kvpool in its place.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

KNOWN = Path(__file__).with_name("known.json")
MAX_NAMED = 8

# Where nothing of what a program does is said, and how Python's versions differ in what they say.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment"})


class Fingerprint(NamedTuple):
    """What a target is.

    Attributes:
        signature: parameters with their defaults; of a class those of its ``__init__``; "" where there are none.
        source: hash of the syntax tree.
    """

    signature: str
    source: str


def public_version(version: str) -> str:
    """A version without its local part: builds for several devices are made from the same source."""
    return version.partition("+")[0]


def installed_sources() -> Path:
    """The folder in which the installed package ``vllm`` lies; the package is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # no origin: just some folder of that name
        raise ModuleNotFoundError("vLLM is not installed")
    return Path(spec.origin).parents[1]


# ---- one target ----


def fingerprint(target: str, sources: Path) -> Fingerprint | None:
    """The fingerprint of a dotted name, or None if there is no such thing in these sources. Nothing is imported.

    A name that its module only imports is fingerprinted by the import.
    """
    found = _split(target, sources)
    if found is None:
        return None
    path, names = found
    node: ast.AST | None = _tree(path)
    for name in names:
        node = None if node is None else _defined(node, name)
    if node is None:
        return None
    return Fingerprint(_signature(node), _hash(_normal_form(node)))


def file_of(target: str, sources: Path) -> Path | None:
    """The source file that a dotted name points into, if it exists."""
    found = _split(target, sources)
    return None if found is None else found[0]


def _split(target: str, sources: Path) -> tuple[Path, list[str]] | None:
    """The file of the longest prefix that is a module, and the names below it."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = sources.joinpath(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, parts[length:]
    return None


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(scope: ast.AST, name: str) -> ast.AST | None:
    """The last statement of a module or class, also below if and try, that gives a name its value."""
    last = None
    for statement in _statements(scope):
        if name in _names_bound_by(statement):
            last = statement
    return last


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(scope, field, []):
            if isinstance(child, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                yield from _statements(child)
            else:
                yield child


def _names_bound_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        init = _defined(node, "__init__")
        return "" if init is None else _signature(init)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    bare = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    for part in ast.walk(bare):
        if isinstance(part, ast.arg):
            part.annotation = None
    assert isinstance(bare, ast.FunctionDef)
    return f"({ast.unparse(bare.args)})"


def _normal_form(node: Any) -> Any:
    """A nested tuple that is the same for sources that do the same, whichever Python has parsed them: no docstrings, no
    empty fields."""
    if isinstance(node, list):
        return tuple(_normal_form(item) for item in node)
    if not isinstance(node, ast.AST):
        return (type(node).__name__, repr(node))
    fields = []
    has_docstring = (
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and ast.get_docstring(node, clean=False) is not None
    )
    for name, held in ast.iter_fields(node):
        value = held[1:] if name == "body" and has_docstring else held
        if name not in _IGNORED_FIELDS and value is not None and value != []:
            fields.append((name, _normal_form(value)))
    return (type(node).__name__, *fields)


def _hash(value: Any) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:32]


# ---- all targets of a version ----


def known_versions() -> dict[str, Any]:
    """What is recorded, by version."""
    known: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return known


def differences(version: str, targets: Sequence[str], sources: Path) -> list[str]:
    """What speaks against replacing: one phrase each, [] for a vLLM that kvpool knows.

    Args:
        version: of the vLLM whose sources these are.
        targets: dotted names, of the levels that are asked for.
        sources: folder that holds the package ``vllm``.
    """
    known = known_versions()
    version = public_version(version)
    if version in known:
        return list(_changes(known[version], targets, sources))
    nearest = max(known, key=_version_key)
    changes = list(_changes(known[nearest], targets, sources))
    against = f"vLLM {version} is not one that this kvpool was checked against ({', '.join(known)})"
    return [against, f"compared with {nearest}: {_listed(changes) if changes else 'no hook point differs'}"]


def _changes(recorded: dict[str, Any], targets: Iterable[str], sources: Path) -> Iterator[str]:
    unchanged: dict[Path, bool] = {}
    for target in targets:
        if target not in recorded["targets"]:
            yield f"{target} is not recorded in {KNOWN.name}"
            continue
        path = file_of(target, sources)
        if path is not None:
            if path not in unchanged:
                digest = recorded["files"].get(path.relative_to(sources).as_posix())
                unchanged[path] = digest is not None and digest == _hash(path.read_bytes())
            if unchanged[path]:
                continue
        was, now = recorded["targets"][target], fingerprint(target, sources)
        if was is None and now is None:
            continue
        if was is None or now is None:
            yield f"{target} {'is new' if was is None else 'is gone'}"
        elif was[0] != now.signature:
            yield f"{target}: signature {was[0]} is now {now.signature}"
        elif was[1] != now.source:
            yield f"{target}: its source has changed"


def replaced_by_others(version: str, targets: Iterable[str]) -> list[str]:
    """Targets that in this process are not vLLM's own, since some other code has put its own there. Imports the
    modules; the version is a known one."""
    recorded = known_versions()[public_version(version)]["targets"]
    found = []
    for target in targets:
        live = _resolve(target)
        if not (inspect.isfunction(live) or inspect.isclass(live)):
            continue
        name = f"{live.__module__}.{live.__qualname__}"
        if not name.startswith("vllm."):
            found.append(f"{target} has been replaced by {name}")
        elif (
            inspect.isfunction(live) and recorded[target] is not None and not _has_parameters(live, recorded[target][0])
        ):
            found.append(f"{target} does not take {recorded[target][0]} but {inspect.signature(live)}")
    return found


def _has_parameters(function: Any, signature: str) -> bool:
    if not signature:
        return True
    statement = ast.parse(f"def f{signature}: pass").body[0]
    named = {part.arg for part in ast.walk(statement) if isinstance(part, ast.arg)}
    return named == set(inspect.signature(function).parameters)


def _resolve(target: str) -> Any:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name, None)
        return value
    return None


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _listed(changes: Sequence[str]) -> str:
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return "; ".join(changes[:MAX_NAMED]) + more


def describe(found: Sequence[str]) -> str:
    """Differences as one line."""
    return _listed(found)


# ---- recording ----


def record(version: str, targets: Sequence[str], sources: Path) -> None:
    """Write what these sources are into ``known.json``, in the place of what was recorded for the version."""
    known = known_versions() if KNOWN.exists() else {}
    files = {path for target in targets if (path := file_of(target, sources)) is not None}
    known[public_version(version)] = {
        "files": {path.relative_to(sources).as_posix(): _hash(path.read_bytes()) for path in sorted(files)},
        "targets": {target: fingerprint(target, sources) for target in sorted(targets)},
    }
    ordered = {name: known[name] for name in sorted(known, key=_version_key)}
    KNOWN.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """The command of the module."""
    from kvpool.integrations.vllm import levels

    parser = argparse.ArgumentParser(prog="python -m kvpool.integrations.vllm.drift")
    parser.add_argument("--record", action="store_true", help="write known.json; without it differences are listed")
    parser.add_argument("--sources", type=Path, help="folder that holds a package vllm; default: the installed one")
    parser.add_argument("--version", help="version of these sources; default: the installed one")
    arguments = parser.parse_args()
    if (arguments.sources is None) != (arguments.version is None):
        parser.error("--sources and --version go together")
    sources = installed_sources() if arguments.sources is None else arguments.sources.resolve()
    version = levels.vllm_version() if arguments.version is None else arguments.version
    targets = levels.targets_of(levels.NAMES)
    if arguments.record:
        record(version, targets, sources)
        print(f"recorded {len(set(targets))} targets of vLLM {public_version(version)} in {KNOWN}")
        return
    found = differences(version, targets, sources)
    print("\n".join(found) or f"vLLM {public_version(version)}: nothing differs")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
