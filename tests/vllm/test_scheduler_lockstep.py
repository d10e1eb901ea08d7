"""vLLM's Scheduler over the native pool, with the compiled calls of the level ``manager``, against the same Scheduler
over vLLM's own pool, which those calls leave to vLLM's methods: random workloads, the same output of every call, and
the same free list and hashes after it."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from pool_state import free_ids

pytestmark = pytest.mark.vllm

NUM_SEEDS = max(4, int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40")) // 4)  # fewer need not preempt
NUM_STEPS = 60
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


@contextmanager
def native_pool() -> Iterator[None]:
    """The level ``pool`` is in place: what is made meanwhile has a native pool."""
    from kvpool.integrations.vllm import pool
    from kvpool.integrations.vllm.hooks import Hooks

    hooks = Hooks()
    pool.install(hooks)
    try:
        yield
    finally:
        hooks.restore()


class Side:
    """One scheduler and its requests."""

    def __init__(self, bench: Any, options: dict[str, Any], is_native: bool) -> None:
        self.bench = bench
        with native_pool() if is_native else nullcontext():
            self.scheduler = bench.make_vllm_scheduler(
                block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, log_stats=True, **options
            )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        assert hasattr(self.pool, "check") == is_native

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add_request(self.bench.make_vllm_request(name, prompt, BLOCK_SIZE, max_tokens))

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, seed: int) -> dict[str, Any]:
        """One step; all that it shows."""
        rng = random.Random(seed)
        output = self.scheduler.schedule()
        seen = {"output": fields_of(output)}
        tokens = {name: [rng.randrange(3)] for name in output.num_scheduled_tokens}
        for request in self.scheduler.running:
            if request.is_prefill_chunk:
                tokens[request.request_id] = []
        answers = self.scheduler.update_from_output(output, self.bench.model_runner_output(output, tokens))
        seen["answers"] = {name: [answer_fields(each) for each in answer.outputs] for name, answer in answers.items()}
        seen["stats"] = [
            (vars(answer.scheduler_stats.prefix_cache_stats), answer.scheduler_stats.kv_cache_usage)
            for answer in answers.values()
            if answer.scheduler_stats is not None
        ]
        seen["free"] = free_ids(self.pool)
        seen["hashes"] = [block.block_hash for block in self.pool.blocks]
        if hasattr(self.pool, "check"):
            self.pool.check()
        return seen


def fields_of(output: Any) -> dict[str, Any]:
    """A SchedulerOutput as values that can be compared."""
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    values["scheduled_new_reqs"] = [
        (new.req_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs
    ]
    values["scheduled_cached_reqs"] = vars(output.scheduled_cached_reqs).copy()
    return values


def answer_fields(answer: Any) -> tuple[Any, ...]:
    cached = answer.prefill_stats
    return answer.request_id, answer.new_token_ids, answer.finish_reason, None if cached is None else vars(cached)


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "num_blocks": rng.choice([20, 40, 200]),
        "max_num_batched_tokens": rng.choice([16, 64]),
        "max_num_seqs": rng.choice([3, 8]),
        "enable_caching": rng.random() < 0.8,
        "long_prefill_token_threshold": rng.choice([0, 0, 8]),
        "reserve_full_sequence": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.1]),
    }


@pytest.fixture(scope="module")
def bench() -> Any:
    pytest.importorskip("vllm.v1.core.block_pool")
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    return pytest.importorskip("bench.vllm_scheduler")


@pytest.fixture(params=["Scheduler", "AsyncScheduler"])
def scheduler_class(request: pytest.FixtureRequest, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from vllm.v1.core.sched import async_scheduler, scheduler

    if request.param == "AsyncScheduler":
        monkeypatch.setattr(scheduler, "Scheduler", async_scheduler.AsyncScheduler)
    yield request.param


@pytest.fixture
def compiled(bench: Any) -> Iterator[None]:
    """The level ``manager`` is in place."""
    from kvpool.integrations.vllm import manager
    from kvpool.integrations.vllm.hooks import Hooks

    hooks = Hooks()
    manager.install(hooks)
    yield
    hooks.restore()


def test_schedulers_do_the_same(bench: Any, compiled: None, scheduler_class: str) -> None:
    num_preempted = num_finished = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        options = random_options(rng)
        sides = [Side(bench, options, is_native) for is_native in (False, True)]
        families = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
        names: list[str] = []
        for step in range(NUM_STEPS):
            if rng.random() < 0.4:
                prompt = rng.choice(families)[: rng.randint(0, 30)]
                prompt += [rng.randrange(3) for _ in range(rng.randint(1, 8))]
                names.append(f"r{len(names)}")
                max_tokens = rng.randint(1, 20)
                for side in sides:
                    side.add(names[-1], prompt, max_tokens)
            if names and rng.random() < 0.03:
                name = rng.choice(names)
                for side in sides:
                    side.abort(name)
            expected, seen = [side.step(step) for side in sides]
            assert seen == expected, (seed, step, options)
            num_preempted += bool(expected["output"]["scheduled_cached_reqs"]["resumed_req_ids"])
            num_finished += len(expected["output"]["finished_req_ids"])
    assert num_finished > NUM_SEEDS
    assert num_preempted > 0
