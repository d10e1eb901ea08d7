# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
# cython: embedsignature=True, freethreading_compatible=True
"""What attention backends want of rows of block ids, native: slots, rows of keys and values, compressed rows, rows in
the order of the batch, and the leading blocks that a batch has in common.

``StepOutputs`` gives all of it for a step of the scheduler in one call, in arrays that are made once.
"""
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from kvpool._int_arrays cimport (
    kvpool_array_data, kvpool_array_size, kvpool_import_arrays, kvpool_int_bytes, kvpool_is_writeable,
)
from kvpool._kvp_block_table cimport (
    KVP_TABLE_OK, KVP_TABLE_PAD, kvp_block_table_t, kvp_ints_t, kvp_table_compress, kvp_table_fault_t,
    kvp_table_gather, kvp_table_kv_rows, kvp_table_num_common, kvp_table_query_slots, kvp_table_slots,
    kvp_table_status_t,
)
from kvpool._tables cimport (
    BlockRowGroups, BlockRows, batch_t, end_batch, ints_of, plain_ints, raise_status, start_batch,
)

import numpy

from kvpool.errors import InvalidArgumentError

kvpool_import_arrays()

PAD_SLOT_ID = KVP_TABLE_PAD


cdef int64_t *slots_out(object out, Py_ssize_t n) except NULL:
    if kvpool_int_bytes(out) != 8 or not kvpool_is_writeable(out):
        raise TypeError("slots are written to a one-dimensional writable int64 array")
    if kvpool_array_size(out) < n:
        raise InvalidArgumentError(f"{n} tokens do not fit into {kvpool_array_size(out)} slots")
    return <int64_t *>kvpool_array_data(out)


cdef int check_same(object rows, Py_ssize_t n) except -1:
    if rows is not None and kvpool_array_size(rows) != n:
        raise InvalidArgumentError(f"{kvpool_array_size(rows)} rows for a batch of {n}")
    return 0


def compute_slots(BlockRows table not None, rows, positions, out=None):
    """Slots of tokens: ``table[row, position // block_size] * block_size + position % block_size``.

    Args:
        rows: row of each token; None where token i is in row i, as when every request decodes one token.
        positions: of the tokens in their requests, integers [n] in host memory. A position that no block of the row
            holds is an InvalidArgumentError, and nothing is written.
        out: int64 array of n or more; a new one when left out.

    Returns:
        The int64 array [n] of slots, the first items of ``out``. O(n).
    """
    cdef object places = None if rows is None else plain_ints(rows)
    cdef object tokens = plain_ints(positions)
    cdef Py_ssize_t n = kvpool_array_size(tokens)
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    check_same(places, n)
    if out is None:
        out = numpy.empty(n, numpy.int64)
    status = kvp_table_slots(&table.table, ints_of(places), ints_of(tokens), n, slots_out(out, n), &fault)
    if status != KVP_TABLE_OK:
        raise_status(status, fault)
    return out if kvpool_array_size(out) == n else out[:n]


def compute_query_slots(BlockRows table not None, query_starts, positions, out not None):
    """Slots of packed queries, as vLLM's slot kernel writes them.

    Row r has the tokens ``query_starts[r] .. query_starts[r + 1] - 1``. Cells behind a row's blocks count as the null
    block; a position outside the row is padding, ``PAD_SLOT_ID``.

    Args:
        query_starts: int32 [num_rows + 1], not falling.
        positions: int64 [n].
        out: int64 array of n or more; what the queries do not cover is left as it is. O(n).
    """
    if kvpool_int_bytes(query_starts) != 4 or kvpool_int_bytes(positions) != 8 or kvpool_array_size(query_starts) < 1:
        raise TypeError("query starts are int32, positions int64, both one-dimensional")
    cdef Py_ssize_t n = kvpool_array_size(positions)
    write_query_slots(table, <int32_t *>kvpool_array_data(query_starts),
                      min(kvpool_array_size(query_starts) - 1, <Py_ssize_t>INT32_MAX),
                      <int64_t *>kvpool_array_data(positions), n, slots_out(out, n))


cdef int write_query_slots(BlockRows table, const int32_t *query_starts, int32_t num_rows, const int64_t *positions,
                           Py_ssize_t n, int64_t *out) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    status = kvp_table_query_slots(&table.table, query_starts, num_rows, positions, n, out, &fault)
    return 0 if status == KVP_TABLE_OK else raise_status(status, fault)


def compute_kv_rows(slots not None, int32_t block_size, key_rows not None, value_rows not None):
    """Rows of keys and values in a cache ``[num_blocks, 2, block_size, ...]`` seen as ``[num_blocks * 2 * block_size, ...]``.

    Tokens without a place (``PAD_SLOT_ID``) go to the null block. All three are int64 arrays of the same length. O(n).
    """
    cdef Py_ssize_t n
    if block_size < 1:
        raise InvalidArgumentError(f"a block of {block_size} tokens")
    if kvpool_int_bytes(slots) != 8:
        raise TypeError("slots are a one-dimensional int64 array")
    n = kvpool_array_size(slots)
    kvp_table_kv_rows(<int64_t *>kvpool_array_data(slots), n, block_size, slots_out(key_rows, n), slots_out(value_rows, n))


def compress_rows(BlockRows table not None, rows, num_tokens):
    """The blocks that hold each request's tokens, in compressed rows (FlashInfer's paged layout).

    Args:
        rows: row of each request; None for the first ones in order.
        num_tokens: tokens of each request, [n]; at least 1, and no more than its blocks hold: InvalidArgumentError.

    Returns:
        (starts, blocks, last_block_lens), int32: starts [n + 1] (FlashInfer: indptr), blocks [starts[n]] (indices),
        last_block_lens [n] in 1 .. block_size (last_page_len). O(blocks).
    """
    cdef object places = None if rows is None else plain_ints(rows)
    cdef object tokens = plain_ints(num_tokens)
    cdef Py_ssize_t n = kvpool_array_size(tokens)
    check_same(places, n)
    starts, lens = numpy.empty(n + 1, numpy.int32), numpy.empty(n, numpy.int32)
    cdef object used = table.num_blocks_per_row[:n] if places is None else table.num_blocks_per_row.take(places, mode="clip")
    blocks = numpy.empty(int(used.sum(dtype=numpy.int64)), numpy.int32)
    write_compressed(table, ints_of(places), ints_of(tokens), n, starts, blocks, lens)
    return starts, blocks[:starts[n]], lens


cdef int write_compressed(BlockRows table, kvp_ints_t rows, kvp_ints_t num_tokens, Py_ssize_t n, object starts,
                          object blocks, object lens) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    status = kvp_table_compress(&table.table, rows, num_tokens, n, <int32_t *>kvpool_array_data(starts),
                                <int32_t *>kvpool_array_data(blocks), kvpool_array_size(blocks),
                                <int32_t *>kvpool_array_data(lens), &fault)
    return 0 if status == KVP_TABLE_OK else raise_status(status, fault)


def gather_rows(BlockRows table not None, rows, int32_t width):
    """A padded table in the order of a batch: int32 [n, width], cut or filled up with the null block. O(n * width)."""
    cdef object places = plain_ints(rows)
    cdef Py_ssize_t n = kvpool_array_size(places)
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    if width < 1:
        raise InvalidArgumentError(f"rows of {width} blocks")
    out = numpy.empty(n * width, numpy.int32)
    status = kvp_table_gather(&table.table, ints_of(places), n, width, <int32_t *>kvpool_array_data(out), &fault)
    if status != KVP_TABLE_OK:
        raise_status(status, fault)
    return out.reshape(n, width)


cdef int32_t num_common(BlockRows table, kvp_ints_t rows, Py_ssize_t n, int32_t limit) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    cdef int32_t common = 0
    status = kvp_table_num_common(&table.table, rows, n, limit, &common, &fault)
    return common if status == KVP_TABLE_OK else raise_status(status, fault)


def num_common_blocks(BlockRows table not None, rows, int32_t limit):
    """Leading blocks that all rows of a batch share, at most ``limit``. The null block holds no data and ends them.

    A limit of ``min(num_computed_tokens) // block_size`` leaves the blocks whose keys and values are there already.
    O(rows * blocks in common).
    """
    cdef object places = plain_ints(rows)
    return num_common(table, ints_of(places), kvpool_array_size(places), limit)


cdef class StepOutputs:
    """What kernels need of one step, by one call a step, in arrays that are made once.

    A batch lists the running and resumed requests of the ``SchedulerOutput`` in its order, then the new ones. After
    ``apply_step`` the first ``num_requests`` or ``num_tokens`` items of the arrays belong to the step.

    Args:
        groups: the tables of all KV cache groups.
        max_num_tokens: tokens of the largest step.
        with_kv_rows: also the rows of keys and values of each token.
        with_compressed: also the compressed rows of each group.
        make_array: makes the arrays from (number of items, numpy dtype); pinned ones, say. ``numpy.empty`` if left out.

    Attributes:
        num_requests, num_tokens: of the step.
        rows: int32, row of each request.
        seq_lens: int32, tokens of each request after the step.
        query_starts: int32, first token of each request, and ``num_tokens`` behind the last.
        positions: int64, of each token in its request.
        token_rows: int32, row of each token.
        slots: for each group, int64, slot of each token.
        key_rows, value_rows: for each group, int64, see ``compute_kv_rows``.
        block_starts, blocks, last_block_lens: for each group, int32, see ``compress_rows``.
        num_common_blocks: for each group, leading blocks in common whose keys and values are there, see the function.
    """
    cdef readonly BlockRowGroups groups
    cdef readonly Py_ssize_t num_requests
    cdef readonly Py_ssize_t num_tokens
    cdef readonly object rows, seq_lens, query_starts, positions, token_rows
    cdef readonly list slots, key_rows, value_rows, block_starts, blocks, last_block_lens, num_common_blocks
    cdef int32_t *row
    cdef int32_t *seq_len
    cdef int32_t *query_start
    cdef int64_t *position
    cdef int32_t *token_row
    cdef int32_t max_num_requests
    cdef int64_t max_num_tokens
    cdef bint with_kv_rows, with_compressed

    def __init__(self, BlockRowGroups groups not None, int32_t max_num_tokens, *, bint with_kv_rows=False,
                 bint with_compressed=False, make_array=numpy.empty):
        if max_num_tokens < 1:
            raise InvalidArgumentError(f"steps of at most {max_num_tokens} tokens")
        cdef int32_t num_rows = groups.group_at(0).table.num_rows
        cdef Py_ssize_t num_groups = groups.num_groups
        self.groups, self.max_num_requests, self.max_num_tokens = groups, num_rows, max_num_tokens
        self.with_kv_rows, self.with_compressed = with_kv_rows, with_compressed
        self.rows, self.seq_lens, self.query_starts = (make_array(n, numpy.int32) for n in (num_rows, num_rows, num_rows + 1))
        self.positions, self.token_rows = make_array(max_num_tokens, numpy.int64), make_array(max_num_tokens, numpy.int32)
        self.row, self.seq_len = <int32_t *>kvpool_array_data(self.rows), <int32_t *>kvpool_array_data(self.seq_lens)
        self.query_start = <int32_t *>kvpool_array_data(self.query_starts)
        self.position = <int64_t *>kvpool_array_data(self.positions)
        self.token_row = <int32_t *>kvpool_array_data(self.token_rows)
        tokens = [max_num_tokens] * num_groups
        self.slots = [make_array(n, numpy.int64) for n in tokens]
        self.key_rows, self.value_rows = ([make_array(n, numpy.int64) for n in tokens if with_kv_rows] for _ in range(2))
        sizes = [(num_rows + 1, num_rows * rows.width, num_rows) for rows in groups.groups if with_compressed]
        self.block_starts, self.blocks, self.last_block_lens = (
            [make_array(size[i], numpy.int32) for size in sizes] for i in range(3))
        self.num_common_blocks = [0] * num_groups
        self.query_start[0] = 0

    cdef int add_request(self, object request_id, object row_of, object num_scheduled, int64_t computed) except -1:
        """Puts a request behind those of the step; its tokens are the next ones."""
        cdef PyObject *row = PyDict_GetItemWithError(row_of, request_id)
        cdef PyObject *scheduled = PyDict_GetItemWithError(num_scheduled, request_id)
        if row is NULL or scheduled is NULL:
            raise KeyError(f"request {request_id!r} has no {'row' if row is NULL else 'scheduled tokens'}")
        cdef int64_t n = <object>scheduled
        cdef int64_t end = self.query_start[self.num_requests] + n
        if self.num_requests == self.max_num_requests or n < 1 or end > self.max_num_tokens or computed < 0:
            raise InvalidArgumentError(f"request {request_id!r}: {n} tokens behind {computed} in a step of {end}, where "
                                       f"{self.max_num_requests} rows and {self.max_num_tokens} tokens fit")
        self.row[self.num_requests] = <object>row
        self.seq_len[self.num_requests] = <int32_t>min(computed + n, <int64_t>INT32_MAX)
        self.num_requests += 1
        self.query_start[self.num_requests] = <int32_t>end
        return 0

    cdef int gather_batch(self, object output, dict row_of) except -1:
        cdef object cached = output.scheduled_cached_requests
        cdef dict num_scheduled = output.num_scheduled_tokens
        cdef list ids = cached.request_ids
        cdef list computed = cached.num_computed_tokens
        cdef Py_ssize_t i
        if PyList_GET_SIZE(ids) != PyList_GET_SIZE(computed):
            raise InvalidArgumentError("the lists of the running requests have unequal lengths")
        self.num_requests = self.num_tokens = 0
        for i in range(PyList_GET_SIZE(ids)):
            self.add_request(<object>PyList_GET_ITEM(ids, i), row_of, num_scheduled, <object>PyList_GET_ITEM(computed, i))
        for data in output.scheduled_new_requests:
            self.add_request(data.request_id, row_of, num_scheduled, data.num_computed_tokens)
        return 0

    cdef int64_t spread_tokens(self) noexcept:
        """Position and row of each token; returns the fewest tokens that a request had before the step."""
        cdef int64_t fewest = INT32_MAX
        cdef int64_t first
        cdef Py_ssize_t i, token
        for i in range(self.num_requests):
            first = self.seq_len[i] - (self.query_start[i + 1] - self.query_start[i])
            fewest = min(fewest, first)
            for token in range(self.query_start[i], self.query_start[i + 1]):
                self.position[token] = first + (token - self.query_start[i])
                self.token_row[token] = self.row[i]
        self.num_tokens = self.query_start[self.num_requests]
        return fewest

    cdef int write_group(self, Py_ssize_t g, int64_t fewest) except -1:
        cdef BlockRows table = self.groups.group_at(g)
        cdef kvp_ints_t token_rows = ints_of(self.token_rows)
        cdef kvp_ints_t rows = ints_of(self.rows)
        cdef kvp_table_fault_t fault
        cdef kvp_table_status_t status
        cdef int64_t *slots = <int64_t *>kvpool_array_data(self.slots[g])
        status = kvp_table_slots(&table.table, token_rows, ints_of(self.positions), self.num_tokens, slots, &fault)
        if status != KVP_TABLE_OK:
            raise_status(status, fault)
        if self.with_kv_rows:
            kvp_table_kv_rows(slots, self.num_tokens, table.table.block_size,
                              <int64_t *>kvpool_array_data(self.key_rows[g]),
                              <int64_t *>kvpool_array_data(self.value_rows[g]))
        if self.with_compressed:
            write_compressed(table, rows, ints_of(self.seq_lens), self.num_requests, self.block_starts[g],
                             self.blocks[g], self.last_block_lens[g])
        self.num_common_blocks[g] = num_common(table, rows, self.num_requests,
                                               <int32_t>(fewest // table.table.block_size))
        return 0

    def apply_step(self, output not None, dict row_of not None):
        """Applies what a ``SchedulerOutput`` says about block tables and writes the arrays of this step.

        Args:
            output: see ``BlockRowGroups.apply_step``.
            row_of: row of each request id.

        Raises:
            KeyError: a request without a row or without tokens; no table has changed.
            InvalidArgumentError: no room for the step or for a row's blocks, with no table changed; or a token for which
                the scheduler gave no block, with its appends applied.
        """
        cdef batch_t batch
        cdef Py_ssize_t g
        cdef int64_t fewest
        start_batch(&batch)
        try:
            self.groups.gather_step(&batch, output, row_of)
            self.gather_batch(output, row_of)
            self.groups.apply(&batch)
        finally:
            end_batch(&batch)
        fewest = self.spread_tokens()
        for g in range(self.groups.num_groups):
            self.write_group(g, fewest)


cdef class QuerySlots:
    """Slots of packed queries for one group, where the caller has addresses: how an engine's tensors come.

    Keeps the tail of ``out`` padded. Only what the step before had written there is written again.

    Args:
        table: the rows.
        out: int64 array; becomes all padding with the first call, but for its tokens.
    """
    cdef BlockRows table
    cdef object out
    cdef int64_t *slots
    cdef Py_ssize_t room
    cdef Py_ssize_t num_written

    def __init__(self, BlockRows table not None, out not None):
        self.table, self.out = table, out
        self.room = self.num_written = kvpool_array_size(out)
        self.slots = slots_out(out, 1)

    def write(self, int32_t num_rows, size_t query_starts, size_t positions, Py_ssize_t num_tokens):
        """``compute_query_slots`` for int32 query starts [num_rows + 1] and int64 positions [num_tokens] at two addresses.

        The caller answers for the addresses. O(tokens of this step and the one before).
        """
        cdef Py_ssize_t i
        if num_tokens > self.room:
            raise InvalidArgumentError(f"{num_tokens} tokens do not fit into {self.room} slots")
        write_query_slots(self.table, <const int32_t *>query_starts, num_rows, <const int64_t *>positions, num_tokens,
                          self.slots)
        for i in range(num_tokens, self.num_written):
            self.slots[i] = KVP_TABLE_PAD
        self.num_written = num_tokens
