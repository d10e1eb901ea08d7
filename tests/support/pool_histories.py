"""Random histories of valid calls on vLLM's own BlockPool, the native one and the reference: the same blocks, the same
state and the same events after each call.

vLLM keeps the secondary hashes of a block in a set, whose order is none; here it is given an ordered one.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest
from pool_state import CallLog, block_ids, event_fields, state_of
from token_requests import Lora, Picture, TokenRequest, lookup_key

NUM_STEPS = 60
HASH_SIZE = 2
BLOCK_SIZES = {0: 2, 1: 4, 2: 8}  # by group id


class OrderedSet(dict):
    def add(self, item: Any) -> None:
        self[item] = None


class OrderedSets(dict):
    """A dict of sets that remember the order of insertion."""

    def setdefault(self, key: Any, default: Any) -> Any:
        assert default == set()
        return super().setdefault(key, OrderedSet())


@pytest.fixture(autouse=True)
def quiet() -> Any:
    names = ("kvpool", "vllm.v1.core.block_pool")
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)


class Sequence:
    def __init__(self, request: TokenRequest, group: int, table: list[int], num_cached: int) -> None:
        self.request, self.group, self.table, self.num_cached = request, group, table, num_cached


class History:
    """One random history; the first pool is vLLM's, and what it does is right.

    Args:
        others: the classes of the other pools by name.
    """

    def __init__(self, vllm_pool_class: Any, seed: int, others: dict[str, Any]) -> None:
        self.names = list(others)
        self.rng = rng = random.Random(seed)
        size, caching, events, watched = rng.randint(6, 30), rng.random() < 0.9, rng.random() < 0.7, rng.random() < 0.3
        self.pools, self.logs = [], []
        for make in (vllm_pool_class, *others.values()):
            self.logs.append(CallLog())
            collector = self.logs[-1] if watched else None
            self.pools.append(make(size, caching, HASH_SIZE, events, collector, medium="CPU"))
        self.pools[0].cached_block_hashes_by_block = OrderedSets()
        self.told: list[list[int]] = [[] for _ in self.pools]
        self.running: list[Sequence] = []
        self.keys: set[bytes] = set()
        self.families = [[rng.randrange(2) for _ in range(40)] for _ in range(3)]
        self.seen: Counter[str] = Counter()

    def all(self, call: Any) -> Any:
        """Do the same to every pool; the results (plain values, or the class of a ValueError) must be the same."""
        results = []
        for place, pool in enumerate(self.pools):
            try:
                results.append(call(pool, place))
            except ValueError as error:
                results.append(str(error))
        assert all(result == results[0] for result in results[1:]), results
        return results[0]

    def run(self) -> None:
        actions = (
            self.arrive,
            self.grow,
            self.finish,
            self.partial,
            self.sparse,
            self.unpin,
            self.move,
            self.evict,
            self.reset,
            self.share,
            self.too_many,
            self.published,
            self.by_hand,
        )
        weights = (6, 6, 4, 4, 1, 1, 1, 0.7, 0.7, 1, 0.3, 0.5, 0.3)
        for _ in range(NUM_STEPS):
            self.rng.choices(actions, weights)[0]()
            self.compare()

    def told_of(self, place: int) -> list[tuple[str, int]]:
        """What a pool has told its collector. No collector knows the null block: vLLM tells of its uses up to 0.32,
        and from 0.33 on, whose pools have lookahead, no more."""
        calls = self.logs[place].calls
        if hasattr(self.pools[0], "num_hash_lookahead_tokens"):
            return [call for call in calls if call != ("accessed", 0)]
        return calls

    def compare(self) -> None:
        states, events = [], []
        for pool in self.pools:
            state = state_of(pool, self.keys)
            del state["stats"]
            state["ref_cnt"][0] = 0  # vLLM's null block drifts
            states.append(state)
            events.append([event_fields(event) for event in pool.take_events()])
        for pool in self.pools[1:]:
            pool.check()
        for place, name in enumerate(self.names, start=1):
            assert states[place] == states[0], name
            assert events[place] == events[0], name
            assert self.told_of(place) == self.told_of(0), name
            assert self.told[place] == self.told[0], name
        self.seen["secondary hashes"] += bool(states[0]["secondary"])
        self.seen["copies"] += any(len(ids) > 1 for _, ids in states[0]["lookups"].values())
        self.seen["evictions"] = self.pools[1].stats.evictions
        self.seen["reused unpinned blocks"] = len(self.told[0])
        self.seen["resets"] += ("AllBlocksCleared",) in events[0]
        self.seen["promotions"] += [event[0] for event in events[0][:2]] == ["BlockRemoved", "BlockStored"]
        self.seen["collector calls"] = len(self.logs[0].calls)

    # Requests

    def make_request(self) -> TokenRequest:
        rng = self.rng
        tokens = rng.choice(self.families)[: rng.randint(1, 40)]
        attributes: dict[str, Any] = {}
        if rng.random() < 0.2:
            attributes = {"lora_request": Lora(rng.choice("ab"), 3), "cache_salt": "salt", "session_id": "chat"}
        elif rng.random() < 0.2:
            attributes = {"mm_features": [Picture("cat", 1, 3), Picture("dog", 4, 9)]}
        request = TokenRequest(tokens, HASH_SIZE, **attributes)
        self.keys |= {lookup_key(digest, group) for digest in request.block_hashes for group in BLOCK_SIZES}
        return request

    def arrive(self) -> None:
        request, group = self.make_request(), self.rng.choice(list(BLOCK_SIZES))
        size = BLOCK_SIZES[group]
        scale = size // HASH_SIZE
        digests = request.block_hashes[scale - 1 :: scale][: (len(request.all_token_ids) - 1) // size]
        hits: list[int] = []
        for digest in digests:
            found = self.all(lambda pool, _, digest=digest: block_ids(pool.get_cached_block(digest, [group])))
            if found is None:
                break
            hits += found
        if len(set(hits)) < len(hits):
            return
        self.all(lambda pool, _: pool.touch([pool.blocks[i] for i in hits]))
        num_new = -(-len(request.all_token_ids) // size) - len(hits)
        new = self.all(lambda pool, _: block_ids(pool.get_new_blocks(num_new)))
        if isinstance(new, str):
            self.all(lambda pool, _: pool.free_blocks([pool.blocks[i] for i in hits[::-1]]))
            return
        sequence = Sequence(request, group, hits + new, len(hits))
        self.running.append(sequence)
        self.cache(sequence)

    def cache(self, sequence: Sequence) -> None:
        if not self.pools[0].enable_caching:
            return  # as vLLM's managers: hashes would stay on reused blocks
        size = BLOCK_SIZES[sequence.group]
        num_full = len(sequence.request.all_token_ids) // size
        self.all(
            lambda pool, _: pool.cache_full_blocks(
                sequence.request,
                [pool.blocks[i] for i in sequence.table],
                sequence.num_cached,
                num_full,
                size,
                sequence.group,
            )
        )
        sequence.num_cached = max(sequence.num_cached, num_full)

    def grow(self) -> None:
        if not self.running:
            return
        sequence = self.rng.choice(self.running)
        size = BLOCK_SIZES[sequence.group]
        tokens = sequence.request.all_token_ids + [self.rng.randrange(2) for _ in range(self.rng.randint(1, 5))]
        num_new = -(-len(tokens) // size) - len(sequence.table)
        new = self.all(lambda pool, _: block_ids(pool.get_new_blocks(max(num_new, 0))))
        if isinstance(new, str):
            return
        old = vars(sequence.request)
        kept = {name: old[name] for name in ("mm_features", "lora_request", "cache_salt", "session_id")}
        sequence.request = TokenRequest(tokens, HASH_SIZE, **kept)
        self.keys |= {lookup_key(digest, sequence.group) for digest in sequence.request.block_hashes}
        sequence.table += new
        self.cache(sequence)

    def finish(self) -> None:
        if self.running:
            sequence = self.running.pop(self.rng.randrange(len(self.running)))
            ids = (
                sequence.table[::-1]
                if self.rng.random() < 0.8
                else self.rng.sample(sequence.table, len(sequence.table))
            )
            self.all(lambda pool, _: pool.free_blocks(pool.blocks[i] for i in ids))

    # Single calls

    def partial(self) -> None:
        if not self.running or not self.pools[0].enable_caching:
            return
        sequence = self.rng.choice(self.running)
        size, num_hashes = BLOCK_SIZES[sequence.group], len(sequence.request.block_hashes)
        if num_hashes == 0:
            return
        num_tokens = self.rng.randint(1, num_hashes) * HASH_SIZE
        block = sequence.table[(num_tokens - 1) // size]
        replace = self.rng.random() < 0.15
        self.all(
            lambda pool, _: pool.cache_partial_block(
                sequence.request, pool.blocks[block], num_tokens, sequence.group, size, replace_existing_hashes=replace
            )
        )

    def sparse(self) -> None:
        """Blocks of a sliding window: some are null, some are masked out."""
        if not self.pools[0].enable_caching:
            return
        request = self.make_request()
        num_full = len(request.all_token_ids) // 4
        new = self.all(lambda pool, _: block_ids(pool.get_new_blocks(num_full)))
        if isinstance(new, str):
            return
        table = [0 if self.rng.random() < 0.3 else i for i in new]
        first = self.rng.randint(0, num_full)
        mask = [self.rng.random() < 0.7 for _ in range(num_full - first)] if self.rng.random() < 0.5 else None
        self.all(
            lambda pool, _: pool.cache_full_blocks(
                request, [pool.blocks[i] for i in table], first, num_full, 4, 1, block_mask=mask
            )
        )
        # Null entries reach free_blocks as well.
        ids = new + [i for i in table if i == 0]
        self.rng.shuffle(ids)
        self.all(lambda pool, _: pool.free_blocks([pool.blocks[i] for i in ids]))

    def unpin(self) -> None:
        if self.running:
            sequence = self.running.pop()
            ids = sequence.table[:]
            self.all(
                lambda pool, place: pool.unpin_blocks(
                    [pool.blocks[i] for i in ids], lambda block: self.told[place].append(block.block_id)
                )
            )

    def move(self) -> None:
        if not self.running:
            return
        source = self.rng.choice(self.running).table[-1]
        new = self.all(lambda pool, _: block_ids(pool.get_new_blocks(1)))
        if isinstance(new, str) or self.pools[0].blocks[new[0]].block_hash is not None:
            return
        self.all(lambda pool, _: pool.move_block_hashes(pool.blocks[source], pool.blocks[new[0]]))
        self.all(lambda pool, _: pool.free_blocks([pool.blocks[new[0]]]))

    def evict(self) -> None:
        ids = self.rng.sample(range(1, self.pools[0].num_gpu_blocks), 3)
        self.all(lambda pool, _: pool.evict_blocks(ids))

    def reset(self) -> None:
        if self.rng.random() < 0.5:
            while self.running:
                self.finish()
        self.all(lambda pool, _: pool.reset_prefix_cache())
        if not isinstance(self.pools[0].cached_block_hashes_by_block, OrderedSets):
            self.pools[0].cached_block_hashes_by_block = OrderedSets()

    def share(self) -> None:
        """A reference more and one less, of blocks used and free, the null block among them."""
        ids = self.rng.sample(range(self.pools[0].num_gpu_blocks), 3)
        self.all(lambda pool, _: pool.touch([pool.blocks[i] for i in ids]))
        self.all(lambda pool, _: [pool.is_block_writable(block) for block in pool.blocks])
        self.all(lambda pool, _: pool.free_blocks([pool.blocks[i] for i in ids[::-1]]))

    def too_many(self) -> None:
        n = self.pools[0].get_num_free_blocks() + self.rng.randint(1, 3)
        message = self.all(lambda pool, _: block_ids(pool.get_new_blocks(n)))
        assert message == f"Cannot get {n} free blocks from the pool"

    def published(self) -> None:
        request = self.make_request()
        num_blocks = len(request.all_token_ids) // 4
        self.all(lambda pool, _: pool.emit_cached_block_events(request, num_blocks, 4, 1))

    def by_hand(self) -> None:
        """The free list's own calls, as code outside of the pool uses them."""
        if self.pools[0].get_num_free_blocks() < 3:
            return
        ids = self.all(lambda pool, _: block_ids(pool.free_block_queue.popleft_n(2)))
        last = self.all(lambda pool, _: pool.free_block_queue.get_all_free_blocks()[-1].block_id)
        self.all(lambda pool, _: pool.free_block_queue.remove(pool.blocks[last]))
        self.all(lambda pool, _: pool.free_block_queue.append(pool.blocks[ids[0]]))
        self.all(lambda pool, _: pool.free_block_queue.prepend_n([pool.blocks[last], pool.blocks[ids[1]]]))
