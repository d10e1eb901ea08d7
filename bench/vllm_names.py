"""vLLM as it is against vLLM with kvpool in its place, both through vLLM's names: ``python -m bench.vllm_names``.

The pool's rows of the target table, vLLM's KVCacheManager and Request, and its Scheduler with many requests decoding.
The two take turns sample by sample in one process: the levels pool, manager and hasher are put in for a sample and
taken out again after it. Figures are medians in ns, of the scheduler in us; ratios as in ``bench.table``.

  --quick       short samples, creation of a pool of 100,000
  --json FILE   every sample, too
  --rows TEXT   only rows whose name starts with TEXT, or with one of several, as in ``--rows manager,scheduler``
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.hash_workloads import VOCABULARY, hash_rows
from bench.implementations import HASH_BLOCK_SIZE, Implementation, load
from bench.machine import describe_machine
from bench.manager_workloads import manager_rows
from bench.rows import LARGE_POOL, USUAL_POOL, Row, target_rows
from bench.sampling import FULL, QUICK, Sampler, Settings, garbage_collector_off, measure, ratio_of, sampler_of
from bench.vllm_scheduler import make_vllm_request, make_vllm_scheduler, model_runner_output
from bench.workloads import GROUP, SEED, LongestPrefixHit, Workload

LEVELS = ("pool", "manager", "hasher")
NUM_RUNNING = (256, 1_024)
PROMPT_TOKENS = 256
MAX_OUTPUT_TOKENS = 1_024
NS_PER_US = 1_000
TARGETS = {"manager/decode/one": 6.0, f"scheduler/schedule/{NUM_RUNNING[0]}": 2.0}
HEADER = "| operation | stock | kvpool | ratio | target | met? |\n| --- | ---: | ---: | ---: | ---: | --- |"


@contextmanager
def kvpool_in_vllm() -> Iterator[None]:
    """vLLM's names lead to kvpool."""
    from kvpool.integrations.vllm.hooks import Hooks
    from kvpool.integrations.vllm.levels import load_level

    hooks = Hooks()
    try:
        for name in LEVELS:
            load_level(name).install(hooks)
        yield
    finally:
        hooks.restore()


def load_both() -> dict[str, Implementation]:
    """vLLM, and vLLM with kvpool's pool; what takes a name makes vLLM's objects for both."""
    from kvpool.integrations.vllm.pool import BlockPool

    stock = load("vllm")
    return {"stock": stock, "kvpool": Implementation(stock.name, stock.version, BlockPool)}


class HitOfFullAttention(LongestPrefixHit):
    """The longest cached prefix as vLLM's cache manager asks for it: of its manager of full attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        super().__init__(*args, **kwargs)
        self.manager = FullAttentionManager
        self.spec = FullAttentionSpec(block_size=HASH_BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def find_by_block(self, block_hashes: list[bytes]) -> list[Any]:
        found, _ = self.manager.find_longest_cache_hit(
            block_hashes, len(block_hashes) * HASH_BLOCK_SIZE, [GROUP], self.pool, self.spec, False, HASH_BLOCK_SIZE
        )
        return found[0]


class Decoding(Workload):
    """vLLM's Scheduler with so many requests decoding, each at another place of its block. A figure is per call.

    Args:
        call: "schedule" or "update", what is timed of a step.
    """

    blocks_per_round = 1

    def __init__(self, implementation: Implementation, num_running: int, call: str) -> None:
        self.num_running = num_running
        self.start()
        self.output: Any = None
        self.answer: Any = None
        if call == "update":
            self.prepare, self.operate = self.prepare_update, self.update  # type: ignore[method-assign]

    def start(self) -> None:
        longest = PROMPT_TOKENS + HASH_BLOCK_SIZE + MAX_OUTPUT_TOKENS
        self.scheduler = make_vllm_scheduler(
            self.num_running * -(-longest // HASH_BLOCK_SIZE) + 1, HASH_BLOCK_SIZE, longest, 16_384, self.num_running
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        rng = random.Random(SEED)
        for i in range(self.num_running):
            prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + i % HASH_BLOCK_SIZE)]
            self.scheduler.add_request(make_vllm_request(f"r{i}", prompt, HASH_BLOCK_SIZE, MAX_OUTPUT_TOKENS))
        while len(self.scheduler.running) < self.num_running or self.is_prefilling():
            self.schedule()
            self.prepare_schedule()
        self.num_steps = 0

    def is_prefilling(self) -> bool:
        return any(request.is_prefill_chunk for request in self.scheduler.running)

    def schedule(self) -> None:
        self.output = self.scheduler.schedule()

    operate = schedule

    def sample(self) -> Any:
        """What the model answers: one token for each request."""
        return model_runner_output(self.output, {name: [1] for name in self.output.num_scheduled_tokens})

    def update(self) -> None:
        self.scheduler.update_from_output(self.output, self.answer)

    def prepare_schedule(self) -> None:
        """The step that was scheduled is computed."""
        if self.output is not None:
            self.answer = self.sample()
            self.update()
            self.output = None
        self.count_step()

    prepare = prepare_schedule

    def prepare_update(self) -> None:
        self.count_step()
        self.schedule()
        self.answer = self.sample()

    def count_step(self) -> None:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps >= MAX_OUTPUT_TOKENS - HASH_BLOCK_SIZE:
            self.output = None
            self.start()

    def check(self) -> None:
        if hasattr(self.pool, "check"):
            self.pool.check()
        if len(self.scheduler.running) != self.num_running:
            raise AssertionError(f"{len(self.scheduler.running)} requests are running, not {self.num_running}")


def scheduler_rows() -> list[Row]:
    titles = {"schedule": "Scheduler.schedule()", "update": "update_from_output()"}
    return [
        Row(
            f"scheduler/{call}/{n}",
            f"{title}, {n:,} requests decoding",
            partial(Decoding, num_running=n, call=call),
            TARGETS.get(f"scheduler/{call}/{n}"),
        )
        for n in NUM_RUNNING
        for call, title in titles.items()
    ]


def all_rows(create_blocks: int) -> list[Row]:
    """Rows that make sense through vLLM's names, which have no arrays of ids and no call for several requests."""
    pool = [row for row in target_rows(create_blocks) if not row.name.startswith(("ids/", "prefix_hit"))]
    hit = Row("prefix_hit", "longest prefix hit, batch 256", HitOfFullAttention, 15.0)
    manager = [
        Row(row.name, row.title, row.make, TARGETS.get(row.name))
        for row in manager_rows()
        if row.name != "manager/decode/batch"
    ]
    requests = [row for row in hash_rows() if row.name.startswith("request/")]
    return [*pool, hit, *manager, *requests, *scheduler_rows()]


def measure_row(row: Row, both: dict[str, Implementation], settings: Settings) -> dict[str, list[float]]:
    """Samples of both, in ns; checks the pools in the end."""
    stock = row.make(both["stock"])
    with garbage_collector_off():
        samplers: dict[str, Sampler] = {"stock": sampler_of(stock, settings.sample_ms)}
        with kvpool_in_vllm():
            ours = row.make(both["kvpool"])
            samplers["kvpool"] = _with_kvpool(sampler_of(ours, settings.sample_ms))
    samples = measure(samplers, settings.samples)
    stock.check()
    with kvpool_in_vllm():
        ours.check()
    return samples


def _with_kvpool(sample: Sampler) -> Sampler:
    def sample_with_kvpool() -> float:
        with kvpool_in_vllm():
            return sample()

    return sample_with_kvpool


def line(row: Row, samples: dict[str, list[float]]) -> str:
    ratio = ratio_of(samples["stock"], samples["kvpool"])
    target = "-" if row.target is None else f"{row.target:g}x"
    met = "-" if row.target is None else "yes" if ratio.value >= row.target else "NO"
    unit = NS_PER_US if row.name.startswith("scheduler/") else 1
    figures = " | ".join(f"{median(samples[name]) / unit:,.1f}" for name in ("stock", "kvpool"))
    title = f"{row.title} (us)" if unit == NS_PER_US else row.title
    return f"| {title} | {figures} | {ratio.value:.1f}x ({ratio.low:.1f} .. {ratio.high:.1f}) | {target} | {met} |"


def run(rows: Sequence[Row], settings: Settings, write: Callable[[str], object]) -> dict[str, dict[str, list[float]]]:
    """Measures row by row; each line is written when it is known."""
    both = load_both()
    write(f"{describe_machine({'vllm': both['stock']})}\n\n{HEADER}")
    results = {}
    for row in rows:
        results[row.name] = measure_row(row, both, settings)
        write(line(row, results[row.name]))
        gc.collect()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table as markdown."""
    parser = argparse.ArgumentParser(prog="bench.vllm_names", description="Stock vLLM against vLLM with kvpool.")
    parser.add_argument("--quick", action="store_true", help="short samples, creation of a pool of 100,000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name starts with TEXT")
    options = parser.parse_args(arguments)
    rows = all_rows(USUAL_POOL if options.quick else LARGE_POOL)
    chosen = [row for row in rows if row.name.startswith(tuple(options.rows.split(",")))]
    results = run(chosen, QUICK if options.quick else FULL, lambda text: print(text, flush=True))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
