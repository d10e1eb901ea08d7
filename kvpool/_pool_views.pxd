from kvpool._block cimport BlockHome


cdef class PoolView:
    cdef BlockHome home
