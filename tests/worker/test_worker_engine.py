"""The loop around scheduler and executor, with an executor that counts on instead of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import BACKEND_NAMES
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, Index
from scheduler_runs import STACKS

from kvpool import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvpool.engine import engine as engine_module
from kvpool.engine.engine import MAX_REQUEST_ID_LENGTH, Engine, EngineStateError, RequestFailedError
from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import RequestTooLargeError, SchedulerConfig, SchedulerOutput, StepResult
from kvpool.worker.executor import ExecutorLimits

BLOCK_SIZE = 4
NUM_BLOCKS = 20
LIMITS = {
    "vocab_size": 1000,
    "max_model_len": 40,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "num_blocks": NUM_BLOCKS,
}


class CountingExecutor:
    """Continues a text with the number behind its last; keeps what it was told, as a worker would."""

    def __init__(self, **limits: int) -> None:
        self.limits = ExecutorLimits(**{**LIMITS, **limits})
        self.texts: dict[str, list[int]] = {}
        self.num_computed = 0
        self.params: dict[str, SamplingParams | None] = {}
        self.num_closed = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        for new in output.scheduled_new_requests:
            self.texts[new.request_id] = list(new.prompt_token_ids)
            self.params[new.request_id] = new.sampling_params
        self.num_computed += output.total_num_scheduled_tokens
        tokens = {request_id: [self.texts[request_id][-1] + 1] for request_id in output.sampled_request_ids}
        for request_id, new_tokens in tokens.items():
            self.texts[request_id] += new_tokens
        return StepResult(tokens)

    def close(self) -> None:
        self.num_closed += 1


def make_engine(executor: CountingExecutor, num_blocks: int = NUM_BLOCKS, **options: Any) -> Engine:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)])
    return Engine(config, executor, **{"max_model_len": 40, **options})


@pytest.fixture(params=BACKEND_NAMES, autouse=True)
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The halves of kvpool in turn."""
    stack = STACKS[request.param]
    monkeypatch.setattr(engine_module, "KVCacheManager", stack.make_manager)
    for name in ("Request", "BlockHasher"):
        monkeypatch.setattr(engine_module, name, getattr(stack, name))
    return stack


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor()


@pytest.fixture
def engine(executor: CountingExecutor) -> Iterator[Engine]:
    engine = make_engine(executor)
    yield engine
    engine.scheduler.check()
    engine.close()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_it_generates_for_all_prompts(engine: Engine) -> None:
    assert engine.generate([[5], [10, 20]], max_tokens=3) == [[6, 7, 8], [21, 22, 23]]
    assert engine.generate([], max_tokens=3) == []


def test_a_stop_token_ends_a_text_and_belongs_to_it(engine: Engine) -> None:
    assert engine.generate([[5], [100]], max_tokens=4, stop_token_ids=[7]) == [[6, 7], [101, 102, 103, 104]]


def run(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], int]]:
    """For each prompt its tokens, and how many of the prompt were cached."""
    tokens: dict[str, list[int]] = {engine.add_request(prompt, max_tokens=max_tokens): [] for prompt in prompts}
    num_cached = {}
    while engine.scheduler.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            assert num_cached.setdefault(output.request_id, output.num_cached_tokens) == output.num_cached_tokens
    return [(tokens[request_id], num_cached[request_id]) for request_id in tokens]


@pytest.mark.parametrize("max_num_batched_tokens", [2, 7, 100])
def test_a_shared_prefix_is_computed_once(executor: CountingExecutor, max_num_batched_tokens: int) -> None:
    engine = make_engine(executor, scheduler_config=SchedulerConfig(max_num_batched_tokens))
    shared = list(range(8))
    prompts = [[*shared, 50], [*shared, 60], [*shared, 70]]
    assert run(engine, prompts, 2) == [([51, 52], 0), ([61, 62], 8), ([71, 72], 8)]
    assert executor.num_computed == 8 + 3 * 2  # the prefix, then what each has of its own but for the last token


def test_without_caching_nothing_is_hit(executor: CountingExecutor) -> None:
    engine = make_engine(executor, enable_caching=False)
    assert run(engine, [list(range(9))] * 2, 1) == [([9], 0)] * 2


def test_preempted_texts_come_out_the_same(engine: Engine) -> None:
    prompts = [[100 * i] * 12 for i in range(1, 5)]
    texts = engine.generate(prompts, max_tokens=20)
    assert texts == [[100 * i + j for j in range(1, 21)] for i in range(1, 5)]
    assert engine.scheduler.make_stats().num_preemptions > 0


def test_requests_have_ids_and_params_of_their_own(engine: Engine, executor: CountingExecutor) -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    ids = [engine.add_request([1], max_tokens=1, sampling_params=params), engine.add_request([1], max_tokens=1)]
    ids.append(engine.add_request([1], max_tokens=1, request_id="mine"))
    assert len(set(ids)) == 3 and ids[2] == "mine"
    outputs = engine.step()
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [(name, [2]) for name in ids]
    assert executor.params == dict(zip(ids, (params, None, None)))


def test_a_prompt_that_is_refused_leaves_nothing_queued(engine: Engine) -> None:
    for wrong, error in (([], InvalidArgumentError), ([1] * 40, InvalidArgumentError)):
        with pytest.raises(error):
            engine.generate([[1, 2], wrong], max_tokens=2)
        assert not engine.scheduler.has_unfinished_requests()
    with pytest.raises(InvalidArgumentError, match="max_tokens"):
        engine.generate([[1]], max_tokens=0)
    assert engine.generate([[1, 2]], max_tokens=2) == [[3, 4]]


def test_a_prompt_that_never_fits_is_refused(executor: CountingExecutor) -> None:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(4, [KVCacheGroupSpec(["layer"], spec)])
    with pytest.raises(RequestTooLargeError):
        Engine(config, executor, max_model_len=40).generate([[1] * 20], max_tokens=5)


# ---- what is refused at the door ----


def state_of(engine: Engine) -> Any:
    """What a refused call must leave alone."""
    scheduler = engine.scheduler
    scheduler.check()
    pool = scheduler.kv_cache_manager.block_pool
    queues = [[request.request_id for request in queue] for queue in (scheduler.waiting, scheduler.running)]
    return list(scheduler.requests), queues, pool.get_num_free_blocks(), scheduler.make_stats()


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks"])
def test_a_scheduler_that_may_ask_for_too_much_is_refused_with_both_numbers(name: str) -> None:
    executor = CountingExecutor(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=16, num_blocks=12)
    fitting = {"max_model_len": 32, "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 12}

    def start(**changes: int) -> Engine:
        wanted = {**fitting, **changes}
        config = SchedulerConfig(wanted.pop("max_num_batched_tokens"), wanted.pop("max_num_seqs"))
        return make_engine(executor, scheduler_config=config, **wanted)

    for smaller in (fitting[name], fitting[name] - 1):
        assert start(**{name: smaller}).generate([[1, 2]], max_tokens=2) == [[3, 4]]
    words = f"the scheduler's {name} is {fitting[name] + 1}, and the executor's is {fitting[name]}"
    with pytest.raises(InvalidArgumentError, match=words):
        start(**{name: fitting[name] + 1})


def test_without_a_configuration_steps_are_as_large_as_the_executor_takes() -> None:
    engine = make_engine(CountingExecutor(max_num_seqs=3, max_num_batched_tokens=16))
    assert (engine.scheduler.config.max_num_seqs, engine.scheduler.config.max_num_batched_tokens) == (3, 16)


OUTSIDE = [-1, 1000, 1001, np.int64(1000), np.int64(-1), Index(1000), 2**31, 2**63, 2**64, *HUGE]


@pytest.mark.parametrize("place", ["prompt_token_ids", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_when_it_is_added(
    engine: Engine, executor: CountingExecutor, place: str
) -> None:
    engine.add_request([1, 2], max_tokens=3, request_id="neighbour")
    engine.step()
    before = state_of(engine)
    for value in OUTSIDE:
        for tokens in ([value], [0, value, 999], (999, value)):
            arguments: dict[str, Any] = {"prompt_token_ids": [1], "max_tokens": 2, place: tokens}
            with pytest.raises(InvalidArgumentError, match="in a vocabulary of 1000") as caught:
                engine.add_request(**arguments)
            assert len(str(caught.value)) < 200
            prompts = [[1], arguments["prompt_token_ids"]]
            with pytest.raises(InvalidArgumentError):
                engine.generate(prompts, max_tokens=2, stop_token_ids=arguments.get("stop_token_ids", ()))
    assert state_of(engine) == before
    assert [output.new_token_ids for output in engine.step()] == [[4]]
    engine.add_request([0, 998], max_tokens=1, stop_token_ids=[0, 999], request_id="ends")
    assert [(o.request_id, o.finish_reason, o.stop_token_id) for o in engine.step()] == [
        ("neighbour", "length", None), ("ends", "stop", 999),
    ]  # fmt: skip


def test_stop_tokens_of_the_configuration_are_in_the_vocabulary(executor: CountingExecutor) -> None:
    make_engine(executor, scheduler_config=SchedulerConfig(stop_token_ids=frozenset([0, 999])))
    for wrong in (-1, 1000):
        with pytest.raises(InvalidArgumentError, match=f"stop_token_ids: token {wrong}, in a vocabulary of 1000"):
            make_engine(executor, scheduler_config=SchedulerConfig(stop_token_ids=frozenset([wrong])))


@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: type(value).__name__)
def test_numbers_of_all_types_are_plain_for_workers(engine: Engine, executor: CountingExecutor, value: Any) -> None:
    engine.add_request([value, 5], max_tokens=value, stop_token_ids=[value, 7], request_id="r")
    assert [output.finish_reason for _ in range(2) for output in engine.step()] == [None, "stop"]
    assert executor.texts["r"] == [3, 5, 6, 7] and {type(token) for token in executor.texts["r"]} == {int}
    assert make_engine(CountingExecutor(), max_model_len=value).scheduler.max_model_len == 3


def test_arguments_of_wrong_types_are_refused_by_name(engine: Engine) -> None:
    engine.add_request([1, 2], max_tokens=3, request_id="neighbour")
    engine.step()
    before = state_of(engine)
    fine: dict[str, Any] = {"prompt_token_ids": [1], "max_tokens": 2}
    refused = [("max_tokens", value, "max_tokens is an integer, not ") for value in [*NO_INTEGERS, None]]
    refused += [("sampling_params", value, "sampling_params are") for value in ("x", {}, 1)]
    refused += [("request_id", value, "request_id is a str") for value in (5, b"x", ["x"], ("x",))]
    for name in ("prompt_token_ids", "stop_token_ids"):
        refused += [(name, value, "token ids are integers in a seq") for value in ("12", {1: 2}, 7, None, 0.5)]
        refused += [(name, [1, value], "a token id is an integer, not ") for value in [*NO_INTEGERS, None]]
    for name, value, words in refused:
        with pytest.raises(TypeError, match=words) as caught:
            engine.add_request(**{**fine, name: value})
        assert len(str(caught.value)) < 300
    for max_tokens in (0, -1, -HUGE[0], HUGE[3]):
        with pytest.raises(InvalidArgumentError, match="max_tokens is at least 1, not "):
            engine.add_request([1], max_tokens=max_tokens)
    for request_id, words in (("\ud800", "can't be encoded"), ("neighbour", "there is an unfinished request")):
        with pytest.raises(InvalidArgumentError, match=words):
            engine.add_request(**fine, request_id=request_id)
    with pytest.raises(InvalidArgumentError, match=f"request_id has {MAX_REQUEST_ID_LENGTH + 1} characters"):
        engine.add_request(**fine, request_id="x" * (MAX_REQUEST_ID_LENGTH + 1))
    assert state_of(engine) == before


def test_max_tokens_may_be_huge_and_of_a_small_type(engine: Engine) -> None:
    for value in (np.uint8(255), HUGE[0], HUGE[2]):
        engine.add_request([5] * 10, max_tokens=value)
        outputs = [output for _ in range(30) for output in engine.step()]
        assert outputs[-1].finish_reason == "length" and len(outputs) == 30  # up to max_model_len


def test_iterators_without_an_end_are_refused(engine: Engine) -> None:
    before = state_of(engine)
    with pytest.raises(InvalidArgumentError, match="41 prompt tokens"):
        engine.add_request(repeat(1), max_tokens=2)  # type: ignore[arg-type]
    for endless in (repeat(1), count()):
        with pytest.raises(InvalidArgumentError, match="more stop_token_ids than the 1000 tokens"):
            engine.add_request([1], max_tokens=2, stop_token_ids=endless)
    assert state_of(engine) == before


def test_a_value_that_comes_back_to_the_engine(engine: Engine) -> None:
    """Its code runs before anything is decided: what it adds is there, and the call that it came from works on that."""

    class Adding:
        def __index__(self) -> int:
            engine.add_request([7], max_tokens=1, request_id=f"inner {len(engine.scheduler.requests)}")
            return 3

    engine.add_request([Adding()], max_tokens=Adding(), stop_token_ids=[Adding()], request_id="outer")  # type: ignore[list-item,arg-type]
    assert list(engine.scheduler.requests) == ["inner 0", "inner 1", "inner 2", "outer"]
    with pytest.raises(InvalidArgumentError, match="'inner 4'"):
        engine.add_request([Adding()], max_tokens=1, request_id="inner 4")  # type: ignore[list-item]
    engine.step()
    before = len(engine.scheduler.requests)
    with pytest.raises(InvalidArgumentError, match=f"{before + 1} requests are unfinished"):
        engine.generate([[Adding()]], max_tokens=1)  # type: ignore[list-item]
    while engine.scheduler.has_unfinished_requests():
        engine.step()


def test_ids_are_made_up_that_callers_do_not_have(engine: Engine) -> None:
    """Whichever comes first, the caller's id or the engine's; also for callers that know how ids are made up."""
    for number in range(5):
        engine.add_request([1], max_tokens=2, request_id=str(number))
    first = engine.add_request([1], max_tokens=2)
    prefix, _, number_text = first.rpartition("-")
    assert re.fullmatch("[0-9a-f]{8}", prefix)
    taken = [engine.add_request([1], max_tokens=2, request_id=f"{prefix}-{int(number_text) + i}") for i in (1, 2, 4)]
    made_up = [engine.add_request([1], max_tokens=2) for _ in range(4)]
    assert not {*made_up} & {first, *taken} and len(set(made_up)) == 4
    other = make_engine(CountingExecutor())
    assert other.add_request([1], max_tokens=2).rpartition("-")[0] != prefix
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.add_request([1], max_tokens=1, request_id=first) == first  # a finished one's may be used again
    engine.step()


def test_nothing_is_kept_of_finished_requests(engine: Engine) -> None:
    def entries() -> int:
        owners = (engine, engine.scheduler, engine.scheduler.kv_cache_manager, *managers)
        return sum(len(v) for owner in owners for v in vars(owner).values() if isinstance(v, (dict, list, set)))

    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    counts = []
    for _ in range(3):
        for number in range(40):
            request_id = engine.add_request([1, 2, 3, 4, number], max_tokens=3, stop_token_ids=[8])
            if number % 3 == 0:
                engine.step()
                engine.scheduler.finish_requests(request_id)
        while engine.scheduler.has_unfinished_requests():
            engine.step()
        engine.scheduler.schedule()  # tells workers of the last ones
        counts.append(entries())
    assert counts[0] == counts[1] == counts[2]


def test_generate_wants_the_engine_for_itself(engine: Engine) -> None:
    engine.add_request([1], max_tokens=2)
    with pytest.raises(InvalidArgumentError, match="1 requests are unfinished"):
        engine.generate([[1]], max_tokens=1)


def test_closing_ends_all_and_closes_the_executor(executor: CountingExecutor) -> None:
    engine = make_engine(executor)
    engine.add_request([1] * 20, max_tokens=5)
    engine.step()
    engine.close()
    assert executor.num_closed == 1 and not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


class FailingExecutor(CountingExecutor):
    """Raises in the calls that it is told to, after it has taken note of the step or before."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[int, tuple[BaseException, bool]] = {}  # by number of the call: what, and whether before
        self.num_calls = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.num_calls += 1
        error, is_before = self.failures.get(self.num_calls, (None, False))
        if error is not None and is_before:
            raise error
        result = super().execute(output)
        if error is not None:
            for request_id, token_ids in result.tokens.items():
                del self.texts[request_id][-len(token_ids) :]
            raise error
        return result


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_step_that_fails_is_computed_again(error: BaseException, is_before: bool) -> None:
    executor = FailingExecutor()
    executor.failures = {number: (error, is_before) for number in (1, 2, 5)}
    engine = make_engine(executor)
    ids = [engine.add_request(range(first, first + 6), max_tokens=6) for first in (0, 10, 0)]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    num_failed = 0
    while engine.scheduler.has_unfinished_requests():
        try:
            for output in engine.step():
                tokens[output.request_id] += output.new_token_ids
        except (ValueError, KeyboardInterrupt):
            num_failed += 1
            assert not engine.scheduler.steps_under_way
        engine.scheduler.check()
    assert num_failed == 3
    assert list(tokens.values()) == [list(range(first, first + 6)) for first in (6, 16, 6)]


def test_what_a_failed_step_would_have_filled_is_no_hit() -> None:
    executor = FailingExecutor()
    executor.failures = {1: (ValueError("no"), True)}
    engine = make_engine(executor)
    engine.add_request(range(9), max_tokens=3)
    with pytest.raises(ValueError, match="no"):
        engine.step()
    engine.scheduler.finish_requests(None)
    engine.add_request(range(9), max_tokens=3, request_id="same prompt")
    assert [output.num_cached_tokens for output in engine.step()] == [0]


@pytest.mark.parametrize("number", [1, 3])
def test_generate_leaves_nothing_behind_when_a_step_fails(number: int) -> None:
    executor = FailingExecutor()
    executor.failures = {number: (KeyboardInterrupt(), False)}
    engine = make_engine(executor)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([range(5), range(7)], max_tokens=4)
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert engine.generate([range(5)], max_tokens=2) == [[5, 6]]


def test_tokens_that_are_none_leave_the_step_to_be_computed_again(executor: CountingExecutor, engine: Engine) -> None:
    engine.add_request(range(5), max_tokens=2, request_id="a")
    execute = executor.execute
    executor.execute = lambda output: StepResult({"a": ["no token"]})  # type: ignore[method-assign, list-item]
    with pytest.raises(TypeError):
        engine.step()
    executor.execute = execute  # type: ignore[method-assign]
    assert [output.new_token_ids for output in engine.step()] == [[5]]


def test_a_step_within_a_step_is_refused_and_the_first_goes_on(executor: CountingExecutor, engine: Engine) -> None:
    engine.add_request([5], max_tokens=2)
    stock = executor.execute

    def execute(output: SchedulerOutput) -> StepResult:
        with pytest.raises(EngineStateError, match="a step is being computed"):
            engine.step()
        with pytest.raises(InvalidArgumentError, match="1 requests are unfinished"):
            engine.generate([[1]], max_tokens=1)
        return stock(output)

    executor.execute = execute  # type: ignore[method-assign]
    assert [output.new_token_ids for _ in range(2) for output in engine.step()] == [[6], [7]]


def test_an_executor_without_limits_is_refused() -> None:
    for wrong in (None, object(), "runner"):
        with pytest.raises(TypeError, match=r"executor\.limits can't be None"):
            make_engine(wrong)  # type: ignore[arg-type]


class OneFails(CountingExecutor):
    def execute(self, output: SchedulerOutput) -> StepResult:
        tokens = super().execute(output).tokens
        tokens.pop("bad", None)
        return StepResult(tokens, {"bad": "its logits are not finite"})


def test_a_request_that_can_not_be_computed_ends_alone() -> None:
    engine = make_engine(OneFails())
    engine.add_request(range(9), max_tokens=3, request_id="good")
    engine.add_request(range(20, 29), max_tokens=3, request_id="bad")
    outputs = {output.request_id: output for output in engine.step()}
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == ("error", "its logits are not finite")
    assert outputs["good"].new_token_ids == [9]
    assert list(engine.scheduler.requests) == ["good"]
    engine.scheduler.finish_requests(None)
    for name, first, num_hit_tokens in (("good again", 0, 8), ("bad again", 20, 0)):
        engine.add_request(range(first, first + 9), max_tokens=3, request_id=name)
        assert engine.scheduler.schedule().scheduled_new_requests[0].num_computed_tokens == num_hit_tokens, name
        engine.scheduler.withdraw()
        engine.scheduler.finish_requests(None)


def test_generate_says_which_prompts_could_not_be_computed_and_computes_the_others() -> None:
    class ThirtiesFail(CountingExecutor):
        def execute(self, output: SchedulerOutput) -> StepResult:
            tokens = super().execute(output).tokens
            errors = {request_id: f"no {token}" for request_id, (token,) in tokens.items() if token in range(30, 40)}
            return StepResult({name: ids for name, ids in tokens.items() if name not in errors}, errors)

    engine = make_engine(ThirtiesFail())
    with pytest.raises(RequestFailedError, match="prompt 2: no 31; 2 of 4 prompts failed") as caught:
        engine.generate([[5], [26, 27], [29, 30], [100] * 5], max_tokens=4)
    assert caught.value.errors == {2: "no 31", 1: "no 30"}
    assert caught.value.tokens == [[6, 7, 8, 9], [28, 29], [], [101, 102, 103, 104]]
    assert not engine.scheduler.has_unfinished_requests()
    with pytest.raises(RequestFailedError, match=r"^prompt 0: no 30$"):
        engine.generate([[29]], max_tokens=1)
    assert engine.generate([[5]], max_tokens=2) == [[6, 7]]
    engine.scheduler.check()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
