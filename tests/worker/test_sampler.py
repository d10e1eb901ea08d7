"""Sampling: greedy, temperature, top-k and top-p in one batch, and draws that follow probabilities and seeds."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.worker.step import sampler  # noqa: E402
from kvpool.worker.step.sampler import NO_TOKEN, SamplingBatch, uniform_numbers  # noqa: E402

pytestmark = pytest.mark.dataplane

INF = float("inf")


def sample(logits: Any, batch: SamplingBatch | None = None) -> list[int]:
    """Tokens of requests none of which fails."""
    sampled = sampler.sample(logits, batch)
    assert not sampled.errors
    return sampled.token_ids


def batch_of(
    num_requests: int,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seed: Any = 0,
    num_tokens: Any = None,
) -> SamplingBatch:
    """A batch; values for all requests or one for each. By default request i has i tokens: all draws are different."""

    def array(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(np.broadcast_to(np.array(value, dtype), num_requests))

    if num_tokens is None:
        num_tokens = np.arange(num_requests)
    return SamplingBatch(
        array(temperature, np.float64),
        array(top_k, np.int64),
        array(top_p, np.float64),
        array(seed, np.uint64),
        array(num_tokens, np.int32),
    )


def drawn_counts(logits: Any, num_draws: int, **params: Any) -> Any:
    """How often each token is drawn from one row of logits."""
    tokens = sample(logits.expand(num_draws, -1), batch_of(num_draws, **params))
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double()


def chi_square(counts: Any, probabilities: Any) -> float:
    """Deviation of counts from probabilities as a standard normal variable (Wilson and Hilferty's approximation).

    Tokens that are expected fewer than five times are put together.
    """
    expected = probabilities.double() * counts.sum()
    is_rare = expected < 5
    parts = [(counts[~is_rare], expected[~is_rare])]
    if bool(is_rare.any()) and float(expected[is_rare].sum()) > 0:
        parts.append((counts[is_rare].sum()[None], expected[is_rare].sum()[None]))
    found, wanted = (torch.cat(part) for part in zip(*parts))
    freedom = len(found) - 1
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_first_of_the_best(dtype: Any) -> None:
    logits = torch.tensor([[1, 5, 5, 2], [-INF, -INF, -3, -INF], [7, 7, 7, 7], [-1, -2, -0.5, -INF]], dtype=dtype)
    assert sample(logits) == [1, 2, 0, 2]
    assert sample(logits, batch_of(4, temperature=0.0, top_k=3, top_p=0.1)) == [1, 2, 0, 2]
    assert sample(logits[:0]) == []


@pytest.mark.parametrize("bad", [float("nan"), INF, None])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_finite_are_errors_of_their_rows(
    bad: float | None, params: dict[str, float], dtype: Any
) -> None:
    logits = (3 * torch.randn(6, 700, generator=torch.Generator().manual_seed(7))).to(dtype)
    wanted = sample(logits, batch_of(6, **params))
    for rows in ([1], [0, 5], list(range(6))):
        spoilt = logits.clone()
        for row in rows:
            if bad is None:
                spoilt[row] = -INF
            else:
                spoilt[row, 2 + 100 * row] = bad
        for batch in (batch_of(6, **params), batch_of(6, **{**params, "temperature": [0.0, 1.0] * 3})):
            sampled = sampler.sample(spoilt, batch)
            assert list(sampled.errors) == rows
            shown = str(-INF if bad is None else bad)
            assert set(sampled.errors.values()) == {f"the model's logits are not finite: the largest is {shown}"}
            assert [place for place, token_id in enumerate(sampled.token_ids) if token_id == NO_TOKEN] == rows
        assert [t for t in sampler.sample(spoilt, batch_of(6, **params)).token_ids if t != NO_TOKEN] == [
            t for place, t in enumerate(wanted) if place not in rows
        ]


def test_bad_rows_cost_the_good_ones_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is an error is known from the tokens: the device is waited for once."""
    waits: list[int] = []
    stock = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or stock(tensor))
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(8))
    sampler.sample(logits, batch_of(6))
    assert len(waits) == 1
    logits[3, 0] = float("nan")
    assert sampler.sample(logits, batch_of(6)).errors.keys() == {3} and len(waits) == 3


@pytest.mark.parametrize("vocab_size", [5, 256, 257, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities(vocab_size: int, temperature: float) -> None:
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[vocab_size // 2] = -INF
    counts = drawn_counts(logits, 20_000, temperature=temperature)
    assert counts[vocab_size // 2] == 0
    assert abs(chi_square(counts, (logits / temperature).softmax(0))) < 3.5


def test_draws_by_seed_follow_the_probabilities() -> None:
    """The same number of tokens, and seeds in a row: as when a batch of requests starts."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    counts = drawn_counts(logits, 20_000, seed=np.arange(20_000), num_tokens=17)
    assert abs(chi_square(counts, logits.softmax(0))) < 3.5


def test_the_test_of_draws_finds_wrong_ones() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    counts = drawn_counts(logits, 20_000)
    assert abs(chi_square(counts, (1.1 * logits).softmax(0))) > 5
    assert abs(chi_square(counts.roll(1), logits.softmax(0))) > 5


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 2, 3, 5]),  # two are equally likely
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 1e-9}, [3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.66}, [1, 2, 3, 5]),
        ({"top_p": 0.97}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2, "top_p": 0.5}, [3]),  # 0.4 of 0.65 is more than half
        ({"top_k": 2, "top_p": 0.7}, [1, 3]),
        ({"top_p": 0.5, "temperature": 100.0}, [1, 2, 3, 5]),
    ],
)
def test_what_top_k_and_top_p_leave(params: dict[str, Any], kept: list[int]) -> None:
    probabilities = torch.tensor([0.06, 0.25, 0.12, 0.4, 0.05, 0.12])
    counts = drawn_counts(probabilities.log(), 4000, **params)
    assert counts.nonzero().flatten().tolist() == kept
    left = torch.zeros(6)
    left[kept] = probabilities[kept] ** (1 / params.get("temperature", 1.0))
    if len(kept) > 1:
        assert abs(chi_square(counts, left / left.sum())) < 3.5


def test_top_p_of_flat_probabilities_sorts_them_all() -> None:
    vocab_size = 3 * sampler.FEW_TOKENS
    logits = torch.linspace(0, 1e-3, vocab_size)
    counts = drawn_counts(logits, 6000, top_p=0.5)
    assert counts[: vocab_size // 2 - 10].sum() == 0
    assert (counts[vocab_size // 2 + 10 :] > 0).double().mean() > 0.95


def test_what_top_k_takes_away_is_never_drawn() -> None:
    logits = torch.randn(4 * sampler.CHUNK, generator=torch.Generator().manual_seed(6))
    assert drawn_counts(logits, 10_000, top_k=1)[logits.argmax()] == 10_000


def test_the_interval_of_a_number_is_never_empty() -> None:
    sizes = torch.tensor([[0.0, 0.25, 0.0, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    places = {0.0: 1, 0.2: 1, 0.25: 4, 0.5: 4, 0.75: 5, 0.99: 5, 1.0: 5, 1.5: 5}
    for number, place in places.items():
        index, rest = sampler._find(sizes, torch.tensor([[number]], dtype=torch.float64))
        assert int(index) == place and float(rest) == pytest.approx(number - {1: 0, 4: 0.25, 5: 0.75}[place])


def test_sums_in_which_float32_loses_tokens() -> None:
    """Half of the probability is spread over so many tokens that float32 adds none of them to the other half."""
    vocab_size = 200_000
    logits = torch.full((vocab_size,), -18.0)
    logits[0] = -18.0 + float(np.log(vocab_size - 1))
    counts = drawn_counts(logits, 200)
    assert 70 < counts[0] < 130 and (counts[vocab_size // 2 :] > 0).sum() > 20


def test_a_batch_of_mixed_requests_draws_what_each_draws_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    num_requests, vocab_size = 40, 700
    logits = 3 * torch.randn(num_requests, vocab_size, generator=generator)
    rng = np.random.default_rng(3)
    params = {
        "temperature": rng.choice([0.0, 0.7, 1.3], num_requests),
        "top_k": rng.choice([0, 1, 5, 50], num_requests),
        "top_p": rng.choice([1.0, 0.9, 0.3], num_requests),
        "seed": rng.integers(0, 2**63, num_requests),
        "num_tokens": rng.integers(1, 1000, num_requests),
    }
    together = sample(logits, batch_of(num_requests, **params))
    for i in range(num_requests):
        alone = batch_of(1, **{name: values[i] for name, values in params.items()})
        assert sample(logits[i : i + 1], alone) == [together[i]]
    assert [token for token, is_greedy in zip(together, params["temperature"] == 0) if is_greedy] == [
        int(row.argmax()) for row, is_greedy in zip(logits, params["temperature"] == 0) if is_greedy
    ]
    order = rng.permutation(num_requests)
    mixed = batch_of(num_requests, **{name: values[order] for name, values in params.items()})
    assert sample(logits[torch.from_numpy(order)], mixed) == [together[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draws_are_computed_in_float32(dtype: Any) -> None:
    logits = (5 * torch.randn(500, 300, generator=torch.Generator().manual_seed(4))).to(dtype)
    batch = batch_of(500, temperature=3.0, top_p=0.95)
    assert sample(logits, batch) == sample(logits.float(), batch)


def test_the_best_token_keeps_very_low_temperatures_company() -> None:
    logits = torch.tensor([[-1e30, 5.0, 4.999, 3e4]]).expand(50, -1)
    assert set(sample(logits, batch_of(50, temperature=1e-300, top_p=0.5))) == {3}
    assert set(sample(logits, batch_of(50, temperature=1e-6))) == {3}


def test_at_the_highest_temperatures_all_that_may_be_drawn_is_equally_likely() -> None:
    logits = torch.tensor([-INF, 5.0, 4.0, -INF, 3e38, 0.0])
    for temperature in (1e300, sys.float_info.max):
        counts = drawn_counts(logits.clamp(max=9), 4000, temperature=temperature)
        assert counts[[0, 3]].sum() == 0 and counts[[1, 2, 4, 5]].min() > 800
        assert set(sample(logits.expand(50, -1), batch_of(50, temperature=temperature))) <= {1, 2, 4, 5}


def test_numbers_are_uniform_and_do_not_follow_each_other() -> None:
    count = 1 << 16
    tokens = np.arange(count)
    for numbers in (
        uniform_numbers(np.zeros(count, np.uint64), tokens),
        uniform_numbers(np.arange(count, dtype=np.uint64), np.full(count, 5)),
        uniform_numbers(np.full(count, 2**64 - 1, np.uint64), tokens),
    ):
        assert numbers.min() >= 0 and numbers.max() < 1 and len(np.unique(numbers)) == count
        histogram = torch.from_numpy(np.histogram(numbers, 64, (0, 1))[0].copy()).double()
        assert abs(chi_square(histogram, torch.full((64,), 1 / 64))) < 3.5
        for lag in (1, 2, 256):
            assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 4 / count**0.5
    one, other = (uniform_numbers(np.full(count, seed, np.uint64), tokens) for seed in (1, 2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / count**0.5
    assert not np.intersect1d(one, other).size


def test_numbers_are_the_same_everywhere() -> None:
    """Whoever changes these breaks the promise that a seed keeps its draws."""
    numbers = uniform_numbers(np.array([0, 1, 2**63], np.uint64), np.array([0, 7, 100_000], np.int32))
    assert numbers.tolist() == pytest.approx(PINNED_NUMBERS, abs=1e-15)


PINNED_NUMBERS = [0.28176129772258496, 0.6262666033818561, 0.3444813005335633]


@pytest.mark.cuda
def test_on_cuda_the_same_tokens() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(64, 50_000, generator=generator)
    rng = np.random.default_rng(5)
    batch = batch_of(
        64, rng.choice([0.0, 0.7, 1.3], 64), rng.choice([0, 5, 50], 64), rng.choice([1.0, 0.9], 64), num_tokens=9
    )
    assert sample(logits.cuda(), batch) == sample(logits, batch)
    assert sample(logits.cuda()) == sample(logits)
