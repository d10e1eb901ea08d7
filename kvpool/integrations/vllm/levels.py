"""Which parts of vLLM are replaced: ``KVPOOL_VLLM`` names the levels.

A level is a module of this package with ``TARGETS``, the dotted names of what it replaces or relies on in vLLM, and
``install(hooks)``, which replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Protocol, cast

from kvpool.common.environment import shown
from kvpool.errors import InvalidArgumentError
from kvpool.integrations.vllm.hooks import Hooks

VARIABLE = "KVPOOL_VLLM"

NAMES = ("pool", "manager", "hasher", "tables")
_NEEDS = {"manager": "pool"}


class Level(Protocol):
    """What a module must have to be a level."""

    TARGETS: tuple[str, ...]

    def install(self, hooks: Hooks) -> None:
        """Replace. Raises where vLLM is not as expected; what was replaced by then is in the hooks."""


def requested_levels(value: str | None) -> tuple[str, ...]:
    """The levels that a value of ``KVPOOL_VLLM`` asks for, in the order in which they are installed.

    Args:
        value: ``"0"`` none, ``"1"``, empty or None all, else level names with commas between them.

    Raises:
        InvalidArgumentError: a name that is no level, or a level without the one that it needs.
    """
    text = (value or "1").strip()
    if text == "0":
        return ()
    if text == "1":
        return NAMES
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted.difference(NAMES))
    if unknown:
        named = ", ".join(shown(name) for name in unknown)
        raise InvalidArgumentError(f"{VARIABLE}={shown(text)}: no such level: {named} (0, 1, {', '.join(NAMES)})")
    for name, needed in _NEEDS.items():
        if name in wanted and needed not in wanted:
            raise InvalidArgumentError(f"{VARIABLE}={shown(text)}: the level {name} needs {needed}")
    return tuple(name for name in NAMES if name in wanted)


def load_level(name: str) -> Level:
    """The module of a level."""
    return cast(Level, import_module(f"kvpool.integrations.vllm.{name}"))


def targets_of(names: Iterable[str]) -> list[str]:
    """All that these levels replace or rely on, each once."""
    return list(dict.fromkeys(target for name in names for target in load_level(name).TARGETS))


def vllm_version() -> str:
    """Version of the vLLM that is imported here, without its local part."""
    import vllm

    return str(vllm.__version__).partition("+")[0]
