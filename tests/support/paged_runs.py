"""Prompts through scheduler, cache manager and model runner; every step is checked, and messages travel as bytes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from kvpool.backend import BlockHasher, Request
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from kvpool.worker.model_runner import ModelRunner, RunnerConfig
from kvpool.worker.models.transformers_model import TransformersModel


@dataclass(frozen=True)
class RunSettings:
    """How a ``PagedRun`` is set up.

    Attributes:
        spoilt: the pool is full of large finite numbers to begin with.
        shuffle_seed: blocks are handed out in a random order; in that of their ids if None.
        depth: steps that are under way at a time.
        extra_groups: KV cache groups of the manager that the model has no layers for; workers are not told of them.
    """

    block_size: int = 16
    num_blocks: int = 200
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 160
    enable_caching: bool = True
    hash_block_size: int | None = None
    spoilt: bool = True
    shuffle_seed: int | None = 0
    depth: int = 1
    extra_groups: tuple[KVCacheGroupSpec, ...] = ()
    attention: str | None = None


class PagedRun:
    """A scheduler and a runner over one model.

    Attributes:
        outputs: generated tokens by request id.
        messages: of the scheduler, one a step.
        num_copies: blocks copied on write.
    """

    def __init__(self, model: TransformersModel, settings: RunSettings = RunSettings()) -> None:
        self.settings = settings
        groups = model.kv_cache_groups(settings.block_size)
        self.num_groups = len(groups)
        self.manager = KVCacheManager(
            KVCacheConfig(settings.num_blocks, [*groups, *settings.extra_groups]),
            settings.max_model_len,
            hash_block_size=settings.hash_block_size,
            enable_caching=settings.enable_caching,
            max_in_flight_tokens=settings.max_num_batched_tokens,
        )
        limits = (settings.max_num_seqs, settings.max_num_batched_tokens)
        self.scheduler = Scheduler(
            self.manager, SchedulerConfig(max_num_seqs=limits[0], max_num_batched_tokens=limits[1])
        )
        self.runner = ModelRunner(
            model,
            KVCacheConfig(settings.num_blocks, groups),
            RunnerConfig(*limits, settings.max_model_len, settings.attention),
        )
        self.hasher = BlockHasher("sha256", self.manager.hash_block_size) if settings.enable_caching else None
        self.decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self.outputs: dict[str, list[int]] = {}
        self.messages: list[SchedulerOutput] = []
        self.under_way: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()
        self.num_copies = 0
        if settings.shuffle_seed is not None:
            self.shuffle_blocks(settings.shuffle_seed)
        if settings.spoilt:
            self.spoil()

    @property
    def pool(self) -> Any:
        return self.manager.block_pool

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.make_stats().num_preemptions

    def shuffle_blocks(self, seed: int) -> None:
        ids = self.pool.allocate_ids(self.pool.get_num_free_blocks())
        self.pool.free_ids(np.array(random.Random(seed).sample(ids.tolist(), len(ids)), np.int32))

    def spoil(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for layer in self.runner.kv_cache.layers:
            layer.copy_(100 * torch.randn(layer.shape, generator=generator))

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, sampling_params: SamplingParams | None = None
    ) -> None:
        request = Request(request_id, prompt, self.hasher, max_tokens=max_tokens, sampling_params=sampling_params)
        self.scheduler.add_request(request)
        self.outputs[request_id] = []

    def step(self) -> SchedulerOutput:
        """Executes one step, and takes the tokens of the oldest once enough are under way; the message executed."""
        output = self.scheduler.schedule()
        message = self.decoder.decode(msgspec.msgpack.encode(output))
        if self.settings.extra_groups:
            self.hide_extra_groups(message)
        self.messages.append(message)
        self.num_copies += len(message.block_copies)
        self.check_tables(message, tokens := self.runner.execute(message).tokens)
        if output.num_scheduled_tokens:
            self.under_way.append((output, tokens))
        if self.under_way and (len(self.under_way) >= self.settings.depth or not output.num_scheduled_tokens):
            for request_output in self.scheduler.update_from_output(*self.under_way.popleft()):
                self.outputs[request_output.request_id] += request_output.new_token_ids
        self.scheduler.check()
        return message

    def hide_extra_groups(self, message: SchedulerOutput) -> None:
        for new in message.scheduled_new_requests:
            new.block_ids = new.block_ids[: self.num_groups]
        cached = message.scheduled_cached_requests
        cached.new_block_ids = [ids and ids[: self.num_groups] for ids in cached.new_block_ids]

    def check_tables(self, message: SchedulerOutput, tokens: dict[str, list[int]]) -> None:
        """The worker's tables are the manager's, except that those keep no blocks in front of a sliding window."""
        assert tokens.keys() == set(message.sampled_request_ids)
        for request_id in message.num_scheduled_tokens:
            wanted = self.manager.get_block_ids(request_id)[: self.num_groups]
            for ids, wanted_ids in zip(self.runner.block_ids_of(request_id), wanted, strict=True):
                assert len(ids) == len(wanted_ids)
                assert all(mine == other for mine, other in zip(ids, wanted_ids) if other)

    def finish(self, max_steps: int = 2000) -> None:
        """Runs until every request is finished; then every block is free, and the runner knows nobody."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.under_way:
                break
            self.step()
        else:
            raise AssertionError(f"unfinished after {max_steps} steps: {list(self.scheduler.requests)}")
        assert self.pool.get_num_free_blocks() == self.settings.num_blocks - 1
        assert len(self.runner.states) == 0 and not self.runner.states.row_of
        self.pool.check()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int | Sequence[int]) -> list[list[int]]:
        """All prompts at once; the tokens of each."""
        counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            self.add(str(number), prompt, count)
        self.finish()
        return [self.outputs[str(number)] for number in range(len(prompts))]
