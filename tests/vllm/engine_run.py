"""Runs one vLLM engine over waves of prompts and writes down all that an allocator could change.

python engine_run.py SPEC RESULT: both are JSON files. A process of its own, so that stock vLLM and vLLM with kvpool
never share an interpreter; which of the two it is, KVPOOL_VLLM says. The spec has

    engine    arguments of vllm.LLM
    waves     lists of prompts; each wave is queued as a whole before its first step, and drained before the next
    max_tokens, min_tokens
    events    [endpoint, replay endpoint] of the KV cache events
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from event_subscriber import EventSubscriber
from vllm import LLM, SamplingParams

METRICS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


class StepRecorder:
    """Writes down each SchedulerOutput of an in-process engine: tokens and block ids per request, in order."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}
        self._schedule = scheduler.schedule
        scheduler.schedule = self._record

    def _record(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._schedule(*arguments, **keywords)
        for new in output.scheduled_new_reqs:
            self._numbers[new.req_id] = len(self._numbers)
        cached = output.scheduled_cached_reqs
        # vLLM draws the ids of requests at random.
        number = self._numbers.__getitem__
        self.steps.append(
            {
                "tokens": [[number(name), count] for name, count in output.num_scheduled_tokens.items()],
                "new": [[number(n.req_id), n.num_computed_tokens, n.block_ids] for n in output.scheduled_new_reqs],
                "running": [
                    [number(name), num_computed, block_ids]
                    for name, num_computed, block_ids in zip(
                        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids
                    )
                ],
                "resumed": sorted(map(number, cached.resumed_req_ids)),
                "preempted": sorted(map(number, output.preempted_req_ids or ())),
                "finished": sorted(map(number, output.finished_req_ids)),
                "common_prefix": output.num_common_prefix_blocks,
            }
        )
        return output


def in_process_scheduler(llm: LLM) -> Any:
    """The scheduler, where the engine runs in this process; else None."""
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        return None
    return llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def run_wave(llm: LLM, prompts: list[str], sampling: SamplingParams) -> list[dict[str, Any]]:
    """Queues all prompts while the scheduler is paused: what is batched together does not hang on timing."""
    llm.sleep(level=0, mode="keep")
    llm.enqueue(prompts, sampling, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
            "num_prompt_tokens": len(output.prompt_token_ids or ()),
            "num_cached_tokens": output.num_cached_tokens,
        }
        for output in llm.wait_for_completion(use_tqdm=False)
    ]


def kvpool_line() -> str | None:
    """What kvpool says of itself in this process; None if vLLM did not load it or it replaced nothing."""
    plugin = sys.modules.get("kvpool.integrations.vllm")
    status = plugin.status() if plugin is not None else None
    return status.line if status is not None and status.levels else None


def describe_pool(scheduler: Any) -> dict[str, Any]:
    """What the pool is made of and what is left in it, once every request has finished."""
    pool = scheduler.kv_cache_manager.block_pool
    check = getattr(pool, "check", None)
    if check is not None:
        check()
    # The null block is nobody's; vLLM counts references to it, and doesn't give all of them back.
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return {
        "modules": sorted({cls.__module__ for cls in type(pool).__mro__}),
        "num_blocks": pool.num_gpu_blocks,
        "num_free_blocks": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        "free_block_ids": free,
        "referenced_block_ids": [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null],
        "cached_block_ids": [block.block_id for block in pool.blocks if block.block_hash is not None],
    }


def main(spec: dict[str, Any]) -> dict[str, Any]:
    endpoint, replay_endpoint = spec["events"]
    subscriber = EventSubscriber(endpoint, replay_endpoint)
    events_config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
    }
    llm = LLM(**spec["engine"], kv_events_config=events_config, disable_log_stats=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"], min_tokens=spec["min_tokens"])
    scheduler = in_process_scheduler(llm)
    recorder = StepRecorder(scheduler) if scheduler is not None else None
    result: dict[str, Any] = {"waves": [run_wave(llm, prompts, sampling) for prompts in spec["waves"]]}
    result["kvpool"] = kvpool_line()
    result["steps"] = recorder.steps if recorder is not None else None
    result["pool"] = describe_pool(scheduler) if scheduler is not None else None
    result["metrics"] = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in METRICS}
    # Refused, and false, as long as any block is in use.
    result["reset"] = llm.reset_prefix_cache()
    # Events leave with the next step. It computes everything anew, and is the only one.
    result["after_reset"] = run_wave(llm, spec["waves"][0][:1], SamplingParams(temperature=0.0, max_tokens=1))
    result["history"] = asdict(subscriber.history(num_cleared=1))
    llm.llm_engine.engine_core.shutdown()
    subscriber.close()
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
