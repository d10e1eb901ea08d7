"""Times of several implementations in one run, sample by sample in turn, so that a busy machine hits all alike."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

from bench.workloads import Workload

Sampler = Callable[[], float]  # one sample, in ns per block

CUDA_WARM_UP_CALLS = 5


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        samples: per implementation; the median counts.
        sample_ms: timed milliseconds a sample should last; a round is never cut.
    """

    samples: int = 7
    sample_ms: float = 40.0


FULL = Settings()
QUICK = Settings(samples=5, sample_ms=8.0)


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Everything collected, then no automatic collection inside: the same state for every implementation."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def time_rounds(workload: Workload, rounds: int) -> int:
    """Nanoseconds spent in ``operate()`` over so many rounds; ``prepare()`` is left out."""
    total = 0
    for _ in range(rounds):
        workload.prepare()
        start = perf_counter_ns()
        workload.operate()
        total += perf_counter_ns() - start
    return total


def sampler_of(workload: Workload, sample_ms: float) -> Sampler:
    """Warms the workload up and returns a function that takes one sample of about ``sample_ms``."""
    time_rounds(workload, 1)
    first = max(1, time_rounds(workload, 1)) if sample_ms > 0 else 1
    rounds = max(1, round(sample_ms * 1e6 / first)) if sample_ms > 0 else 1
    blocks = rounds * workload.blocks_per_round
    return lambda: time_rounds(workload, rounds) / blocks


def cuda_sampler_of(workload: Workload, sample_ms: float) -> Sampler:
    """The same by CUDA's clock: ns per call between two events on the device. ``prepare()`` is not called."""
    import torch

    def run(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            workload.operate()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6 / calls

    run(CUDA_WARM_UP_CALLS)
    calls = max(1, round(sample_ms * 1e6 / max(1.0, run(CUDA_WARM_UP_CALLS))))
    return lambda: run(calls)


def c_sampler(binary: str, row: str, sample_ms: float) -> Sampler:
    """One sample of a row of the C bench (bench/c/bench_pool.c), in a process of its own."""
    command = [binary, "--json", "--row", row, "--samples", "1", "--ms", str(max(1, round(sample_ms)))]

    def sample() -> float:
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return float(answer["rows"][row])

    return sample


def measure(samplers: Mapping[str, Sampler], samples: int) -> dict[str, list[float]]:
    """``samples`` figures of each, in ns per block; taken in turn, and a different one goes first each time."""
    names = list(samplers)
    results: dict[str, list[float]] = {name: [] for name in names}
    with garbage_collector_off():
        for turn in range(samples):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                results[name].append(samplers[name]())
    return results


def measure_workloads(workloads: Mapping[str, Workload], settings: Settings) -> dict[str, list[float]]:
    """Warms up, measures and checks one workload per implementation; ns per block."""
    with garbage_collector_off():
        samplers = {name: sampler_of(workload, settings.sample_ms) for name, workload in workloads.items()}
    results = measure(samplers, settings.samples)
    for workload in workloads.values():
        workload.check()
    return results


@dataclass(frozen=True)
class Ratio:
    """How many times faster one implementation is than another.

    Attributes:
        value: ratio of the medians.
        low, high: smallest and largest ratio of two samples taken one after the other: the noise.
    """

    value: float
    low: float
    high: float


def ratio_of(slow: list[float], fast: list[float]) -> Ratio:
    """Ratio of two rows of samples taken in turn."""
    pairs = [a / b for a, b in zip(slow, fast, strict=True)]
    return Ratio(median(slow) / median(fast), min(pairs), max(pairs))


def spread(samples: list[float]) -> float:
    """(largest - smallest) / median."""
    return (max(samples) - min(samples)) / median(samples)
