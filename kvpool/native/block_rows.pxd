# Rows of block ids, native.
from libc.stdint cimport int32_t, int64_t

from kvpool.native.block cimport kvpool_lock_t
from kvpool.native.kvp_block_table cimport kvp_block_table_t, kvp_ints_t, kvp_table_edit_t, kvp_table_fault_t, kvp_table_status_t

cdef enum:
    FEW_IDS = 256
    FEW_EDITS = 32


# Edits of a step, gathered before the core sees them: Python objects are read first, then everything is applied at once.
cdef struct batch_t:
    int32_t *ids
    kvp_table_edit_t *edits
    Py_ssize_t num_ids
    Py_ssize_t room_for_ids
    Py_ssize_t num_edits
    Py_ssize_t room_for_edits
    int32_t few_ids[FEW_IDS]
    kvp_table_edit_t few_edits[FEW_EDITS]


# Memory of a table that nobody but the table writes, shown as a read-only buffer.
cdef class Counts:
    cdef int32_t *items
    cdef Py_ssize_t length


cdef class BlockRows:
    cdef kvp_block_table_t table
    cdef kvpool_lock_t lock
    cdef readonly object block_ids
    cdef readonly object num_blocks_per_row
    cdef Counts counts
    cdef Counts changed
    cdef object memory_pin

    cdef int apply(self, batch_t *batch) except -1
    cdef int release(self, kvp_table_status_t status, kvp_table_fault_t fault) except -1


cdef class BlockRowGroups:
    cdef readonly tuple groups
    cdef kvp_block_table_t **tables
    cdef int32_t num_groups

    cdef BlockRows group_at(self, Py_ssize_t i)
    cdef int gather(self, batch_t *batch, object block_ids, int32_t row, bint replaces) except -1
    cdef int gather_step(self, batch_t *batch, object output, dict row_of) except -1
    cdef int apply(self, batch_t *batch) except -1


cdef void start_batch(batch_t *batch) noexcept
cdef void end_batch(batch_t *batch) noexcept
cdef int raise_table_status(kvp_table_status_t status, kvp_table_fault_t fault) except -1
cdef object plain_ints(object items)
cdef object pin(object array)
cdef Counts new_counts(Py_ssize_t length)
cdef kvp_ints_t ints_of(object array) noexcept
