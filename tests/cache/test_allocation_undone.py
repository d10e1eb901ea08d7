"""An allocation that is refused, or fails in the middle, leaves a cache manager as it was: tables, counts, hits inside
blocks, copies to come, checkpoints and scratch blocks of Mamba states. In random histories every allocation is first
refused for want of blocks, then fails in some group, and then goes on as if nothing had been."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from manager_histories import History, Stack
from manager_layouts import Layout
from pool_state import free_ids

from kvpool.errors import NoFreeBlocksError

HUGE = 2**60
SEEDS = [[*range(40), 235], pytest.param(range(40, 400), marks=pytest.mark.slow)]
KINDS = ("mamba", "hybrid_mamba", "hybrid_three", "hybrid", "window", "full", "two_full")
METHODS = ("allocate_new_blocks", "cache_blocks")


class FailsInTheMiddle(Exception):
    """Of a group's manager, after it has done its part."""


def state_of(manager: Any) -> dict[str, Any]:
    """All that an allocation changes in the managers of the groups, and references."""
    state: dict[str, Any] = {"references": list(manager.block_pool.get_ref_counts())}
    for group, one in enumerate(manager.coordinator.single_type_managers):
        state[f"tables {group}"] = {
            name: [block.block_id for block in table] for name, table in one.req_to_blocks.items()
        }
        state[f"cached {group}"] = dict(one.num_cached_block)
        state[f"partial {group}"] = {name: (i, block.block_id) for name, (i, block) in one._partial_hit_reqs.items()}
        state[f"copies {group}"] = [(a.block_id, b.block_id) for a, b in one.pending_cow_copies]
        state[f"new {group}"] = list(one.new_block_ids)
        for name in ("_checkpoints", "_allocated_block_reqs", "_num_retired_blocks"):
            if hasattr(one, name):
                state[f"{name} {group}"] = type(getattr(one, name))(getattr(one, name))
    return state


def hashes_of(manager: Any) -> list[Any]:
    return [block.block_hash for block in manager.block_pool.blocks]


class TriedBefore(Stack):
    """A manager whose every allocation is tried before in vain, in the same way for the same seed."""

    def __init__(self, name: str, layout: Layout, seed: int, seen: Counter[str]) -> None:
        super().__init__(name, layout)
        self.rng, self.seen = random.Random(seed), seen
        self.allocate, self.manager.allocate_slots = self.manager.allocate_slots, self.try_and_allocate
        self.manager.allocate_decode = lambda requests: [self.try_and_allocate(request, 1) for request in requests]

    def try_and_allocate(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        manager = self.manager
        asked = state_of(manager)
        manager.get_num_required_blocks(request.num_tokens, 3)
        assert state_of(manager) == asked
        computed = request.num_computed_tokens + options.get("num_new_computed_tokens", 0)
        # Is not undone: no token attends to these blocks any more.
        manager.remove_skipped_blocks(
            request.request_id, computed - request.num_in_flight_tokens, request.num_prompt_tokens
        )
        before = state_of(manager), hashes_of(manager), free_ids(manager.block_pool)
        refused = self.allocate(request, num_new_tokens, **{**options, "reserved_blocks": HUGE})
        if refused is None:
            assert (state_of(manager), hashes_of(manager), free_ids(manager.block_pool)) == before
            self.seen["refused"] += 1
        else:
            return refused  # it needed nothing
        result = self.fail(request, num_new_tokens, options)
        if result is not None:
            return result
        self.compare(request, before)
        return self.allocate(request, num_new_tokens, **options)

    def fail(self, request: Any, num_new_tokens: int, options: dict[str, Any]) -> Any:
        """Has the allocation fail in some group; what it returns where that was not asked for anything."""
        groups = self.manager.coordinator.single_type_managers
        group, method = self.rng.choice(groups), self.rng.choice(METHODS)
        error: Exception = self.rng.choice([FailsInTheMiddle(), NoFreeBlocksError("too few")])
        is_late = self.rng.random() < 0.7
        original = getattr(group, method)

        def fail(*arguments: Any, **more: Any) -> None:
            if is_late:
                original(*arguments, **more)
            raise error

        setattr(group, method, fail)
        try:
            return self.allocate(request, num_new_tokens, **options)
        except (FailsInTheMiddle, NoFreeBlocksError) as caught:
            assert caught is error
            self.seen["failed"] += 1
            return None
        finally:
            delattr(group, method)

    def compare(self, request: Any, before: Any) -> None:
        state, hashes, free = state_of(self.manager), hashes_of(self.manager), free_ids(self.manager.block_pool)
        wrong = [name for name in before[0] if state[name] != before[0][name]]
        assert not wrong, {name: (before[0][name], state[name]) for name in wrong}
        lost = [i for i, hash_before in enumerate(before[1]) if hashes[i] != hash_before]
        assert all(hashes[i] is None for i in lost), "published"
        ends = {id for one in self.manager.coordinator.single_type_managers for id in self.prompt_ends(one, request)}
        assert {*lost} <= {*free, *ends}, "not to be hit any more"
        assert sorted(free) == sorted(before[2])
        self.manager.block_pool.check()

    def prompt_ends(self, manager: Any, request: Any) -> list[int]:
        """Blocks whose hash may have been that of a part."""
        first = max(manager.num_cached_block.get(request.request_id, 0) - 1, 0)
        return [block.block_id for block in manager.req_to_blocks.get(request.request_id, ())[first:]]


def make_stacks(seed: int, seen: Counter[str], layout: Layout) -> list[TriedBefore]:
    return [TriedBefore(name, layout, seed, seen) for name in BACKEND_NAMES]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_tried_in_vain_has_changed_nothing(kind: str, seeds: Sequence[int]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        make = partial(make_stacks, seed, seen)
        History(seed, make, kinds=(kind,)).run()
    assert seen["refused"] > 100 and seen["failed"] > 100, seen
