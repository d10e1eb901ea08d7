"""Engines, requests and parameters under callers that pass anything: values of every type, far out of range, nested,
with methods that fail, lie, or come back to the engine while it reads them.

Whatever comes is taken, and then holds plain values that workers can decode, or it is refused by an error that says
what is wrong, and nothing has changed: the engine goes on with whom it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import BACKEND_NAMES
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, NO_REALS, REALS, Three, Unshowable
from hypothesis import given
from hypothesis import strategies as st
from scheduler_runs import STACKS

from kvpool import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvpool.engine import engine as engine_module
from kvpool.engine.engine import Engine
from kvpool.errors import KvpoolError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import SchedulerConfig, SchedulerOutput, StepResult
from kvpool.worker.executor import ExecutorLimits

VOCABULARY, MAX_MODEL_LEN, NUM_BLOCKS = 50, 40, 40
MOST_CHARACTERS = 700

randoms = st.randoms(use_true_random=False)

# What a call may end with; everything else is an accident. What a caller's own method raises comes through.
REFUSALS = (KvpoolError, TypeError)


class OwnError(Exception):
    """Of a caller's method."""


class Acting:
    """An integer, iterable or truth value whose methods do something first."""

    def __init__(self, act: Callable[[], Any], value: Any = 3) -> None:
        self.act, self.value = act, value

    def __index__(self) -> int:
        self.act()
        return self.value  # type: ignore[no-any-return]

    def __float__(self) -> float:
        self.act()
        return self.value  # type: ignore[no-any-return]

    def __len__(self) -> int:
        self.act()
        return 2

    def __iter__(self) -> Iterator[Any]:
        self.act()
        yield self.value
        self.act()
        yield self

    def __bool__(self) -> bool:
        self.act()
        return True

    def __eq__(self, other: object) -> bool:
        self.act()
        return False

    def __hash__(self) -> int:
        self.act()
        return 1

    def __repr__(self) -> str:
        self.act()
        return "Acting"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.act()
        return self.value


class World:
    """An engine with one request under way, and what hostile values do to it from within a call."""

    def __init__(self) -> None:
        self.num_acts = 0
        self.engine = make_engine()
        self.engine.add_request([1, 2], max_tokens=30, request_id="neighbour")
        self.engine.step()

    def fail(self) -> None:
        raise OwnError

    def add(self) -> None:
        self.num_acts += 1
        self.engine.add_request([4] * 3, max_tokens=2, request_id=f"inner {self.num_acts}")

    def step(self) -> None:
        self.num_acts += 1
        if self.engine.scheduler.has_unfinished_requests():
            self.engine.step()

    def abort(self) -> None:
        self.num_acts += 1
        self.engine.scheduler.finish_requests([name for name in self.engine.scheduler.requests if "inner" in name])

    def generate(self) -> None:
        if self.engine.scheduler.has_unfinished_requests():
            self.engine.generate([[1]], max_tokens=1)  # refused: others are unfinished

    def acts(self) -> list[Callable[[], Any]]:
        return [self.fail, self.add, self.step, self.abort, self.generate]

    def state(self) -> Any:
        """All that a refused call must leave, with whoever a value has added or ended itself."""
        scheduler = self.engine.scheduler
        scheduler.check()
        running = [request.request_id for request in scheduler.running]
        waiting = [request.request_id for request in scheduler.waiting]
        return list(scheduler.requests), running, waiting, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class CountingExecutor:
    """Continues a text with the number behind its last; takes steps through the wire format, as workers do."""

    limits = ExecutorLimits(VOCABULARY, MAX_MODEL_LEN, 4, 32, NUM_BLOCKS)

    def __init__(self) -> None:
        self.decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self.texts: dict[str, list[int]] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        message = self.decoder.decode(msgspec.msgpack.encode(output))
        for new in message.scheduled_new_requests:
            assert all(0 <= token_id < VOCABULARY for token_id in new.prompt_token_ids)
            self.texts[new.request_id] = new.prompt_token_ids
        tokens = {name: [(self.texts[name][-1] + 1) % VOCABULARY] for name in message.sampled_request_ids}
        for name, token_ids in tokens.items():
            self.texts[name] += token_ids
        return StepResult(tokens)

    def close(self) -> None:
        pass


def make_engine(**changes: Any) -> Engine:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    arguments: dict[str, Any] = {
        "kv_cache_config": KVCacheConfig(NUM_BLOCKS, [KVCacheGroupSpec(["layer"], spec)]),
        "executor": CountingExecutor(),
        "max_model_len": MAX_MODEL_LEN,
    }
    return Engine(**{**arguments, **changes})


@contextmanager
def half(name: str) -> Iterator[SimpleNamespace]:
    """The engine over one half of kvpool. Not a fixture: hypothesis runs many examples in one test."""
    stack = STACKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "KVCacheManager", stack.make_manager)
        for one in ("Request", "BlockHasher"):
            patch.setattr(engine_module, one, getattr(stack, one))
        yield stack


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call is refused; a failure if it ends in any other way than it may."""
    try:
        call()
    except OwnError:
        return True
    except REFUSALS as error:
        assert 0 < len(str(error)) < MOST_CHARACTERS
        return True
    return False


# ---- values ----

SCALARS: list[Any] = [
    *INTEGERS, *REALS, *NO_INTEGERS, *NO_REALS, *HUGE,
    None, True, False, -1, 0, 1, 49, 50, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1,
    1e308, 5e-324, -0.0, float("nan"), float("inf"), -float("inf"), Fraction(10**400), Three(50), Unshowable(),
    np.int64(-1), np.uint64(2**64 - 1), np.float32("nan"), np.bool_(True), np.array([]), np.array([[1, 2], [3, 4]]),
    np.array(["a"]), np.array([1, None], dtype=object), np.datetime64("2020-01-01"),
    "", "é", "\ud800", "\x00", "x" * 100_000, b"", b"\xff" * 5, bytearray(b"ab"), memoryview(b"ab"),
    [], (), set(), {}, range(3), frozenset([1]), SimpleNamespace(), SamplingParams(), SchedulerConfig(),
    ..., NotImplemented, Exception("x"), type, len,
]  # fmt: skip


class Draws:
    """Arguments for calls. Drawn by hand: hypothesis would show these values, and some can't be shown."""

    def __init__(self, rng: Random, world: World | None = None) -> None:
        self.rng, self.world = rng, world

    def value(self, depth: int = 3) -> Any:
        rng = self.rng
        kind = rng.randrange(10)
        if kind < 3 and depth > 0:
            inner = [self.value(depth - 1) for _ in range(rng.randrange(4))]
            return rng.choice([list, tuple, iter, lambda values: dict(enumerate(values)), lambda values: [[values]]])(
                inner
            )
        if kind < 5 and self.world is not None:
            return Acting(rng.choice(self.world.acts()), rng.choice([3, -1, 50, 10**5000, 0.5, "a", None]))
        if kind == 5:
            return rng.randrange(-5, 60)
        return SCALARS[rng.randrange(len(SCALARS))]

    def tokens(self) -> Any:
        rng = self.rng
        good = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        kind = rng.randrange(8)
        if kind < 5:
            return (good, good, tuple(good), np.array(good), iter(good))[kind]
        return self.value() if kind == 5 else [*good, self.value()] if kind == 6 else [self.value() for _ in range(3)]

    def text(self) -> str:
        return "".join(self.rng.choice("abcé\U0001f600") for _ in range(self.rng.randrange(4)))

    def integer(self, lowest: int, highest: int) -> Callable[[], int]:
        return lambda: self.rng.randint(lowest, highest)

    def arguments(self, **good: Callable[[], Any]) -> dict[str, Any]:
        """Keyword arguments, most of them fine: with all wrong, only the first to be looked at would be tried."""
        return {name: one() if self.rng.randrange(5) else self.value() for name, one in good.items()}


@given(randoms)
def test_sampling_params(rng: Random) -> None:
    draws = Draws(rng)
    given_values = draws.arguments(
        temperature=lambda: rng.choice([0.0, 0.5, 2]),
        top_k=draws.integer(0, 100),
        top_p=lambda: rng.choice([1, 0.5]),
        seed=lambda: rng.choice([None, 3, -(2**63), 2**64 - 1]),
    )
    made: list[SamplingParams] = []
    if refused(lambda: made.append(SamplingParams(**given_values))):
        return
    params = made[0]
    assert [type(getattr(params, name)) for name in ("temperature", "top_k", "top_p")] == [float, int, float]
    assert type(params.seed) in (int, type(None))
    assert 0 <= params.temperature < float("inf") and params.top_k >= 0 and 0 < params.top_p <= 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@given(randoms)
def test_scheduler_configurations(rng: Random) -> None:
    draws = Draws(rng)
    given_values = draws.arguments(
        max_num_batched_tokens=draws.integer(1, 100),
        max_num_seqs=draws.integer(1, 100),
        long_prefill_token_threshold=draws.integer(0, 100),
        policy=lambda: rng.choice(["fcfs", "priority"]),
        stop_token_ids=draws.tokens,
    )
    made: list[SchedulerConfig] = []
    if not refused(lambda: made.append(SchedulerConfig(**given_values))):
        numbers = [getattr(made[0], name) for name in given_values if name not in ("policy", "stop_token_ids")]
        assert {type(number) for number in (*numbers, *made[0].stop_token_ids)} == {int}
        assert numbers[0] >= 1 and numbers[1] >= 1 and numbers[2] >= 0


@pytest.mark.parametrize("name", BACKEND_NAMES)
@given(randoms)
def test_requests(name: str, rng: Random) -> None:
    stack, draws = STACKS[name], Draws(rng)
    given_values = draws.arguments(
        request_id=draws.text,
        prompt_token_ids=draws.tokens,
        max_tokens=draws.integer(1, 100),
        priority=draws.integer(-(2**70), 2**70),
        arrival_time=lambda: rng.choice([None, 0.5]),
        lora_name=lambda: rng.choice([None, draws.text()]),
        cache_salt=lambda: rng.choice([None, draws.text()]),
        session_id=lambda: rng.choice([None, draws.text()]),
        sampling_params=lambda: rng.choice([None, SamplingParams()]),
    )
    hasher = stack.BlockHasher("sha256", 4)
    made: list[Any] = []
    if refused(lambda: made.append(stack.Request(block_hasher=hasher, **given_values))):
        return
    request = made[0]
    assert {type(token_id) for token_id in request.all_token_ids} <= {int}
    assert type(request.request_id) is str and type(request.max_tokens) is type(request.priority) is int
    assert type(request.arrival_time) is float and request.max_tokens >= 1
    assert len(request.block_hashes) == request.num_tokens // 4 and request.num_tokens == request.num_prompt_tokens
    for change in (request.append_output_token_ids, request.truncate, request.append_output_token_ids):
        before = list(request.all_token_ids), list(request.block_hashes), request.num_prompt_tokens
        if refused(lambda change=change: change(draws.tokens() if rng.randrange(2) else draws.value())):
            assert (list(request.all_token_ids), list(request.block_hashes), request.num_prompt_tokens) == before
        assert len(request.block_hashes) == request.num_tokens // 4


@pytest.mark.parametrize("name", BACKEND_NAMES)
@given(randoms)
def test_what_is_added_to_an_engine(name: str, rng: Random) -> None:
    with half(name):
        world = World()
        engine, draws = world.engine, Draws(rng, world)
        for _ in range(rng.randint(1, 4)):
            added = draws.arguments(
                prompt_token_ids=draws.tokens,
                max_tokens=draws.integer(1, 100),
                sampling_params=lambda: rng.choice([None, SamplingParams(0.5)]),
                stop_token_ids=lambda: draws.tokens() if rng.randrange(2) else (),
                request_id=lambda: rng.choice([None, draws.text()]),
            )
            check_call(world, lambda added=added: engine.add_request(**added))
            if rng.randrange(2):
                engine.step()
        prompts = [draws.tokens() for _ in range(rng.randrange(3))] if rng.randrange(2) else draws.value()
        check_call(world, lambda: engine.generate(prompts, max_tokens=2))
        check_end(world)


def check_call(world: World, call: Callable[[], Any]) -> None:
    """A refused call has changed nothing but what values have done themselves."""
    before, num_acts = world.state(), world.num_acts
    is_refused = refused(call)
    after = world.state()
    if is_refused and num_acts == world.num_acts:
        assert after == before
    elif is_refused:
        assert {name for name in after[0] if not name.startswith("inner")} <= set(before[0])


def check_end(world: World) -> None:
    """Everybody is computed to the end, and nothing is left."""
    engine = world.engine
    for _ in range(1000):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert engine.generate([[7, 8]], max_tokens=3) == [[9, 10, 11]]
    engine.scheduler.check()


@pytest.mark.parametrize("name", BACKEND_NAMES)
@given(randoms)
def test_how_an_engine_is_made(name: str, rng: Random) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(NUM_BLOCKS, [KVCacheGroupSpec(["layer"], spec)])
    draws = Draws(rng)
    with half(name):
        changes = draws.arguments(
            kv_cache_config=lambda: config,
            executor=CountingExecutor,
            max_model_len=draws.integer(3, MAX_MODEL_LEN),
            scheduler_config=lambda: rng.choice([None, SchedulerConfig(rng.randint(1, 32), rng.randint(1, 4))]),
            enable_caching=lambda: rng.choice([True, False]),
            hash_algorithm=lambda: "sha256",
        )
        made: list[Engine] = []
        if not refused(lambda: made.append(make_engine(**changes))) and made[0].scheduler.max_model_len > 1:
            assert made[0].generate([[7]], max_tokens=1) == [[8]]


class ReenteringExecutor(CountingExecutor):
    """Comes back to its engine in the middle of a step."""

    engine: Engine
    acts: list[str]

    def execute(self, output: SchedulerOutput) -> StepResult:
        act = self.acts.pop() if self.acts else ""
        if act == "step":
            self.engine.step()
        elif act == "add":
            self.engine.add_request([1, 2, 3], max_tokens=2)
        elif act == "abort":
            self.engine.scheduler.finish_requests(None)
        elif act == "generate":
            self.engine.generate([[1]], max_tokens=1)
        elif act == "fail":
            raise OwnError
        return super().execute(output)


@pytest.mark.parametrize("name", BACKEND_NAMES)
@given(st.lists(st.sampled_from(["step", "add", "abort", "generate", "fail", ""]), max_size=8))
def test_executors_that_come_back_to_their_engine(name: str, acts: list[str]) -> None:
    with half(name):
        executor = ReenteringExecutor()
        engine = make_engine(executor=executor)
        executor.engine, executor.acts = engine, acts
        for first in (1, 5):
            engine.add_request(range(first, first + 6), max_tokens=5)
        for _ in range(60):
            if not engine.scheduler.has_unfinished_requests() and not executor.acts:
                break
            if not engine.scheduler.has_unfinished_requests():
                engine.add_request([3], max_tokens=2)
            refused(engine.step)
            engine.scheduler.check()
            assert not engine.scheduler.steps_under_way
        assert not engine.scheduler.has_unfinished_requests() and not executor.acts
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
        executor.texts.clear()
        assert engine.generate([[7, 8]], max_tokens=3) == [[9, 10, 11]]
