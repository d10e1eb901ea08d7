"""``kvpool doctor --vllm``: does the installed vLLM do the same with kvpool in its place?

The same seeded histories run on stock vLLM and then on what kvpool replaces; afterwards everything is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import levels
from kvpool.integrations.vllm.histories import Outcome, history
from kvpool.integrations.vllm.hooks import Hooks

NUM_SEEDS = 200
MAX_NAMED = 5
_MAX_CHARACTERS = 600
_LOGGERS = ("kvpool", "vllm")


@dataclass
class Verdict:
    """What the check found.

    Attributes:
        version: of vLLM, without its local part.
        levels: what was replaced.
        num_histories, num_steps: how much was compared.
        refusal: why nothing was replaced, None if it was.
        differences: one text for each history that differs: its seed, the step, and both answers.
    """

    version: str
    levels: tuple[str, ...] = ()
    num_histories: int = 0
    num_steps: int = 0
    refusal: str | None = None
    differences: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether kvpool took hold and every step was the same."""
        return self.refusal is None and not self.differences and self.num_steps > 0

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"vLLM {self.version}: kvpool does not take hold: {self.refusal}"
        done = f"vLLM {self.version}, levels {', '.join(self.levels)}: {self.num_histories} histories"
        done += f", {self.num_steps} steps: "
        if not self.differences:
            return done + "no difference"
        named = "\n".join(self.differences[:MAX_NAMED])
        return f"{done}{len(self.differences)} histories differ\n{named}"


def run(num_seeds: int = NUM_SEEDS, names: tuple[str, ...] = levels.NAMES) -> Verdict:
    """Compare, and leave this process with a stock vLLM.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    integration.unregister()
    verdict = Verdict(levels.vllm_version())
    hooks = Hooks()
    with _quiet():
        stock = [list(history(seed)) for seed in range(num_seeds)]
        try:
            verdict.levels = integration.install(names, hooks).levels
        except Exception as error:
            verdict.refusal = integration.reason_of(error)
        else:
            for seed, expected in enumerate(stock):
                _compare(seed, expected, verdict)
        finally:
            hooks.restore()
    return verdict


def _compare(seed: int, expected: list[Outcome], verdict: Verdict) -> None:
    verdict.num_histories += 1
    step = 0
    try:
        for step, (stock, ours) in enumerate(zip_longest(expected, history(seed))):
            verdict.num_steps += 1
            if stock != ours:
                verdict.differences.append(_difference(seed, step, stock, ours))
                return
    except Exception as error:
        verdict.differences.append(f"seed {seed}, after step {step}: {type(error).__name__}: {error}")


def _difference(seed: int, step: int, stock: Outcome | None, ours: Outcome | None) -> str:
    pairs = [pair for pair in zip_longest(stock or (), ours or ()) if pair[0] != pair[1]]
    first_stock, first_ours = (repr(answer)[:_MAX_CHARACTERS] for answer in pairs[0])
    return f"seed {seed}, step {step}:\n  stock  {first_stock}\n  kvpool {first_ours}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Resets that fail are part of the histories, and each would be a line in the log."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    for logger, _ in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
