"""One engine of bench/vllm_engine.py: a process of its own, stock or with kvpool as KVPOOL_VLLM says.

Prints one line of JSON: tokens per second, and the microseconds of each call into the scheduler while it decodes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

NUM_EXAMPLES = 9
MIN_DECODING = 0.9  # of the requests; steps that prefill or drain are not counted


def prompts(num_requests: int, first: int) -> list[str]:
    """Questions after the same worked examples, 7 shared blocks of 32 tokens."""
    examples = "".join(
        f"Q: What is {number} plus 7?\nA: {number} plus 7 is {number + 7}.\n"
        for number in range(first, first + NUM_EXAMPLES)
    )
    return [f"{examples}Q: What is {number} plus {2 * number}?\nA:" for number in range(num_requests)]


class Timed:
    """A method of the scheduler that writes down how long each call took."""

    def __init__(self, owner: Any, name: str) -> None:
        self.microseconds: list[float] = []
        self._method: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        start = perf_counter()
        result = self._method(*arguments, **keywords)
        self.microseconds.append((perf_counter() - start) * 1e6)
        return result


class StepSizes:
    """Requests that each step scheduled, and whether all of them decoded one token."""

    def __init__(self, scheduler: Any) -> None:
        self.decoding: list[int] = []
        self._schedule = scheduler.schedule
        scheduler.schedule = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._schedule(*arguments, **keywords)
        tokens = output.num_scheduled_tokens
        self.decoding.append(len(tokens) if output.total_num_scheduled_tokens == len(tokens) else 0)
        return output


def main(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    num_requests = settings["num_requests"]
    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        max_num_seqs=num_requests,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=settings["num_blocks"],
        seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=settings["max_tokens"], ignore_eos=True)
    llm.generate(prompts(num_requests, 40), SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, update = Timed(scheduler, "schedule"), Timed(scheduler, "update_from_output")
    sizes = StepSizes(scheduler)
    start = perf_counter()
    outputs = llm.generate(prompts(num_requests, 3), sampling, use_tqdm=False)
    seconds = perf_counter() - start
    counted = [index for index, size in enumerate(sizes.decoding) if size >= MIN_DECODING * num_requests]
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    return {
        "tokens_per_second": len(tokens) / seconds,
        "schedule_us": [schedule.microseconds[index] for index in counted],
        "update_us": [update.microseconds[index] for index in counted],
        "num_steps": len(sizes.decoding),
        "num_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "tokens": tokens,
        "pool": f"{type(scheduler.kv_cache_manager.block_pool).__module__}",
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
