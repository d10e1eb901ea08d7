"""Replacing names and putting them back, and which levels an environment variable asks for. Needs no vLLM."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.integrations.vllm import levels
from kvpool.integrations.vllm.hooks import Hooks


class Stock:
    def inherited(self) -> str:
        return "stock"

    @staticmethod
    def static() -> str:
        return "stock"


class Below(Stock):
    pass


class New:
    pass


@pytest.fixture
def make_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_every_module_that_holds_the_class_gets_the_new_one(make_module: Any) -> None:
    one, two = make_module("hooked.one", Held=Stock), make_module("hooked.two", Held=Stock, Alias=Stock)
    other = make_module("hooked.other", Held=Below)
    hooks = Hooks()
    hooks.replace_in_modules(Stock, New, ["Held"])
    assert one.Held is two.Held is New
    assert two.Alias is Stock and other.Held is Below
    hooks.restore()
    assert one.Held is two.Held is Stock


def test_a_module_imported_since_gets_the_stock_class_back_too(make_module: Any) -> None:
    first = make_module("hooked.first", Held=Stock)
    hooks = Hooks()
    hooks.replace_in_modules(Stock, New, ["Held"])
    late = make_module("hooked.late", Held=first.Held)
    hooks.restore()
    assert late.Held is Stock


def test_the_package_itself_keeps_its_references(make_module: Any) -> None:
    own = make_module("kvpool.hooked", Held=Stock)
    hooks = Hooks()
    hooks.replace_in_modules(Stock, New, ["Held"])
    assert own.Held is Stock


def test_attributes_come_back_as_what_they_were() -> None:
    hooks = Hooks()
    before = dict(vars(Stock)), dict(vars(Below))
    for value in ("first", "second"):
        hooks.replace(Below, "inherited", lambda self, value=value: value)
    hooks.replace(Stock, "static", staticmethod(lambda: "new"))
    assert (Below().inherited(), Stock.static(), Stock().inherited()) == ("second", "new", "stock")
    hooks.restore()
    assert (dict(vars(Stock)), dict(vars(Below))) == before
    assert isinstance(vars(Stock)["static"], staticmethod)


def test_restored_hooks_can_be_used_again() -> None:
    hooks = Hooks()
    for _ in range(2):
        hooks.replace(Below, "inherited", lambda self: "new")
        hooks.restore()
        hooks.restore()
    assert Below().inherited() == "stock"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, levels.NAMES),
        ("", levels.NAMES),
        ("1", levels.NAMES),
        ("0", ()),
        ("pool", ("pool",)),
        (" manager , pool", ("pool", "manager")),
        ("tables,hasher", ("hasher", "tables")),
    ],
)
def test_levels_by_value_of_the_variable(value: str | None, wanted: tuple[str, ...]) -> None:
    assert levels.requested_levels(value) == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pool,pol", "no such level: 'pol'"),
        ("manager", "manager needs pool"),
        ("true", "no such level: 'true'"),
        ("2", "no such level: '2'"),
        ("0,pool", "no such level: '0'"),
        (",", "no such level: ''"),
        (" ", "no such level: ''"),
        ("pool,", "no such level: ''"),
        ("x" * 10_000, "no such level: 'x{60}'\\.\\.\\. "),
    ],
)
def test_levels_that_make_no_sense(value: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        levels.requested_levels(value)
