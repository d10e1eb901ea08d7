"""A decode step of 256 requests without its model: what kvpool itself adds to a step, and where.

A stand-in for the model gives logits that are there already, so the runner does all but the model: block tables, slots,
packed inputs, the argmax over the logits of a small vocabulary, tokens back to the scheduler.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from bench.workloads import SEED, Workload
from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvpool.engine.engine import Engine
from kvpool.scheduler import SchedulerConfig
from kvpool.worker.model_runner import ModelRunner, RunnerConfig

NUM_REQUESTS = 256
BLOCK_SIZE = 16
PROMPT_TOKENS = 320
MAX_MODEL_LEN = 2048
VOCABULARY = 64
MAX_TOKENS = MAX_MODEL_LEN - PROMPT_TOKENS - 1
PARTS = {
    "step": "the whole step",
    "schedule": "schedule()",
    "execute": "execute(), all but the model",
    "update": "update_from_output()",
}


class InstantModel:
    """Takes the place of a model: logits that need no computing, the same for every token."""

    vocab_size = VOCABULARY
    max_model_len = MAX_MODEL_LEN
    dtype = torch.float32

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._logits = torch.rand(NUM_REQUESTS, VOCABULARY, generator=torch.Generator().manual_seed(SEED)).to(device)

    def kv_cache_groups(self, block_size: int) -> list[KVCacheGroupSpec]:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")
        return [KVCacheGroupSpec(["layer"], spec)]

    def forward(self, input_ids: Any, positions: Any, context: Any, logit_rows: Any) -> torch.Tensor:
        return self._logits[: len(logit_rows)]


class DecodeStep(Workload):
    """Steps in which each request computes one token; every step 16 of them need a block.

    Args:
        part: which part of a step is timed, see ``PARTS``.
    """

    def __init__(self, part: str = "step", device: str = "cpu") -> None:
        self.part, self.device = part, device
        self.blocks_per_round = NUM_REQUESTS
        self.num_left = 0
        self.output: Any = None  # of a step whose tokens are not back yet

    def _start(self) -> None:
        """All prompts are computed, each with a length of its own, so that blocks fill up at different steps."""
        model = InstantModel(self.device)
        groups = model.kv_cache_groups(BLOCK_SIZE)
        config = KVCacheConfig(NUM_REQUESTS * (MAX_MODEL_LEN // BLOCK_SIZE) + 1, groups)
        limits = (NUM_REQUESTS, NUM_REQUESTS * PROMPT_TOKENS, MAX_MODEL_LEN)
        self.runner = ModelRunner(model, config, RunnerConfig(*limits))  # type: ignore[arg-type]
        scheduler_config = SchedulerConfig(max_num_batched_tokens=limits[1], max_num_seqs=NUM_REQUESTS)
        self.engine = Engine(config, self.runner, max_model_len=MAX_MODEL_LEN, scheduler_config=scheduler_config)
        rng = random.Random(SEED)
        for i in range(NUM_REQUESTS):
            prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS - i % BLOCK_SIZE)]
            self.engine.add_request(prompt, max_tokens=MAX_TOKENS)
        self.engine.step()
        self.scheduler = self.engine.scheduler
        assert len(self.scheduler.running) == NUM_REQUESTS
        self.num_left = MAX_TOKENS - 2

    def prepare(self) -> None:
        self._finish_last_step()
        if self.num_left == 0:
            self._start()
        self.num_left -= 1
        if self.part in ("execute", "update"):
            self.output = self.scheduler.schedule()
        if self.part == "update":
            self.tokens = self.runner.execute(self.output).tokens

    def operate(self) -> None:
        if self.part == "step":
            self.engine.step()
        elif self.part == "schedule":
            self.output = self.scheduler.schedule()
        elif self.part == "execute":
            self.tokens = self.runner.execute(self.output).tokens
        else:
            self.scheduler.update_from_output(self.output, self.tokens)
            self.output = None

    def _finish_last_step(self) -> None:
        """What comes behind the timed part of a step."""
        if self.output is None:
            return
        if self.part == "schedule":
            self.tokens = self.runner.execute(self.output).tokens
        self.scheduler.update_from_output(self.output, self.tokens)
        self.output = None

    def check(self) -> None:
        self._finish_last_step()
        self.scheduler.check()
        assert all(len(request.output_token_ids) > 1 for request in self.scheduler.running)
