"""Random histories of a scheduler on vLLM's own KVCacheManager, and on kvpool's over the native pool and over the
reference: the same tables, hits, answers, free lists and events after each call.

vLLM keeps the secondary hashes of a block in a set, whose order is none; here it is given an ordered one.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from manager_histories import History, Stack
from manager_layouts import MAKERS, Layout, ManagerRequest, random_layout
from vllm_stack import VllmStack

pytestmark = pytest.mark.vllm

NUM_SEEDS = int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40"))


@pytest.fixture(scope="module", autouse=True)
def statuses() -> Any:
    pytest.importorskip("vllm.v1.core.block_pool")
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.request import RequestStatus

    register_all_kvcache_specs(None)
    for name in ("kvpool", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield RequestStatus
    for name in ("kvpool", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def make_stacks(layout: Layout) -> list[Any]:
    return [VllmStack(layout), *(Stack(name, layout) for name in BACKEND_NAMES)]


@pytest.mark.parametrize("kind", MAKERS)
def test_histories_are_the_same(statuses: Any, kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        history = History(seed, make_stacks, statuses, kinds=(kind,))
        try:
            seen += history.run()
        except Exception as error:
            raise AssertionError(f"history of kind {kind}, seed {seed}, {history.layout}") from error
    assert seen["admissions"] > NUM_SEEDS, seen


@pytest.mark.parametrize("kind", ["window", "hybrid", "hybrid_local", "windows_only", "two_full", "hybrid_mamba"])
def test_hits_in_a_cache_with_holes_are_the_same(statuses: Any, kind: str) -> None:
    """Histories leave few holes in what is cached; here they are made at random, and more and more of them."""
    lengths: Counter[int] = Counter()
    for seed in range(NUM_SEEDS // 2):
        rng = random.Random(seed)
        layout = random_layout(rng, (kind,))
        layout.num_blocks, layout.max_model_len, layout.watermark = 600, 128, 0.0
        stacks = make_stacks(layout)
        hash_size = stacks[0].pool.hash_block_size
        tokens = [rng.randrange(3) for _ in range(64)]
        for end in range(8, 65, 8):  # computed by several requests, so that Mamba has several states
            request = ManagerRequest(f"r{end}", tokens[:end], hash_size, statuses.WAITING)
            for stack in stacks:
                stack.manager.new_step_starts()
                blocks, num_hit, _ = stack.find_hit(request)
                assert stack.manager.allocate_slots(request, end - num_hit, num_hit, blocks) is not None
                copies = stack.manager.take_kv_cache_block_copies()[1]
                stack.pool.free_blocks(copies)
        for _ in range(12):
            cached = [block.block_id for block in stacks[0].pool.blocks if block.block_hash is not None]
            ids = rng.sample(cached, min(3, len(cached)))
            for stack in stacks:
                stack.manager.evict_blocks(set(ids))
            for length in rng.sample(range(2, 65), 6):
                request = ManagerRequest("x", tokens[:length], hash_size, statuses.WAITING)
                found = [stack.find_hit(request) for stack in stacks]
                answers = [(blocks.get_block_ids(), *more) for blocks, *more in found]
                assert all(answer == answers[0] for answer in answers), (kind, seed, layout, answers)
                lengths[answers[0][1]] += 1
    assert len(lengths) >= 3, lengths
