"""The gate: native against reference, in one run, against the stored ratios.

``python bench/ratios.py --check``   1 when a ratio fell by more than the tolerance below bench/ratios.json
``python bench/ratios.py --update``  measures three times and stores the medians

A ratio of two times taken in turn travels between machines, a time does not. A row that falls short is measured again,
up to twice, before it counts: machines are noisy.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.hash_workloads import hash_rows
from bench.implementations import Implementation, is_release_build, load
from bench.manager_workloads import manager_rows
from bench.rows import BATCH, Row, cached_rows, churned_row, create_row, get_free_rows, ids_row
from bench.sampling import Settings, measure_workloads, ratio_of
from bench.scheduler_workloads import scheduler_rows
from bench.workloads import GetAndFree

RATIOS_FILE = Path(__file__).resolve().parent / "ratios.json"
TOLERANCE = 0.25
TRIES = 3
SHORT = Settings(samples=5, sample_ms=6.0)
SMALL_POOL = 10_000
HASH_ROWS = ("hash/sha256", "hash/sha256_cbor", "request/append")
SCHEDULER_ROWS = ("scheduler/step/256", "scheduler/prompt/hits")
EXIT_OK, EXIT_SLOWER, EXIT_NOT_COMPARABLE = 0, 1, 2


@dataclass(frozen=True)
class Stored:
    """Contents of ratios.json: how many times faster the native pool was, and the fall that is forgiven."""

    tolerance: float
    ratios: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """One row of a check."""

    name: str
    stored: float
    measured: float
    lowest: float

    @property
    def is_ok(self) -> bool:
        return self.measured >= self.lowest


def gate_rows() -> list[Row]:
    """The rows the gate watches: those of the target table, on pools that are made in no time, and steps of a scheduler
    that stands on them."""
    get_free = [
        Row(row.name, row.title, partial(GetAndFree, num_blocks=SMALL_POOL, batch=batch, enable_caching=enable_caching))
        for enable_caching in (True, False)
        for row, batch in zip(get_free_rows(enable_caching), (1, 16, 256, 4_096), strict=True)
    ]
    others = [row for row in (*hash_rows(), *scheduler_rows()) if row.name in (*HASH_ROWS, *SCHEDULER_ROWS)]
    return [
        *get_free,
        churned_row(BATCH),
        *cached_rows(),
        ids_row(),
        create_row(SMALL_POOL),
        *manager_rows(),
        *others,
    ]


def measure_ratio(row: Row, implementations: dict[str, Implementation]) -> float:
    """How many times faster the native pool is than the reference, now."""
    workloads = {name: row.make(implementation) for name, implementation in implementations.items()}
    results = measure_workloads(workloads, SHORT)
    gc.collect()
    return ratio_of(results["reference"], results["native"]).value


def read_stored(path: Path = RATIOS_FILE) -> Stored:
    """The stored ratios.

    Raises:
        ValueError, KeyError, OSError: the file is broken or missing.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    return Stored(float(data["tolerance"]), {str(name): float(ratio) for name, ratio in data["ratios"].items()})


def check_row(row: Row, stored: Stored, implementations: dict[str, Implementation]) -> Verdict:
    """Measures until the row passes, at most ``TRIES`` times; the best ratio counts."""
    ratio = stored.ratios[row.name]
    lowest = ratio * (1 - stored.tolerance)
    best = 0.0
    for _ in range(TRIES):
        best = max(best, measure_ratio(row, implementations))
        if best >= lowest:
            break
    return Verdict(row.name, ratio, best, lowest)


def check(implementations: dict[str, Implementation]) -> list[Verdict]:
    """All rows against the stored ratios.

    Raises:
        KeyError: a row has no stored ratio, or a stored ratio no row: run ``--update``.
    """
    stored, rows = read_stored(), gate_rows()
    unmatched = {row.name for row in rows} ^ set(stored.ratios)
    if unmatched:
        raise KeyError(f"rows and stored ratios differ: {', '.join(sorted(unmatched))}; run bench/ratios.py --update")
    return [check_row(row, stored, implementations) for row in rows]


def update(implementations: dict[str, Implementation], path: Path = RATIOS_FILE) -> Stored:
    """Measures every row ``TRIES`` times, the whole list in turn, and stores the medians."""
    rows = gate_rows()
    runs = [{row.name: measure_ratio(row, implementations) for row in rows} for _ in range(TRIES)]
    ratios = {row.name: round(median(run[row.name] for run in runs), 2) for row in rows}
    path.write_text(json.dumps({"tolerance": TOLERANCE, "ratios": ratios}, indent=2) + "\n", encoding="utf-8")
    return Stored(TOLERANCE, ratios)


def describe(verdict: Verdict) -> str:
    state = "ok  " if verdict.is_ok else "FAIL"
    return (
        f"{state} {verdict.name:24} native is {verdict.measured:6.1f}x as fast as reference, "
        f"stored {verdict.stored:.1f}x, at least {verdict.lowest:.1f}x"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0: fine; 1: a row fell too far; 2: a debug or sanitized build, whose ratios can't be compared."""
    parser = argparse.ArgumentParser(prog="bench/ratios.py", description="native against reference, ratios of one run")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="compare with bench/ratios.json")
    mode.add_argument("--update", action="store_true", help="write bench/ratios.json")
    options = parser.parse_args(arguments)
    implementations = {name: load(name) for name in ("native", "reference")}
    if not is_release_build():
        print(
            "bench/ratios.py: a debug or sanitized build can't be compared; build without KVPOOL_DEBUG and "
            "KVPOOL_SANITIZE",
            file=sys.stderr,
        )
        return EXIT_NOT_COMPARABLE
    if options.update:
        for name, ratio in update(implementations).ratios.items():
            print(f"{name:24} {ratio:6.1f}x")
        return EXIT_OK
    verdicts = check(implementations)
    print("\n".join(describe(verdict) for verdict in verdicts))
    failed = [verdict.name for verdict in verdicts if not verdict.is_ok]
    if failed:
        print(f"slower than stored by more than the tolerance: {', '.join(failed)}", file=sys.stderr)
    return EXIT_SLOWER if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
