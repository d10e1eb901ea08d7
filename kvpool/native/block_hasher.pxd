# Hashes of plain blocks, native.
from libc.stdint cimport int32_t, uint8_t

from kvpool.native.kvp_hash_input cimport kvp_hash_input_format_t

ctypedef int (*sha256_init_t)(void *context) noexcept nogil
ctypedef int (*sha256_update_t)(void *context, const void *data, size_t n) noexcept nogil
ctypedef int (*sha256_final_t)(unsigned char *digest, void *context) noexcept nogil


cdef class BlockHasherCore:
    cdef readonly Py_ssize_t block_size
    cdef kvp_hash_input_format_t form
    cdef bint is_form_known
    cdef object digest
    cdef sha256_init_t sha256_init
    cdef sha256_update_t sha256_update
    cdef sha256_final_t sha256_final

    cdef bint is_native_size(self, Py_ssize_t num_tokens) noexcept
    cdef bytes digest_of(self, const uint8_t *data, size_t n)
    cdef bytes hash_at(self, bytes parent, list tokens, Py_ssize_t start, Py_ssize_t n, int32_t *ids, uint8_t *out)
    cdef int hash_run(self, bytes parent, list tokens, Py_ssize_t start, Py_ssize_t size, Py_ssize_t num_blocks,
                      list hashes) except -1
