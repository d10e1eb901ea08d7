"""Messages to workers: plain msgpack, and nothing in them is shared with the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_runs import BLOCK_SIZE, Run, full_attention, generated, make_scheduler, sliding_window

from kvpool.scheduler import CachedRequestData, NewRequestData, RequestOutput, SchedulerOutput, SchedulerStats

MESSAGE = SchedulerOutput(
    step=3,
    scheduled_new_requests=[NewRequestData("new", [1, 2, 3], ([4, 5], [6]), 2, "poems")],
    scheduled_cached_requests=CachedRequestData(
        ["goes on", "needs nothing", "back"],
        [False, False, True],
        [([7], []), None, ([8, 9], [10])],
        [4, 5, 2],
        [1, 2, 3],
        [[11], [12], [13, 14]],
    ),
    num_scheduled_tokens={"goes on": 1, "needs nothing": 1, "back": 2, "new": 1},
    total_num_scheduled_tokens=5,
    sampled_request_ids=["goes on", "needs nothing", "new"],
    finished_request_ids=["done"],
    preempted_request_ids=["back"],
    new_block_ids_to_zero=[7, 8],
    block_copies=[(4, 5)],
)


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_round_trip(codec: Any) -> None:
    assert codec.decode(codec.encode(MESSAGE), type=SchedulerOutput) == MESSAGE
    assert MESSAGE.scheduled_cached_requests.num_requests == 3


def test_decodes_to_plain_values() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(MESSAGE))
    assert plain["scheduled_new_requests"][0]["block_ids"] == [[4, 5], [6]]
    assert plain["num_scheduled_tokens"]["back"] == 2


@pytest.mark.parametrize("struct", [RequestOutput("r", [1, 2], "stop", 2), SchedulerStats(1, 2, 0.5)])
def test_other_structs_round_trip(struct: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(struct), type=type(struct)) == struct


def test_wrong_types_are_refused() -> None:
    broken = msgspec.msgpack.encode({**msgspec.to_builtins(MESSAGE), "step": "three"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(broken, type=SchedulerOutput)


def test_a_real_history_is_encodable(backend: Any) -> None:
    """Two groups; every message has been through msgpack in ``Run``; the values are ints and lists, nothing else."""
    run = Run(make_scheduler(backend.name, specs=[full_attention(), sliding_window(6)]), backend.name)
    run.add("a", range(10))
    first = run.step()
    types = [type(value) for value in msgspec.structs.astuple(first)]
    assert types == [int, list, CachedRequestData, dict, int] + [list] * 5
    new = first.scheduled_new_requests[0]
    assert (new.request_id, new.prompt_token_ids, new.num_computed_tokens) == ("a", list(range(10)), 0)
    assert [type(table) for table in new.block_ids] == [list, list]
    assert all(type(block_id) is int for table in new.block_ids for block_id in table)
    run.finish()


def test_lists_are_fresh(backend: Any) -> None:
    """A worker in the same process extends and overwrites what it got; nothing happens to the scheduler."""
    scheduler = make_scheduler(backend.name)
    run = Run(scheduler, backend.name)
    prompt = list(range(BLOCK_SIZE * 2))
    request = run.add("a", prompt, max_tokens=8)
    for _ in range(8):
        output = run.step()
        for new in output.scheduled_new_requests:
            new.prompt_token_ids.append(-1)
            new.block_ids[0].extend([0, 0])
        for block_ids in output.scheduled_cached_requests.new_block_ids:
            if block_ids is not None:
                block_ids[0].clear()
        output.num_scheduled_tokens.clear()
        output.sampled_request_ids.clear()
    assert list(request.all_token_ids) == prompt + generated(prompt, 8)
    assert prompt == list(range(BLOCK_SIZE * 2))
    run.finish()


def test_only_what_is_new_is_sent(backend: Any) -> None:
    run = Run(make_scheduler(backend.name, max_num_batched_tokens=6), backend.name)
    run.add("a", range(10), max_tokens=4)
    assert run.step().scheduled_new_requests[0].block_ids == ([1, 2],)
    second = run.step()  # the rest of the prompt
    assert second.scheduled_new_requests == []
    assert second.scheduled_cached_requests == CachedRequestData(["a"], [False], [([3],)], [6], [0], [[]])
    assert second.sampled_request_ids == ["a"]
    first_token = run.outputs["a"][0]
    third = run.step()
    assert third.scheduled_cached_requests == CachedRequestData(["a"], [False], [None], [10], [1], [[first_token]])
    fifth = [run.step() for _ in range(2)][-1]
    assert fifth.scheduled_cached_requests.new_block_ids == [([4],)]
    assert run.finish_reasons == {"a": "length"}
    empty = run.step()
    assert empty.finished_request_ids == ["a"]
    assert empty.num_scheduled_tokens == {}
