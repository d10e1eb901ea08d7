"""Random histories of a scheduler: requests arrive, are aborted, the cache is reset, steps overlap, and the pool is far
too small.

In every history the workers find the right tokens in every slot, the budget is kept, no token is computed twice
(``scheduler_runs.Workers``), the invariants hold after each step, every text is what the model generates alone, and all
blocks are free at the end. Native and reference send the same bytes in every step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import Run, full_attention, generated, make_scheduler, mamba, sliding_window

from kvpool.cache.managers import SingleTypeKVCacheManager
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.scheduler import RequestTooLargeError
from kvpool.scheduler.lifecycle import RequestLifecycle
from kvpool.scheduler.mamba_split import MambaSplit
from kvpool.scheduler.step import Step

SPECS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [full_attention()],
    "window": lambda: [sliding_window(6)],
    "full and window": lambda: [full_attention(), sliding_window(7)],
    "unequal blocks": lambda: [full_attention(8), sliding_window(5)],
    "full and mamba": lambda: [full_attention(), mamba()],
    "unequal mamba": lambda: [full_attention(), mamba(8)],
    "hits inside blocks": lambda: [full_attention(8), mamba(8)],
}
MANAGER_OPTIONS = {"hits inside blocks": {"hash_block_size": 4}}
NUM_SEEDS = max(6, int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40")) // (2 * len(SPECS)))  # per cache and policy
MAX_MODEL_LEN = 64


class History:
    """One history on all backends at once.

    Attributes:
        expected: by request id: prompt and number of tokens of what was not aborted.
    """

    def __init__(self, cache: str, depth: int = 1, **options: Any) -> None:
        options["manager"] = {**MANAGER_OPTIONS.get(cache, {}), **options.get("manager", {})}
        self.runs = [
            Run(make_scheduler(name, specs=SPECS[cache](), max_model_len=MAX_MODEL_LEN, **options), name, depth)
            for name in BACKEND_NAMES
        ]
        self.expected: dict[str, tuple[list[int], int]] = {}
        self.num_added = self.num_refused = 0

    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        request_id = f"r{self.num_added}"
        self.num_added += 1
        self.expected[request_id] = (prompt, max_tokens)
        for run in self.runs:
            try:
                run.add(request_id, prompt, max_tokens, **options)
            except RequestTooLargeError:
                if self.expected.pop(request_id, None):
                    self.num_refused += 1

    def step(self) -> None:
        for run in self.runs:
            run.step()
        self.compare()

    def schedule(self) -> None:
        """A step whose tokens stay under way."""
        for run in self.runs:
            run.schedule()
        self.compare()

    def fail(self, num_writes: int | None, num_earlier: int = 0, leaving: int | None = None) -> None:
        """A step that is withdrawn, perhaps after a request has been aborted."""
        unfinished = sorted(self.runs[0].scheduler.requests)
        request_id = None if leaving is None or not unfinished else unfinished[leaving % len(unfinished)]
        if request_id is not None:
            self.expected.pop(request_id)
        for run in self.runs:
            run.fail(num_writes, num_earlier, request_id)
        self.compare()

    def abort(self, number: int) -> None:
        unfinished = sorted(self.runs[0].scheduler.requests)
        if unfinished:
            request_id = unfinished[number % len(unfinished)]
            self.expected.pop(request_id)
            for run in self.runs:
                run.scheduler.finish_requests(request_id)
                run.scheduler.check()

    def reset(self) -> None:
        for run in self.runs:
            assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
            run.scheduler.check()

    def compare(self) -> None:
        first = self.runs[0]
        for other in self.runs[1:]:
            assert other.messages[-1] == first.messages[-1]
        for run in self.runs:
            del run.messages[:-1]

    def finish(self) -> None:
        for run in self.runs:
            run.finish()
            for request_id, (prompt, max_tokens) in self.expected.items():
                num_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
                assert run.outputs[request_id] == generated(prompt, num_tokens), request_id
        assert len({run.scheduler.make_stats() for run in self.runs}) == 1


def families(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(50) for _ in range(24)] for _ in range(3)]


def random_history(seed: int, cache: str, policy: str, *, fails: bool = False) -> History:
    """One history, up to its last request; with ``fails``, steps are withdrawn again and again."""
    rng = random.Random(seed)
    history = History(
        cache,
        depth=rng.choice([1, 1, 2, 3]),
        policy=policy,
        num_blocks=rng.randint(14, 28),
        max_num_batched_tokens=rng.choice([4, 7, 16, 40]),
        max_num_seqs=rng.randint(2, 8),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        reserve_full_sequence=rng.random() < 0.7,
        manager={"log_stats": True, "watermark": rng.choice([0.0, 0.0, 0.1])},
    )
    starts = families(rng)
    for _ in range(24):
        prompt = rng.choice(starts)[: rng.randint(1, 20)] + [rng.randrange(50) for _ in range(rng.randint(0, 4))]
        history.add(prompt, rng.randint(1, 14), priority=rng.randrange(3))
        for _ in range(rng.randrange(4)):
            history.step()
        if fails and rng.random() < 0.4:
            leaving = rng.choice([None, None, None, rng.randrange(100)])
            history.fail(rng.choice([None, 0, rng.randrange(12), 1000]), rng.choice([0, 0, 1, 2]), leaving)
        if rng.random() < 0.08:
            history.abort(rng.randrange(100))
        if rng.random() < 0.02:
            history.reset()
    return history


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cache", SPECS)
def test_random_histories(cache: str, policy: str) -> None:
    num_preemptions = num_hit_tokens = num_resumed_hit_tokens = 0
    for seed in range(NUM_SEEDS):
        history = random_history(seed, cache, policy)
        history.finish()
        stats = history.runs[0].scheduler.make_stats()
        num_preemptions += stats.num_preemptions
        num_hit_tokens += stats.prefix_hit_tokens
        num_resumed_hit_tokens += stats.resumed_hit_tokens
    assert num_preemptions > 0
    assert num_hit_tokens > 0
    assert num_resumed_hit_tokens > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cache", SPECS)
def test_random_histories_with_steps_that_fail(cache: str, policy: str) -> None:
    """Workers have executed all, a part or nothing of a step that is withdrawn."""
    num_resumed_hit_tokens = 0
    for seed in range(NUM_SEEDS):
        history = random_history(seed, cache, policy, fails=True)
        history.finish()
        num_resumed_hit_tokens += history.runs[0].scheduler.make_stats().prefix_hit_tokens
    assert num_resumed_hit_tokens > 0


@pytest.mark.parametrize("cache", SPECS)
def test_what_is_accepted_ends(cache: str) -> None:
    """The smallest pools that a request is let into: it ends there alone, without hits and with them."""
    rng = random.Random(0)
    num_accepted = 0
    for _ in range(60):
        num_prompt_tokens, max_tokens = rng.randint(1, 40), rng.randint(1, 6)
        options = {"max_num_batched_tokens": rng.choice([5, 8, 60]), "reserve_full_sequence": rng.random() < 0.5}
        for num_blocks in range(2, 40):
            history = History(cache, num_blocks=num_blocks, **options)
            history.add(list(range(num_prompt_tokens)), max_tokens)
            if history.num_refused == 0:
                break
        history.finish()
        history.add(list(range(num_prompt_tokens)), max_tokens)
        history.finish()
        num_accepted += len(history.expected)
    assert num_accepted == 120


def all_extend(step: Step, original: Any) -> Any:
    """Workers are not told that a block table is new."""
    data = original(step)
    data.resumed = [False] * data.num_requests
    return data


def keep_computed_tokens(scheduler: Any, request: Any, original: Any) -> None:
    """A preempted request goes on where it was."""
    num_computed_tokens = request.num_computed_tokens
    original(scheduler, request)
    request.num_computed_tokens = num_computed_tokens


DEFECTS: dict[str, tuple[str, Any, str, Any]] = {
    "a resumed table is appended": ("full", Step, "cached_request_data", all_extend),
    "a preempted request keeps its place": ("full", RequestLifecycle, "_preempt", keep_computed_tokens),
    "blocks are not given back": ("full", KVCacheManager, "free", lambda *_: None),
    "generated tokens are not sent": ("full", Step, "_generated_tokens_to_compute", lambda *_: []),
    "blocks of a withdrawn step stay": ("full", KVCacheManager, "take_back", lambda *_: None),
    "a withdrawn step stays findable": ("full", SingleTypeKVCacheManager, "find_uncomputed_ids", lambda *_: []),
    "who left a withdrawn step stays findable": ("full", RequestLifecycle, "_note_abandoned_blocks", lambda *_: None),
    "a prefill ends anywhere": ("full and mamba", MambaSplit, "clip", lambda *arguments: arguments[3]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_noticed(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    cache, owner, name, replacement = DEFECTS[defect]
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: replacement(*arguments, original))
    with pytest.raises(AssertionError):
        for seed in range(20):
            random_history(seed, cache, "fcfs", fails=True).finish()


PROMPTS = st.tuples(st.integers(0, 1), st.integers(1, 14), st.integers(0, 3))  # start, its length, tokens of its own
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(1, 10), st.integers(0, 2))
ACTIONS = st.lists(
    st.one_of(
        ADD,
        ADD,
        st.just(("step",)),
        st.just(("step",)),
        st.just(("schedule",)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.just(("reset",)),
        st.tuples(st.just("fail"), st.none() | st.integers(0, 30), st.integers(0, 2), st.none() | st.just(0)),
    ),
    max_size=40,
)


@given(actions=ACTIONS, policy=st.sampled_from(["fcfs", "priority"]), budget=st.sampled_from([3, 8, 40]))
@settings(max_examples=40)
def test_any_history(actions: list[tuple[Any, ...]], policy: str, budget: int) -> None:
    history = History("full", policy=policy, num_blocks=9, max_num_batched_tokens=budget, reserve_full_sequence=False)
    starts = families(random.Random(0))
    for name, *arguments in actions:
        if name == "add":
            (start, length, own), max_tokens, priority = arguments
            history.add(starts[start][:length] + [40 + own] * own, max_tokens, priority=priority)
        else:
            getattr(history, name)(*arguments)
    history.finish()
