"""What a run of ``kvpool generate`` has made, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass
class GenerateReport:
    """What was generated, and what that took.

    Attributes:
        tokens: generated ids, per prompt.
        num_prompt_tokens, num_hit_tokens: per prompt; the second are those that the prefix cache had at admission.
        num_preemptions, num_steps: of the run.
        num_blocks: of the pool, the null block included; num_free_blocks: of them, at the end.
        seconds: from the first step to the last; without loading.
        first_token_seconds: per prompt, from the start of the first step.
        errors: by prompt, why it could not be computed to its end.
        matches_transformers: whether transformers generates the same; None where that was not asked for.
        first_difference: where it doesn't, for the user.
    """

    tokens: list[list[int]]
    num_prompt_tokens: list[int]
    num_hit_tokens: list[int]
    num_preemptions: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    seconds: float
    first_token_seconds: list[float]
    errors: dict[int, str] = field(default_factory=dict)
    matches_transformers: bool | None = None
    first_difference: str | None = None

    def compare(self, expected: list[list[int]]) -> None:
        """Enters whether these are the tokens of transformers."""
        self.matches_transformers = self.tokens == expected
        for number, (got, wanted) in enumerate(zip(self.tokens, expected)):
            if got != wanted:
                place = next(
                    (i for i, pair in enumerate(zip(got, wanted)) if pair[0] != pair[1]), min(len(got), len(wanted))
                )
                self.first_difference = (
                    f"prompt {number} differs from transformers in token {place}: {got[place : place + 1]} against "
                    f"{wanted[place : place + 1]}"
                )
                return

    @property
    def first_error(self) -> str | None:
        """For the user: which prompt could not be computed, and why; None if all could."""
        for number, error in sorted(self.errors.items()):
            others = f" ({len(self.errors)} of {len(self.tokens)} prompts failed)" if len(self.errors) > 1 else ""
            return f"prompt {number}: {error}{others}"
        return None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "prompt_tokens": sum(self.num_prompt_tokens),
            "hit_tokens": sum(self.num_hit_tokens),
            "preemptions": self.num_preemptions,
            "num_blocks": self.num_blocks,
            "free_blocks_at_end": self.num_free_blocks,
            "tokens_per_second": self.tokens_per_second,
            "matches_hf": self.matches_transformers,
            "steps": self.num_steps,
            "seconds": self.seconds,
            "prompt_tokens_per_prompt": self.num_prompt_tokens,
            "hit_tokens_per_prompt": self.num_hit_tokens,
            "first_token_seconds": self.first_token_seconds,
            "errors": {str(number): error for number, error in sorted(self.errors.items())},
        }

    def summary(self) -> list[tuple[str, str]]:
        """What to show at the end, as label and text."""
        num_generated, num_prompt_tokens = sum(map(len, self.tokens)), sum(self.num_prompt_tokens)
        num_hit_tokens, first_token = sum(self.num_hit_tokens), self.first_token_seconds
        rows = [
            ("prompts", f"{len(self.tokens)}, {num_prompt_tokens:,} tokens"),
            ("prefix hits", f"{num_hit_tokens:,} tokens, {num_hit_tokens / max(num_prompt_tokens, 1):.1%}"),
            ("generated", f"{num_generated:,} tokens in {self.seconds:.2f} s, {self.tokens_per_second:,.1f} tokens/s"),
            ("first token", f"after {median(first_token):.2f} s (median), {max(first_token):.2f} s (the last)"),
            ("preemptions", f"{self.num_preemptions} in {self.num_steps} steps"),
            ("blocks", f"{self.num_blocks:,}, of which {self.num_free_blocks:,} are free at the end"),
        ]
        if self.matches_transformers is not None:
            rows.append(("transformers", "the same tokens" if self.matches_transformers else "DIFFERENT TOKENS"))
        return rows
