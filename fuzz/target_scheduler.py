"""Histories of a Scheduler with made-up answers of executors, native against twin.

Requests with strange arguments, answers that lack requests, name others, or hold what are no tokens, aborts of
anything, resets, steps that are under way at a time and steps that are withdrawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from pool_state import state_of
from scheduler_runs import STACKS, full_attention, make_scheduler, mamba, sliding_window

from fuzz.decisions import Decisions, Finding
from fuzz.pairs import Call, call_both
from fuzz.values import Maker, any_int, any_sequence, constant, junk
from kvpool import reference
from kvpool.scheduler import Scheduler

MAX_STEPS = 50
MAX_MODEL_LEN = 48
SPECS: list[Callable[[], list[Any]]] = [
    lambda: [full_attention()],
    lambda: [full_attention()],
    lambda: [sliding_window(6)],
    lambda: [full_attention(), sliding_window(7)],
    lambda: [full_attention(), mamba()],
]
CAN_WITHDRAW = hasattr(Scheduler, "withdraw")


class Half:
    def __init__(self, name: str, specs: list[Any], options: dict[str, Any]) -> None:
        self.backend = reference
        self.disturbed = False
        self.stack = STACKS[name]
        self.scheduler = make_scheduler(name, specs=specs, max_model_len=MAX_MODEL_LEN, **options)
        self.hasher = self.stack.BlockHasher("sha256", self.scheduler.kv_cache_manager.hash_block_size)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.stranger = reference.BlockPool(3, True, 4).get_new_blocks(1)[0]
        self.under_way: deque[Any] = deque()

    def check(self) -> None:
        self.scheduler.check()
        self.pool.check()


def state(half: Half) -> Any:
    scheduler = half.scheduler
    return {
        "counts": scheduler.get_request_counts(),
        "requests": {
            request_id: (
                request.num_tokens,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_output_placeholders,
                request.status.name,
                list(request.block_hashes),
                scheduler.kv_cache_manager.get_block_ids(request_id),
            )
            for request_id, request in scheduler.requests.items()
        },
        "pool": state_of(half.pool),
        "stats": scheduler.make_stats(),
    }


def an_action(d: Decisions) -> Maker:
    which, number = d.below(3), d.below(8)

    def act(half: Half) -> None:
        half.disturbed = True
        if which == 0:
            half.scheduler.finish_requests(f"r{number}")
        elif which == 1:
            half.scheduler.reset_prefix_cache(True)

    return act


def add_request(d: Decisions) -> Call:
    number, family = d.below(8), d.below(3)
    tokens: list[Maker] = [constant(family * 100 + i) for i in range(d.below(24))]
    tokens += [any_int(d, 0, 3, an_action(d)) for _ in range(1 + d.below(3))]
    prompt = any_sequence(d, tokens, an_action(d))
    max_tokens, priority = any_int(d, 1, 9, an_action(d)), any_int(d, 0, 2, an_action(d))
    stops = any_sequence(d, [any_int(d, 0, 5, an_action(d)) for _ in range(d.below(3))], an_action(d))
    request_id: Maker = constant(f"r{number}") if d.byte() < 250 else junk(d)

    def call(half: Half) -> Any:
        request = half.stack.Request(
            request_id(half), prompt(half), half.hasher, max_tokens(half), priority=priority(half), arrival_time=1.0
        )
        return half.scheduler.add_request(request, stops(half))

    return call


def schedule(d: Decisions) -> Call:
    def call(half: Half) -> Any:
        output = half.scheduler.schedule()
        if output.num_scheduled_tokens:
            half.under_way.append(output)
        try:
            return msgspec.msgpack.encode(output)
        except OverflowError:  # a token that is no 64-bit number, which the vocabulary of real workers rules out
            return None

    return call


def an_answer(d: Decisions) -> Callable[[Half, Any], Any]:
    """Right, mostly: a token for each sampled request."""
    how, token = d.byte(), d.below(6)
    wrong: list[Maker] = [junk(d) if how >= 225 else constant(None)]
    which = d.below(8)

    def make(half: Half, output: Any) -> Any:
        answer: Any = {request_id: [token + len(request_id)] for request_id in output.sampled_request_ids}
        if how < 225:
            return answer
        value = wrong[0](half)
        if which == 0 and answer:
            answer.popitem()
        elif which == 1:
            answer["nobody"] = [1]
        elif which == 2:
            answer = dict.fromkeys(answer, value)
        elif which == 3:
            answer = {request_id: [value] for request_id in answer}
        elif which == 4:
            answer = {request_id: [] for request_id in answer}
        elif which == 5:
            answer = {request_id: [token] * 40 for request_id in answer}
        elif which == 6:
            answer = {request_id: [2**70, -1] for request_id in answer}
        else:
            answer = value
        return answer

    return make


def update(d: Decisions) -> Call:
    make, order = an_answer(d), d.below(16)

    def call(half: Half) -> Any:
        if not half.under_way:
            return None
        output = half.under_way[-1 if order == 15 else 0]
        outputs = half.scheduler.update_from_output(output, make(half, output))
        half.under_way.remove(output)
        return [(each.request_id, each.new_token_ids, each.finish_reason) for each in outputs]

    return call


def step(d: Decisions) -> Call:
    make = an_answer(d)

    def call(half: Half) -> Any:
        output = half.scheduler.schedule()
        if not output.num_scheduled_tokens:
            return None
        half.under_way.append(output)
        oldest = half.under_way[0]
        outputs = half.scheduler.update_from_output(oldest, make(half, oldest))
        half.under_way.popleft()
        return [(each.request_id, each.new_token_ids, each.finish_reason) for each in outputs]

    return call


def finish(d: Decisions) -> Call:
    how, number = d.below(16), d.below(8)
    given: Maker = constant(f"r{number}")
    if how == 0:
        given = any_sequence(d, [constant(f"r{number}"), junk(d)], an_action(d))
    elif how == 1:
        given = junk(d)
    elif how == 2:
        given = constant([f"r{number}", f"r{number}", "r0", "nobody"])
    return lambda half: half.scheduler.finish_requests(given(half))


def reset(d: Decisions) -> Call:
    running = d.chance(50)
    return lambda half: half.scheduler.reset_prefix_cache(running)


def withdraw(d: Decisions) -> Call:
    def call(half: Half) -> Any:
        if not CAN_WITHDRAW or not half.under_way:
            return None
        output = half.under_way[-1]
        half.scheduler.withdraw(output)
        half.under_way.pop()
        return output.step

    return call


CALLS: list[Callable[[Decisions], Call]] = [
    *[add_request] * 4,
    *[step] * 6,
    *[schedule] * 2,
    *[update] * 3,
    finish,
    reset,
    *[withdraw] * 2,
]


def run(d: Decisions) -> None:
    specs, options = d.choose(SPECS), d.byte()
    settings: dict[str, Any] = {
        "num_blocks": 10 + d.below(16),
        "max_num_batched_tokens": d.choose([4, 7, 16, 40]),
        "max_num_seqs": 1 + d.below(6),
        "policy": "priority" if options & 1 else "fcfs",
        "reserve_full_sequence": bool(options & 2),
        "manager": {"log_stats": True},
    }
    halves = [Half(name, specs(), settings) for name in STACKS]
    for _ in range(MAX_STEPS):
        if d.is_empty:
            break
        d.num_hostile = 0
        make_call = d.choose(CALLS)
        call = make_call(d)
        if call_both(halves, call, make_call.__name__, state, d.num_hostile > 0, make_call is not step) is None:
            for half in halves:
                half.disturbed = True
    for half in halves:
        half.scheduler.finish_requests(None)
        half.check()
        if not half.under_way and half.pool.get_num_free_blocks() != half.pool.num_gpu_blocks - 1:
            raise Finding(f"{half.pool.num_gpu_blocks - 1 - half.pool.get_num_free_blocks()} blocks are lost")
