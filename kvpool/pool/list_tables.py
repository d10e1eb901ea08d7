"""Block tables that are plain lists of ints, as engines in Python keep them: allocated, shared, cached and freed.

Written over the calls of a pool that take arrays of ids, so that it holds for every pool. ``kvpool.native.list_tables``
does the same without arrays, and comes here for a pool that somebody observes, the twin, and very large blocks.

A table's ids are blocks in use, in token order. Blocks are completed in order, so those with a hash come first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

from kvpool.hashing.block_hash import get_block_hash

INT32 = "i"  # type code


def allocate_table(pool: Any, num_blocks: int) -> list[int]:
    """``pool.allocate_ids`` as a new list. O(num_blocks).

    Raises:
        NoFreeBlocksError: there are fewer; nothing has changed.
    """
    block_ids: list[int] = pool.allocate_ids(num_blocks).tolist()
    return block_ids


def touch_table(pool: Any, block_ids: list[int]) -> None:
    """``pool.touch_ids`` of a list. O(len)."""
    pool.touch_ids(array(INT32, block_ids))


def free_table(pool: Any, table: list[int]) -> None:
    """``pool.free_ids`` of a list, the last block first, so that a prefix is evicted from its end. O(len)."""
    pool.free_ids(array(INT32, table[::-1]))


def find_prefix_of_tokens(pool: Any, hasher: Any, token_ids: list[int], max_blocks: int) -> list[int]:
    """Cached blocks of the longest prefix, up to the first miss or ``max_blocks``. O(tokens of the hit), with hashing.

    Args:
        hasher: a ``BlockHasher``, the one that ``cache_completed_blocks`` is given.
        token_ids: from the start of the prompt.
    """
    size = hasher.block_size
    parent, found = hasher.none_hash, []
    for i in range(min(max_blocks, len(token_ids) // size)):
        parent = hasher._hash_plain_block(parent, token_ids[i * size : (i + 1) * size])
        hit = pool.find_prefix_ids([parent])
        if not len(hit):
            break
        found.append(int(hit[0]))
    return found


def cache_completed_blocks(pool: Any, hasher: Any, table: list[int], token_ids: list[int], max_new_blocks: int) -> None:
    """Make the first blocks of a table that have no hash reachable by the tokens up to their end. A block whose tokens
    are cached already is given back, and the cached one takes its place in the table.
    O(log(len(table)) + tokens of the new blocks), with hashing.

    Args:
        token_ids: of the request, from the start; only full blocks of them count.
        max_new_blocks: so many blocks at most.

    Raises:
        KvpoolError: KV cache events are on, which this call knows too little for.
    """
    size = hasher.block_size
    blocks = pool.blocks
    first = bisect_left(table, True, key=lambda block_id: blocks[block_id].block_hash is None)
    parent = get_block_hash(blocks[table[first - 1]].block_hash) if first else hasher.none_hash
    for i in range(first, min(first + max_new_blocks, len(token_ids) // size, len(table))):
        parent = hasher._hash_plain_block(parent, token_ids[i * size : (i + 1) * size])
        twin = pool.find_prefix_ids([parent])
        if len(twin):
            pool.free_ids(array(INT32, table[i : i + 1]))
            pool.touch_ids(twin)
            table[i] = int(twin[0])
        else:
            pool.cache_ids([parent], array(INT32, table[i : i + 1]))
