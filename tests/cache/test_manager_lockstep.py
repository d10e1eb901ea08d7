"""Random histories of a scheduler on the KV cache manager: over the native pool and over the reference the same."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from conftest import BACKEND_NAMES
from manager_histories import History, Stack
from manager_layouts import MAKERS, Layout

NUM_SEEDS = int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40"))

# What the histories of a kind must have met, or they show nothing.
EXPECTED = {
    "hit tokens": MAKERS.keys() - {"mamba_other", "encoder_decoder"},
    "no blocks": MAKERS.keys(),
    "preemptions": MAKERS.keys(),
    "decoded at once": MAKERS.keys(),
    "chunks": MAKERS.keys(),
    "external": {"full", "hybrid", "two_full"},
    "copies": {"hybrid_mamba"},
    "hits inside blocks": {"hybrid_mamba"},
    "junctions": {"hybrid"},
    "ids to zero": {"hybrid_mamba"},
}


def make_stacks(layout: Layout) -> list[Stack]:
    return [Stack(name, layout) for name in reversed(BACKEND_NAMES)]


@pytest.mark.parametrize("kind", MAKERS)
def test_histories_are_the_same(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        history = History(seed, make_stacks, kinds=(kind,))
        try:
            seen += history.run()
        except Exception as error:
            raise AssertionError(f"history of kind {kind}, seed {seed}, {history.layout}") from error
    for what, kinds in EXPECTED.items():
        assert seen[what] or kind not in kinds, (what, seen)
