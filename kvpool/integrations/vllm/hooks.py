"""Replacing names in code of others, so that everything can be put back.

A class that modules took by ``from ... import`` lives under one name in each of them; replacing it means to replace all
of those names, in every module that is imported already. Modules that are imported later take it from the first one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

_ABSENT = object()
_OWN_PACKAGE = "kvpool"


class Hooks:
    """What was replaced, and by what. Not for several threads at once."""

    def __init__(self) -> None:
        self._stock: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._swept: list[tuple[Any, Any, tuple[str, ...]]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set an attribute of a module, a class or an object. What it was at the first replacement is remembered:
        what the owner had itself, so an inherited attribute comes back as inherited and a descriptor as itself."""
        self._stock.setdefault((id(owner), name), (owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def replace_in_modules(self, stock: Any, new: Any, names: Iterable[str]) -> None:
        """Put ``new`` wherever an imported module holds ``stock`` under one of the names. O(modules)."""
        wanted = tuple(names)
        for module, name in _holders(stock, wanted):
            self.replace(module, name, new)
        self._swept.append((stock, new, wanted))

    def restore(self) -> None:
        """Put everything back, also in modules that were imported since and took what was new. Afterwards these hooks
        are as if nothing had been replaced."""
        for owner, name, stock in reversed(list(self._stock.values())):
            if stock is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, stock)
        for stock, new, names in reversed(self._swept):
            for module, name in _holders(new, names):
                setattr(module, name, stock)
        self._stock.clear()
        self._swept.clear()


def _holders(value: Any, names: Iterable[str]) -> Iterator[tuple[ModuleType, str]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == _OWN_PACKAGE:
            continue
        held = getattr(module, "__dict__", {})
        for name in names:
            if held.get(name) is value:
                yield module, name
