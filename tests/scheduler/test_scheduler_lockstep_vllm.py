"""Random histories on vLLM's own Scheduler and on this one, first come, first served: the same requests with the same
tokens, blocks and preemptions in every step, and the same free list after it.

Under "priority" this one schedules in another order than vLLM's, see ``kvpool.scheduler.scheduler``.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from scheduler_runs import BLOCK_SIZE, Run, make_scheduler

from kvpool.scheduler import RequestTooLargeError

pytestmark = pytest.mark.vllm

NUM_SEEDS = int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40"))
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def vllm_scheduler() -> Any:
    """The module that makes vLLM's schedulers, which the benches have."""
    pytest.importorskip("vllm.v1.core.block_pool")
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    return pytest.importorskip("bench.vllm_scheduler")


class Pair:
    """One scheduler of each kind."""

    def __init__(self, vllm_scheduler: Any, backend_name: str, **options: Any) -> None:
        self.module = vllm_scheduler
        manager = {"watermark": options["watermark"], "log_stats": True}
        limits = {name: options[name] for name in LIMITS}
        self.run = Run(
            make_scheduler(backend_name, options["num_blocks"], (), MAX_MODEL_LEN, manager, **limits), backend_name
        )
        self.theirs = vllm_scheduler.make_vllm_scheduler(
            block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, log_stats=True, **options
        )
        self.theirs.make_stats = lambda *_, **__: None  # would start the counts anew with every step
        self.num_preemptions = 0

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        try:
            self.run.add(request_id, prompt, max_tokens)
        except RequestTooLargeError:
            return  # vLLM's would wait for ever
        self.theirs.add_request(self.module.make_vllm_request(request_id, prompt, BLOCK_SIZE, max_tokens))

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.run.scheduler.finish_requests(request_id)
        self.theirs.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        assert self.run.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert self.theirs.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> None:
        theirs, mine = self.theirs.schedule(), self.run.schedule()
        assert list(mine.num_scheduled_tokens.items()) == list(theirs.num_scheduled_tokens.items())
        assert [
            (new.request_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens)
            for new in mine.scheduled_new_requests
        ] == [
            (new.req_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens)
            for new in theirs.scheduled_new_reqs
        ]
        cached, their_cached = mine.scheduled_cached_requests, theirs.scheduled_cached_reqs
        assert cached.request_ids == their_cached.req_ids
        assert cached.resumed == [name in their_cached.resumed_req_ids for name in cached.request_ids]
        assert cached.new_block_ids == their_cached.new_block_ids
        assert cached.num_computed_tokens == their_cached.num_computed_tokens
        assert cached.num_output_tokens == their_cached.num_output_tokens
        assert set(mine.preempted_request_ids) == theirs.preempted_req_ids
        assert set(mine.finished_request_ids) == theirs.finished_req_ids
        self.num_preemptions += len(mine.preempted_request_ids)
        if mine.num_scheduled_tokens:
            sampled = self.module.model_runner_output(theirs, self.run.under_way[0][1])
            self.theirs.update_from_output(theirs, sampled)
            self.run.update()
        self.compare()

    def compare(self) -> None:
        scheduler = self.run.scheduler
        assert [r.request_id for r in scheduler.running] == [r.request_id for r in self.theirs.running]
        assert [r.request_id for r in scheduler.waiting] == [r.request_id for r in self.theirs.waiting]
        mine, theirs = (
            [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
            for manager in (scheduler.kv_cache_manager, self.theirs.kv_cache_manager)
        )
        assert mine == theirs

    def finish(self) -> None:
        while self.run.scheduler.has_unfinished_requests():
            self.step()
        assert not self.theirs.has_unfinished_requests()
        mine = self.run.scheduler.kv_cache_manager.make_prefix_cache_stats()
        theirs = self.theirs.kv_cache_manager.make_prefix_cache_stats()
        for name in ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"):
            assert getattr(mine, name) == getattr(theirs, name), name


LIMITS = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "reserve_full_sequence")


def run_history(vllm_scheduler: Any, backend_name: str, seed: int) -> int:
    """Number of preemptions."""
    rng = random.Random(seed)
    max_num_seqs = rng.randint(2, 8)
    pair = Pair(
        vllm_scheduler,
        backend_name,
        num_blocks=rng.randint(12, 24),
        max_num_batched_tokens=rng.choice([8, 16, 40]),
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        reserve_full_sequence=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.1]),
    )
    starts = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    for number in range(24):
        prompt = rng.choice(starts)[: rng.randint(1, 20)] + [rng.randrange(50) for _ in range(rng.randint(0, 4))]
        pair.add(f"r{number}", prompt, rng.randint(1, 14))
        for _ in range(rng.randrange(4)):
            pair.step()
        unfinished = sorted(pair.run.scheduler.requests)
        if unfinished and rng.random() < 0.08:
            pair.abort(rng.choice(unfinished))
        if rng.random() < 0.02:
            pair.reset()
    pair.finish()
    return pair.num_preemptions


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_the_same_steps(vllm_scheduler: Any, backend_name: str) -> None:
    num_preemptions = 0
    for seed in range(NUM_SEEDS):
        num_preemptions += run_history(vllm_scheduler, backend_name, seed)
    assert num_preemptions > NUM_SEEDS
