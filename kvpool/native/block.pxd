# Shared by the extension modules: where blocks live, the view of one block, keys, and the one place that raises.
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport Py_TYPE, PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t

from kvpool.native.kvp cimport (
    KVP_DIGEST_BYTES, kvp_entry_t, kvp_fault_t, kvp_free_list_t, kvp_key_t, kvp_pool_t, kvp_status_t,
)

cdef extern from "lock.h":
    ctypedef struct kvpool_lock_t:
        pass
    void kvpool_lock_acquire(kvpool_lock_t *lock)
    void kvpool_lock_release(kvpool_lock_t *lock)
    PyObject *kvpool_read_once(PyObject **place)
    void kvpool_write_once(PyObject **place, PyObject *value)

cdef enum:
    FAKE_HEAD = -2
    FAKE_TAIL = -3
    NOT_OURS = -4  # no KVCacheBlock, or one of another home


cdef class BlockHome:
    cdef kvp_pool_t *pool
    cdef kvp_free_list_t *links
    cdef kvp_free_list_t own_links
    cdef PyObject **views
    cdef int32_t num_views
    cdef kvpool_lock_t lock
    cdef object owner
    cdef readonly int64_t invalid_frees
    cdef bint head_severed
    cdef bint tail_severed
    cdef list vacant


cdef class ViewTable:
    cdef BlockHome home


cdef class HandMade:
    cdef int64_t ref_cnt
    cdef object block_hash
    cdef object num_tokens
    cdef bint is_null


cdef class KVCacheBlock:
    cdef readonly int32_t block_id
    cdef int32_t node
    cdef BlockHome home
    cdef HandMade hand_made


cdef object kept_view(BlockHome home, int32_t node)
cdef object fake_end(BlockHome home, int32_t which)
cdef int open_views(BlockHome home, int32_t capacity) except -1
cdef void close_views(BlockHome home) noexcept

cdef inline object view_of(BlockHome home, int32_t node):
    cdef PyObject *kept = NULL if home.views is NULL else kvpool_read_once(&home.views[node])
    return kept_view(home, node) if kept is NULL else <object>kept

cdef inline PyObject *borrowed_view(BlockHome home, int32_t node) except NULL:
    """The table owns a reference, so a live pool need not count one for each block that passes by."""
    if kvpool_read_once(&home.views[node]) is NULL:
        kept_view(home, node)
    return kvpool_read_once(&home.views[node])

cdef inline int32_t num_free_of(BlockHome home) noexcept:
    cdef int32_t num_free
    kvpool_lock_acquire(&home.lock)
    num_free = home.links.num_free
    kvpool_lock_release(&home.lock)
    return num_free

cdef inline int32_t node_in(BlockHome home, PyObject *item) noexcept:
    if (<PyObject *>Py_TYPE(<object>item) == <PyObject *>KVCacheBlock) and (<KVCacheBlock>item).home is home:
        return (<KVCacheBlock>item).node
    return NOT_OURS

cdef bytes key_bytes(const kvp_entry_t *entry)
cdef int parse_key(object key, kvp_key_t *out) except -1
cdef int refuse_digest(object digest) except -1
cdef uint32_t parse_unusual_group(object group_id) except? 0xFFFFFFFF

cdef inline int parse_digest(object digest, uint32_t group_id, kvp_key_t *out) except -1:
    if not PyBytes_Check(digest) or PyBytes_GET_SIZE(digest) > KVP_DIGEST_BYTES:
        refuse_digest(digest)
    out.digest = <const uint8_t *>PyBytes_AS_STRING(digest)
    out.digest_len = <uint32_t>PyBytes_GET_SIZE(digest)
    out.group_id = group_id
    return 0

cdef inline uint32_t parse_group(object group_id) except? 0xFFFFFFFF:
    cdef long value
    cdef int overflow = 0
    if PyLong_CheckExact(group_id):
        value = PyLong_AsLongAndOverflow(group_id, &overflow)
        if 0 <= value <= INT32_MAX:
            return <uint32_t>value
    return parse_unusual_group(group_id)

cdef int32_t parse_tokens(object num_tokens) except? -2
cdef int raise_status(kvp_status_t status, const kvp_fault_t *fault, str call, BlockHome home) except -1
