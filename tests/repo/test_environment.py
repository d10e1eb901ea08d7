"""Environment variables are read strictly: what means nothing is refused, with the variable and the value."""

from __future__ import annotations

from typing import Any

import pytest

import kvpool
from kvpool.common.environment import read_choice, read_switch
from kvpool.errors import InvalidArgumentError
from kvpool.events.wire import to_external_block_hash

NAME = "KVPOOL_TEST_SWITCH"
NONSENSE = ["true", "yes", "2", " 1", "1 ", "01", "off", "x" * 1_000]


@pytest.mark.parametrize("default", [False, True])
def test_a_switch_is_on_off_or_at_its_default(default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert read_switch(NAME, default) is default
    for value, wanted in (("", default), ("0", False), ("1", True)):
        monkeypatch.setenv(NAME, value)
        assert read_switch(NAME, default) is wanted


@pytest.mark.parametrize("value", NONSENSE)
def test_another_value_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, value)
    with pytest.raises(InvalidArgumentError, match=f"{NAME} is 0 or 1, not '{value[:60]}'") as caught:
        read_switch(NAME)
    assert len(str(caught.value)) < 120
    with pytest.raises(InvalidArgumentError, match=f"{NAME} is raise or warn, not '{value[:60]}'"):
        read_choice(NAME, ("raise", "warn"))


def test_a_choice_is_the_first_unless_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert read_choice(NAME, ("raise", "warn")) == "raise"
    for value, wanted in (("", "raise"), ("raise", "raise"), ("warn", "warn")):
        monkeypatch.setenv(NAME, value)
        assert read_choice(NAME, ("raise", "warn")) == wanted


@pytest.mark.parametrize("value", NONSENSE)
def test_hashes_in_events_are_of_no_unknown_form(backend: Any, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES", value)
    message = "KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES is 0 or 1, not"
    with pytest.raises(InvalidArgumentError, match=message):
        to_external_block_hash(bytes(32))
    with pytest.raises(InvalidArgumentError, match=message):
        backend.BlockPool(4, True, 4, True)
    backend.BlockPool(4, True, 4).check()  # no events, no hashes in them


def test_the_backend_was_chosen_by_such_a_switch() -> None:
    assert ("reference" if read_switch("KVPOOL_PURE_PYTHON") else "native") == kvpool.BACKEND
