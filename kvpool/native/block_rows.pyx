"""Rows of block ids, native: tables over csrc/kvp_block_table.c for one KV cache group or for all of them.

A call reads its Python objects first, then makes one call of the core, which applies all of it or nothing. Table and
counts are numpy arrays: torch takes them by ``torch.from_numpy`` without a copy. What is derived from a table (slots,
compressed rows ...) is in ``step_outputs``.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, PyObject_GetBuffer
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t
from libc.string cimport memcpy

from kvpool.native.batch cimport IdBuffer, open_buffer
from kvpool.native.block cimport kvpool_lock_acquire, kvpool_lock_release
from kvpool.native.int_arrays cimport (
    kvpool_array_data, kvpool_array_size, kvpool_import_arrays, kvpool_int_bytes, kvpool_is_writeable,
)
from kvpool.native.kvp_block_table cimport (
    KVP_TABLE_CHANGE_WORDS, KVP_TABLE_ERR_BLOCK_ID, KVP_TABLE_ERR_FULL, KVP_TABLE_ERR_GROUP, KVP_TABLE_ERR_POSITION,
    KVP_TABLE_ERR_QUERY, KVP_TABLE_ERR_ROOM, KVP_TABLE_ERR_ROW, KVP_TABLE_ERR_SHAPE, KVP_TABLE_ERR_TOKENS,
    KVP_TABLE_OK, kvp_block_table_check, kvp_block_table_clear, kvp_block_table_clear_row,
    kvp_block_table_drop_changes, kvp_block_table_edit, kvp_block_table_init, kvp_block_table_move_row,
    kvp_block_table_num_changes, kvp_block_table_swap_rows, kvp_block_table_take_changes, kvp_block_table_t,
    kvp_ints_t, kvp_span_t, kvp_table_edit_t, kvp_table_fault_t, kvp_table_shape_t, kvp_table_status_t,
)
from kvpool.native.memory cimport kvp_calloc, kvp_free, kvp_malloc, kvp_realloc, kvpool_share_memory

import weakref
from operator import index

import numpy

from kvpool.errors import InvalidArgumentError, InvariantError

kvpool_share_memory()

kvpool_import_arrays()

__all__ = ["BlockRowGroups", "BlockRows"]

_REASONS = {
    KVP_TABLE_ERR_SHAPE: "rows, blocks a row, tokens a block, ids and kernel blocks a block must be at least 1, the cells "
                         "fewer than 2**31 and every id of the kernel below 2**31",
    KVP_TABLE_ERR_GROUP: "no KV cache group {value}",
    KVP_TABLE_ERR_ROW: "no row {value} in the table (item {index} of the call)",
    KVP_TABLE_ERR_BLOCK_ID: "no block {value} in the pool (item {index} of the call)",
    KVP_TABLE_ERR_FULL: "a row would hold {value} blocks, more than it has room for (item {index} of the call)",
    KVP_TABLE_ERR_POSITION: "token {index}: its row has no block for position {value}",
    KVP_TABLE_ERR_TOKENS: "request {index}: {value} tokens are none, or more than the blocks of its row hold",
    KVP_TABLE_ERR_QUERY: "query start {index} is {value}: they must not fall, nor point past the tokens",
    KVP_TABLE_ERR_ROOM: "the output has no room for {value} blocks",
}


cdef int raise_table_status(kvp_table_status_t status, kvp_table_fault_t fault) except -1:
    """Every refusal of the core is an InvalidArgumentError."""
    raise InvalidArgumentError(_REASONS[status].format(index=fault.index, value=fault.value))


# ---- integers of the caller ----

cdef object plain_ints(object items):
    """A one-dimensional, contiguous array of int32 or int64 from an array, a buffer, a tensor of the CPU or a list."""
    if kvpool_int_bytes(items):
        return items
    array = numpy.asarray(items)
    if array.size == 0:
        return numpy.zeros(0, numpy.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.itemsize > 8 or array.dtype == numpy.uint64:
        raise TypeError(f"one dimension of integers is needed, not {array.ndim} of {array.dtype}")
    if array.dtype not in (numpy.int32, numpy.int64):
        array = array.astype(numpy.int64)
    return numpy.ascontiguousarray(array)


cdef kvp_ints_t ints_of(object array) noexcept:
    """An array from plain_ints(), or None: what the core takes."""
    cdef kvp_ints_t ints
    ints.items = NULL if array is None else kvpool_array_data(array)
    ints.is_wide = array is not None and kvpool_int_bytes(array) == 8
    return ints


cdef int32_t unusual_id(object item) except? -1:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"a block id is an int, not {type(item).__name__}: {item!r}")
    # The number itself, whatever its class makes of a comparison.
    cdef int overflow = 0
    cdef long long value = PyLong_AsLongLongAndOverflow(index(item), &overflow)
    if overflow != 0 or not INT32_MIN <= value <= INT32_MAX:
        raise InvalidArgumentError(f"no block {item} in the pool")
    return <int32_t>value


cdef inline int32_t parse_id(object item) except? -1:
    cdef long value
    cdef int overflow = 0
    if PyLong_CheckExact(item):
        value = PyLong_AsLongAndOverflow(item, &overflow)
        if overflow == 0 and INT32_MIN <= value <= INT32_MAX:
            return <int32_t>value
    return unusual_id(item)


cdef object pin(object array):
    """What keeps the memory of an array in its place while it is kept: numpy resizes no array that is weakly referenced,
    whatever the call says of references."""
    owner = array
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    return owner, weakref.ref(owner)


cdef Counts new_counts(Py_ssize_t length):
    cdef Counts counts = Counts.__new__(Counts)
    counts.items = <int32_t *>kvp_calloc(<size_t>max(length, 1), sizeof(int32_t))
    if counts.items is NULL:
        raise MemoryError(f"no memory for the counts of {length} rows")
    counts.length = length
    return counts


@cython.final
cdef class Counts:
    """Numbers that the core goes by, so nobody else may write them: a read-only int32 buffer."""

    def __dealloc__(self):
        kvp_free(self.items)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.items, self.length * <Py_ssize_t>sizeof(int32_t), True, flags)


# ---- edits of a batch ----

cdef void start_batch(batch_t *batch) noexcept:
    batch.ids = batch.few_ids
    batch.edits = batch.few_edits
    batch.num_ids = batch.num_edits = 0
    batch.room_for_ids = FEW_IDS
    batch.room_for_edits = FEW_EDITS


cdef void end_batch(batch_t *batch) noexcept:
    if batch.ids is not batch.few_ids:
        kvp_free(batch.ids)
    if batch.edits is not batch.few_edits:
        kvp_free(batch.edits)


cdef void *larger(void *items, void *few, size_t used, size_t wanted) except NULL:
    """Room for `wanted` bytes that starts with the first `used` bytes of items, which is `few` or was made here."""
    cdef void *room = kvp_malloc(wanted) if items is few else kvp_realloc(items, wanted)
    if room is NULL:
        raise MemoryError(f"no memory for a batch of {wanted} bytes")
    if items is few:
        memcpy(room, few, used)
    return room


cdef int reserve_ids(batch_t *batch, Py_ssize_t n) except -1:
    cdef Py_ssize_t room = max(batch.num_ids + n, 2 * batch.room_for_ids)
    if batch.num_ids + n > batch.room_for_ids:
        batch.ids = <int32_t *>larger(batch.ids, batch.few_ids, <size_t>batch.num_ids * sizeof(int32_t),
                                      <size_t>room * sizeof(int32_t))
        batch.room_for_ids = room
    return 0


cdef int reserve_edit(batch_t *batch) except -1:
    cdef Py_ssize_t room = 2 * batch.room_for_edits
    if batch.num_edits == batch.room_for_edits:
        batch.edits = <kvp_table_edit_t *>larger(
            batch.edits, batch.few_edits, <size_t>batch.num_edits * sizeof(kvp_table_edit_t),
            <size_t>room * sizeof(kvp_table_edit_t))
        batch.room_for_edits = room
    return 0


cdef Py_ssize_t read_list(batch_t *batch, list ids) except -1:
    # An item's __index__ may change the list while it is read: the size counts at each step, and the item is held.
    cdef Py_ssize_t i = 0
    cdef int32_t *out
    cdef object item
    reserve_ids(batch, PyList_GET_SIZE(ids))
    out = batch.ids + batch.num_ids
    while i < PyList_GET_SIZE(ids) and batch.num_ids + i < batch.room_for_ids:
        item = <object>PyList_GET_ITEM(ids, i)
        out[i] = parse_id(item)
        i += 1
    return i


cdef Py_ssize_t read_array(batch_t *batch, object ids) except -1:
    cdef Py_ssize_t n = kvpool_array_size(ids)
    reserve_ids(batch, n)
    memcpy(batch.ids + batch.num_ids, kvpool_array_data(ids), <size_t>n * sizeof(int32_t))
    return n


cdef Py_ssize_t read_buffer(batch_t *batch, object ids) except -1:
    cdef IdBuffer buffer = open_buffer(ids, False)
    reserve_ids(batch, buffer.length)
    memcpy(batch.ids + batch.num_ids, buffer.data, <size_t>buffer.length * sizeof(int32_t))
    return buffer.length


cdef int add_edit(batch_t *batch, object ids, int32_t group, int32_t row, bint replaces) except -1:
    """One more edit; ids are a list or tuple of ints, an int32 buffer, or None for no ids."""
    cdef kvp_table_edit_t *edit
    cdef Py_ssize_t n = 0
    reserve_edit(batch)
    if PyList_CheckExact(ids):
        n = read_list(batch, <list>ids)
    elif kvpool_int_bytes(ids) == 4:
        n = read_array(batch, ids)
    elif isinstance(ids, (list, tuple)):
        n = read_list(batch, list(ids))
    elif ids is not None:
        n = read_buffer(batch, ids)
    if n > INT32_MAX:
        raise InvalidArgumentError(f"{n} ids are more than a row can hold")
    edit = &batch.edits[batch.num_edits]
    edit.first = batch.num_ids
    edit.num_ids = <int32_t>n
    edit.group = group
    edit.row = row
    edit.replaces = replaces
    batch.num_ids += n
    batch.num_edits += 1
    return 0


# ---- tables ----

cdef class BlockRows:
    """BlockRows(num_rows, width, block_size, ratio=1, num_ids=None, memory=None)\n--\n\n\
    The rows of one KV cache group (vLLM: the host half of ``vllm.v1.worker.block_table.BlockTable``).

    Refusals (``InvalidArgumentError``) change nothing. Cells behind a row's blocks hold the null block, 0.

    Args:
        num_rows: rows, one for each request that may run at a time.
        width: blocks a row can hold, in blocks of the kernel.
        block_size: tokens in a block of the kernel.
        ratio: kernel blocks in a block of the manager; id b becomes b * ratio, ... b * ratio + ratio - 1.
        num_ids: ids of the manager are below; the largest number that fits when left out.
        memory: C-contiguous writable int32 array of num_rows * width items to keep the table in (pinned memory, say).

    Attributes:
        block_ids: the table, an int32 array [num_rows, width] that lies where the native code writes.
        num_blocks_per_row: blocks of each row, int32 [num_rows], likewise, but read-only.
    """

    def __init__(self, int32_t num_rows, int32_t width, int32_t block_size, int32_t ratio=1, num_ids=None, memory=None):
        cdef kvp_table_shape_t shape
        cdef kvp_table_status_t status
        cdef kvp_table_fault_t nothing
        shape.num_rows, shape.width, shape.block_size, shape.ratio = num_rows, width, block_size, ratio
        shape.num_ids = INT32_MAX // max(ratio, 1) if num_ids is None else num_ids
        cdef int64_t num_cells = <int64_t>max(num_rows, 0) * max(width, 0)
        cdef Counts counts, changed
        if memory is None and 0 < num_cells <= INT32_MAX:
            memory = numpy.empty(num_cells, numpy.int32)
        elif memory is not None:
            is_whole = isinstance(memory, numpy.ndarray) and memory.flags.c_contiguous and memory.flags.writeable
            memory = memory.reshape(-1) if is_whole else None
            if kvpool_int_bytes(memory) != 4 or not kvpool_is_writeable(memory):
                raise TypeError("the memory of a table is a writable C-contiguous int32 array")
        memory_pin = block_ids = num_blocks_per_row = None
        if memory is not None:
            memory_pin = pin(memory)
            if kvpool_array_size(memory) != num_cells:
                raise InvalidArgumentError(f"the memory of a table of {num_rows} rows of {width} holds {memory.size}")
            if num_cells > 0:
                block_ids = memory.reshape(num_rows, width)
        counts, changed = new_counts(max(num_rows, 0)), new_counts(2 * <Py_ssize_t>max(num_rows, 0))
        if num_rows > 0:
            num_blocks_per_row = numpy.frombuffer(counts, numpy.int32, num_rows)
        # No code of the caller runs from here on.
        if self.counts is not None:
            raise InvalidArgumentError("a table is made once")
        status = kvp_block_table_init(&self.table, &shape,
                                      <int32_t *>(NULL if memory is None else kvpool_array_data(memory)),
                                      counts.items, <kvp_span_t *>changed.items)
        if status != KVP_TABLE_OK:
            nothing.index = nothing.value = 0
            raise_table_status(status, nothing)
        self.counts, self.changed, self.memory_pin = counts, changed, memory_pin
        self.block_ids, self.num_blocks_per_row = block_ids, num_blocks_per_row

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyObject_GetBuffer(self.block_ids, buffer, flags)

    def __eq__(self, other):
        """Tables of the same shape, with the same blocks in each row."""
        if not isinstance(other, BlockRows):
            return NotImplemented
        return (self.block_size, self.ratio) == (other.block_size, other.ratio) and numpy.array_equal(
            self.num_blocks_per_row, other.num_blocks_per_row) and numpy.array_equal(self.block_ids, other.block_ids)

    __hash__ = None

    def __reduce__(self):
        raise TypeError("a table of block ids can't be pickled or copied: its memory is shared with kernels")

    @property
    def num_rows(self):
        return self.table.num_rows

    @property
    def width(self):
        """Blocks that a row can hold."""
        return self.table.width

    @property
    def block_size(self):
        """Tokens in a block of the kernel."""
        return self.table.block_size

    @property
    def ratio(self):
        """Blocks of the kernel in a block of the manager."""
        return self.table.ratio

    cdef int apply(self, batch_t *batch) except -1:
        cdef kvp_block_table_t *table = &self.table
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        kvpool_lock_acquire(&self.lock)
        status = kvp_block_table_edit(&table, 1, batch.edits, batch.num_edits, batch.ids, &fault)
        return self.release(status, fault)

    cdef int release(self, kvp_table_status_t status, kvp_table_fault_t fault) except -1:
        """What ends a call that had the lock: raises what the status says."""
        kvpool_lock_release(&self.lock)
        return 0 if status == KVP_TABLE_OK else raise_table_status(status, fault)

    def append_row(self, block_ids, int32_t row_idx):
        """Appends block ids (list of ints or int32 array, may be empty) to a row. O(ids)."""
        cdef batch_t batch
        start_batch(&batch)
        try:
            add_edit(&batch, block_ids, 0, row_idx, False)
            self.apply(&batch)
        finally:
            end_batch(&batch)

    def add_row(self, block_ids, int32_t row_idx):
        """Makes these the blocks of a row, whatever it held. O(ids + blocks held)."""
        cdef batch_t batch
        start_batch(&batch)
        try:
            add_edit(&batch, block_ids, 0, row_idx, True)
            self.apply(&batch)
        finally:
            end_batch(&batch)

    def clear_row(self, int32_t row_idx):
        """Empties a row. O(blocks held)."""
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        kvpool_lock_acquire(&self.lock)
        status = kvp_block_table_clear_row(&self.table, row_idx, &fault)
        self.release(status, fault)

    def move_row(self, int32_t src, int32_t tgt):
        """Row ``tgt`` takes the blocks of row ``src``, which is emptied; nothing happens when they are one. O(blocks)."""
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        kvpool_lock_acquire(&self.lock)
        status = kvp_block_table_move_row(&self.table, src, tgt, &fault)
        self.release(status, fault)

    def swap_row(self, int32_t src, int32_t tgt):
        """Two rows change places. O(blocks)."""
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        kvpool_lock_acquire(&self.lock)
        status = kvp_block_table_swap_rows(&self.table, src, tgt, &fault)
        self.release(status, fault)

    def clear(self):
        """Empties all rows. O(blocks held)."""
        kvpool_lock_acquire(&self.lock)
        kvp_block_table_clear(&self.table)
        kvpool_lock_release(&self.lock)

    def num_changes(self, int32_t num_rows):
        """Cells of the first ``num_rows`` rows that were written since they were last taken or dropped. O(rows)."""
        return kvp_block_table_num_changes(&self.table, num_rows)

    def take_changes(self, int32_t num_rows, out not None):
        """Writes these cells as pairs (index in the table, value) to a flat int32 array, and forgets them.

        Returns:
            int: how many, ``num_changes(num_rows)``. InvalidArgumentError if the array has no room for them.
        """
        cdef int64_t n = kvp_block_table_num_changes(&self.table, num_rows)
        if kvpool_int_bytes(out) != 4 or not kvpool_is_writeable(out):
            raise TypeError("changes are written to a one-dimensional writable int32 array")
        if kvpool_array_size(out) < n * KVP_TABLE_CHANGE_WORDS:
            raise InvalidArgumentError(f"{n} changes do not fit into {kvpool_array_size(out)} words")
        kvpool_lock_acquire(&self.lock)
        kvp_block_table_take_changes(&self.table, num_rows, <int32_t *>kvpool_array_data(out))
        kvpool_lock_release(&self.lock)
        return n

    def drop_changes(self, int32_t num_rows):
        """Forgets the changes of these rows: they were copied whole. O(rows)."""
        kvp_block_table_drop_changes(&self.table, num_rows)

    def check(self):
        """Recomputes the invariants of csrc/kvp_block_table.h. InvariantError with the reason. O(cells)."""
        cdef char reason[256]
        if kvp_block_table_check(&self.table, reason, sizeof(reason)) != KVP_TABLE_OK:
            raise InvariantError(reason.decode())


cdef class BlockRowGroups:
    """BlockRowGroups(groups)\n--\n\n\
    The rows of all KV cache groups: a request has the same row in each (vLLM: the host half of ``MultiGroupBlockTable``).

    Args:
        groups: one ``BlockRows`` for each group, all with the same number of rows.
    """

    def __cinit__(self):
        self.tables = NULL

    def __init__(self, groups):
        cdef Py_ssize_t i
        cdef tuple rows = tuple(groups)
        if not rows or not all(isinstance(each, BlockRows) for each in rows):
            raise TypeError("block tables are made of one BlockRows or more")
        if len({each.num_rows for each in rows}) > 1 or len({id(each) for each in rows}) < len(rows):
            raise InvalidArgumentError("the groups must be different tables with the same number of rows")
        for i in range(len(rows)):
            if (<BlockRows>rows[i]).counts is None or (<BlockRows>rows[i]).table.num_rows != (<BlockRows>rows[0]).table.num_rows:
                raise InvalidArgumentError(f"group {i} was never initialised, or has another number of rows than group 0")
        if self.tables is not NULL:
            raise InvalidArgumentError("block tables are made once")
        self.tables = <kvp_block_table_t **>kvp_malloc(len(rows) * sizeof(void *))
        if self.tables is NULL:
            raise MemoryError(f"no memory for {len(rows)} groups")
        self.groups = rows
        self.num_groups = <int32_t>len(rows)
        for i in range(self.num_groups):
            self.tables[i] = &self.group_at(i).table

    def __dealloc__(self):
        kvp_free(self.tables)

    def __reduce__(self):
        raise TypeError("a table of block ids can't be pickled or copied: its memory is shared with kernels")

    cdef BlockRows group_at(self, Py_ssize_t i):
        return <BlockRows>self.groups[i]

    cdef int gather(self, batch_t *batch, object block_ids, int32_t row, bint replaces) except -1:
        """Edits of one row, a list of ids for each group."""
        cdef int32_t i
        cdef tuple by_group = tuple(block_ids)
        if len(by_group) != self.num_groups:
            raise InvalidArgumentError(f"ids of {len(by_group)} groups for tables of {self.num_groups}")
        for i in range(self.num_groups):
            add_edit(batch, by_group[i], i, row, replaces)
        return 0

    cdef int apply(self, batch_t *batch) except -1:
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        cdef int32_t i
        for i in range(self.num_groups):
            kvpool_lock_acquire(&self.group_at(i).lock)
        status = kvp_block_table_edit(self.tables, self.num_groups, batch.edits, batch.num_edits, batch.ids, &fault)
        for i in range(self.num_groups):
            kvpool_lock_release(&self.group_at(i).lock)
        return 0 if status == KVP_TABLE_OK else raise_table_status(status, fault)

    def append_row(self, block_ids, int32_t row_idx):
        """Appends to a row, in each group, the ids that are given for it. O(ids)."""
        cdef batch_t batch
        start_batch(&batch)
        try:
            self.gather(&batch, block_ids, row_idx, False)
            self.apply(&batch)
        finally:
            end_batch(&batch)

    def add_row(self, block_ids, int32_t row_idx):
        """Makes these the blocks of a row in each group. O(ids + blocks held)."""
        cdef batch_t batch
        start_batch(&batch)
        try:
            self.gather(&batch, block_ids, row_idx, True)
            self.apply(&batch)
        finally:
            end_batch(&batch)

    # The groups have equally many rows, so the first group refuses before any has changed.

    def clear_row(self, int32_t row_idx):
        """Empties a row in each group. O(blocks held)."""
        cdef int32_t i
        for i in range(self.num_groups):
            self.group_at(i).clear_row(row_idx)

    def move_row(self, int32_t src, int32_t tgt):
        """Row ``tgt`` takes the blocks of row ``src`` in each group. O(blocks)."""
        cdef int32_t i
        for i in range(self.num_groups):
            self.group_at(i).move_row(src, tgt)

    def swap_row(self, int32_t src, int32_t tgt):
        """Two rows change places in each group. O(blocks)."""
        cdef int32_t i
        for i in range(self.num_groups):
            self.group_at(i).swap_row(src, tgt)

    cdef int gather_step(self, batch_t *batch, object output, dict row_of) except -1:
        """Edits of all requests of a SchedulerOutput, in its order."""
        cdef object cached = output.scheduled_cached_requests
        cdef list ids = list(cached.request_ids)
        cdef list resumed = list(cached.resumed)
        cdef list blocks = list(cached.new_block_ids)
        cdef Py_ssize_t i
        if not PyList_GET_SIZE(ids) == PyList_GET_SIZE(resumed) == PyList_GET_SIZE(blocks):
            raise InvalidArgumentError("the lists of the running requests have unequal lengths")
        for data in output.scheduled_new_requests:
            self.gather(batch, data.block_ids, row_in(row_of, data.request_id), True)
        for i in range(PyList_GET_SIZE(ids)):
            if blocks[i] is not None:
                self.gather(batch, blocks[i], row_in(row_of, ids[i]), resumed[i])
        return 0

    def apply_step(self, output not None, dict row_of not None):
        """Applies what a ``SchedulerOutput`` says about block tables, all of it or nothing, in one call.

        Args:
            output: new requests get their blocks, running ones the ids behind theirs, resumed ones a new table.
            row_of: row of each request id. KeyError for one that is missing.
        """
        cdef batch_t batch
        start_batch(&batch)
        try:
            self.gather_step(&batch, output, row_of)
            self.apply(&batch)
        finally:
            end_batch(&batch)


cdef int32_t row_in(dict row_of, object request_id) except? -1:
    cdef PyObject *found = PyDict_GetItemWithError(row_of, request_id)
    cdef object row
    if found is NULL:
        raise KeyError(f"request {request_id!r} has no row")
    row = <object>found
    return <int32_t>row
