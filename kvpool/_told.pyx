# cython: language_level=3, wraparound=False, initializedcheck=False, binding=False
# cython: embedsignature=True, freethreading_compatible=True
"""What a recording has told of requests, compared with what they are: at every decode step, so it is native.
``kvpool.recording.told`` says the same in Python."""
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t

from kvpool._memory cimport kvp_free, kvp_malloc, kvpool_share_memory
from kvpool._request cimport RequestBase

kvpool_share_memory()


cdef class Told:
    """A request as the file has it; see ``kvpool.recording.told``."""
    cdef readonly Py_ssize_t number
    cdef public Py_ssize_t num_tokens
    cdef public Py_ssize_t num_computed_tokens
    cdef public Py_ssize_t num_prompt_tokens
    cdef public Py_ssize_t num_in_flight_tokens
    cdef public Py_ssize_t shared_prefix_boundary
    cdef public Py_ssize_t num_hashes
    cdef public object last_hash
    cdef public object skips_cache
    cdef public object status

    def __init__(self, Py_ssize_t number):
        self.number = number

    cdef bint has_rest_of(self, RequestBase request, bint caches) except -1:
        """Whether all but the numbers of tokens is as it was told."""
        cdef list hashes
        cdef Py_ssize_t n
        if (request.num_prompt_tokens != self.num_prompt_tokens
                or request.num_in_flight_tokens != self.num_in_flight_tokens
                or request.shared_prefix_boundary != self.shared_prefix_boundary
                or request.status is not self.status
                or request.skip_reading_prefix_cache is not self.skips_cache):
            return False
        if not caches:
            return True
        hashes = request.current_hashes()
        n = PyList_GET_SIZE(hashes)
        if n != self.num_hashes:
            return False
        if n == 0:
            return True
        last = hashes[n - 1]
        return last is self.last_hash or last == self.last_hash

    def is_current(self, request, bint caches):
        cdef RequestBase ours
        if not isinstance(request, RequestBase):
            return False
        ours = <RequestBase>request
        return (PyList_GET_SIZE(ours._all_token_ids) == self.num_tokens
                and ours.num_computed_tokens == self.num_computed_tokens and self.has_rest_of(ours, caches))


cdef int32_t to_int32(Py_ssize_t number) except? -1:
    if number > INT32_MAX or number < INT32_MIN:
        raise OverflowError(f"{number} has no place in a row of int32")
    return <int32_t>number


def pack_batch(dict known not None, requests, bint caches, tell):
    cdef list batch = list(requests)
    cdef Py_ssize_t i = 0, n = PyList_GET_SIZE(batch)
    cdef Py_ssize_t num_bytes = n * <Py_ssize_t>sizeof(int32_t)
    cdef RequestBase ours
    cdef Told told
    cdef int32_t *rows = <int32_t *>kvp_malloc(<size_t>(3 * num_bytes + 1))
    if rows is NULL:
        raise MemoryError(f"no memory for a batch of {n} requests")
    try:
        # The list is this call's own: whatever a request's code does, its length stays.
        for request in batch:
            told = known.get(request.request_id)
            if told is not None and isinstance(request, RequestBase) and told.has_rest_of(<RequestBase>request, caches):
                ours = <RequestBase>request
                told.num_tokens = PyList_GET_SIZE(ours._all_token_ids)
                told.num_computed_tokens = ours.num_computed_tokens
            else:
                told = tell(request)
            rows[i] = to_int32(told.number)
            rows[n + i] = to_int32(told.num_tokens)
            rows[2 * n + i] = to_int32(told.num_computed_tokens)
            i += 1
        return (PyBytes_FromStringAndSize(<char *>rows, num_bytes),
                PyBytes_FromStringAndSize(<char *>(rows + n), num_bytes),
                PyBytes_FromStringAndSize(<char *>(rows + 2 * n), num_bytes))
    finally:
        kvp_free(rows)
