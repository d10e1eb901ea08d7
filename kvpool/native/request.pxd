# Requests, native: token counts are loads, for whoever cimports them.
from kvpool.native.block_hasher cimport BlockHasherCore


cdef class TokenList(list):
    cdef public Py_ssize_t first_changed

    cdef int note(self, object index) except -1


cdef class RequestCore:
    cdef readonly TokenList _all_token_ids
    cdef readonly list _output_token_ids
    cdef readonly object _block_hasher
    cdef readonly object _before_append
    cdef list hashes
    cdef Py_ssize_t hash_block_size
    cdef BlockHasherCore native_hasher

    cdef public object request_id
    cdef public object status
    cdef public object prompt_token_ids
    cdef public object prompt_embeds
    cdef public object prompt_is_token_ids
    cdef public object mm_features
    cdef public object lora_request
    cdef public object cache_salt
    cdef public object session_id
    cdef public object arrival_time
    cdef public object priority
    cdef public object max_tokens
    cdef public object skip_reading_prefix_cache
    cdef public object spec_token_ids
    cdef public object all_token_ids
    cdef public object output_token_ids
    cdef public object _prompt_embeds_per_block_hashes

    cdef public Py_ssize_t num_prompt_tokens
    cdef public Py_ssize_t num_computed_tokens
    cdef public Py_ssize_t num_in_flight_tokens
    cdef public Py_ssize_t num_output_placeholders
    cdef public Py_ssize_t num_preemptions
    cdef public Py_ssize_t shared_prefix_boundary

    cdef list current_hashes(self)
    cdef bint are_new_blocks_plain(self) except -1
    cdef int refresh(self) except -1
