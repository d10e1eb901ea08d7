"""BlockSequence: the native block table, which is to read and change as a list of blocks does."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from kvpool import backend
from kvpool.backend import BlockPool
from kvpool.cache.blocks import KVCacheBlocks
from kvpool.errors import BlockStateError

pytestmark = pytest.mark.skipif(backend.BACKEND != "native", reason="a block table of the twin is a list")


def make_pool(num_blocks: int = 50) -> BlockPool:
    return BlockPool(num_blocks, True, 4)


def test_a_new_table_is_empty() -> None:
    table = make_pool().new_block_table()
    assert len(table) == 0 and not table and list(table) == [] and table == [] and table.block_ids() == []
    assert isinstance(table, Sequence)
    with pytest.raises(IndexError):
        table[0]


def test_it_reads_as_the_list_of_the_pools_own_blocks() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(6)
    table = pool.new_block_table()
    table += blocks
    assert table == blocks and table == tuple(blocks) and blocks == table
    assert table != blocks[:5] and table != blocks[::-1]
    assert table[0] is blocks[0] and table[-1] is blocks[5] and blocks[3] in table and pool.null_block not in table
    assert table[1:4] == blocks[1:4] and table[::-1] == blocks[::-1] and table[4:100] == blocks[4:]
    assert list(reversed(table)) == blocks[::-1] and [*table] == blocks
    assert table.block_ids() == [block.block_id for block in blocks]
    assert repr(table) == "BlockSequence([1, 2, 3, 4, 5, 6])"
    assert table != 3


@pytest.mark.parametrize("seed", range(20))
def test_it_changes_as_a_list_does(seed: int) -> None:
    rng = random.Random(seed)
    pool = make_pool()
    table, model = pool.new_block_table(), []
    for _ in range(200):
        some = [pool.blocks[rng.randrange(50)] for _ in range(rng.randrange(5))]
        kind = rng.randrange(5)
        if kind == 0:
            table.append(pool.blocks[7])
            model.append(pool.blocks[7])
        elif kind == 1:
            table.extend(iter(some))
            model.extend(some)
        elif kind == 2 and model:
            i = rng.randrange(-len(model), len(model))
            table[i] = model[i] = pool.null_block
        elif kind == 3:
            start = rng.randrange(len(model) + 1)
            some = some[: len(model) - start]
            table[start : start + len(some)] = some
            model[start : start + len(some)] = some
        else:
            table += table[:3]
            model += model[:3]
        assert table == model and len(table) == len(model)
        start, stop, step = rng.randrange(-60, 60), rng.randrange(-60, 60), rng.choice([-3, -1, 1, 2])
        assert table[start:stop:step] == model[start:stop:step]


def test_it_can_be_extended_by_itself() -> None:
    pool = make_pool()
    table = pool.new_block_table()
    table += pool.get_new_blocks(3)
    table += table
    assert table.block_ids() == [1, 2, 3, 1, 2, 3]


def test_what_is_no_block_of_the_pool_is_refused_and_nothing_changes() -> None:
    pool, other = make_pool(), make_pool()
    mine, foreign = pool.get_new_blocks(2), other.get_new_blocks(2)
    table, theirs = pool.new_block_table(), other.new_block_table()
    table += mine
    theirs += foreign
    for block, error in ((foreign[0], BlockStateError), (3, TypeError), (None, TypeError)):
        with pytest.raises(error):
            table.append(block)
        with pytest.raises(error):
            table[0] = block
        with pytest.raises(error):
            table.extend([mine[0], block])
    with pytest.raises(BlockStateError):
        table += theirs
    with pytest.raises(ValueError, match="2 blocks for a slice of 1"):
        table[0:1] = mine
    with pytest.raises(IndexError, match="index 2 of 2 blocks"):
        table[2] = mine[0]
    assert table == mine and theirs == foreign
    assert table != theirs, "equal ids of two pools are different blocks"


def test_it_can_not_be_made_by_hand_copied_or_pickled() -> None:
    table = make_pool().new_block_table()
    with pytest.raises(BlockStateError, match="new_block_table"):
        type(table)().append(make_pool().null_block)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="pickled or copied"):
            copying(table)


def test_it_outlives_its_pool() -> None:
    pool = make_pool()
    table = pool.new_block_table()
    table += pool.get_new_blocks(2)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and table.block_ids() == [1, 2] and table[1].block_id == 2


def test_the_pool_takes_it_as_it_takes_lists() -> None:
    request = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(3)])
    pool = make_pool()
    table = pool.new_block_table()
    table += pool.get_new_blocks(3)
    pool.cache_full_blocks(request, table, 0, 3, 4, 0)
    assert [pool.get_cached_block(digest, [0]) for digest in request.block_hashes] == [[block] for block in table]
    pool.touch(table)
    assert [block.ref_cnt for block in table] == [2, 2, 2]
    pool.free_blocks(table)
    pool.free_blocks(reversed(table))
    pool.check()
    assert pool.get_num_free_blocks() == 49

    with pytest.raises(ValueError, match="0 blocks, 1 are to be full"):
        pool.cache_full_blocks(request, pool.new_block_table(), 0, 1, 4, 0)
    other = make_pool()
    foreign = other.new_block_table()
    foreign += other.get_new_blocks(1)
    with pytest.raises(BlockStateError, match="not a block of this pool"):
        pool.cache_full_blocks(request, foreign, 0, 1, 4, 0)


def test_ids_of_kv_cache_blocks_need_no_view() -> None:
    pool = make_pool()
    table = pool.new_block_table()
    table += pool.get_new_blocks(2)
    both = KVCacheBlocks((table, pool.blocks[5:7]))
    assert both.get_block_ids() == ([1, 2], [5, 6])
    assert (both + both).get_block_ids() == ([1, 2, 1, 2], [5, 6, 5, 6])
