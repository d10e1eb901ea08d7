"""The command ``kvpool replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.common import (
    MAX_BLOCK_SIZE,
    MAX_COUNT,
    MAX_NUM_BLOCKS,
    MAX_SEED,
    MIN_SEED,
    STDOUT,
    UsageError,
    check_output,
    check_path,
    clean_errors,
    progress,
    write_json,
)
from kvpool.cli.memory import check_pool_memory
from kvpool.cli.output import Output
from kvpool.common.arguments import show
from kvpool.common.json_lines import ReadLimits

if TYPE_CHECKING:
    from kvpool.replay.report import Report
    from kvpool.replay.simulator import ReplayResult, ReplaySettings
    from kvpool.replay.trace import Trace, TraceLimits

DEFAULT_TRACE_CAPACITY = 4_800_000
"""Tokens that the default pool holds for a trace file: 300,000 blocks of 16."""

DEFAULT_SYNTHETIC_CAPACITY = 320_000
"""Tokens that the default pool holds for the built-in generator: 20,000 blocks of 16."""

MAX_DEFAULT_BLOCKS = 2**20
"""Blocks to which the default pool grows for a large request."""

MAX_SYNTHETIC_REQUESTS = 10_000_000


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]", help="Trace file (JSON lines, .gz, .zst). Without it: synthetic chats, see --seed."
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            "--blocks",
            min=2,
            max=MAX_NUM_BLOCKS,
            help="Pool size, null block included. Default: room for 4.8 M tokens (trace) or 320 k tokens (synthetic),"
            " more if the largest request needs it; printed.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size", min=1, max=MAX_BLOCK_SIZE, help="Tokens per block; must divide the trace's block size."
        ),
    ] = 16,
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            "--trace-block-size",
            min=1,
            max=MAX_BLOCK_SIZE,
            help="Tokens per entry of hash_ids. Default: 512 (trace), --block-size (synthetic).",
            show_default=False,
        ),
    ] = None,
    prefill_rate: Annotated[float, typer.Option("--prefill-rate", help="Prompt tokens computed per second.")] = 20_000,
    tpot: Annotated[float, typer.Option("--tpot", help="Time per output token, ms.")] = 25,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            max=MAX_COUNT,
            help="Only the first LIMIT requests of the file (synthetic: requests to generate, by default 2,000).",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="NAMES",
            help="Implementations to run over the same events, e.g. native,reference,vllm; fails if any hit or block"
            " id differs. Default: native,reference (reference alone under KVPOOL_PURE_PYTHON=1).",
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        str,
        typer.Option("--over", metavar="LAYER", help="manager: the whole cache manager; pool: its block pool alone."),
    ] = "manager",
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON; - for stdout, in place of tables."),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Plot hit rate and blocks in use over time (.png, .svg, .pdf)."),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Hit rate against pool size, beside unbounded cache and Belady's optimum.")
    ] = False,
    curve_blocks: Annotated[
        str | None,
        typer.Option(
            "--curve-blocks", metavar="SIZES", help="Pool sizes of the curve, e.g. 1000,5000. Implies --curve."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=MIN_SEED, max=MAX_SEED, help="Seed of the synthetic trace. Default: 0.", show_default=False
        ),
    ] = None,
    max_request_tokens: Annotated[
        int,
        typer.Option(
            "--max-request-tokens", min=1, max=MAX_COUNT, help="Refuse a trace with a request of more tokens."
        ),
    ] = 2**24,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Refuse a trace of more text, decompressed.")
    ] = ReadLimits.max_bytes,
    max_line_bytes: Annotated[
        int, typer.Option("--max-line-bytes", min=1, help="Refuse a trace with a longer line.")
    ] = ReadLimits.max_line_bytes,
) -> None:
    """Run a request trace through the cache manager as a discrete-event simulation.

    Each request needs blocks for its prompt and output at admission, first come first served, and keeps them until it
    finishes. The reported times are spent in calls into the manager (--over pool: the pool) alone. The hit rate is in
    tokens of admitted requests; the mean wait is of the requests that had to wait.
    """
    with clean_errors():
        from dataclasses import replace

        from kvpool.replay import report as reports
        from kvpool.replay.simulator import MIN_NUM_BLOCKS, ReplaySettings
        from kvpool.replay.trace import TraceLimits

        check_path(trace)
        names = _parse_names(compare)
        sizes = _parse_sizes(curve_blocks)
        settings = ReplaySettings(blocks or MIN_NUM_BLOCKS, block_size, prefill_rate, tpot, over)
        _check_outputs(json_path, plot_path)
        _check_available(names, block_size, over)
        limits = TraceLimits(max_bytes, max_line_bytes, max_request_tokens)
        loaded = _load_trace(trace, seed, limit, block_size, trace_block_size, limits)
        loaded.check_block_size(block_size)
        settings = replace(settings, num_blocks=blocks or _default_blocks(loaded, block_size))
        check_pool_memory(names, max([settings.num_blocks, *sizes]))
        output = Output(is_stderr=json_path == STDOUT, keeps_going=not (json_path is None and plot_path is None))
        _print_header(output, loaded, settings, is_default_size=blocks is None)
        report = reports.Report(loaded, settings, _run_all(loaded, settings, names))
        if curve or sizes:
            report.curve = _run_curve(loaded, settings, names[0], sizes)
        # Files first: an output that nobody reads any more, or has no room for, must not cost them.
        if json_path is not None and json_path != STDOUT:
            write_json(report.to_json(), json_path)
        if plot_path is not None:
            reports.write_plot(report, plot_path)
        output.raise_failure()
        _print_report(output, report)
        if json_path == STDOUT:
            write_json(report.to_json(), STDOUT)


def _parse_names(text: str | None) -> list[str]:
    from kvpool.replay.implementations import IMPLEMENTATIONS, default_implementations

    if text is None:
        return default_implementations()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise UsageError(f"--compare {show(text)}: choose from {', '.join(IMPLEMENTATIONS)}, separated by commas")
    return names


def _parse_sizes(text: str | None) -> list[int]:
    from kvpool.replay.simulator import MIN_NUM_BLOCKS

    if text is None:
        return []
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise UsageError(f"--curve-blocks {show(text)}: must be whole numbers separated by commas") from None
    if sizes[0] < MIN_NUM_BLOCKS or sizes[-1] > MAX_NUM_BLOCKS:
        raise UsageError(f"--curve-blocks {show(text)}: sizes must be from {MIN_NUM_BLOCKS} to {MAX_NUM_BLOCKS}")
    return sizes


def _check_outputs(json_path: str | None, plot_path: Path | None) -> None:
    """Fails before a long replay rather than after it."""
    from kvpool.replay.report import check_plot

    check_output(json_path)
    if plot_path is not None:
        check_output(plot_path)
        check_plot(plot_path)


def _check_available(names: list[str], block_size: int, over: str) -> None:
    """Makes the smallest pool of each: an implementation that is missing shows now, not after the others have run."""
    from kvpool.replay.implementations import make_target
    from kvpool.replay.simulator import MIN_NUM_BLOCKS

    for name in names:
        make_target(name, MIN_NUM_BLOCKS, block_size, over)


def _load_trace(
    path: Path | None,
    seed: int | None,
    limit: int | None,
    block_size: int,
    trace_block_size: int | None,
    limits: TraceLimits,
) -> Trace:
    from kvpool.replay.synthetic import DEFAULT_NUM_REQUESTS, generate_trace
    from kvpool.replay.trace import DEFAULT_TRACE_BLOCK_SIZE, read_trace

    if path is None:
        if limit is not None and limit > MAX_SYNTHETIC_REQUESTS:
            raise UsageError(f"--limit {limit}: at most {MAX_SYNTHETIC_REQUESTS} requests are generated")
        return generate_trace(seed or 0, limit or DEFAULT_NUM_REQUESTS, trace_block_size or block_size)
    if seed is not None:
        raise UsageError("--seed is for the synthetic trace; it has no meaning with a TRACE file")
    with progress("reading", total=limit) as advance:
        return read_trace(path, trace_block_size or DEFAULT_TRACE_BLOCK_SIZE, limit, advance, limits)


def _default_blocks(trace: Trace, block_size: int) -> int:
    from kvpool.replay.simulator import MIN_NUM_BLOCKS

    usual = (DEFAULT_SYNTHETIC_CAPACITY if trace.is_synthetic else DEFAULT_TRACE_CAPACITY) // block_size
    wanted, largest = trace.max_blocks_needed(block_size) + 1, max(usual, MAX_DEFAULT_BLOCKS)
    if wanted > largest:
        raise UsageError(
            f"{trace.name}: a request needs a pool of {wanted:,} blocks, and the default one has at most {largest:,}"
            " (--blocks sets its size; a request that is larger than it is rejected)"
        )
    return max(usual, wanted, MIN_NUM_BLOCKS)


def _run_all(trace: Trace, settings: ReplaySettings, names: list[str]) -> list[ReplayResult]:
    from kvpool.replay.implementations import make_target
    from kvpool.replay.simulator import check_same, simulate

    results = []
    for name in names:
        target = make_target(name, settings.num_blocks, settings.block_size, settings.over)
        with progress(name, total=len(trace.requests)) as advance:
            results.append(simulate(trace, target, settings, advance))
        del target  # before the next pool is made: two large ones of block objects may not fit
    check_same(results)
    return results


def _run_curve(trace: Trace, settings: ReplaySettings, name: str, sizes: list[int]) -> list[Any]:
    from kvpool.replay.policies import compute_curve, default_curve_sizes

    sizes = sizes or default_curve_sizes(trace, settings.block_size)
    num_requests = len(trace.requests)
    with progress("curve", total=len(sizes) * num_requests) as advance:
        return compute_curve(
            trace, name, settings, sizes, lambda num_points, num_done: advance(num_points * num_requests + num_done)
        )


def _print_header(output: Output, trace: Trace, settings: ReplaySettings, is_default_size: bool) -> None:
    kind = "SYNTHETIC trace (built-in generator, no real traffic)" if trace.is_synthetic else "trace"
    size = "default size" if is_default_size else "--blocks"
    output.print(f"{kind}: {trace.name}, {len(trace.requests):,} requests", soft_wrap=True)
    output.print(
        f"pool: {settings.num_blocks:,} blocks ({size}) of {settings.block_size} tokens;"
        f" prefill {settings.prefill_rate:,g} tokens/s, {settings.tpot_ms:g} ms per output token",
        soft_wrap=True,
    )


def _print_report(output: Output, report: Report) -> None:
    from kvpool.replay import report as reports

    output.print(reports.results_table(report))
    for line in reports.ratio_lines(report):
        output.print(line)
    if len(report.results) > 1:
        output.print("hits and block ids are the same in all")
    if report.curve:
        output.print(reports.curve_table(report.curve))
