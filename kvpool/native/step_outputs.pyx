"""What attention backends want of rows of block ids, native: slots, rows of keys and values, compressed rows, rows in
the order of the batch, and the leading blocks that a batch has in common.

``StepOutputs`` gives all of it for a step of the scheduler in one call, in arrays that are made once.
"""
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

from kvpool.native.int_arrays cimport (
    kvpool_array_data, kvpool_array_size, kvpool_import_arrays, kvpool_int_bytes, kvpool_is_writeable,
)
from kvpool.native.kvp_block_table cimport (
    KVP_TABLE_OK, KVP_TABLE_PAD, kvp_block_table_t, kvp_ints_t, kvp_table_compress, kvp_table_fault_t,
    kvp_table_kv_rows, kvp_table_num_common, kvp_table_query_slots, kvp_table_slots,
    kvp_table_status_t,
)
from kvpool.native.block_rows cimport (
    BlockRowGroups, BlockRows, Counts, batch_t, end_batch, ints_of, new_counts, pin, plain_ints, raise_table_status, start_batch,
)

import numpy

from kvpool.errors import InvalidArgumentError

kvpool_import_arrays()

__all__ = [
    "PAD_SLOT_ID",
    "QuerySlots",
    "StepOutputs",
    "compress_rows",
    "compute_kv_rows",
    "compute_slots",
    "num_common_blocks",
]

PAD_SLOT_ID = KVP_TABLE_PAD


cdef int64_t *slots_out(object out, Py_ssize_t n) except NULL:
    if kvpool_int_bytes(out) != 8 or not kvpool_is_writeable(out):
        raise TypeError("slots are written to a one-dimensional writable int64 array")
    if kvpool_array_size(out) < n:
        raise InvalidArgumentError(f"{n} tokens do not fit into {kvpool_array_size(out)} slots")
    return <int64_t *>kvpool_array_data(out)


cdef int check_same(object rows, object items, Py_ssize_t n) except -1:
    """The last look at arrays of the caller before the core reads them: numpy's calls can run code that resizes them."""
    if kvpool_array_size(items) != n:
        raise InvalidArgumentError(f"the batch changed from {n} to {kvpool_array_size(items)} items while it was read")
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
    cdef int64_t *slots
    if out is None:
        out = numpy.empty(n, numpy.int64)
    slots = slots_out(out, n)
    check_same(places, tokens, n)
    status = kvp_table_slots(&table.table, ints_of(places), ints_of(tokens), n, slots, &fault)
    if status != KVP_TABLE_OK:
        raise_table_status(status, fault)
    return out if kvpool_array_size(out) == n else out[:n]


cdef int write_query_slots(BlockRows table, const int32_t *query_starts, int32_t num_rows, const int64_t *positions,
                           Py_ssize_t n, int64_t *out) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    status = kvp_table_query_slots(&table.table, query_starts, num_rows, positions, n, out, &fault)
    return 0 if status == KVP_TABLE_OK else raise_table_status(status, fault)


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


cdef inline int64_t int_at(kvp_ints_t ints, Py_ssize_t i) noexcept:
    return (<const int64_t *>ints.items)[i] if ints.is_wide else (<const int32_t *>ints.items)[i]


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
    cdef kvp_ints_t row_of
    cdef int64_t row, room = 0
    cdef Py_ssize_t i
    check_same(places, tokens, n)
    row_of = ints_of(places)
    for i in range(n):
        row = i if row_of.items is NULL else int_at(row_of, i)
        if 0 <= row < table.table.num_rows:
            room += table.table.num_blocks[row]
    starts, lens = numpy.empty(n + 1, numpy.int32), numpy.empty(n, numpy.int32)
    blocks = numpy.empty(room, numpy.int32)
    check_same(places, tokens, n)
    write_compressed(table, ints_of(places), ints_of(tokens), n, starts, blocks, lens)
    return starts, blocks[:starts[n]], lens


cdef int write_compressed(BlockRows table, kvp_ints_t rows, kvp_ints_t num_tokens, Py_ssize_t n, object starts,
                          object blocks, object lens) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    status = kvp_table_compress(&table.table, rows, num_tokens, n, <int32_t *>kvpool_array_data(starts),
                                <int32_t *>kvpool_array_data(blocks), kvpool_array_size(blocks),
                                <int32_t *>kvpool_array_data(lens), &fault)
    return 0 if status == KVP_TABLE_OK else raise_table_status(status, fault)


cdef int32_t num_common(BlockRows table, kvp_ints_t rows, Py_ssize_t n, int32_t limit) except -1:
    cdef kvp_table_fault_t fault
    cdef kvp_table_status_t status
    cdef int32_t common = 0
    status = kvp_table_num_common(&table.table, rows, n, limit, &common, &fault)
    return common if status == KVP_TABLE_OK else raise_table_status(status, fault)


def num_common_blocks(BlockRows table not None, rows, int32_t limit):
    """Leading blocks that all rows of a batch share, at most ``limit``. The null block holds no data and ends them.

    A limit of ``min(num_computed_tokens) // block_size`` leaves the blocks whose keys and values are there already.
    O(rows * blocks in common).
    """
    cdef object places = plain_ints(rows)
    return num_common(table, ints_of(places), kvpool_array_size(places), limit)


cdef class Arrays:
    """What ``make_array`` makes, looked at: one-dimensional, of the type and length asked for, and kept in its place."""
    cdef object make
    cdef list pins

    def __init__(self, make):
        self.make = make
        self.pins = []

    cdef object one(self, Py_ssize_t n, int num_bytes):
        cdef object dtype = numpy.int64 if num_bytes == 8 else numpy.int32
        cdef object array = self.make(n, dtype)
        if isinstance(array, numpy.ndarray):
            self.pins.append(pin(array))
        if kvpool_int_bytes(array) != num_bytes or not kvpool_is_writeable(array) or kvpool_array_size(array) < n:
            raise TypeError(f"make_array({n}, {dtype.__name__}) made no writable array of one dimension and as many items, "
                            f"but {array!r}")
        return array


cdef class StepOutputs:
    """StepOutputs(groups, max_num_tokens, *, with_kv_rows=False, with_compressed=False, make_array=None)\n--\n\n\
    What kernels need of one step, by one call a step, in arrays that are made once.

    A batch lists the running and resumed requests of the ``SchedulerOutput`` in its order, then the new ones. After
    ``apply_step`` the first ``num_requests`` or ``num_tokens`` items of the arrays belong to the step.

    Args:
        groups: the tables of all KV cache groups.
        max_num_tokens: tokens of the largest step.
        with_kv_rows: also the rows of keys and values of each token.
        with_compressed: also the compressed rows of each group.
        make_array: makes the arrays from (number of items, numpy dtype); pinned ones, say. None for ``numpy.empty``.

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
    cdef readonly tuple slots, key_rows, value_rows, block_starts, blocks, last_block_lens
    cdef readonly list num_common_blocks
    # The step that is being gathered. Nobody else can write here, as the caller can into the arrays.
    cdef Counts row
    cdef Counts seq_len
    cdef Counts query_start
    cdef list pins
    cdef bint is_under_way
    cdef int32_t max_num_requests
    cdef int64_t max_num_tokens
    cdef bint with_kv_rows, with_compressed

    def __init__(self, BlockRowGroups groups not None, int32_t max_num_tokens, *, bint with_kv_rows=False,
                 bint with_compressed=False, make_array=None):
        if max_num_tokens < 1:
            raise InvalidArgumentError(f"steps of at most {max_num_tokens} tokens")
        if groups.num_groups < 1:
            raise InvalidArgumentError("these block tables were never initialised")
        cdef int32_t num_rows = groups.group_at(0).table.num_rows
        cdef int32_t num_groups = groups.num_groups
        cdef Py_ssize_t num_items = max_num_tokens
        made = Arrays(numpy.empty if make_array is None else make_array)
        rows, seq_lens = (made.one(num_rows, 4) for _ in range(2))
        query_starts = made.one(<Py_ssize_t>num_rows + 1, 4)
        positions, token_rows = made.one(num_items, 8), made.one(num_items, 4)
        tokens = [num_items] * num_groups
        slots = tuple([made.one(n, 8) for n in tokens])
        key_rows, value_rows = (tuple([made.one(n, 8) for n in tokens if with_kv_rows]) for _ in range(2))
        widths = [groups.group_at(i).table.width for i in range(num_groups) if with_compressed]
        sizes = [(num_rows + 1, num_rows * width, num_rows) for width in widths]
        block_starts, blocks, last_block_lens = (tuple([made.one(size[i], 4) for size in sizes]) for i in range(3))
        row, seq_len = new_counts(num_rows), new_counts(num_rows)
        query_start = new_counts(<Py_ssize_t>num_rows + 1)
        # No code of the caller runs from here on.
        if self.groups is not None:
            raise InvalidArgumentError("the outputs of a step are made once")
        self.max_num_requests, self.max_num_tokens = num_rows, max_num_tokens
        self.with_kv_rows, self.with_compressed = with_kv_rows, with_compressed
        self.rows, self.seq_lens, self.query_starts = rows, seq_lens, query_starts
        self.positions, self.token_rows = positions, token_rows
        self.slots, self.key_rows, self.value_rows = slots, key_rows, value_rows
        self.block_starts, self.blocks, self.last_block_lens = block_starts, blocks, last_block_lens
        self.num_common_blocks = [0] * num_groups
        self.row, self.seq_len, self.query_start = row, seq_len, query_start
        self.pins = made.pins
        (<int32_t *>kvpool_array_data(query_starts))[0] = 0
        self.groups = groups

    cdef int add_request(self, object request_id, object row_of, object num_scheduled, object num_computed) except -1:
        """Puts a request behind those of the step; its tokens are the next ones."""
        cdef PyObject *row_at = PyDict_GetItemWithError(row_of, request_id)
        cdef object found_row = None if row_at is NULL else <object>row_at
        cdef PyObject *tokens_at = PyDict_GetItemWithError(num_scheduled, request_id)
        cdef object found_tokens = None if tokens_at is NULL else <object>tokens_at
        if found_row is None or found_tokens is None:
            raise KeyError(f"request {request_id!r} has no {'row' if found_row is None else 'scheduled tokens'}")
        cdef int64_t n = found_tokens
        cdef int64_t computed = num_computed
        cdef int32_t its_row = found_row
        cdef int64_t begin = self.query_start.items[self.num_requests]
        if (self.num_requests == self.max_num_requests or n < 1 or n > self.max_num_tokens - begin
                or not 0 <= computed <= INT32_MAX - n):
            raise InvalidArgumentError(f"request {request_id!r}: {n} tokens behind {computed} in a step of {begin + found_tokens}, where "
                                       f"{self.max_num_requests} rows and {self.max_num_tokens} tokens fit")
        self.row.items[self.num_requests] = its_row
        self.seq_len.items[self.num_requests] = <int32_t>(computed + n)
        self.num_requests += 1
        self.query_start.items[self.num_requests] = <int32_t>(begin + n)
        return 0

    cdef int gather_batch(self, object output, dict row_of) except -1:
        cdef object cached = output.scheduled_cached_requests
        cdef dict num_scheduled = output.num_scheduled_tokens
        cdef list ids = list(cached.request_ids)
        cdef list computed = list(cached.num_computed_tokens)
        cdef Py_ssize_t i
        if len(ids) != len(computed):
            raise InvalidArgumentError("the lists of the running requests have unequal lengths")
        self.num_requests = self.num_tokens = 0
        for i in range(len(ids)):
            self.add_request(ids[i], row_of, num_scheduled, computed[i])
        for data in output.scheduled_new_requests:
            self.add_request(data.request_id, row_of, num_scheduled, data.num_computed_tokens)
        return 0

    cdef int64_t spread_tokens(self) noexcept:
        """Fills the arrays of requests and tokens; returns the fewest tokens that a request had before the step."""
        cdef int32_t *row = self.row.items
        cdef int32_t *seq_len = self.seq_len.items
        cdef int32_t *start = self.query_start.items
        cdef int64_t *position = <int64_t *>kvpool_array_data(self.positions)
        cdef int32_t *token_row = <int32_t *>kvpool_array_data(self.token_rows)
        cdef size_t num_bytes = <size_t>self.num_requests * sizeof(int32_t)
        cdef int64_t fewest = INT32_MAX
        cdef int64_t first
        cdef Py_ssize_t i, token
        memcpy(kvpool_array_data(self.rows), row, num_bytes)
        memcpy(kvpool_array_data(self.seq_lens), seq_len, num_bytes)
        memcpy(kvpool_array_data(self.query_starts), start, num_bytes + sizeof(int32_t))
        for i in range(self.num_requests):
            first = seq_len[i] - (start[i + 1] - start[i])
            fewest = min(fewest, first)
            for token in range(start[i], start[i + 1]):
                position[token] = first + (token - start[i])
                token_row[token] = row[i]
        self.num_tokens = start[self.num_requests]
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
            raise_table_status(status, fault)
        if self.with_kv_rows:
            kvp_table_kv_rows(slots, self.num_tokens, table.table.block_size,
                              <int64_t *>kvpool_array_data(self.key_rows[g]),
                              <int64_t *>kvpool_array_data(self.value_rows[g]))
        if self.with_compressed:
            write_compressed(table, rows, ints_of(self.seq_lens), self.num_requests, self.block_starts[g],
                             self.blocks[g], self.last_block_lens[g])
        return num_common(table, rows, self.num_requests, <int32_t>(fewest // table.table.block_size))

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
        cdef int32_t g
        cdef int64_t fewest
        cdef list common = []
        if self.groups is None:
            raise InvalidArgumentError("the outputs of a step were never initialised")
        if self.is_under_way:
            raise InvalidArgumentError("a step is under way: apply_step was called from within itself")
        self.is_under_way = True
        start_batch(&batch)
        try:
            self.groups.gather_step(&batch, output, row_of)
            self.gather_batch(output, row_of)
            self.groups.apply(&batch)
            fewest = self.spread_tokens()
            for g in range(self.groups.num_groups):
                common.append(self.write_group(g, fewest))
            self.num_common_blocks = common
        finally:
            end_batch(&batch)
            self.is_under_way = False


cdef class QuerySlots:
    """QuerySlots(table, out)\n--\n\n\
    Slots of packed queries for one group, where the caller has addresses: how an engine's tensors come.

    Keeps the tail of ``out`` padded. Only what the step before had written there is written again.

    Args:
        table: the rows.
        out: int64 array; becomes all padding with the first call, but for its tokens.
    """
    cdef BlockRows table
    cdef object out
    cdef object out_pin
    cdef int64_t *slots
    cdef Py_ssize_t room
    cdef Py_ssize_t num_written

    def __init__(self, BlockRows table not None, out not None):
        cdef int64_t *slots
        out_pin = pin(out) if isinstance(out, numpy.ndarray) else None
        slots = slots_out(out, 1)
        if self.slots is not NULL:
            raise InvalidArgumentError("the slots of a group are made once")
        self.table, self.out, self.out_pin, self.slots = table, out, out_pin, slots
        self.room = self.num_written = kvpool_array_size(out)

    def write(self, int32_t num_rows, size_t query_starts, size_t positions, Py_ssize_t num_tokens):
        """Slots of packed queries, as vLLM's slot kernel writes them.

        Row r has the tokens ``query_starts[r] .. query_starts[r + 1] - 1``. What lies behind a row's blocks counts as the
        null block; a position outside the row is padding, ``PAD_SLOT_ID``. O(tokens of this step and the one before).

        Args:
            query_starts: address of int32 [num_rows + 1], not falling; the caller answers for it.
            positions: address of int64 [num_tokens], likewise.
        """
        cdef Py_ssize_t i
        if self.slots is NULL:
            raise InvalidArgumentError("the slots were never initialised")
        if num_tokens < 0 or num_tokens > self.room:
            raise InvalidArgumentError(f"{num_tokens} tokens do not fit into {self.room} slots")
        write_query_slots(self.table, <const int32_t *>query_starts, num_rows, <const int64_t *>positions, num_tokens,
                          self.slots)
        for i in range(num_tokens, self.num_written):
            self.slots[i] = KVP_TABLE_PAD
        self.num_written = num_tokens
