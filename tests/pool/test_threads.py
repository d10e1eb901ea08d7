"""Threads: calls of the native pool are atomic. The reference is for one thread at a time and says so."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pool_state import free_ids
from token_requests import TokenRequest

from kvpool import reference
from kvpool.errors import NoFreeBlocksError

NUM_THREADS = 4
NUM_USABLE = 64


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_threads(target: Any) -> None:
    """Run target(seed) in threads that start together; the first exception is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(NUM_THREADS)

    def run(seed: int) -> None:
        try:
            start.wait()
            target(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def only_native(backend: Any) -> None:
    if backend.name != "native":
        pytest.skip("the reference is for one thread at a time")


def test_the_reference_says_that_it_is_for_one_thread() -> None:
    assert "one thread at a time" in sys.modules[reference.BlockPool.__module__].__doc__


@pytest.mark.parametrize("by_id", [False, True], ids=["blocks", "ids"])
def test_allocations_and_frees_of_four_threads(
    make_pool: Any, backend: Any, tiny_switch_interval: None, by_id: bool
) -> None:
    only_native(backend)
    pool = make_pool(NUM_USABLE + 1)
    owners: dict[int, int] = {}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20_000 // NUM_THREADS):
            n = rng.randint(1, 3)
            if by_id:
                taken = pool.allocate_ids(n)
                ids = taken.tolist()
            else:
                taken = pool.get_new_blocks(n)
                ids = [block.block_id for block in taken]
            for i in ids:
                assert owners.setdefault(i, seed) == seed, f"block {i} was given to two threads"
            for i in ids:
                del owners[i]
            if by_id:
                pool.free_ids(taken)
            else:
                pool.free_blocks(taken)

    run_threads(work)
    pool.check()
    assert pool.get_num_free_blocks() == NUM_USABLE
    assert sorted(free_ids(pool)) == list(range(1, NUM_USABLE + 1))
    assert [block.ref_cnt for block in pool.blocks] == [0] * (NUM_USABLE + 1)


def test_views_are_made_once_whoever_asks_first(make_pool: Any, backend: Any, tiny_switch_interval: None) -> None:
    only_native(backend)
    pool = make_pool(3001)
    seen: list[list[Any]] = [[] for _ in range(NUM_THREADS)]

    def work(seed: int) -> None:
        seen[seed] = [pool.blocks[i] for i in range(3001)]

    run_threads(work)
    for blocks in seen[1:]:
        assert all(a is b for a, b in zip(blocks, seen[0]))


def test_caching_hits_and_evictions_of_four_threads(make_pool: Any, backend: Any, tiny_switch_interval: None) -> None:
    only_native(backend)
    pool = make_pool(NUM_USABLE + 1)
    requests = [TokenRequest([k, *range(11)]) for k in range(40)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000):
            request = rng.choice(requests)
            try:
                table = pool.get_new_blocks(3)
            except NoFreeBlocksError:
                continue
            pool.cache_full_blocks(request, table, 0, 3, 4, 0)
            found = pool.find_prefix_ids(request.block_hashes)
            assert len(found) == 3 and found.dtype == np.int32
            for block, digest in zip(table, request.block_hashes):
                assert block.block_hash is not None and block.block_hash[:-4] == digest
            pool.free_blocks(table[::-1])

    run_threads(work)
    pool.check()
    assert pool.get_num_free_blocks() == NUM_USABLE
    assert pool.stats.evictions > 0
