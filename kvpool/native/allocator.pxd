from cpython.dict cimport PyDict_Size
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from kvpool.native.block cimport BlockHome, ViewTable
from kvpool.native.kvp cimport kvp_placement_t


cdef class BlockAllocator:
    cdef BlockHome home
    cdef ViewTable table
    cdef readonly int64_t num_gpu_blocks
    cdef public bint enable_caching
    cdef public object hash_block_size
    cdef public bint enable_kv_cache_events
    cdef public object metrics_collector
    cdef public object medium
    cdef readonly bint uncached_first
    cdef public str on_invalid_free
    cdef readonly dict _reuse_watchers
    cdef readonly object blocks
    cdef readonly object null_block
    cdef readonly object free_block_queue
    cdef readonly object cached_block_hash_to_block
    cdef readonly object cached_block_hashes_by_block
    cdef readonly object stats
    cdef bint takes_hand_made   # an engine's own code and tests give it blocks that no pool made
    cdef object hand_made       # stand-alone map of those that were cached; mostly None
    cdef object __weakref__
    cdef BlockHome checked_home(self)
    cdef int own_ids(self, list blocks, int32_t *ids, str call) except -1
    cdef int refuse(self, object item, Py_ssize_t i, str call) except -1
    cdef int own_id(self, object block, str call) except -1
    cdef list take(self, int32_t n, bint keep_hashes)
    cdef int free_valid(self, const int32_t *ids, Py_ssize_t n, kvp_placement_t where, str call) except -1
    cdef int free_of_several_pools(self, list blocks, bint prepend) except -1
    cdef int free_checked(self, list blocks, str call, bint check_only, kvp_placement_t where) except -1
    cdef int touch_nodes(self, const int32_t *ids, Py_ssize_t n, str call) except -1

    cdef inline bint is_observed(self) noexcept:
        return (self.enable_kv_cache_events or self.metrics_collector is not None
                or self._reuse_watchers is not None and PyDict_Size(self._reuse_watchers) != 0)


# The borrowed-pointer forms: cpython's own declarations would count a temporary reference for each block.
cdef extern from "Python.h":
    void incref "Py_INCREF"(PyObject *item)
    void set_item "PyList_SET_ITEM"(list blocks, Py_ssize_t i, PyObject *item)

cdef int too_few_blocks(int32_t n) except -1
