"""Hashes of plain blocks, native: tokens are read from the list, serialized by the C core and digested by OpenSSL or by
the xxhash package, one block after the other, in one pass."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, uint8_t, uintptr_t

from kvpool.native.kvp_hash_input cimport (
    KVP_HASH_INPUT_CBOR, KVP_HASH_INPUT_MAX_PARENT, KVP_HASH_INPUT_MAX_TOKENS, KVP_HASH_INPUT_PICKLE,
    kvp_hash_input_room, kvp_hash_input_write,
)
from kvpool.native.memory cimport kvp_free, kvp_malloc, kvpool_share_memory

import pickle

import kvpool.hashing.openssl as _openssl
from kvpool.hashing.hashing import NATIVE_PICKLE_PROTOCOL
from kvpool.errors import InvalidArgumentError

kvpool_share_memory()

__all__ = ["BlockHasherCore"]

cdef enum:
    SHA256_BYTES = 32
    CONTEXT_WORDS = 64  # 512 bytes, see _openssl.CONTEXT_BYTES
    SMALL_TOKENS = 256
    SMALL_BYTES = 2048  # holds SMALL_TOKENS and the longest parent


cdef bint read_tokens(list tokens, Py_ssize_t start, Py_ssize_t n, int32_t *ids) noexcept:
    """Whether tokens [start, start + n) are there and exact ints of 32 bits; if so, they are in ids."""
    cdef Py_ssize_t i
    cdef PyObject *token
    cdef long value
    cdef int overflow = 0
    if start < 0 or n > PyList_GET_SIZE(tokens) - start:
        return False
    for i in range(n):
        token = PyList_GET_ITEM(tokens, start + i)
        if not PyLong_CheckExact(<object>token):
            return False
        value = PyLong_AsLongAndOverflow(<object>token, &overflow)
        if overflow != 0 or value < INT32_MIN or value > INT32_MAX:
            return False
        ids[i] = <int32_t>value
    return True


cdef void *room_of(size_t n) except NULL:
    cdef void *room = kvp_malloc(n)
    if room is NULL:
        raise MemoryError(f"no memory for a block of {n} bytes")
    return room


@cython.auto_pickle(False)
cdef class BlockHasherCore:
    """Hashes of plain blocks; see ``BlockHasher``."""

    def _create(self, Py_ssize_t block_size, algorithm, digest):
        cdef bint is_cbor = algorithm.is_cbor
        functions = _openssl.find_sha256() if algorithm.is_sha256 else None
        if block_size < 1:
            raise InvalidArgumentError(f"a block of {block_size} tokens")
        self.block_size = block_size
        self.form = KVP_HASH_INPUT_CBOR if is_cbor else KVP_HASH_INPUT_PICKLE
        self.is_form_known = is_cbor or pickle.HIGHEST_PROTOCOL == NATIVE_PICKLE_PROTOCOL
        self.digest = digest
        self.sha256_init = NULL
        if functions is not None:
            self.sha256_init = <sha256_init_t><uintptr_t>functions.init
            self.sha256_update = <sha256_update_t><uintptr_t>functions.update
            self.sha256_final = <sha256_final_t><uintptr_t>functions.final

    cdef bint is_native_size(self, Py_ssize_t num_tokens) noexcept:
        return self.is_form_known and num_tokens <= KVP_HASH_INPUT_MAX_TOKENS

    cdef bytes digest_of(self, const uint8_t *data, size_t n):
        cdef unsigned long long context[CONTEXT_WORDS]
        cdef bytes digest
        if self.sha256_init is NULL:
            return self.digest(PyBytes_FromStringAndSize(<const char *>data, <Py_ssize_t>n))
        digest = PyBytes_FromStringAndSize(NULL, SHA256_BYTES)
        self.sha256_init(context)
        self.sha256_update(context, data, n)
        self.sha256_final(<unsigned char *>PyBytes_AS_STRING(digest), context)
        return digest

    cdef bytes hash_at(self, bytes parent, list tokens, Py_ssize_t start, Py_ssize_t n, int32_t *ids, uint8_t *out):
        """The hash of tokens [start, start + n), whose size is native; ids and out are room for them."""
        cdef Py_ssize_t parent_len
        cdef size_t length
        if parent is None:
            raise TypeError("the hash of the block before is None: a block hash is bytes")
        parent_len = PyBytes_GET_SIZE(parent)
        if parent_len > KVP_HASH_INPUT_MAX_PARENT or not read_tokens(tokens, start, n, ids):
            return self._hash_exactly(parent, tokens[start:start + n])
        length = kvp_hash_input_write(self.form, <const uint8_t *>PyBytes_AS_STRING(parent), <size_t>parent_len, ids,
                                      <size_t>n, out)
        return self.digest_of(out, length)

    def _hash_plain_block(self, bytes parent not None, list tokens not None):
        """The hash of one block of any length without extra keys."""
        cdef list hashes = []
        self.hash_run(parent, tokens, 0, PyList_GET_SIZE(tokens), 1, hashes)
        return hashes[0]

    def _hash_plain_blocks(self, bytes parent not None, list tokens not None, Py_ssize_t start, list hashes not None):
        """Appends to ``hashes`` those of the full blocks from token ``start`` on. Nobody else may change ``tokens``."""
        cdef Py_ssize_t num_tokens = PyList_GET_SIZE(tokens) - start
        if start < 0:
            raise InvalidArgumentError(f"no token {start}")
        if num_tokens >= self.block_size:
            self.hash_run(parent, tokens, start, self.block_size, num_tokens // self.block_size, hashes)

    cdef int hash_run(self, bytes parent, list tokens, Py_ssize_t start, Py_ssize_t size, Py_ssize_t num_blocks,
                      list hashes) except -1:
        cdef int32_t few_ids[SMALL_TOKENS]
        cdef uint8_t few_bytes[SMALL_BYTES]
        cdef int32_t *ids = few_ids
        cdef uint8_t *out = few_bytes
        cdef Py_ssize_t i
        if not self.is_native_size(size):
            for i in range(num_blocks):
                parent = self._hash_exactly(parent, tokens[start + i * size:start + (i + 1) * size])
                hashes.append(parent)
            return 0
        try:
            if size > SMALL_TOKENS:
                ids = <int32_t *>room_of(<size_t>size * sizeof(int32_t))
                out = <uint8_t *>room_of(kvp_hash_input_room(KVP_HASH_INPUT_MAX_PARENT, <size_t>size))
            for i in range(num_blocks):
                parent = self.hash_at(parent, tokens, start + i * size, size, ids, out)
                hashes.append(parent)
        finally:
            if ids is not few_ids:
                kvp_free(ids)
            if out is not few_bytes:
                kvp_free(out)
        return 0
