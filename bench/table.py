"""The target table, the pool's rows and the cache manager's, measured in one run: ``python -m bench.table``.

Implementations take turns sample by sample; each figure is a median, in ns per block, for the manager per request.
The ratio is that of the medians, and in brackets stand the smallest and the largest ratio of two samples taken one
after the other: the noise. Without vLLM the ratios are against the reference, and whether a target is met stays open.

  --quick       short samples, no pools of 2,000,000, no cold figures
  --json FILE   every sample, too
  --rows TEXT   only rows whose name starts with TEXT, or with one of several, as in ``--rows manager,hash,request``,
                which is all of the cache manager's table
KVPOOL_C_BENCH names the binary of bench/c/bench_pool.c; without it the comparison with C is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.bench_memory import MemoryFigures, is_memory_target_met, measure_in_fresh_process
from bench.cold import make_matrix_product, measure_cold
from bench.hash_workloads import hash_rows
from bench.implementations import Implementation, load_installed
from bench.machine import describe_machine
from bench.manager_workloads import manager_rows
from bench.rows import (
    C_ROW,
    LARGE_POOL,
    MAX_GROWTH,
    MAX_OVER_C,
    POOL_SIZES,
    USUAL_POOL,
    Row,
    cold_rows,
    growth_rows,
    ids_row,
    round_the_pool_rows,
    target_rows,
)
from bench.sampling import (
    FULL,
    QUICK,
    Settings,
    c_sampler,
    measure,
    measure_workloads,
    ratio_of,
    sampler_of,
)

Samples = dict[str, list[float]]  # implementation -> ns per block
Measured = list[tuple[Row, Samples]]
RATIO_HEADER = (
    "| operation | vLLM ns | reference ns | native ns | {0}/native | target | met? |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
)


def measure_rows(rows: Sequence[Row], implementations: dict[str, Implementation], settings: Settings) -> Measured:
    """Each row on new pools of every implementation."""
    measured: Measured = []
    for row in rows:
        workloads = {name: row.make(implementation) for name, implementation in implementations.items()}
        measured.append((row, measure_workloads(workloads, settings)))
        del workloads
        gc.collect()
    return measured


def measure_cold_rows(rows: Sequence[Row], implementations: dict[str, Implementation], samples: int) -> Measured:
    """The same, each sample one call in a cold cache."""
    multiply = make_matrix_product()
    measured: Measured = []
    for row in rows:
        workloads = {name: row.make(implementation) for name, implementation in implementations.items()}
        measured.append((row, measure_cold(workloads, samples, multiply)))
        del workloads
        gc.collect()
    return measured


def measure_against_c(binary: str, native: Implementation, settings: Settings) -> Samples:
    """allocate_ids + free_ids of 256 blocks and the same loop in C."""
    workload = ids_row().make(native)
    samplers = {"native": sampler_of(workload, settings.sample_ms), "c": c_sampler(binary, C_ROW, settings.sample_ms)}
    return measure(samplers, settings.samples)


def figure(samples: Samples, name: str) -> str:
    return f"{median(samples[name]):,.1f}" if name in samples else "-"


def ratio_line(row: Row, samples: Samples, baseline: str) -> str:
    """One line of the ratio table."""
    ratio = ratio_of(samples[baseline], samples["native"])
    target = "-" if row.target is None else f"{row.target:g}x"
    met = "-" if row.target is None else "yes" if ratio.value >= row.target else "NO"
    if baseline != "vllm" and row.target is not None:
        met = "no vLLM"
    return (
        f"| {row.title} | {figure(samples, 'vllm')} | {figure(samples, 'reference')} | {figure(samples, 'native')} "
        f"| {ratio.value:.1f}x ({ratio.low:.1f} .. {ratio.high:.1f}) | {target} | {met} |"
    )


def ratio_table(measured: Measured, baseline: str) -> str:
    header = RATIO_HEADER.format("vLLM" if baseline == "vllm" else baseline)
    return "\n".join([header, *(ratio_line(row, samples, baseline) for row, samples in measured)])


def growth_table(by_size: dict[int, Measured], target: float | None) -> str:
    """ns per block of the native pool at each size, and the growth from the smallest to the largest."""
    sizes = list(by_size)
    head = " | ".join(f"{size:,}" for size in sizes)
    lines = [
        f"| native ns, batch 256, pool of | {head} | growth | target | met? |",
        "| --- |" + " ---: |" * (len(sizes) + 2) + " --- |",
    ]
    for i, (row, _) in enumerate(by_size[sizes[0]]):
        figures = [median(by_size[size][i][1]["native"]) for size in sizes]
        growth = figures[-1] / figures[0]
        cells = " | ".join(f"{value:,.1f}" for value in figures)
        verdict = "- | -" if target is None else f"{target:g}x | {'yes' if growth <= target else 'NO'}"
        lines.append(f"| {row.title} | {cells} | {growth:.1f}x | {verdict} |")
    return "\n".join(lines)


def c_table(samples: Samples) -> str:
    ratio = ratio_of(samples["native"], samples["c"])
    return (
        "| operation | C ns | native ns | native/C | target | met? |\n| --- | ---: | ---: | ---: | ---: | --- |\n"
        f"| allocate_ids + free_ids, batch 256 | {figure(samples, 'c')} | {figure(samples, 'native')} "
        f"| {ratio.value:.2f}x ({ratio.low:.2f} .. {ratio.high:.2f}) | {MAX_OVER_C:g}x "
        f"| {'yes' if ratio.value <= MAX_OVER_C else 'NO'} |"
    )


def memory_table(figures: Sequence[MemoryFigures]) -> str:
    """Bytes per block and objects the garbage collector tracks; the targets are the native pool's."""
    lines = [
        "| all blocks cached by sha256 | blocks | native bytes/block | GC objects | GC objects in use "
        "| RSS bytes/block | met? |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for f in figures:
        native = "-" if f.native_bytes_per_block is None else f"{f.native_bytes_per_block:.1f}"
        met = "-"
        if f.native_bytes_per_block is not None:
            met = "yes" if is_memory_target_met(f) else "NO"
        lines.append(
            f"| {f.implementation} | {f.num_blocks:,} | {native} | {f.gc_objects:,} | {f.gc_objects_in_use:,} "
            f"| {f.resident_bytes_per_block:.0f} | {met} |"
        )
    return "\n".join(lines)


class Report:
    """Sections as they are measured: printed at once, kept for ``--json``."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.data: dict[str, object] = {}

    def add(self, key: str, title: str, text: str, data: object) -> None:
        self.write(f"\n### {title}\n\n{text}\n")
        self.data[key] = data


def samples_by_row(measured: Measured) -> dict[str, Samples]:
    return {row.name: samples for row, samples in measured}


def add_growth(report: Report, native: Implementation, sizes: Sequence[int], settings: Settings) -> None:
    """Cost against the size of the pool: hot, where it must not grow, and round the pool, where misses show."""
    hot = {size: measure_rows(growth_rows(size), {"native": native}, settings) for size in sizes}
    report.add(
        "growth",
        "Cost against the size of the pool: the same three batches over and over",
        growth_table(hot, MAX_GROWTH),
        {str(size): samples_by_row(rows) for size, rows in hot.items()},
    )
    misses = {size: measure_rows(round_the_pool_rows(size), {"native": native}, settings) for size in sizes}
    report.add(
        "round_the_pool",
        "The same going round the whole pool in random order (cache misses; no target)",
        growth_table(misses, None),
        {str(size): samples_by_row(rows) for size, rows in misses.items()},
    )


def run(report: Report, implementations: dict[str, Implementation], quick: bool, prefixes: str) -> None:
    """Measures all sections in order; with prefixes of row names, parted by commas, no more than these rows."""
    settings = QUICK if quick else FULL
    baseline = "vllm" if "vllm" in implementations else "reference"
    sizes = tuple(size for size in POOL_SIZES if size <= USUAL_POOL) if quick else POOL_SIZES
    tables = (
        ("warm", "Warm", target_rows(USUAL_POOL if quick else LARGE_POOL)),
        ("manager", "Cache manager (ns per request) and hashing (ns per block)", [*manager_rows(), *hash_rows()]),
    )
    for key, title, all_rows in tables:
        rows = [row for row in all_rows if row.name.startswith(tuple(prefixes.split(",")))]
        if rows:
            measured = measure_rows(rows, implementations, settings)
            table = ratio_table(measured, baseline)
            report.add(key, f"{title}, median of {settings.samples}", table, samples_by_row(measured))
    if prefixes:
        return
    binary = os.environ.get("KVPOOL_C_BENCH")
    if binary:
        against_c = measure_against_c(binary, implementations["native"], settings)
        report.add("c", "Against C", c_table(against_c), against_c)
    add_growth(report, implementations["native"], sizes, settings)
    memory = [measure_in_fresh_process(name, size) for name in implementations for size in sizes[1:]]
    report.add("memory", "Memory", memory_table(memory), [asdict(figures) for figures in memory])
    if not quick:
        cold = measure_cold_rows(cold_rows(), implementations, settings.samples)
        report.add(
            "cold",
            "Cold: one call after a 3,000 x 3,000 matrix product, pool of 100,000",
            ratio_table(cold, baseline),
            samples_by_row(cold),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables as markdown; 0 whatever the ratios are (``bench.ratios`` is the gate)."""
    parser = argparse.ArgumentParser(prog="bench.table", description="The target table, in one run.")
    parser.add_argument("--quick", action="store_true", help="short samples, no 2 M pools, no cold figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--rows", default="", metavar="TEXT", help="only rows whose name starts with TEXT (or TEXT,TEXT)"
    )
    options = parser.parse_args(arguments)
    implementations = load_installed()
    report = Report(lambda text: print(text, flush=True))
    machine = describe_machine(implementations)
    report.add("machine", "Machine", machine, machine)
    run(report, implementations, options.quick, options.rows)
    if options.json is not None:
        options.json.write_text(json.dumps(report.data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
