"""A real model in vLLM's engine, once stock and once with kvpool in its place: nothing that a user, a consumer of
events or the worker sees may differ, and no block may be left in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_scenarios import (
    AMPLE,
    CBOR_HASH,
    NO_CACHING,
    SCARCE,
    SCARCE_MULTIPROCESS,
    SLIDING_WINDOW,
    SPECULATIVE,
    Scenario,
)
from vllm_processes import ACTIVE_LINE, KVPOOL, STOCK, require_vllm, run_to_end, vllm_environment

pytestmark = pytest.mark.vllm
require_vllm()

from event_subscriber import CLEARED, endpoints  # noqa: E402

ENGINE_RUN = Path(__file__).with_name("engine_run.py")
ALL_LEVELS = ["pool", "manager", "hasher", "tables"]
TIMEOUT_SECONDS = 900.0

SCENARIOS = [
    pytest.param((AMPLE, KVPOOL), id="ample"),
    pytest.param((SCARCE, KVPOOL), id="scarce"),
    pytest.param((SCARCE_MULTIPROCESS, KVPOOL), id="scarce-multiprocess"),
    pytest.param((SLIDING_WINDOW, KVPOOL), id="sliding-window"),
    pytest.param((SLIDING_WINDOW, "pool"), id="sliding-window-pool", marks=pytest.mark.slow),
    pytest.param((SLIDING_WINDOW, "hasher,tables"), id="sliding-window-hasher-tables", marks=pytest.mark.slow),
    pytest.param((SPECULATIVE, KVPOOL), id="speculative", marks=pytest.mark.slow),
    pytest.param((CBOR_HASH, KVPOOL), id="cbor-hash", marks=pytest.mark.slow),
    pytest.param((NO_CACHING, KVPOOL), id="no-caching", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Run:
    """What one engine did: the result of engine_run.py, and what it printed."""

    result: dict[str, Any]
    log: str


@dataclass(frozen=True)
class Pair:
    """The same scenario on stock vLLM and with kvpool."""

    scenario: Scenario
    levels: str
    stock: Run
    kvpool: Run

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.stock, self.kvpool

    def assert_equal(self, part: str) -> None:
        """That a part of the result is the same in both. The first difference is enough to start from, and pytest's
        own account of two long lists takes minutes."""
        difference = first_difference(self.stock.result[part], self.kvpool.result[part], part)
        assert difference is None, difference


def first_difference(stock: Any, kvpool: Any, path: str) -> str | None:
    """Where two JSON values differ first, in words; None if they are equal."""
    if isinstance(stock, dict) and isinstance(kvpool, dict) and stock.keys() == kvpool.keys():
        inner = [first_difference(stock[key], kvpool[key], f"{path}.{key}") for key in stock]
        return next(filter(None, inner), None)
    if isinstance(stock, list) and isinstance(kvpool, list):
        for index, (left, right) in enumerate(zip(stock, kvpool)):
            if left != right:
                return first_difference(left, right, f"{path}[{index}]")
        if len(stock) != len(kvpool):
            return f"{path} has {len(stock)} items in stock vLLM, {len(kvpool)} with kvpool"
        return None
    return None if stock == kvpool else f"{path} is {stock!r} in stock vLLM, {kvpool!r} with kvpool"


RunEngine = Callable[[Scenario, str], Run]


@pytest.fixture(scope="module")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Runs a scenario under a value of KVPOOL_VLLM; each such run is made once."""
    done: dict[tuple[str, str], Run] = {}

    def make(scenario: Scenario, levels: str) -> Run:
        folder = tmp_path_factory.mktemp("engine")
        spec, result = folder / "spec.json", folder / "result.json"
        multiprocessing = "1" if scenario.is_multiprocess else "0"
        environment = vllm_environment(folder, levels, VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing)
        with endpoints() as events:
            spec.write_text(json.dumps(scenario.spec(events)))
            log = run_to_end([str(ENGINE_RUN), str(spec), str(result)], environment, folder / "log", TIMEOUT_SECONDS)
        return Run(json.loads(result.read_text()), log)

    def run(scenario: Scenario, levels: str) -> Run:
        key = (scenario.name, levels)
        if key not in done:
            done[key] = make(scenario, levels)
        return done[key]

    return run


@pytest.fixture(scope="module", params=SCENARIOS)
def pair(request: pytest.FixtureRequest, run_engine: RunEngine) -> Pair:
    scenario, levels = request.param
    return Pair(scenario, levels, stock=run_engine(scenario, STOCK), kvpool=run_engine(scenario, levels))


def test_kvpool_is_in_the_one_and_not_in_the_other(pair: Pair) -> None:
    assert "kvpool: " not in pair.stock.log
    assert pair.stock.result["kvpool"] is None
    levels = ALL_LEVELS if pair.levels == KVPOOL else pair.levels.split(",")
    line = f"{ACTIVE_LINE}{', '.join(levels)})"
    assert pair.kvpool.result["kvpool"].startswith(line)
    if "pool" in levels:
        logged = [text for text in pair.kvpool.log.splitlines() if line in text]
        # The engine core says so itself, where it is a process of its own.
        assert any("EngineCore" in text or not pair.scenario.is_multiprocess for text in logged), logged
    if not pair.scenario.is_multiprocess:
        native = [any(name.startswith("kvpool") for name in run.result["pool"]["modules"]) for run in pair.runs]
        assert native == [False, "pool" in levels]


def test_the_scenario_is_what_it_says(pair: Pair) -> None:
    metrics = pair.stock.result["metrics"]
    assert (metrics["vllm:num_preemptions"] > 0) == pair.scenario.preempts
    assert (metrics["vllm:prefix_cache_hits"] > 0) == pair.scenario.is_caching
    assert metrics["vllm:generation_tokens"] == sum(
        len(request["tokens"]) for wave in pair.stock.result["waves"] for request in wave
    )
    if not pair.scenario.is_multiprocess:
        [[_, _, block_ids], *_] = pair.stock.result["steps"][0]["new"]
        assert len(block_ids) == pair.scenario.num_groups


def test_tokens_and_cached_token_counts(pair: Pair) -> None:
    pair.assert_equal("waves")


def test_every_step_of_the_scheduler(pair: Pair) -> None:
    """Requests, token counts and block ids of each step, as they go to the worker."""
    pair.assert_equal("steps")


def test_metrics(pair: Pair) -> None:
    pair.assert_equal("metrics")


def test_events(pair: Pair) -> None:
    for run in pair.runs:
        history = run.result["history"]
        assert history["sequence_numbers"] == list(range(len(history["events"])))
        assert history["num_live_batches"] > 0
        assert history["live_is_end_of_replay"]
        assert history["events"][-1][0] == CLEARED
    difference = first_difference(*(run.result["history"]["events"] for run in pair.runs), "events")
    assert difference is None, difference


def test_all_blocks_are_free_at_the_end(pair: Pair) -> None:
    for run in pair.runs:
        assert run.result["reset"]
        assert [request["num_cached_tokens"] for request in run.result["after_reset"]] == [0]
        assert run.result["metrics"]["vllm:kv_cache_usage_perc"] == 0
        pool = run.result["pool"]
        if pool is not None:
            assert pool["num_free_blocks"] == len(pool["free_block_ids"]) == pool["num_blocks"] - 1
            assert pool["referenced_block_ids"] == []
            assert pool["usage"] == 0
    if not pair.scenario.is_multiprocess:
        for part in ("free_block_ids", "cached_block_ids"):
            assert pair.stock.result["pool"][part] == pair.kvpool.result["pool"][part]
