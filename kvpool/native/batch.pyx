"""What every batch needs: a place for its ids and keys, counts, and the callers' int32 buffers."""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy

from kvpool.native.kvp cimport kvp_key_t
from kvpool.native.memory cimport kvp_free, kvp_malloc, kvpool_share_memory
from kvpool.native.id_arrays cimport (
    kvpool_ids_data, kvpool_ids_size, kvpool_import_numpy, kvpool_is_plain_ids, kvpool_new_ids,
)

from operator import index

from kvpool.errors import InvalidArgumentError

kvpool_share_memory()

__all__ = []


cdef extern from *:
    """
    /* Items of a batch: as many as their bytes can be counted. */
    #define KVPOOL_MOST_ITEMS (PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(kvp_key_t))
    """
    const Py_ssize_t MOST_ITEMS "KVPOOL_MOST_ITEMS"


cdef int32_t *large_ids(Py_ssize_t n) except NULL:
    cdef int32_t *ids = <int32_t *>kvp_malloc(<size_t>n * sizeof(int32_t)) if n <= MOST_ITEMS else NULL
    if ids is NULL:
        raise MemoryError(f"no memory for a batch of {n} ids")
    return ids


cdef kvp_key_t *large_keys(Py_ssize_t n) except NULL:
    cdef kvp_key_t *keys = <kvp_key_t *>kvp_malloc(<size_t>n * sizeof(kvp_key_t)) if n <= MOST_ITEMS else NULL
    if keys is NULL:
        raise MemoryError(f"no memory for a batch of {n} keys")
    return keys


cdef int32_t parse_unusual_count(object n) except -1:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"a number of blocks is an int, not {type(n).__name__}: {n!r}")
    # The number itself, whatever its class makes of a comparison.
    cdef int overflow = 0
    cdef long long count = PyLong_AsLongLongAndOverflow(index(n), &overflow)
    if overflow < 0 or overflow == 0 and count < 0:
        raise InvalidArgumentError(f"a number of blocks can't be negative: {n}")
    return INT32_MAX if overflow > 0 or count > INT32_MAX else <int32_t>count


# ---- int32 buffers ----

cdef bint numpy_ready = False


cdef object new_ids(Py_ssize_t n):
    global numpy_ready
    if not numpy_ready:
        kvpool_import_numpy()
        numpy_ready = True
    return kvpool_new_ids(n)


cdef int32_t *data_of(object array) noexcept:
    return kvpool_ids_data(array)


cdef Py_ssize_t size_of(object array) noexcept:
    return kvpool_ids_size(array)


cdef bint is_plain_ids(object ids) noexcept:
    """A numpy array that needs no buffer protocol: the common case. Before numpy is in use there can be none."""
    return numpy_ready and kvpool_is_plain_ids(ids)


cdef class IdBuffer:
    """Borrowed view of a caller's int32 array, released with the object. Only to be read or written before any other code
    of the caller runs: numpy can resize an array under a view."""

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.view)


cdef class IdCopy:
    """Ids of a caller's int32 array that nobody else can change."""

    def __dealloc__(self):
        kvp_free(self.data)


cdef IdCopy copy_ids(object ids):
    cdef IdCopy copy = IdCopy.__new__(IdCopy)
    cdef const int32_t *data
    cdef Py_ssize_t length
    cdef IdBuffer buffer = read_ids(ids, &data, &length)
    copy.data = <int32_t *>kvp_malloc(<size_t>max(length, 1) * sizeof(int32_t))
    if copy.data is NULL:
        raise MemoryError(f"no memory for a batch of {length} ids")
    memcpy(copy.data, data, <size_t>length * sizeof(int32_t))
    copy.length = length
    return copy


cdef IdBuffer open_buffer(object ids, bint writable):
    cdef IdBuffer buffer = IdBuffer.__new__(IdBuffer)
    cdef bytes form
    try:
        PyObject_GetBuffer(ids, &buffer.view, PyBUF_FORMAT | PyBUF_ND | (PyBUF_WRITABLE if writable else 0))
    except (TypeError, BufferError, ValueError) as error:
        raise TypeError(f"ids must be a C-contiguous {'writable ' if writable else ''}int32 buffer, "
                        f"not {type(ids).__name__}: {error}") from None
    buffer.is_open = True
    form = b"B" if buffer.view.format is NULL else <bytes>buffer.view.format
    if buffer.view.itemsize != 4 or form.lstrip(b"@=<") not in (b"i", b"l") or buffer.view.ndim != 1:
        raise TypeError(f"ids must be one-dimensional int32, not {buffer.view.ndim}-dimensional of format "
                        f"{form.decode()!r}")
    buffer.data = <int32_t *>buffer.view.buf
    buffer.length = buffer.view.len // 4
    return buffer


cdef IdBuffer read_ids(object ids, const int32_t **data, Py_ssize_t *length):
    """Where a caller's int32 array lies, and what has to be kept while it is read (None for a plain numpy array)."""
    cdef IdBuffer buffer = None
    if is_plain_ids(ids):
        data[0], length[0] = data_of(ids), size_of(ids)
    else:
        buffer = open_buffer(ids, False)
        data[0], length[0] = buffer.data, buffer.length
    return buffer
