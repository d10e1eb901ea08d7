"""The histories of ``pool_histories`` on vLLM's own BlockPool, the native one and the reference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import BACKEND_NAMES, make_backend
from pool_histories import History, quiet  # noqa: F401 (a fixture)

pytestmark = pytest.mark.vllm

NUM_HISTORIES = 800


@pytest.fixture(scope="module")
def vllm_pool_class() -> Any:
    return pytest.importorskip("vllm.v1.core.block_pool").BlockPool


@pytest.mark.parametrize("part", range(4))
def test_histories_are_the_same(vllm_pool_class: Any, part: int) -> None:
    seen: Counter[str] = Counter()
    others = {name: make_backend(name).BlockPool for name in BACKEND_NAMES}
    for seed in range(part, NUM_HISTORIES, 4):
        history = History(vllm_pool_class, seed, others)
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"history of seed {seed}") from error
        seen += history.seen
    for what in (
        "secondary hashes",
        "copies",
        "evictions",
        "reused unpinned blocks",
        "resets",
        "promotions",
        "collector calls",
    ):
        assert seen[what] > 50, seen
