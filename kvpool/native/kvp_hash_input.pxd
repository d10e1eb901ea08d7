# Extern declarations of csrc/kvp_block_hash.h, nothing else. What they mean is said there.
from libc.stdint cimport int32_t, uint8_t

cdef extern from "kvp_block_hash.h" nogil:
    enum:
        KVP_BLOCK_MAX_PARENT
        KVP_BLOCK_MAX_TOKENS

    ctypedef enum kvp_block_format_t:
        KVP_BLOCK_PICKLE
        KVP_BLOCK_CBOR

    size_t kvp_block_room(size_t parent_len, size_t num_tokens)
    size_t kvp_block_write(kvp_block_format_t format, const uint8_t *parent, size_t parent_len, const int32_t *tokens,
                           size_t num_tokens, uint8_t *out)
