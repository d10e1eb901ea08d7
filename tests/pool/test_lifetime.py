"""How long things live: pools that are dropped, views that outlive them, forks, and copies that must not be."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import weakref
from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of
from token_requests import TokenRequest, lookup_key

from kvpool.errors import BlockStateError

REQUEST = TokenRequest(range(32))


def use(pool: Any) -> None:
    """A bit of everything, so that a pool owns all that it can own."""
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(REQUEST, blocks, 0, 8, 4, 0)
    pool.cache_partial_block(REQUEST, blocks[7], 8, 0, 32)
    pool.unpin_blocks(blocks[:1], lambda block: None)
    pool.allocate_ids(4)
    pool.free_blocks(blocks[1:4])
    assert len(pool.free_block_queue.get_all_free_blocks()) == pool.get_num_free_blocks()
    assert list(pool.blocks)[5] is pool.blocks[5]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


# Dropped pools


def test_a_dropped_native_pool_is_gone_at_once(backend: Any, no_garbage: Any) -> None:
    """No cycle leads through a pool: reference counting alone frees it, its views and its blocks."""
    if backend.name != "native":
        pytest.skip("blocks of the reference hold their pool: the garbage collector frees those")
    pool = backend.BlockPool(20, True, 4, True)
    use(pool)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None
    assert gc.collect() == 0


def test_a_dropped_pool_is_gone(backend: Any) -> None:
    pool = backend.BlockPool(20, True, 4, True)
    use(pool)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_a_thousand_pools_leave_nothing(backend: Any) -> None:
    def make_and_drop() -> None:
        pool = backend.BlockPool(1000, True, 4)
        use(pool)

    for _ in range(20):
        make_and_drop()
    gc.collect()
    num_objects, before = len(gc.get_objects()), sys.getallocatedblocks()
    for _ in range(1000 if backend.name == "native" else 100):
        make_and_drop()
    gc.collect()
    assert len(gc.get_objects()) - num_objects < 20
    assert sys.getallocatedblocks() - before < 500


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_a_thousand_native_pools_leave_no_memory(backend: Any) -> None:
    if backend.name != "native":
        pytest.skip("plain Python objects: see the test of allocated blocks")

    def make_and_drop(n: int) -> None:
        for _ in range(n):
            pool = backend.BlockPool(5000, True, 1)
            ids = pool.allocate_ids(4999)
            pool.cache_ids([i.to_bytes(4, "big") for i in range(4999)], ids)
            prefix_map = pool.cached_block_hash_to_block
            for i in range(1, 500):  # secondary hashes make the pool's memory grow
                prefix_map.insert(lookup_key(b"secondary%d" % i), pool.blocks[i])

    make_and_drop(50)
    gc.collect()
    before = resident_bytes()
    make_and_drop(1000)
    gc.collect()
    assert resident_bytes() - before < 40e6  # one leaked pool is about 480 kB


def run_alone(backend: Any, code: str) -> None:
    """Run code in an interpreter of its own, so that a crash does not take the other tests along."""
    module = "kvpool" if backend.name == "native" else "kvpool.reference"
    code = f"import gc, sys\nfrom {module} import *\n{code}\nprint('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_pools_in_a_cycle_leave_nothing(backend: Any) -> None:
    """The collector takes cycles apart in any order; what a pool owns must be freed all the same."""
    run_alone(
        backend,
        """
class Collector:
    pass

def make_and_drop():
    pool = BlockPool(100, True, 4)
    for i in range(1, 100):
        pool.cached_block_hash_to_block.insert(b"%04d" % i, pool.blocks[i])
    pool.me = pool
    pool.metrics_collector = Collector()
    pool.metrics_collector.pool = pool
    pool._reuse_watchers[3] = lambda block: pool

for _ in range(5):
    make_and_drop()
gc.collect()
before = sys.getallocatedblocks()
for _ in range(100):
    make_and_drop()
gc.collect()
leaked = sys.getallocatedblocks() - before
assert leaked < 300, leaked
""",
    )


@pytest.mark.parametrize(
    "thing",
    [
        "pool.cached_block_hash_to_block",
        "pool.free_block_queue",
        "pool.blocks[3]",
        "pool.blocks",
        "pool.stats",
        "pool.cached_block_hashes_by_block",
        "filled_map",
        "filled_queue",
    ],
)
def test_a_view_in_a_cycle_does_not_free_what_it_borrows(backend: Any, thing: str) -> None:
    run_alone(
        backend,
        f"""
for is_pool_dropped_first in (True, False):
    pool = BlockPool(50, True, 4)
    for i in range(1, 50):
        pool.cached_block_hash_to_block.insert(b"%04d" % i, pool.blocks[i])
    filled_map, filled_queue = BlockHashToBlockMap(), FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(50)])
    for i in range(50):
        filled_map.insert(b"%04d" % i, KVCacheBlock(i))
    cycle = [{thing}]
    cycle.append(cycle)
    if is_pool_dropped_first:
        del pool, filled_map, filled_queue, cycle
    else:
        del cycle
    gc.collect()
pool.check()
assert pool.cached_block_hash_to_block.get_one_block(b"0049").block_id == 49 == filled_map.pop(b"0049", 49).block_id
assert len(filled_queue.get_all_free_blocks()) == 50
""",
    )


def test_queues_and_maps_leave_nothing(backend: Any) -> None:
    def make_and_drop() -> None:
        blocks = [backend.KVCacheBlock(i) for i in range(100)]
        queue = backend.FreeKVCacheBlockQueue(blocks)
        assert queue.fake_free_list_head.next_free_block is blocks[0]
        queue.remove(blocks[50])
        prefix_map = backend.BlockHashToBlockMap()
        for block in blocks:
            prefix_map.insert(lookup_key(b"a"), block)
            prefix_map.insert(lookup_key(bytes([block.block_id])), block)
        prefix_map.pop(lookup_key(b"a"), 5)

    for _ in range(10):
        make_and_drop()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(300):
        make_and_drop()
    gc.collect()
    assert sys.getallocatedblocks() - before < 300


def test_a_block_that_moves_between_queues_is_held_once(backend: Any) -> None:
    block = backend.KVCacheBlock(1)
    one, other = backend.FreeKVCacheBlockQueue([block]), backend.FreeKVCacheBlockQueue([])
    other.append(one.popleft())
    one.append(other.popleft())
    references = sys.getrefcount(block)
    for _ in range(1000):
        other.append(one.popleft())
        one.append(other.popleft())
    assert sys.getrefcount(block) <= references + 2


def test_a_native_pool_adds_few_objects_to_the_garbage_collector(backend: Any, no_garbage: Any) -> None:
    if backend.name != "native":
        pytest.skip("one object per block is what the native pool saves")
    for size in (10, 100_000):
        gc.collect()
        before = len(gc.get_objects())
        pool = backend.BlockPool(size, True, 4)
        blocks = pool.get_new_blocks(size - 1)
        del blocks
        added = len(gc.get_objects()) - before
        assert added < 10, f"{added} objects for {size} blocks"
        del pool


# Views that outlive their pool


def test_views_outlive_their_pool(backend: Any) -> None:
    pool = backend.BlockPool(20, True, 4)
    use(pool)
    block, blocks, queue = pool.blocks[4], pool.blocks, pool.free_block_queue
    prefix_map, null_block, stats = pool.cached_block_hash_to_block, pool.null_block, pool.stats
    secondary = pool.cached_block_hashes_by_block
    expected_free, expected_repr = free_ids(pool), repr(block)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    if backend.name == "native":
        assert gone() is None and block.pool is None
    else:
        assert block.pool is gone()
    assert repr(block) == expected_repr and repr(block).startswith("KVCacheBlock(block_id=4, ref_cnt=0, ")
    assert block.block_hash == lookup_key(REQUEST.block_hashes[3])
    assert block.block_hash_num_tokens == 16
    assert null_block.is_null and len(blocks) == 20
    assert block_ids(queue.get_all_free_blocks()) == expected_free
    assert block_ids([block.next_free_block, block.prev_free_block]) == [-1, 3]
    assert prefix_map.get_one_block(lookup_key(REQUEST.block_hashes[4])).block_id == 5
    assert secondary[8] == {lookup_key(REQUEST.block_hashes[1])}
    assert stats.evictions == 0
    assert blocks[5].ref_cnt == 1


def test_a_block_of_a_dead_pool_is_nobodys(backend: Any, make_pool: Any) -> None:
    if backend.name != "native":
        pytest.skip("a block of the reference keeps its pool alive")
    dead = backend.BlockPool(5, True, 4)
    block = dead.get_new_blocks(1)[0]
    del dead
    pool = make_pool(5)
    mine = pool.get_new_blocks(1)[0]
    before = state_of(pool)
    for refused in (
        lambda: pool.free_blocks([mine, block]),
        lambda: pool.touch([mine, block]),
        lambda: pool.free_block_queue.append(block),
        lambda: backend.FreeKVCacheBlockQueue([block]),
    ):
        with pytest.raises(BlockStateError):
            refused()
    assert state_of(pool) == before


def test_blocks_outlive_their_queue(backend: Any) -> None:
    blocks = [backend.KVCacheBlock(i) for i in range(3)]
    queue = backend.FreeKVCacheBlockQueue(blocks)
    end = queue.fake_free_list_tail
    queue.remove(blocks[1])
    del queue
    gc.collect()
    assert [block.block_id for block in blocks] == [0, 1, 2] and end.block_id == -1
    other = backend.FreeKVCacheBlockQueue([blocks[1]])
    assert other.get_all_free_blocks() == [blocks[1]]


# Objects that nobody initialised


@pytest.mark.parametrize("name", ["BlockPool", "KVCacheBlock", "FreeKVCacheBlockQueue", "BlockHashToBlockMap"])
def test_an_object_that_was_never_initialised_raises_and_does_not_crash(backend: Any, name: str) -> None:
    run_alone(
        backend,
        f"""
good = BlockPool(5, True, 2)
block = good.get_new_blocks(1)[0]
arguments = [(), (0,), (b"abcd",), ([],), ([block],), (block,), (b"abcd", 1), (b"abcd", [0]), (b"abcd", block),
             ([b"a"], memoryview(b"1234").cast("i")), (memoryview(b"1234").cast("i"),)]
num_refused = 0
for attribute in dir({name}):
    if attribute.startswith("_"):
        continue
    for values in arguments:
        thing = {name}.__new__({name})
        try:
            member = getattr(thing, attribute)
            if callable(member):
                member(*values)
        except Exception:
            num_refused += 1
for call in (repr, len, list, bool, hash):
    try:
        call({name}.__new__({name}))
    except Exception:
        num_refused += 1
good.check()
assert num_refused > 5, num_refused
""",
    )


def test_views_cannot_be_made_by_hand(backend: Any) -> None:
    run_alone(
        backend,
        """
pool = BlockPool(5, True, 2)
for view in (pool.blocks, pool.cached_block_hashes_by_block, pool.stats):
    try:
        made = type(view)()
    except TypeError:
        continue
    for use in (len, list, repr, lambda v: v[0], lambda v: v.get(0), lambda v: 0 in v, lambda v: v.evictions):
        try:
            use(made)
        except Exception:
            pass
pool.check()
""",
    )
