"""The `kvpool` command: `replay` runs request traces, `doctor` describes the installation.

Exit codes: 0 done; 1 implementations differ or memory is short; 2 wrong usage or a bad trace; 130
interrupted. Errors are one line on stderr. Whatever is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool._version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.replay.report import Report
    from kvpool.replay.simulator import ReplayResult, ReplaySettings
    from kvpool.replay.trace import Trace

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

DEFAULT_TRACE_CAPACITY = 4_800_000
"""Tokens that the default pool holds for a trace file: 300,000 blocks of 16."""

DEFAULT_SYNTHETIC_CAPACITY = 320_000
"""Tokens that the default pool holds for the built-in generator: 20,000 blocks of 16."""

_STDOUT = "-"
_MAX_NUM_BLOCKS = 2**31 - 1
_PROGRESS_SECONDS = 0.1

app = typer.Typer(
    name="kvpool",
    help="Cache manager and block pool for LLM KV caches: replay request traces, inspect the installation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class UsageError(Exception):
    """Options that don't go together, or an output that can't be written."""


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Turns every expected failure into one line on stderr and an exit code."""
    from kvpool.errors import KvpoolError

    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except MemoryError:
        _fail("error: not enough memory; try fewer blocks (--blocks)", EXIT_FAILURE)
    except (UsageError, KvpoolError) as error:
        is_mismatch = type(error).__name__ == "ReplayMismatchError"
        _fail(f"error: {error}", EXIT_FAILURE if is_mismatch else EXIT_USAGE)


def _fail(line: str, code: int) -> None:
    typer.echo(line, err=True)
    raise typer.Exit(code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
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
            max=_MAX_NUM_BLOCKS,
            help="Pool size, null block included. Default: room for 4.8 M tokens (trace) or 320 k tokens (synthetic),"
            " more if the largest request needs it; printed.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, help="Tokens per block; must divide the trace's block size.")
    ] = 16,
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            "--trace-block-size",
            min=1,
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
        int | None, typer.Option("--seed", help="Seed of the synthetic trace. Default: 0.", show_default=False)
    ] = None,
) -> None:
    """Run a request trace through the cache manager as a discrete-event simulation.

    Each request needs blocks for its prompt and output at admission, first come first served, and keeps them until it
    finishes. The reported times are spent in calls into the manager (--over pool: the pool) alone. The hit rate is in
    tokens of admitted requests; the mean wait is of the requests that had to wait.
    """
    with _clean_errors():
        from dataclasses import replace

        from kvpool.replay import report as reports
        from kvpool.replay.simulator import MIN_NUM_BLOCKS, ReplaySettings

        names = _parse_names(compare)
        sizes = _parse_sizes(curve_blocks)
        settings = ReplaySettings(blocks or MIN_NUM_BLOCKS, block_size, prefill_rate, tpot, over)
        _check_outputs(json_path, plot_path)
        _check_available(names, block_size, over)
        loaded = _load_trace(trace, seed, limit, block_size, trace_block_size)
        loaded.check_block_size(block_size)
        settings = replace(settings, num_blocks=blocks or _default_blocks(loaded, block_size))
        console = _make_console(is_stderr=json_path == _STDOUT)
        _print_header(console, loaded, settings, is_default_size=blocks is None)
        report = reports.Report(loaded, settings, _run_all(loaded, settings, names))
        if curve or sizes:
            report.curve = _run_curve(loaded, settings, names[0], sizes)
        _print_report(console, report)
        if json_path is not None:
            _write_json(report, json_path)
        if plot_path is not None:
            reports.write_plot(report, plot_path)


def _parse_names(text: str | None) -> list[str]:
    from kvpool.replay.drivers import IMPLEMENTATIONS, default_implementations

    if text is None:
        return default_implementations()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise UsageError(f"--compare {text!r}: choose from {', '.join(IMPLEMENTATIONS)}, separated by commas")
    return names


def _parse_sizes(text: str | None) -> list[int]:
    from kvpool.replay.simulator import MIN_NUM_BLOCKS

    if text is None:
        return []
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise UsageError(f"--curve-blocks {text!r}: must be whole numbers separated by commas") from None
    if sizes[0] < MIN_NUM_BLOCKS or sizes[-1] > _MAX_NUM_BLOCKS:
        raise UsageError(f"--curve-blocks {text!r}: sizes must be from {MIN_NUM_BLOCKS} to {_MAX_NUM_BLOCKS}")
    return sizes


def _check_outputs(json_path: str | None, plot_path: Path | None) -> None:
    """Fails before a long replay rather than after it."""
    from kvpool.replay.report import load_plotting

    if plot_path is not None:
        load_plotting()
    outputs = [Path(json_path)] if json_path not in (None, _STDOUT) else []
    for path in outputs + ([plot_path] if plot_path is not None else []):
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")


def _check_available(names: list[str], block_size: int, over: str) -> None:
    """Makes the smallest pool of each: an implementation that is missing shows now, not after the others have run."""
    from kvpool.replay.drivers import make_driver
    from kvpool.replay.simulator import MIN_NUM_BLOCKS

    for name in names:
        make_driver(name, MIN_NUM_BLOCKS, block_size, over)


def _load_trace(
    path: Path | None, seed: int | None, limit: int | None, block_size: int, trace_block_size: int | None
) -> Trace:
    from kvpool.replay.synthetic import DEFAULT_NUM_REQUESTS, generate_trace
    from kvpool.replay.trace import DEFAULT_TRACE_BLOCK_SIZE, read_trace

    if path is None:
        return generate_trace(seed or 0, limit or DEFAULT_NUM_REQUESTS, trace_block_size or block_size)
    if seed is not None:
        raise UsageError("--seed is for the synthetic trace; it has no meaning with a TRACE file")
    with _progress("reading", total=limit) as advance:
        return read_trace(path, trace_block_size or DEFAULT_TRACE_BLOCK_SIZE, limit, advance)


def _default_blocks(trace: Trace, block_size: int) -> int:
    capacity = DEFAULT_SYNTHETIC_CAPACITY if trace.is_synthetic else DEFAULT_TRACE_CAPACITY
    return max(capacity // block_size, trace.max_blocks_needed(block_size) + 1)


def _run_all(trace: Trace, settings: ReplaySettings, names: list[str]) -> list[ReplayResult]:
    from kvpool.replay.drivers import make_driver
    from kvpool.replay.simulator import check_same, simulate

    results = []
    for name in names:
        driver = make_driver(name, settings.num_blocks, settings.block_size, settings.over)
        with _progress(name, total=len(trace.requests)) as advance:
            results.append(simulate(trace, driver, settings, advance))
        del driver  # before the next pool is made: two large ones of block objects may not fit
    check_same(results)
    return results


def _run_curve(trace: Trace, settings: ReplaySettings, name: str, sizes: list[int]) -> list[Any]:
    from kvpool.replay.policies import compute_curve, default_curve_sizes

    sizes = sizes or default_curve_sizes(trace, settings.block_size)
    num_requests = len(trace.requests)
    with _progress("curve", total=len(sizes) * num_requests) as advance:
        return compute_curve(
            trace, name, settings, sizes, lambda num_points, num_done: advance(num_points * num_requests + num_done)
        )


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal; yields a function that takes the number of requests done."""
    if not sys.stderr.isatty():
        yield lambda num_done: None
        return
    from time import monotonic

    from rich.progress import Progress

    # Drawn from here and not by the bar's own thread, which would take time from the calls that are being timed.
    with Progress(console=_make_console(is_stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(label, total=total)
        last_drawn = 0.0

        def advance(num_done: int) -> None:
            nonlocal last_drawn
            progress.update(task, completed=num_done)
            if monotonic() - last_drawn > _PROGRESS_SECONDS:
                last_drawn = monotonic()
                progress.refresh()

        yield advance


def _make_console(is_stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=is_stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _print_header(console: Console, trace: Trace, settings: ReplaySettings, is_default_size: bool) -> None:
    kind = "SYNTHETIC trace (built-in generator, no real traffic)" if trace.is_synthetic else "trace"
    size = "default size" if is_default_size else "--blocks"
    console.print(f"{kind}: {trace.name}, {len(trace.requests):,} requests", soft_wrap=True)
    console.print(
        f"pool: {settings.num_blocks:,} blocks ({size}) of {settings.block_size} tokens;"
        f" prefill {settings.prefill_rate:,g} tokens/s, {settings.tpot_ms:g} ms per output token",
        soft_wrap=True,
    )


def _print_report(console: Console, report: Report) -> None:
    from kvpool.replay import report as reports

    console.print(reports.results_table(report))
    for line in reports.ratio_lines(report):
        console.print(line)
    if len(report.results) > 1:
        console.print("hits and block ids are the same in all")
    if report.curve:
        console.print(reports.curve_table(report.curve))


def _write_json(report: Report, path: str) -> None:
    import json

    text = json.dumps(report.to_json(), indent=2)
    if path == _STDOUT:
        typer.echo(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


@app.command()
def doctor(
    is_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    checks_vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Run seeded histories on the installed vLLM, stock and with kvpool in its place."),
    ] = False,
) -> None:
    """Describe the installation: version, backend, compiler, Python, and what else is here.

    With --vllm the exit code is 1 if vLLM with kvpool in its place differs from stock vLLM, or if kvpool does not
    take hold.
    """
    import json

    from kvpool.doctor import check_vllm, gather_facts

    facts = gather_facts()
    is_equal = True
    if checks_vllm:
        is_equal, facts["vllm_check"] = check_vllm()
    if is_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        for label, value in facts.items():
            typer.echo(f"{label.replace('_', ' '):<24}{'-' if value is None else value}")
    if not is_equal:
        raise typer.Exit(EXIT_FAILURE)


def main() -> None:
    """Entry point; an interrupt outside of a command (during imports, say) ends as cleanly as one inside."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
