"""The command ``kvpool replay-ops``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.common import (
    EXIT_FAILURE,
    MAX_COUNT,
    STDOUT,
    check_output,
    check_path,
    clean_errors,
    fail,
    make_console,
    progress,
    write_json,
)
from kvpool.cli.memory import check_pool_memory

if TYPE_CHECKING:
    from kvpool.playback.player import PlaybackReport
    from kvpool.recording.operations import ManagerSetup

_DEFAULT_MAX_BYTES = 1 << 32
_DEFAULT_MAX_BLOCKS = 1 << 22
_DEFAULT_MAX_TOKENS = 1 << 24


def replay_ops(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What KVPOOL_RECORD=FILE has written; FILE.1, if it is there, goes first."),
    ],
    check_every: Annotated[
        int | None,
        typer.Option(
            "--check-every",
            min=1,
            max=MAX_COUNT,
            help="Look at the whole state after so many operations. Default: after each; where the pool is large, after"
            " one per 4,096 blocks.",
            show_default=False,
        ),
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="OUT", help="Write what was found as JSON; - for stdout.")
    ] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Refuse a larger file.")] = _DEFAULT_MAX_BYTES,
    max_blocks: Annotated[int, typer.Option("--max-blocks", min=1, help="Refuse a larger pool.")] = _DEFAULT_MAX_BLOCKS,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Refuse longer requests, and a larger max_model_len.")
    ] = _DEFAULT_MAX_TOKENS,
) -> None:
    """Play the recorded calls of a KV cache manager again, on the native pool and on its twin.

    After each operation the two are compared with one another and with what was recorded, and their invariants are
    checked. The exit code is 1 if there is an operation at which they part or break; it is named with its arguments.
    """
    with clean_errors():
        from kvpool.playback.limits import PlaybackLimits
        from kvpool.playback.player import play_recording

        check_path(file)
        check_output(json_path)
        limits = PlaybackLimits(max_bytes=max_bytes, max_blocks=max_blocks, max_tokens=max_tokens)
        with progress("operations", total=None) as advance, _quiet():
            report = play_recording(file, limits, check_every=check_every, advance=advance, before_pool=_require_memory)
        if json_path is not None:
            write_json(_to_json(report), json_path)
        if json_path != STDOUT:
            _print(report)
        if report.finding is not None:
            raise typer.Exit(EXIT_FAILURE)


def _require_memory(setup: ManagerSetup) -> None:
    try:
        check_pool_memory(("native", "reference"), setup.num_blocks)
    except MemoryError as error:
        fail(f"error: not enough memory: {error}", EXIT_FAILURE)


@contextmanager
def _quiet() -> Iterator[None]:
    """What pools say on the way was said when it was recorded."""
    import logging

    logger = logging.getLogger("kvpool")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _to_json(report: PlaybackReport) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report)


def _print(report: PlaybackReport) -> None:
    console = make_console()
    last = report.first_operation + report.num_operations + report.num_skipped - 1
    console.print(f"{', '.join(report.paths)}: recorded with {report.recorded_with}", soft_wrap=True)
    for note in report.notes:
        console.print(note, soft_wrap=True)
    played = f"operations {report.first_operation:,} to {last:,}" if last >= report.first_operation else "no operations"
    skipped = f" ({report.num_skipped:,} of them left out: interrupted)" if report.num_skipped else ""
    console.print(f"{played} on {' and '.join(report.implementations)}{skipped}", soft_wrap=True)
    if report.finding is not None:
        console.print(str(report.finding), soft_wrap=True)
        return
    often = "each operation" if report.check_every == 1 else f"every {report.check_every:,} operations"
    console.print(
        f"all the same, and as recorded; states compared and invariants checked after {often}", soft_wrap=True
    )
