from libc.stdint cimport int32_t, uint32_t

from kvpool.native.allocator cimport BlockAllocator
from kvpool.native.kvp cimport kvp_cache_mode_t, kvp_key_t


cdef class PrefixCache(BlockAllocator):
    cdef Py_ssize_t find_prefix(self, list hashes, Py_ssize_t n, uint32_t group_id, int32_t *ids) except -1
    cdef int cache_range(self, object blocks, list hashes, Py_ssize_t scale, Py_ssize_t first, Py_ssize_t n,
                         Py_ssize_t block_size, uint32_t group_id, list mask) except -1
    cdef int nodes_to_cache(self, object blocks, Py_ssize_t first, Py_ssize_t n, list mask, int32_t *ids) except -1
    cdef list cached_by_hand(self, object block_hash, list groups)
    cdef int cache_hand_made(self, list blocks, list hashes, Py_ssize_t scale, Py_ssize_t first, Py_ssize_t n,
                             Py_ssize_t block_size, uint32_t group_id, list mask) except -1
    cdef int cache_keys(self, const kvp_key_t *keys, const int32_t *ids, Py_ssize_t n, int32_t first_tokens,
                        int32_t step_tokens, kvp_cache_mode_t mode, str call) except -1
