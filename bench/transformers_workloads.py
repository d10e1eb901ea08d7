"""Cache allocators of transformers' continuous batching: what the stock one and kvpool's are made to do.

A round handles thousands of blocks through the calls that transformers makes for a request; a figure is ns per block.
Prompts are lists of ints made before the clock starts, as requests carry them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator

from bench.rows import Row
from bench.workloads import Workload
from kvpool.integrations.transformers import KvpoolCacheAllocator

BATCHES = (1, 16, 256)  # blocks a request
PAGE_SIZE = 16  # tokens a block
NUM_BLOCKS = 65_536
BLOCKS_PER_ROUND = 4_096
NUM_RESERVED_SECTORS = 2
LONG_REQUEST = 128 * 1024  # tokens
COMPLETED = 16  # blocks of the long request completed in a round
ALLOCATORS: dict[str, type[Any]] = {"stock": FullAttentionCacheAllocator, "native": KvpoolCacheAllocator}
TINY_HEAD = SimpleNamespace(head_dim=4, hidden_size=4, num_attention_heads=1)


def make_allocator(allocator_class: type[Any], num_blocks: int = NUM_BLOCKS) -> Any:
    """An allocator of one layer as ``PagedAttentionCache`` makes it, the only one of its cache; a block is a sector."""
    allocator = allocator_class(0, TINY_HEAD, 1, torch.float32, PAGE_SIZE, [0], True)
    pool = CachePool(num_blocks, 1)
    num_bytes = num_blocks * allocator.bytes_per_block
    memory = torch.zeros(num_bytes + NUM_RESERVED_SECTORS * allocator.bytes_per_block, dtype=torch.uint8)
    allocator.register_cache_tensor(allocator.bytes_per_block, num_bytes, memory, pool)
    return allocator


class AllocatorWorkload(Workload):
    """One allocator, and prompts of ``batch`` full blocks and a token."""

    def __init__(self, allocator_class: type[Any], batch: int) -> None:
        self.allocator = make_allocator(allocator_class)
        self.batch = batch
        self.num_tokens = batch * PAGE_SIZE + 1
        self.blocks_per_round = BLOCKS_PER_ROUND
        self.requests = [str(i) for i in range(BLOCKS_PER_ROUND // batch)]
        self.prompts = [[i + 7 * k for k in range(self.num_tokens)] for i in range(len(self.requests))]
        self.new_token = count(1_000_000)

    def make_room(self, num_tokens: int) -> None:
        """Sectors for so many tokens of a new request, as transformers hands them out. When there are too few, all
        blocks that stock has cached go; kvpool's count as free."""
        allocator, pool = self.allocator, self.allocator.pool
        num_sectors = allocator.needs_new_sectors("new", 0, num_tokens)
        if num_sectors > pool.num_free_sectors:
            pool.free_blocks(0, allocator.ledger.evict_cached_blocks())
            pool.try_to_free_sectors()
            num_sectors = allocator.needs_new_sectors("new", 0, num_tokens)
        for _ in range(num_sectors):
            pool.allocate_sector(0)

    def check(self) -> None:
        allocator = self.allocator
        pool = allocator.pool
        num_free = pool.num_free_sectors + pool.count_free_blocks(0) + len(allocator.ledger.cached_blocks)
        num_used = allocator.num_blocks - num_free
        if allocator.block_table or num_used:
            raise AssertionError(f"{num_used} blocks are left in use")
        if isinstance(allocator, KvpoolCacheAllocator):
            allocator.block_pool.check()


class AllocateAndFree(AllocatorWorkload):
    """A request's blocks allocated, and freed unfinished: no hash, nothing cached."""

    def prepare(self) -> None:
        self.make_room(self.num_tokens - 1)

    def operate(self) -> None:
        allocate, free = self.allocator.allocate_cache_to_request, self.allocator.free_blocks
        num_tokens = self.batch * PAGE_SIZE
        for request in self.requests:
            allocate(request, 0, num_tokens)
            free(request)


class PrefixMiss(AllocatorWorkload):
    """Prompts that nobody had before: looked up, allocated, completed, freed into the cache."""

    def prepare(self) -> None:
        for prompt in self.prompts:
            prompt[0] = next(self.new_token)

    def operate(self) -> None:
        allocator = self.allocator
        match, allocate, free = (
            allocator.match_prefix_blocks,
            allocator.allocate_cache_to_request,
            allocator.free_blocks,
        )
        mark_complete, batch = allocator.mark_complete_blocks, self.batch
        num_tokens = batch * PAGE_SIZE
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            match(prompt)
            self.make_room(num_tokens)
            allocate(request, 0, num_tokens)
            mark_complete(request, prompt, batch)
            free(request)


class PrefixHit(AllocatorWorkload):
    """Prompts whose blocks are cached and used by nobody: looked up, acquired, freed."""

    def __init__(self, allocator_class: type[Any], batch: int) -> None:
        super().__init__(allocator_class, batch)
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            self.make_room(batch * PAGE_SIZE)
            self.allocator.allocate_cache_to_request(request, 0, batch * PAGE_SIZE)
            self.allocator.mark_complete_blocks(request, prompt, batch)
            self.allocator.free_blocks(request)

    def operate(self) -> None:
        allocator, num_tokens = self.allocator, self.batch * PAGE_SIZE
        match, acquire, free = allocator.match_prefix_blocks, allocator.acquire_prefix_blocks, allocator.free_blocks
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            acquire(request, num_tokens, match(prompt))
            free(request)


class CompleteBlock(AllocatorWorkload):
    """A decoding request of 128 k tokens completes a block, and the next."""

    def __init__(self, allocator_class: type[Any], _: int) -> None:
        super().__init__(allocator_class, LONG_REQUEST // PAGE_SIZE)
        self.blocks_per_round = COMPLETED
        self.tokens = list(range(LONG_REQUEST + COMPLETED * PAGE_SIZE))
        self.prepare()
        self.operate()

    def prepare(self) -> None:
        allocator, tokens = self.allocator, self.tokens
        allocator.free_blocks("long")
        tokens[LONG_REQUEST] = next(self.new_token)
        self.make_room(len(tokens))
        found = allocator.match_prefix_blocks(tokens)
        if found:
            allocator.acquire_prefix_blocks("long", LONG_REQUEST, found)
        allocator.allocate_cache_to_request("long", LONG_REQUEST, COMPLETED * PAGE_SIZE)
        if not found:
            allocator.mark_complete_blocks("long", tokens, self.batch)

    def operate(self) -> None:
        mark_complete, tokens = self.allocator.mark_complete_blocks, self.tokens
        for _ in range(COMPLETED):
            mark_complete("long", tokens, 1)

    def check(self) -> None:
        self.allocator.free_blocks("long")
        super().check()


def transformers_rows() -> list[Row]:
    """Rows whose ``make`` takes an allocator class."""
    kinds: list[tuple[str, str, Callable[..., Workload]]] = [
        ("allocate_free", "allocate + free", AllocateAndFree),
        ("prefix_miss", "prefix miss + allocate + hash + free", PrefixMiss),
        ("prefix_hit", "prefix hit + acquire + free", PrefixHit),
    ]
    rows = [
        Row(f"{name}_{batch}", f"{title}, batch {batch}", partial(kind, batch=batch))
        for name, title, kind in kinds
        for batch in BATCHES
    ]
    return [*rows, Row("complete_block", "one block completed at 128 k tokens", partial(CompleteBlock, _=0))]
