"""What a target is: the calls that an engine makes for a request into one implementation, and their cost.

Only these calls are timed, each step from its first call to its last; what the replay itself needs (requests, ids for
the comparison, counts for the report) is made and gathered outside.

An implementation is expected to behave: its errors pass through. numpy is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np

from kvpool.replay.trace import TraceRequest

Served = TypeVar("Served")
"""A target's own form of a request, opaque to the caller: what was looked up, and what it holds."""


class ReplayTarget(ABC, Generic[Served]):
    """Runs requests through one implementation.

    manager_ns: ns spent in its calls so far. num_blocks: size of its pool, null block included.
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
    def evicted_blocks(self) -> int:
        """Blocks that lost a hash because they were reused, so far."""
        return int(self._pool.stats.evictions)

    @abstractmethod
    def prepare(self, request: TraceRequest, hashes: list[bytes]) -> Served:
        """The request with its block hashes, one per full prompt block, for the calls below. Not timed."""

    @abstractmethod
    def find_prefix(self, served: Served) -> int:
        """Looks up the longest cached prefix, which ends before the last token of the prompt, and returns its length
        in blocks. Timed. O(blocks of the hit)."""

    @abstractmethod
    def admit(self, served: Served) -> bool:
        """Adopts the blocks of the last ``find_prefix``, allocates the rest that prompt and output need, and caches the
        full prompt blocks. False, and nothing has changed, if too few are free. Timed. O(blocks)."""

    @abstractmethod
    def block_ids(self, served: Served) -> np.ndarray:
        """The ids of the blocks that an admitted request holds, in token order, int32. Not timed."""

    @abstractmethod
    def free(self, served: Served) -> None:
        """Frees an admitted request's blocks, the last one first. Timed. O(blocks)."""

    def check(self) -> None:
        """Verifies the invariants of the pool where it can (not vLLM's). Not timed. O(pool)."""
        if hasattr(self._pool, "check"):
            self._pool.check()


class EvictionCounter:
    """Counts the evictions of vLLM's pool, which doesn't.

    A block carries a hash exactly from its caching to its next allocation, so a mark per block id tells whether an
    allocation took a hash away. Looking at the blocks before each allocation would tell as well, but would also load
    them into the processor's caches ahead of the timed call.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_evicted = 0
        self._is_cached = np.zeros(num_blocks, np.bool_)

    def note_admission(self, ids: np.ndarray, num_hits: int, num_cached: int) -> None:
        """ids: of all blocks of a request, the first ``num_hits`` hits; the first ``num_cached`` carry a hash now."""
        new_ids = ids[num_hits:]
        self.num_evicted += int(np.count_nonzero(self._is_cached[new_ids]))
        self._is_cached[new_ids] = False
        self._is_cached[ids[:num_cached]] = True
