"""What the pools are made to do, once for all implementations.

A workload owns one pool. A round is ``prepare()``, which is not timed and sets the stage or undoes the last round, and
``operate()``, which is timed and does nothing but the operation that the workload is named after. Rounds handle
thousands of blocks, so that the two clock readings and the call (about 100 ns a round) need no subtraction: nothing is
subtracted. ``check()`` asks the pool for its invariants where it can tell, and counts the free blocks.

All random choices are seeded. Methods are bound outside the loops and batches made before the clock starts, for every
implementation alike; every block has been handed out once before the first round, so that no pool pays for objects made
on first use.
"""

from __future__ import annotations

import functools
import gc
import random
import weakref
from abc import ABC, abstractmethod
from itertools import repeat
from typing import Any

from bench.implementations import HASH_BLOCK_SIZE, Implementation

SEED = 20_260_101
DIGEST_BYTES = 32  # sha256
GROUP = 0
BLOCKS_PER_ROUND = 4_096
BATCH = 256


@functools.lru_cache(maxsize=2)
def make_digests(count: int) -> list[bytes]:
    """``count`` different block hashes of the length of sha256. O(count)."""
    data = random.Random(SEED).randbytes(count * DIGEST_BYTES)
    return [data[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in range(count)]


class HashedRequest:
    """What ``cache_full_blocks`` reads of a request when events are off: its block hashes."""

    __slots__ = ("block_hashes",)

    def __init__(self, block_hashes: list[bytes]) -> None:
        self.block_hashes = block_hashes


class Workload(ABC):
    """One timed operation on one pool.

    Attributes:
        blocks_per_round: blocks that one ``operate()`` handles; times are divided by it.
    """

    pool: Any
    blocks_per_round: int

    @abstractmethod
    def operate(self) -> None:
        """The timed part."""

    def prepare(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Runs before each ``operate()``, not timed."""

    def check(self) -> None:
        """Raises if the pool is broken. O(num_blocks)."""
        if hasattr(self.pool, "check"):
            self.pool.check()
        expected = self.pool.num_gpu_blocks - 1 - self.num_held_blocks()
        if self.pool.get_num_free_blocks() != expected:
            raise AssertionError(f"{self.pool.get_num_free_blocks()} free blocks, {expected} expected")

    def num_held_blocks(self) -> int:
        """Blocks the workload has in use between rounds."""
        return 0


class GetAndFree(Workload):
    """get_new_blocks(batch) and free_blocks of the same list, over and over; the free list is in id order."""

    def __init__(
        self,
        implementation: Implementation,
        num_blocks: int,
        batch: int,
        enable_caching: bool = True,
        blocks_per_round: int = BLOCKS_PER_ROUND,
    ) -> None:
        self.pool = implementation.make_pool(num_blocks, enable_caching)
        self.pool.free_blocks(self.pool.get_new_blocks(num_blocks - 1))
        self.batch = batch
        self.repeats = max(1, blocks_per_round // batch)
        self.blocks_per_round = self.repeats * batch

    def operate(self) -> None:
        get, free, batch = self.pool.get_new_blocks, self.pool.free_blocks, self.batch
        for _ in repeat(None, self.repeats):
            free(get(batch))


class GetAndFreeIds(GetAndFree):
    """The same with allocate_ids and free_ids; vLLM, which has none, does it with get_new_blocks and free_blocks."""

    def operate(self) -> None:
        if not hasattr(self.pool, "allocate_ids"):
            super().operate()
            return
        get, free, batch = self.pool.allocate_ids, self.pool.free_ids, self.batch
        for _ in repeat(None, self.repeats):
            free(get(batch))


class ChurnedGetAndFree(Workload):
    """Half the pool is in use in batches of random ids, and the free list is in random order, as after a long run; each
    step frees the batch whose turn it is and gets a new one. Goes through the memory of half the pool."""

    def __init__(
        self, implementation: Implementation, num_blocks: int, batch: int, blocks_per_round: int = BLOCKS_PER_ROUND
    ) -> None:
        self.pool = implementation.make_pool(num_blocks)
        blocks = self.pool.get_new_blocks(num_blocks - 1)
        shuffler = random.Random(SEED)
        shuffler.shuffle(blocks)
        num_batches = max(1, len(blocks) // 2 // batch)
        self.held = [blocks[i * batch : (i + 1) * batch] for i in range(num_batches)]
        self.pool.free_blocks(blocks[num_batches * batch :])
        self.batch = batch
        self.repeats = max(1, blocks_per_round // batch)
        self.blocks_per_round = self.repeats * batch
        self.turn = 0
        self.turns = [0] * self.repeats

    def prepare(self) -> None:
        self.turns = [(self.turn + i) % len(self.held) for i in range(self.repeats)]
        self.turn = (self.turn + self.repeats) % len(self.held)

    def operate(self) -> None:
        get, free, batch, held = self.pool.get_new_blocks, self.pool.free_blocks, self.batch, self.held
        for i in self.turns:
            free(held[i])
            held[i] = get(batch)

    def num_held_blocks(self) -> int:
        return len(self.held) * self.batch


class CachedPoolWorkload(Workload):
    """A pool in which every block is cached and free, in batches in the order of the free list.

    Ids are shuffled, as after a long run, unless ``is_churned`` is false. A round works on the next
    ``batches_per_round`` batches, so that rounds go round the whole pool; with ``active_batches`` only so many batches
    are free and worked on, and the others stay cached and in use. What does not fill a batch stays in use, too.
    """

    def __init__(
        self,
        implementation: Implementation,
        num_blocks: int = BLOCKS_PER_ROUND + 1,
        batch: int = BATCH,
        *,
        batches_per_round: int | None = None,
        active_batches: int | None = None,
        is_churned: bool = True,
    ) -> None:
        self.pool = implementation.make_pool(num_blocks)
        blocks = self.pool.get_new_blocks(num_blocks - 1)
        if is_churned:
            random.Random(SEED).shuffle(blocks)
        num_batches = len(blocks) // batch
        digests = make_digests(num_batches * batch)
        self.batch = batch
        self.requests = [HashedRequest(digests[i * batch : (i + 1) * batch]) for i in range(num_batches)]
        self.batches = [blocks[i * batch : (i + 1) * batch] for i in range(num_batches)]
        for i in range(num_batches):
            self.cache(i)
        num_active = min(active_batches or num_batches, num_batches)
        self.num_unused = len(blocks) - num_active * batch
        del self.batches[num_active:], self.requests[num_active:]
        for active in self.batches:
            self.pool.free_blocks(active)
        self.batches_per_round = min(batches_per_round or BLOCKS_PER_ROUND // batch, num_active)
        self.blocks_per_round = self.batches_per_round * batch
        self.position = 0
        self.current: list[int] = []

    def cache(self, i: int) -> None:
        """Gives the blocks of batch i, all in use, their hashes."""
        self.pool.cache_full_blocks(self.requests[i], self.batches[i], 0, self.batch, HASH_BLOCK_SIZE, GROUP)

    def take(self, i: int) -> None:
        """Takes the next blocks of the free list, which are the ones of batch i."""
        self.batches[i] = self.pool.get_new_blocks(self.batch)

    def advance(self) -> list[int]:
        """Numbers of the batches of the next round."""
        count = len(self.batches)
        self.current = [(self.position + i) % count for i in range(self.batches_per_round)]
        self.position = (self.position + self.batches_per_round) % count
        return self.current

    def num_held_blocks(self) -> int:
        return self.num_unused


class EvictingGet(CachedPoolWorkload):
    """get_new_blocks of which every block is cached and has to lose its hash."""

    def prepare(self) -> None:
        for i in self.current:
            self.cache(i)
            self.pool.free_blocks(self.batches[i])
        self.advance()

    def operate(self) -> None:
        get, batch, batches = self.pool.get_new_blocks, self.batch, self.batches
        for i in self.current:
            batches[i] = get(batch)

    def num_held_blocks(self) -> int:
        return self.num_unused + len(self.current) * self.batch


class FreeOfCached(CachedPoolWorkload):
    """free_blocks of cached blocks, which go to the tail."""

    def prepare(self) -> None:
        for i in self.advance():
            self.pool.touch(self.batches[i])

    def operate(self) -> None:
        free, batches = self.pool.free_blocks, self.batches
        for i in self.current:
            free(batches[i])


class TouchOfFree(CachedPoolWorkload):
    """touch of cached blocks that nobody uses: each leaves the middle of the free list."""

    def prepare(self) -> None:
        for i in self.current:
            self.pool.free_blocks(self.batches[i])
        self.advance()

    def operate(self) -> None:
        touch, batches = self.pool.touch, self.batches
        for i in self.current:
            touch(batches[i])

    def num_held_blocks(self) -> int:
        return self.num_unused + len(self.current) * self.batch


class CacheFullBlocks(CachedPoolWorkload):
    """cache_full_blocks of blocks that have no hash yet, events off."""

    def prepare(self) -> None:
        for i in self.current:
            self.pool.free_blocks(self.batches[i])
        for i in self.advance():
            self.take(i)

    def operate(self) -> None:
        cache, requests, batches, batch = self.pool.cache_full_blocks, self.requests, self.batches, self.batch
        for i in self.current:
            cache(requests[i], batches[i], 0, batch, HASH_BLOCK_SIZE, GROUP)

    def num_held_blocks(self) -> int:
        return self.num_unused + len(self.current) * self.batch


class LongestPrefixHit(CachedPoolWorkload):
    """The longest cached prefix of a prompt whose blocks are all cached.

    The native pool answers with find_prefix_ids, one call a prompt. The others do what vLLM's manager of full attention
    does: one get_cached_block a block until the first miss, collecting the blocks.
    """

    def __init__(self, implementation: Implementation, *args: Any, **kwargs: Any) -> None:
        super().__init__(implementation, *args, **kwargs)
        self.is_one_call = implementation.name == "native"

    def prepare(self) -> None:
        self.advance()

    def operate(self) -> None:
        if self.is_one_call:
            find = self.pool.find_prefix_ids
            for i in self.current:
                find(self.requests[i].block_hashes, GROUP)
            return
        for i in self.current:
            self.find_by_block(self.requests[i].block_hashes)

    def find_by_block(self, block_hashes: list[bytes]) -> list[Any]:
        """The blocks of the hit, one lookup each."""
        lookup, groups = self.pool.get_cached_block, [GROUP]
        computed: tuple[list[Any], ...] = ([],)
        for block_hash in block_hashes:
            cached = lookup(block_hash, groups)
            if not cached:
                break
            for found, block in zip(computed, cached):
                found.append(block)
        return computed[0]


class GetCachedBlock(CachedPoolWorkload):
    """get_cached_block, one hash a call, one group, always a hit."""

    def prepare(self) -> None:
        self.advance()

    def operate(self) -> None:
        lookup, groups, requests = self.pool.get_cached_block, [GROUP], self.requests
        for i in self.current:
            for block_hash in requests[i].block_hashes:
                lookup(block_hash, groups)


class CreatePool(Workload):
    """Creation of a pool; its release is not timed."""

    def __init__(self, implementation: Implementation, num_blocks: int) -> None:
        self.implementation = implementation
        self.blocks_per_round = num_blocks
        self.pool: Any = None

    def prepare(self) -> None:
        if self.pool is not None:
            old = weakref.ref(self.pool)
            self.pool = None
            if old() is not None:  # its blocks point back to it: a cycle
                gc.collect()

    def operate(self) -> None:
        self.pool = self.implementation.make_pool(self.blocks_per_round)
