"""Read-only views of a pool's parts: its blocks by id, the further hashes of each block, its counters."""
cimport cython
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_Check
from libc.stdint cimport int32_t

from kvpool.native.block cimport BlockHome, view_of, key_bytes, kvpool_lock_acquire, kvpool_lock_release
from kvpool.native.kvp cimport KVP_NONE, kvp_map_entry, kvp_pool_next_secondary

from collections.abc import Mapping
from operator import index

__all__ = ["BlockList", "PoolStats", "SecondaryHashes"]


@cython.no_gc
cdef class PoolView:
    """Shows a part of one pool's native state; only a pool can make it."""

    def __cinit__(self, BlockHome home not None):
        if home.pool is NULL:
            raise TypeError("only a pool has such views")
        self.home = home


@cython.final
@cython.no_gc
cdef class BlockList(PoolView):
    """``pool.blocks``: all blocks by id, made on first use. Length, index, slice, iteration; read-only."""

    def __len__(self):
        return self.home.num_views

    def __getitem__(self, which):
        if isinstance(which, slice):
            return [view_of(self.home, i) for i in range(*which.indices(self.home.num_views))]
        cdef Py_ssize_t i = which
        if i < 0:
            i += self.home.num_views
        if i < 0 or i >= self.home.num_views:
            raise IndexError(f"block id {which} is not in 0 .. {self.home.num_views - 1}")
        return view_of(self.home, <int32_t>i)

    def __iter__(self):
        cdef int32_t i
        for i in range(self.home.num_views):
            yield view_of(self.home, i)


@cython.final
@cython.no_gc
cdef class SecondaryKeys(PoolView):
    """Reads the keys that ``SecondaryHashes`` shows."""

    def keys_of(self, block_id):
        cdef set keys = set()
        cdef int32_t entry = KVP_NONE
        cdef long node
        cdef int overflow = 0
        # The number itself, whatever its class makes of a comparison.
        if not PyLong_Check(block_id):
            try:
                block_id = index(block_id)
            except TypeError:
                return frozenset()
        node = PyLong_AsLongAndOverflow(block_id, &overflow)
        if overflow == 0 and 0 <= node < self.home.num_views:
            kvpool_lock_acquire(&self.home.lock)
            while True:
                entry = kvp_pool_next_secondary(self.home.pool, <int32_t>node, entry)
                if entry == KVP_NONE:
                    break
                keys.add(key_bytes(kvp_map_entry(&self.home.pool.map, entry)))
            kvpool_lock_release(&self.home.lock)
        return frozenset(keys)

    def block_ids(self):
        return [
            i for i in range(self.home.num_views) if kvp_pool_next_secondary(self.home.pool, i, KVP_NONE) != KVP_NONE
        ]


class SecondaryHashes(Mapping):
    """``pool.cached_block_hashes_by_block``: block id -> frozenset of the keys beside its ``block_hash``; read-only.

    A lookup is O(keys of the block), iteration O(num_blocks).
    """

    __slots__ = ("_keys",)

    def __init__(self, home):
        self._keys = SecondaryKeys(home)

    def __getitem__(self, block_id):
        keys = self._keys.keys_of(block_id)
        if not keys:
            raise KeyError(block_id)
        return keys

    def __iter__(self):
        return iter(self._keys.block_ids())

    def __len__(self):
        return len(self._keys.block_ids())


@cython.final
@cython.no_gc
cdef class PoolStats(PoolView):
    """Counters of one pool since its creation.

    Attributes:
        evictions: blocks that lost a hash because they were handed out again.
        invalid_frees: entries of ``free_blocks`` that were skipped under ``on_invalid_free="warn"``.
    """
    @property
    def evictions(self):
        return self.home.pool.num_evicted

    @property
    def invalid_frees(self):
        return self.home.invalid_frees
