"""Numbers and texts of callers, made plain or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, NO_REALS, REALS, Index, Unshowable

from kvpool.common.arguments import show, to_bool, to_float, to_int, to_text
from kvpool.errors import InvalidArgumentError

MOST_CHARACTERS = 300  # of a message


@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: type(value).__name__)
def test_integers_of_all_types_become_exact_ints(value: Any) -> None:
    number = to_int("name", value, 3, 3)
    assert type(number) is int and number == 3
    assert [to_int("name", flag) for flag in (True, False)] == [1, 0]


@pytest.mark.parametrize("value", REALS, ids=lambda value: type(value).__name__)
def test_reals_of_all_types_become_exact_floats(value: Any) -> None:
    number = to_float("name", value)
    assert type(number) is float and number == 0.5
    assert [(type(number), number) for number in map(to_float, "abc", (True, 2, np.int32(3)))] == [
        (float, 1.0), (float, 2.0), (float, 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [*NO_INTEGERS, None], ids=lambda value: type(value).__name__)
def test_what_is_no_integer_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="the name is an integer, not ") as caught:
        to_int("the name", value)
    assert len(str(caught.value)) < MOST_CHARACTERS


@pytest.mark.parametrize("value", NO_REALS, ids=lambda value: type(value).__name__)
def test_what_is_no_real_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="the name is a number, not ") as caught:
        to_float("the name", value)
    assert len(str(caught.value)) < MOST_CHARACTERS


def test_numbers_out_of_range_are_refused_by_name() -> None:
    for value in (float("nan"), float("inf"), -np.float32("inf"), np.float64("nan"), *HUGE):
        with pytest.raises(InvalidArgumentError, match="the name is finite, not ") as caught:
            to_float("the name", value)
        assert len(str(caught.value)) < MOST_CHARACTERS
    for value in (2, -1, np.int64(-(2**63)), HUGE[1], HUGE[3]):
        with pytest.raises(InvalidArgumentError, match="the name is at least 3, not ") as caught:
            to_int("the name", value, 3, 5)
        assert len(str(caught.value)) < MOST_CHARACTERS
    for value in (6, np.uint64(2**64 - 1), HUGE[0], HUGE[2]):
        with pytest.raises(InvalidArgumentError, match="the name is at most 5, not ") as caught:
            to_int("the name", value, 3, 5)
        assert len(str(caught.value)) < MOST_CHARACTERS


def test_an_error_of_a_value_comes_through() -> None:
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt("mine"), MemoryError("mine")):
        with pytest.raises(type(error), match="mine"):
            to_int("name", Index(error))


class Shouting(str):
    def __str__(self) -> str:
        return "LOUD"

    def __hash__(self) -> int:
        raise RuntimeError("__hash__")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("__eq__")


def test_truth_values() -> None:
    for value, expected in ((True, True), (0, False), ("", False), (np.bool_(True), True), (None, False)):
        assert to_bool("name", value) is expected
    for wrong in (np.array([1, 2]), np.array([3.0, 0.0])):
        with pytest.raises(TypeError, match="the name is true or false, not "):
            to_bool("the name", wrong)


def test_texts_are_exact_and_can_be_encoded() -> None:
    for text in ("", "é\U0001f600", np.str_("é"), Shouting("é")):
        plain = to_text("name", text)
        assert type(plain) is str and plain == str.__str__(text)
    for wrong in (b"a", None, 3, ["a"], Unshowable()):
        with pytest.raises(TypeError, match="the name is a str, not "):
            to_text("the name", wrong)
    for half in ("\ud800", "a\udfff" * 100_000):
        with pytest.raises(InvalidArgumentError, match=r"the name .* can't be encoded") as caught:
            to_text("the name", half)
        assert len(str(caught.value).encode()) < MOST_CHARACTERS


def test_values_are_shown_short() -> None:
    assert [show(value) for value in (5, "a", None, [1, 2], -0.5, 2**64)] == [
        "5", "'a'", "None", "[1, 2]", "-0.5", "18446744073709551616",
    ]  # fmt: skip
    assert show(10**5000) == "an integer of 16610 bits"
    for value in (*NO_INTEGERS, *HUGE, "y" * 10**7, np.zeros((100, 100)), dict.fromkeys(range(10**5))):
        assert len(show(value)) < MOST_CHARACTERS
