"""Histories of calls on a BlockPool, its blocks, queue and map: native and twin must answer alike, and stay sound."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pool_state import state_of
from token_requests import TokenRequest

import kvpool
from fuzz.decisions import Decisions
from fuzz.pairs import Call, call_both
from fuzz.values import Maker, any_id_array, any_int, any_sequence, constant, junk, raises
from kvpool import reference

BACKENDS = {
    name: SimpleNamespace(name=name, BlockPool=module.BlockPool, KVCacheBlock=module.KVCacheBlock)
    for name, module in (("native", kvpool), ("twin", reference))
}
NUM_BLOCKS = 12
HASH_BLOCK_SIZE = 4
MAX_STEPS = 60
REQUESTS = [TokenRequest(range(start, start + 24)) for start in (0, 0, 100)]
REQUESTS[1] = TokenRequest([*range(8), *range(50, 66)])
DIGESTS = sorted({digest for request in REQUESTS for digest in request.block_hashes})
KEYS = [digest + group.to_bytes(4, "big") for digest in DIGESTS for group in (0, 1)]


class Collector:
    """A metrics collector that now and then does something."""

    def __init__(self, half: Half, action: Maker | None) -> None:
        self.half, self.action = half, action

    def tell(self, *arguments: Any) -> None:
        if self.action is not None:
            self.action(self.half)

    on_block_allocated = on_block_accessed = on_block_evicted = reset = tell


class Half:
    def __init__(self, name: str, num_blocks: int, options: dict[str, Any], observer: Maker | None) -> None:
        self.backend = BACKENDS[name]
        self.disturbed = False
        self.depth = 0
        collector = None if observer is None else Collector(self, observer)
        self.pool: Any = self.backend.BlockPool(
            num_blocks, options.pop("enable_caching"), HASH_BLOCK_SIZE, options.pop("events"), collector, **options
        )
        self.other: Any = self.backend.BlockPool(4, True, HASH_BLOCK_SIZE)
        self.stranger = self.other.get_new_blocks(1)[0]
        self.calls: list[int] = []

    def block(self, block_id: int) -> Any:
        return self.pool.blocks[block_id]

    def check(self) -> None:
        self.pool.check()
        self.other.check()


def state(half: Half) -> Any:
    return state_of(half.pool, KEYS), half.calls, half.pool.num_evictable_blocks, half.other.get_num_free_blocks()


def an_action(d: Decisions) -> Maker:
    """What a callback does to the pool it is called from."""
    which, block_id = d.below(7), 1 + d.below(NUM_BLOCKS - 1)

    def act(half: Half) -> None:
        half.disturbed = True
        if half.depth > 2:
            return
        half.depth += 1
        pool = half.pool
        try:
            if which == 0:
                pool.get_new_blocks(1)
            elif which == 1:
                pool.free_blocks([pool.blocks[block_id]])
            elif which == 2:
                pool.reset_prefix_cache()
            elif which == 3:
                pool.touch([pool.blocks[block_id]])
            elif which == 4:
                pool.evict_blocks([block_id])
            elif which == 5:
                pool.cache_full_blocks(REQUESTS[0], [pool.blocks[block_id]], 0, 1, HASH_BLOCK_SIZE, 0)
            else:
                raises(half)
        except kvpool.KvpoolError:
            pass
        finally:
            half.depth -= 1

    return act


def a_block(d: Decisions) -> Maker:
    how = d.byte()
    if how >= 244:
        return junk(d)
    block_id = how % NUM_BLOCKS
    return lambda half: half.block(block_id)


def blocks(d: Decisions, most: int = 6) -> Maker:
    return any_sequence(d, [a_block(d) for _ in range(d.below(most))], an_action(d))


def ids(d: Decisions) -> Maker:
    numbers = [
        d.below(NUM_BLOCKS) if d.byte() < 240 else d.choose([-1, 99, 2**31 - 1, -(2**31)]) for _ in range(d.below(6))
    ]
    return any_id_array(d, numbers)


def a_digest(d: Decisions) -> Maker:
    how = d.byte()
    if how < 230:
        return constant(d.choose(DIGESTS))
    d.num_hostile += 1
    strange: list[Any] = [b"", b"x" * 33, "x" * 32, None, bytearray(32)]
    return constant(d.choose(strange)) if d.chance(70) else junk(d)


def a_key(d: Decisions) -> Maker:
    how = d.byte()
    if how < 236:
        return constant(d.choose(KEYS))
    d.num_hostile += 1
    strange: list[Any] = [b"", b"x" * 40, "key", b"abc", None]
    return constant(d.choose(strange)) if d.chance(70) else junk(d)


def digests(d: Decisions) -> Maker:
    if d.chance(60):
        request, n = d.choose(REQUESTS), d.below(7)
        return constant(request.block_hashes[:n])
    return any_sequence(d, [a_digest(d) for _ in range(d.below(6))], an_action(d))


def a_request(d: Decisions) -> Maker:
    return constant(d.choose(REQUESTS)) if d.byte() < 245 else junk(d)


def a_group(d: Decisions) -> Maker:
    return any_int(d, 0, 1, an_action(d))


# Calls. Each draws its arguments and returns what to do with a half.


def get_new_blocks(d: Decisions) -> Call:
    n = any_int(d, 0, NUM_BLOCKS // 2, an_action(d))
    return lambda half: half.pool.get_new_blocks(n(half))


def free_blocks(d: Decisions) -> Call:
    given, prepend = blocks(d), d.chance(30)
    return lambda half: half.pool.free_blocks(given(half), prepend)


def touch(d: Decisions) -> Call:
    given = blocks(d)
    return lambda half: half.pool.touch(given(half))


def allocate_ids(d: Decisions) -> Call:
    n = any_int(d, 0, 5, an_action(d))
    out = ids(d) if d.chance(30) else constant(None)
    return lambda half: half.pool.allocate_ids(n(half), out(half))


def free_ids(d: Decisions) -> Call:
    given, prepend = ids(d), d.chance(30)
    return lambda half: half.pool.free_ids(given(half), prepend)


def touch_ids(d: Decisions) -> Call:
    given = ids(d)
    return lambda half: half.pool.touch_ids(given(half))


def find_prefix_ids(d: Decisions) -> Call:
    hashes, group = digests(d), a_group(d)
    limit = any_int(d, 0, 6, an_action(d)) if d.chance(40) else constant(None)
    return lambda half: half.pool.find_prefix_ids(hashes(half), group(half), limit(half))


def cache_ids(d: Decisions) -> Call:
    request, n, group = d.choose(REQUESTS), d.below(5), a_group(d)
    if d.chance(80):
        hashes: Maker = constant(request.block_hashes[:n])
        given: Maker = any_id_array(d, [d.below(NUM_BLOCKS) for _ in range(n)])
    else:
        hashes, given = digests(d), ids(d)
    return lambda half: half.pool.cache_ids(hashes(half), given(half), group(half))


def get_cached_block(d: Decisions) -> Call:
    digest = a_digest(d)
    groups = any_sequence(d, [a_group(d) for _ in range(d.below(4))], an_action(d))
    return lambda half: half.pool.get_cached_block(digest(half), groups(half))


def cache_full_blocks(d: Decisions) -> Call:
    request, given, group = a_request(d), blocks(d, 7), a_group(d)
    first, last = any_int(d, 0, 2, an_action(d)), any_int(d, 0, 6, an_action(d))
    size = any_int(d, 1, 1, an_action(d))
    mask = any_sequence(d, [constant(d.chance(70)) for _ in range(d.below(6))], an_action(d)) if d.chance(20) else None

    def call(half: Half) -> Any:
        scale = size(half)
        scale = scale * HASH_BLOCK_SIZE if type(scale) is int else scale
        given_mask = None if mask is None else mask(half)
        return half.pool.cache_full_blocks(
            request(half), given(half), first(half), last(half), scale, group(half), given_mask
        )

    return call


def cache_partial_block(d: Decisions) -> Call:
    request, block, group, replaces = a_request(d), a_block(d), a_group(d), d.chance(20)
    tokens, size = any_int(d, 0, 7, an_action(d)), d.choose([4, 8, 8, 0, -4, 6])

    def call(half: Half) -> Any:
        n = tokens(half)
        n = n * HASH_BLOCK_SIZE if type(n) is int else n
        return half.pool.cache_partial_block(request(half), block(half), n, group(half), size, replaces)

    return call


def add_reference(d: Decisions) -> Call:
    block = a_block(d)
    return lambda half: half.pool.add_reference(block(half))


def move_block_hashes(d: Decisions) -> Call:
    source, target = a_block(d), a_block(d)
    return lambda half: half.pool.move_block_hashes(source(half), target(half))


def unpin_blocks(d: Decisions) -> Call:
    given = blocks(d)
    action = an_action(d) if d.chance(15) else None

    def call(half: Half) -> Any:
        def watcher(block: Any) -> None:
            half.calls.append(block.block_id)
            if action is not None:
                action(half)

        return half.pool.unpin_blocks(given(half), watcher)

    return call


def evict_blocks(d: Decisions) -> Call:
    given = any_sequence(d, [any_int(d, 0, NUM_BLOCKS - 1, an_action(d)) for _ in range(d.below(5))], an_action(d))
    return lambda half: half.pool.evict_blocks(given(half))


def reset_prefix_cache(d: Decisions) -> Call:
    return lambda half: half.pool.reset_prefix_cache()


def take_events(d: Decisions) -> Call:
    return lambda half: half.pool.take_events()


def block_attribute(d: Decisions) -> Call:
    block, which = a_block(d), d.below(6)
    count, key, tokens = any_int(d, 0, 3, an_action(d)), a_key(d), any_int(d, 0, 24, an_action(d))

    def call(half: Half) -> Any:
        target = block(half)
        if which == 0:
            target.ref_cnt = count(half)
        elif which == 1:
            return target.reset_hash()
        elif which == 2:
            return target.set_block_hash(key(half), tokens(half))
        elif which == 3:
            return target.prev_free_block, target.next_free_block
        elif which == 4:
            target.is_null = bool(count(half))
        else:
            return repr(target) if hasattr(type(target), "block_id") else None
        return None

    return call


def queue_call(d: Decisions) -> Call:
    which, block, given = d.below(7), a_block(d), blocks(d)
    n = any_int(d, 0, 4, an_action(d))

    def call(half: Half) -> Any:
        queue = half.pool.free_block_queue
        if which == 0:
            return queue.popleft()
        if which == 1:
            return queue.popleft_n(n(half))
        if which == 2:
            return queue.remove(block(half))
        if which == 3:
            return queue.append(block(half))
        if which == 4:
            return queue.append_n(given(half))
        if which == 5:
            return queue.prepend_n(given(half))
        return list(queue.iter_blocks_after(block(half)))

    return call


def map_call(d: Decisions) -> Call:
    which, key, block, block_id = d.below(5), a_key(d), a_block(d), any_int(d, 0, NUM_BLOCKS - 1, an_action(d))

    def call(half: Half) -> Any:
        hash_map = half.pool.cached_block_hash_to_block
        if which == 0:
            return hash_map.get_one_block(key(half))
        if which == 1:
            return hash_map.contain(key(half), block_id(half))
        if which == 2:
            return hash_map.insert(key(half), block(half))
        if which == 3:
            return hash_map.pop(key(half), block_id(half))
        return len(hash_map)

    return call


def views(d: Decisions) -> Call:
    which, index = d.below(5), any_int(d, 0, NUM_BLOCKS - 1, an_action(d))

    def call(half: Half) -> Any:
        pool = half.pool
        if which == 0:
            return pool.blocks[index(half)]
        if which == 1:
            return pool.cached_block_hashes_by_block[index(half)]
        if which == 2:
            return pool.is_block_writable(half.block(1))
        if which == 3:
            return pool.get_usage()
        return len(pool.blocks), len(pool.cached_block_hashes_by_block)

    return call


CALLS: list[Callable[[Decisions], Call]] = [
    *[get_new_blocks] * 4,
    *[free_blocks] * 4,
    *[touch] * 2,
    *[cache_full_blocks] * 4,
    *[cache_partial_block] * 2,
    *[allocate_ids, free_ids, touch_ids, find_prefix_ids, cache_ids] * 2,
    get_cached_block,
    move_block_hashes,
    add_reference,
    unpin_blocks,
    evict_blocks,
    reset_prefix_cache,
    take_events,
    block_attribute,
    queue_call,
    map_call,
    views,
]


def run(d: Decisions) -> None:
    options = d.byte()
    observer = an_action(d) if options & 0xC0 == 0xC0 else None
    settings: dict[str, Any] = {
        "enable_caching": options & 7 != 7,
        "events": options & 8 != 0,
        "on_invalid_free": "warn" if options & 0x30 == 0x30 else "raise",
        "uncached_first": d.below(4) != 0,
        "strict_partial": d.below(4) == 3,
        "dedup_events": d.below(4) == 3,
        "dense_events": d.below(4) == 3,
        "max_queued_events": 3 if d.below(8) == 7 else None,
    }
    if not settings["enable_caching"]:
        settings["events"] = False
    halves = [Half(name, NUM_BLOCKS, dict(settings), observer) for name in BACKENDS]
    for _ in range(MAX_STEPS):
        if d.is_empty:
            break
        d.num_hostile = 0
        make_call = d.choose(CALLS)
        call = make_call(d)
        if call_both(halves, call, make_call.__name__, state, d.num_hostile > 0) is None:
            # What a callback has done in the middle of a call need not come out alike: from here on for soundness only.
            for half in halves:
                half.disturbed = True
