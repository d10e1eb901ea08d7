# What every batch needs: a place for its ids and keys, counts, and the callers' int32 buffers.
cimport cython
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT32_MAX, int32_t

from kvpool.native.kvp cimport kvp_key_t
from kvpool.native.memory cimport kvp_free

cdef enum:
    SMALL = 512  # ids and keys of a batch up to this size stay on the stack
    MOST = 0x1FFFFFFF  # tokens or blocks of a plain call: a sum of four of them overflows nowhere
    NOT_PLAIN = -1



# get_num_skipped_tokens of a group with a sliding window (0: none) or with chunks (0: none).
@cython.cdivision(True)
cdef inline Py_ssize_t num_skipped_tokens(Py_ssize_t num_computed, Py_ssize_t window, Py_ssize_t chunk_size) noexcept nogil:
    if window > 0:
        return num_computed - window + 1 if num_computed >= window else 0
    return num_computed // chunk_size * chunk_size if chunk_size > 0 else 0


cdef class IdBuffer:
    cdef Py_buffer view
    cdef bint is_open
    cdef int32_t *data
    cdef Py_ssize_t length


cdef class IdCopy:
    cdef int32_t *data
    cdef Py_ssize_t length


cdef int32_t *large_ids(Py_ssize_t n) except NULL
cdef kvp_key_t *large_keys(Py_ssize_t n) except NULL
cdef int32_t parse_unusual_count(object n) except -1
cdef object new_ids(Py_ssize_t n)
cdef int32_t *data_of(object array) noexcept
cdef Py_ssize_t size_of(object array) noexcept
cdef bint is_plain_ids(object ids) noexcept
cdef IdBuffer open_buffer(object ids, bint writable)
cdef IdCopy copy_ids(object ids)
cdef IdBuffer read_ids(object ids, const int32_t **data, Py_ssize_t *length)

cdef inline int32_t *ids_of_size(Py_ssize_t n, int32_t *small) except NULL:
    return small if n <= SMALL else large_ids(n)

cdef inline kvp_key_t *keys_of_size(Py_ssize_t n, kvp_key_t *small) except NULL:
    return small if n <= SMALL else large_keys(n)

cdef inline void release_batch(void *items, void *small) noexcept:
    if items is not small:
        kvp_free(items)

cdef inline bint is_plain_number(Py_ssize_t n) noexcept:
    return 0 <= n <= MOST

cdef inline Py_ssize_t plain_number(object n) except? -2:
    """An exact int of 0 .. MOST, NOT_PLAIN for all else. Never runs code of the caller."""
    cdef long value
    cdef int overflow = 0
    if not PyLong_CheckExact(n):
        return NOT_PLAIN
    value = PyLong_AsLongAndOverflow(n, &overflow)
    return <Py_ssize_t>value if overflow == 0 and 0 <= value <= MOST else NOT_PLAIN

cdef inline int32_t parse_count(object n) except -1:
    """A number of blocks: an int (numpy's too), no bool, not negative."""
    cdef long count
    cdef int overflow = 0
    if PyLong_CheckExact(n):
        count = PyLong_AsLongAndOverflow(n, &overflow)
        if 0 <= count <= INT32_MAX:
            return <int32_t>count
    return parse_unusual_count(n)
