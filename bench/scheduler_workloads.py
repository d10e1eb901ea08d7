"""Steps of a scheduler: what the schedulers of each implementation are made to do.

``native`` and ``reference`` are kvpool's scheduler over the native pool and over the twin; ``vllm`` is vLLM's own
Scheduler. Requests and their block hashes are made before the clock starts, and sampled tokens are made up. A figure is
ns per running request, or for long prompts ns per block.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.hash_workloads import make_hasher
from bench.implementations import HASH_BLOCK_SIZE, Implementation
from bench.rows import Row
from bench.workloads import SEED, Workload

VOCABULARY = 128_000
DECODE_PROMPT_TOKENS = 512
MAX_DECODE_STEPS = 1_024
NUM_RUNNING = (256, 1_024)
PROMPT_TOKENS = 128 * 1024
NUM_LONG_PROMPTS = 2
STEP_TOKENS = 8_192
ALGORITHM = "sha256"


class KvpoolScheduler:
    """kvpool's scheduler and requests under names that vLLM's get too."""

    def __init__(self, implementation: Implementation, num_blocks: int, max_model_len: int, **limits: int) -> None:
        from kvpool import reference
        from kvpool.backend import Request
        from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from kvpool.kv_cache_manager import KVCacheManager
        from kvpool.reference.request import Request as ReferenceRequest
        from kvpool.scheduler import Scheduler, SchedulerConfig

        spec = FullAttentionSpec(block_size=HASH_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)])
        make_manager: Callable[..., Any] = partial(KVCacheManager, block_pool_class=implementation.pool_class)
        if implementation.name == "reference":
            make_manager = getattr(reference, "KVCacheManager", make_manager)
        self.scheduler: Any = Scheduler(make_manager(config, max_model_len), SchedulerConfig(**limits))
        self._request_class = ReferenceRequest if implementation.name == "reference" else Request
        self._hasher = make_hasher(implementation, ALGORITHM)

    def make_request(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        return self._request_class(request_id, prompt, self._hasher, max_tokens)

    def sampled(self, output: Any) -> Any:
        """What ``update_from_output`` takes beside the step."""
        return {request_id: [7] for request_id in output.sampled_request_ids}

    def abort_all(self) -> None:
        self.scheduler.finish_requests(None)

    def check(self) -> None:
        self.scheduler.check()


class VllmScheduler(KvpoolScheduler):
    """vLLM's, under the same names."""

    def __init__(self, implementation: Implementation, num_blocks: int, max_model_len: int, **limits: int) -> None:
        from bench.vllm_scheduler import make_vllm_scheduler

        self.scheduler = make_vllm_scheduler(num_blocks, HASH_BLOCK_SIZE, max_model_len, **limits)

    def make_request(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        from bench.vllm_scheduler import make_vllm_request

        return make_vllm_request(request_id, prompt, HASH_BLOCK_SIZE, max_tokens)

    def sampled(self, output: Any) -> Any:
        from bench.vllm_scheduler import model_runner_output

        requests = self.scheduler.requests
        is_complete = {name: requests[name].num_computed_tokens == requests[name].num_tokens for name in requests}
        return model_runner_output(output, {name: [7] for name in output.num_scheduled_tokens if is_complete[name]})

    def abort_all(self) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    def check(self) -> None:
        manager = self.scheduler.kv_cache_manager
        tables = [manager.get_block_ids(request.request_id)[0] for request in self.scheduler.running]
        in_use = len({block_id for table in tables for block_id in table})
        if manager.block_pool.get_num_free_blocks() != manager.block_pool.num_gpu_blocks - 1 - in_use:
            raise AssertionError("blocks are lost")


def make_scheduler(implementation: Implementation, num_blocks: int, max_model_len: int, **limits: int) -> Any:
    """The implementation's scheduler behind one face; limits are those of ``SchedulerConfig``."""
    kind = VllmScheduler if implementation.name == "vllm" else KvpoolScheduler
    return kind(implementation, num_blocks, max_model_len, **limits)


class DecodeSteps(Workload):
    """All requests run and decode; a round is one step.

    Args:
        part: "schedule", "update" (of the scheduler with the sampled tokens) or "step", both.
    """

    def __init__(self, implementation: Implementation, num_running: int, part: str) -> None:
        max_len = DECODE_PROMPT_TOKENS + MAX_DECODE_STEPS + 2
        self.blocks_per_round = self.num_running = num_running
        self.part = part
        num_blocks = num_running * -(-max_len // HASH_BLOCK_SIZE) + 1
        self.face = make_scheduler(
            implementation,
            num_blocks,
            max_len,
            max_num_batched_tokens=num_running * DECODE_PROMPT_TOKENS,
            max_num_seqs=num_running,
        )
        rng = random.Random(SEED)
        self.prompts = [[rng.randrange(VOCABULARY) for _ in range(DECODE_PROMPT_TOKENS)] for _ in range(num_running)]
        self.num_steps = MAX_DECODE_STEPS
        self.output: Any = None
        self.tokens: Any = None

    def start(self) -> None:
        """All requests anew, their prompts computed."""
        self.face.abort_all()
        for number, prompt in enumerate(self.prompts):
            self.face.scheduler.add_request(self.face.make_request(f"request {number}", prompt, MAX_DECODE_STEPS + 1))
        self.schedule()
        if len(self.output.num_scheduled_tokens) != self.num_running:
            raise AssertionError("not all requests run")
        self.update()
        self.num_steps = 0

    def schedule(self) -> None:
        self.output = self.face.scheduler.schedule()

    def update(self) -> None:
        self.face.scheduler.update_from_output(self.output, self.face.sampled(self.output))
        self.output = None

    def prepare(self) -> None:
        if self.output is not None:
            self.update()
        if self.num_steps >= MAX_DECODE_STEPS - 1:
            self.start()
        self.num_steps += 1
        if self.part == "update":
            self.schedule()
            self.tokens = self.face.sampled(self.output)

    def operate(self) -> None:
        scheduler = self.face.scheduler
        if self.part == "update":
            scheduler.update_from_output(self.output, self.tokens)
            self.output = None
            return
        self.output = scheduler.schedule()
        if self.part == "step":
            self.update()

    def check(self) -> None:
        if self.output is not None:
            self.update()
        self.face.check()
        if len(self.face.scheduler.running) != self.num_running:
            raise AssertionError(f"{len(self.face.scheduler.running)} requests run, not {self.num_running}")


class LongPrompts(Workload):
    """Requests with prompts of 128 k tokens come, are computed 8,192 tokens a step, and leave with their first token.

    Args:
        is_cached: every full block is a hit, so that each needs one step; else nothing is.
    """

    def __init__(self, implementation: Implementation, is_cached: bool) -> None:
        self.is_cached = is_cached
        blocks_per_prompt = PROMPT_TOKENS // HASH_BLOCK_SIZE
        self.blocks_per_round = NUM_LONG_PROMPTS * blocks_per_prompt
        self.face = make_scheduler(
            implementation,
            NUM_LONG_PROMPTS * (blocks_per_prompt + 2) + 1,
            PROMPT_TOKENS + 2,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=NUM_LONG_PROMPTS,
        )
        rng = random.Random(SEED)
        self.prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_LONG_PROMPTS)]
        self.requests: list[Any] = []
        self.num_steps = 0
        self.prepare()
        self.operate()

    def prepare(self) -> None:
        if not self.is_cached and not self.face.scheduler.reset_prefix_cache():
            raise AssertionError("blocks are in use")
        self.make_requests()

    def make_requests(self) -> None:
        self.requests = [
            self.face.make_request(f"request {number}", prompt, 1) for number, prompt in enumerate(self.prompts)
        ]

    def operate(self) -> None:
        face, scheduler = self.face, self.face.scheduler
        for request in self.requests:
            scheduler.add_request(request)
        self.num_steps = 0
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, face.sampled(output))
            self.num_steps += 1

    def check(self) -> None:
        expected = 1 if self.is_cached else PROMPT_TOKENS * NUM_LONG_PROMPTS // STEP_TOKENS
        if self.num_steps != expected:
            raise AssertionError(f"{self.num_steps} steps, {expected} expected")
        self.face.check()


def scheduler_rows() -> list[Row]:
    """What is measured of schedulers; nothing is promised against vLLM's, which does more in a step."""
    rows = [
        Row(
            f"scheduler/{part}/{num_running}",
            f"{title}, {num_running:,} requests decoding",
            partial(DecodeSteps, num_running=num_running, part=part),
        )
        for num_running in NUM_RUNNING
        for part, title in (("schedule", "schedule()"), ("update", "update_from_output()"), ("step", "a whole step"))
    ]
    return rows + [
        Row(
            f"scheduler/prompt/{name}",
            f"{NUM_LONG_PROMPTS} prompts of 128 k tokens from add_request to the first token, all {name}",
            partial(LongPrompts, is_cached=is_cached),
        )
        for name, is_cached in (("hits", True), ("misses", False))
    ]
