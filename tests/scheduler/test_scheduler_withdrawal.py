"""Steps that are taken back: what was before is again, and workers learn what they need. Random histories with them are
in ``test_scheduler_random``, interrupted calls in ``test_scheduler_interrupts``."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_runs import Run, full_attention, generated, make_scheduler, mamba, sliding_window

from kvpool.errors import InvalidArgumentError
from kvpool.requests.status import RequestStatus
from kvpool.scheduler import Scheduler


@pytest.fixture
def make_run(backend: Any) -> Any:
    """Makes runs; options are those of ``make_scheduler``."""

    def make(**options: Any) -> Run:
        return Run(make_scheduler(backend.name, **options), backend.name)

    return make


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """All that a step changes, but for the free list's order."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "requests": {
            request_id: (
                request.status,
                list(request.all_token_ids),
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_preemptions,
                manager.get_block_ids(request_id),
            )
            for request_id, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "hashes": [block.block_hash for block in pool.blocks],
        "ref_cnts": list(pool.get_ref_counts()),
        "stats": scheduler.make_stats(),
    }


@pytest.mark.parametrize("specs", [[], [sliding_window(6)], [full_attention(), sliding_window(7)]])
def test_everything_is_as_before_the_step(make_run: Any, specs: list[Any]) -> None:
    run = make_run(specs=specs, num_blocks=40, max_num_batched_tokens=12)
    run.add("a", range(10), max_tokens=12)
    run.add("b", [*range(8), 3, 3, 3, 3, 3], max_tokens=12)
    for number in range(14):
        if len(specs) > 0:  # blocks that had left the window before the step are given back by the first
            run.scheduler.withdraw(run.scheduler.schedule())
        before = state_of(run.scheduler)
        output = run.scheduler.schedule()
        assert set(run.scheduler.withdraw(output)) == set(output.num_scheduled_tokens)
        after = state_of(run.scheduler)
        assert [name for name in before if before[name] != after[name]] == []
        run.step()
        if number == 5:
            run.add("c", [*range(9), 1], max_tokens=3)
    run.finish()
    assert run.outputs["a"] == generated(range(10), 12)


def test_a_prefix_that_nobody_computed_is_no_hit(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(9))
    run.scheduler.withdraw(run.scheduler.schedule())
    run.scheduler.finish_requests("a")
    run.add("b", range(9))
    assert run.step().scheduled_new_requests[0].num_computed_tokens == 0


def test_nor_is_one_of_a_request_that_was_aborted_meanwhile(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(9))
    output = run.scheduler.schedule()
    run.scheduler.finish_requests("a")
    run.scheduler.withdraw(output)
    run.add("b", range(9))
    assert run.step().scheduled_new_requests[0].num_computed_tokens == 0


def test_a_prefix_that_was_computed_before_stays_one(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(9))
    run.step()
    run.add("b", range(9))
    run.scheduler.withdraw(run.scheduler.schedule())
    assert run.step().scheduled_new_requests[0].num_computed_tokens == 8
    run.finish()


def test_the_steps_after_it_are_taken_back_with_it(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=8)
    run.add("a", range(20), max_tokens=2)
    before = state_of(run.scheduler)
    first = run.scheduler.schedule()
    run.scheduler.schedule()
    assert run.scheduler.withdraw(first) == ["a"]
    assert not run.scheduler.steps_under_way
    assert state_of(run.scheduler) == before
    run.finish()
    assert run.outputs["a"] == generated(range(20), 2)


def test_the_steps_before_it_stay(make_run: Any) -> None:
    run = make_run(max_num_batched_tokens=8)
    run.add("a", range(20), max_tokens=2)
    run.schedule()
    run.scheduler.withdraw(run.scheduler.schedule())
    assert len(run.scheduler.steps_under_way) == 1
    run.finish()
    assert run.outputs["a"] == generated(range(20), 2)


def test_workers_are_told_whole_tables_again(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(7), max_tokens=8)
    run.add("b", range(20, 25), max_tokens=8)
    run.step()
    run.add("c", range(40, 45))
    output = run.scheduler.schedule()
    run.scheduler.withdraw(output)
    again = run.step()
    assert again.preempted_request_ids == ["a", "b"]
    assert again.finished_request_ids == ["c"]
    assert [new.request_id for new in again.scheduled_new_requests] == ["c"]
    assert again.scheduled_cached_requests.resumed == [True, True]
    assert again.scheduled_cached_requests.new_block_ids == [
        run.scheduler.kv_cache_manager.get_block_ids(request_id) for request_id in ("a", "b")
    ]
    assert run.step().scheduled_cached_requests.resumed == [False, False, False]
    run.finish()


def test_the_news_of_a_step_without_tokens_are_told_again(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(3), max_tokens=1)
    run.step()
    empty = run.scheduler.schedule()
    assert empty.finished_request_ids == ["a"]
    run.add("a", range(5), max_tokens=1)
    later = run.scheduler.schedule()
    assert run.scheduler.withdraw(empty) == ["a"]
    assert not run.scheduler.steps_under_way
    again = run.step()
    assert again.finished_request_ids == ["a"]
    assert [new.request_id for new in again.scheduled_new_requests] == ["a"]
    for output in (empty, later):
        with pytest.raises(InvalidArgumentError, match=f"step {output.step} is not under way"):
            run.scheduler.withdraw(output)
    run.finish()


def test_who_was_preempted_waits(make_run: Any) -> None:
    run = make_run(num_blocks=7)
    run.add("a", range(8), max_tokens=12)
    run.add("b", range(20, 28), max_tokens=12)
    while run.scheduler.make_stats().num_preemptions == 0:
        output = run.scheduler.schedule()
        if run.scheduler.make_stats().num_preemptions == 0:
            run.under_way.append((output, run.workers.execute(msgspec.msgpack.encode(output))))
            run.update()
    run.scheduler.withdraw(output)
    run.scheduler.check()
    assert run.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    assert run.scheduler.make_stats().num_preemptions == 1
    run.finish()
    assert run.outputs["b"] == generated(range(20, 28), 12)


def test_with_recurrent_states_requests_start_again(make_run: Any) -> None:
    run = make_run(specs=[full_attention(), mamba()])
    run.add("a", range(6), max_tokens=4)
    run.step()
    run.scheduler.withdraw(run.scheduler.schedule())
    assert run.scheduler.requests["a"].status is RequestStatus.PREEMPTED
    run.finish()
    assert run.outputs["a"] == generated(range(6), 4)


def test_a_step_is_withdrawn_once_and_before_its_tokens_come(make_run: Any) -> None:
    run = make_run()
    run.add("a", range(6), max_tokens=4)
    done = run.step()
    withdrawn = run.scheduler.schedule()
    run.scheduler.withdraw()
    assert run.scheduler.withdraw() == []
    for output in (done, withdrawn):
        with pytest.raises(InvalidArgumentError, match=f"step {output.step} is not under way"):
            run.scheduler.withdraw(output)
    with pytest.raises(InvalidArgumentError, match="not due"):
        run.scheduler.update_from_output(withdrawn, {"a": [1]})
    run.finish()


def test_errors_of_a_step(make_run: Any) -> None:
    run = make_run()
    for name in ("a", "b"):
        run.add(name, [ord(name)] * 9, max_tokens=4)
    output = run.scheduler.schedule()
    for sampled, errors, message in (
        ({"a": [1]}, {}, "no sampled token for request 'b'"),
        ({"a": [1], "b": [1]}, {"b": "no"}, "sampled tokens and an error for request 'b'"),
        ({"a": [1], "b": [1]}, {"x": "no"}, "not in the step: \\['x'\\]"),
    ):
        before = state_of(run.scheduler)
        with pytest.raises(InvalidArgumentError, match=message):
            run.scheduler.update_from_output(output, sampled, errors)
        assert state_of(run.scheduler) == before
    outputs = run.scheduler.update_from_output(output, {"a": [1]}, {"b": "no"})
    assert [(one.request_id, one.finish_reason, one.error) for one in outputs] == [
        ("a", None, None),
        ("b", "error", "no"),
    ]
    run.scheduler.check()
    assert list(run.scheduler.requests) == ["a"]
    run.scheduler.finish_requests(None)
