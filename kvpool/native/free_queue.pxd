from kvpool.native.block cimport BlockHome

cdef object queue_of_home(BlockHome home)  # the queue view of a pool
