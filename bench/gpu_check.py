"""Everything that needs a GPU, in a few minutes: python bench/gpu_check.py [--json FILE]. No network.

Builds the extension in place, runs the tests marked ``cuda``, then measures on the GPU: block tables and slots, writes
and gathers beside plain copies, paged decode against the bytes that it has to read, decode steps without a model, and
a random model of 1 B parameters end to end. What is not installed is left out and named. The exit code is that of the
build and the tests; figures alone fail nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

# About 1.0 B parameters, in the proportions of models of that size.
BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2_048,
    "intermediate_size": 5_632,
    "num_hidden_layers": 21,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4_096,
    "initializer_range": 0.02,
}
NUM_REQUESTS = 64
SHARED_TOKENS = 512
OWN_TOKENS = 64
NEW_TOKENS = 128


@dataclass(frozen=True)
class Figure:
    """A line of the report."""

    name: str
    value: str


def build() -> int:
    """Builds the extension in place; the exit code."""
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=False
    ).returncode


def run_tests() -> int:
    """Runs the tests marked ``cuda``; pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def measure_tables() -> list[Figure]:
    """A decode step's block tables with the device's copies, one call a step."""
    from bench.decode_step_workloads import PARTS, DecodeStep
    from bench.sampling import QUICK, measure_workloads

    figures = []
    for part, title in PARTS.items():
        samples = measure_workloads({part: DecodeStep(part, "cuda")}, QUICK)[part]
        figures.append(Figure(f"256 decodes, {title}", f"{sorted(samples)[len(samples) // 2] / 1e3:.2f} us/request"))
    return figures


def measure_copies() -> list[Figure]:
    """Writes to slots, gathers and copies of blocks, as shares of the speed of a plain copy on the device."""
    from bench.bench_kv_cache import measure
    from bench.sampling import QUICK

    return [
        Figure(f"{row.part}, {row.shape}", f"{row.share:.0%} of a plain copy's speed, {row.kvpool_us:,.1f} us")
        for row in measure("cuda", QUICK)
    ]


def measure_attention() -> list[Figure]:
    """Decode attention of one layer by each backend, beside a plain copy of the bytes that it has to read."""
    from bench.bench_attention import measure
    from bench.sampling import QUICK

    return [
        Figure(f"{row.name}: {row.case.title}", f"{row.us:,.0f} us, {row.share:.0%} of a copy's speed")
        for row in measure("cuda", QUICK)
    ]


def measure_generation() -> list[Figure]:
    """A random model of 1 B parameters in bfloat16: requests with a shared prefix."""
    import random

    import torch

    from kvpool.cache.spec import KVCacheConfig
    from kvpool.engine.engine import Engine
    from kvpool.scheduler import SchedulerConfig
    from kvpool.worker.model_runner import ModelRunner, RunnerConfig
    from kvpool.worker.models.random_model import make_random_llama
    from kvpool.worker.models.transformers_model import TransformersModel

    model = TransformersModel(make_random_llama(dtype=torch.bfloat16, device="cuda", **BILLION))
    groups = model.kv_cache_groups(16)
    length = SHARED_TOKENS + OWN_TOKENS + NEW_TOKENS
    config = KVCacheConfig(1 + NUM_REQUESTS * (length // 16 + 1), groups)
    runner = ModelRunner(model, config, RunnerConfig(NUM_REQUESTS, 8_192, length))
    rng = random.Random(0)
    shared = [rng.randrange(BILLION["vocab_size"]) for _ in range(SHARED_TOKENS)]  # type: ignore[call-overload]
    prompts = [shared + [rng.randrange(32_000) for _ in range(OWN_TOKENS)] for _ in range(NUM_REQUESTS)]
    limits = SchedulerConfig(max_num_batched_tokens=8_192, max_num_seqs=NUM_REQUESTS)
    engine = Engine(config, runner, max_model_len=length, scheduler_config=limits)
    engine.generate([prompt[:64] for prompt in prompts], max_tokens=8)  # kernels are compiled and chosen
    for prompt in prompts:
        engine.add_request(prompt, max_tokens=NEW_TOKENS)
    start, first = time.perf_counter(), 0.0
    num_tokens = 0
    while engine.scheduler.has_unfinished_requests():
        num_tokens += sum(len(output.new_token_ids) for output in engine.step())
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    pool = engine.scheduler.kv_cache_manager.block_pool
    num_parameters = sum(parameter.numel() for parameter in model.model.parameters())
    engine.close()
    return [
        Figure(
            f"random Llama, {num_parameters / 1e9:.2f} B, {NUM_REQUESTS} requests, attention {runner.backend.name}",
            f"{num_tokens / seconds:,.0f} tokens/s",
        ),
        Figure("its first step", f"{first * 1e3:.0f} ms"),
        Figure("free blocks at the end", f"{pool.get_num_free_blocks():,} of {pool.num_gpu_blocks - 1:,}"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    start = time.perf_counter()
    if build() != 0:
        return 1
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device; nothing was run", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    code = run_tests()
    figures: list[Figure] = [Figure("tests marked cuda", "passed" if code == 0 else f"FAILED ({code})")]
    for measure in (measure_tables, measure_copies, measure_attention, measure_generation):
        figures += attempt(measure)
    figures.append(Figure("all of this took", f"{time.perf_counter() - start:.0f} s"))
    print("\n| on the GPU | |\n| --- | --- |")
    for figure in figures:
        print(f"| {figure.name} | {figure.value} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return code


def attempt(measure: Callable[[], list[Figure]]) -> list[Figure]:
    """The figures, or why there are none: one that fails must not take the others with it."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return [Figure(measure.__name__, f"FAILED: {type(error).__name__}: {error}")]


if __name__ == "__main__":
    sys.exit(main())
