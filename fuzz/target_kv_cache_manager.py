"""Histories of calls on a KVCacheManager over every kind of layout, native against twin.

The sound half of a scheduler's work (admit, compute, preempt, free) with arguments that are too large, of a wrong type,
or change what is being read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from manager_histories import Stack
from manager_layouts import Layout, Status, new_hashes, random_layout
from pool_state import event_fields, state_of

from fuzz.decisions import Decisions, Finding
from fuzz.pairs import Call, call_both, outcome
from fuzz.values import Maker, any_int, any_sequence, constant, junk
from kvpool import backend, reference
from kvpool.cache.blocks import KVCacheBlocks
from kvpool.reference.request import Request as ReferenceRequest

MAX_STEPS = 40
REQUEST_CLASSES = {"native": backend.Request, "reference": ReferenceRequest}
NUM_REQUESTS = 4


class Half:
    """A manager and its requests; the last hit that was found for each."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.backend = reference
        self.disturbed = False
        self.stack = Stack(name, layout)
        self.manager, self.pool = self.stack.manager, self.stack.pool
        self.request_class = REQUEST_CLASSES[name]
        self.requests: dict[int, Any] = {}
        self.hits: dict[int, KVCacheBlocks] = {}
        self.stranger = reference.BlockPool(3, True, 4).get_new_blocks(1)[0]
        for number in range(NUM_REQUESTS):
            self.add(number, list(range(number, number + 9)))

    def add(self, number: int, token_ids: list[int]) -> None:
        size = self.pool.hash_block_size
        made = self.request_class(f"r{number}", token_ids, lambda request: new_hashes(request, size))
        made.status = Status.WAITING
        self.requests[number] = made
        self.hits.pop(number, None)

    def check(self) -> None:
        self.stack.check()


def state(half: Half) -> Any:
    manager, pool_state = half.manager, state_of(half.pool)
    return {
        "tables": {number: manager.get_block_ids(made.request_id) for number, made in half.requests.items()},
        "requests": {number: (made.num_tokens, made.num_computed_tokens) for number, made in half.requests.items()},
        "usage": manager.usage,
        "pool": pool_state,
    }


def an_action(d: Decisions) -> Maker:
    which, number = d.below(4), d.below(NUM_REQUESTS)

    def act(half: Half) -> None:
        half.disturbed = True
        made = half.requests[number]
        if which == 0:
            half.manager.reset_prefix_cache()
        elif which == 1:
            half.manager.free(made)
        elif which == 2:
            made.append_output_token_ids([1, 2, 3])
        else:
            half.manager.evict_blocks({1, 2, 3})

    return act


def a_request(d: Decisions) -> Maker:
    if d.byte() >= 248:
        return junk(d)
    number = d.below(NUM_REQUESTS)
    return lambda half: half.requests[number]


def a_number(d: Decisions, last: int) -> Maker:
    if d.chance(4):
        return constant(d.choose([2**63 - 1, 2**63, 10**5, -1]))
    return any_int(d, 0, last, an_action(d))


def add_request(d: Decisions) -> Call:
    number, family = d.below(NUM_REQUESTS), d.below(3)
    token_ids = [family * 100 + i for i in range(1 + d.below(60))]
    token_ids += [d.byte() % 3 for _ in range(d.below(4))]

    def call(half: Half) -> Any:
        half.manager.free(half.requests[number])
        half.add(number, token_ids)
        return None

    return call


def look_up(d: Decisions) -> Call:
    given, number = a_request(d), d.below(NUM_REQUESTS)

    def call(half: Half) -> Any:
        blocks, num_tokens, boundary = half.manager.get_computed_blocks_and_boundary(given(half))
        half.hits[number] = blocks
        return blocks, num_tokens, boundary

    return call


def admit(d: Decisions) -> Call:
    """What a scheduler does: look up, then allocate for the rest."""
    given, num_new, lookahead = a_request(d), a_number(d, 20), d.choose([0, 0, 0, 2, 5])
    delay, fit, external = d.chance(15), d.chance(20), d.choose([0, 0, 0, 8, 16])

    def call(half: Half) -> Any:
        made, manager = given(half), half.manager
        if made.num_computed_tokens != 0:
            return None
        blocks, num_hit, _ = manager.get_computed_blocks_and_boundary(made)
        got = manager.allocate_slots(
            made,
            num_new(half),
            num_hit,
            blocks,
            lookahead,
            external,
            delay,
            6 if half.stack.manager.coordinator is None else 0,
            fit,
        )
        if got is not None:
            made.num_computed_tokens = min(num_hit + external + 1, made.num_tokens)
            made.status = Status.RUNNING
        return got, num_hit

    return call


def go_on(d: Decisions) -> Call:
    given, num_new, lookahead = a_request(d), a_number(d, 6), a_number(d, 3)
    token = d.byte() % 3

    def call(half: Half) -> Any:
        made, n = given(half), num_new(half)
        got = half.manager.allocate_slots(made, n, num_lookahead_tokens=lookahead(half))
        if got is not None and type(n) is int:
            made.num_computed_tokens = min(made.num_computed_tokens + n, made.num_tokens)
            if made.num_computed_tokens == made.num_tokens:
                made.append_output_token_ids(token)
        return got

    return call


def decode(d: Decisions) -> Call:
    given = any_sequence(d, [a_request(d) for _ in range(d.below(4))], an_action(d))
    token = d.byte() % 3

    def call(half: Half) -> Any:
        made = given(half)
        answers = half.manager.allocate_decode(made)
        for each, got in zip(made, answers):
            if got is not None:
                each.num_computed_tokens = min(each.num_computed_tokens + 1, each.num_tokens)
                if each.num_computed_tokens == each.num_tokens:
                    each.append_output_token_ids(token)
        return answers

    return call


def allocate_anyhow(d: Decisions) -> Call:
    """Any arguments at all, a hit of another request among them."""
    given, number = a_request(d), d.below(NUM_REQUESTS)
    numbers = [a_number(d, last) for last in (9, 9, 3, 9, 6, 5)]
    flags = d.byte()

    def call(half: Half) -> Any:
        new, hit, lookahead, external, encoder, reserved = (make(half) for make in numbers)
        return half.manager.allocate_slots(
            given(half),
            new,
            num_new_computed_tokens=hit if flags & 1 else 0,
            new_computed_blocks=half.hits.get(number) if flags & 2 else None,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external if flags & 4 else 0,
            delay_cache_blocks=bool(flags & 8),
            num_encoder_tokens=encoder if flags & 16 else 0,
            full_sequence_must_fit=bool(flags & 32),
            reserved_blocks=reserved if flags & 64 else 0,
        )

    return call


def cache_blocks(d: Decisions) -> Call:
    given, n = a_request(d), a_number(d, 40)
    return lambda half: half.manager.cache_blocks(given(half), n(half))


def free(d: Decisions) -> Call:
    given = a_request(d)

    def call(half: Half) -> Any:
        made = given(half)
        half.manager.free(made)
        made.num_computed_tokens = 0
        made.status = Status.PREEMPTED
        return None

    return call


def remove_skipped_blocks(d: Decisions) -> Call:
    given, n = a_request(d), a_number(d, 40)
    return lambda half: half.manager.remove_skipped_blocks(given(half).request_id, n(half))


def change_request(d: Decisions) -> Call:
    given, n, which = a_request(d), a_number(d, 30), d.below(3)

    def call(half: Half) -> Any:
        made = given(half)
        if which == 0:
            made.append_output_token_ids([1] * d_small)
        elif which == 1:
            made.num_in_flight_tokens = min(made.num_computed_tokens, 4)
        else:
            half.manager.get_num_common_prefix_blocks(made.request_id)
            return half.manager.estimate_cached_tokens(made)
        return n(half) if which == 3 else None

    d_small = d.below(6)
    return call


def of_the_pool(d: Decisions) -> Call:
    which = d.below(5)
    ids = any_sequence(d, [any_int(d, 0, 12, an_action(d)) for _ in range(d.below(4))], an_action(d))

    def call(half: Half) -> Any:
        manager = half.manager
        if which == 0:
            return manager.evict_blocks(ids(half))
        if which == 1:
            return manager.reset_prefix_cache()
        if which == 2:
            return [event_fields(event) for event in manager.take_events()]
        if which == 3:
            return manager.take_new_block_ids()
        return manager.new_step_starts()

    return call


CALLS: list[Callable[[Decisions], Call]] = [
    *[add_request] * 3,
    look_up,
    *[admit] * 4,
    *[go_on] * 5,
    *[decode] * 3,
    allocate_anyhow,
    cache_blocks,
    *[free] * 2,
    change_request,
    of_the_pool,
]


def tables(half: Half) -> dict[int, Any]:
    return {number: half.manager.get_block_ids(made.request_id) for number, made in half.requests.items()}


def compare_tables(before: dict[int, Any], after: dict[int, Any], what: str) -> None:
    """After a refused allocation a request has no more than before; what no token attends to any more may be free."""
    for number, groups in before.items():
        for held, now in zip(groups, after[number]):
            if len(held) != len(now) or any(now_id not in (held_id, 0) for held_id, now_id in zip(held, now)):
                raise Finding(f"{what} raised; the table of r{number} was {held} and is {now}")


def run(d: Decisions) -> None:
    layout = random_layout(random.Random(d.below(4096)))
    halves = [Half(name, layout) for name in REQUEST_CLASSES]
    for _ in range(MAX_STEPS):
        if d.is_empty:
            break
        d.num_hostile = 0
        make_call = d.choose(CALLS)
        call = make_call(d)
        before = tables(halves[0])
        is_atomic = make_call not in (admit, go_on, decode, allocate_anyhow)
        answer = call_both(halves, call, make_call.__name__, state, d.num_hostile > 0, is_atomic)
        if not is_atomic and answer is not None and answer[0] == "raised":
            compare_tables(before, tables(halves[0]), make_call.__name__)
        if answer is None:
            for half in halves:
                half.disturbed = True
    for half in halves:
        for made in half.requests.values():
            outcome(lambda half, made=made: half.manager.free(made), half)
        half.check()
