"""Hashes that cover some tokens after their block, as vLLM 0.33 has them: what kvpool puts in the place of vLLM's pool,
manager and hasher does with them what vLLM's do."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import manager_histories
import pytest
from manager_layouts import MAKERS, Layout
from test_hasher import make_request as make_plain_request
from test_hasher import random_extras
from test_manager_level import (
    BLOCK_SIZE,
    LAYOUTS,
    NUM_SEEDS,
    FastHistory,
    NativeStack,
    fast,  # noqa: F401 (a fixture)
    left_to_vllm,  # noqa: F401 (a fixture)
    make_request,
    run_one,
    statuses,  # noqa: F401 (a fixture)
)
from vllm_stack import VllmStack

pytestmark = pytest.mark.vllm

OPTION = "num_hash_lookahead_tokens"
HASH_SIZE = 4
NUM_BLOCKS = 200
# Aligned Mamba states are made where a scheduler ends its steps, and the one of the histories knows no lookahead.
KINDS = [kind for kind in MAKERS if "mamba" not in kind and kind not in ("hybrid_three", "encoder_decoder")]


@pytest.fixture(scope="module")
def level() -> Any:
    """The module of the level ``pool``, under a vLLM that has such hashes."""
    pytest.importorskip("vllm.v1.core.block_pool")
    from kvpool.integrations.vllm import pool

    if OPTION not in inspect.signature(pool.VllmBlockPool).parameters:
        pytest.skip("no hash of this vLLM looks ahead")
    return pool


# ---- events ----


def random_request(rng: random.Random, num_lookahead: int) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    from kvpool.integrations.vllm import hasher

    kv_cache_utils.init_none_hash(sha256)
    tokens = [rng.randrange(9) for _ in range(rng.randint(1, 60))]
    hashes = hasher._stock(HASH_SIZE, sha256, num_lookahead)
    return make_plain_request(tokens, block_hasher=hashes, **random_extras(rng, len(tokens)))


def cache_something(pool: Any, request: Any, rng: random.Random) -> list[Any]:
    """Blocks of a group of some block size; returns all events."""
    block_size = HASH_SIZE * rng.choice((1, 1, 2))
    num_blocks = len(request.block_hashes) * HASH_SIZE // block_size
    num_cached = rng.randint(0, num_blocks)
    table = pool.get_new_blocks(num_blocks)
    if num_blocks > num_cached and rng.random() < 0.3:
        table[rng.randrange(num_blocks)] = pool.null_block
    mask = [rng.random() < 0.7 for _ in range(num_cached, num_blocks)] if rng.random() < 0.3 else None
    pool.cache_full_blocks(request, table, num_cached, num_blocks, block_size, 3, block_mask=mask)
    pool.emit_cached_block_events(request, num_cached, block_size, 3)
    if request.block_hashes:
        num_tokens = HASH_SIZE * rng.randint(1, len(request.block_hashes))
        pool.cache_partial_block(request, pool.get_new_blocks(1)[0], num_tokens, 4, 2 * HASH_SIZE)
    return list(pool.take_events())


@pytest.mark.parametrize("num_lookahead", [0, 1, 3])
def test_events_tell_what_a_hash_covers(level: Any, num_lookahead: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        answers = []
        for make in (level.VllmBlockPool, level.BlockPool):
            rng = random.Random(seed)
            request = random_request(rng, num_lookahead)
            pool = make(NUM_BLOCKS, True, HASH_SIZE, True, **{OPTION: num_lookahead})
            assert getattr(pool, OPTION) == num_lookahead
            answers.append(cache_something(pool, request, rng))
        stock, ours = answers
        assert ours == stock, f"seed {seed}"
        for event in ours:
            seen["events"] += 1
            seen["with tokens"] += (
                bool(event.lookahead_token_ids) and len(event.lookahead_token_ids[0]) == num_lookahead
            )
            seen["with keys"] += event.extra_keys is not None
    assert seen["events"] > 60 and seen["with keys"] > 15, seen
    assert (seen["with tokens"] > 60) == (num_lookahead > 0), seen


# ---- manager ----


@pytest.fixture
def look_ahead(level: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Has managers made for so many tokens; returns what makes their requests."""

    def look_ahead(num_lookahead: int) -> Any:
        monkeypatch.setattr(VllmStack, "options", {OPTION: num_lookahead})
        # With several tokens vLLM's windows look for a hash that is not there yet, unless the hit is bounded.
        monkeypatch.setattr(
            VllmStack,
            "find_hit",
            lambda stack, request: stack.manager.get_computed_blocks(
                request, max(0, request.num_tokens - num_lookahead)
            ),
        )
        return partial(make_request, num_lookahead_tokens=num_lookahead)

    return look_ahead


@pytest.mark.parametrize("num_lookahead", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_histories_are_the_same(
    look_ahead: Callable[[int], Any],
    fast: Any,  # noqa: F811
    statuses: Any,  # noqa: F811
    kind: str,
    num_lookahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager_histories, "OwnManagerRequest", look_ahead(num_lookahead))
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        history = FastHistory(seed, statuses, (kind,), events=True)
        try:
            seen += history.run()
        except Exception as error:
            raise AssertionError(f"history of kind {kind}, seed {seed}, {history.layout}") from error
    assert seen["admissions"] > NUM_SEEDS and seen["events"] > 0, seen


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_calls_are_compiled(
    look_ahead: Callable[[int], Any],
    left_to_vllm: Counter[str],  # noqa: F811
    statuses: Any,  # noqa: F811
    kind: str,
) -> None:
    make = look_ahead(2)
    stack = NativeStack(Layout(LAYOUTS[kind], num_blocks=60))
    for i in range(3):
        run_one(stack, make(f"r{i}", list(range(29)), BLOCK_SIZE, statuses.WAITING), 3 * BLOCK_SIZE)
    assert stack.manager.usage == 0
    assert not left_to_vllm


# ---- hasher ----


def test_such_hashes_are_left_to_vllm(level: Any) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    from kvpool.integrations.vllm import hasher

    kv_cache_utils.init_none_hash(sha256)
    ours = hasher.get_request_block_hasher(HASH_SIZE, sha256, 2)
    stock = hasher._stock(HASH_SIZE, sha256, 2)
    assert type(hasher.get_request_block_hasher(HASH_SIZE, sha256, 0)) is hasher.RequestHasher
    requests = [make_plain_request(list(range(17)), block_hasher=each) for each in (ours, stock)]
    assert len(requests[0].block_hashes) == 3
    assert requests[0].block_hashes == requests[1].block_hashes
