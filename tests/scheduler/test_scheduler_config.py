"""Limits of a scheduler: numbers of all types, and what is no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hostile_values import HUGE, INTEGERS, NO_INTEGERS

from kvpool.errors import InvalidArgumentError
from kvpool.scheduler import SchedulerConfig

LIMITS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: type(value).__name__)
def test_numbers_become_plain(value: Any) -> None:
    config = SchedulerConfig(**dict.fromkeys(LIMITS, value), stop_token_ids=[value, 4])  # type: ignore[arg-type]
    for number in (*(getattr(config, name) for name in LIMITS), *(config.stop_token_ids - {4})):
        assert type(number) is int and number == 3
    assert len(config.stop_token_ids) == 2


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_no_limit_is_refused_by_name(name: str) -> None:
    for value in [*NO_INTEGERS, None]:
        with pytest.raises(TypeError, match=f"{name} is an integer, not "):
            SchedulerConfig(**{name: value})
    for value in (-1, np.int8(-1), *HUGE):
        with pytest.raises(InvalidArgumentError, match=f"{name} is at (least|most) "):
            SchedulerConfig(**{name: value})


@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda value: type(value).__name__)
def test_what_is_no_token_ends_no_request(value: Any) -> None:
    with pytest.raises(TypeError, match="a stop token id is an integer, not "):
        SchedulerConfig(stop_token_ids=[value])  # type: ignore[arg-type]
