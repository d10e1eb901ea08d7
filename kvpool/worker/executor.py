"""What an engine needs of whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvpool.arguments import show
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


class Executor(Protocol):
    """Computes steps: a ``ModelRunner`` in this process, or a ``Broadcaster`` with a worker on each rank."""

    @property
    def limits(self) -> ExecutorLimits:
        """What it has room for; does not change."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """The next token of each of ``sampled_request_ids``, or why there is none."""

    def close(self) -> None:
        """Gives back what it holds; safe to call again."""
