"""Bad arguments and callbacks through vLLM's names: an exception that says what was wrong, never a crash, and a pool
whose bookkeeping is in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

from kvpool.errors import BlockStateError, KvpoolError
from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import levels
from kvpool.integrations.vllm.hooks import Hooks

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    """All levels are in place."""
    integration.unregister()
    hooks = Hooks()
    integration.install(levels.NAMES, hooks)
    yield
    hooks.restore()


@pytest.fixture
def pool() -> Iterator[Any]:
    from vllm.v1.core.block_pool import BlockPool

    pool: Any = BlockPool(8, True, BLOCK_SIZE, True)
    yield pool
    pool.check()


@pytest.fixture(params=[False, True], ids=["one group", "two groups"])
def manager(request: pytest.FixtureRequest) -> Iterator[Any]:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    size: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=6)][: 1 + request.param]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    made: Any = KVCacheManager(
        KVCacheConfig(20, [], groups),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_kv_cache_events=True,
    )
    yield made
    made.block_pool.check()


def make_request(name: str = "r", tokens: Any = range(9), **more: Any) -> Any:
    import vllm.v1.core.kv_cache_utils as blocks
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.request import Request

    blocks.init_none_hash(sha256)
    hasher = blocks.get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(name, list(tokens), SamplingParams(max_tokens=9), None, block_hasher=hasher, **more)


def is_told(call: Callable[[], Any], pool: Any) -> BaseException | None:
    """What a call raised, if it did; the pool is in order afterwards, whatever it was."""
    raised = None
    try:
        call()
    except Exception as error:
        raised = error
    pool.check()
    return raised


# ---- attributes of blocks ----


@pytest.mark.parametrize("value", [-1, 2**31, 2**70, "1", None, 1.5])
def test_a_count_that_is_none_is_refused(pool: Any, value: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    free = pool.get_num_free_blocks()
    with pytest.raises((KvpoolError, TypeError, OverflowError)):
        block.ref_cnt = value
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (1, free)


@pytest.mark.parametrize("value", [0, 1, 5])
def test_a_count_that_is_set_by_hand_leaves_the_pool_in_order(pool: Any, value: int) -> None:
    used, free = pool.get_new_blocks(2)
    pool.free_blocks([free])
    for block in (used, free, pool.null_block, pool.blocks[5]):
        is_told(lambda block=block: setattr(block, "ref_cnt", value), pool)


@pytest.mark.parametrize("name", ["block_id", "is_null", "prev_free_block", "next_free_block", "block_hash"])
@pytest.mark.parametrize("value", [None, -1, 3, "x", b"x", b"\0" * 40, object()])
def test_attributes_of_a_block_written_from_outside(pool: Any, name: str, value: Any) -> None:
    used, cached = pool.get_new_blocks(2)
    request = make_request()
    pool.cache_full_blocks(request, [cached], 0, 1, BLOCK_SIZE, 0)
    pool.free_blocks([cached])
    for block in (used, cached, pool.null_block, pool.blocks[5]):
        is_told(lambda block=block: setattr(block, name, value), pool)
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert len({block.block_id for block in taken}) == len(taken)


def test_links_that_are_made_anew_do_not_lead_out_of_the_list(pool: Any) -> None:
    for block in list(pool.blocks):
        for name in ("prev_free_block", "next_free_block"):
            is_told(lambda block=block, name=name: setattr(block, name, pool.blocks[3]), pool)
    assert len({block.block_id for block in pool.free_block_queue.get_all_free_blocks()}) == 7


# ---- blocks and ids that are none ----


def strangers(pool: Any) -> list[Any]:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    other = BlockPool(8, True, BLOCK_SIZE)
    return [None, 3, "block", object(), KVCacheBlock(3), KVCacheBlock(10**6), other.blocks[2], pool]


@pytest.mark.parametrize("i", range(8))
def test_what_is_no_block_of_the_pool_is_refused_everywhere(pool: Any, i: int) -> None:
    stranger = strangers(pool)[i]
    good = pool.get_new_blocks(1)
    request = make_request()
    before = [block.ref_cnt for block in pool.blocks], pool.get_num_free_blocks()
    calls = [
        lambda: pool.free_blocks([*good, stranger]),
        lambda: pool.cache_full_blocks(request, [*good, stranger], 0, 2, BLOCK_SIZE, 0),
    ]
    if getattr(stranger, "pool", pool) is None:
        calls.clear()  # vLLM's tests cache and free blocks that they have made by hand: test_pool_names.py
    for call in (
        *calls,
        lambda: pool.touch([*good, stranger]),
        lambda: pool.cache_partial_block(request, stranger, BLOCK_SIZE, 0, BLOCK_SIZE),
        lambda: pool.move_block_hashes(good[0], stranger),
        lambda: pool.free_block_queue.remove(stranger),
        lambda: pool.free_block_queue.append(stranger),
    ):
        assert is_told(call, pool) is not None
        assert ([block.ref_cnt for block in pool.blocks], pool.get_num_free_blocks()) == before
    assert len(pool.cached_block_hash_to_block) == 0


@pytest.mark.parametrize("block_id", [-1, 8, 2**31, 2**70, None, "1", 1.0, True])
def test_ids_outside_of_the_pool_are_refused(pool: Any, block_id: Any) -> None:
    assert is_told(lambda: pool.evict_blocks({block_id}), pool) is not None


def test_a_double_free_names_the_block(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(BlockStateError, match=r"block 1 "):
        pool.free_blocks([block])


# ---- what is called back while a call is under way ----


class Reentrant(list[Any]):
    """A sequence that uses the pool while it is read, and changes itself."""

    def __init__(self, items: Any, act: Callable[[Any], Any]) -> None:
        super().__init__(items)
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        for item in list(super().__iter__()):
            self.act(self)
            yield item

    def __getitem__(self, place: Any) -> Any:
        self.act(self)
        return super().__getitem__(place)

    def __len__(self) -> int:
        self.act(self)
        return super().__len__()


@pytest.mark.parametrize("kind", ["free", "allocate", "reset", "clear", "evict"])
def test_a_sequence_that_uses_the_pool_while_it_is_read(pool: Any, kind: str) -> None:
    request = make_request()
    blocks = pool.get_new_blocks(2)

    def act(sequence: Any) -> None:
        if kind == "free":
            pool.free_blocks([block for block in blocks if block.ref_cnt])
        elif kind == "allocate" and pool.get_num_free_blocks():
            pool.get_new_blocks(1)
        elif kind == "reset":
            pool.reset_prefix_cache()
        elif kind == "clear":
            list.clear(sequence)
        elif kind == "evict":
            pool.evict_blocks({1, 2, 3})

    for call in (pool.free_blocks, pool.touch, lambda held: pool.cache_full_blocks(request, held, 0, 2, BLOCK_SIZE, 0)):
        is_told(lambda call=call: call(Reentrant(blocks, act)), pool)
    hashes = Reentrant(request.block_hashes, act)
    request.block_hashes = hashes
    is_told(lambda: pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, 0), pool)


class Collector:
    """A metrics collector that uses the pool at every call."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.depth = 0

    def act(self, *_: Any) -> None:
        if self.depth == 0 and self.pool is not None:
            self.depth = 1
            try:
                taken = self.pool.get_new_blocks(min(1, self.pool.get_num_free_blocks()))
                self.pool.free_blocks(taken)
                self.pool.evict_blocks(range(1, self.pool.num_gpu_blocks))
            finally:
                self.depth = 0

    on_block_allocated = on_block_accessed = on_block_evicted = reset = act


def test_a_collector_that_uses_the_pool() -> None:
    from vllm.v1.core.block_pool import BlockPool

    collector = Collector()
    pool: Any = BlockPool(8, True, BLOCK_SIZE, metrics_collector=collector)
    collector.pool = pool
    request = make_request()
    for _ in range(5):
        blocks = pool.get_new_blocks(3)
        is_told(lambda blocks=blocks: pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, 0), pool)
        is_told(lambda: pool.get_cached_block(request.block_hashes[0], [0]), pool)
        pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 7


# ---- requests ----


class Exploding:
    """Raises whenever it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be had")


def spoiled(**attributes: Any) -> Any:
    request = make_request()
    for name, value in attributes.items():
        setattr(request, name, value)
    return request


HOSTILE: dict[str, Callable[[], Any]] = {
    "not a request": Exploding,
    "none": lambda: None,
    "no hashes": lambda: spoiled(block_hashes=None),
    "hashes of numbers": lambda: spoiled(block_hashes=[1, 2]),
    "hashes that are too long": lambda: spoiled(block_hashes=[b"\0" * 64] * 4),
    "too few hashes": lambda: spoiled(block_hashes=[]),
    "tokens of nothing": lambda: spoiled(_all_token_ids=None),
    "tokens that are a tuple": lambda: spoiled(_all_token_ids=tuple(range(9))),
    "a negative count": lambda: spoiled(num_computed_tokens=-5),
    "a huge count": lambda: spoiled(num_computed_tokens=2**62),
    "a count beyond 64 bits": lambda: spoiled(num_computed_tokens=2**70),
    "a count of text": lambda: spoiled(num_computed_tokens="5"),
    "a negative count in flight": lambda: spoiled(num_in_flight_tokens=-(2**62)),
    "an unhashable id": lambda: spoiled(request_id=[]),
    "no id": lambda: spoiled(request_id=None),
    "no status": lambda: spoiled(status=None),
    "no prompt": lambda: spoiled(num_prompt_tokens=None),
}
HUGE = (2**31, 2**62, 2**63 - 1, 2**70)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_request_that_is_none(manager: Any, kind: str) -> None:
    pool = manager.block_pool
    good = make_request("good")
    manager.allocate_slots(good, 9)
    table = manager.get_block_ids("good")
    request = HOSTILE[kind]()
    for call in (
        lambda: manager.get_computed_blocks(request),
        lambda: manager.allocate_slots(request, 5),
        lambda: manager.allocate_slots(request, 1),
        lambda: manager.cache_blocks(request, 9),
        lambda: manager.cache_blocks(request, 10**6),
        lambda: manager.free(request),
    ):
        is_told(call, pool)
        assert manager.get_block_ids("good") == table
    held = [block_id for group in table for block_id in group if block_id]
    assert all(pool.blocks[block_id].ref_cnt >= 1 for block_id in held)


@pytest.mark.parametrize("number", [*HUGE, *(-n for n in HUGE), -1, True, 1.5, "5", None])
@pytest.mark.parametrize(
    "place", ["num_new_tokens", "num_new_computed_tokens", "num_lookahead_tokens", "reserved_blocks"]
)
def test_numbers_that_are_none(manager: Any, place: str, number: Any) -> None:
    pool = manager.block_pool
    request = make_request()
    arguments = {"num_new_tokens": 5} | {place: number}
    is_told(lambda: manager.allocate_slots(request, **arguments), pool)
    assert all(len(table) <= 16 for table in manager.get_block_ids(request.request_id))
    is_told(lambda: manager.allocate_slots(request, 3), pool)
    is_told(lambda: manager.free(request), pool)


@pytest.mark.parametrize("i", range(8))
def test_hits_that_are_none(manager: Any, i: int) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

    pool = manager.block_pool
    stranger = strangers(pool)[i]
    num_groups = len(manager.kv_cache_config.kv_cache_groups)
    for hits in (
        KVCacheBlocks(([stranger],) * num_groups),
        KVCacheBlocks(([stranger],)),
        KVCacheBlocks([stranger]),
        KVCacheBlocks(None),
        KVCacheBlocks(((),) * (num_groups + 2)),
        stranger,
    ):
        request = make_request()
        is_told(lambda hits=hits, request=request: manager.allocate_slots(request, 5, 4, hits), pool)
        is_told(lambda request=request: manager.free(request), pool)


def test_hashes_and_tables_that_others_change(manager: Any) -> None:
    """vLLM's own dicts are in reach of every connector and plugin."""
    pool = manager.block_pool
    for spoil in (
        lambda tables: tables.clear(),
        lambda tables: tables["r"].clear(),
        lambda tables: tables["r"].append(None),
        lambda tables: tables["r"].insert(0, pool.null_block),
        lambda tables: tables.update(r=(1, 2)),
        lambda tables: tables.update(r=None),
    ):
        request = make_request()
        manager.allocate_slots(request, 6)
        for group in manager.coordinator.single_type_managers:
            spoil(group.req_to_blocks)
        request.num_computed_tokens = 6
        for call in (
            lambda request=request: manager.allocate_slots(request, 3),
            lambda request=request: manager.cache_blocks(request, 9),
            lambda request=request: manager.free(request),
        ):
            is_told(call, pool)
        for group in manager.coordinator.single_type_managers:
            group.req_to_blocks.clear()
            group.num_cached_block.clear()
