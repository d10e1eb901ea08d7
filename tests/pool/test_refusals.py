"""What a pool refuses, and that a refused call has changed nothing that anybody can see."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of
from token_requests import TokenRequest, lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError, KvpoolError, NoFreeBlocksError

REQUEST = TokenRequest(range(16))
OTHER = TokenRequest(range(50, 66))


class Scene:
    """A pool in a state with something of everything: used, shared, free, cached, twice cached, unpinned, detached.

    Blocks: 1, 2 cached and used (1 twice), 3 used without a hash, 4 cached and free, 5 a copy of 1 and free, 6 free
    and watched, 7 detached, 8 to 11 free.
    """

    def __init__(self, make_pool: Any, backend: Any, events: bool) -> None:
        self.pool = pool = make_pool(12, True, 4, events)
        self.other = make_pool(4)
        self.backend = backend
        blocks = pool.get_new_blocks(7)
        pool.cache_full_blocks(REQUEST, blocks, 0, 2, 4, 0)
        pool.cache_full_blocks(OTHER, [blocks[3]], 0, 1, 4, 1)
        pool.cache_partial_block(OTHER, blocks[3], 4, 2, 4)
        pool.cache_full_blocks(REQUEST, [blocks[4]], 0, 1, 4, 0)
        pool.touch([blocks[0]])
        pool.free_blocks([blocks[3], blocks[4]])
        pool.unpin_blocks([blocks[5]], lambda block: None)
        blocks[6].ref_cnt = 0
        self.theirs = self.other.get_new_blocks(1)[0]
        self.hand_made = backend.KVCacheBlock(3, 1)

    def state(self) -> Any:
        keys = [lookup_key(h, group) for h in (*REQUEST.block_hashes, *OTHER.block_hashes) for group in range(3)]
        return state_of(self.pool, keys), state_of(self.other), (self.hand_made.ref_cnt, self.hand_made.block_hash)


@pytest.fixture(params=[False, True], ids=["quiet", "events"])
def scene(request: pytest.FixtureRequest, make_pool: Any, backend: Any) -> Scene:
    return Scene(make_pool, backend, request.param)


def test_the_scene_is_what_it_says(scene: Scene) -> None:
    pool = scene.pool
    assert free_ids(pool) == [8, 9, 10, 11, 4, 5, 6]
    assert [block.ref_cnt for block in pool.blocks] == [0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert pool.cached_block_hashes_by_block[4] == {lookup_key(OTHER.block_hashes[0], 2)}
    assert pool.find_prefix_ids(REQUEST.block_hashes).tolist() == [1, 2]
    assert list(pool._reuse_watchers) == [6]


def ids(*values: int) -> array:
    return array("i", values)


def free(*names: Any) -> Callable[[Scene], None]:
    """free_blocks of ids of the pool, or of the scene's attributes."""
    return lambda s: s.pool.free_blocks([getattr(s, n) if isinstance(n, str) else s.pool.blocks[n] for n in names])


def touch(*names: Any) -> Callable[[Scene], None]:
    return lambda s: s.pool.touch([getattr(s, n) if isinstance(n, str) else s.pool.blocks[n] for n in names])


def cache(
    block_ids: list[int], first: int, past: int, *args: Any, request: Any = REQUEST, size: int = 4, group: int = 3
):
    return lambda s: s.pool.cache_full_blocks(
        request, [s.pool.blocks[i] for i in block_ids], first, past, size, group, *args
    )


REFUSED: dict[str, tuple[type[Exception], Callable[[Scene], Any]]] = {
    # free_blocks
    "double free within a batch": (BlockStateError, free(2, 3, 3)),
    "triple free of a shared block": (BlockStateError, free(1, 3, 1, 1)),
    "free of a free block": (BlockStateError, free(1, 2, 9)),
    "free of a cached free block": (BlockStateError, free(3, 4)),
    "free of a detached block": (BlockStateError, free(3, 7)),
    "free of a hand-made block": (BlockStateError, free(3, "hand_made")),
    "double free of a block of another pool": (BlockStateError, free(3, "theirs", "theirs")),
    "double free beside a block of another pool": (BlockStateError, free("theirs", 3, 3)),
    "prepended double free": (BlockStateError, lambda s: s.pool.free_blocks([s.pool.blocks[2]] * 2, prepend=True)),
    "free of None": (TypeError, lambda s: s.pool.free_blocks([s.pool.blocks[3], None])),
    "free of an id": (TypeError, lambda s: s.pool.free_blocks([s.pool.blocks[3], 3])),
    # touch
    "touch of a block of another pool": (BlockStateError, touch(4, 1, "theirs")),
    "touch of a hand-made block": (BlockStateError, touch(4, 1, "hand_made")),
    "touch of a detached block": (BlockStateError, touch(4, 1, 4, 7)),
    "touch of None": (TypeError, lambda s: s.pool.touch([s.pool.blocks[4], None])),
    # allocation
    "a negative number": (InvalidArgumentError, lambda s: s.pool.get_new_blocks(-1)),
    "True blocks": (TypeError, lambda s: s.pool.get_new_blocks(True)),
    "False blocks": (TypeError, lambda s: s.pool.get_new_blocks(False)),
    "1.0 blocks": (TypeError, lambda s: s.pool.get_new_blocks(1.0)),
    "None blocks": (TypeError, lambda s: s.pool.get_new_blocks(None)),
    "one block too many": (NoFreeBlocksError, lambda s: s.pool.get_new_blocks(8)),
    "very many blocks": (NoFreeBlocksError, lambda s: s.pool.get_new_blocks(2**40)),
    # the free list
    "removal of a used block": (BlockStateError, lambda s: s.pool.free_block_queue.remove(s.pool.blocks[3])),
    "removal of a detached block": (BlockStateError, lambda s: s.pool.free_block_queue.remove(s.pool.blocks[7])),
    "removal of the null block": (BlockStateError, lambda s: s.pool.free_block_queue.remove(s.pool.null_block)),
    "removal of a foreign block": (BlockStateError, lambda s: s.pool.free_block_queue.remove(s.other.blocks[2])),
    "appending a used block": (BlockStateError, lambda s: s.pool.free_block_queue.append(s.pool.blocks[3])),
    "appending the null block": (BlockStateError, lambda s: s.pool.free_block_queue.append(s.pool.null_block)),
    "appending twice": (BlockStateError, lambda s: s.pool.free_block_queue.append_n([s.pool.blocks[7]] * 2)),
    # cache_full_blocks
    "a block with a hash": (BlockStateError, cache([3, 2, 8], 0, 3)),
    "a block with a hash of another group": (BlockStateError, cache([4, 3], 0, 2)),
    "a block twice": (BlockStateError, cache([3, 8, 3], 0, 3)),
    "too few hashes": (InvalidArgumentError, cache([3, 8, 9, 10, 11], 0, 5)),
    "too few blocks": (InvalidArgumentError, cache([3, 8], 0, 3)),
    "a short mask": (InvalidArgumentError, cache([3, 8], 0, 2, [True])),
    "a long mask": (InvalidArgumentError, cache([3, 8], 0, 1, [True, True])),
    "an odd block size": (InvalidArgumentError, cache([3], 0, 1, size=6)),
    "a small block size": (InvalidArgumentError, cache([3], 0, 1, size=2)),
    "a group id below 0": (OverflowError, cache([3, 8], 0, 2, group=-1)),
    "a group id over 4 bytes": (OverflowError, cache([3, 8], 0, 2, group=2**32)),
    "a digest over 32 bytes": (
        InvalidArgumentError,
        cache([3, 8], 0, 2, request=TokenRequest(range(8), digests=lambda *_: [b"a", b"\0" * 33])),
    ),
    "a digest that is no bytes": (
        TypeError,
        cache([3, 8], 0, 2, request=TokenRequest(range(8), digests=lambda *_: [b"a", "b"])),
    ),
    "caching a foreign block": (
        BlockStateError,
        lambda s: s.pool.cache_full_blocks(REQUEST, [s.pool.blocks[3], s.theirs], 0, 2, 4, 0),
    ),
    "caching a hand-made block": (
        BlockStateError,
        lambda s: s.pool.cache_full_blocks(REQUEST, [s.pool.blocks[3], s.hand_made], 0, 2, 4, 0),
    ),
    "caching None": (TypeError, lambda s: s.pool.cache_full_blocks(REQUEST, [s.pool.blocks[3], None], 0, 2, 4, 0)),
    # the rarer calls
    "partial caching of a foreign block": (
        BlockStateError,
        lambda s: s.pool.cache_partial_block(REQUEST, s.theirs, 4, 0, 4),
    ),
    "an unaligned prefix": (
        InvalidArgumentError,
        lambda s: s.pool.cache_partial_block(REQUEST, s.pool.blocks[2], 3, 0, 4),
    ),
    "a prefix without hashes": (
        InvalidArgumentError,
        lambda s: s.pool.cache_partial_block(REQUEST, s.pool.blocks[2], 20, 0, 4, True),
    ),
    "a partial group id over 4 bytes": (
        OverflowError,
        lambda s: s.pool.cache_partial_block(REQUEST, s.pool.blocks[2], 4, 2**32, 4, True),
    ),
    "moving to a block with a hash": (
        BlockStateError,
        lambda s: s.pool.move_block_hashes(s.pool.blocks[4], s.pool.blocks[2]),
    ),
    "moving to a foreign block": (BlockStateError, lambda s: s.pool.move_block_hashes(s.pool.blocks[4], s.theirs)),
    "moving from a foreign block": (BlockStateError, lambda s: s.pool.move_block_hashes(s.theirs, s.pool.blocks[3])),
    "moving to the null block": (
        BlockStateError,
        lambda s: s.pool.move_block_hashes(s.pool.blocks[4], s.pool.null_block),
    ),
    "evicting id -1": (BlockStateError, lambda s: s.pool.evict_blocks({-1})),
    "evicting good ids and -1": (BlockStateError, lambda s: s.pool.evict_blocks([2, 4, -1])),
    "evicting an id past the end": (BlockStateError, lambda s: s.pool.evict_blocks([4, 12])),
    "evicting True": (TypeError, lambda s: s.pool.evict_blocks([4, True])),
    "evicting '4'": (TypeError, lambda s: s.pool.evict_blocks([4, "4"])),
    "unpinning a free block": (
        BlockStateError,
        lambda s: s.pool.unpin_blocks([s.pool.blocks[3], s.pool.blocks[9]], print),
    ),
    "unpinning too often": (BlockStateError, lambda s: s.pool.unpin_blocks([s.pool.blocks[2]] * 2, print)),
    "unpinning the null block": (
        BlockStateError,
        lambda s: s.pool.unpin_blocks([s.pool.blocks[3], s.pool.null_block], print),
    ),
    "unpinning a foreign block": (BlockStateError, lambda s: s.pool.unpin_blocks([s.pool.blocks[3], s.theirs], print)),
    "unpinning for nobody": (TypeError, lambda s: s.pool.unpin_blocks([s.pool.blocks[3]], None)),
    # ids
    "double free of ids": (BlockStateError, lambda s: s.pool.free_ids(ids(2, 3, 3))),
    "free of id -1": (BlockStateError, lambda s: s.pool.free_ids(ids(3, -1))),
    "free of an id past the end": (BlockStateError, lambda s: s.pool.free_ids(ids(3, 12))),
    "touch of an id past the end": (BlockStateError, lambda s: s.pool.touch_ids(ids(4, 12))),
    "touch of id -3": (BlockStateError, lambda s: s.pool.touch_ids(ids(4, -3))),
    "touch of a detached id": (BlockStateError, lambda s: s.pool.touch_ids(ids(4, 7))),
    "too many ids": (NoFreeBlocksError, lambda s: s.pool.allocate_ids(8)),
    "a negative number of ids": (InvalidArgumentError, lambda s: s.pool.allocate_ids(-1)),
    "True ids": (TypeError, lambda s: s.pool.allocate_ids(True)),
    "an out array of another length": (InvalidArgumentError, lambda s: s.pool.allocate_ids(2, out=ids(0, 0, 0))),
    "caching an id with another hash": (KvpoolError, lambda s: s.pool.cache_ids(OTHER.block_hashes[1:3], ids(3, 2), 0)),
    "caching an id past the end": (KvpoolError, lambda s: s.pool.cache_ids(OTHER.block_hashes[1:3], ids(3, 12), 0)),
    "caching id -1": (KvpoolError, lambda s: s.pool.cache_ids(OTHER.block_hashes[1:3], ids(3, -1), 0)),
    "caching an id twice": (KvpoolError, lambda s: s.pool.cache_ids(OTHER.block_hashes[1:3], ids(3, 3), 0)),
    "caching more ids than hashes": (KvpoolError, lambda s: s.pool.cache_ids(OTHER.block_hashes[1:3], ids(3, 8, 9), 0)),
    "asking with a digest over 32 bytes": (InvalidArgumentError, lambda s: s.pool.find_prefix_ids([b"\0" * 33])),
    "asking with a group id below 0": (OverflowError, lambda s: s.pool.find_prefix_ids([], -1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(scene: Scene, name: str) -> None:
    error, call = REFUSED[name]
    before = scene.state()
    with pytest.raises(error) as raised:
        call(scene)
    assert isinstance(raised.value, (KvpoolError, TypeError, OverflowError))
    scene.pool.check()
    scene.other.check()
    assert scene.state() == before


def test_an_error_names_the_block(scene: Scene) -> None:
    for call in (
        lambda: scene.pool.free_blocks([scene.pool.blocks[3], scene.pool.blocks[11]]),
        lambda: scene.pool.free_ids(ids(3, 11)),
        lambda: scene.pool.cache_full_blocks(REQUEST, [scene.pool.blocks[11]] * 2, 0, 2, 4, 0),
    ):
        with pytest.raises(BlockStateError, match=r"\b11\b"):
            call()
    for call in (lambda: scene.pool.free_ids(ids(3, 123)), lambda: scene.pool.evict_blocks([123])):
        with pytest.raises(BlockStateError, match=r"\b123\b"):
            call()


def test_a_double_free_in_two_calls(scene: Scene) -> None:
    block = scene.pool.blocks[3]
    scene.pool.free_blocks([block])
    before = scene.state()
    with pytest.raises(BlockStateError):
        scene.pool.free_blocks([block])
    assert scene.state() == before
    assert block_ids(scene.pool.get_new_blocks(2)) == [3, 8]


def test_ids_are_not_cached_with_events_on(scene: Scene) -> None:
    if scene.pool.enable_kv_cache_events:
        with pytest.raises(KvpoolError, match="cache_full_blocks"):
            scene.pool.cache_ids(OTHER.block_hashes[1:2], ids(3), 0)
        assert scene.pool.blocks[3].block_hash is None
    else:
        scene.pool.cache_ids(OTHER.block_hashes[1:2], ids(3), 0)
        assert scene.pool.blocks[3].block_hash == lookup_key(OTHER.block_hashes[1])


# on_invalid_free="warn"


def test_invalid_frees_can_be_skipped_logged_and_counted(make_pool: Any, backend: Any, caplog: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    a, b = pool.get_new_blocks(2)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool.free_blocks([a, a, pool.null_block, backend.KVCacheBlock(9, 1), b, pool.blocks[4]])
    assert free_ids(pool) == [1, 2, 3, 4]
    assert [block.ref_cnt for block in pool.blocks] == [0] * 5
    assert pool.stats.invalid_frees == 3
    assert len(caplog.records) == 3
    assert "block_id=1" in caplog.text and "block_id=9" in caplog.text and "block_id=4" in caplog.text


def test_invalid_frees_of_ids_can_be_skipped(make_pool: Any, caplog: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    pool.get_new_blocks(2)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool.free_ids(ids(2, 2, 1, 3))
    assert free_ids(pool) == [2, 1, 3, 4]
    assert pool.stats.invalid_frees == 2


def test_what_is_no_block_is_refused_whatever_the_policy(make_pool: Any) -> None:
    pool = make_pool(5, on_invalid_free="warn")
    a = pool.get_new_blocks(1)[0]
    before = state_of(pool)
    with pytest.raises(TypeError):
        pool.free_blocks([a, None])
    with pytest.raises(TypeError):
        pool.free_blocks([a, a, None])
    assert state_of(pool) == before


@pytest.mark.parametrize("policies", [("warn", "raise"), ("raise", "warn")])
def test_each_pool_follows_its_own_policy(make_pool: Any, policies: tuple[str, str]) -> None:
    """A block that another pool owns is that pool's to refuse; whoever refuses, neither pool has changed."""
    one, other = make_pool(5, on_invalid_free=policies[0]), make_pool(5, on_invalid_free=policies[1])
    mine, theirs = one.get_new_blocks(1)[0], other.get_new_blocks(1)[0]
    before = state_of(one), state_of(other)
    offender = theirs if policies[1] == "raise" else mine
    with pytest.raises(BlockStateError):
        one.free_blocks([mine, theirs, offender])
    assert (state_of(one), state_of(other)) == before
    offender = mine if policies[0] == "warn" else theirs
    one.free_blocks([mine, theirs, offender])
    assert free_ids(one) == free_ids(other) == [1, 2, 3, 4]
    assert (one.stats.invalid_frees, other.stats.invalid_frees) == ((1, 0) if policies[0] == "warn" else (0, 1))
