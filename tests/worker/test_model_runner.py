"""What a worker keeps of requests, and what a runner does with a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hostile_values import INTEGERS, NO_INTEGERS  # noqa: E402
from paged_runs import PagedRun, RunSettings  # noqa: E402
from tiny_models import make_model, make_prompts  # noqa: E402

from kvpool.cache.spec import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.requests.sampling_params import SamplingParams  # noqa: E402
from kvpool.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from kvpool.worker import model_runner  # noqa: E402
from kvpool.worker.model_runner import ModelRunner, RunnerConfig  # noqa: E402
from kvpool.worker.models.transformers_model import TransformersModel  # noqa: E402
from kvpool.worker.step.request_states import RequestStates  # noqa: E402
from kvpool.worker.step.sampler import SampledTokens  # noqa: E402

pytestmark = pytest.mark.dataplane

ROWS, LENGTH, VOCABULARY = 3, 20, 50
NOBODY = CachedRequestData([], [], [], [], [], [])


def message(
    *new: NewRequestData,
    cached: CachedRequestData = NOBODY,
    scheduled: dict[str, int] | None = None,
    **parts: Any,
) -> SchedulerOutput:
    """A message; by default new requests compute and sample all that isn't computed, and known ones one token."""
    if scheduled is None:
        scheduled = dict.fromkeys(cached.request_ids, 1)
        scheduled |= {one.request_id: len(one.prompt_token_ids) - one.num_computed_tokens for one in new}
    fields: dict[str, Any] = {
        "step": 1,
        "sampled_request_ids": list(scheduled),
        "finished_request_ids": [],
        "preempted_request_ids": [],
        "new_block_ids_to_zero": [],
        "block_copies": [],
        **parts,
    }
    return SchedulerOutput(
        scheduled_new_requests=list(new),
        scheduled_cached_requests=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        **fields,
    )


def known(
    *names: str, tokens: list[list[int]], computed: list[int], resumed: bool = False, ids: Any = None
) -> CachedRequestData:
    """Requests that workers know; ``ids`` are the block ids of each in the only group."""
    new_block_ids = [None if one is None else (list(one),) for one in ids or [None] * len(names)]
    return CachedRequestData(list(names), [resumed] * len(names), new_block_ids, computed, [0] * len(names), tokens)


# ---- states ----


@pytest.fixture
def states() -> RequestStates:
    return RequestStates(ROWS, LENGTH, VOCABULARY)


def apply(states: RequestStates, output: SchedulerOutput) -> None:
    states.check(output)
    states.apply(output)


def start(states: RequestStates, *names: str, **parts: Any) -> None:
    apply(states, message(*(NewRequestData(name, [ord(name) % 50, 2, 3], ([1],), 0) for name in names), **parts))


def row_tokens(states: RequestStates, name: str, count: int) -> list[int]:
    tokens: list[int] = states.token_ids[states.row_of[name], :count].tolist()
    return tokens


def test_rows_are_given_back_and_taken_again(states: RequestStates) -> None:
    start(states, "a", "b", "c")
    assert states.row_of == {"a": 0, "b": 1, "c": 2}
    start(states, "d", finished_request_ids=["b", "stranger"])
    assert states.row_of == {"a": 0, "d": 1, "c": 2} and len(states) == 3
    apply(states, message(finished_request_ids=["a", "c", "d"]))
    assert not states.row_of and len(states) == 0


def test_an_id_comes_back_in_the_message_that_ends_it(states: RequestStates) -> None:
    start(states, "a", "b")
    apply(states, message(NewRequestData("a", [9, 8], ([4],), 0), finished_request_ids=["a"]))
    assert len(states) == 2 and row_tokens(states, "a", 2) == [9, 8]
    apply(states, message(preempted_request_ids=["a"]))
    apply(states, message(NewRequestData("a", [7], ([4],), 0), finished_request_ids=["a"]))
    assert row_tokens(states, "a", 1) == [7]
    apply(states, message(finished_request_ids=["a", "b"]))
    assert len(states) == 0


def test_more_requests_are_preempted_than_there_are_rows(states: RequestStates) -> None:
    names = "abcdefgh"
    for name in names:
        start(states, name)
        states.write_new_tokens(known(name, tokens=[[40]], computed=[3]), np.array([states.row_of[name]]))
        apply(states, message(preempted_request_ids=[name]))
    assert not states.row_of and len(states) == len(names)
    for name in reversed(names):
        apply(states, message(cached=known(name, tokens=[[]], computed=[0], resumed=True, ids=[[5]])))
        assert row_tokens(states, name, 3) == [ord(name) % 50, 2, 3]
        apply(states, message(finished_request_ids=[name]))
    assert len(states) == 0 and not states._prompts_aside


def test_a_preempted_request_that_is_aborted_leaves_nothing(states: RequestStates) -> None:
    start(states, "a")
    apply(states, message(preempted_request_ids=["a"]))
    apply(states, message(finished_request_ids=["a"]))
    start(states, "b")
    apply(states, message(preempted_request_ids=["b"], finished_request_ids=["b"]))
    assert len(states) == 0 and not states._prompts_aside and not states.row_of


def test_preempted_and_resumed_by_one_message(states: RequestStates) -> None:
    """As after a scheduler's ``reset_prefix_cache(reset_running_requests=True)``."""
    start(states, "a", "b", "c")
    again = known("a", "c", tokens=[[], []], computed=[0, 0], resumed=True, ids=[[1], [2]])
    apply(states, message(cached=again, preempted_request_ids=["c", "b", "a"]))
    assert states.row_of.keys() == {"a", "c"} and row_tokens(states, "c", 3) == [ord("c") % 50, 2, 3]


def test_new_tokens_go_behind_the_prompt_or_what_is_computed(states: RequestStates) -> None:
    start(states, "a", "b", "c")
    cached = known("b", "a", "c", tokens=[[11, 12], [], [13]], computed=[1, 0, 5])
    rows = np.array([1, 0, 2], np.int32)
    states.write_new_tokens(cached, rows)
    assert row_tokens(states, "b", 6) == [ord("b") % 50, 2, 3, 11, 12, 0]
    assert row_tokens(states, "a", 4) == [ord("a") % 50, 2, 3, 0]
    assert row_tokens(states, "c", 7) == [ord("c") % 50, 2, 3, 0, 0, 13, 0]
    out = np.zeros(4, np.int64)
    states.pack(np.array([1, 1, 2, 0], np.int32), np.array([3, 4, 5, 1]), out)
    assert out.tolist() == [11, 12, 13, 2]
    before = states.token_ids.copy()
    for tokens, computed in ([[VOCABULARY]], [3]), ([[-1]], [3]), ([[1, 1]], [LENGTH - 1]):
        with pytest.raises(InvalidArgumentError, match="generated tokens"):
            states.write_new_tokens(known("b", tokens=tokens, computed=computed), np.array([1]))
    assert (states.token_ids == before).all()


def test_how_tokens_are_chosen_follows_the_request(states: RequestStates) -> None:
    params = {
        "a": SamplingParams(temperature=0.5, top_k=7, top_p=0.9, seed=-1),
        "b": None,
        "c": SamplingParams(temperature=2.0, top_k=1000),
    }
    apply(states, message(*(NewRequestData(name, [1], ([1],), 0, None, one) for name, one in params.items())))
    assert states.sampling_batch(np.array([1]), np.array([5])) is None
    batch = states.sampling_batch(np.array([2, 1, 0]), np.array([5, 6, 7]))
    assert batch is not None
    assert batch.temperatures.tolist() == [2.0, 0.0, 0.5] and batch.top_ps.tolist() == [1.0, 1.0, 0.9]
    assert batch.top_ks.tolist() == [VOCABULARY, 0, 7] and batch.num_tokens.tolist() == [5, 6, 7]
    assert int(batch.seeds[2]) == 2**64 - 1
    again = known("a", "c", tokens=[[], []], computed=[0, 0], resumed=True, ids=[[1], [2]])
    apply(states, message(preempted_request_ids=["a", "b", "c"]))
    apply(states, message(cached=again))
    later = states.sampling_batch(np.array([states.row_of["c"], states.row_of["a"]]), np.array([5, 7]))
    assert later is not None and later.seeds.tolist() == [batch.seeds[0], batch.seeds[2]]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (message(NewRequestData("a", [1], ([1],), 0)), "'a' is new, but there is one"),
        (message(NewRequestData("p", [1], ([1],), 0)), "'p' is new, but there is one"),
        (message(NewRequestData("x", [], ([],), 0)), "'x' has a prompt of 0 tokens"),
        (message(NewRequestData("x", [1] * 21, ([1],), 0)), "'x' has a prompt of 21 tokens, in rows of 20"),
        (message(NewRequestData("x", [1, 50], ([1],), 0)), "'x' has the token 50, in a vocabulary of 50"),
        (message(NewRequestData("x", [-1, 3], ([1],), 0)), "'x' has the token -1"),
        (message(NewRequestData("x", [1], ([1],), 0, "adapter")), "'x' wants the adapter 'adapter'"),
        (message(cached=known("x", tokens=[[1]], computed=[3])), "'x' goes on, but it does not run here"),
        (message(cached=known("p", tokens=[[1]], computed=[3])), "'p' goes on, but it does not run here"),
        (
            message(cached=known("a", tokens=[[1]], computed=[3]), finished_request_ids=["a"]),
            "'a' goes on, but it does not run here",
        ),
        (
            message(cached=known("a", tokens=[[]], computed=[0], resumed=True)),
            "'a' is resumed, but it was not preempted",
        ),
        (
            message(cached=known("x", tokens=[[]], computed=[0], resumed=True)),
            "'x' is resumed, but it was not preempted",
        ),
        (
            message(cached=known("p", tokens=[[]], computed=[0], resumed=True), finished_request_ids=["p"]),
            "'p' is resumed, but it was not preempted",
        ),
        (
            message(*(NewRequestData(name, [1], ([1],), 0) for name in "xyz"), preempted_request_ids=["a"]),
            "3 requests start where 2 of 3 rows are free",
        ),
    ],
)
def test_a_message_that_makes_no_sense_changes_nothing(
    states: RequestStates, output: SchedulerOutput, reason: str
) -> None:
    start(states, "a", "b", "p")
    apply(states, message(preempted_request_ids=["p"]))
    before = (dict(states.row_of), states.token_ids.copy(), len(states))
    with pytest.raises(InvalidArgumentError, match=reason):
        states.check(output)
    assert states.row_of == before[0] and (states.token_ids == before[1]).all() and len(states) == before[2]


def test_states_of_impossible_sizes() -> None:
    for sizes in ((0, 5, 5), (5, 0, 5), (5, 5, 0)):
        with pytest.raises(InvalidArgumentError):
            RequestStates(*sizes)


# ---- a runner over a model without weights ----


def ones(logits: Any) -> SampledTokens:
    return SampledTokens([1] * len(logits), {})


class CountingModel:
    """Continues a text by counting; notes what it is called with."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.vocab_size, self.max_model_len = torch.device(device), VOCABULARY, 64
        self.calls: list[tuple[list[int], list[int], list[int]]] = []
        self.seen: list[Any] = []
        self.cache: Any = None

    def kv_cache_groups(self, block_size: int) -> list[KVCacheGroupSpec]:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")
        return [KVCacheGroupSpec(["layer"], spec)]

    def forward(self, input_ids: Any, positions: Any, attention: Any, logit_rows: Any) -> Any:
        self.calls.append((input_ids.tolist(), positions.tolist(), logit_rows.tolist()))
        self.seen.append(attention.kv_cache.layers[0][:, 0, 0, 0, 0].tolist())
        following = (input_ids[logit_rows] + 1) % VOCABULARY
        return torch.nn.functional.one_hot(following, VOCABULARY).float()


def make_runner(num_blocks: int = 10, model: CountingModel | None = None, **config: Any) -> ModelRunner:
    model = model or CountingModel()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": LENGTH, **config}
    return ModelRunner(model, KVCacheConfig(num_blocks, model.kv_cache_groups(4)), RunnerConfig(**limits))  # type: ignore[arg-type]


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    made = make_runner()
    yield made
    made.close()


def test_a_step_packs_known_requests_then_new_ones(runner: ModelRunner) -> None:
    a, b = NewRequestData("a", [5, 6, 7], ([1],), 0), NewRequestData("b", [10, 11, 12, 13, 14], ([2, 3],), 0)
    assert runner.execute(message(a, b, scheduled={"a": 3, "b": 2}, sampled_request_ids=["a"])).tokens == {"a": [8]}
    cached = known("b", "a", tokens=[[], [8]], computed=[2, 3])
    c = NewRequestData("c", [1, 2, 3, 4, 20], ([1, 4],), 4)
    output = message(c, cached=cached, scheduled={"b": 2, "a": 1, "c": 1}, sampled_request_ids=["c", "a"])
    assert runner.execute(output).tokens == {"a": [9], "c": [21]}
    assert runner.model.calls == [  # type: ignore[attr-defined]
        ([5, 6, 7, 10, 11], [0, 1, 2, 0, 1], [2]),
        ([12, 13, 8, 20], [2, 3, 3, 4], [2, 3]),
    ]
    assert runner.num_computed_tokens == 9
    cached = known("b", "c", tokens=[[], [21]], computed=[4, 5], ids=[None, [5]])
    assert runner.execute(message(cached=cached, finished_request_ids=["a"])).tokens == {"b": [15], "c": [22]}
    assert runner.block_ids_of("b") == ([2, 3],) and runner.block_ids_of("c") == ([1, 4, 5],)
    with pytest.raises(KeyError):
        runner.block_ids_of("a")


def test_draws_are_by_the_tokens_of_the_sampled_requests(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Any] = []
    monkeypatch.setattr(model_runner, "sample", lambda logits, batch: batches.append(batch) or ones(logits))
    drawn = SamplingParams(temperature=0.5, seed=3)
    a = NewRequestData("a", [5] * 7, ([1, 2],), 0)
    b, c = (NewRequestData(name, [6] * 5, ([3, 4],), 0, None, drawn) for name in "bc")
    runner.execute(message(a, b, c, scheduled={"a": 3, "b": 5, "c": 5}, sampled_request_ids=["b", "c"]))
    cached = known("a", "b", "c", tokens=[[], [1], [1]], computed=[3, 5, 5])
    runner.execute(message(cached=cached, scheduled={"a": 2, "b": 1, "c": 1}, sampled_request_ids=["c", "b"]))
    cached = known("a", "b", "c", tokens=[[], [1], [1]], computed=[5, 6, 6])
    runner.execute(message(cached=cached, scheduled={"a": 2, "b": 1, "c": 1}))
    assert [batch.num_tokens.tolist() for batch in batches] == [[5, 5], [6, 6], [7, 7, 7]]
    assert [batch.temperatures.tolist() for batch in batches] == [[0.5, 0.5], [0.5, 0.5], [0, 0.5, 0.5]]


def test_logits_that_are_not_finite_are_an_error_of_their_request(runner: ModelRunner) -> None:
    new = [NewRequestData(name, [5 + i, 6, 7 + i], ([i + 1],), 0) for i, name in enumerate("abc")]
    stock = runner.model.forward

    def forward(*args: Any) -> Any:
        logits = stock(*args)
        logits[1, 3], logits[2] = float("nan"), float("inf")
        return logits

    runner.model.forward = forward  # type: ignore[method-assign]
    result = runner.execute(message(*new))
    assert result.tokens == {"a": [8]}
    assert result.errors == {
        name: f"the model's logits are not finite: the largest is {v}" for name, v in (("b", "nan"), ("c", "inf"))
    }
    runner.model.forward = stock  # type: ignore[method-assign]
    cached = known("a", tokens=[[8]], computed=[3])
    assert runner.execute(message(cached=cached, finished_request_ids=["b", "c"])).tokens == {"a": [9]}


def test_in_the_middle_of_a_prompt_there_are_no_logits(runner: ModelRunner) -> None:
    a = NewRequestData("a", [5, 6, 7], ([1],), 0)
    assert runner.execute(message(a, scheduled={"a": 2}, sampled_request_ids=[])).tokens == {}
    assert runner.model.calls == [([5, 6], [0, 1], [])]  # type: ignore[attr-defined]


def test_a_message_without_tokens(runner: ModelRunner) -> None:
    runner.execute(message(NewRequestData("a", [5], ([1],), 0)))
    runner.kv_cache.layers[0].fill_(1.0)
    assert runner.execute(message(finished_request_ids=["a"], new_block_ids_to_zero=[3])).tokens == {}
    assert len(runner.states) == 0 and not runner.kv_cache.layers[0][3].any()


def test_blocks_are_zeroed_then_copied_before_the_model(runner: ModelRunner) -> None:
    for block_id in range(10):
        runner.kv_cache.layers[0][block_id] = block_id
    new = NewRequestData("a", [5], ([1],), 0)
    runner.execute(message(new, new_block_ids_to_zero=[2, 5], block_copies=[(5, 6), (3, 5), (6, 7)]))
    assert runner.model.seen == [[0, 1, 0, 3, 4, 3, 0, 6, 8, 9]]  # type: ignore[attr-defined]


def test_a_refused_message_changes_nothing(runner: ModelRunner) -> None:
    runner.execute(message(NewRequestData("a", [5], ([1],), 0)))
    runner.kv_cache.layers[0].fill_(1.0)
    bad = message(NewRequestData("a", [5], ([1],), 0), finished_request_ids=["b"], new_block_ids_to_zero=[3])
    with pytest.raises(InvalidArgumentError, match="'a' is new"):
        runner.execute(bad)
    assert runner.kv_cache.layers[0].all()
    assert runner.execute(message(cached=known("a", tokens=[[6]], computed=[1]))).tokens == {"a": [7]}


def test_steps_beyond_the_limits_are_refused() -> None:
    for new, reason in (
        (NewRequestData("a", [5] * 9, ([1, 2, 3],), 0), "a step of 9"),
        (NewRequestData("a", [5] * 5, ([1],), 0), "no block for position 4"),
        (NewRequestData("a", [5], ([10],), 0), "no block 10 in the pool"),
        (NewRequestData("a", [5], ([1, 2, 3, 4, 5, 6],), 0), "more than it has room for"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            make_runner(max_num_batched_tokens=8).execute(message(new))
    output = message(NewRequestData("a", [5], ([1],), 0), sampled_request_ids=["a", "b"])
    with pytest.raises(InvalidArgumentError, match="samples for requests that it does not compute"):
        make_runner().execute(output)


def test_digests_tell_tables_apart() -> None:
    def digests(*tables: list[int]) -> list[int]:
        runner = make_runner()
        output = message(*(NewRequestData(name, [5, 6, 7, 8, 9], (list(ids),), 0) for name, ids in zip("abc", tables)))
        runner.execute(output)
        return runner.block_digests(output)

    one, other, same = digests([1, 2], [3, 4], [1, 2])
    assert one == same != other
    assert digests([1, 2], [3, 4]) == [one, other] and digests([2, 1])[0] not in (one, other)
    runner = make_runner()
    output = message(NewRequestData("a", [5, 6, 7, 8, 9], ([1, 2],), 0), scheduled={"a": 3}, sampled_request_ids=[])
    runner.execute(output)
    assert runner.block_digests(output) == [one]
    appended = message(cached=known("a", tokens=[[]], computed=[3], ids=[[7]]))
    runner.execute(appended)
    assert runner.block_digests(appended) == digests([1, 2, 7])


def test_after_close_nothing_is_executed(runner: ModelRunner) -> None:
    runner.close()
    runner.close()
    with pytest.raises(InvalidArgumentError, match="has been closed"):
        runner.execute(message())


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_are_at_least_1(limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{limit} is at least 1, not 0"):
        make_runner(**{limit: 0})


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_are_plain_integers(limit: str) -> None:
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 20}
    for value in INTEGERS:
        assert type(getattr(RunnerConfig(**{**limits, limit: value}), limit)) is int
    for value in [*NO_INTEGERS, None]:
        with pytest.raises(TypeError, match=f"{limit} is an integer, not "):
            RunnerConfig(**{**limits, limit: value})


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "needs KV cache groups"),
        (
            [KVCacheGroupSpec(["other"], FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype="float32"))],
            "'layer' is",
        ),
        (
            [KVCacheGroupSpec(["layer"], FullAttentionSpec(4, num_kv_heads=2, head_size=8, dtype="float32"))],
            "layer 'layer' is cached as",
        ),
        (
            [KVCacheGroupSpec(["layer"], FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype="bfloat16"))],
            "layer 'layer' is cached as",
        ),
        ([KVCacheGroupSpec(["layer"], MambaSpec(4, ((4,),), ("float32",)))], "layer 'layer' is cached as"),
    ],
)
def test_groups_that_are_not_the_models(groups: list[KVCacheGroupSpec], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        ModelRunner(CountingModel(), KVCacheConfig(10, groups), RunnerConfig(2, 8, 20))  # type: ignore[arg-type]


def test_sequences_longer_than_the_models() -> None:
    with pytest.raises(InvalidArgumentError, match="65 tokens, where the model computes 64"):
        make_runner(max_model_len=65)


def test_logits_of_the_sampled_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PagedRun(TransformersModel(make_model()), RunSettings(4, max_num_batched_tokens=20))
    shapes: list[Any] = []
    monkeypatch.setattr(model_runner, "sample", lambda logits, batch: shapes.append(logits.shape) or ones(logits))
    run.generate(make_prompts([5, 30, 9]), 4)
    assert [shape[0] for shape in shapes] == [len(m.sampled_request_ids) for m in run.messages if m.sampled_request_ids]
    assert shapes[0][0] < len(run.messages[0].num_scheduled_tokens)
