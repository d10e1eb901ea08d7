"""Never a wrong token, through the engine: the histories of ``engine_contents``."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from engine_contents import EngineHistory
from scheduler_contents import SPECS

import kvpool

NUM_SEEDS = max(4, int(os.environ.get("KVPOOL_CONTENTS_SEEDS", "20")) // 4)  # per cache


def run(cache: str, *, fails: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        try:
            seen += EngineHistory(seed, cache, fails=fails).run()
        except Exception as error:
            raise AssertionError(f"history of {cache!r}, seed {seed}, {fails=}") from error
    return seen


@pytest.mark.parametrize("cache", SPECS)
def test_every_token_is_read_as_it_was_written(cache: str) -> None:
    seen = run(cache, fails=False)
    for what in ("hit tokens", "preemptions", "aborts", "finished"):
        assert seen[what], (what, seen)


@pytest.mark.parametrize("cache", SPECS)
def test_steps_that_fail_leave_no_wrong_token(cache: str) -> None:
    seen = run(cache, fails=True)
    expected = ["hit tokens", "finished", "failed before", "failed middle", "failed after"]
    for what in expected + ["interrupted"] * (kvpool.BACKEND == "native"):
        assert seen[what], (what, seen)
