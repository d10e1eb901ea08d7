"""An engine over workers: what one request gets wrong, no worker and no other request notices."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zmq")

from broadcast_workers import TIMEOUT, ThreadWorker
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, REALS
from test_model_runner import LENGTH, VOCABULARY, CountingModel, make_runner

from kvpool.engine.engine import Engine, RequestFailedError
from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import SchedulerConfig
from kvpool.worker.transport.broadcaster import Broadcaster
from kvpool.worker.transport.errors import BroadcasterStateError
from kvpool.worker.transport.messages import CacheGroupInfo

pytestmark = pytest.mark.dataplane

NUM_RANKS = 2
LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": LENGTH}
NUM_BLOCKS = 30

Connect = Callable[[], tuple[Broadcaster, list[CountingModel]]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Workers with runners of a model that counts, and their broadcaster. In the end all have to have ended well."""
    with ExitStack() as stack:

        def make() -> tuple[Broadcaster, list[CountingModel]]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
            address = f"ipc://{folder}/s"
            models = [CountingModel() for _ in range(NUM_RANKS)]
            runners = [make_runner(NUM_BLOCKS, model, **LIMITS) for model in models]
            groups = [CacheGroupInfo.from_spec(group) for group in runners[0].kv_cache_config.kv_cache_groups]
            info: dict[str, Any] = {
                **LIMITS, "vocab_size": VOCABULARY, "num_blocks": NUM_BLOCKS, "kv_cache_groups": groups,
            }  # fmt: skip
            broadcaster = Broadcaster(address, NUM_RANKS, timeout_seconds=TIMEOUT)
            workers = [
                ThreadWorker(address, rank, NUM_RANKS, runner.execute, digest_blocks=runner.block_digests, **info)
                for rank, runner in enumerate(runners)
            ]

            def end() -> None:
                broadcaster.close()
                assert [worker.end() for worker in workers] == [None] * NUM_RANKS

            stack.callback(end)
            broadcaster.wait_for_workers()
            return broadcaster, models

        yield make


def start(broadcaster: Broadcaster, **options: Any) -> Engine:
    config = broadcaster.wait_for_workers().kv_cache_config()
    return Engine(config, broadcaster, **{"max_model_len": LENGTH, **options})


def test_a_token_outside_the_vocabulary_ends_nobody(connect: Connect) -> None:
    engine = start(connect()[0])
    engine.add_request([1, 2], max_tokens=4, request_id="neighbour")
    tokens = [token for output in engine.step() for token in output.new_token_ids]
    for wrong in (-1, VOCABULARY, VOCABULARY + 1, np.int64(VOCABULARY), 2**40, *HUGE):
        with pytest.raises(InvalidArgumentError, match=f"in a vocabulary of {VOCABULARY}"):
            engine.add_request([1, wrong], max_tokens=2)
        with pytest.raises(InvalidArgumentError, match=f"in a vocabulary of {VOCABULARY}"):
            engine.add_request([1, 2], max_tokens=2, stop_token_ids=[wrong])
        tokens += [token for output in engine.step() for token in output.new_token_ids if len(tokens) < 4]
        if not engine.scheduler.has_unfinished_requests():
            break
    assert tokens == [3, 4, 5, 6]
    assert engine.generate([[0, VOCABULARY - 2]], max_tokens=2, stop_token_ids=[VOCABULARY - 1]) == [[VOCABULARY - 1]]


def test_numbers_of_all_types_reach_the_workers(connect: Connect) -> None:
    engine = start(connect()[0])
    for integer in INTEGERS:
        for real in REALS[:4]:
            params = SamplingParams(temperature=real, top_k=integer, top_p=real, seed=integer)
            assert engine.generate([[integer, 5]], max_tokens=integer, sampling_params=params)[0][0] < VOCABULARY
    for value in NO_INTEGERS:
        with pytest.raises(TypeError):
            engine.add_request([value], max_tokens=1)
    for request_id in ("\ud800", "x" * 2**20):
        with pytest.raises(InvalidArgumentError, match="request_id"):
            engine.add_request([1], max_tokens=1, request_id=request_id)
    assert engine.generate([[1, 2], [5, 6]], max_tokens=2) == [[3, 4], [7, 8]]


@pytest.mark.parametrize("name", [*LIMITS, "num_blocks"])
def test_a_scheduler_with_larger_limits_is_refused_before_any_step(connect: Connect, name: str) -> None:
    broadcaster, models = connect()
    limit = {**LIMITS, "num_blocks": NUM_BLOCKS}[name]
    config = broadcaster.wait_for_workers().kv_cache_config()
    wanted = {**LIMITS, "num_blocks": NUM_BLOCKS, name: limit + 1}
    config = replace(config, num_blocks=wanted["num_blocks"])
    steps = SchedulerConfig(wanted["max_num_batched_tokens"], wanted["max_num_seqs"])
    with pytest.raises(
        InvalidArgumentError, match=f"the scheduler's {name} is {limit + 1}, and the executor's is {limit}"
    ):
        Engine(config, broadcaster, max_model_len=wanted["max_model_len"], scheduler_config=steps)
    assert not models[0].calls
    assert start(broadcaster).generate([[1, 2]] * 5, max_tokens=2) == [[3, 4]] * 5


def test_limits_are_known_once_the_workers_are_there(connect: Connect) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        Broadcaster(f"ipc://{folder}/s", 1) as alone,
        pytest.raises(BroadcasterStateError, match="wait_for_workers"),
    ):
        _ = alone.limits
    limits = connect()[0].limits
    assert limits == make_runner(NUM_BLOCKS, **LIMITS).limits
    assert (limits.vocab_size, limits.num_blocks, limits.max_num_seqs) == (VOCABULARY, NUM_BLOCKS, 3)


def test_logits_that_are_not_finite_end_one_request_and_no_worker(connect: Connect) -> None:
    """The model fails behind token 30; also for a prompt that shares blocks with those of others."""
    broadcaster, models = connect()
    for model in models:
        model.forward = spoil(model.forward)  # type: ignore[method-assign]
    engine = start(broadcaster)
    for _ in range(2):
        with pytest.raises(RequestFailedError, match="prompt 1: the model's logits are not finite: the largest is nan"):
            engine.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 28], [29, 1]], max_tokens=4)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    with pytest.raises(RequestFailedError) as caught:
        engine.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 28], [29, 1], [30]], max_tokens=4)
    assert caught.value.tokens == [[6, 7, 8, 9], [29, 30], [2, 3, 4, 5], []]
    assert sorted(caught.value.errors) == [1, 3]
    engine.scheduler.check()


def spoil(forward: Any) -> Any:
    def spoilt(input_ids: Any, positions: Any, attention: Any, logit_rows: Any) -> Any:
        logits = forward(input_ids, positions, attention, logit_rows)
        logits[input_ids[logit_rows] == 30] = float("nan")
        return logits

    return spoilt
