"""``kvpool doctor --vllm``: equal on the installed vLLM, loud about any difference, and it leaves a stock vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm.v1.core.block_pool")

from kvpool import cli
from kvpool.integrations.vllm import histories, levels, self_check
from kvpool.integrations.vllm import pool as level

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def leaves_a_stock_vllm() -> Iterator[None]:
    yield
    import vllm.v1.core.block_pool as names

    assert names.BlockPool is level.VllmBlockPool


def test_equal() -> None:
    verdict = self_check.run(12)
    assert verdict.is_equal, str(verdict)
    assert verdict.levels == levels.NAMES
    assert verdict.num_histories == 12 and verdict.num_steps == 12 * histories.NUM_STEPS
    assert str(verdict).endswith("no difference")


def test_histories_meet_what_they_are_for() -> None:
    steps = [step for seed in range(0, 40, 2) for step in histories.history(seed)]
    events = [event[0] for step in steps for event in step[-1]]
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} <= set(events)
    assert any(step[6] for step in steps), "no block had several hashes"
    assert any(step[2] for step in steps), "no unpinned block was reused"
    managed = [step for seed in range(1, 40, 2) for step in histories.history(seed)]
    admitted = [done for step in managed for done in step[0] if isinstance(done, tuple) and len(done) == 3]
    assert any(hit for _, hit, _ in admitted) and any(allocated is None for _, _, allocated in admitted)
    assert any(isinstance(done, str) for step in managed for done in step[0]), "nothing finished or was preempted"


class OrderIgnored(level.BlockPool):
    """Gives blocks back in the wrong order."""

    def free_blocks(self, ordered_blocks: Iterable[Any], prepend: bool = False) -> None:
        super().free_blocks(list(ordered_blocks)[::-1], prepend)


class StaleHash(level.BlockPool):
    """Forgets to say which hash it evicted."""

    def _emit_block_removed_events(self, block_hashes: Iterable[bytes]) -> None:
        pass


class Broken(level.BlockPool):
    def touch(self, blocks: Any) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("mutant", "named"), [(OrderIgnored, "stock"), (StaleHash, "BlockRemoved"), (Broken, "broken")]
)
def test_a_difference_is_found_and_named(mutant: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level, "BlockPool", mutant)
    verdict = self_check.run(6, ("pool",))
    assert not verdict.is_equal and verdict.differences
    assert named in str(verdict) and "seed 0" in str(verdict)


def test_a_vllm_that_kvpool_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "vllm_version", lambda: "9.9.0")
    verdict = self_check.run(2)
    assert not verdict.is_equal and "9.9.0" in str(verdict)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "NUM_SEEDS", 4)
    run = self_check.run
    monkeypatch.setattr(self_check, "run", lambda: run(4))
    result = CliRunner().invoke(cli.app, ["doctor", "--vllm"])
    assert result.exit_code == 0 and "4 histories, 200 steps: no difference" in result.stdout
    monkeypatch.setattr(level, "BlockPool", OrderIgnored)
    result = CliRunner().invoke(cli.app, ["doctor", "--vllm", "--json"])
    assert result.exit_code == 1
    assert "differ" in json.loads(result.stdout)["vllm_check"]
