from libc.stdint cimport uint64_t

from kvpool.native.block cimport BlockHome

cdef const uint64_t *probing_secret() noexcept
cdef object map_of_home(BlockHome home, object hand_made)  # the map view of a pool; hand_made: see there
