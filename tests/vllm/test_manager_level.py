"""Compiled calls under vLLM's KVCacheManager against vLLM's own methods: random histories, the same state after all.

The two managers are vLLM's. One has vLLM's block pool, which the compiled calls leave to vLLM's methods; the other has
the native one. Two requests of three are vLLM's ``Request``, which the compiled calls are for.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import manager_histories
import pytest
from manager_histories import History
from manager_layouts import MAKERS, Layout, new_hashes
from vllm_stack import VllmStack

pytestmark = pytest.mark.vllm

NUM_SEEDS = int(os.environ.get("KVPOOL_LOCKSTEP_SEEDS", "40"))
BLOCK_SIZE = 4


class StockStack(VllmStack):
    name = "stock"


class NativeStack(VllmStack):
    """vLLM's KVCacheManager over the native pool."""

    name = "native"

    def __init__(self, layout: Layout) -> None:
        from kvpool.integrations.vllm import pool
        from kvpool.integrations.vllm.hooks import Hooks

        hooks = Hooks()
        pool.install(hooks)
        try:
            super().__init__(layout)
        finally:
            hooks.restore()
        assert isinstance(self.pool, pool.BlockPool)

    def check(self) -> None:
        self.pool.check()


class FastHistory(History):
    """A history that compares vLLM's own dicts, too."""

    def __init__(self, seed: int, statuses: Any, kinds: tuple[str, ...], events: bool) -> None:
        def make_stacks(layout: Layout) -> list[Any]:
            stacks = [StockStack(layout), NativeStack(layout)]
            for stack in stacks:
                stack.manager.enable_kv_cache_events = stack.pool.enable_kv_cache_events = events
            return stacks

        super().__init__(seed, make_stacks, statuses, kinds)

    def compare(self) -> None:
        super().compare()
        self.all(lambda stack: [dicts_of(group) for group in stack.manager.coordinator.single_type_managers])


def dicts_of(group: Any) -> dict[str, Any]:
    """What a manager of vLLM keeps about its requests."""
    return {
        "tables": {name: [block.block_id for block in table] for name, table in group.req_to_blocks.items()},
        "num_cached": dict(group.num_cached_block),
        "partial": {name: (at, block.block_id) for name, (at, block) in group._partial_hit_reqs.items()},
        "zero": group.new_block_ids[:],
    }


def make_request(
    request_id: str,
    token_ids: list[int],
    hash_block_size: int,
    status: Any,
    skip_reading_prefix_cache: bool = False,
    num_lookahead_tokens: int = 0,
) -> Any:
    """vLLM's Request, with what a history asks of one."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    hasher = partial(new_hashes, hash_block_size=hash_block_size, num_lookahead_tokens=num_lookahead_tokens)
    request = Request(request_id, list(token_ids), SamplingParams(max_tokens=16), None, block_hasher=hasher)
    request.status = status
    request.skip_reading_prefix_cache = skip_reading_prefix_cache
    request.append = lambda tokens: request.append_output_token_ids(list(tokens))
    return request


@pytest.fixture(scope="module")
def statuses() -> Any:
    pytest.importorskip("vllm.v1.core.block_pool")
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.request import RequestStatus

    register_all_kvcache_specs(None)
    return RequestStatus


@pytest.fixture
def fast(statuses: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The compiled calls are in place; the level's module."""
    from kvpool.integrations.vllm import manager
    from kvpool.integrations.vllm.hooks import Hooks

    monkeypatch.setattr(manager_histories, "OwnManagerRequest", make_request)
    hooks = Hooks()
    manager.install(hooks)
    yield manager
    hooks.restore()


@pytest.mark.parametrize("events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("kind", MAKERS)
def test_histories_are_the_same(fast: Any, statuses: Any, kind: str, events: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        history = FastHistory(seed, statuses, (kind,), events)
        try:
            seen += history.run()
        except Exception as error:
            raise AssertionError(f"history of kind {kind}, seed {seed}, {history.layout}") from error
    assert seen["admissions"] > NUM_SEEDS, seen
    if kind != "encoder_decoder":  # nothing of it is cached, and a reset is rare
        assert (seen["events"] > 0) == events, seen


# ---- what is served by the compiled calls ----

LAYOUTS = {
    "full": [("full", BLOCK_SIZE, 0, False)],
    "window": [("window", BLOCK_SIZE, 9, False)],
    "local": [("local", BLOCK_SIZE, 12, False)],
    "hybrid": [("full", BLOCK_SIZE, 0, False), ("window", BLOCK_SIZE, 9, False), ("window", BLOCK_SIZE, 5, False)],
    "unequal": [("full", 2 * BLOCK_SIZE, 0, False), ("window", BLOCK_SIZE, 9, False)],
}


@pytest.fixture
def left_to_vllm(fast: Any) -> Iterator[Counter[str]]:
    """Counts the calls that are left to vLLM's methods."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*arguments, **options)

        return call

    fast.manager_steps.bind({name: counted(name, method) for name, method in fast._STOCK_METHODS.items()} | fast._NAMES)
    finders = {name: classmethod(counted(name, method.__func__)) for name, method in _finders(fast).items()}
    fast.longest_hit.bind(fast._STOCK_HITS | finders | fast._NAMES)
    yield calls
    fast.manager_steps.bind(fast._STOCK_METHODS | fast._NAMES)
    fast.longest_hit.bind(fast._STOCK_HITS | fast._NAMES)


def _finders(fast: Any) -> dict[str, Any]:
    return {name: method for name, method in fast._STOCK_HITS.items() if name in fast._HIT_FINDERS}


def run_one(stack: Any, request: Any, num_output_tokens: int) -> None:
    """Hit, prefill, decode and give back one request."""
    manager = stack.manager
    hits, num_hit, _ = stack.find_hit(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hits, full_sequence_must_fit=True)
    for _ in range(num_output_tokens):
        request.num_computed_tokens = request.num_tokens
        request.append([1])
        assert manager.allocate_slots(request, 1, num_lookahead_tokens=0) is not None
        manager.cache_blocks(request, request.num_tokens)
        stack.check()
    manager.free(request)
    stack.check()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_plain_calls_are_compiled(left_to_vllm: Counter[str], statuses: Any, kind: str) -> None:
    stack = NativeStack(Layout(LAYOUTS[kind], num_blocks=60))
    for i in range(3):
        run_one(stack, make_request(f"r{i}", list(range(29)), BLOCK_SIZE, statuses.WAITING), 3 * BLOCK_SIZE)
    assert stack.manager.usage == 0
    assert not left_to_vllm


def test_a_decode_that_needs_nothing_gets_the_shared_empty_answer(left_to_vllm: Counter[str], statuses: Any) -> None:
    stack = NativeStack(Layout(LAYOUTS["full"]))
    request = make_request("r", [1, 2], BLOCK_SIZE, statuses.RUNNING)
    new = stack.manager.allocate_slots(request, 2)
    assert [len(group) for group in new.blocks] == [1]
    request.num_computed_tokens = 2
    request.append([3])
    assert stack.manager.allocate_slots(request, 1) is stack.manager.empty_kv_cache_blocks
    assert not left_to_vllm


def test_what_is_not_plain_is_left_to_vllm(left_to_vllm: Counter[str], statuses: Any) -> None:
    stack = NativeStack(Layout(LAYOUTS["full"], num_blocks=60))
    manager = stack.manager
    request = make_request("r", list(range(9)), BLOCK_SIZE, statuses.WAITING)
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        manager.allocate_slots(request, 0)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=BLOCK_SIZE, delay_cache_blocks=True)
    assert manager.get_block_ids("r") == ([1, 2],)
    manager.free(request)
    assert left_to_vllm == {"allocate_slots": 2}


def test_managers_of_another_class_or_with_another_pool_are_left_to_vllm(
    left_to_vllm: Counter[str], statuses: Any
) -> None:
    stock = StockStack(Layout(LAYOUTS["full"]))
    derived = NativeStack(Layout(LAYOUTS["full"]))
    derived.manager.__class__ = type("Derived", (type(derived.manager),), {})
    for i, stack in enumerate([stock, derived], start=1):
        request = make_request("r", [1, 2], BLOCK_SIZE, statuses.RUNNING)
        assert stack.manager.allocate_slots(request, 2).get_block_ids() == ([1],)
        stack.manager.free(request)
        assert left_to_vllm == {"allocate_slots": i, "free": i}


def test_hooks_put_everything_back(fast: Any) -> None:
    from kvpool.integrations.vllm.hooks import Hooks

    owners = [fast.managers.KVCacheManager, fast.managers.KVCacheBlocks, *fast._HIT_FINDERS.values()]
    before = [dict(vars(owner)) for owner in owners]
    hooks = Hooks()
    fast.install(hooks)
    hooks.restore()
    assert [dict(vars(owner)) for owner in owners] == before
