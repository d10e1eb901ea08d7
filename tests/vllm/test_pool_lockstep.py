"""Random histories of valid calls on vLLM's own BlockPool and on kvpool's under vLLM's name: the same blocks, state and
events after each call, and the events of the very classes that vLLM has."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from pool_histories import History, quiet  # noqa: F401 (a fixture)

pytestmark = pytest.mark.vllm

NUM_HISTORIES = 200


class VllmHistory(History):
    def compare(self) -> None:
        stock, ours = (list(pool.kv_event_queue) for pool in self.pools)
        assert [type(event) for event in stock] == [type(event) for event in ours]
        assert stock == ours
        super().compare()


@pytest.fixture(scope="module")
def pool_classes() -> tuple[Any, Any]:
    pytest.importorskip("vllm.v1.core.block_pool")
    from kvpool.integrations.vllm import pool

    return pool.VllmBlockPool, pool.BlockPool


@pytest.mark.parametrize("int_hashes", ["1", "0"])
def test_histories_are_the_same(
    pool_classes: tuple[Any, Any], int_hashes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", int_hashes)
    stock, ours = pool_classes
    logging.getLogger("kvpool").setLevel(logging.ERROR)
    seen: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES * int(int_hashes), NUM_HISTORIES * int(int_hashes) + NUM_HISTORIES):
        history = VllmHistory(stock, seed, {"kvpool": ours})
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"history of seed {seed}") from error
        seen += history.seen
    for what in ("secondary hashes", "copies", "evictions", "reused unpinned blocks", "resets", "promotions"):
        assert seen[what] > 15, seen
