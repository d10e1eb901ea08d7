"""Never a wrong token, through the scheduler: the histories of ``scheduler_contents``."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from scheduler_contents import SPECS, SchedulerHistory

import kvpool

NUM_SEEDS = max(4, int(os.environ.get("KVPOOL_CONTENTS_SEEDS", "20")) // 5)  # per cache, policy and half


def run(seed: int, backend_name: str, cache: str, policy: str, **options: Any) -> Counter[str]:
    try:
        return SchedulerHistory(seed, backend_name, cache, policy, **options).run()
    except Exception as error:
        raise AssertionError(f"history of {cache!r}, {policy}, seed {seed}, {backend_name}, {options}") from error


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cache", SPECS)
def test_every_token_is_read_as_it_was_written(cache: str, policy: str, backend_name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        seen += run(seed, backend_name, cache, policy, fails=False)
    for what in ("hit tokens", "preemptions", "aborts", "overlapping", "several tokens"):
        assert seen[what], (what, seen)


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("cache", SPECS)
def test_steps_that_fail_leave_no_wrong_token(cache: str, policy: str, backend_name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        seen += run(seed, backend_name, cache, policy, fails=True)
    for what in ("hit tokens", "failed before", "failed middle", "failed after", "withdrawn", "ended by an error"):
        assert seen[what], (what, seen)


@pytest.mark.skipif(kvpool.BACKEND != "native", reason="the calls of the twin are not atomic")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt when a generator ends
@pytest.mark.parametrize("cache", ["full", "full and window", "three", "full and mamba", "hits inside blocks"])
def test_interrupted_calls_leave_no_wrong_token(cache: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS // 2):
        seen += run(seed, "native", cache, "priority" if seed % 2 else "fcfs", fails=True, is_interrupted=True)
    assert seen["interrupted"] > NUM_SEEDS, seen
