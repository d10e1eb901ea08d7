"""How tokens are chosen: what is refused, and that it travels with a request."""

from __future__ import annotations

import msgspec
import pytest

from kvpool import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, Scheduler
from kvpool.errors import InvalidArgumentError
from kvpool.sampling_params import SamplingParams
from kvpool.scheduler import SchedulerOutput


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("inf"), float("nan"))),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("seed", value) for value in (-(2**63) - 1, 2**64)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value) and str(value) in str(caught.value)


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
