"""How tokens are chosen: what is refused, and that it travels with a request."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, NO_REALS, REALS, Index

from kvpool import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, Scheduler
from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import SchedulerOutput


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("inf"), float("nan"))),
        *(("top_k", value) for value in (-1, 2**63)),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("seed", value) for value in (-(2**63) - 1, 2**64)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize("name", ["top_k", "seed"])
@pytest.mark.parametrize("value", [*INTEGERS, True], ids=lambda value: type(value).__name__)
def test_integers_of_all_types_travel_as_plain_ones(name: str, value: Any) -> None:
    assert_travels(SamplingParams(**{name: value}), name, 1 if value is True else 3, int)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [*REALS, True, 1, np.int64(1)], ids=lambda value: type(value).__name__)
def test_reals_of_all_types_travel_as_plain_ones(name: str, value: Any) -> None:
    assert_travels(SamplingParams(**{name: value}), name, float(value), float)


def assert_travels(params: SamplingParams, name: str, number: float, kind: type) -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    for one in (params, again, msgspec.structs.replace(params)):
        assert type(getattr(one, name)) is kind and getattr(one, name) == number
    assert again == params and hash(again) == hash(params)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda value: type(value).__name__)
def test_what_is_no_integer_is_refused_at_once(value: Any) -> None:
    for name in ("top_k", "seed"):
        with pytest.raises(TypeError, match=f"{name} is an integer, not "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("value", NO_REALS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_refused(value: Any) -> None:
    for name in ("temperature", "top_p"):
        with pytest.raises(TypeError, match=f"{name} is a number, not "):
            SamplingParams(**{name: value})


def test_huge_numbers_are_refused_shortly() -> None:
    for name in ("temperature", "top_p", "top_k", "seed"):
        for value in HUGE:
            with pytest.raises(InvalidArgumentError, match=name) as caught:
                SamplingParams(**{name: value})  # type: ignore[arg-type]
            assert len(str(caught.value)) < 200
    with pytest.raises(ZeroDivisionError):
        SamplingParams(seed=Index(ZeroDivisionError()))  # type: ignore[arg-type]


def test_greedy_is_the_default() -> None:
    assert SamplingParams().is_greedy and not SamplingParams(temperature=0.5).is_greedy


def test_workers_are_told_with_a_new_request() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(KVCacheConfig(10, [KVCacheGroupSpec(["layer"], spec)]), max_model_len=32)
    scheduler = Scheduler(manager)
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=2**63 - 1)
    hasher = BlockHasher("sha256", 4)
    scheduler.add_request(Request("drawn", [1, 2, 3], hasher, sampling_params=params))
    scheduler.add_request(Request("greedy", [1, 2, 3], hasher))
    message = msgspec.msgpack.encode(scheduler.schedule())
    new = msgspec.msgpack.decode(message, type=SchedulerOutput).scheduled_new_requests
    assert [one.sampling_params for one in new] == [params, None]
