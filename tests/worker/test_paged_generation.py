"""Models of transformers on the paged cache generate what they generate with their own cache, whatever the blocks.

float32, and greedy: the same tokens. The distance of the best two logits is asserted to be far above what rounding
changes, so that no equality here is luck.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged_runs import PagedRun, RunSettings  # noqa: E402
from tiny_models import KINDS, generate, make_model, make_prompts  # noqa: E402

from kvpool.cache.spec import KVCacheGroupSpec, MambaSpec  # noqa: E402
from kvpool.requests.sampling_params import SamplingParams  # noqa: E402
from kvpool.worker import model_runner  # noqa: E402
from kvpool.worker.attention import BACKENDS, why_unusable  # noqa: E402
from kvpool.worker.models.transformers_model import TransformersModel  # noqa: E402
from kvpool.worker.step.sampler import sample  # noqa: E402

pytestmark = pytest.mark.dataplane

NUM_TOKENS = 12
LENGTHS = (1, 5, 17, 40, 64, 33)
SMALLEST_GAP = 2e-4  # of the best two logits; between this cache and float64 they differ by at most 1.2e-5
MAIN = ("llama", "mistral", "qwen3", "gemma2", "gemma3")
SEEDS = {"gemma2": 1}


@dataclass(frozen=True)
class Case:
    """A model and what transformers generates with it, for prompts of ``LENGTHS``."""

    model: TransformersModel
    prompts: list[list[int]]
    tokens: list[list[int]]


@cache
def case_of(kind: str) -> Case:
    model, prompts = make_model(kind, SEEDS.get(kind, 0)), make_prompts(LENGTHS)
    tokens = expected(model, prompts)
    return Case(TransformersModel(model), prompts, tokens)


def expected(model: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    generated = generate(model, prompts, num_tokens)
    assert min(one.smallest_gap for one in generated) > SMALLEST_GAP
    return [one.tokens for one in generated]


def expected_by(model: TransformersModel, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    with model.own_attention() as own:
        return expected(own, prompts, num_tokens)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("kind", MAIN)
def test_mixed_batches(kind: str, block_size: int) -> None:
    """Shuffled blocks of a spoilt pool, prompts of many lengths in one packed batch."""
    case = case_of(kind)
    run = PagedRun(case.model, RunSettings(block_size, num_blocks=1500 if block_size == 1 else 260))
    assert run.generate(case.prompts, NUM_TOKENS) == case.tokens
    assert len(run.messages[0].num_scheduled_tokens) == len(LENGTHS)
    ids = [block_id for new in run.messages[0].scheduled_new_requests for block_id in new.block_ids[0]]
    assert ids != sorted(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAIN])
def test_other_models(kind: str) -> None:
    case = case_of(kind)
    run = PagedRun(case.model, RunSettings(7, max_num_batched_tokens=50))
    assert run.generate(case.prompts, NUM_TOKENS) == case.tokens


@pytest.mark.parametrize("budget", [1, 5, 30])
@pytest.mark.parametrize("kind", MAIN)
def test_chunked_prefill(kind: str, budget: int) -> None:
    case = case_of(kind)
    prompts, tokens = case.prompts[1:5], case.tokens[1:5]
    run = PagedRun(case.model, RunSettings(7, max_num_batched_tokens=budget, enable_caching=False))
    assert run.generate(prompts, NUM_TOKENS) == tokens
    assert all(message.total_num_scheduled_tokens <= budget for message in run.messages)
    num_prefill_steps = sum(1 for message in run.messages if message.num_scheduled_tokens.get("3", 0) > 1)
    assert num_prefill_steps > 1 or budget == 1
    assert run.runner.num_computed_tokens == sum(map(len, prompts)) + len(prompts) * (NUM_TOKENS - 1)


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("kind", MAIN)
def test_a_shared_prefix_is_computed_once(kind: str, block_size: int) -> None:
    """By requests that start in the same step, where one reads what another one writes, and by one that comes later."""
    model = case_of(kind).model
    prefix = make_prompts([50], seed=9)[0]
    prompts = make_prompts([3, 9, 1, 12, 5], seed=1, prefix=prefix)
    tokens = expected_by(model, prompts)
    run = PagedRun(model, RunSettings(block_size, num_blocks=1000))
    assert run.generate(prompts[:4], NUM_TOKENS) == tokens[:4]
    num_hit_tokens = len(prefix) // block_size * block_size
    new = run.messages[0].scheduled_new_requests
    assert [request.num_computed_tokens for request in new] == [0] + 3 * [num_hit_tokens]
    num_computed_tokens = len(prompts[0]) + sum(len(prompt) - num_hit_tokens for prompt in prompts[1:4])
    assert run.runner.num_computed_tokens == num_computed_tokens + 4 * (NUM_TOKENS - 1)
    run.add("later", prompts[4], NUM_TOKENS)
    assert run.step().scheduled_new_requests[0].num_computed_tokens == num_hit_tokens
    run.finish()
    assert run.outputs["later"] == tokens[4]


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("kind", MAIN)
def test_preemption(kind: str, enable_caching: bool) -> None:
    """Five short prompts get in and grow until blocks run out: who is preempted computes it all again, or what the
    prefix cache has lost of it."""
    model = case_of(kind).model
    num_blocks = 1 + 12 * len(model.kv_cache_groups(4))
    settings = RunSettings(4, num_blocks, max_num_batched_tokens=24, enable_caching=enable_caching)
    run = PagedRun(model, settings)
    prompts = make_prompts([3, 5, 2, 6, 4], seed=4)
    assert run.generate(prompts, 24) == expected_by(model, prompts, 24)
    assert run.num_preemptions > 0
    assert any(any(message.scheduled_cached_requests.resumed) for message in run.messages)


@pytest.mark.parametrize("attention", ["gather", "cascade"])
@pytest.mark.parametrize("kind", MAIN)
def test_backends(kind: str, attention: str) -> None:
    """A shared prefix, decodes beside chunks of prefills."""
    case = case_of(kind)
    prompts = make_prompts([3, 20, 1, 12], seed=1, prefix=make_prompts([50], seed=9)[0])
    run = PagedRun(case.model, RunSettings(8, max_num_batched_tokens=30, attention=attention))
    assert run.runner.backend.name == attention
    assert run.generate(prompts, NUM_TOKENS) == expected_by(case.model, prompts)


@pytest.mark.cuda
@pytest.mark.parametrize("attention", [None, *BACKENDS])
@pytest.mark.parametrize("kind", MAIN)
def test_on_cuda(kind: str, attention: str | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    reason = attention and why_unusable(attention, "cuda", block_size=16, dtype=torch.float32)
    if reason:
        pytest.skip(f"{attention} {reason}")
    case = case_of(kind)
    model = TransformersModel(make_model(kind, SEEDS.get(kind, 0)).cuda())
    for budget in (256, 30):
        run = PagedRun(model, RunSettings(16, max_num_batched_tokens=budget, attention=attention))
        assert run.runner.kv_cache.device.type == "cuda"
        assert run.generate(case.prompts, NUM_TOKENS) == case.tokens


def test_copy_on_write_of_a_shared_partial_block() -> None:
    """Hits end inside blocks where hashes are finer than these, which takes a group of Mamba states beside attention:
    the manager has one, and the model plays the other layers of such a model."""
    model = case_of("llama").model
    prefix = make_prompts([22], seed=5)[0]
    prompts = make_prompts([3, 6, 9], seed=6, prefix=prefix)
    prompts.insert(0, prefix)
    tokens = expected_by(model, prompts)
    states = MambaSpec(block_size=8, shapes=((64,),), dtypes=("float32",), mamba_cache_mode="align")
    run = PagedRun(model, RunSettings(8, hash_block_size=4, extra_groups=(KVCacheGroupSpec(["state"], states),)))
    run.add("first", prompts[0], NUM_TOKENS)
    while not run.outputs["first"]:
        run.step()
    first_table = run.runner.block_ids_of("first")[0]
    for number, prompt in enumerate(prompts[1:]):
        run.add(str(number), prompt, NUM_TOKENS)
    message = run.step()
    hits = {new.request_id: new.num_computed_tokens for new in message.scheduled_new_requests}
    assert hits == {"0": 20, "1": 20, "2": 20}
    copies = dict((target, source) for source, target in message.block_copies)
    for new in message.scheduled_new_requests:
        shared, own = new.block_ids[0][:2], new.block_ids[0][2]
        assert shared == first_table[:2] and own not in first_table
        assert copies[own] == first_table[2]
        source, copied = (run.runner.kv_cache.gather(1, [block_id]) for block_id in (copies[own], own))
        assert all(torch.equal(one[:4], other[:4]) for one, other in zip(source, copied))
    run.finish()
    assert run.outputs == {"first": tokens[0], "0": tokens[1], "1": tokens[2], "2": tokens[3]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", MAIN)
def test_random_runs(kind: str, seed: int) -> None:
    """Requests come at random, share prefixes, are preempted, aborted and come back under their id; steps overlap."""
    rng = random.Random(f"{kind} {seed}")
    case = case_of(kind)
    block_size = rng.choice([2, 3, 8])
    num_groups = len(case.model.kv_cache_groups(block_size))
    settings = RunSettings(
        block_size,
        num_blocks=1 + num_groups * (-(-56 // block_size) + rng.randrange(3)),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([7, 20, 60]),
        shuffle_seed=seed,
        depth=rng.choice([1, 2]),
    )
    run = PagedRun(case.model, settings)
    wanted: dict[str, list[int]] = {}
    for number in range(18):
        choice = rng.choice([0, 1, 1, 2, 2, 3, 5])  # of at most 40 tokens
        run.add(str(number), case.prompts[choice], num_tokens := rng.choice([2, 7, NUM_TOKENS, NUM_TOKENS]))
        wanted[str(number)] = case.tokens[choice][:num_tokens]
        for _ in range(rng.randrange(5)):
            run.step()
        unfinished = sorted(run.scheduler.requests)
        if rng.random() < 0.3 and unfinished:
            request_id = rng.choice(unfinished)
            run.scheduler.finish_requests(request_id)
            del run.outputs[request_id], wanted[request_id]
            if rng.random() < 0.5:
                run.add(request_id, case.prompts[0], NUM_TOKENS)
                wanted[request_id] = case.tokens[0]
    run.finish()
    assert run.outputs == wanted


def test_draws_depend_on_seed_and_length_alone() -> None:
    """The same drawn tokens alone, in a batch, in other chunks, and with preemptions."""
    model = case_of("llama").model
    prompts = make_prompts([20, 22, 25, 18, 30], seed=4)
    params = [
        SamplingParams(temperature=0.9, seed=7),
        SamplingParams(temperature=1.2, top_k=20, seed=8),
        SamplingParams(temperature=1.0, top_p=0.8, seed=-9),
        SamplingParams(),
        SamplingParams(temperature=1.5, seed=2**64 - 1),
    ]

    def outputs_of(numbers: list[int], **settings: Any) -> tuple[dict[str, list[int]], PagedRun]:
        run = PagedRun(model, RunSettings(4, **settings))
        for number in numbers:
            run.add(str(number), prompts[number], 24, params[number])
        run.finish()
        return run.outputs, run

    together, _ = outputs_of([0, 1, 2, 3, 4])
    assert len(set(map(tuple, together.values()))) == 5
    for number in range(5):
        assert outputs_of([number])[0][str(number)] == together[str(number)]
    scarce, run = outputs_of([4, 2, 0, 1, 3], num_blocks=21, max_num_batched_tokens=24)
    assert run.num_preemptions > 0
    assert scarce == together


def test_without_a_seed_draws_differ() -> None:
    model = case_of("llama").model
    run = PagedRun(model, RunSettings(7))
    for number in range(6):
        run.add(str(number), [3, 4, 5], 16, SamplingParams(temperature=1.0))
    run.finish()
    assert len(set(map(tuple, run.outputs.values()))) > 1


@pytest.mark.parametrize("kind", MAIN)
def test_bfloat16_within_a_tolerance(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits on the paged cache are about as far from those of float32 as transformers' own in bfloat16."""
    own_model = make_model(kind, dtype=torch.bfloat16)
    model = TransformersModel(own_model)
    logits: list[Any] = []

    def recorded(rows: Any, *args: Any) -> Any:
        logits.append(rows.float())
        return sample(rows, *args)

    monkeypatch.setattr(model_runner, "sample", recorded)
    prompts = make_prompts([40], seed=2)
    tokens = PagedRun(model, RunSettings(7, max_num_batched_tokens=16)).generate(prompts, NUM_TOKENS)
    text = torch.tensor([prompts[0] + tokens[0][:-1]])
    with model.own_attention() as own, torch.inference_mode():
        theirs = own(text).logits[0, len(prompts[0]) - 1 :].float()
        exact = own.float()(text).logits[0, len(prompts[0]) - 1 :]
    mine = torch.cat(logits[-NUM_TOKENS:])
    assert mine.shape == theirs.shape
    my_errors, their_errors = (mine - exact).abs(), (theirs - exact).abs()
    assert my_errors.mean() < 1.3 * their_errors.mean() < 0.05
    assert my_errors.max() < 2 * their_errors.max() < 0.6 < exact.std()
