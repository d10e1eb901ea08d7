from kvpool._block cimport BlockHome


cdef class BlockList:
    cdef BlockHome home


cdef class SecondaryHashes:
    cdef BlockHome home
    cdef frozenset keys_of(self, object block_id)


cdef class PoolStats:
    cdef BlockHome home
