from kvpool.native.block cimport BlockHome


cdef class PoolView:
    cdef BlockHome home
