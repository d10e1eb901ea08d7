"""vLLM's CPU engine with a real model, stock and with kvpool: ``python bench/vllm_engine.py``.

Needs the environment of `make vllm-env` with kvpool installed, and the model of `make vllm-model`. Each engine is a
process of its own; stock and kvpool take turns, and the one that starts changes from round to round. Figures are
medians over the processes of what one process gives: tokens per second of the whole batch, prefill included, and the
median time of `Scheduler.schedule()` and `update_from_output()` over the steps in which the requests decode, with cold
caches as a real step leaves them. In brackets: smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.machine import processor_name

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("vllm_engine_child.py")
DEFAULT_MODEL = ROOT / "build" / "vllm-model"
LEVELS = {"stock": "0", "kvpool": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
KV_CACHE_GIB = "2"
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Figure:
    """A line of the table: its name, how to get the figure from one process, and whether more is better."""

    name: str
    key: str
    unit: str
    is_rate: bool = False

    def of(self, run: Mapping[str, Any]) -> float:
        value = run[self.key]
        return float(median(value) if isinstance(value, list) else value)


FIGURES = (
    Figure("throughput", "tokens_per_second", "tokens/s", is_rate=True),
    Figure("schedule() per step", "schedule_us", "us"),
    Figure("update_from_output() per step", "update_us", "us"),
)

Runs = dict[str, list[dict[str, Any]]]


def run_engine(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One process. Raises RuntimeError if it fails."""
    environment = {
        **os.environ,
        **OFFLINE,
        **IN_PROCESS,
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        "PYTHONHASHSEED": "0",
        "KVPOOL_VLLM": LEVELS[name],
    }
    command = [sys.executable, str(CHILD), json.dumps(dict(settings))]
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"the {name} engine failed:\n{done.stderr[-4000:]}")
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if run["pool"].startswith("kvpool") != (name == "kvpool"):
        raise RuntimeError(f"the {name} engine ran with the pool of {run['pool']}: is kvpool installed?\n{done.stderr}")
    return run


def measure(num_processes: int, settings: Mapping[str, Any]) -> Runs:
    """The runs of both, taken in turn. Raises RuntimeError if they did not do the same work."""
    runs: Runs = {name: [] for name in LEVELS}
    for turn in range(num_processes):
        for name in list(LEVELS)[:: 1 if turn % 2 == 0 else -1]:
            runs[name].append(run_engine(name, settings))
    work = {
        (run["num_steps"], run["num_cached_tokens"], str(run["tokens"])) for taken in runs.values() for run in taken
    }
    if len(work) != 1:
        raise RuntimeError(f"the engines did not do the same: {sorted((steps, hits) for steps, hits, _ in work)}")
    return runs


def cell(samples: list[float]) -> str:
    return f"{median(samples):,.0f} ({min(samples):,.0f}-{max(samples):,.0f})"


def table(runs: Runs) -> str:
    lines = ["| | stock | kvpool | kvpool is |", "| --- | --- | --- | --- |"]
    for figure in FIGURES:
        stock, kvpool = ([figure.of(run) for run in runs[name]] for name in LEVELS)
        ratio = median(kvpool) / median(stock) if figure.is_rate else median(stock) / median(kvpool)
        lines.append(f"| {figure.name}, {figure.unit} | {cell(stock)} | {cell(kvpool)} | {ratio:.2f}x as fast |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=3, help="engines of each kind")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48, help="generated per request")
    parser.add_argument("--blocks", type=int, default=1024, help="of 32 tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default=os.environ.get("KVPOOL_TEST_MODEL", str(DEFAULT_MODEL)))
    parser.add_argument("--json", type=Path, help="where to write every figure")
    options = parser.parse_args()
    if not (Path(options.model) / "config.json").is_file():
        sys.exit(f"no model in {options.model}: make vllm-model")
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "num_requests": options.requests,
        "max_tokens": options.tokens,
        "num_blocks": options.blocks,
    }
    load = os.getloadavg()[0]
    runs = measure(options.processes, settings)
    print(
        f"SmolLM2-135M-Instruct, {options.dtype}, {options.requests} requests with a shared prefix, {options.tokens} "
        f"tokens each, {options.processes} engines of each kind in turn; "
        f"{processor_name()}, {os.cpu_count()} cores, load {load:.1f} before.\n"
    )
    print(table(runs))
    if options.json is not None:
        options.json.write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
