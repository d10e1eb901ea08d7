"""Compares what a recording has written about requests with what they are now. Compiled because it runs at every decode
step; ``kvpool.recording.told`` says the same in Python."""
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t

from kvpool.native.memory cimport kvp_free, kvp_malloc, kvpool_share_memory
from kvpool.native.request cimport RequestCore

kvpool_share_memory()

__all__ = ["PlainCalls", "Told", "pack_batch"]

cdef enum:
    MOST_PLAIN = 256  # calls that are written together

ctypedef enum change_t:
    NOTHING
    ONE_HASH  # a further one
    MORE
    CHANGE_FAILED


cdef class Told:
    """Told(number)\n--\n\n\
    A request as the file has it; see ``kvpool.recording.told``."""
    cdef readonly Py_ssize_t number
    cdef public Py_ssize_t num_tokens
    cdef public Py_ssize_t num_computed_tokens
    cdef public Py_ssize_t num_prompt_tokens
    cdef public Py_ssize_t num_in_flight_tokens
    cdef public Py_ssize_t shared_prefix_boundary
    cdef public Py_ssize_t num_hashes
    cdef Py_ssize_t batch  # number of the last ``PlainCalls`` batch that it is in
    cdef public object last_hash
    cdef public object skips_cache
    cdef public object status

    def __init__(self, Py_ssize_t number):
        self.number = number

    cdef change_t change_of(self, RequestCore request, bint caches) except CHANGE_FAILED:
        """What has changed beside the numbers of tokens."""
        cdef list hashes
        cdef Py_ssize_t n
        if (request.num_prompt_tokens != self.num_prompt_tokens
                or request.num_in_flight_tokens != self.num_in_flight_tokens
                or request.shared_prefix_boundary != self.shared_prefix_boundary
                or request.status is not self.status
                or request.skip_reading_prefix_cache is not self.skips_cache):
            return MORE
        if not caches:
            return NOTHING
        hashes = request.current_hashes()
        n = self.num_hashes
        if len(hashes) < n:
            return MORE
        if n > 0:
            last = hashes[n - 1]
            if last is not self.last_hash and last != self.last_hash:
                return MORE
        if len(hashes) == n:
            return NOTHING
        return ONE_HASH if len(hashes) == n + 1 and type(hashes[n]) is bytes else MORE

    cdef object take_hash(self, RequestCore request):
        """The hash that is new, which counts as told from here on."""
        self.last_hash = request.current_hashes()[self.num_hashes]
        self.num_hashes += 1
        return self.last_hash

    def forget_tokens(self):
        self.num_tokens = -1

    def is_current(self, request, bint caches):
        cdef RequestCore ours
        if not isinstance(request, RequestCore):
            return False
        ours = <RequestCore>request
        return (PyList_GET_SIZE(ours._all_token_ids) == self.num_tokens
                and ours.num_computed_tokens == self.num_computed_tokens and self.change_of(ours, caches) == NOTHING)


cdef int32_t to_int32(Py_ssize_t number) except? -1:
    if number > INT32_MAX or number < INT32_MIN:
        raise OverflowError(f"{number} has no place in a row of int32")
    return <int32_t>number


def pack_batch(dict known not None, requests, bint caches, tell):
    cdef list batch = list(requests)
    cdef Py_ssize_t i = 0, n = PyList_GET_SIZE(batch)
    cdef Py_ssize_t num_bytes = n * <Py_ssize_t>sizeof(int32_t)
    cdef RequestCore ours
    cdef Told told
    cdef change_t change
    cdef list grown = [], hashes = []
    cdef int32_t *rows = <int32_t *>kvp_malloc(<size_t>(3 * num_bytes + 1))
    if rows is NULL:
        raise MemoryError(f"no memory for a batch of {n} requests")
    try:
        # The list is this call's own: whatever a request's code does, its length stays.
        for request in batch:
            told = known.get(request.request_id)
            change = MORE
            if told is not None and isinstance(request, RequestCore):
                ours = <RequestCore>request
                change = told.change_of(ours, caches)
            if change == MORE:
                told = tell(request)
            else:
                if change == ONE_HASH:
                    hashes.append(told.take_hash(ours))
                    grown.append(told.number)
                told.num_tokens = PyList_GET_SIZE(ours._all_token_ids)
                told.num_computed_tokens = ours.num_computed_tokens
            rows[i] = to_int32(told.number)
            rows[n + i] = to_int32(told.num_tokens)
            rows[2 * n + i] = to_int32(told.num_computed_tokens)
            i += 1
        return (PyBytes_FromStringAndSize(<char *>rows, num_bytes),
                PyBytes_FromStringAndSize(<char *>(rows + n), num_bytes),
                PyBytes_FromStringAndSize(<char *>(rows + 2 * n), num_bytes), grown, hashes)
    finally:
        kvp_free(rows)


cdef class PlainCalls:
    """PlainCalls(told, caches)\n--\n\n\
    Calls of ``allocate_slots`` with a request and a number of tokens alone; see ``kvpool.recording.told``."""
    cdef int32_t numbers[MOST_PLAIN]
    cdef int32_t tokens[MOST_PLAIN]
    cdef int32_t computed[MOST_PLAIN]
    cdef int32_t new_tokens[MOST_PLAIN]
    cdef readonly Py_ssize_t num_calls
    cdef Py_ssize_t batch
    cdef list places
    cdef list rows
    cdef list grown
    cdef list hashes
    cdef dict told
    cdef bint caches

    def __init__(self, dict told not None, bint caches):
        self.told, self.caches = told, caches

    def __cinit__(self):
        self.batch = 1
        self.told = {}
        self.places, self.rows, self.grown, self.hashes = [], [], [], []

    @property
    def is_empty(self):
        return self.num_calls == 0 and not self.grown

    @property
    def is_full(self):
        return self.num_calls == MOST_PLAIN

    cpdef bint has(self, Told told):
        return self.num_calls > 0 and told.batch == self.batch

    def add(self, request, num_new_tokens):
        cdef RequestCore ours
        cdef Told told
        cdef change_t change
        cdef int32_t wanted, tokens, computed
        cdef Py_ssize_t i
        if not isinstance(request, RequestCore) or type(num_new_tokens) is not int:
            return False
        ours = <RequestCore>request
        told = self.told.get(ours.request_id)
        if told is None:
            return False
        change = told.change_of(ours, self.caches)
        if change == MORE or change == ONE_HASH and self.has(told):
            return False
        if not 0 <= num_new_tokens <= INT32_MAX or not 0 <= ours.num_computed_tokens <= INT32_MAX or told.number > INT32_MAX:
            return False
        wanted = num_new_tokens
        tokens, computed = <int32_t>PyList_GET_SIZE(ours._all_token_ids), <int32_t>ours.num_computed_tokens
        if self.num_calls >= MOST_PLAIN:
            return False
        if change == ONE_HASH:
            self.hashes.append(told.take_hash(ours))
            self.grown.append(told.number)
        i = self.num_calls  # no code of the caller runs from here on
        if i >= MOST_PLAIN:
            return False
        self.numbers[i], self.tokens[i], self.computed[i], self.new_tokens[i] = <int32_t>told.number, tokens, computed, wanted
        told.num_tokens, told.num_computed_tokens, told.batch = tokens, computed, self.batch
        return True

    def settle(self, rows):
        if rows is None:
            self.places.append(-1 - self.num_calls)
        elif rows is not False:
            self.places.append(self.num_calls)
            self.rows.extend(rows)
        self.num_calls += 1

    def take_grown(self):
        taken = self.grown, self.hashes
        self.grown, self.hashes = [], []
        return taken

    def take(self):
        cdef Py_ssize_t num_bytes = self.num_calls * <Py_ssize_t>sizeof(int32_t)
        taken = (PyBytes_FromStringAndSize(<char *>self.numbers, num_bytes),
                 PyBytes_FromStringAndSize(<char *>self.tokens, num_bytes),
                 PyBytes_FromStringAndSize(<char *>self.computed, num_bytes),
                 PyBytes_FromStringAndSize(<char *>self.new_tokens, num_bytes), self.rows, self.places)
        self.places, self.rows = [], []
        self.num_calls = 0
        self.batch += 1
        return taken
