# Extern declarations of csrc/kvp_hash_input.h, nothing else. What they mean is said there.
from libc.stdint cimport int32_t, uint8_t

cdef extern from "kvp_hash_input.h" nogil:
    enum:
        KVP_HASH_INPUT_MAX_PARENT
        KVP_HASH_INPUT_MAX_TOKENS

    ctypedef enum kvp_hash_input_format_t:
        KVP_HASH_INPUT_PICKLE
        KVP_HASH_INPUT_CBOR

    size_t kvp_hash_input_room(size_t parent_len, size_t num_tokens)
    size_t kvp_hash_input_write(kvp_hash_input_format_t format, const uint8_t *parent, size_t parent_len,
                                const int32_t *tokens, size_t num_tokens, uint8_t *out)
