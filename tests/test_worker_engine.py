"""The loop around scheduler and executor, with an executor that counts on instead of a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvpool.errors import InvalidArgumentError
from kvpool.sampling_params import SamplingParams
from kvpool.scheduler import RequestTooLargeError, SchedulerConfig, SchedulerOutput, StepResult
from kvpool.worker.engine import Engine, RequestFailedError

BLOCK_SIZE = 4
NUM_BLOCKS = 20


class CountingExecutor:
    """Continues a text with the number behind its last; keeps what it was told, as a worker would."""

    def __init__(self) -> None:
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


def make_engine(executor: CountingExecutor, **options: object) -> Engine:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(NUM_BLOCKS, [KVCacheGroupSpec(["layer"], spec)])
    return Engine(config, executor, max_model_len=40, **options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("max_num_batched_tokens", [2, 7, 100])
def test_a_shared_prefix_is_computed_once(executor: CountingExecutor, max_num_batched_tokens: int) -> None:
    engine = make_engine(executor, scheduler_config=SchedulerConfig(max_num_batched_tokens))
    shared = list(range(8))
    prompts = [[*shared, 50], [*shared, 60], [*shared, 70]]
    assert engine.generate(prompts, max_tokens=2) == [[51, 52], [61, 62], [71, 72]]
    assert sorted(engine.num_hit_tokens.values()) == [0, 8, 8]
    assert executor.num_computed == 8 + 3 * 2  # the prefix, then what each has of its own but for the last token


def test_without_caching_nothing_is_hit(executor: CountingExecutor) -> None:
    engine = make_engine(executor, enable_caching=False)
    engine.generate([list(range(9))] * 2, max_tokens=1)
    assert list(engine.num_hit_tokens.values()) == [0, 0]


def test_preempted_texts_come_out_the_same(engine: Engine) -> None:
    prompts = [[100 * i] * 12 for i in range(1, 5)]
    texts = engine.generate(prompts, max_tokens=20)
    assert texts == [[100 * i + j for j in range(1, 21)] for i in range(1, 5)]
    assert engine.scheduler.make_stats().num_preemptions > 0


def test_requests_have_ids_and_params_of_their_own(engine: Engine, executor: CountingExecutor) -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    ids = [engine.add_request([1], max_tokens=1, sampling_params=params), engine.add_request([1], max_tokens=1)]
    ids.append(engine.add_request([1], max_tokens=1, request_id="mine"))
    assert ids == ["0", "1", "mine"]
    outputs = engine.step()
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [(name, [2]) for name in ids]
    assert executor.params == {"0": params, "1": None, "mine": None}


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
    engine.step()
    assert engine.num_hit_tokens["same prompt"] == 0


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


def test_generate_says_which_request_could_not_be_computed() -> None:
    executor = OneFails()
    executor.execute = lambda output: StepResult({}, dict.fromkeys(output.num_scheduled_tokens, "no memory"))  # type: ignore[method-assign]
    engine = make_engine(executor)
    with pytest.raises(RequestFailedError, match="no memory"):
        engine.generate([range(5)], max_tokens=2)
    assert not engine.scheduler.has_unfinished_requests()
