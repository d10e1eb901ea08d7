"""What is recorded of one name of vLLM: fingerprint, what can be told of it in a process, and what it relies on."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.integrations.vllm import sources as source

# Decorators that leave a function what it is, in a descriptor at most.
_NO_WRAPPERS = frozenset(
    {"property", "staticmethod", "classmethod", "abstractmethod", "cached_property", "override", "overload", "setter"}
)
_CONSTANTS = (bool, int, float, str, bytes, type(None))


class Member(NamedTuple):
    """One name.

    Attributes:
        source: hash of the syntax tree; "" where these sources have no such name.
        signature: parameters with their defaults; of a class those of its ``__init__``; "" where there are none.
        definition: for a name that its module imports, the dotted name of what it is.
        functions: of a class the functions that its body defines, each with the number of its wrappers.
        num_wrappers: of a function the decorators that may wrap it.
        value: of a constant its representation.
        relies_on: what it names itself.
    """

    source: str = ""
    signature: str = ""
    definition: str | None = None
    functions: dict[str, int] | None = None
    num_wrappers: int | None = None
    value: str | None = None
    relies_on: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """Whether these sources have the name."""
        return self.source != ""

    @property
    def is_definition(self) -> bool:
        """Whether a process that has imported the module must have it."""
        return self.functions is not None or self.num_wrappers is not None or self.value is not None

    def is_same_as(self, other: Member) -> bool:
        """Whether the source says the same."""
        return (self.source, self.signature) == (other.source, other.signature)

    def to_json(self) -> dict[str, Any]:
        """What is not a default."""
        defaults = Member._field_defaults
        return {name: value for name, value in self._asdict().items() if value != defaults[name]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Member:
        """The reverse."""
        return cls(**fields | {"relies_on": tuple(fields.get("relies_on", ()))})


def member_of(name: str, sources: Path, relies_on: Sequence[str] = ()) -> Member:
    """What these sources say about a name. A name that its module only imports is known by the import."""
    node = source.node_of(name, sources)
    if node is None:
        return Member()
    found = source.hash_of_node(node)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        # Not by the whole statement: what else the module takes from there does not matter.
        found = source.hash_of_bytes(source.origin_of(name, sources).encode())
    member = Member(found, source.signature_of(node), relies_on=tuple(relies_on))
    others = source.bindings_of(name, sources)
    if len(others) > 1 and not all(isinstance(other, source.Function) for other in others):
        return member  # which one it is depends on the process
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return member._replace(definition=source.definition_of(name, sources))
    if isinstance(node, ast.ClassDef):
        functions = [part for part in source.statements_of(node) if isinstance(part, source.Function)]
        return member._replace(functions={part.name: _num_wrappers(part) for part in functions})
    if isinstance(node, source.Function):
        return member._replace(num_wrappers=_num_wrappers(node))
    return member if source.is_set_later(name, sources) else member._replace(value=_constant(node))


def _num_wrappers(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list]
    return sum(name not in _NO_WRAPPERS for name in names)


def _constant(node: ast.stmt) -> str | None:
    value = getattr(node, "value", None)
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or value is None:
        return None
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError):
        return None
    return repr(literal) if type(literal) in _CONSTANTS else None
