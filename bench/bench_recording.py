"""What KVPOOL_RECORD costs: the same run on two schedulers and managers in turn, of which one is recorded.

``python -m bench.bench_recording`` prints, per workload, ns per request or block without and with a recording, and
the cost in percent, by the processor time of the process; ``--check`` ends with status 1 where that is more than the
promised most. The recording goes to a folder of temporary files, in ``--folder`` if that is given.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time_ns

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import sampling
from bench.implementations import Implementation, is_release_build, load
from bench.sampling import FULL, Settings, measure_workloads, ratio_of
from bench.scheduler_workloads import DecodeSteps, LongPrompts
from bench.workloads import Workload
from kvpool import kv_cache_manager
from kvpool.recording.calls import recorded
from kvpool.recording.settings import FILE_VARIABLE

MOST_PERCENT = 30.0


class CloseDecodeSteps(DecodeSteps):
    """So few blocks are free that the scheduler asks for each request alone, as an engine under load does."""

    def start(self) -> None:
        super().start()
        self.face.scheduler._has_blocks_for_decode = lambda num_requests: False


class Prompts(LongPrompts):
    """From the tokens of the prompts on: block hashes are made as well."""

    def operate(self) -> None:
        self.make_requests()
        super().operate()


QUICK = Settings(samples=5, sample_ms=20.0)
WORKLOADS: dict[str, tuple[str, Callable[[Implementation], Workload]]] = {
    "decode/256": ("a scheduler's step, 256 running requests", lambda native: DecodeSteps(native, 256, "step")),
    "decode/1024": ("the same with 1,024", lambda native: DecodeSteps(native, 1_024, "step")),
    "decode/close": ("256, and few blocks are free", lambda native: CloseDecodeSteps(native, 256, "step")),
    "prompts/misses": ("prompts of 131,072 tokens, nothing is cached", lambda native: Prompts(native, False)),
    "prompts/hits": ("the same, all of them are hits", lambda native: Prompts(native, True)),
}


@contextmanager
def recording_to(path: Path) -> Iterator[None]:
    """Managers that are made here are recorded."""
    plain, before = kv_cache_manager.KVCacheManager, os.environ.get(FILE_VARIABLE)
    os.environ[FILE_VARIABLE] = str(path)
    kv_cache_manager.KVCacheManager = recorded(kv_cache_manager.PlainKVCacheManager)  # type: ignore[misc]
    try:
        yield
    finally:
        kv_cache_manager.KVCacheManager = plain  # type: ignore[misc]
        os.environ.pop(FILE_VARIABLE)
        if before is not None:
            os.environ[FILE_VARIABLE] = before


def measure(name: str, folder: Path, settings: Settings) -> tuple[float, float, float]:
    """ns without and with a recording, and the cost in percent: medians of samples taken in turn."""
    native = load("native")
    _, make = WORKLOADS[name]
    plain = make(native)
    path = folder / name.replace("/", "-")
    with recording_to(path):
        with_recording = make(native)
    sampling.perf_counter_ns = process_time_ns  # what waits for a disk or another process is not its cost
    samples = measure_workloads({"plain": plain, "recorded": with_recording}, settings)
    if not path.stat().st_size:
        raise AssertionError("nothing was recorded")
    ratio = ratio_of(samples["recorded"], samples["plain"])
    return median(samples["plain"]), median(samples["recorded"]), 100 * (ratio.value - 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_recording")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples")
    parser.add_argument("--check", action="store_true", help=f"status 1 where the cost is over {MOST_PERCENT:g} %%")
    parser.add_argument("--folder", type=Path, help="where the recordings go, for as long as they are made")
    options = parser.parse_args(arguments)
    if not is_release_build():
        print("a debug or sanitized build: its times mean nothing", file=sys.stderr)
        return 2
    is_too_much = False
    print("| | ns | recorded, ns | cost |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, (title, _) in WORKLOADS.items():
            plain, with_recording, percent = measure(name, Path(folder), QUICK if options.quick else FULL)
            print(f"| {title} | {plain:,.0f} | {with_recording:,.0f} | {percent:.0f} % |", flush=True)
            is_too_much |= percent > MOST_PERCENT
    return int(options.check and is_too_much)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
