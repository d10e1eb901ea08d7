"""kvpool's pool under vLLM's names: what vLLM's code, its connectors and its tests do with a pool, beyond what the
lockstep histories do."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

from token_requests import TokenRequest

import kvpool
from kvpool.errors import BlockStateError
from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import levels
from kvpool.integrations.vllm import pool as level

pytestmark = pytest.mark.vllm

SIZE = 4


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    integration.unregister()
    monkeypatch.setenv(levels.VARIABLE, "pool")
    integration.register()
    yield
    integration.unregister()


@pytest.fixture
def names() -> Any:
    return import_module("vllm.v1.core.block_pool")


@pytest.fixture
def make_pool(names: Any) -> Iterator[Any]:
    pools: list[Any] = []

    def make(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
        pools.append(names.BlockPool(num_blocks, *args, enable_caching=True, hash_block_size=SIZE, **kwargs))
        return pools[-1]

    yield make
    assert pools
    for pool in pools:
        pool.check()


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def key_of(digest: bytes, group: int = 0) -> bytes:
    return kvpool.make_block_hash_with_group_id(digest, group)


def cached(pool: Any, num_blocks: int, group: int = 0) -> tuple[Any, list[Any]]:
    """A request, and its blocks, all of them cached."""
    request = TokenRequest(list(range(num_blocks * SIZE)), SIZE)
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, SIZE, group)
    return request, blocks


# ---- the classes ----


def test_it_is_vllms_pool_for_isinstance_and_has_its_cold_methods(make_pool: Any) -> None:
    pool = make_pool(4)
    assert isinstance(pool, level.VllmBlockPool) and isinstance(pool, kvpool.BlockPool)
    request = TokenRequest(list(range(8)), SIZE)
    assert "_get_partial_block_hash" not in vars(kvpool.BlockPool)
    assert pool._get_partial_block_hash(request, 8) == request.block_hashes[1]


def test_arguments_have_the_places_that_vllm_gives_them(names: Any) -> None:
    """Those behind the collector have changed places between versions."""
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    given = {"num_gpu_blocks": 9, "enable_caching": True, "hash_block_size": SIZE, "enable_kv_cache_events": True}
    given |= {"metrics_collector": KVCacheMetricsCollector(), "medium": "CPU", "num_hash_lookahead_tokens": 2}
    order = list(inspect.signature(level.VllmBlockPool).parameters)
    assert "medium" in order
    for num_places in range(3, len(order) + 1):
        named = {name: given[name] for name in order[num_places:]}
        pool = names.BlockPool(*(given[name] for name in order[:num_places]), **named)
        assert {name: getattr(pool, name) for name in order} == {name: given[name] for name in order}
    with pytest.raises(TypeError):
        names.BlockPool(9, True)
    with pytest.raises(TypeError):
        names.BlockPool(9, True, SIZE, uncached_first=False)


def test_a_pool_keeps_no_second_copy(make_pool: Any) -> None:
    pool = make_pool(100)
    cached(pool, 50)
    own = {name for name, value in vars(pool).items() if isinstance(value, (list, dict, set)) and len(value) > 0}
    assert own == set()


def test_events_are_of_vllms_classes_and_follow_its_switch(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import kv_events

    for switch, kind in (("1", int), ("0", bytes)):
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", switch)
        pool = make_pool(4, enable_kv_cache_events=True)
        _, blocks = cached(pool, 2)
        pool.evict_blocks({blocks[0].block_id})
        pool.free_blocks(blocks)
        assert pool.reset_prefix_cache()
        events = pool.take_events()
        wanted = [kv_events.BlockStored, kv_events.BlockRemoved, kv_events.AllBlocksCleared]
        assert [type(event) for event in events] == wanted
        assert all(isinstance(value, kind) for value in events[0].block_hashes + events[1].block_hashes)


def test_extra_keys_are_what_vllms_own_functions_say(make_pool: Any) -> None:
    """vLLM may know kinds that kvpool does not."""
    blocks = import_module("vllm.v1.core.kv_cache_utils")
    form = level.BlockPool.event_format
    assert form.extra_keys is blocks.generate_block_hash_extra_keys
    assert form.to_event_extra_keys is blocks.to_event_extra_keys
    assert form.has_extra_keys(object())
    pool = make_pool(4, enable_kv_cache_events=True)
    pool.event_format = replace(form, extra_keys=lambda *_: ((("new kind", "key"),), 0))
    cached(pool, 2)
    assert pool.take_events()[0].extra_keys == [("key",), ("key",)]


def test_a_pool_that_publishes_into_anothers_queue(make_pool: Any) -> None:
    shared = import_module("vllm.v1.hisparse.block_pool").SharedEventQueueBlockPool
    owner = make_pool(4, enable_kv_cache_events=True)
    pool = shared(4, True, SIZE, True, event_owner=owner, medium="CPU")
    cached(owner, 1)
    cached(pool, 1)
    assert [event.medium for event in owner.take_events()] == ["GPU", "CPU"]
    cached(pool, 1)
    assert [event.medium for event in owner.take_events()] == ["CPU"]
    pool.check()


# ---- messages ----


def test_too_few_blocks(make_pool: Any) -> None:
    with pytest.raises(ValueError, match=r"^Cannot get 4 free blocks from the pool$"):
        make_pool(4).get_new_blocks(4)


def test_an_id_that_no_pool_has_is_refused_in_vllms_words_and_evicts_nothing(make_pool: Any) -> None:
    pool = make_pool(4)
    request, blocks = cached(pool, 1)
    with pytest.raises(AssertionError, match=r"^Invalid block_id 4 >= 4\. This indicates a bug in the KV connector"):
        pool.evict_blocks([blocks[0].block_id, 4])
    with pytest.raises(AssertionError):
        pool.evict_blocks([blocks[0].block_id, -1])
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks


def test_queue_messages(names: Any) -> None:
    block = names.KVCacheBlock(0)
    queue = names.FreeKVCacheBlockQueue([block])
    assert queue.popleft() is block
    with pytest.raises(ValueError, match=r"^No free blocks available$"):
        queue.popleft()
    with pytest.raises(RuntimeError, match=r"^remove\(\) called on an invalid block"):
        queue.remove(block)


# ---- misuse ----


def test_a_double_free_changes_nothing(make_pool: Any) -> None:
    pool = make_pool(5)
    one, two = pool.get_new_blocks(2)
    with pytest.raises(BlockStateError, match=f"block {one.block_id}"):
        pool.free_blocks([two, one, one])
    assert (pool.get_num_free_blocks(), one.ref_cnt, two.ref_cnt) == (2, 1, 1)


def test_with_warn_a_double_free_is_skipped_logged_and_counted(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(level.INVALID_FREE_VARIABLE, "warn")
    pool = make_pool(5)
    one, two = pool.get_new_blocks(2)
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free_blocks([two, one, one])
    assert pool.get_num_free_blocks() == 4 and pool.stats.invalid_frees == 1
    assert f"block_id={one.block_id}" in caplog.text


def test_a_dirty_block_is_refused_before_anything_is_cached(make_pool: Any) -> None:
    pool = make_pool(8)
    _, (_, dirty) = cached(pool, 2)
    request = TokenRequest([9] * 12, SIZE)
    table = [*pool.get_new_blocks(1), dirty]
    with pytest.raises(AssertionError):
        pool.cache_full_blocks(request, table, 0, 2, SIZE, 0)
    assert table[0].block_hash is None and len(pool.cached_block_hash_to_block) == 2


# ---- what is done by hand ----


def test_blocks_that_no_pool_made_can_be_cached(make_pool: Any, names: Any) -> None:
    pool = make_pool(6)
    request = TokenRequest(list(range(16)), SIZE)
    by_hand = [names.KVCacheBlock(block_id=i) for i in range(2)]
    own = pool.get_new_blocks(1)
    table = [*by_hand, pool.null_block, *own]
    pool.cache_full_blocks(request, table, 0, 4, SIZE, 7)
    lookups = [pool.get_cached_block(digest, [7]) for digest in request.block_hashes]
    assert lookups == [[by_hand[0]], [by_hand[1]], None, own]
    assert [block.block_hash_num_tokens for block in table] == [4, 8, None, 16]
    prefix_map = pool.cached_block_hash_to_block
    first, last = key_of(request.block_hashes[0], 7), key_of(request.block_hashes[3], 7)
    assert len(prefix_map) == 3 and prefix_map.contain(first, 0)
    assert prefix_map._cache == {first: by_hand[0], key_of(request.block_hashes[1], 7): by_hand[1], last: own[0]}
    with pytest.raises(AssertionError):
        pool.cache_full_blocks(request, table, 0, 4, SIZE, 7)
    assert prefix_map.pop(first, 0) is by_hand[0] and len(prefix_map) == 2
    pool.free_blocks(own)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(request.block_hashes[1], [7]) is None


def test_blocks_that_no_pool_made_never_join_the_free_list(make_pool: Any, names: Any) -> None:
    pool = make_pool(4)
    own = pool.get_new_blocks(1)
    pool.free_blocks([names.KVCacheBlock(1000), *own, names.KVCacheBlock(1001)])
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3]
    in_use = names.KVCacheBlock(1000, ref_cnt=1)
    own = pool.get_new_blocks(1)
    with pytest.raises(BlockStateError):
        pool.free_blocks([*own, in_use])
    assert (own[0].ref_cnt, in_use.ref_cnt, pool.get_num_free_blocks()) == (1, 1, 2)


def test_the_null_block_takes_a_hash_by_hand_but_not_in_a_batch(make_pool: Any) -> None:
    pool = make_pool(4)
    key = key_of(b"10", 1000)
    pool.null_block.set_block_hash(key)
    pool.cached_block_hash_to_block.insert(key, pool.null_block)
    pool.check()
    assert pool.cached_block_hash_to_block.get_one_block(key) is pool.null_block
    assert pool._maybe_evict_cached_block(pool.null_block)
    assert pool.null_block.block_hash is None and len(pool.cached_block_hash_to_block) == 0
    pool.cache_full_blocks(TokenRequest([1] * 4, SIZE), [pool.null_block], 0, 1, SIZE, 0)
    assert pool.null_block.block_hash is None
    assert pool.get_num_free_blocks() == 3


def test_the_maps_private_dict_can_be_read_and_written(make_pool: Any) -> None:
    pool = make_pool(8)
    request, blocks = cached(pool, 2)
    twins = cached(pool, 2)[1]
    first, second = (key_of(digest) for digest in request.block_hashes)
    entries = pool.cached_block_hash_to_block._cache
    before = copy.copy(entries)
    several = {block.block_id: block for block in (blocks[0], twins[0])}
    assert entries[first] == several and isinstance(before, dict)
    assert entries == before and set(entries) == {first, second} and len(entries) == 2
    assert entries.pop(first) == several
    assert first not in entries and pool.get_cached_block(request.block_hashes[0], [0]) is None
    pool.check()
    assert entries.pop(first, None) is None
    with pytest.raises(KeyError):
        entries.pop(first)
    entries[first] = before[first]
    assert entries == before
    assert pool.cached_block_hash_to_block.pop(first, blocks[0].block_id) is blocks[0]
    assert entries == {first: {twins[0].block_id: twins[0]}, second: before[second]}
    assert entries == {first: twins[0], second: before[second]}
    entries.clear()
    assert entries == {} and len(pool.cached_block_hash_to_block) == 0
    assert blocks[1].block_hash == second  # as in vLLM: a block keeps its own


def test_a_map_that_stands_alone_has_its_private_dict_too(names: Any) -> None:
    prefix_map = names.BlockHashToBlockMap()
    one, two = names.KVCacheBlock(1), names.KVCacheBlock(2)
    prefix_map.insert(key_of(b"a"), one)
    prefix_map.insert(key_of(b"b"), two)
    prefix_map.insert(key_of(b"a"), two)
    assert prefix_map._cache == {key_of(b"a"): {1: one, 2: two}, key_of(b"b"): two}
    assert list(prefix_map._cache) == [key_of(b"a"), key_of(b"b")]
    del prefix_map._cache[key_of(b"a")]
    assert prefix_map.get_one_block(key_of(b"a")) is None and len(prefix_map) == 1


def test_a_reset_makes_a_new_map(make_pool: Any) -> None:
    pool = make_pool(4)
    _, blocks = cached(pool, 2)
    pool.free_blocks(blocks)
    before = pool.cached_block_hash_to_block
    assert pool.reset_prefix_cache()
    assert pool.cached_block_hash_to_block is not before
    assert len(pool.cached_block_hash_to_block) == 0


# ---- several pools, walks, watchers, collectors ----


def test_blocks_of_several_pools_go_back_to_their_own(make_pool: Any) -> None:
    one, two = make_pool(4), make_pool(6)
    mixed = [block for pair in zip(one.get_new_blocks(2), two.get_new_blocks(2)) for block in pair]
    assert [block.pool for block in mixed] == [one, two, one, two]
    one.free_blocks(iter(mixed))
    assert (one.get_num_free_blocks(), two.get_num_free_blocks()) == (3, 5)


def test_an_offload_connectors_walk_over_the_free_queue(make_pool: Any) -> None:
    """From a cursor that was taken out and came back, into the prefix cache of another pool."""
    gpu, cpu = make_pool(8), make_pool(8, medium="CPU")
    request, blocks = cached(gpu, 4)
    gpu.free_blocks(reversed(blocks))
    queue = gpu.free_block_queue
    walked = [block for block in queue.iter_blocks_after(None) if block.block_hash is not None]
    assert walked == blocks[::-1]
    cursor = walked[1]
    assert list(queue.iter_blocks_after(cursor)) == walked[2:]
    assert cursor.next_free_block is walked[2] and walked[-1].next_free_block is queue.fake_free_list_tail
    gpu.touch([cursor])
    assert cursor.next_free_block is None and list(queue.iter_blocks_after(cursor)) == []
    copies = cpu.get_new_blocks(len(walked))
    for source, target in zip(walked, copies):
        if cpu.cached_block_hash_to_block.get_one_block(source.block_hash) is None:
            cpu._insert_block_hash(source.block_hash, target, num_tokens=source.block_hash_num_tokens)
    found = [cpu.get_cached_block(digest, [0])[0] for digest in request.block_hashes]
    assert found == copies[::-1]


def test_a_reference_by_hand(make_pool: Any) -> None:
    """As vLLM's copy-on-write does it."""
    pool = make_pool(4)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    assert block.ref_cnt == 1 and pool.get_num_free_blocks() == 2
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 3


def test_watchers_and_vllms_collector(make_pool: Any) -> None:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = make_pool(3, metrics_collector=collector)
    _, blocks = cached(pool, 2)
    told: list[int] = []
    pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    pool.touch(blocks[:1])
    pool.free_blocks(blocks[:1])
    pool.get_new_blocks(1)
    assert told == [blocks[1].block_id]
    assert len(collector.drain_events()) == 1


def test_the_pools_signature_is_vllms() -> None:
    """Code that asks which arguments a pool takes, as vLLM's benchmarks have to be helped with, sees them by name."""
    assert inspect.signature(level.BlockPool) == inspect.signature(level.VllmBlockPool)
