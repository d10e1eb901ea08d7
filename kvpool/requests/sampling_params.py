"""How the next token of a request is chosen."""

from __future__ import annotations

import msgspec

from kvpool.common.arguments import show, to_float, to_int
from kvpool.errors import InvalidArgumentError

# The integers of msgpack.
_LOWEST_SEED, _HIGHEST_SEED = -(2**63), 2**64 - 1
_HIGHEST_TOP_K = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """Greedy by default; with a temperature, drawn from what top_k and top_p leave (vLLM: the class of that name).

    Numbers of any type become plain ints and floats, which can be encoded for workers.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens, 0 for all.
        top_p: only the most likely tokens whose probabilities add up to at least this, the most likely one always.
        seed: the same seed gives a request the same draws, in whatever batches it is computed; None: the worker's own.

    Raises:
        TypeError: a value that is no number, or no integer where one is needed.
        InvalidArgumentError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature, top_p = to_float("temperature", self.temperature), to_float("top_p", self.top_p)
        top_k = to_int("top_k", self.top_k, highest=_HIGHEST_TOP_K)
        seed = None if self.seed is None else to_int("seed", self.seed)
        if temperature < 0.0:
            raise InvalidArgumentError(f"a temperature is at least 0, not {temperature}")
        if top_k < 0:
            raise InvalidArgumentError(f"top_k is at least 0 (0: all tokens), not {show(top_k)}")
        if not 0.0 < top_p <= 1.0:
            raise InvalidArgumentError(f"top_p is above 0 and at most 1, not {top_p}")
        if seed is not None and not _LOWEST_SEED <= seed <= _HIGHEST_SEED:
            raise InvalidArgumentError(f"a seed is an integer of 64 bits, and {show(seed)} has more")
        for name, number in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            msgspec.structs.force_setattr(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
