"""Continuous batching of Hugging Face transformers 5.19 on kvpool's block pool.

``install()`` puts ``KvpoolCacheAllocator`` into the table from which transformers takes the allocator of full-attention
layers; ``generate_batch`` and the continuous batching manager then use it, models and configs unchanged. Other
attention types keep their stock allocators.

What differs from stock: a cached block that no request uses counts as free. It is found by later prompts until it is
needed, and then the least recently used goes first, one by one; stock drops all cached blocks at once when memory is
short. Reference counts, hashes and the free list are kvpool's alone; the block tables stay lists of ints, which is what
transformers reads. Its words are kept for what is its own: a sector is a piece of cache memory that one attention type
has at a time, and holds one or several blocks.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvpool.backend import (
    BlockHasher,
    BlockPool,
    allocate_table,
    cache_completed_blocks,
    find_prefix_of_tokens,
    free_table,
    touch_table,
)
from kvpool.errors import KvpoolError
from kvpool.hashing.hashing import DEFAULT_SEED


class UnsupportedTransformersError(KvpoolError, ImportError):
    """This version of transformers lays continuous batching out differently; nothing was replaced."""


try:
    import torch
    from transformers import __version__ as transformers_version
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
    from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
    from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
except ImportError as error:
    if error.name in ("torch", "transformers"):
        raise
    raise UnsupportedTransformersError(
        f"kvpool.integrations.transformers needs the continuous batching of transformers 5.19: {error}"
    ) from error

__all__ = ["KvpoolCacheAllocator", "UnsupportedTransformersError", "install", "uninstall"]

INT32 = "i"  # type code of the arrays of ids that the pool reads


class SectorBlocks:
    """The free blocks of one allocator, where ``CachePool`` keeps a ``RegularTrees``: a view of kvpool's free list.

    Blocks of sectors that the allocator doesn't have count as in use.

    Args:
        block_pool: new; its ids are transformers' block ids, the reserved sectors included.
        blocks_per_sector: at least 1.
        num_reserved_sectors: sectors at the start that are never handed out.
        is_sole: the allocator has the cache for itself, all sectors are its own for good.
    """

    def __init__(self, block_pool: BlockPool, blocks_per_sector: int, num_reserved_sectors: int, is_sole: bool) -> None:
        self.block_pool = block_pool
        self.blocks_per_sector = blocks_per_sector
        self.is_sole = is_sole
        num_reserved = num_reserved_sectors * blocks_per_sector if is_sole else block_pool.num_gpu_blocks
        # A new pool hands out ids in ascending order, from 1: block 0 is its null block.
        block_pool.allocate_ids(num_reserved - 1)

    def __len__(self) -> int:
        return self.block_pool.get_num_free_blocks()

    def _blocks_of(self, sectors: Iterable[int]) -> array[int]:
        size = self.blocks_per_sector
        return array(INT32, [block_id for sector in sectors for block_id in range(sector * size, (sector + 1) * size)])

    def add_tree(self, root: int) -> None:
        """Sector ``root`` belongs to the allocator from now on, all its blocks free."""
        self.block_pool.free_ids(self._blocks_of([root]))

    def add_leaves(self, leaves: list[int]) -> None:
        """Give up one reference to each block."""
        free_table(self.block_pool, leaves)

    def pop_leaves(self, num_leaves: int) -> list[int]:
        """Take blocks. NoFreeBlocksError, a ValueError, if there are fewer."""
        return allocate_table(self.block_pool, num_leaves)

    def delete_full_trees(self) -> list[int]:
        """Give up the sectors all of whose blocks are free, and name them. O(free blocks), 0 for a sole allocator."""
        size = self.blocks_per_sector
        if self.is_sole or len(self) < size:
            return []
        free_blocks = self.block_pool.free_block_queue.get_all_free_blocks()
        num_free = Counter(block.block_id // size for block in free_blocks)
        full = [sector for sector, count in num_free.items() if count == size]
        self.block_pool.touch_ids(self._blocks_of(full))
        return full

    def _join(self, pool: Any, index: int) -> None:
        """Take the place of the stock free blocks of allocator ``index``."""
        pool._free_blocks[index] = self
        if self.is_sole:
            pool.free_sectors.clear()

    def _reset(self, pool: Any, index: int) -> None:
        """``CachePool.reset``, which would put stock free blocks back. No block may be in a block table."""
        CachePool.reset(pool)
        if not self.is_sole:
            self.block_pool.allocate_ids(len(self))
        self._join(pool, index)


class PoolLedger(BlockLedger):  # type: ignore[misc]
    """What the rest of transformers asks of an allocator's ledger, answered by kvpool's pool.

    Its own dicts stay empty.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        super().__init__()
        self.block_pool = block_pool

    def reset(self) -> None:
        """Forget all hashes. Block tables keep their references."""
        self.block_pool._reset_hashes()

    def evict_cached_blocks(self) -> list[int]:
        """None ever: cached blocks are free blocks already, so dropping them would make no room."""
        return []

    def acquire(self, block_id: int) -> None:
        """One more reference."""
        touch_table(self.block_pool, [block_id])

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """One reference less. False, for the caller has nothing to give back to the pool."""
        free_table(self.block_pool, [block_id])
        return False

    def register_new_hash(self, block_id: int, block_hash: int) -> int | None:
        """Refused: kvpool's hashes are no ints."""
        raise NotImplementedError("kvpool hashes blocks in mark_complete_blocks")


class KvpoolCacheAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Allocator of the full-attention layers on a ``BlockPool``.

    Blocks are shared and cached as far as the stock allocator would: ``allow_block_sharing`` is on, and no other
    attention type has layers in the model (transformers shares no prefixes there; the sectors of such a model
    are handed to and fro as in stock).

    Attributes:
        block_pool: the pool, whose ids are transformers' block ids. ``block_pool.stats.evictions`` counts cached blocks
            that were reused.
        num_hit_tokens: prompt tokens that were found in the cache, since the start.

    transformers: ``FullAttentionCacheAllocator``.
    """

    block_pool: BlockPool
    num_hit_tokens: int

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """As stock, and makes the pool. O(blocks)."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        is_sole = pool.num_allocators == 1
        num_blocks = self.num_blocks + pool.num_reserved_sectors * self.blocks_per_sector
        self.block_pool = BlockPool(num_blocks, is_sole and self.use_block_sharing, self.tokens_per_page)
        self.ledger = PoolLedger(self.block_pool)
        # Tensor parallel ranks must agree, so the seed may not come from the environment.
        self._hasher = BlockHasher("sha256", self.tokens_per_page, DEFAULT_SEED)
        self.num_hit_tokens = 0
        sector_blocks = SectorBlocks(self.block_pool, self.blocks_per_sector, pool.num_reserved_sectors, is_sole)
        sector_blocks._join(pool, self.index)
        # On the object, for other caches stay stock; by proxy, for a cycle would keep the cache tensor alive.
        pool.reset = functools.partial(sector_blocks._reset, weakref.proxy(pool), self.index)

    # ---- allocation ----

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """Sectors that the allocator lacks for the new tokens."""
        num_missing = self.needs_new_blocks(request_id, past_length, query_length)
        if num_missing:
            num_missing -= self.block_pool.get_num_free_blocks()
        return -(-num_missing // self.blocks_per_sector) if num_missing > 0 else 0

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Extend the request's block table for the new tokens. O(new blocks).

        Raises:
            NoFreeBlocksError: a ValueError; nothing has changed.
        """
        table = self.block_table.get(request_id)
        num_allocated = 0 if table is None else len(table)
        new_blocks = allocate_table(
            self.block_pool, self._compute_blocks_needed(num_allocated, past_length, query_length)
        )
        if table is None:
            self.block_table[request_id] = new_blocks
        else:
            table += new_blocks

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Give up the request's references, of the last block first, so that prefixes are evicted from their ends.

        Args:
            no_cache: asked for where the blocks must be allocatable at once. Here they always are, so complete blocks
                stay findable until they are reused: a request that was put back finds its own.
        """
        table = self.block_table.pop(request_id, None)
        if table:
            free_table(self.block_pool, table)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Block table of a fork: full blocks are shared, the others new; returns what is to be copied, and where to.

        Raises:
            NoFreeBlocksError: a ValueError; nothing has changed.
        """
        table = self.block_table[source_request_id]
        num_shared = self.count_shareable_blocks(source_request_id, past_length)
        shared, to_copy = table[:num_shared], table[num_shared:]
        new_blocks = allocate_table(self.block_pool, len(to_copy))
        touch_table(self.block_pool, shared)
        self.block_table[dest_request_id] = shared + new_blocks
        return to_copy, new_blocks

    # ---- prefix cache ----

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Cached blocks of the longest prefix that leaves at least one token. O(tokens of the hit)."""
        if not self.block_pool.enable_caching:
            return []
        max_blocks = (len(prompt_ids) - 1) // self.tokens_per_page
        return find_prefix_of_tokens(self.block_pool, self._hasher, prompt_ids, max_blocks)

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Start the request's block table with the found blocks of its first ``prefix_len`` tokens. O(blocks)."""
        table = block_ids[: prefix_len // self.tokens_per_page]
        touch_table(self.block_pool, table)
        self.block_table[request_id] = table
        self.num_hit_tokens += len(table) * self.tokens_per_page

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Cache the blocks that the last forward pass completed, up to ``new_new_blocks``. A block whose tokens another
        one holds already is given back, and that one takes its place. O(log(blocks of the request) + new tokens)."""
        table = self.block_table[request_id]
        if self.block_pool.enable_caching:
            cache_completed_blocks(self.block_pool, self._hasher, table, token_ids, new_new_blocks)


# ---- switching ----

# Methods of ours that are called in the place of whose: their parameters must be the same.
_MIRRORED = (
    (KvpoolCacheAllocator, FullAttentionCacheAllocator),
    (PoolLedger, BlockLedger),
    (SectorBlocks, RegularTrees),
)
_USED = {
    FullAttentionCacheAllocator: ("needs_new_blocks", "_compute_blocks_needed", "count_shareable_blocks"),
    CachePool: ("reset", "allocate_sector", "num_free_sectors"),
}
_POOL_ATTRIBUTES = ("free_sectors", "_free_blocks", "num_allocators", "num_reserved_sectors")
_replaced: list[Any] = []  # what the table held before install(), when it is installed


def install() -> None:
    """Use kvpool for the full-attention layers of every continuous batching that starts from now on. Idempotent.

    Raises:
        UnsupportedTransformersError: transformers' names or signatures are others than those of 5.19.
    """
    attention_type = FullAttentionCacheAllocator.layer_type
    if ATTN_TYPE_TO_ALLOCATOR.get(attention_type) is KvpoolCacheAllocator:
        return
    differences = list(_differences())
    if differences:
        raise UnsupportedTransformersError(
            f"transformers {transformers_version} is not what kvpool knows (5.19): {'; '.join(differences)}"
        )
    _replaced[:] = [ATTN_TYPE_TO_ALLOCATOR[attention_type]]
    ATTN_TYPE_TO_ALLOCATOR[attention_type] = KvpoolCacheAllocator


def uninstall() -> None:
    """Put the table back as ``install()`` found it. What runs on kvpool goes on doing so. Idempotent."""
    attention_type = FullAttentionCacheAllocator.layer_type
    if ATTN_TYPE_TO_ALLOCATOR.get(attention_type) is KvpoolCacheAllocator:
        ATTN_TYPE_TO_ALLOCATOR[attention_type] = _replaced.pop()


def _differences() -> Iterator[str]:
    """What transformers has not, or otherwise than the code above expects."""
    if FullAttentionCacheAllocator.layer_type not in ATTN_TYPE_TO_ALLOCATOR:
        yield f"no allocator for {FullAttentionCacheAllocator.layer_type}"
    pool = CachePool(1, 1)
    yield from (f"CachePool has no {name}" for name in _POOL_ATTRIBUTES if not hasattr(pool, name))
    if not all(isinstance(blocks, RegularTrees) for blocks in getattr(pool, "_free_blocks", [])):
        yield "CachePool keeps its free blocks otherwise"
    for stock, names in _USED.items():
        yield from (f"{stock.__name__} has no {name}" for name in names if not hasattr(stock, name))
    for ours, stock in _MIRRORED:
        for name, method in _called_from_stock(ours):
            if not hasattr(stock, name) or _parameters(getattr(stock, name)) != _parameters(method):
                yield f"{stock.__name__}.{name} is gone or has other parameters"


def _called_from_stock(ours: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, method in vars(ours).items():
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__len__"):
            yield name, method


def _parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)
