"""Corruption without a cause: no request ever reads or overwrites the tokens of another, whatever happens around it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from churn import Churn

SEEDS = range(6)


@pytest.mark.parametrize("hash_block_size", [4, 2], ids=["hashes per block", "fine hashes"])
@pytest.mark.parametrize("events", [False, True], ids=["quiet", "events"])
def test_every_hit_has_the_tokens_that_were_asked_for(
    make_pool: Any, caplog: Any, events: bool, hash_block_size: int
) -> None:
    caplog.set_level(logging.ERROR, logger="kvpool")
    num_hits = num_evictions = 0
    for seed in SEEDS:
        pool = make_pool(16, True, hash_block_size, events)
        churn = Churn(pool, seed, hash_block_size)
        churn.run(400)
        num_hits += churn.num_hit_blocks
        num_evictions += pool.stats.evictions
    assert num_hits > 400 and num_evictions > 400


def test_without_caching_nothing_is_found(make_pool: Any, caplog: Any) -> None:
    caplog.set_level(logging.ERROR, logger="kvpool")
    pool = make_pool(16, False, 4)
    churn = Churn(pool, 0)
    churn.cache = lambda sequence: None  # type: ignore[method-assign]
    churn.run(400)
    assert churn.num_hit_blocks == 0 and pool.stats.evictions == 0
