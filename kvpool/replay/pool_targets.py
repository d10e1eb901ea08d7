"""Targets over block pools alone, with the calls that a cache manager makes for a request.

Native is driven through its arrays of block ids, reference and vLLM through block objects, which is each one's way to
be used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np

from kvpool.replay.target import EvictionCounter, ReplayTarget
from kvpool.replay.trace import TraceRequest

Blocks: TypeAlias = "Sequence[Any] | np.ndarray"
"""Hits or a block table: block objects or int32 block ids."""

_GROUP_ID = 0
_GROUP_IDS = [_GROUP_ID]


@dataclass(slots=True)
class PooledRequest:
    """block_hashes: one per full prompt block; the name is the one under which pools read it of a request."""

    block_hashes: list[bytes]
    max_hit_blocks: int
    num_blocks: int
    hits: Blocks = ()
    table: Blocks = ()


class PoolDriver(ReplayTarget[PooledRequest]):
    """Decides on admission as a manager would, which is not timed, and leaves the blocks to the pool."""

    def prepare(self, request: TraceRequest, hashes: list[bytes]) -> PooledRequest:
        block_size = self._block_size
        return PooledRequest(hashes, request.max_hit_blocks(block_size), request.num_blocks_needed(block_size))

    def find_prefix(self, served: PooledRequest) -> int:
        served.hits = self._find(served)
        return len(served.hits)

    def admit(self, served: PooledRequest) -> bool:
        if not self._fits(served.num_blocks, served.hits):
            return False
        served.table = self._take(served)
        return True

    def _fits(self, num_blocks: int, hits: Blocks) -> bool:
        num_free = self.num_free_blocks()
        if num_blocks <= num_free:
            return True
        return num_blocks - len(hits) + self._num_free_hits(hits) <= num_free

    @abstractmethod
    def _find(self, served: PooledRequest) -> Blocks:
        """The cached blocks of the longest prefix, at most ``max_hit_blocks``. Timed. O(blocks of the hit)."""

    @abstractmethod
    def _num_free_hits(self, hits: Blocks) -> int:
        """How many of ``hits`` sit in the free list now, and so count against the free blocks. Not timed. O(hits)."""

    @abstractmethod
    def _take(self, served: PooledRequest) -> Blocks:
        """Touches the hits, allocates the rest of ``num_blocks``, caches the new blocks that ``block_hashes`` names,
        and returns the block table. Timed. O(num_blocks)."""


class IdArrayTarget(PoolDriver):
    """Serves the trace from a kvpool ``BlockPool`` through int32 arrays of block ids: no object per block."""

    def __init__(self, name: str, pool: Any, num_blocks: int, block_size: int) -> None:
        super().__init__(name, pool, num_blocks, block_size)
        # A copy of the reference counts: asking the pool for them would make one object per block.
        self._num_users = np.zeros(num_blocks, np.int32)

    def _find(self, served: PooledRequest) -> np.ndarray:
        start = perf_counter_ns()
        hits: np.ndarray = self._pool.find_prefix_ids(served.block_hashes, _GROUP_ID, served.max_hit_blocks)
        self.manager_ns += perf_counter_ns() - start
        return hits

    def _num_free_hits(self, hits: Blocks) -> int:
        return int(np.count_nonzero(self._num_users[hits] == 0))

    def _take(self, served: PooledRequest) -> np.ndarray:
        pool, hits, hashes, num_blocks = self._pool, served.hits, served.block_hashes, served.num_blocks
        num_hits, num_full = len(hits), len(hashes)
        start = perf_counter_ns()
        ids = np.empty(num_blocks, np.int32)
        if num_hits:
            pool.touch_ids(hits)
            ids[:num_hits] = hits
        pool.allocate_ids(num_blocks - num_hits, out=ids[num_hits:])
        if num_hits < num_full:
            pool.cache_ids(hashes[num_hits:], ids[num_hits:num_full], _GROUP_ID)
        self.manager_ns += perf_counter_ns() - start
        self._num_users[ids] += 1
        return ids

    def block_ids(self, served: PooledRequest) -> np.ndarray:
        return np.asarray(served.table, np.int32)

    def free(self, served: PooledRequest) -> None:
        ids = self.block_ids(served)
        start = perf_counter_ns()
        self._pool.free_ids(np.ascontiguousarray(ids[::-1]))
        self.manager_ns += perf_counter_ns() - start
        self._num_users[ids] -= 1


class BlockObjectTarget(PoolDriver):
    """Serves the trace from a pool through its block objects, the way vLLM's managers do."""

    def _find(self, served: PooledRequest) -> list[Any]:
        get_cached_block, hashes, max_blocks = self._pool.get_cached_block, served.block_hashes, served.max_hit_blocks
        hits: list[Any] = []
        start = perf_counter_ns()
        for block_hash in hashes[:max_blocks]:
            blocks = get_cached_block(block_hash, _GROUP_IDS)
            if blocks is None:
                break
            hits.append(blocks[0])
        self.manager_ns += perf_counter_ns() - start
        return hits

    def _num_free_hits(self, hits: Blocks) -> int:
        return sum(block.ref_cnt == 0 for block in hits)

    def _take(self, served: PooledRequest) -> list[Any]:
        pool, hits, num_blocks = self._pool, served.hits, served.num_blocks
        num_hits, num_full = len(hits), len(served.block_hashes)
        start = perf_counter_ns()
        if num_hits:
            pool.touch(hits)
        table = list(hits)
        table += pool.get_new_blocks(num_blocks - num_hits)
        if num_hits < num_full:
            pool.cache_full_blocks(served, table, num_hits, num_full, self._block_size, _GROUP_ID)
        self.manager_ns += perf_counter_ns() - start
        return table

    def block_ids(self, served: PooledRequest) -> np.ndarray:
        return np.fromiter((block.block_id for block in served.table), np.int32, len(served.table))

    def free(self, served: PooledRequest) -> None:
        table = served.table
        start = perf_counter_ns()
        self._pool.free_blocks(reversed(table))
        self.manager_ns += perf_counter_ns() - start


class VllmPoolTarget(BlockObjectTarget):
    """Serves the trace from vLLM's ``BlockPool``."""

    def __init__(self, name: str, pool: Any, num_blocks: int, block_size: int) -> None:
        super().__init__(name, pool, num_blocks, block_size)
        self._evictions = EvictionCounter(num_blocks)

    @property
    def evicted_blocks(self) -> int:
        return self._evictions.num_evicted

    def admit(self, served: PooledRequest) -> bool:
        is_admitted = super().admit(served)
        if is_admitted:
            self._evictions.note_admission(self.block_ids(served), len(served.hits), len(served.block_hashes))
        return is_admitted
