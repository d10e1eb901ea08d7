from libc.stdint cimport int32_t

from kvpool.native.block cimport BlockHome


cdef class BlockSequence:
    cdef BlockHome home
    cdef int32_t *ids
    cdef Py_ssize_t length
    cdef Py_ssize_t capacity
    cdef BlockHome checked_home(self)
    cdef int32_t node_of(self, object block) except -1
    cdef Py_ssize_t place(self, Py_ssize_t i) except -1
    cdef BlockSequence of_blocks(self, object blocks)
    cdef int reserve(self, Py_ssize_t num_more) except -1


cdef BlockSequence new_sequence(BlockHome home, Py_ssize_t capacity)
