"""Whether what vLLM's names lead to in this process is what vLLM's source defines, or somebody else's.

Sources can be as known while another plugin has put its own in their place. A function is told by its code, which knows
the file and the name it was compiled under and which a wrapper with the name of what it wraps does not have; a class by
its functions; an imported name by what it is imported from; a constant by its value.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from kvpool.integrations.vllm.members import Member

_MISSING = object()
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def replaced(members: Mapping[str, Member], modules: Iterable[str]) -> Iterator[str]:
    """One phrase for each member that is not vLLM's own here.

    Args:
        members: what is recorded, by dotted name.
        modules: names of the modules that they are in. None is imported: in one that nobody has imported, nobody has
            replaced anything.
    """
    known = frozenset(modules)
    for name, member in members.items():
        module, names = _module_of(name, known)
        if module is None or not names or not member.exists:
            continue
        *owners, last = names
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, _MISSING)
        live = _held_by(owner, last)
        if live is _MISSING:
            if member.is_definition:
                yield f"{name} is gone"
            continue
        if member.definition is not None:
            original = _value_of(member.definition, known)
            if original is not _MISSING and live is not original:
                yield f"{name} has been replaced by {_described(live)}"
        else:
            yield from _differences(name, member, live, module, ".".join(names))


def _value_of(name: str, modules: frozenset[str]) -> Any:
    module, names = _module_of(name, modules)
    value: Any = _MISSING if module is None else module
    for part in names:
        value = getattr(value, part, _MISSING)
    return value


def _differences(name: str, member: Member, live: Any, module: ModuleType, qualified: str) -> Iterator[str]:
    if member.value is not None:
        if repr(live) != member.value:
            yield f"{name} is {_described(live)} and no longer {member.value}"
    elif member.functions is not None:
        yield from _class_differences(name, member.functions, live, module, qualified)
    elif member.num_wrappers is not None and not _is_code_of(live, module, qualified, member.num_wrappers):
        yield f"{name} has been replaced by {_described(live)}"


def _class_differences(
    name: str, functions: Mapping[str, int], live: Any, module: ModuleType, qualified: str
) -> Iterator[str]:
    if not inspect.isclass(live) or f"{live.__module__}.{live.__qualname__}" != name:
        yield f"{name} has been replaced by {_described(live)}"
        return
    held = vars(live)
    for function, num_wrappers in functions.items():
        value = held.get(function, _MISSING)
        if value is _MISSING:
            yield f"{name}.{function} is gone"
        elif not _is_code_of(value, module, f"{qualified}.{function}", num_wrappers):
            yield f"{name}.{function} has been replaced by {_described(value)}"
    for attribute, value in held.items():
        code = getattr(_bare(value), "__code__", None)
        if attribute not in functions and code is not None and not _belongs(code, module, qualified):
            yield f"{name}.{attribute} has been put there by {_described(value)}"


def _belongs(code: Any, module: ModuleType, qualified: str) -> bool:
    """Whether an attribute that the class's source does not define as a function can come from it all the same: a
    lambda in the class body, what dataclasses and enumerations make."""
    if code.co_filename.startswith(("<", _STANDARD_LIBRARY)):
        return True
    return code.co_filename == module.__file__ and _qualified_name(code).startswith(qualified)


def _is_code_of(value: Any, module: ModuleType, qualified: str, num_wrappers: int) -> bool:
    """Whether the value is the function of that name in the module, below no more wrappers than it has decorators."""
    value = _bare(value)
    for _ in range(num_wrappers + 1):
        code = getattr(value, "__code__", None)
        if code is not None and code.co_filename == module.__file__:
            named = qualified if hasattr(code, "co_qualname") else qualified.rpartition(".")[2]
            if _qualified_name(code) == named:
                return True
        value = getattr(value, "__wrapped__", None)
    return False


def _qualified_name(code: Any) -> str:
    return str(getattr(code, "co_qualname", code.co_name))  # Python 3.10 has the second alone


def _bare(value: Any) -> Any:
    """What a descriptor calls."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value


def _held_by(owner: Any, name: str) -> Any:
    """What a module or class has under a name, itself or from a base: descriptors as they are."""
    for holder in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        value = getattr(holder, "__dict__", {}).get(name, _MISSING)
        if value is not _MISSING:
            return value
    return _MISSING


def _module_of(name: str, modules: frozenset[str]) -> tuple[ModuleType | None, tuple[str, ...]]:
    """The module that a name lies in, None if it is not imported, and the rest of the name."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in modules:
            return sys.modules.get(prefix), tuple(parts[length:])
    return None, ()


def _described(value: Any) -> str:
    code = getattr(_bare(value), "__code__", None)
    if code is not None:
        return f"{_qualified_name(code)} of {code.co_filename}"
    if inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    shown = repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


_MOST_SHOWN = 80
