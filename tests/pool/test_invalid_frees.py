"""``on_invalid_free="warn"`` with batches that are mostly wrong: the good entries are freed, each bad one is counted,
and time and log stay small."""

from __future__ import annotations

import logging
import random
import time
from array import array
from typing import Any

import pytest
from pool_state import free_ids

from kvpool.pool.skipped_frees import MOST_LINES


@pytest.mark.parametrize("num_bad", [1000, 100_000])
@pytest.mark.parametrize("call", ["free_blocks", "free_ids"])
def test_many_invalid_entries(make_pool: Any, caplog: Any, num_bad: int, call: str) -> None:
    pool = make_pool(10, on_invalid_free="warn")
    blocks = pool.get_new_blocks(6)
    pool.touch(blocks[:1])
    batch = [
        blocks[0],
        *[pool.blocks[8]] * (num_bad // 2),
        *blocks[:3],
        *[blocks[0]] * (num_bad - num_bad // 2),
        blocks[5],
    ]
    started = time.perf_counter()
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        if call == "free_blocks":
            pool.free_blocks(batch)
        else:
            pool.free_ids(array("i", [block.block_id for block in batch]))
    assert time.perf_counter() - started < 20  # quadratic takes minutes
    assert pool.stats.invalid_frees == num_bad
    assert free_ids(pool) == [1, 2, 3, 6, 7, 8, 9] and [block.ref_cnt for block in blocks] == [0, 0, 0, 1, 1, 0]
    assert 1 <= len(caplog.records) <= MOST_LINES + 1
    assert f"{num_bad - MOST_LINES} more entries" in caplog.text and "block_id=8" in caplog.text


def test_ids_outside_the_pool_are_counted_too(make_pool: Any, caplog: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    pool.get_new_blocks(2)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool.free_ids(array("i", [-1, 2, 5, -(2**31), 1, 2**31 - 1, 0]))
    assert pool.stats.invalid_frees == 4 and free_ids(pool) == [2, 1, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_skipped_might_as_well_not_be_there(make_pool: Any, seed: int) -> None:
    rng = random.Random(seed)
    warning, strict = make_pool(12, on_invalid_free="warn"), make_pool(12)
    counts = [0] * 12
    for pool in (warning, strict):
        blocks = pool.get_new_blocks(8)
        pool.touch(blocks[:4])
    for i in range(1, 9):
        counts[i] = 2 if i <= 4 else 1
    batch, valid = [rng.randrange(12) for _ in range(20)], []
    for block_id in batch:
        if block_id == 0 or counts[block_id] > 0:
            valid.append(block_id)
            counts[block_id] -= block_id != 0
    prepend = rng.random() < 0.5
    warning.free_blocks([warning.blocks[i] for i in batch], prepend)
    strict.free_blocks([strict.blocks[i] for i in valid], prepend)
    assert free_ids(warning) == free_ids(strict)
    assert [block.ref_cnt for block in warning.blocks] == [block.ref_cnt for block in strict.blocks]
    assert warning.stats.invalid_frees == len(batch) - len(valid)


def test_blocks_of_no_pool_are_named_and_counted(make_pool: Any, backend: Any, caplog: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    block = pool.get_new_blocks(1)[0]
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool.free_blocks([*(backend.KVCacheBlock(70 + i) for i in range(1000)), block])
    assert pool.stats.invalid_frees == 1000 and pool.get_num_free_blocks() == 4
    assert len(caplog.records) == MOST_LINES + 1 and "block_id=70" in caplog.text
