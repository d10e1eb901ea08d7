"""Random histories: the pools of both backends and a naive model in step, compared after each call.

KVPOOL_HYPOTHESIS_PROFILE=thorough runs many more and longer histories.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from conftest import BACKEND_NAMES, make_backend
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_pool import NaivePool, Refused
from pool_state import block_ids, event_fields, state_of
from token_requests import TokenRequest, lookup_key

from kvpool.errors import KvpoolError

NUM_BLOCKS = 8
HASH_SIZE = 2
BLOCK_SIZES = {0: 2, 1: 4}  # by group id

ids_in_pool = st.integers(0, NUM_BLOCKS - 1)


few_ids = st.lists(ids_in_pool, max_size=6)
# Two tokens and at most five hashes: equal prefixes, and so equal keys, are common.
requests = st.lists(st.integers(0, 1), min_size=HASH_SIZE, max_size=10).map(lambda t: TokenRequest(t, HASH_SIZE))
groups = st.sampled_from([0, 1])


def model_event(event: Any) -> tuple[Any, ...]:
    """An event with the fields that the model tells."""
    name, *fields = event_fields(event)
    values = dict(fields)
    if name == "BlockStored":
        assert values["medium"] == "GPU" and values["lora_name"] is None and values["session_id"] is None
        wanted = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "group_idx")
    else:
        wanted = ("block_hashes", "group_idx") if name == "BlockRemoved" else ()
    return (name, *(values[field] for field in wanted))


class PoolsInStep(RuleBasedStateMachine):
    """`make_pools` gives the pools to compare with the model; subclasses may break them to see that it is noticed."""

    @staticmethod
    def make_pools(*args: Any, **kwargs: Any) -> list[Any]:
        return [make_backend(name).BlockPool(*args, **kwargs) for name in BACKEND_NAMES]

    @initialize(caching=st.sampled_from([True, True, True, False]), events=st.booleans(), uncached_first=st.booleans())
    def start(self, caching: bool, events: bool, uncached_first: bool) -> None:
        self.pools = self.make_pools(NUM_BLOCKS, caching, HASH_SIZE, events, uncached_first=uncached_first)
        self.model = NaivePool(NUM_BLOCKS, caching, HASH_SIZE, events, uncached_first)
        self.keys: set[bytes] = set()
        self.model_calls: list[int] = []
        self.pool_calls: list[list[int]] = [[] for _ in self.pools]

    def both(self, on_model: Callable[[NaivePool], Any], on_pool: Callable[[Any], Any]) -> Any:
        """Do the same to the model and to each pool: the same result, or the same refusal."""
        try:
            expected, error = on_model(self.model), None
        except Refused as refused:
            expected, error = None, refused.error
        for pool in self.pools:
            try:
                result = on_pool(pool)
            except KvpoolError as raised:
                assert error is not None, f"{pool!r} refused: {raised!r}"
                assert isinstance(raised, error), f"{pool!r} raised {raised!r}, not {error}"
            else:
                assert error is None, f"{pool!r} did not raise {error}"
                assert result == expected, f"{pool!r} returned {result!r}, not {expected!r}"
        return expected

    # Allocation and references

    @rule(n=st.integers(-1, NUM_BLOCKS), by_id=st.booleans())
    def allocate(self, n: int, by_id: bool) -> None:
        call = (lambda p: p.allocate_ids(n).tolist()) if by_id else (lambda p: block_ids(p.get_new_blocks(n)))
        self.both(lambda m: m.allocate(n), call)

    @rule(ids=few_ids, prepend=st.booleans(), by_id=st.booleans())
    def free_any(self, ids: list[int], prepend: bool, by_id: bool) -> None:
        self.free(ids, prepend, by_id)

    @rule(data=st.data(), prepend=st.booleans(), by_id=st.booleans())
    def free_some_used(self, data: Any, prepend: bool, by_id: bool) -> None:
        references = [i for i, count in enumerate(self.model.refs) for _ in range(count)]
        ids = data.draw(st.permutations(references))[: data.draw(st.integers(0, len(references)))]
        self.free(ids, prepend, by_id)

    @rule()
    def free_all(self) -> None:
        self.free([i for i, count in enumerate(self.model.refs) for _ in range(count)][::-1], False, False)

    def free(self, ids: list[int], prepend: bool, by_id: bool) -> None:
        if by_id:
            self.both(lambda m: m.give_back(ids, prepend), lambda p: p.free_ids(array("i", ids), prepend))
        else:
            self.both(lambda m: m.give_back(ids, prepend), lambda p: p.free_blocks([p.blocks[i] for i in ids], prepend))

    @rule(ids=few_ids, by_id=st.booleans())
    def touch(self, ids: list[int], by_id: bool) -> None:
        call = (lambda p: p.touch_ids(array("i", ids))) if by_id else (lambda p: p.touch([p.blocks[i] for i in ids]))
        self.both(lambda m: m.touch(ids), call)

    @rule(stray=st.sampled_from([-1, NUM_BLOCKS, 2**31 - 1]), ids=few_ids, call=st.sampled_from(["free", "touch"]))
    def stray_ids(self, stray: int, ids: list[int], call: str) -> None:
        batch = [*ids, stray]
        if call == "free":
            self.both(lambda m: m.give_back(batch, False), lambda p: p.free_ids(array("i", batch)))
        else:
            self.both(lambda m: m.touch(batch), lambda p: p.touch_ids(array("i", batch)))

    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        used = [i for i, count in enumerate(self.model.refs) if count] or [0]
        ids = data.draw(st.lists(st.sampled_from(used), max_size=3))
        calls = iter(self.pool_calls)

        def on_pool(pool: Any) -> None:
            called = next(calls)
            pool.unpin_blocks([pool.blocks[i] for i in ids], lambda block: called.append(block.block_id))

        self.both(lambda m: m.unpin(ids, self.model_calls.append), on_pool)

    # Hashes

    @rule(request=requests, group=groups, data=st.data())
    def cache_full(self, request: TokenRequest, group: int, data: Any) -> None:
        size = BLOCK_SIZES[group]
        self.remember(request)
        num_blocks = len(request.all_token_ids) // size
        ids = data.draw(st.lists(ids_in_pool, min_size=num_blocks, max_size=num_blocks), "ids")
        past = data.draw(st.integers(0, num_blocks), "num_full_blocks")
        first = data.draw(st.integers(0, past), "num_cached_blocks")
        n = past - first
        mask = data.draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n), "mask")
        self.both(
            lambda m: m.cache_full(request, ids, first, past, size, group, mask),
            lambda p: p.cache_full_blocks(request, [p.blocks[i] for i in ids], first, past, size, group, mask),
        )

    @rule(request=requests, group=groups)
    def run_a_request(self, request: TokenRequest, group: int) -> None:
        """What a cache manager does: hit a prefix, allocate the rest, cache it. The blocks stay in use."""
        size = BLOCK_SIZES[group]
        self.remember(request)
        digests = self.model.digests_of(request, size)
        hits = self.find(digests, group, None)
        if any(self.model.is_detached(i) for i in hits) or len(set(hits)) < len(hits):
            return
        self.touch(hits, by_id=False)
        new = self.both(
            lambda m: m.allocate(len(digests) - len(hits)),
            lambda p: block_ids(p.get_new_blocks(len(digests) - len(hits))),
        )
        if new is None:
            self.free(hits, False, False)
            return
        ids = hits + new
        self.both(
            lambda m: m.cache_full(request, ids, len(hits), len(ids), size, group, None),
            lambda p: p.cache_full_blocks(request, [p.blocks[i] for i in ids], len(hits), len(ids), size, group),
        )

    @rule(request=requests, block=ids_in_pool, group=groups, num_tokens=st.integers(0, 11), replace=st.booleans())
    def cache_partial(self, request: TokenRequest, block: int, group: int, num_tokens: int, replace: bool) -> None:
        self.remember(request)
        self.both(
            lambda m: m.cache_partial(request, block, num_tokens, group, replace),
            lambda p: p.cache_partial_block(
                request, p.blocks[block], num_tokens, group, BLOCK_SIZES[group], replace_existing_hashes=replace
            ),
        )

    @rule(request=requests, data=st.data(), group=groups)
    def cache_ids(self, request: TokenRequest, data: Any, group: int) -> None:
        self.remember(request)
        n = data.draw(st.integers(0, len(request.block_hashes)))
        ids = data.draw(st.lists(ids_in_pool, min_size=n, max_size=n))
        digests = request.block_hashes[:n]
        self.both(lambda m: m.cache_ids(digests, ids, group), lambda p: p.cache_ids(digests, array("i", ids), group))

    @rule(request=requests, group=groups, limit=st.none() | st.integers(0, 5))
    def find_prefix(self, request: TokenRequest, group: int, limit: int | None) -> None:
        self.find(request.block_hashes, group, limit)

    def find(self, digests: list[bytes], group: int, limit: int | None) -> Any:
        return self.both(
            lambda m: m.find_prefix(digests, group, limit),
            lambda p: p.find_prefix_ids(digests, group, limit).tolist(),
        )

    @rule(request=requests, asked=st.sampled_from([[0], [1], [0, 1], []]))
    def get_cached(self, request: TokenRequest, asked: list[int]) -> None:
        digest = request.block_hashes[-1]

        def on_model(model: NaivePool) -> list[int] | None:
            found = [model.find(digest, group) for group in asked]
            return None if None in found else found

        self.both(on_model, lambda p: block_ids(p.get_cached_block(digest, asked)))

    @rule(source=ids_in_pool, copy=ids_in_pool)
    def move_hashes(self, source: int, copy: int) -> None:
        self.both(lambda m: m.move(source, copy), lambda p: p.move_block_hashes(p.blocks[source], p.blocks[copy]))

    @rule(ids=st.lists(st.integers(-1, NUM_BLOCKS), max_size=3))
    def evict(self, ids: list[int]) -> None:
        self.both(lambda m: m.evict(ids), lambda p: p.evict_blocks(ids))

    @rule()
    def reset(self) -> None:
        self.both(lambda m: m.reset(), lambda p: p.reset_prefix_cache())

    # By hand, as code outside does it

    @rule(block=ids_in_pool)
    def unlink(self, block: int) -> None:
        self.both(lambda m: m.unlink(block), lambda p: p.free_block_queue.remove(p.blocks[block]))

    @rule(n=st.integers(0, 3))
    def pop_free(self, n: int) -> None:
        self.both(lambda m: m.pop_free(n), lambda p: block_ids(p.free_block_queue.popleft_n(n)))

    @rule(data=st.data(), at_head=st.booleans())
    def link(self, data: Any, at_head: bool) -> None:
        ids = data.draw(st.permutations([i for i in range(NUM_BLOCKS) if self.model.is_detached(i)]))
        ids += data.draw(st.lists(ids_in_pool, max_size=1))
        name = "prepend_n" if at_head else "append_n"
        self.both(
            lambda m: m.link(ids, at_head), lambda p: getattr(p.free_block_queue, name)([p.blocks[i] for i in ids])
        )

    @precondition(lambda self: any(self.model.is_detached(i) for i in range(NUM_BLOCKS)))
    @rule()
    def link_all_detached(self) -> None:
        ids = [i for i in range(NUM_BLOCKS) if self.model.is_detached(i)]
        self.both(lambda m: m.link(ids, False), lambda p: p.free_block_queue.append_n([p.blocks[i] for i in ids]))

    @rule(block=ids_in_pool, value=st.integers(-1, 3))
    def set_ref_cnt(self, block: int, value: int) -> None:
        self.both(lambda m: m.set_ref_cnt(block, value), lambda p: setattr(p.blocks[block], "ref_cnt", value))

    @rule(block=ids_in_pool, request=requests, num_tokens=st.none() | st.integers(1, 10))
    def set_hash(self, block: int, request: TokenRequest, num_tokens: int | None) -> None:
        self.remember(request)
        key = lookup_key(request.block_hashes[-1])
        if block not in self.model.index.get(key, []):
            self.both(
                lambda m: m.set_hash(block, key, num_tokens), lambda p: p.blocks[block].set_block_hash(key, num_tokens)
            )

    @rule(block=ids_in_pool)
    def reset_hash(self, block: int) -> None:
        self.both(lambda m: m.reset_hash(block), lambda p: p.blocks[block].reset_hash())

    @rule(block=ids_in_pool, request=requests, group=groups)
    def map_insert(self, block: int, request: TokenRequest, group: int) -> None:
        self.remember(request)
        key = lookup_key(request.block_hashes[-1], group)
        self.both(
            lambda m: m.map_insert(key, block), lambda p: p.cached_block_hash_to_block.insert(key, p.blocks[block])
        )

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), block=ids_in_pool)
    def map_pop(self, data: Any, block: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))

        def on_pool(pool: Any) -> int | None:
            popped = pool.cached_block_hash_to_block.pop(key, block)
            return None if popped is None else popped.block_id

        self.both(lambda m: m.map_pop(key, block), on_pool)

    # Comparison

    def remember(self, request: TokenRequest) -> None:
        self.keys |= {lookup_key(digest, group) for digest in request.block_hashes for group in BLOCK_SIZES}

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "pools"):
            return
        model = self.model
        for pool, calls in zip(self.pools, self.pool_calls):
            pool.check()
            state = state_of(pool, self.keys)
            assert state["free"] == model.free == state["backwards"][::-1]
            assert state["num_free"] == len(model.free)
            assert state["ref_cnt"] == model.refs
            hashes = [model.primary.get(i, (None, None)) for i in range(NUM_BLOCKS)]
            assert list(zip(state["hash"], state["num_tokens"])) == hashes
            assert state["secondary"] == {i: set(keys) for i, keys in model.secondary.items()}
            lookups = {key: (ids[0], sorted(ids)) for key, ids in model.index.items()}
            assert state["lookups"] == lookups
            for key in self.keys:
                found = model.index.get(key, [])[:1]
                digest, group = key[:-4], int.from_bytes(key[-4:], "big")
                assert pool.get_cached_block(digest, [group]) == ([pool.blocks[i] for i in found] or None)
                assert pool.find_prefix_ids([digest], group).tolist() == found
            assert state["num_keys"] == len(model.index)
            assert state["stats"] == (model.evictions, 0)
            assert state["watched"] == list(model.watchers)
            assert [model_event(event) for event in pool.take_events()] == model.events
            assert calls == self.model_calls
            assert pool.num_evictable_blocks == sum(i in model.primary or i in model.secondary for i in model.free)
        model.events.clear()
