"""How the sequences of a decode are cut into splits that programs of a device work on side by side."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.cache.spec import ceil_div

MIN_TOKENS = 256  # fewer are not worth a merge
MAX_TOKENS = 2_048  # one long sequence among many short ones is cut too
PROGRAMS_PER_PROCESSOR = 4
MAX_PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Split:
    """Split i starts ``i * tokens`` behind the first token attended to.

    Attributes:
        tokens: of a split; the last one takes what is left.
        number: of splits, 1 or more.
    """

    tokens: int
    number: int


def plan_split(num_programs: int, max_tokens: int, num_processors: int, partial_bytes: int) -> Split:
    """Enough programs for the device, and no split too short to be worth it or so long that others wait for it.

    Args:
        num_programs: programs of one split: requests times KV heads.
        max_tokens: that a request attends to.
        num_processors: of the device.
        partial_bytes: what one split of all requests leaves for the merge; ``MAX_PARTIAL_BYTES`` in all at most.
    """
    wanted = ceil_div(PROGRAMS_PER_PROCESSOR * num_processors, num_programs)
    tokens = min(max(ceil_div(max_tokens, wanted), MIN_TOKENS), MAX_TOKENS)
    tokens = max(tokens, ceil_div(max_tokens, max(1, MAX_PARTIAL_BYTES // partial_bytes)))
    tokens = ceil_div(tokens, MIN_TOKENS) * MIN_TOKENS
    return Split(tokens, max(1, ceil_div(max_tokens, tokens)))
