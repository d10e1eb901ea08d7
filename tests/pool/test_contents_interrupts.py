"""Ctrl-C: a call that is interrupted has happened or has not, and no block is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from interrupts import Interrupted, Interrupter
from pool_state import state_of
from token_requests import TokenRequest

import kvpool

pytestmark = pytest.mark.skipif(kvpool.BACKEND != "native", reason="the calls of the twin are not atomic")

REQUEST = TokenRequest(range(24), 2)
OTHER = TokenRequest(range(50, 74), 2)


def make_pool(events: bool) -> Any:
    """A pool with something of everything: used, shared, free and cached, partial, unpinned."""
    pool = kvpool.BlockPool(14, True, 2, events)
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(REQUEST, blocks, 0, 3, 4, 0)
    pool.cache_full_blocks(OTHER, blocks[3:], 0, 2, 4, 0)
    pool.cache_partial_block(REQUEST, blocks[5], 14, 0, 4)
    pool.touch(blocks[:2])
    pool.free_blocks(blocks[3:5])
    pool.unpin_blocks([blocks[7]], len_of_nothing)
    return pool


def len_of_nothing(block: Any) -> None:
    """A reuse watcher."""


def emptied(pool: Any) -> Any:
    for block in pool.blocks[1:]:
        pool.free_blocks([block] * block.ref_cnt)
    return pool


CALLS: dict[str, Callable[[Any], Any]] = {
    "allocate": lambda pool: pool.get_new_blocks(3),
    "allocate all": lambda pool: pool.get_new_blocks(pool.get_num_free_blocks()),
    "allocate too many": lambda pool: pool.get_new_blocks(14),
    "free": lambda pool: pool.free_blocks([pool.blocks[3], pool.blocks[2], pool.blocks[6]]),
    "free too often": lambda pool: pool.free_blocks([pool.blocks[3], pool.blocks[3]]),
    "touch": lambda pool: pool.touch([pool.blocks[4], pool.blocks[1]]),
    "cache": lambda pool: pool.cache_full_blocks(OTHER, [*pool.blocks[4:6], pool.blocks[7]], 2, 3, 4, 0),
    "cache a partial block that is full now": lambda pool: pool.cache_full_blocks(
        REQUEST, [*pool.blocks[1:4], pool.blocks[6]], 3, 4, 4, 0
    ),
    "cache a partial block": lambda pool: pool.cache_partial_block(OTHER, pool.blocks[7], 10, 0, 4),
    "cache a further partial block": lambda pool: pool.cache_partial_block(OTHER, pool.blocks[6], 10, 0, 4),
    "replace a partial block": lambda pool: pool.cache_partial_block(
        OTHER, pool.blocks[6], 10, 0, 4, replace_existing_hashes=True
    ),
    "move hashes": lambda pool: pool.move_block_hashes(pool.blocks[6], pool.blocks[7]),
    "unpin": lambda pool: pool.unpin_blocks([pool.blocks[1], pool.blocks[7]], len_of_nothing),
    "evict": lambda pool: pool.evict_blocks([1, 6, 4]),
    "reset": lambda pool: pool.reset_prefix_cache(),
}
# Without events, metrics and watchers: one step, whatever they change.
COMPILED = {"allocate", "allocate too many", "free", "free too often", "touch", "cache"}


def run_call(name: str, pool: Any) -> None:
    with suppress(kvpool.NoFreeBlocksError, kvpool.BlockStateError):
        CALLS[name](pool)


def blocks_of(state: dict[str, Any]) -> tuple[Any, ...]:
    """Who has which blocks, and in which order the free ones are reused."""
    return state["free"], state["backwards"], state["ref_cnt"]


def entries_of(state: dict[str, Any]) -> set[tuple[bytes, int]]:
    """Which hash leads to which block."""
    return {(key, block_id) for key, (_, block_ids) in state["lookups"].items() for block_id in block_ids}


@pytest.mark.parametrize("events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_of_the_pool_has_happened_or_has_not(name: str, events: bool) -> None:
    """For the blocks that is exact. Of the hashes, those that the call gives or takes may be half done: each is there
    or is not, and leads where it led before or leads afterwards."""

    def start() -> Any:
        return emptied(make_pool(events)) if name == "reset" else make_pool(events)

    keys = [key for pool in [start()] for block in pool.blocks for key in pool._cached_block_hashes(block)]
    keys += [request.block_hashes[i] + bytes(4) for request in (REQUEST, OTHER) for i in range(12)]
    before = state_of(start(), keys)
    pool = start()
    run_call(name, pool)
    after = state_of(pool, keys)
    for place in range(2000):
        pool, interrupt = start(), Interrupter(place)
        with suppress(Interrupted):
            interrupt(run_call, name, pool)
        pool.check()
        state = state_of(pool, keys)
        assert blocks_of(state) in (blocks_of(before), blocks_of(after)), place
        assert entries_of(before) & entries_of(after) <= entries_of(state) <= entries_of(before) | entries_of(after)
        if not events and name in COMPILED:
            assert state in (before, after), place
        emptied(pool)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if not interrupt.is_spent:
            assert state == after
            return
    raise AssertionError("the call has no end")
