"""The scheduler step by step. Workers that follow its messages notice a wrong block table or a token too many
(``scheduler_runs``); its invariants are checked after every step."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from scheduler_runs import BLOCK_SIZE, Run, full_attention, generated, make_scheduler, mamba, sliding_window

from kvpool.cache.spec import CrossAttentionSpec
from kvpool.common.arguments import show
from kvpool.errors import BlockStateError, InvalidArgumentError, InvariantError
from kvpool.requests.status import RequestStatus
from kvpool.requests.token_ids import MAX_TOKEN_ID
from kvpool.scheduler import RequestTooLargeError, SchedulerConfig, SchedulingPolicy
from kvpool.scheduler import scheduler as scheduler_module


@pytest.fixture
def make_run(backend: Any) -> Any:
    """Makes runs; options are those of ``make_scheduler``, and ``depth``."""

    def make(depth: int = 1, **options: Any) -> Run:
        return Run(make_scheduler(backend.name, **options), backend.name, depth)

    return make


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


# Prefill and budget


def test_one_request(make_run: Any) -> None:
    run = make_run()
    request = run.add("a", range(6), max_tokens=3)
    output = run.step()
    assert output.num_scheduled_tokens == {"a": 6}
    assert output.sampled_request_ids == ["a"]
    assert request.status is RequestStatus.RUNNING
    run.finish()
    assert run.outputs["a"] == generated(range(6), 3)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.num_computed_tokens == 8, "the last token is never computed"
    assert not run.scheduler.has_unfinished_requests()
    assert run.scheduler.has_requests(), "workers have to be told"
    assert run.step().finished_request_ids == ["a"]
    assert not run.scheduler.has_requests()


def test_chunked_prefill(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=5)
    run.add("a", range(12), max_tokens=2)
    steps = [run.step() for _ in range(4)]
    assert [step.num_scheduled_tokens["a"] for step in steps] == [5, 5, 2, 1]
    assert [step.sampled_request_ids for step in steps] == [[], [], ["a"], ["a"]]
    assert run.outputs["a"] == generated(range(12), 2)


def test_budget_is_shared_in_order_of_service(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=8)
    for name, length in (("a", 6), ("b", 6), ("c", 6)):
        run.add(name, [ord(name)] * length, max_tokens=3)
    assert run.step().num_scheduled_tokens == {"a": 6, "b": 2}
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 4, "c": 3}
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 3}
    run.finish()


def test_more_running_requests_than_budget(make_run: Any) -> None:
    """Nobody is forgotten: those at the end go on when those in front have finished."""
    run = make_run(max_num_batched_tokens=3, num_blocks=40)
    for number in range(6):
        run.add(str(number), [number] * 2, max_tokens=5)
    run.finish()
    assert all(run.outputs[str(number)] == generated([number] * 2, 5) for number in range(6))


def test_seats(make_run: Any) -> None:
    run = make_run(max_num_seqs=2)
    for name in "abc":
        run.add(name, [ord(name)] * 3, max_tokens=2)
    assert run.step().num_scheduled_tokens == {"a": 3, "b": 3}
    assert run.scheduler.get_request_counts() == (2, 1)
    run.step()
    assert run.step().num_scheduled_tokens == {"c": 3}
    run.finish()


def test_without_chunked_prefill(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False)
    run.add("a", range(6), max_tokens=2)
    run.add("b", range(20, 26), max_tokens=2)
    run.add("c", [1, 2], max_tokens=2)
    assert run.step().num_scheduled_tokens == {"a": 6}, "b doesn't fit, and c does not overtake it"
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 6, "c": 2}
    run.finish()
    with pytest.raises(InvalidArgumentError, match="max_model_len, 11"):
        make_run(max_num_batched_tokens=10, max_model_len=11, enable_chunked_prefill=False)


def test_mamba_without_chunked_prefill(make_run: Any) -> None:
    """Parts that end at block boundaries are no chunks: it is the budget that may not cut."""
    specs = [full_attention(), mamba()]
    run = make_run(specs=specs, max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    run.add("a", range(11), max_tokens=2)
    run.finish()
    assert run.outputs["a"] == generated(range(11), 2)


def test_long_prefill_threshold(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=20, long_prefill_token_threshold=4, num_blocks=30)
    run.add("long", range(18), max_tokens=2)
    run.add("short", [1, 2, 3], max_tokens=4)
    assert run.step().num_scheduled_tokens == {"long": 4, "short": 3}
    assert run.step().num_scheduled_tokens == {"long": 4, "short": 1}
    run.scheduler.finish_requests("short")
    assert run.step().num_scheduled_tokens == {"long": 10}, "alone, it may use the whole budget"
    run.finish()


# Prefix hits


def test_prefix_is_computed_once(make_run: Any) -> None:
    run = make_run(num_blocks=40, manager={"log_stats": True})
    prefix = list(range(12))
    for number in range(5):
        run.add(str(number), [*prefix, 90 + number], max_tokens=3)
    first = run.step()
    assert list(first.num_scheduled_tokens.values()) == [13, 1, 1, 1, 1]
    tables = [new.block_ids[0] for new in first.scheduled_new_requests]
    assert all(table[:3] == tables[0][:3] for table in tables)
    assert len({table[3] for table in tables}) == 5
    run.finish()
    stats = run.scheduler.make_stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (65, 48)
    assert stats.prefix_hit_rate == 48 / 65
    assert (stats.resumed_query_tokens, stats.num_preemptions, stats.num_finished_requests) == (0, 0, 5)
    cache_stats = run.scheduler.kv_cache_manager.make_prefix_cache_stats()
    assert (cache_stats.requests, cache_stats.queries, cache_stats.hits) == (5, 65, 48)


def test_whole_prompt_cached(make_run: Any) -> None:
    """One token has to be computed, and with it its block."""
    run = make_run()
    run.add("a", range(8), max_tokens=2)
    run.finish()
    run.add("b", range(8), max_tokens=2)
    output = run.step()
    assert output.num_scheduled_tokens == {"b": 4}
    assert output.scheduled_new_requests[0].num_computed_tokens == 4
    run.finish()
    assert run.outputs["a"] == run.outputs["b"]


def test_salt_and_adapter_separate(make_run: Any) -> None:
    run = make_run(num_blocks=40)
    run.add("plain", range(9))
    run.add("salted", range(9), cache_salt="tenant")
    run.add("adapted", range(9), lora_name="poems")
    output = run.step()
    assert set(output.num_scheduled_tokens.values()) == {9}
    assert [new.lora_name for new in output.scheduled_new_requests] == [None, None, "poems"]
    run.finish()


def test_lookup_can_be_skipped(make_run: Any) -> None:
    run = make_run(num_blocks=40, manager={"log_stats": True})
    run.add("a", range(9))
    run.add("b", range(9), skip_reading_prefix_cache=True)
    assert run.step().num_scheduled_tokens == {"a": 9, "b": 9}
    run.finish()


def test_without_prefix_caching(make_run: Any) -> None:
    run = make_run(num_blocks=40, manager={"enable_caching": False})
    run.add("a", range(9))
    run.scheduler.add_request(run.stack.Request("b", range(9), max_tokens=4))  # needs no hasher
    run.outputs["b"] = []
    assert run.step().num_scheduled_tokens == {"a": 9, "b": 9}
    run.finish()
    assert run.outputs["a"] == run.outputs["b"] == generated(range(9), 4)


def test_failed_admission_leaves_no_trace(make_run: Any) -> None:
    """E4: looked up three times, counted once."""
    run = make_run(num_blocks=6, manager={"log_stats": True})
    run.add("a", range(12), max_tokens=4)
    run.add("b", range(12, 24), max_tokens=2)
    for _ in range(3):
        run.step()
        assert ids(run.scheduler.waiting) == ["b"]
    run.finish()
    assert run.scheduler.make_stats().prefix_query_tokens == 24
    assert run.scheduler.kv_cache_manager.make_prefix_cache_stats().requests == 2


# Preemption


def test_preempted_and_resumed_with_hits(make_run: Any) -> None:
    """Blocks run out while two requests decode: the one admitted last goes, and finds its own blocks again."""
    run = make_run(num_blocks=7, manager={"log_stats": True})
    first = run.add("first", range(7), max_tokens=8)
    last = run.add("last", range(20, 28), max_tokens=6)
    preempted = []
    while not preempted:
        output = run.step()
        preempted = output.preempted_request_ids
    assert preempted == ["last"]
    assert "last" not in output.num_scheduled_tokens
    assert last.status is RequestStatus.PREEMPTED
    assert (last.num_computed_tokens, last.num_preemptions, first.num_preemptions) == (0, 1, 0)
    resumed = None
    while resumed is None:
        cached = run.step().scheduled_cached_requests
        if True in cached.resumed:
            resumed = cached
    place = resumed.resumed.index(True)
    assert resumed.request_ids[place] == "last"
    assert resumed.num_computed_tokens[place] == 8, "both full blocks of its prompt were still there"
    assert len(resumed.new_block_ids[place][0]) == 4, "the whole table, not an addition"
    run.finish()
    assert run.outputs == {"first": generated(range(7), 8), "last": generated(range(20, 28), 6)}
    stats = run.scheduler.make_stats()
    assert (stats.num_preemptions, stats.resumed_hit_tokens, stats.prefix_hit_tokens) == (1, 8, 0)
    cache_stats = run.scheduler.kv_cache_manager.make_prefix_cache_stats()
    assert (cache_stats.requests, cache_stats.preempted_requests, cache_stats.preempted_hits) == (2, 1, 8)


def test_preempted_goes_to_the_front(make_run: Any) -> None:
    run = make_run(num_blocks=7, max_num_seqs=2)
    run.add("first", range(7), max_tokens=8)
    run.add("last", range(20, 28), max_tokens=6)
    run.add("new", [1, 2], max_tokens=2)
    while not run.step().preempted_request_ids:
        pass
    assert ids(run.scheduler.waiting) == ["last", "new"]
    run.finish()


def test_a_step_that_preempts_admits_nobody(make_run: Any) -> None:
    run = make_run(num_blocks=7)
    run.add("first", range(7), max_tokens=8)
    run.add("last", range(20, 28), max_tokens=6)
    run.step()
    run.add("tiny", [1], max_tokens=1)
    while run.scheduler.has_unfinished_requests():
        output = run.step()
        if output.preempted_request_ids:
            assert output.scheduled_new_requests == []
            assert True not in output.scheduled_cached_requests.resumed
    run.finish()


def test_several_victims(make_run: Any) -> None:
    """A large part of a prompt takes the blocks of all that were admitted after it."""
    run = make_run(num_blocks=11, long_prefill_token_threshold=16, reserve_full_sequence=False)
    run.add("large", range(40), max_tokens=1)
    run.add("b", [1] * 3, max_tokens=9)
    run.add("c", [2] * 3, max_tokens=9)
    preempted: list[str] = []
    while not preempted:
        preempted = run.step().preempted_request_ids
    assert preempted == ["c", "b"]
    assert ids(run.scheduler.waiting) == ["b", "c"]
    run.finish()
    assert run.outputs["large"] == generated(range(40), 1)
    assert run.outputs["b"] == generated([1] * 3, 9)


def test_reserve_full_sequence(make_run: Any) -> None:
    """Without the reserve a long prompt is let in by its first part, and gets in the way of others."""
    for reserve, num_admitted in ((True, 1), (False, 2)):
        run = make_run(num_blocks=11, max_num_batched_tokens=8, reserve_full_sequence=reserve)
        run.add("a", range(20), max_tokens=2)
        run.step()
        run.step()
        run.add("b", range(50, 74), max_tokens=2)
        run.step()
        assert len(run.scheduler.running) == num_admitted
        run.finish()


def test_watermark(make_run: Any) -> None:
    """A quarter of the blocks stays free while others run; alone a request gets everything."""
    run = make_run(num_blocks=12, manager={"watermark": 0.25})
    run.add("a", range(20), max_tokens=2)
    run.add("b", range(40, 56), max_tokens=2)
    run.step()
    assert ids(run.scheduler.running) == ["a"], "5 of 11 blocks are used, 4 wanted, and 3 have to stay"
    run.finish()
    run.add("c", range(40), max_tokens=2)
    run.step()
    assert ids(run.scheduler.running) == ["c"]
    run.finish()


# Priority


def test_priority_order_of_admission(make_run: Any) -> None:
    run = make_run(max_num_seqs=1, policy="priority")
    for name, priority in (("low", 5), ("high", 0), ("middle", 3), ("middle too", 3)):
        run.add(name, [priority] * 3, max_tokens=1, priority=priority)
    order = []
    while run.scheduler.has_unfinished_requests():
        order += run.step().num_scheduled_tokens
    assert order == ["high", "middle", "middle too", "low"]


def test_priority_decides_who_is_preempted(make_run: Any) -> None:
    """The most important request came last; the least important one, which came first, loses its blocks."""
    run = make_run(num_blocks=7, policy=SchedulingPolicy.PRIORITY)
    low = run.add("low", range(7), max_tokens=8, priority=9)
    run.step()
    high = run.add("high", range(20, 28), max_tokens=6, priority=1)
    run.finish()
    assert low.num_preemptions >= 1
    assert high.num_preemptions == 0
    assert run.outputs == {"low": generated(range(7), 8), "high": generated(range(20, 28), 6)}


def test_priority_gets_the_budget_first(make_run: Any) -> None:
    run = make_run(policy="priority", max_num_batched_tokens=6, num_blocks=40)
    run.add("low", [1, 2, 3], max_tokens=9, priority=2)
    run.step()
    run.add("high", range(40, 60), max_tokens=2, priority=1)
    assert run.step().num_scheduled_tokens == {"low": 1, "high": 5}
    assert ids(run.scheduler.running) == ["high", "low"]
    assert run.step().num_scheduled_tokens == {"high": 6}
    run.finish()


def test_what_is_scheduled_is_computed(make_run: Any) -> None:
    """Nobody is preempted in the step that has scheduled it: blocks that it has just published would be hit, with
    nothing in them. In vLLM 0.32 "low" resumes from token 32 here, and has computed 28."""
    run = make_run(
        policy="priority",
        num_blocks=11,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        reserve_full_sequence=False,
    )
    low = run.add("low", range(36), max_tokens=2, priority=2)
    run.step()
    run.add("high", [47, 48, 49], max_tokens=4, priority=1)
    num_computed = 0
    while not low.num_preemptions:
        num_computed = low.num_computed_tokens
        output = run.step()
    assert output.num_scheduled_tokens == {"high": 1}
    while "low" not in output.num_scheduled_tokens:
        output = run.step()
    assert output.scheduled_cached_requests.num_computed_tokens == [num_computed] == [28]
    run.finish()
    assert run.outputs["low"] == generated(range(36), 2)


# Ends


def test_stop_tokens(make_run: Any) -> None:
    stop = generated(range(5), 3)[2]
    run = make_run(stop_token_ids=frozenset({stop}))
    request = run.add("a", range(5), max_tokens=20)
    run.finish()
    expected = generated(range(5), 20)
    assert run.outputs["a"] == expected[: expected.index(stop) + 1]
    assert run.finish_reasons["a"] == "stop"
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_stop_tokens_of_one_request(make_run: Any) -> None:
    expected = generated(range(5), 8)
    run = make_run(num_blocks=40)
    run.add("stops", range(5), max_tokens=8, stop_token_ids=[expected[1]])
    run.add("goes on", range(5), max_tokens=8)
    run.finish()
    assert run.outputs == {"stops": expected[:2], "goes on": expected}
    assert run.finish_reasons == {"stops": "stop", "goes on": "length"}


def test_max_model_len(make_run: Any) -> None:
    run = make_run(max_model_len=10)
    run.add("a", range(7), max_tokens=100)
    run.finish()
    assert run.outputs["a"] == generated(range(7), 3)
    assert run.finish_reasons["a"] == "length"
    with pytest.raises(InvalidArgumentError, match="no room"):
        run.add("b", range(10))


def test_several_tokens_at_once(make_run: Any) -> None:
    """A caller that knows what follows gives it; the tokens are computed in the next step."""
    run = make_run()
    request = run.add("a", range(5), max_tokens=6)
    output = run.schedule()
    run.under_way.clear()
    known = generated(range(5), 3)
    assert run.scheduler.update_from_output(output, {"a": known})[0].new_token_ids == known
    output = run.schedule()
    assert output.num_scheduled_tokens == {"a": 3}
    assert output.scheduled_cached_requests.new_token_ids == [known]
    run.under_way.clear()
    result = run.scheduler.update_from_output(output, {"a": [1, 2, 3, 4, 5]})[0]
    assert (result.new_token_ids, result.finish_reason) == ([1, 2, 3], "length")
    assert list(request.output_token_ids) == [*known, 1, 2, 3]
    run.finish()


@pytest.mark.parametrize(
    "state", ["waiting", "prefilling", "decoding", "preempted", "under way", "finished", "unknown"]
)
def test_abort(make_run: Any, state: str) -> None:
    run = make_run(num_blocks=7, max_num_batched_tokens=8)
    run.add("first", range(7), max_tokens=8)
    victim = "first" if state in ("decoding", "under way", "finished") else "last"
    if state in ("waiting", "decoding", "under way", "finished"):
        run.step()
    run.add("last", range(20, 28), max_tokens=6)
    if state == "prefilling":
        run.step()
        assert run.scheduler.requests["last"].num_computed_tokens == 1
    elif state == "preempted":
        while not run.step().preempted_request_ids:
            pass
    elif state == "under way":
        run.schedule()
    elif state == "finished":
        while "first" not in run.finish_reasons:
            run.step()
    elif state == "unknown":
        victim = "nobody"
    num_before = len(run.scheduler.requests)
    ended = run.scheduler.finish_requests(victim)
    run.scheduler.check()
    if state in ("finished", "unknown"):
        assert ended == []
        assert len(run.scheduler.requests) == num_before
    else:
        assert ids(ended) == [victim]
        assert ended[0].status is RequestStatus.FINISHED_ABORTED
        assert victim not in run.scheduler.requests
        while run.under_way:
            run.update()
        assert victim in run.step().finished_request_ids
    run.finish()


def test_abort_several_and_all(make_run: Any) -> None:
    run = make_run(max_num_seqs=2)
    for name in "abcd":
        run.add(name, [ord(name)] * 5)
    run.step()
    assert ids(run.scheduler.finish_requests(["d", "a", "d", "x"])) == ["d", "a"]
    assert run.scheduler.get_num_unfinished_requests() == 2
    assert ids(run.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)) == ["b", "c"]
    assert run.step().finished_request_ids == ["d", "a", "b", "c"]
    run.finish()
    with pytest.raises(InvalidArgumentError):
        run.scheduler.finish_requests(None, RequestStatus.RUNNING)


def test_id_is_reused_while_its_step_is_under_way(make_run: Any) -> None:
    """The token of the aborted request isn't given to the one that has its id now."""
    run = make_run(num_blocks=40)
    run.add("a", range(5))
    run.schedule()
    run.scheduler.finish_requests("a")
    second = run.add("a", [9] * 6, max_tokens=3)
    output = run.schedule()
    assert (output.finished_request_ids, ids(output.scheduled_new_requests)) == (["a"], ["a"])
    run.update()
    assert second.num_output_tokens == 0
    run.finish()
    assert run.outputs["a"] == generated([9] * 6, 3)


# What is refused


def test_never_fits(make_run: Any) -> None:
    """E6: capacity is (n - 1) * block_size; the last generated token needs no slot."""
    run = make_run(num_blocks=5)
    run.add("fits", range(12), max_tokens=5)
    with pytest.raises(RequestTooLargeError, match=r"needs 5 blocks for 17 tokens .*and 4 exist") as error:
        run.add("too long", range(12), max_tokens=6)
    assert (error.value.num_blocks_needed, error.value.num_blocks) == (5, 4)
    run.finish()
    assert run.outputs["fits"] == generated(range(12), 5)


def test_never_fits_counts_all_groups(make_run: Any) -> None:
    run = make_run(num_blocks=7, specs=[full_attention(), full_attention()])
    run.add("fits", range(11), max_tokens=2)
    with pytest.raises(RequestTooLargeError, match="needs 8 blocks"):
        run.add("too long", range(12), max_tokens=2)
    run.finish()


def test_never_fits_counts_the_state_before(make_run: Any) -> None:
    """A Mamba layer reads one state while it writes the next: two blocks, beside two of attention."""
    specs = [full_attention(), mamba()]
    make_run(num_blocks=5, specs=specs).add("fits", range(8), max_tokens=1)
    with pytest.raises(RequestTooLargeError, match=r"needs 4 blocks .*and 3 exist"):
        make_run(num_blocks=4, specs=specs).add("too long", range(8), max_tokens=1)


def test_never_fits_is_cut_at_the_model_length(make_run: Any) -> None:
    run = make_run(num_blocks=5, max_model_len=17)
    run.add("a", range(4), max_tokens=1000)
    run.finish()
    assert len(run.outputs["a"]) == 13


def test_refused_requests(make_run: Any) -> None:
    run = make_run()
    request = run.add("a", range(5))
    with pytest.raises(InvalidArgumentError, match="unfinished request with the id 'a'"):
        run.scheduler.add_request(run.stack.Request("a", [1], run.hasher))
    with pytest.raises(InvalidArgumentError, match="empty prompt"):
        run.scheduler.add_request(run.stack.Request("b", [], run.hasher))
    with pytest.raises(InvalidArgumentError, match="has 0 block hashes, not 2"):
        run.scheduler.add_request(run.stack.Request("b", range(9)))
    wrong_size = run.stack.BlockHasher("sha256", 2)
    with pytest.raises(InvalidArgumentError, match="has 4 block hashes, not 2"):
        run.scheduler.add_request(run.stack.Request("b", range(9), wrong_size))
    run.finish()
    with pytest.raises(InvalidArgumentError, match="has been used"):
        run.scheduler.add_request(request)
    assert run.scheduler.requests == {}


@pytest.mark.parametrize(
    "tokens",
    [{}, {"a": []}, {"a": [1], "nobody": [2]}, {"a": [1], "b": [2]}, {"a": ["1"]}, {"a": [1.5]}],
    ids=["missing", "empty", "unknown", "prefilling", "text", "float"],
)
def test_wrong_tokens_change_nothing(make_run: Any, tokens: dict[str, Any]) -> None:
    run = make_run(max_num_batched_tokens=7)
    a = run.add("a", range(5))
    run.add("b", range(20, 25))
    output = run.schedule()
    assert output.sampled_request_ids == ["a"]
    with pytest.raises((InvalidArgumentError, TypeError)):
        run.scheduler.update_from_output(output, tokens)
    assert (a.num_output_tokens, a.num_in_flight_tokens) == (0, 5)
    run.update()
    assert a.num_output_tokens == 1
    with pytest.raises(InvalidArgumentError, match="none is under way"):
        run.scheduler.update_from_output(output, {"a": [1]})
    run.finish()


@pytest.mark.parametrize("token", [-1, MAX_TOKEN_ID + 1, 2**64, -(2**64), 10**5000], ids=show)
def test_a_token_that_no_message_can_hold_changes_nothing(make_run: Any, token: int) -> None:
    run = make_run()
    a, b = run.add("a", range(5)), run.add("b", range(20, 25))
    output = run.schedule()
    for tokens in ([token], [1, token], (token, 2), [Token(token)]):
        with pytest.raises(InvalidArgumentError) as caught:
            run.scheduler.update_from_output(output, {"a": [1], "b": tokens})
        assert str(caught.value).startswith("a sampled token is at ") and str(caught.value).endswith(
            f"not {show(token)}"
        )
        assert (a.num_output_tokens, a.num_in_flight_tokens, b.num_output_tokens) == (0, 5, 0)
    run.update()
    run.finish()


class Token:
    """Stands for an integer."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class OwnHasher:
    """A hasher of somebody's, of whose hashes nothing is known; it fails when it has no calls left."""

    def __init__(self, hasher: Any) -> None:
        self.hasher, self.calls_left = hasher, 1000

    def __call__(self, request: Any) -> list[bytes]:
        if self.calls_left == 0:
            raise OSError("no hash today")
        self.calls_left -= 1
        hashes: list[bytes] = self.hasher.hash_token_ids(list(request.all_token_ids))
        return hashes[len(request.block_hashes) :]


def test_a_hasher_that_fails_costs_the_others_nothing(make_run: Any) -> None:
    """Tokens that were hashed before it failed are taken back, without another call of their hasher."""
    run = make_run()
    own, hashers = run.hasher, {name: OwnHasher(run.hasher) for name in "bcd"}
    for name in "abcd":
        run.hasher = hashers.get(name, own)
        run.add(name, range(7), max_tokens=6)
    output, tokens = run.schedule(), run.under_way[0][1]
    requests = list(run.scheduler.requests.values())

    def state() -> list[Any]:
        return [(list(each.all_token_ids), each.block_hashes[:], each.num_in_flight_tokens) for each in requests]

    before = state()
    hashers["c"].calls_left = 0
    for _ in range(2):
        hashers["b"].calls_left = 1
        with pytest.raises(OSError, match="no hash today"):
            run.scheduler.update_from_output(output, tokens)
        assert state() == before
        run.scheduler.check()
    hashers["b"].calls_left = 1000
    assert ids(run.scheduler.finish_requests("c")) == ["c"]
    run.update()
    run.finish()
    assert all(run.outputs[name] == generated(range(7), 6) for name in "abd")


def test_steps_come_back_in_order(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=4)
    run.add("a", range(10))
    first, second = run.schedule(), run.schedule()
    with pytest.raises(InvalidArgumentError, match="the oldest is 1"):
        run.scheduler.update_from_output(second, {})
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 4})
    run.finish()


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 0},
        {"long_prefill_token_threshold": -1},
        {"policy": "lottery"},
    ],
)
def test_wrong_configuration(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        SchedulerConfig(**options)


def test_cross_attention_is_refused(make_run: Any) -> None:
    spec = CrossAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="encoder"):
        make_run(specs=[full_attention(), spec], manager={"enable_caching": False})


# Overlapping steps


def test_preempted_while_under_way(make_run: Any) -> None:
    """Its token comes after it has lost its blocks: it counts, and only then the request is admitted again."""
    run = make_run(num_blocks=7, depth=2)
    run.add("first", range(7), max_tokens=8)
    last = run.add("last", range(20, 28), max_tokens=6)
    while not last.num_preemptions:
        run.step()
    run.finish()
    assert run.outputs == {"first": generated(range(7), 8), "last": generated(range(20, 28), 6)}


def test_finished_by_the_token_that_was_under_way(make_run: Any) -> None:
    run = make_run(num_blocks=40)
    last = run.add("last", range(20, 28), max_tokens=1)
    output = run.schedule()
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert last.status is RequestStatus.PREEMPTED
    assert run.schedule().num_scheduled_tokens == {}, "first its token has to come"
    run.update()
    assert output.sampled_request_ids == ["last"]
    assert run.finish_reasons == {"last": "length"}
    run.finish()


# The rest


def test_reset_prefix_cache(make_run: Any) -> None:
    run = make_run(num_blocks=40)
    requests = [run.add(name, [ord(name)] * 9, max_tokens=6) for name in "abc"]
    run.step()
    assert not run.scheduler.reset_prefix_cache()
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.scheduler.check()
    assert ids(run.scheduler.waiting) == ["a", "b", "c"]
    output = run.step()
    assert output.preempted_request_ids == ["c", "b", "a"]
    assert output.scheduled_cached_requests.resumed == [True] * 3
    assert set(output.num_scheduled_tokens.values()) == {10}, "nothing of it is a hit"
    run.finish()
    assert all(request.num_preemptions == 1 for request in requests)


def test_idle(make_run: Any) -> None:
    run = make_run()
    output = run.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert run.scheduler.update_from_output(output, {}) == []
    assert run.scheduler.make_stats().num_steps == 0


def test_nobody_starves(make_run: Any) -> None:
    """A long request in a stream of short ones that would always fit."""
    run = make_run(num_blocks=12, max_num_batched_tokens=16)
    for number in range(4):
        run.add(f"short {number}", [number] * 4, max_tokens=4)
    run.step()
    run.add("long", range(30), max_tokens=8)
    for number in range(4, 60):
        run.add(f"short {number}", [number % 50] * 4, max_tokens=4)
        run.step()
        if "long" in run.finish_reasons:
            break
    assert run.finish_reasons["long"] == "length"
    assert number < 40
    run.finish()


def test_sliding_window_frees_on_the_way(make_run: Any) -> None:
    """A window needs few blocks however long the text gets: four requests run in a pool that full attention fills with
    one."""
    run = make_run(
        num_blocks=14,
        specs=[sliding_window(8)],
        max_model_len=60,
        max_num_batched_tokens=4,
        manager={"max_in_flight_tokens": 4},
    )
    for number in range(4):
        run.add(str(number), [number] * 8, max_tokens=40)
    run.finish()
    assert run.outputs["3"] == generated([3] * 8, 40)


def test_mamba_states_end_at_block_boundaries(make_run: Any) -> None:
    run = make_run(num_blocks=60, specs=[full_attention(), mamba()], max_num_batched_tokens=10)
    run.add("a", range(23), max_tokens=3)
    steps = [run.step().num_scheduled_tokens for _ in range(4)]
    assert steps == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 3}]
    run.add("b", range(23), max_tokens=3)
    output = run.step()
    assert output.scheduled_new_requests[0].num_computed_tokens == 20
    assert output.new_block_ids_to_zero
    run.finish()
    assert run.outputs["a"] == run.outputs["b"]


def test_a_hit_that_needs_a_block_too_many(make_run: Any) -> None:
    """A hit that ends inside a block is continued in a copy; where there is no block left for it, nothing is hit."""
    run = make_run(num_blocks=4, specs=[full_attention(8), mamba(8)], manager={"hash_block_size": 4})
    for name, num_computed_tokens in (("a", 0), ("b", 0)):
        run.add(name, range(5), max_tokens=1)
        assert run.step().scheduled_new_requests[0].num_computed_tokens == num_computed_tokens
        run.finish()
    run = make_run(num_blocks=6, specs=[full_attention(8), mamba(8)], manager={"hash_block_size": 4})
    for name, num_computed_tokens in (("a", 0), ("b", 4)):
        run.add(name, range(5), max_tokens=1)
        output = run.step()
        assert output.scheduled_new_requests[0].num_computed_tokens == num_computed_tokens
        assert bool(output.block_copies) == (name == "b")
        run.finish()


def test_check_finds_what_is_wrong(make_run: Any) -> None:
    run = make_run(num_blocks=40)
    for name in "ab":
        run.add(name, [ord(name)] * 6)
    run.step()
    scheduler = run.scheduler
    a, b = scheduler.running
    pool = scheduler.kv_cache_manager.block_pool

    def refused(reason: str) -> None:
        with pytest.raises(InvariantError, match=re.escape(reason)):
            scheduler.check()

    a.num_computed_tokens = 60
    refused("invariant 4")
    a.num_computed_tokens = 6
    a.num_in_flight_tokens = 1
    refused("invariant 5")
    a.num_in_flight_tokens = 0
    a.status = RequestStatus.WAITING
    refused("invariant 2")
    a.status = RequestStatus.RUNNING
    scheduler.running.append(a)
    refused("invariant 1")
    scheduler.running.pop()
    stray = pool.get_new_blocks(1)
    refused("invariant 6")
    pool.free_blocks(stray)
    with pytest.raises(BlockStateError):
        pool.free_blocks(stray)
    scheduler.check()
    run.finish()
    assert b.num_output_tokens == 4


def test_the_loop_in_the_documentation_runs() -> None:
    """As written in the module, in a fresh interpreter."""
    text = scheduler_module.__doc__ or ""
    loop = textwrap.dedent(text.split("::\n", 1)[1].split("Rules of a step")[0])
    assert 25 <= len([line for line in loop.splitlines() if line.strip()]) <= 35
    done = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "num_finished_requests=8" in done.stdout
