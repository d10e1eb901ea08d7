"""An Engine over an executor that knows what every slot holds, and that fails in every way an executor can.

The executor (``scheduler_runs.Workers``) fails when a request would read tokens that are not its own. Whatever it
raises or answers in between: the engine goes on, what it finished normally is what the model generates, and at the end
all blocks are free.
"""

from __future__ import annotations

from typing import Any

import msgspec
from scheduler_runs import VOCABULARY, ReadsWrongToken, Workers, full_attention, generated, sliding_window

from fuzz.decisions import Decisions, Finding
from fuzz.values import FuzzError, any_int, any_sequence, junk
from kvpool import reference
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec
from kvpool.engine.engine import Engine
from kvpool.errors import InvariantError, KvpoolError
from kvpool.scheduler import SchedulerConfig, SchedulerOutput, StepResult
from kvpool.worker.executor import ExecutorLimits

MAX_STEPS = 40
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_BLOCKS = 48, 8, 40, 36


class Executor:
    """``Workers``, unless the next decision says otherwise."""

    def __init__(self, specs: list[Any], d: Decisions) -> None:
        self.workers, self.d = Workers(specs), d
        self.limits = ExecutorLimits(VOCABULARY, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_BLOCKS)
        self.is_hostile = True
        self.has_lied = False
        self.stranger: Any = None
        self.backend = reference

    def execute(self, output: SchedulerOutput) -> Any:
        how = self.d.byte() if self.is_hostile else 0
        if how >= 250:
            raise KeyboardInterrupt
        if how >= 240:
            raise FuzzError("before the step")
        try:
            message = msgspec.msgpack.encode(output)
        except OverflowError:  # a token that is no 64-bit number, which the vocabulary of real workers rules out
            raise FuzzError("not sent") from None
        tokens = self.workers.execute(message)
        if how >= 230:
            raise FuzzError("after the step")
        if how < 215 or not tokens:
            return StepResult(tokens, {})
        request_id = sorted(tokens)[how % len(tokens)]
        which = self.d.below(8)
        self.has_lied = self.has_lied or which != 6
        if which == 0:
            del tokens[request_id]
        elif which == 1:
            tokens["nobody"] = [1]
        elif which == 2:
            tokens[request_id] = junk(self.d)(self)
        elif which == 3:
            tokens[request_id] = []
        elif which == 4:
            tokens[request_id] = [1] * 60
        elif which == 5:
            tokens[request_id] = ["token"]  # type: ignore[list-item]
        elif which == 6:
            del tokens[request_id]
            return StepResult(tokens, {request_id: "not finite"})
        else:
            return junk(self.d)(self)
        return StepResult(tokens, {})

    def close(self) -> None:
        pass


class Run:
    """The engine, and of each request its prompt, the tokens it should get and those it got."""

    def __init__(self, d: Decisions) -> None:
        self.d = d
        specs: list[Any] = [full_attention()] if d.below(2) else [full_attention(), sliding_window(7)]
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
        self.executor = Executor(specs, d)
        self.engine: Any = Engine(
            KVCacheConfig(12 + d.below(24), groups),
            self.executor,
            max_model_len=MAX_MODEL_LEN,
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=d.choose([4, 9, 32]), max_num_seqs=1 + d.below(5), reserve_full_sequence=True
            ),
        )
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_added = 0

    def add(self) -> None:
        d = self.d
        d.num_hostile = 0
        family, n = d.below(3), 1 + d.below(20)
        prompt = [family * 10 + i % 10 for i in range(n)]
        max_tokens = 1 + d.below(8)
        request_id = f"r{self.num_added}"
        self.num_added += 1
        given: Any = prompt
        if d.byte() >= 240 and self.executor.is_hostile:
            given = any_sequence(d, [any_int(d, 0, 5) for _ in range(n)], lambda half: None)(self.executor)
            d.num_hostile += 1
        try:
            self.engine.add_request(given, max_tokens=max_tokens, request_id=request_id)
        except (KvpoolError, TypeError, ValueError, FuzzError):
            return
        if d.num_hostile == 0:
            self.prompts[request_id] = (prompt, min(max_tokens, MAX_MODEL_LEN - n))
            self.tokens[request_id] = []

    def step(self) -> None:
        before = set(self.engine.scheduler.requests)
        try:
            outputs = self.engine.step()
        except ReadsWrongToken:
            raise
        except (FuzzError, KeyboardInterrupt, Exception) as error:
            # InvalidArgumentError is an AssertionError too.
            is_ours = isinstance(error, (Finding, MemoryError, InvariantError)) or type(error) is AssertionError
            if is_ours or not self.executor.is_hostile:
                raise
            # What was in the failed step may have been ended by it.
            for request_id in before - set(self.engine.scheduler.requests):
                self.prompts.pop(request_id, None)
            self.check()
            return
        for output in outputs:
            if output.request_id in self.tokens:
                self.tokens[output.request_id] += output.new_token_ids
            reason = output.finish_reason
            if reason is None:
                continue
            prompt, wanted = self.prompts.pop(output.request_id, (None, 0))
            got = self.tokens.pop(output.request_id, [])
            is_normal = str(getattr(reason, "value", reason)) in ("length", "stop")
            if prompt is not None and is_normal and not self.executor.has_lied and got != generated(prompt, wanted):
                raise Finding(f"{output.request_id} got {got}, not {generated(prompt, wanted)}")
        self.check()

    def check(self) -> None:
        self.engine.scheduler.check()
        self.engine.scheduler.kv_cache_manager.block_pool.check()


def run(d: Decisions) -> None:
    history = Run(d)
    for _ in range(MAX_STEPS):
        if d.is_empty:
            break
        how = d.below(16)
        if how < 5:
            history.add()
        elif how == 5:
            history.engine.scheduler.finish_requests(f"r{d.below(12)}")
        else:
            history.step()
    # From here on the executor behaves; nothing that happened before may show.
    history.executor.is_hostile = history.executor.has_lied = False
    history.engine.scheduler.finish_requests(None)
    history.prompts.clear()
    history.tokens.clear()
    for _ in range(3):
        history.add()
    for _ in range(300):
        if not history.engine.scheduler.has_unfinished_requests():
            break
        history.step()
    pool = history.engine.scheduler.kv_cache_manager.block_pool
    if history.prompts or pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        raise Finding(f"left over: {history.prompts}, {pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()} blocks")
    history.engine.close()
