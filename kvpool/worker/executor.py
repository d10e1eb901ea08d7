"""What an engine needs of whatever computes its steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.output import SchedulerOutput, StepResult


@dataclass(frozen=True)
class ExecutorLimits:
    """What an executor has room for. A scheduler may ask for less.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: tokens of a sequence.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of a step.
        num_blocks: of the KV cache, the null block included.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int

    def require(self, **wanted: int) -> None:
        """Accepts what a scheduler will ask for, by the names of the limits.

        Raises:
            InvalidArgumentError: more than a limit; the message has both numbers.
        """
        for name, number in wanted.items():
            limit = getattr(self, name)
            if number > limit:
                raise InvalidArgumentError(f"the scheduler's {name} is {show(number)}, and the executor's is {limit}")

    def check(self, output: SchedulerOutput) -> None:
        """Accepts a step that there is room for, and whose tokens exist. O(requests + tokens of new prompts).

        Raises:
            InvalidArgumentError: a token outside the vocabulary or behind ``max_model_len``, with the id of its
                request; more requests or tokens than a step may have.
        """
        counts, num_tokens = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        if len(counts) > self.max_num_seqs or num_tokens > self.max_num_batched_tokens:
            raise InvalidArgumentError(
                f"step {output.step} has {len(counts)} requests and {num_tokens} tokens; {self.max_num_seqs} and "
                f"{self.max_num_batched_tokens} are the most"
            )
        for new in output.scheduled_new_requests:
            self._check_tokens(new.request_id, new.prompt_token_ids)
            self._check_length(new.request_id, len(new.prompt_token_ids))
        cached = output.scheduled_cached_requests
        tokens = list(chain.from_iterable(cached.new_token_ids))
        if self.find_unknown_token(tokens) is not None:
            for request_id, token_ids in zip(cached.request_ids, cached.new_token_ids):
                self._check_tokens(request_id, token_ids)
        if counts and max(cached.num_computed_tokens, default=0) + max(counts.values()) > self.max_model_len:
            for request_id, num_computed_tokens in zip(cached.request_ids, cached.num_computed_tokens):
                self._check_length(request_id, num_computed_tokens + counts.get(request_id, 0))

    def _check_length(self, request_id: str, num_tokens: int) -> None:
        if num_tokens > self.max_model_len:
            raise InvalidArgumentError(
                f"request {request_id!r} has {num_tokens} tokens; {self.max_model_len} is the most"
            )

    def _check_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        unknown = self.find_unknown_token(token_ids)
        if unknown is not None:
            raise InvalidArgumentError(
                f"request {request_id!r} has the token {show(unknown)}, in a vocabulary of {self.vocab_size}"
            )

    def find_unknown_token(self, token_ids: Collection[int]) -> int | None:
        """A token outside the vocabulary: the lowest if that is negative, else the highest. None if there is none.
        O(tokens)."""
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0:
            return lowest
        return highest if highest >= self.vocab_size else None


class Executor(Protocol):
    """Computes steps: a ``ModelRunner`` in this process, or a ``Broadcaster`` with a worker on each rank."""

    @property
    def limits(self) -> ExecutorLimits:
        """What it has room for; does not change."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """The next token of each of ``sampled_request_ids``, or why there is none."""

    def close(self) -> None:
        """Gives back what it holds; safe to call again."""
