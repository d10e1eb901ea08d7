"""Results of a replay as tables for a terminal, as JSON, and as plots. Nothing here writes to the terminal.

JSON:

    trace            file, or the generator and its seed
    requests         requests of the trace
    block_size       tokens
    num_blocks       pool size, null block included
    implementations  by name: seconds and ns_per_prompt_block (time in the manager or pool), prompt_tokens, hit_tokens,
                     hit_rate (all of admitted requests), allocated_blocks (new blocks, hits not counted),
                     evicted_blocks (blocks that lost a hash by reuse), peak_blocks_in_use, rejected (requests larger
                     than the pool), queued (requests that had to wait), mean_queue_ms (mean wait of those; 0 if there
                     are none)
    ratios           "slower/faster" pairs against the first implementation: "vllm/native": 20.0 means that native takes
                     a twentieth of vLLM's time
    over             only if asked for the pool alone: "pool"
    curve            only if asked for: a list of {num_blocks, hit_rate, belady_hit_rate, unbounded_hit_rate, rejected}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.errors import KvpoolError
from kvpool.replay.implementations import LAYERS
from kvpool.replay.policies import CurvePoint
from kvpool.replay.simulator import ReplayResult, ReplaySettings, Timeline
from kvpool.replay.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_NUM_WINDOWS = 100


class PlotError(KvpoolError):
    """A plot that can't be drawn or written."""


@dataclass(slots=True)
class Report:
    """What one replay has to show. results: one per implementation, in the order in which they were asked for."""

    trace: Trace
    settings: ReplaySettings
    results: list[ReplayResult]
    curve: list[CurvePoint] = field(default_factory=list)

    def ratios(self) -> dict[str, float]:
        """Time of each further implementation over the first one's."""
        first = self.results[0]
        return {
            f"{other.implementation}/{first.implementation}": other.manager_ns / max(1, first.manager_ns)
            for other in self.results[1:]
        }

    def to_json(self) -> dict[str, Any]:
        """The results as plain dicts, lists, strings and numbers (module docstring)."""
        document: dict[str, Any] = {
            "trace": self.trace.name,
            "requests": len(self.trace.requests),
            "block_size": self.settings.block_size,
            "num_blocks": self.settings.num_blocks,
            "implementations": {result.implementation: _result_json(result) for result in self.results},
            "ratios": self.ratios(),
        }
        if self.settings.over != LAYERS[0]:
            document["over"] = self.settings.over
        if self.curve:
            document["curve"] = [asdict(point) for point in self.curve]
        return document


def _result_json(result: ReplayResult) -> dict[str, float]:
    return {
        "seconds": result.seconds,
        "ns_per_prompt_block": result.ns_per_prompt_block,
        "prompt_tokens": result.prompt_tokens,
        "hit_tokens": result.hit_tokens,
        "hit_rate": result.hit_rate,
        "allocated_blocks": result.allocated_blocks,
        "evicted_blocks": result.evicted_blocks,
        "peak_blocks_in_use": result.peak_blocks_in_use,
        "rejected": result.rejected,
        "queued": result.queued,
        "mean_queue_ms": result.mean_queue_ms,
    }


def results_table(report: Report) -> Table:
    """One column per implementation."""
    from rich.table import Table

    table = Table(title="Replay")
    table.add_column("")
    for result in report.results:
        table.add_column(result.implementation, justify="right")
    rows = {
        f"time in the {report.settings.over} (s)": [f"{result.seconds:.3f}" for result in report.results],
        "ns per prompt block": [f"{result.ns_per_prompt_block:,.1f}" for result in report.results],
        "prompt tokens": [f"{result.prompt_tokens:,}" for result in report.results],
        "hit tokens": [f"{result.hit_tokens:,}" for result in report.results],
        "hit rate": [f"{result.hit_rate:.2%}" for result in report.results],
        "allocated blocks": [f"{result.allocated_blocks:,}" for result in report.results],
        "evicted blocks": [f"{result.evicted_blocks:,}" for result in report.results],
        "peak blocks in use": [f"{result.peak_blocks_in_use:,}" for result in report.results],
        "rejected requests": [f"{result.rejected:,}" for result in report.results],
        "queued requests": [f"{result.queued:,}" for result in report.results],
        "mean wait of these (ms)": [f"{result.mean_queue_ms:,.1f}" for result in report.results],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def ratio_lines(report: Report) -> list[str]:
    """Sentences such as ``native is 30.1x faster than vllm``."""
    first = report.results[0].implementation
    lines = []
    for other, ratio in zip(report.results[1:], report.ratios().values(), strict=True):
        faster, slower = (first, other.implementation) if ratio >= 1 else (other.implementation, first)
        factor = max(ratio, 1 / ratio) if ratio else 1.0
        lines.append(f"{faster} is {factor:.1f}x faster than {slower}")
    return lines


def curve_table(points: Sequence[CurvePoint]) -> Table:
    """Hit rate against pool size."""
    from rich.table import Table

    table = Table(title="Hit rate by pool size")
    for header in ("blocks", "hit rate", "Belady", "unbounded", "rejected"):
        table.add_column(header, justify="right")
    for point in points:
        rates = (point.hit_rate, point.belady_hit_rate, point.unbounded_hit_rate)
        table.add_row(f"{point.num_blocks:,}", *(f"{rate:.2%}" for rate in rates), f"{point.rejected:,}")
    return table


def check_plot(path: str | Path) -> None:
    """Raises PlotError now if a plot can't be drawn, or not in the format that the suffix names, rather than after a
    long replay."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("plots need matplotlib: pip install kvpool[plot]") from None
    supported = Figure().canvas.get_supported_filetypes()
    if _plot_format(path) not in supported:
        raise PlotError(f"{path}: Format {_plot_format(path)!r} is not supported; choose from {', '.join(supported)}")


def _plot_format(path: str | Path) -> str:
    """A file without a suffix is a PNG: the name stays as it was given."""
    return Path(path).suffix[1:].lower() or "png"


def write_plot(report: Report, path: str | Path) -> None:
    """Draws hit rate and blocks in use over time, and the curve if there is one. The suffix of ``path`` picks the
    format.

    The timeline is the first implementation's. Raises PlotError.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    num_panels = 3 if report.curve else 2
    figure = Figure(figsize=(9, 3.2 * num_panels), layout="constrained")
    axes = figure.subplots(num_panels, 1)
    figure.suptitle(_title(report))
    timeline = report.results[0].timeline
    _plot_hit_rate(axes[0], timeline)
    _plot_blocks_in_use(axes[1], timeline, report.settings.num_usable_blocks)
    if report.curve:
        _plot_curve(axes[2], report.curve)
    try:
        figure.savefig(path, dpi=120, format=_plot_format(path))
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: .pgf without TeX
        raise PlotError(f"{path}: {error}") from None


def _title(report: Report) -> str:
    kind = " (synthetic trace)" if report.trace.is_synthetic else ""
    name = "built-in generator" if report.trace.is_synthetic else Path(report.trace.name).name
    return f"{name}{kind}: {report.settings.num_blocks:,} blocks of {report.settings.block_size} tokens"


def _plot_hit_rate(axes: Axes, timeline: Timeline) -> None:
    seconds = [time / 1000 for time in timeline.time_ms]
    rates = [hits / max(1, tokens) for hits, tokens in zip(timeline.hit_tokens, timeline.prompt_tokens, strict=True)]
    step = max(1, len(seconds) // _NUM_WINDOWS)
    window_ends, window_rates = [], []
    for start in range(0, len(seconds) - step, step):
        num_tokens = timeline.prompt_tokens[start + step] - timeline.prompt_tokens[start]
        if num_tokens:
            window_ends.append(seconds[start + step])
            window_rates.append((timeline.hit_tokens[start + step] - timeline.hit_tokens[start]) / num_tokens)
    axes.plot(window_ends, window_rates, color="0.7", linewidth=1, label="recent")
    axes.plot(seconds, rates, label="since the start")
    axes.set(xlabel="time (s)", ylabel="hit rate (tokens)", ylim=(0, 1))
    axes.legend()


def _plot_blocks_in_use(axes: Axes, timeline: Timeline, num_usable_blocks: int) -> None:
    axes.step([time / 1000 for time in timeline.time_ms], timeline.blocks_in_use, where="post")
    axes.axhline(num_usable_blocks, color="0.7", linestyle="--", linewidth=1, label="pool")
    axes.set(xlabel="time (s)", ylabel="blocks in use")
    axes.set_ylim(bottom=0)
    axes.legend()


def _plot_curve(axes: Axes, points: Sequence[CurvePoint]) -> None:
    sizes = [point.num_blocks for point in points]
    axes.plot(sizes, [point.unbounded_hit_rate for point in points], "--", color="0.7", label="unbounded cache")
    axes.plot(sizes, [point.belady_hit_rate for point in points], "o-", label="Belady's optimum")
    axes.plot(sizes, [point.hit_rate for point in points], "o-", label="pool")
    axes.set(xscale="log", xlabel="pool size (blocks)", ylabel="hit rate (tokens)", ylim=(0, 1))
    axes.legend()
