"""Coordinators: which one, block sizes, and the longest hit that all groups agree on, against a search by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from manager_layouts import Layout, ManagerRequest, make_config
from pool_state import block_ids

from kvpool.cache.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
    replay_boundaries,
    resolve_kv_cache_block_sizes,
)
from kvpool.errors import InvalidArgumentError

FULL, WINDOW, MAMBA = ("full", 4, 0, False), ("window", 4, 5, False), ("mamba_align", 4, 0, False)


@pytest.fixture
def make(backend: SimpleNamespace) -> Any:
    """Makes coordinators, whose pools are checked at the end."""
    made: list[KVCacheCoordinator] = []

    def make_one(groups: Any, num_blocks: int = 40, **options: Any) -> KVCacheCoordinator:
        layout = Layout(list(groups), num_blocks, retention_interval=options.pop("retention_interval", None))
        config = make_config(layout)
        caching = options.setdefault("enable_caching", True)
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(
            config, caching, options.pop("scheduler_block_size", None), options.pop("hash_block_size", None)
        )
        made.append(
            get_kv_cache_coordinator(
                config,
                1000,
                1000,
                options.pop("use_eagle", False),
                enable_kv_cache_events=False,
                scheduler_block_size=scheduler_size,
                hash_block_size=hash_size,
                block_pool_class=backend.BlockPool,
                **options,
            )
        )
        return made[-1]

    yield make_one
    for coordinator in made:
        coordinator.block_pool.check()


def start(coordinator: KVCacheCoordinator, name: str, num_tokens: int, first: int = 0) -> ManagerRequest:
    """A request that computes all of its tokens at once."""
    request = ManagerRequest(name, range(first, first + num_tokens), coordinator.hash_block_size)
    coordinator.allocate_new_blocks(name, num_tokens, num_tokens)
    coordinator.cache_blocks(request, num_tokens)
    return request


def hit(coordinator: KVCacheCoordinator, num_tokens: int) -> tuple[list[Any], int, int]:
    """The hit of a request with these tokens, the last one included."""
    request = ManagerRequest("r", range(num_tokens), coordinator.hash_block_size)
    blocks, length, uncached = coordinator.find_longest_cache_hit(request.block_hashes, num_tokens)
    return [block_ids(group) for group in blocks], length, uncached


def evict(coordinator: KVCacheCoordinator, *ids: int) -> None:
    coordinator.block_pool.evict_blocks(ids)


# Which one


@pytest.mark.parametrize(
    ("groups", "enable_caching", "kind"),
    [
        ((), False, KVCacheCoordinatorNoPrefixCache),
        ((FULL,), False, KVCacheCoordinatorNoPrefixCache),
        ((FULL, WINDOW), False, KVCacheCoordinatorNoPrefixCache),
        ((FULL,), True, UnitaryKVCacheCoordinator),
        ((MAMBA,), True, UnitaryKVCacheCoordinator),
        ((FULL, FULL), True, HybridKVCacheCoordinator),
        ((FULL, WINDOW, MAMBA), True, HybridKVCacheCoordinator),
    ],
)
def test_which_coordinator(make: Any, groups: Any, enable_caching: bool, kind: type) -> None:
    coordinator = make(groups, enable_caching=enable_caching)
    assert type(coordinator) is kind
    assert len(coordinator.single_type_managers) == len(groups)
    assert all(manager.block_pool is coordinator.block_pool for manager in coordinator.single_type_managers)


@pytest.mark.parametrize(
    ("groups", "enable_caching", "given", "sizes"),
    [
        ([], False, (None, None), (1, 1)),
        ([("full", 16, 0)], True, (None, None), (16, 16)),
        ([("full", 16, 0), ("window", 24, 9)], True, (None, None), (48, 8)),
        ([("full", 16, 0), ("window", 24, 9)], False, (None, None), (48, 48)),
        ([("full", 16, 0), ("window", 32, 9)], True, (64, 4), (64, 4)),
        ([("full", 16, 0), ("mamba_align", 64, 0)], True, (None, None), (64, 16)),
        ([("full", 16, 0), ("mamba_none", 64, 0)], False, (None, None), (64, 64)),
    ],
)
def test_block_sizes(groups: Any, enable_caching: bool, given: Any, sizes: tuple[int, int]) -> None:
    config = make_config(Layout([(*group, False) for group in groups]))
    assert resolve_kv_cache_block_sizes(config, enable_caching, *given) == sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((20, None), "the scheduler's block size 20 is not a multiple of the (hash|group's) block size 8"),
        ((48, 32), "not a multiple of the hash block size 32"),
        ((48, 3), "the block size 8 of a group is not a multiple of the hash block size 3"),
        ((0, None), "at least 1 token"),
        ((None, 0), "at least 1 token"),
        ((-48, 8), "at least 1 token"),
    ],
)
def test_block_sizes_that_do_not_fit(given: Any, message: str) -> None:
    config = make_config(Layout([("full", 8, 0, False), ("window", 24, 9, False)]))
    with pytest.raises(InvalidArgumentError, match=message):
        resolve_kv_cache_block_sizes(config, True, *given)


def test_a_hash_size_of_the_configuration_counts() -> None:
    config = make_config(Layout([("full", 8, 0, False), ("window", 24, 9, False)]))
    config.hash_block_size = 4
    assert resolve_kv_cache_block_sizes(config, True) == (24, 4)
    assert resolve_kv_cache_block_sizes(config, True, None, 2) == (24, 2)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ((FULL,), {"dcp_world_size": 2}, "dcp_world_size 2"),
        ((FULL,), {"pcp_world_size": 4}, "pcp_world_size 4"),
        ((FULL,), {"hash_block_size": 2}, "hash block size 2 must be its block size 4"),
        ((FULL, ("cross", 4, 0, False)), {}, "caching must be off"),
        ((FULL,), {"retention_interval": 8}, "no group has a sliding window"),
        ((WINDOW,), {"retention_interval": 6}, "multiple of the scheduler's block size 4"),
        ((WINDOW,), {"retention_interval": -4}, "-4"),
        ((FULL,), {"use_eagle": True, "num_prefill_lookahead": 5}, "look-ahead of 5 tokens"),
    ],
)
def test_what_does_not_fit_together(make: Any, groups: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make(groups, **options)


def test_retention_zero_is_harmless_without_windows(make: Any) -> None:
    assert make((FULL,), retention_interval=0).retention_interval == 0


@pytest.mark.parametrize(
    ("num_prompt_tokens", "use_eagle", "boundaries"),
    [(12, False, (11,)), (13, False, (12,)), (12, True, (4, 8)), (13, True, (8,)), (3, True, (0,)), (4, True, (0,))],
)
def test_replay_boundaries(num_prompt_tokens: int, use_eagle: bool, boundaries: tuple[int, ...]) -> None:
    assert replay_boundaries(num_prompt_tokens, 4, use_eagle) == boundaries


# Hits


def test_nothing_is_hit_without_caching(make: Any) -> None:
    coordinator = make((FULL, WINDOW), enable_caching=False)
    start(coordinator, "a", 12)
    assert hit(coordinator, 12) == ([[], []], 0, 0)


@pytest.mark.parametrize(("use_eagle", "length"), [(False, 12), (True, 8)])
def test_one_group(make: Any, use_eagle: bool, length: int) -> None:
    coordinator = make((FULL,), use_eagle=use_eagle)
    start(coordinator, "a", 14)
    assert hit(coordinator, 14) == ([[1, 2, 3][: length // 4]], length, 0)
    assert coordinator.single_type_managers[0].use_eagle is use_eagle


def test_full_attention_and_a_window(make: Any) -> None:
    """C20 of the cases."""
    coordinator = make((FULL, WINDOW))
    start(coordinator, "a", 12)
    assert hit(coordinator, 12) == ([[1, 2, 3], [0, 0, 6]], 12, 0)
    evict(coordinator, 6)
    assert hit(coordinator, 12) == ([[1, 2], [0, 5]], 8, 4)
    evict(coordinator, 1)
    assert hit(coordinator, 12) == ([[], []], 0, 0)


def test_the_order_of_groups_does_not_matter(make: Any) -> None:
    coordinator = make((WINDOW, FULL))
    start(coordinator, "a", 12)
    evict(coordinator, 3)
    assert hit(coordinator, 12) == ([[0, 2], [4, 5]], 8, 4)


def test_hits_end_at_the_common_multiple(make: Any) -> None:
    coordinator = make((("full", 4, 0, False), ("window", 6, 7, False)))
    assert (coordinator.scheduler_block_size, coordinator.hash_block_size) == (12, 2)
    start(coordinator, "a", 36)
    assert hit(coordinator, 35)[1] == 24
    assert hit(coordinator, 36) == ([[1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 15]], 36, 0)
    evict(coordinator, 15)
    assert hit(coordinator, 36) == ([[1, 2, 3, 4, 5, 6], [0, 0, 0, 13]], 24, 12)


def test_groups_with_the_same_spec_are_looked_up_together(make: Any) -> None:
    coordinator = make((FULL, WINDOW, FULL, ("window", 4, 9, False)))
    assert [group.group_ids for group in coordinator.attention_groups] == [[0, 2], [1], [3]]
    start(coordinator, "a", 8)
    assert hit(coordinator, 8) == ([[1, 2], [0, 4], [5, 6], [7, 8]], 8, 0)
    evict(coordinator, 6)
    assert hit(coordinator, 8)[:2] == ([[1], [3], [5], [7]], 4)


def test_each_group_makes_it_shorter_for_the_others(make: Any) -> None:
    """Two windows that hardly ever agree: each one's answer sends the other one back."""
    coordinator = make((("window", 4, 5, False), ("window", 4, 6, False)), num_blocks=60)
    start(coordinator, "a", 40)
    one, two = (coordinator.get_blocks("a")[i] for i in (0, 1))
    evict(coordinator, *(one[i].block_id for i in range(0, 10, 2)), *(two[i].block_id for i in (1, 4, 7)))
    # The first window needs its last block (1, 3, ..), the second one the last two, of which 1, 4 and 7 are gone.
    assert hit(coordinator, 40)[1] == 40
    evict(coordinator, one[9].block_id)
    assert hit(coordinator, 40)[1] == 16
    evict(coordinator, two[3].block_id)
    assert hit(coordinator, 40)[1] == 0


def test_eagle_drops_one_block_and_not_one_per_round(make: Any) -> None:
    groups = (("full", 4, 0, True), ("window", 4, 5, False), ("window", 4, 9, False))
    coordinator = make(groups, num_blocks=80, use_eagle=True)
    assert coordinator.eagle_group_ids == {0}
    start(coordinator, "a", 40)
    assert hit(coordinator, 40)[1] == 36
    evict(coordinator, coordinator.get_blocks("a")[1][8].block_id)
    assert hit(coordinator, 40)[1] == 32


def test_eagle_matches_a_block_more_at_each_shorter_length(make: Any) -> None:
    """Where the hit becomes shorter, the block that EAGLE drops must be cached there too."""
    coordinator = make((("window", 4, 5, True), ("window", 4, 9, False)), num_blocks=60, use_eagle=True)
    start(coordinator, "a", 40)
    eagle, other = coordinator.get_blocks("a")
    assert hit(coordinator, 40)[1] == 36
    evict(coordinator, *(block.block_id for block in other[5:]))
    assert hit(coordinator, 40)[1] == 20
    evict(coordinator, eagle[5].block_id)
    assert hit(coordinator, 40)[1] == 16
    evict(coordinator, eagle[4].block_id)
    assert hit(coordinator, 40)[1] == 12


def test_eagle_is_for_all_groups_if_none_says_so(make: Any) -> None:
    coordinator = make((FULL, WINDOW), use_eagle=True)
    assert coordinator.eagle_group_ids == {0, 1}
    start(coordinator, "a", 16)
    assert hit(coordinator, 16) == ([[1, 2, 3], [0, 0, 7]], 12, 0)


def is_hit(kind: str, window: int, size: int, is_cached: list[bool], length: int) -> bool:
    """By the definition: every block that the token after `length` tokens reads is cached."""
    if kind == "full":
        return all(is_cached[: length // size])
    if kind == "mamba_align":
        return length == 0 or is_cached[length // size - 1]
    first = max(length - window + 1, 0) // size
    return all(is_cached[first : length // size])


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_hit_by_definition(make: Any, seed: int) -> None:
    """Caches with holes: the hit is the longest prefix that ends at a common multiple and is one for every group."""
    rng = random.Random(seed)
    kinds = ["full", "window", "window", "mamba_align"]
    groups = [
        (rng.choice(kinds), rng.choice([2, 4, 8] if seed % 2 else [4]), rng.choice([2, 3, 5, 8, 13]), False)
        for _ in range(rng.randint(2, 4))
    ]
    coordinator = make(groups, num_blocks=400, allow_partial_hash_hits=False)
    num_tokens = 64
    start(coordinator, "a", num_tokens)
    request = ManagerRequest("a", range(num_tokens), coordinator.hash_block_size)
    for _ in range(25):
        tables = coordinator.get_blocks("a")
        for group_id, (group, table) in enumerate(zip(groups, tables)):
            evict(coordinator, *(block.block_id for block in table))
            coordinator.block_pool.cache_full_blocks(
                request, table, 0, num_tokens // group[1], group[1], group_id,
                block_mask=[rng.random() < 0.85 for _ in range(num_tokens // group[1])],
            )  # fmt: skip
        longest = rng.randint(0, num_tokens)
        wanted = max(
            length
            for length in range(0, longest + 1, coordinator.scheduler_block_size)
            if all(
                is_hit(kind, window, size, [block.block_hash is not None for block in table], length)
                for (kind, size, window, _), table in zip(groups, tables)
            )
        )
        blocks, found, _ = coordinator.find_longest_cache_hit(request.block_hashes, longest)
        assert found == wanted
        for (_, size, _, _), table, group_blocks in zip(groups, tables, blocks):
            assert len(group_blocks) == found // size
            assert all(block.is_null or block is own for block, own in zip(group_blocks, table))


# Calls for all groups


def test_running_requests_take_no_computed_blocks(make: Any) -> None:
    coordinator = make((FULL, WINDOW))
    request = start(coordinator, "a", 12)
    assert coordinator.is_running("a") and not coordinator.is_running("b")
    coordinator.allocate_new_computed_blocks("a", ([], []), 0, 0)
    with pytest.raises(InvalidArgumentError, match="request 'a' runs already"):
        coordinator.allocate_new_computed_blocks("a", coordinator.get_blocks("a"), 12, 0)
    assert [block_ids(group) for group in coordinator.get_blocks("a")] == [[1, 2, 3], [4, 5, 6]]
    blocks = coordinator.pop_blocks_for_free(request.request_id)
    assert block_ids(blocks) == [1, 2, 3, 4, 5, 6]
    assert [block_ids(group) for group in coordinator.get_blocks("a")] == [[], []]
    coordinator.block_pool.free_blocks(reversed(blocks))
    assert coordinator.reset_prefix_cache()


def test_blocks_needed_are_the_sum_over_groups(make: Any) -> None:
    coordinator = make((FULL, ("full", 8, 0, False)))
    assert coordinator.get_num_blocks_to_allocate("a", 20, ((), ()), 0, 0, 0, 20) == 5 + 3
    new = coordinator.allocate_new_blocks("a", 20, 20)
    assert [len(group) for group in new] == [5, 3]
    assert coordinator.get_num_blocks_to_allocate("a", 21, ((), ()), 0, 0, 0, 21) == 1
