"""Random histories of an engine whose executor is a worker on a simulated KV memory; every text is checked.

The executor fails before, in the middle of or after what it writes, and has no token for a request now and then; Ctrl-C
comes anywhere in a step. The engine goes on, and everybody gets their text.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from interrupts import Interrupted, Interrupter
from kv_contents import MessageWorker, StepFailed, generated
from scheduler_contents import MANAGER_OPTIONS, MAX_MODEL_LEN, NUM_BLOCKS, SPECS, random_prompt

import kvpool
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec
from kvpool.engine.engine import Engine
from kvpool.scheduler import RequestTooLargeError, SchedulerConfig
from kvpool.worker.executor import ExecutorLimits


class EngineHistory:
    """One history of an engine; requests come and go between its steps."""

    def __init__(self, seed: int, cache: str, *, fails: bool) -> None:
        self.rng = rng = random.Random(seed)
        specs = SPECS[cache]()
        num_blocks = rng.randint(*NUM_BLOCKS.get(cache, (11, 22))) + 7 * (len(specs) - 1)
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
        hash_block_size = MANAGER_OPTIONS.get(cache, {}).get("hash_block_size")
        self.worker = MessageWorker(specs)
        self.worker.limits = ExecutorLimits(50, MAX_MODEL_LEN, 10, 40, num_blocks)  # type: ignore[attr-defined]
        self.engine = Engine(
            KVCacheConfig(num_blocks, groups, hash_block_size=hash_block_size),
            self.worker,
            max_model_len=MAX_MODEL_LEN,
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=rng.choice([4, 7, 16, 40]),
                max_num_seqs=rng.randint(2, 10),
                policy=rng.choice(["fcfs", "priority"]),
            ),
        )
        self.families = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.num_added = 0
        self.fails = fails
        self.seen: Counter[str] = Counter()

    def run(self, num_requests: int = 24) -> Counter[str]:
        rng, scheduler = self.rng, self.engine.scheduler
        while self.num_added < num_requests or scheduler.has_unfinished_requests():
            choice = rng.random()
            if choice < 0.01 and scheduler.requests:
                self.seen["aborts"] += len(scheduler.finish_requests(rng.choice(sorted(scheduler.requests))))
            elif choice < 0.03:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            elif choice < 0.35 and self.num_added < num_requests:
                self.add()
            elif scheduler.has_unfinished_requests():
                self.step()
            scheduler.check()
            if self.seen["steps"] > 2000:
                raise AssertionError(f"unfinished after 2000 steps: {list(scheduler.requests.values())}")
        self.generate()
        stats, pool = scheduler.make_stats(), scheduler.kv_cache_manager.block_pool
        self.seen["preemptions"] = stats.num_preemptions
        self.seen["hit tokens"] = stats.prefix_hit_tokens + stats.resumed_hit_tokens
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self.engine.close()
        return self.seen

    def prompt(self) -> list[int]:
        return random_prompt(self.rng, self.families)

    def add(self) -> None:
        prompt, max_tokens = self.prompt(), self.rng.randint(1, 14)
        self.num_added += 1
        try:
            request_id = self.engine.add_request(prompt, max_tokens=max_tokens)
        except RequestTooLargeError:
            return
        self.expected[request_id] = generated(prompt, max_tokens)
        self.worker.text_of[request_id] = prompt + self.expected[request_id]
        self.outputs[request_id] = []

    def step(self) -> None:
        self.seen["steps"] += 1
        rng, worker, scheduler = self.rng, self.worker, self.engine.scheduler
        if self.fails and rng.random() < 0.1:
            worker.fail = rng.choice(["before", "middle", "after"]), rng.randrange(20)
        elif self.fails and scheduler.running and rng.random() < 0.03:
            worker.errors[rng.choice(scheduler.running).request_id] = "no number"
        try:
            if self.fails and kvpool.BACKEND == "native" and rng.random() < 0.1:
                outputs = Interrupter(int(rng.expovariate(1 / 300)))(self.engine.step)
            else:
                outputs = self.engine.step()
        except StepFailed as failure:
            self.seen[f"failed {failure.when}"] += 1
        except Interrupted:
            self.seen["interrupted"] += 1
        else:
            self.take(outputs)
        worker.fail, worker.writes_left = None, None
        if self.fails and rng.random() < 0.3 and scheduler.requests and self.seen["steps"] % 7 == 0:
            self.seen["aborts"] += len(scheduler.finish_requests(rng.choice(sorted(scheduler.requests))))

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            text = self.outputs[output.request_id]
            text += output.new_token_ids
            assert text == self.expected[output.request_id][: len(text)], output
            if output.finish_reason == "error":
                self.seen["ended by an error"] += 1
            elif output.finish_reason is not None:
                assert text == self.expected[output.request_id]
                self.seen["finished"] += 1

    def generate(self) -> None:
        """All prompts at once; on the cache as the history has left it."""
        prompts = [self.prompt()[:12] for _ in range(6)]
        texts = self.engine.generate(prompts, max_tokens=6)
        assert texts == [generated(prompt, 6) for prompt in prompts]
