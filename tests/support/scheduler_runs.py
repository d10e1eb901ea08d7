"""A scheduler with made-up workers: they learn everything from messages, remember which token is in which slot, and
fail when a request would read somebody else's tokens."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from kvpool import backend, reference
from kvpool.backend import BlockPool
from kvpool.cache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.reference.block_hasher import BlockHasher as ReferenceBlockHasher
from kvpool.reference.request import Request as ReferenceRequest
from kvpool.scheduler import Scheduler, SchedulerConfig, SchedulerOutput

BLOCK_SIZE = 4
VOCABULARY = 50

STACKS = {
    "native": SimpleNamespace(
        make_manager=partial(KVCacheManager, block_pool_class=BlockPool),
        Request=backend.Request,
        BlockHasher=backend.BlockHasher,
    ),
    "reference": SimpleNamespace(
        make_manager=partial(KVCacheManager, block_pool_class=reference.BlockPool),
        Request=ReferenceRequest,
        BlockHasher=ReferenceBlockHasher,
    ),
}


def full_attention(block_size: int = BLOCK_SIZE) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def sliding_window(window: int, block_size: int = BLOCK_SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=window)


def mamba(block_size: int = BLOCK_SIZE) -> MambaSpec:
    num_elements = 2 * BLOCK_SIZE * 8
    return MambaSpec(block_size=block_size, shapes=((num_elements,),), dtypes=("float32",), mamba_cache_mode="align")


def make_scheduler(
    backend_name: str,
    num_blocks: int = 20,
    specs: Sequence[KVCacheSpec] = (),
    max_model_len: int = 200,
    manager: dict[str, Any] | None = None,
    **config: Any,
) -> Scheduler:
    """A scheduler over a new pool; by default one group of full attention, blocks of 4 tokens."""
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs or [full_attention()])]
    kv_cache_config = KVCacheConfig(num_blocks, groups)
    kv_cache_manager = STACKS[backend_name].make_manager(kv_cache_config, max_model_len, **(manager or {}))
    return Scheduler(kv_cache_manager, SchedulerConfig(**config))


class StepFails(Exception):
    """Workers have not executed all of a step."""


class ReadsWrongToken(AssertionError):
    """A request would attend to something that is not its own."""


def extended(digest: int, token_id: int) -> int:
    """Digest of a prefix with one token more; a small number, so that it can be computed over and over."""
    return (digest * 1_000_003 + token_id + 1) % 2_305_843_009_213_693_951


def next_token(digest: int) -> int:
    """The token that the made-up model generates after a prefix."""
    return digest % VOCABULARY


def generated(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What the model generates after a prompt when nothing goes wrong."""
    digest = 0
    for token_id in prompt:
        digest = extended(digest, token_id)
    token_ids = []
    for _ in range(num_tokens):
        token_ids.append(next_token(digest))
        digest = extended(digest, token_ids[-1])
    return token_ids


class RequestState:
    """What a worker knows of a request; ``digests[i]`` stands for the first i tokens."""

    def __init__(self, prompt: list[int], block_ids: tuple[list[int], ...]) -> None:
        self.num_prompt_tokens = len(prompt)
        self.tables = block_ids
        self.digests = [0]
        self.num_computed_tokens = 0
        self.write(0, prompt)

    def write(self, position: int, token_ids: list[int]) -> None:
        del self.digests[position + 1 :]
        assert len(self.digests) == position + 1, "tokens are missing"
        for token_id in token_ids:
            self.digests.append(extended(self.digests[-1], token_id))


class Workers:
    """Executes messages of a scheduler. Slots and states hold digests of prefixes instead of keys and values."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.specs = specs
        self.states: dict[str, RequestState] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset): (group, digest)
        self.writes_left: int | None = None  # before a step fails
        self.decoder = msgspec.msgpack.Decoder(SchedulerOutput)

    def execute(self, message: bytes) -> dict[str, list[int]]:
        """One step; the sampled tokens."""
        step = self.decoder.decode(message)
        for request_id in step.finished_request_ids:
            self.states.pop(request_id, None)
        for source, target in step.block_copies:
            for offset in range(max(spec.block_size for spec in self.specs)):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
        for new in step.scheduled_new_requests:
            assert new.request_id not in self.states
            self.states[new.request_id] = RequestState(new.prompt_token_ids, new.block_ids)
            self.states[new.request_id].num_computed_tokens = new.num_computed_tokens
        self.update_known(step)
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens
        self.compute(step.num_scheduled_tokens)
        return {
            request_id: [next_token(self.states[request_id].digests[-1])] for request_id in step.sampled_request_ids
        }

    def update_known(self, step: SchedulerOutput) -> None:
        cached = step.scheduled_cached_requests
        for request_id, resumed, block_ids, num_computed, new_token_ids in zip(
            cached.request_ids,
            cached.resumed,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.new_token_ids,
            strict=True,
        ):
            state = self.states[request_id]
            if resumed:
                assert block_ids is not None
                state.tables, state.num_computed_tokens = block_ids, num_computed
            elif block_ids is not None:
                for table, new_ids in zip(state.tables, block_ids, strict=True):
                    table.extend(new_ids)
            assert state.num_computed_tokens == num_computed, "a token would be computed twice, or never"
            if new_token_ids:
                state.write(max(num_computed, state.num_prompt_tokens), new_token_ids)

    def compute(self, num_scheduled_tokens: dict[str, int]) -> None:
        """Writes of all requests come before the reads, as in every layer of a model."""
        written: set[tuple[int, int]] = set()
        for request_id, num_tokens in num_scheduled_tokens.items():
            state = self.states[request_id]
            start, end = state.num_computed_tokens, state.num_computed_tokens + num_tokens
            assert end < len(state.digests), "a token to compute is unknown"
            for group, spec in enumerate(self.specs):
                if isinstance(spec, MambaSpec):
                    self.read(state, group, start)
                    self.write(state, group, [end], written)
                else:
                    self.write(state, group, range(start + 1, end + 1), written)
            state.num_computed_tokens = end
        for request_id in num_scheduled_tokens:
            self.read_all(self.states[request_id])

    def place(self, state: RequestState, group: int, length: int) -> tuple[int, int]:
        """Where the last of the first ``length`` tokens is kept: slot of the token, or state after it."""
        index, offset = divmod(length - 1, self.specs[group].block_size)
        block_id = state.tables[group][index]
        return block_id, 0 if isinstance(self.specs[group], MambaSpec) else offset

    def write(self, state: RequestState, group: int, lengths: Iterable[int], written: set[tuple[int, int]]) -> None:
        for length in lengths:
            place = self.place(state, group, length)
            if place[0] == 0 or place in written:
                raise ReadsWrongToken(f"{place} is written twice in a step, or is the null block")
            if self.writes_left is not None:
                if self.writes_left == 0:
                    raise StepFails
                self.writes_left -= 1
            written.add(place)
            self.slots[place] = (group, state.digests[length])

    def read(self, state: RequestState, group: int, length: int) -> None:
        if length == 0:
            return
        place = self.place(state, group, length)
        found = self.slots.get(place)
        if place[0] == 0 or found != (group, state.digests[length]):
            raise ReadsWrongToken(f"token {length - 1} in {place} of group {group}: {found}")

    def read_all(self, state: RequestState) -> None:
        """What the attention of the last computed token reads."""
        length = state.num_computed_tokens
        for group, spec in enumerate(self.specs):
            if isinstance(spec, AttentionSpec):
                window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else length
                for readable in range(max(length - window, 0) + 1, length + 1):
                    self.read(state, group, readable)


class Run:
    """A scheduler with its workers, step by step; every step is checked.

    Args:
        depth: steps that are under way at a time.
    """

    def __init__(self, scheduler: Scheduler, backend_name: str, depth: int = 1) -> None:
        self.scheduler, self.depth = scheduler, depth
        manager = scheduler.kv_cache_manager
        self.stack = STACKS[backend_name]
        self.hasher = self.stack.BlockHasher("sha256", manager.hash_block_size)
        self.workers = Workers([group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups])
        self.under_way: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()
        self.messages: list[bytes] = []
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.clock = 0.0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Any:
        """Adds a request; arrival times are 1, 2, 3, ..."""
        stop_token_ids = options.pop("stop_token_ids", ())
        self.clock += 1
        options.setdefault("arrival_time", self.clock)
        added = self.stack.Request(request_id, list(prompt), self.hasher, max_tokens, **options)
        self.scheduler.add_request(added, stop_token_ids)
        self.outputs[request_id] = []
        self.finish_reasons.pop(request_id, None)
        return added

    def schedule(self) -> SchedulerOutput:
        """Schedules a step and executes it; its tokens stay under way."""
        output = self.scheduler.schedule()
        self.messages.append(msgspec.msgpack.encode(output))
        assert output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        self.scheduler.check()
        sampled = self.workers.execute(self.messages[-1])
        if output.num_scheduled_tokens:
            self.under_way.append((output, sampled))
        return output

    def fail(self, num_writes: int | None, num_earlier: int = 0, leaving: str | None = None) -> None:
        """Schedules a step that is withdrawn.

        Args:
            num_writes: slots that workers write before they fail; None: they see nothing of the step.
            num_earlier: steps under way before it that are withdrawn too.
            leaving: a request that is aborted before.
        """
        output = self.scheduler.schedule()
        self.messages.append(msgspec.msgpack.encode(output))
        if num_writes is not None:
            self.workers.writes_left = num_writes
            with contextlib.suppress(StepFails):
                self.workers.execute(self.messages[-1])
            self.workers.writes_left = None
        for _ in range(min(num_earlier, len(self.under_way))):
            output, _ = self.under_way.pop()
        if leaving is not None:
            self.scheduler.finish_requests(leaving)
        if output.num_scheduled_tokens or num_writes is None:
            self.scheduler.withdraw(output)
        self.scheduler.check()

    def update(self) -> None:
        """Gives the scheduler the tokens of the oldest step."""
        for output in self.scheduler.update_from_output(*self.under_way.popleft()):
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        self.scheduler.check()

    def step(self) -> SchedulerOutput:
        """Schedules; takes tokens once ``depth`` steps are under way or nothing was scheduled."""
        output = self.schedule()
        if self.under_way and (len(self.under_way) >= self.depth or not output.num_scheduled_tokens):
            self.update()
        return output

    def finish(self, max_steps: int = 2000) -> None:
        """Runs until every request is finished and every block is free."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.under_way:
                break
            self.step()
        else:
            raise AssertionError(f"unfinished after {max_steps} steps: {list(self.scheduler.requests.values())}")
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert pool.get_usage() == 0
