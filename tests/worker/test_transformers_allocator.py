"""The allocator of the transformers integration by itself: what it hands out, finds, shares and gives back, beside the
stock one where they must agree."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import NoFreeBlocksError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.19."):
    pytest.skip("made for transformers 5.19", allow_module_level=True)

stock = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
integration = pytest.importorskip("kvpool.integrations.transformers")

pytestmark = pytest.mark.dataplane

PAGE = 8  # tokens a block
HEAD = SimpleNamespace(head_dim=4, hidden_size=4, num_attention_heads=1)


def make_allocator(num_blocks: int, allocator_class: type[Any] = integration.KvpoolCacheAllocator) -> Any:
    """As ``PagedAttentionCache`` makes one that has the cache for itself."""
    allocator = allocator_class(0, HEAD, 1, torch.float32, PAGE, [0], True)
    pool = stock.CachePool(num_blocks, 1)
    num_bytes = num_blocks * allocator.bytes_per_block
    memory = torch.zeros(num_bytes + 2 * allocator.bytes_per_block, dtype=torch.uint8)
    allocator.register_cache_tensor(allocator.bytes_per_block, num_bytes, memory, pool)
    return allocator


def run_request(allocator: Any, name: str, tokens: list[int]) -> list[int]:
    """Prefill of all tokens; the block table."""
    found = allocator.match_prefix_blocks(tokens)
    if found:
        allocator.acquire_prefix_blocks(name, len(found) * PAGE, found)
    past = len(found) * PAGE
    for _ in range(allocator.needs_new_sectors(name, past, len(tokens) - past)):
        allocator.pool.allocate_sector(0)
    allocator.allocate_cache_to_request(name, past, len(tokens) - past)
    allocator.mark_complete_blocks(name, tokens, len(tokens) // PAGE - len(found))
    return list(allocator.block_table[name])


def test_trash_sectors_are_never_handed_out() -> None:
    allocator = make_allocator(7)
    allocator.allocate_cache_to_request("all", 0, 7 * PAGE)
    assert sorted(allocator.block_table["all"]) == [2, 3, 4, 5, 6, 7, 8]
    assert allocator.pool.count_free_blocks(0) == allocator.pool.num_free_sectors == 0
    assert allocator.needs_new_sectors("more", 0, 2 * PAGE + 1) == 3
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_cache_to_request("more", 0, 1)
    assert "more" not in allocator.block_table
    allocator.block_pool.check()


def test_the_least_recently_used_blocks_go_first_and_one_by_one() -> None:
    allocator = make_allocator(6)
    old, new = list(range(2 * PAGE)), list(range(100, 100 + 2 * PAGE))
    for name, tokens in (("old", old), ("new", new)):
        run_request(allocator, name, tokens)
        allocator.free_blocks(name)
    assert allocator.pool.count_free_blocks(0) == 6 and allocator.needs_new_sectors("next", 0, 6 * PAGE) == 0
    run_request(allocator, "next", list(range(200, 200 + 3 * PAGE)))
    hits = [len(allocator.match_prefix_blocks([*tokens, 0])) for tokens in (old, new)]
    assert hits == [1, 2] and allocator.block_pool.stats.evictions == 1
    assert allocator.ledger.evict_cached_blocks() == []
    allocator.block_pool.check()


def test_a_request_that_was_put_back_finds_its_own_blocks() -> None:
    allocator = make_allocator(6)
    table = run_request(allocator, "one", list(range(3 * PAGE)))
    allocator.free_blocks("one", no_cache=True)
    assert allocator.pool.count_free_blocks(0) == 6
    assert allocator.match_prefix_blocks(list(range(3 * PAGE + 1))) == table


def test_a_hit_leaves_a_token_to_compute() -> None:
    allocator = make_allocator(6)
    table = run_request(allocator, "one", list(range(2 * PAGE)))
    assert allocator.match_prefix_blocks(list(range(2 * PAGE))) == table[:1]
    assert allocator.match_prefix_blocks(list(range(2 * PAGE + 1))) == table


def test_equal_requests_of_one_batch_end_up_on_the_same_blocks() -> None:
    allocator = make_allocator(9)
    tokens = list(range(3 * PAGE + 3))
    for name in "ab":
        allocator.allocate_cache_to_request(name, 0, len(tokens))
    for name in "ab":
        allocator.mark_complete_blocks(name, tokens, 3)
    one, other = allocator.block_table.values()
    assert one[:3] == other[:3] and one[3] != other[3]
    assert allocator.pool.count_free_blocks(0) == 4
    allocator.free_all_requests()
    assert allocator.pool.count_free_blocks(0) == 9
    allocator.block_pool.check()


def test_a_reset_forgets_everything_and_stays_on_kvpool() -> None:
    allocator = make_allocator(6)
    tokens = list(range(3 * PAGE + 1))
    run_request(allocator, "one", tokens)
    allocator.free_all_requests()
    allocator.ledger.reset()
    allocator.pool.reset()
    assert allocator.match_prefix_blocks(tokens) == [] and allocator.pool.num_free_sectors == 0
    assert allocator.pool.count_free_blocks(0) == 6
    run_request(allocator, "one", tokens)
    assert allocator.block_pool.get_num_free_blocks() == 2
    allocator.block_pool.check()


@pytest.mark.parametrize("seed", range(12))
def test_hits_as_on_stock_while_nothing_is_evicted(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = make_allocator(2000), make_allocator(2000, stock.FullAttentionCacheAllocator)
    live: dict[str, list[int]] = {}
    for i in range(60):
        if live and rng.random() < 0.4:
            name = rng.choice(list(live))
            live.pop(name)
            for allocator in (ours, theirs):
                allocator.free_blocks(name)
        elif live and rng.random() < 0.3:
            name = rng.choice(list(live))
            past = len(live[name]) - 1
            children = [f"{name}_{i}_{allocator.__class__.__name__}" for allocator in (ours, theirs)]
            counts = [fork(each, name, child, past) for each, child in zip((ours, theirs), children, strict=True)]
            assert counts[0] == counts[1]
            for allocator, child in zip((ours, theirs), children, strict=True):
                allocator.free_blocks(child)
        else:
            # Few different blocks, so that prompts have prefixes in common.
            live[str(i)] = [token for _ in range(rng.randrange(1, 7)) for token in [rng.randrange(2)] * PAGE] + [5]
            tables = [run_request(allocator, str(i), live[str(i)]) for allocator in (ours, theirs)]
            assert len(tables[0]) == len(tables[1])
        ours.block_pool.check()
        assert in_use(ours) == in_use(theirs)
    assert ours.num_hit_tokens > 0


def fork(allocator: Any, source: str, child: str, past: int) -> tuple[int, int]:
    for _ in range(max(0, allocator.count_non_shareable_blocks(source, past) - allocator.pool.count_free_blocks(0))):
        allocator.pool.allocate_sector(0)
    copied, new = allocator.fork_blocks(source, child, past)
    return len(copied), len(new)


def in_use(allocator: Any) -> int:
    """Blocks that a request has, shared ones once."""
    return len({block_id for table in allocator.block_table.values() for block_id in table})


def test_an_allocator_goes_without_the_garbage_collector(no_garbage: Any) -> None:
    allocator = make_allocator(6)
    run_request(allocator, "one", list(range(3 * PAGE)))
    gone = weakref.ref(allocator), weakref.ref(allocator.pool)
    del allocator
    assert [ref() for ref in gone] == [None, None]
