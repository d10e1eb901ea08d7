"""The next token of each request from its logits.

A draw takes one number in [0, 1) and looks for the token whose interval holds it, where the probabilities of all
tokens lie end to end. The number is computed from the seed and the number of tokens that the request has: it does not
matter in which batch, at which time or after how many preemptions the request is computed. Logits do depend on the
batch a little, by rounding; a draw changes only where its number is as close to a boundary.

Probabilities of tens of thousands of tokens are not added up one by one in float32: sums of ``CHUNK`` tokens are added
in float64 to find the chunk, and its tokens to find the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

CHUNK = 256  # tokens
FEW_TOKENS = 1024  # that usually hold the probability top_p asks for: sorted first, and all only where they don't
NO_TOKEN = -1  # in place of a token, of a request whose logits are not finite


@dataclass(frozen=True)
class SamplingBatch:
    """How the next tokens of k requests are chosen, as arrays [k] in host memory.

    Attributes:
        temperatures: float64; 0 for the most likely token, whatever the others say.
        top_ks: int64, see ``SamplingParams``.
        top_ps: float64, see ``SamplingParams``.
        seeds: uint64.
        num_tokens: integers, tokens that each request has.
    """

    temperatures: Array
    top_ks: Array
    top_ps: Array
    seeds: Array
    num_tokens: Array


@dataclass(frozen=True)
class SampledTokens:
    """What came out for k requests.

    Attributes:
        token_ids: the next token of each; ``NO_TOKEN`` where its logits are not finite.
        errors: the reason for that, by place in the batch.
    """

    token_ids: list[int]
    errors: dict[int, str]


def sample(logits: torch.Tensor, batch: SamplingBatch | None = None) -> SampledTokens:
    """The next token of each request.

    Args:
        logits: [k, vocab_size], of any floating-point dtype; computed with in float32. -inf: never this token.
        batch: None where all take the most likely token: the first of several equal ones.

    Returns:
        Tokens; an error for a request that has a NaN or an infinity for its largest logit, which changes nothing for
        the others.

    Waits for the device once, and once more where there are errors. O(k * vocab_size), with top_p alone
    O(k * vocab_size * log(vocab_size)) where the probabilities are flat.
    """
    largest, tokens = _best(logits)
    if batch is not None:
        drawn = np.flatnonzero(batch.temperatures)
        if len(drawn) == len(logits):
            tokens = _draw(logits, batch, drawn)
        elif len(drawn):
            rows = torch.from_numpy(drawn).to(logits.device)
            tokens.index_copy_(0, rows, _draw(logits.index_select(0, rows), batch, drawn))
    token_ids: list[int] = torch.where(largest.isfinite(), tokens, NO_TOKEN).tolist()
    return SampledTokens(token_ids, _errors(largest, token_ids) if NO_TOKEN in token_ids else {})


def _errors(largest: torch.Tensor, token_ids: list[int]) -> dict[int, str]:
    values = largest.tolist()
    return {
        row: f"the model's logits are not finite: the largest is {values[row]}"
        for row, token_id in enumerate(token_ids)
        if token_id == NO_TOKEN
    }


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each row and the first token that has it; NaN where there is one."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        largest, tokens = logits.max(dim=-1)
        return largest, tokens
    # numpy's is vectorised: 2 ms for 256 rows of 50,000 where torch takes 11.
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


def uniform_numbers(seeds: Array, num_tokens: Array) -> Array:
    """For each pair a float64 in [0, 1), the same for the same pair everywhere. O(k).

    Args:
        seeds: uint64 [k].
        num_tokens: integers [k].
    """
    step = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's, as in splitmix64
    mixed = _mix(_mix(seeds + step) + num_tokens.astype(np.uint64) * step)
    numbers: Array = (mixed >> np.uint64(11)) * 2.0**-53
    return numbers


def _mix(words: Array) -> Array:
    """The finaliser of splitmix64: every bit of a word depends on all of them."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = words ^ (words >> np.uint64(31))
    return mixed


def _draw(logits: torch.Tensor, batch: SamplingBatch, drawn: Array) -> torch.Tensor:
    """Tokens int64 [r] for logits [r, vocab_size] of the requests ``drawn``."""
    top_ks, top_ps = batch.top_ks[drawn], batch.top_ps[drawn]
    numbers = uniform_numbers(batch.seeds[drawn], batch.num_tokens[drawn])
    params = torch.from_numpy(np.stack([batch.temperatures[drawn], top_ks, top_ps, numbers])).to(logits.device)
    temperature, top_k, top_p, number = params.unsqueeze(-1)
    num_requests, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    weights = torch.empty(num_requests, num_chunks * CHUNK, device=logits.device)
    weights[:, vocab_size:] = 0
    scores = weights[:, :vocab_size]
    torch.sub(logits.float(), logits.amax(-1, keepdim=True).float(), out=scores)  # the largest is 0
    limits = torch.finfo(torch.float32)
    scores /= temperature.clamp(min=limits.tiny, max=limits.max).float()
    if top_ks.any():
        _keep_top_k(scores, top_k.long(), int(top_ks.max()))
    if (top_ps < 1.0).any():
        _keep_top_p(scores, top_p)
    scores.exp_()
    chunks = weights.view(num_requests, num_chunks, CHUNK)
    sizes = chunks.sum(-1).double()
    chunk, rest = _find(sizes, number * sizes.sum(-1, keepdim=True))
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, 1, CHUNK))[:, 0].double()
    token, _ = _find(inside, rest)
    return (chunk * CHUNK + token)[:, 0]


def _keep_top_k(scores: torch.Tensor, top_k: torch.Tensor, largest_k: int) -> None:
    """All but the k best scores become -inf; as good as the k-th count too. int64 [r, 1], 0 for all."""
    best = scores.topk(min(largest_k, scores.shape[1]), dim=-1).values
    top_k = top_k.clamp(max=scores.shape[1])
    least = best.gather(1, (top_k - 1).clamp(min=0)).masked_fill(top_k == 0, -torch.inf)
    scores.masked_fill_(scores < least, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> None:
    """Scores outside the smallest set of probability ``top_p`` become -inf; as good as its last count too."""
    wanted = top_p * scores.exp().sum(-1, keepdim=True)
    best = scores.topk(min(FEW_TOKENS, scores.shape[1]), dim=-1).values
    if bool((best.exp().sum(-1, keepdim=True, dtype=torch.float64) < wanted).any()):
        best = scores.sort(dim=-1, descending=True).values
    weights = best.exp().double()
    is_inside = weights.cumsum(-1) - weights < wanted
    least = best.gather(1, (is_inside.sum(-1, keepdim=True) - 1).clamp(min=0))  # NaN is nowhere inside
    least = least.masked_fill(top_p >= 1.0, -torch.inf)
    scores.masked_fill_(scores < least, -torch.inf)


def _find(sizes: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the intervals that lie end to end holds a number; never an empty one, whatever rounding does.

    Args:
        sizes: float64 [r, m], at least 0, one of each row above.
        number: float64 [r, 1].

    Returns:
        int64 [r, 1], and float64 [r, 1]: how far into the interval.
    """
    ends = sizes.cumsum(-1)
    is_beyond = (ends > number) & (sizes > 0)
    first = is_beyond.byte().argmax(-1, keepdim=True)
    last = sizes.shape[1] - 1 - (sizes > 0).flip(-1).byte().argmax(-1, keepdim=True)
    index = torch.where(is_beyond.any(-1, keepdim=True), first, last)
    return index, number - (ends - sizes).gather(1, index)
