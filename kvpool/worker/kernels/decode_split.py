"""How the sequences of a decode are cut into stretches that programs of a device work on side by side."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 256  # fewer are not worth a merge
MAX_TOKENS = 2_048  # one long sequence among many short ones is cut too
PROGRAMS_PER_PROCESSOR = 4
MAX_PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Split:
    """Stretch i starts ``i * tokens`` behind the first token attended to.

    Attributes:
        tokens: of a stretch; the last one takes what is left.
        number: of stretches, 1 or more.
    """

    tokens: int
    number: int


def plan_split(num_programs: int, max_tokens: int, num_processors: int, partial_bytes: int) -> Split:
    """Enough programs for the device, and no stretch too short to be worth it or so long that others wait for it.

    Args:
        num_programs: programs of one stretch: requests times KV heads.
        max_tokens: that a request attends to.
        num_processors: of the device.
        partial_bytes: what one stretch of all requests leaves for the merge; ``MAX_PARTIAL_BYTES`` in all at most.
    """
    wanted = _divide_up(PROGRAMS_PER_PROCESSOR * num_processors, num_programs)
    tokens = min(max(_divide_up(max_tokens, wanted), MIN_TOKENS), MAX_TOKENS)
    tokens = max(tokens, _divide_up(max_tokens, max(1, MAX_PARTIAL_BYTES // partial_bytes)))
    tokens = _divide_up(tokens, MIN_TOKENS) * MIN_TOKENS
    return Split(tokens, max(1, _divide_up(max_tokens, tokens)))


def _divide_up(one: int, other: int) -> int:
    return -(-one // other)
