"""How the next token of a request is chosen."""

from __future__ import annotations

import msgspec

from kvpool.errors import InvalidArgumentError

_SEEDS = range(-(2**63), 2**64)  # the integers of msgpack


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """Greedy by default; with a temperature, drawn from what top_k and top_p leave (vLLM: the class of that name).

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens, 0 for all.
        top_p: only the most likely tokens whose probabilities add up to at least this, the most likely one always.
        seed: the same seed gives a request the same draws, in whatever batches it is computed; None: the worker's own.

    Raises:
        InvalidArgumentError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidArgumentError(f"a temperature is at least 0 and finite, not {self.temperature}")
        if self.top_k < 0:
            raise InvalidArgumentError(f"top_k is at least 0 (0: all tokens), not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(f"top_p is above 0 and at most 1, not {self.top_p}")
        if self.seed is not None and self.seed not in _SEEDS:
            raise InvalidArgumentError(f"a seed is an integer of 64 bits, and {self.seed} has more")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
