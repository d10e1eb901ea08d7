"""Ctrl-C at every place of the scheduler's calls where the interpreter looks for it: the call has happened or has not,
no block is lost, and everybody gets their text.

Over the native pool, whose calls can't be interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from conftest import IS_PURE_PYTHON
from interrupts import Interrupted, Interrupter
from scheduler_runs import Run, full_attention, generated, make_scheduler, mamba, sliding_window

pytestmark = pytest.mark.skipif(IS_PURE_PYTHON, reason="the twin's calls can be interrupted half-way")

SPECS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [full_attention()],
    "full and window": lambda: [full_attention(), sliding_window(7)],
    "full and mamba": lambda: [full_attention(), mamba()],
    "hits inside blocks": lambda: [full_attention(8), mamba(8)],
}
PROMPTS = {"a": list(range(9)), "b": [*range(8), 3, 3], "c": [*range(6), 9], "d": list(range(20, 29))}
NUM_TOKENS = 7
MANY = 10**9
STRIDE = int(os.environ.get("KVPOOL_INTERRUPT_STRIDE", "1499"))


class Interrupting(Run):
    """A run whose scheduler is interrupted once; who calls repeats what has not happened, and withdraws what it knows
    nothing of."""

    def __init__(self, cache: str, policy: str, countdown: int) -> None:
        options = {"hash_block_size": 4} if cache == "hits inside blocks" else {}
        num_blocks = 9 if cache == "full" else 15
        scheduler = make_scheduler(
            "native",
            num_blocks,
            SPECS[cache](),
            max_num_batched_tokens=16,
            policy=policy,
            manager=options,
            max_num_seqs=3,
        )
        super().__init__(scheduler, "native")
        self.interrupt = Interrupter(countdown)

    def until_it_happens(self, call: Callable[..., Any], *arguments: Any, has_happened: Callable[[], bool]) -> Any:
        try:
            return self.interrupt(call, *arguments)
        except Interrupted:
            self.scheduler.check()
            return None if has_happened() else self.interrupt(call, *arguments)

    def add(self, request_id: str, prompt: Any, max_tokens: int = NUM_TOKENS, **options: Any) -> None:
        self.clock += 1
        added = self.stack.Request(request_id, prompt, self.hasher, max_tokens, arrival_time=self.clock, **options)
        self.outputs.setdefault(request_id, [])
        requests = self.scheduler.requests
        self.until_it_happens(self.scheduler.add_request, added, has_happened=lambda: request_id in requests)

    def schedule_and_execute(self) -> None:
        try:
            output = self.interrupt(self.scheduler.schedule)
        except Interrupted:
            self.scheduler.check()
            assert not self.scheduler.steps_under_way
            output = self.interrupt(self.scheduler.schedule)
        self.scheduler.check()
        sampled = self.workers.execute(msgspec.msgpack.encode(output))
        if not output.num_scheduled_tokens:
            return
        if output.step % 3 == 0:
            under_way = self.scheduler.steps_under_way
            self.until_it_happens(self.scheduler.withdraw, output, has_happened=lambda: not under_way)
            self.scheduler.check()
            return
        self.take(output, sampled)

    def take(self, output: Any, sampled: Any) -> None:
        under_way = self.scheduler.steps_under_way
        outputs = self.until_it_happens(
            self.scheduler.update_from_output, output, sampled, has_happened=lambda: not under_way
        )
        self.scheduler.check()
        for one in outputs or []:
            self.outputs[one.request_id] += one.new_token_ids

    def run(self) -> None:
        for number, (request_id, prompt) in enumerate(PROMPTS.items()):
            self.add(request_id, prompt, priority=-number)
            self.schedule_and_execute()
        requests = self.scheduler.requests
        self.add("aborted", [1, 2, 3])
        self.schedule_and_execute()
        self.until_it_happens(self.scheduler.finish_requests, "aborted", has_happened=lambda: "aborted" not in requests)
        self.scheduler.check()
        running = self.scheduler.running
        self.until_it_happens(self.scheduler.reset_prefix_cache, True, has_happened=lambda: not running)
        for _ in range(200):
            if not self.scheduler.has_unfinished_requests():
                break
            self.schedule_and_execute()
        # A last request, so that what an interrupted call had to say is said.
        self.add("last", [1])
        while self.scheduler.has_unfinished_requests():
            self.schedule_and_execute()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for request_id, prompt in PROMPTS.items():
            assert self.outputs[request_id] == generated(prompt, NUM_TOKENS), request_id


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cache", SPECS)
def test_an_interrupted_call_has_happened_or_has_not(cache: str, policy: str) -> None:
    whole = Interrupting(cache, policy, MANY)
    whole.run()
    assert whole.scheduler.make_stats().num_preemptions > 0
    num_places = MANY - whole.interrupt.countdown
    assert num_places > 1000
    for countdown in range((7 * len(cache) + len(policy)) % STRIDE, num_places, STRIDE):
        run = Interrupting(cache, policy, countdown)
        run.run()
        assert run.interrupt.is_spent
