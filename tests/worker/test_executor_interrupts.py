"""Executors that are interrupted anywhere, and engines that go on with them: no token is another one for it, and a
broadcaster that can't go on says so."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("zmq")

import interrupts
from broadcast_workers import TIMEOUT, ThreadWorker, fail_in_step, make_info, make_step
from interrupts import Interrupted, Interrupter
from scheduler_runs import Workers, full_attention, generated
from test_model_runner import VOCABULARY, CountingModel

from kvpool.cache.spec import KVCacheConfig
from kvpool.engine.engine import Engine
from kvpool.scheduler import SchedulerConfig, SchedulerOutput, StepResult
from kvpool.worker.model_runner import ModelRunner, RunnerConfig
from kvpool.worker.transport.broadcaster import MAX_UNANSWERED_STEPS, Broadcaster
from kvpool.worker.transport.errors import BroadcasterStateError, WorkerError, WorkerTimeoutError

pytestmark = pytest.mark.dataplane

NUM_BLOCKS = 12  # so few that requests are preempted
NUM_TOKENS = 8
MAX_SEQS, MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 4, 12, 60
PROMPTS = [[1, 2, 3, 4, 5, 6, user, user + 1] for user in range(6)]


@pytest.fixture(autouse=True)
def in_pyzmq_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq

    monkeypatch.setattr(interrupts, "PACKAGE", (interrupts.PACKAGE, str(Path(zmq.__file__).parent)))


class InterruptedExecutor:
    """An executor whose calls are interrupted, each at a place that ``next_countdown`` tells; None: not this one."""

    def __init__(self, executor: Any, next_countdown: Callable[[], int | None]) -> None:
        self.executor, self.next_countdown = executor, next_countdown
        self.num_interrupts = 0

    @property
    def limits(self) -> Any:
        return self.executor.limits

    def execute(self, output: SchedulerOutput) -> StepResult:
        countdown = self.next_countdown()
        if countdown is None:
            return self.executor.execute(output)  # type: ignore[no-any-return]
        try:
            return Interrupter(countdown)(self.executor.execute, output)  # type: ignore[no-any-return]
        except Interrupted:
            self.num_interrupts += 1
            raise

    def close(self) -> None:
        self.executor.close()


def generate(config: KVCacheConfig, executor: InterruptedExecutor) -> list[list[int]]:
    """The tokens of all prompts; a step that is interrupted is computed again."""
    engine = Engine(
        config,
        executor,
        max_model_len=MAX_MODEL_LEN,
        scheduler_config=SchedulerConfig(MAX_BATCHED_TOKENS, MAX_SEQS),
    )
    tokens: dict[str, list[int]] = {engine.add_request(prompt, max_tokens=NUM_TOKENS): [] for prompt in PROMPTS}
    while engine.scheduler.has_unfinished_requests():
        try:
            for output in engine.step():
                assert output.finish_reason in (None, "length"), output
                tokens[output.request_id] += output.new_token_ids
        except Interrupted:
            engine.scheduler.check()
    engine.scheduler.check()
    assert engine.scheduler.make_stats().num_preemptions > 0
    engine.close()
    return list(tokens.values())


def one_step_at(step: int, countdown: int) -> Callable[[], int | None]:
    calls = iter(range(10**9))
    return lambda: countdown if next(calls) == step else None


def at_random(seed: int, share: float, places: int) -> Callable[[], int | None]:
    rng = random.Random(seed)
    return lambda: rng.randrange(places) if rng.random() < share else None


# ---- a broadcaster ----


@contextmanager
def broadcasting(num_ranks: int = 2) -> Iterator[tuple[Broadcaster, list[ThreadWorker]]]:
    """With made-up workers, who fail where a request would read somebody else's tokens."""

    def make_execute() -> Callable[[SchedulerOutput], dict[str, list[int]]]:
        made_up = Workers([full_attention()])
        return lambda output: made_up.execute(msgspec.msgpack.encode(output))

    limits = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_BATCHED_TOKENS, "num_blocks": NUM_BLOCKS}
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        Broadcaster(f"ipc://{folder}/s", num_ranks, timeout_seconds=TIMEOUT) as broadcaster,
    ):
        workers = [ThreadWorker(broadcaster.address, rank, num_ranks, make_execute(), **limits) for rank in range(2)]
        broadcaster.wait_for_workers()
        yield broadcaster, workers


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_is_interrupted_anywhere_is_computed_again(step: int) -> None:
    """At each place of ``execute`` at which Ctrl-C could be noticed, one after the other."""
    wanted = [generated(prompt, NUM_TOKENS) for prompt in PROMPTS]
    countdown = 0
    while True:
        with broadcasting() as (broadcaster, workers):
            executor = InterruptedExecutor(broadcaster, one_step_at(step, countdown))
            assert generate(broadcaster.wait_for_workers().kv_cache_config(), executor) == wanted, countdown
            assert [worker.end() for worker in workers] == [None, None]
        if not executor.num_interrupts:
            break
        countdown += 1 if countdown < 40 else 7
    assert countdown > 40


@pytest.mark.parametrize("seed", range(6))
def test_many_steps_that_are_interrupted_are_computed_again(seed: int) -> None:
    with broadcasting() as (broadcaster, workers):
        executor = InterruptedExecutor(broadcaster, at_random(seed, 0.5, 150))
        tokens = generate(broadcaster.wait_for_workers().kv_cache_config(), executor)
        assert [worker.end() for worker in workers] == [None, None]
    assert tokens == [generated(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert executor.num_interrupts > 3
    assert workers[0].seen == workers[1].seen


def test_an_interrupted_wait_for_workers_is_gone_on_with() -> None:
    countdown = 0
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        while True:
            interrupter = Interrupter(countdown)
            with Broadcaster(f"ipc://{folder}/s", 2, timeout_seconds=TIMEOUT) as broadcaster:
                for rank in range(2):
                    ThreadWorker(broadcaster.address, rank, 2)
                try:
                    interrupter(broadcaster.wait_for_workers)
                except Interrupted:
                    assert broadcaster.wait_for_workers() == make_info(0, 2)
                assert broadcaster.execute(make_step(1, [1])).tokens == {"r": [0]}
            if not interrupter.is_spent:
                break
            countdown += 1 if countdown < 20 else 9


def test_ranks_that_are_too_far_behind_get_no_more_steps_until_they_catch_up() -> None:
    release = threading.Event()

    def wait(output: SchedulerOutput) -> dict[str, list[int]]:
        assert release.wait(TIMEOUT)
        return {"r": [output.step]}

    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        Broadcaster(f"ipc://{folder}/s", 1, timeout_seconds=TIMEOUT) as broadcaster,
    ):
        worker = ThreadWorker(broadcaster.address, 0, 1, wait)
        broadcaster.wait_for_workers()
        broadcaster.timeout_seconds = 0.02
        for number in range(1, MAX_UNANSWERED_STEPS + 1):
            with pytest.raises(WorkerTimeoutError, match=f"step {number}: rank 0 did not answer within"):
                broadcaster.execute(make_step(number, [1]))
        for number in range(20, 23):
            with pytest.raises(WorkerTimeoutError, match=rf"step {number} was not sent: rank 0 did not answer the 8"):
                broadcaster.execute(make_step(number, [1]))
        broadcaster.timeout_seconds = TIMEOUT
        release.set()
        assert broadcaster.execute(make_step(30, [1])).tokens == {"r": [30]}
        assert [output.step for output in worker.seen] == [*range(1, MAX_UNANSWERED_STEPS + 1), 30]
        assert not broadcaster._unanswered


def test_a_broadcaster_that_can_not_go_on_says_why() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        Broadcaster(f"ipc://{folder}/s", 2, timeout_seconds=TIMEOUT) as broadcaster,
    ):
        for rank in range(2):
            ThreadWorker(broadcaster.address, rank, 2, fail_in_step(2, ZeroDivisionError("told to")) if rank else None)
        broadcaster.wait_for_workers()
        broadcaster.execute(make_step(1, [1]))
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            broadcaster.execute(make_step(2))
        calls = [lambda: broadcaster.execute(make_step(3)), broadcaster.wait_for_workers, lambda: broadcaster.limits]
        for call in calls:
            with pytest.raises(BroadcasterStateError, match="rank 1 failed: ZeroDivisionError"):
                call()


# ---- a runner in this process ----


def make_runner() -> ModelRunner:
    model: Any = CountingModel()
    config = KVCacheConfig(NUM_BLOCKS, model.kv_cache_groups(4))
    return ModelRunner(model, config, RunnerConfig(MAX_SEQS, MAX_BATCHED_TOKENS, MAX_MODEL_LEN))


def counted(prompt: list[int]) -> list[int]:
    return [(prompt[-1] + number) % VOCABULARY for number in range(1, NUM_TOKENS + 1)]


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_runner_that_is_interrupted_anywhere_computes_the_step_again(step: int) -> None:
    countdown = 0
    while True:
        runner = make_runner()
        executor = InterruptedExecutor(runner, one_step_at(step, countdown))
        assert generate(runner.kv_cache_config, executor) == list(map(counted, PROMPTS)), countdown
        states = runner.states  # which nobody tells of the requests that ended last
        assert sorted([*states.row_of.values(), *states._free_rows]) == list(range(MAX_SEQS))
        if not executor.num_interrupts:
            break
        countdown += 1
    assert countdown > 40


@pytest.mark.parametrize("seed", range(10))
def test_a_runner_that_is_interrupted_often_computes_the_same(seed: int) -> None:
    runner = make_runner()
    executor = InterruptedExecutor(runner, at_random(seed, 0.6, 120))
    assert generate(runner.kv_cache_config, executor) == list(map(counted, PROMPTS))
    assert executor.num_interrupts > 10
