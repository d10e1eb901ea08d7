"""What ``help()`` and ``inspect.signature`` say of the public classes and functions, as plain data.

Run as a script it prints that as JSON, of the half that KVPOOL_PURE_PYTHON selects.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from enum import Enum
from importlib import import_module
from typing import Any

MODULES = ("kvpool", "kvpool.list_tables", "kvpool.scheduler", "kvpool.engine.engine")

Parameter = tuple[str, str, str]  # name, kind, default


def public_objects() -> dict[str, Any]:
    """The public classes and functions by name. Type aliases and constants have no help of their own."""
    found: dict[str, Any] = {}
    for name in MODULES:
        module = import_module(name)
        for each in module.__all__:
            value = getattr(module, each)
            if inspect.isclass(value) or inspect.isroutine(value):
                found.setdefault(each, value)
    return found


def signature_of(value: Any) -> list[Parameter] | None:
    """None where there is none."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)) for p in parameters]


def has_own_signature(cls: type) -> bool:
    """Not what takes an exception's arguments, or a protocol or enumeration, which nobody calls."""
    if issubclass(cls, BaseException):
        return inspect.isfunction(cls.__init__)
    return not issubclass(cls, Enum) and not getattr(cls, "_is_protocol", False)


def members_of(cls: type) -> dict[str, Any]:
    """Public members that kvpool defines, as they stand in their classes."""
    members = {}
    for name in dir(cls):
        owner = next((each for each in cls.__mro__ if name in vars(each)), None)
        if not name.startswith("_") and owner is not None and owner.__module__.split(".")[0] == "kvpool":
            members[name] = vars(owner)[name]
    return members


def describe() -> dict[str, dict[str, Any]]:
    """By name: the docstring, and of what is called the signature; of an attribute whether its class explains it."""
    described: dict[str, dict[str, Any]] = {}
    for name, value in public_objects().items():
        described[name] = {"kind": "function" if inspect.isroutine(value) else "class", "doc": inspect.getdoc(value)}
        if inspect.isroutine(value) or has_own_signature(value):
            described[name]["signature"] = signature_of(value)
        if not inspect.isclass(value):
            continue
        for member_name, member in members_of(value).items():
            if isinstance(member, Enum):
                continue
            entry: dict[str, Any] = {"kind": "attribute", "doc": None}
            if isinstance(member, (staticmethod, classmethod)) or inspect.isroutine(member):
                bound = getattr(value, member_name)
                entry = {"kind": "method", "doc": inspect.getdoc(bound), "signature": signature_of(bound)}
            elif isinstance(member, property) or inspect.isgetsetdescriptor(member):
                entry["doc"] = inspect.getdoc(member)
            described[f"{name}.{member_name}"] = entry
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if not field.name.startswith("_"):
                    described.setdefault(f"{name}.{field.name}", {"kind": "attribute", "doc": None})
    return described


if __name__ == "__main__":
    print(json.dumps(describe()))
