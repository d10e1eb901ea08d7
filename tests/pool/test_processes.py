"""What happens to pools across processes: a forked child has its own copy, and nothing can be pickled or copied."""

from __future__ import annotations

import copy
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from pool_state import state_of
from test_lifetime import REQUEST, use


def run_in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child and fail with what it printed if it raised."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            check()
            os._exit(0)
        except BaseException:
            os.write(write_end, traceback.format_exc().encode())
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as told:
        message = told.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_copy_of_its_own(make_pool: Any) -> None:
    pool = make_pool(20, True, 4, True)
    use(pool)
    before = state_of(pool)

    def in_child() -> None:
        assert state_of(pool) == before
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        pool.check()
        assert pool.find_prefix_ids(REQUEST.block_hashes).tolist() == []
        pool.free_blocks(taken)
        pool.free_blocks(pool.blocks[5:9])
        pool.free_ids(memoryview(bytes([9, 0, 0, 0, 10, 0, 0, 0])).cast("i"))
        pool.check()
        assert state_of(pool) != before

    run_in_child(in_child)
    assert state_of(pool) == before
    pool.check()
    assert pool.find_prefix_ids(REQUEST.block_hashes).tolist() == list(range(1, 9))


# Copies


def test_nothing_of_a_pool_can_be_pickled_or_copied(make_pool: Any, backend: Any) -> None:
    pool = make_pool(4)
    things = [
        pool,
        pool.blocks[1],
        pool.free_block_queue,
        pool.cached_block_hash_to_block,
        backend.KVCacheBlock(1),
        backend.FreeKVCacheBlockQueue([]),
        backend.BlockHashToBlockMap(),
        pool.free_block_queue.fake_free_list_head,
    ]
    for thing in things:
        for attempt in (copy.copy, copy.deepcopy, *(lambda x, p=p: pickle.dumps(x, p) for p in range(6))):
            with pytest.raises(TypeError) as raised:
                attempt(thing)
            assert "copied" in str(raised.value)


def test_what_holds_a_pool_cannot_be_deepcopied(make_pool: Any) -> None:
    for held in ({"pool": make_pool(4)}, [make_pool(4).blocks[1]]):
        with pytest.raises(TypeError):
            copy.deepcopy(held)
