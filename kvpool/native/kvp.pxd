# Extern declarations of csrc/kvp.h, nothing else. What they mean is said there.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvp.h" nogil:
    enum:
        KVP_NONE
        KVP_NULL_BLOCK
        KVP_DIGEST_BYTES
        KVP_SECRET_WORDS
        KVP_TOKENS_UNKNOWN
        KVP_ENTRY_IN_MAP

    ctypedef enum kvp_status_t:
        KVP_OK
        KVP_ERR_NO_FREE_BLOCKS
        KVP_ERR_BLOCK_ID
        KVP_ERR_NULL_BLOCK
        KVP_ERR_NOT_IN_USE
        KVP_ERR_REF_OVERFLOW
        KVP_ERR_NOT_QUEUED
        KVP_ERR_QUEUED
        KVP_ERR_IN_USE
        KVP_ERR_HAS_HASH
        KVP_ERR_DUPLICATE
        KVP_ERR_DIGEST_LENGTH
        KVP_ERR_NO_MEMORY
        KVP_ERR_INVARIANT

    ctypedef struct kvp_fault_t:
        int64_t index
        int32_t block_id

    ctypedef struct kvp_link_t:
        pass

    ctypedef struct kvp_free_list_t:
        kvp_link_t *links
        int32_t capacity
        int32_t num_free

    size_t kvp_free_list_links(int32_t capacity)
    void kvp_free_list_init(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity, int32_t first)
    void kvp_free_list_move(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity)
    bint kvp_free_list_is_queued(const kvp_free_list_t *list, int32_t node)
    kvp_status_t kvp_free_list_pop_n(kvp_free_list_t *list, int32_t n, int32_t *out)
    kvp_status_t kvp_free_list_remove(kvp_free_list_t *list, int32_t node)
    kvp_status_t kvp_free_list_append_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault)
    kvp_status_t kvp_free_list_prepend_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault)
    int32_t kvp_free_list_after(const kvp_free_list_t *list, int32_t node)
    int32_t kvp_free_list_before(const kvp_free_list_t *list, int32_t node)
    kvp_status_t kvp_free_list_check(const kvp_free_list_t *list, char *reason, size_t size)

    ctypedef struct kvp_key_t:
        const uint8_t *digest
        uint32_t digest_len
        uint32_t group_id

    ctypedef struct kvp_entry_t:
        uint64_t *digest
        uint32_t group_id
        int32_t num_tokens
        int32_t block_id
        int32_t next_same_key
        uint8_t digest_len
        uint8_t flags

    ctypedef struct kvp_map_t:
        int32_t num_keys
        int32_t num_entries
        int32_t num_blocks
        uint8_t *has_hash

    kvp_status_t kvp_map_create(const uint64_t *secret, kvp_map_t **out)
    void kvp_map_destroy(kvp_map_t *map)
    kvp_status_t kvp_map_reserve(kvp_map_t *map, int32_t keys, int32_t extra)
    const kvp_entry_t *kvp_map_entry(const kvp_map_t *map, int32_t index)
    int32_t kvp_map_find(const kvp_map_t *map, const kvp_key_t *key)
    int32_t kvp_map_find_block(const kvp_map_t *map, const kvp_key_t *key, int32_t block_id)
    kvp_status_t kvp_map_add(kvp_map_t *map, const kvp_key_t *key, int32_t block_id, int32_t *entry)
    void kvp_map_discard(kvp_map_t *map, int32_t entry)

    ctypedef struct kvp_pool_t:
        kvp_free_list_t free_list
        kvp_map_t map
        int32_t *ref_cnt
        int32_t num_blocks
        int64_t num_evicted
        bint enable_caching
        bint null_takes_hashes

    ctypedef enum kvp_placement_t:
        KVP_PLACE_BY_HASH
        KVP_PLACE_TAIL
        KVP_PLACE_HEAD

    ctypedef enum kvp_cache_mode_t:
        KVP_CACHE_PROMOTE
        KVP_CACHE_IDEMPOTENT

    kvp_status_t kvp_pool_create(int32_t num_blocks, bint enable_caching, bint uncached_first, const uint64_t *secret,
                                 kvp_pool_t **out)
    void kvp_pool_destroy(kvp_pool_t *pool)
    size_t kvp_pool_nbytes(const kvp_pool_t *pool)
    kvp_status_t kvp_pool_allocate(kvp_pool_t *pool, int32_t n, int32_t *out)
    kvp_status_t kvp_pool_take(kvp_pool_t *pool, int32_t n, int32_t *out)
    kvp_status_t kvp_pool_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                               kvp_fault_t *fault)
    int64_t kvp_pool_free_valid(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                                kvp_fault_t *faults, int64_t room)
    kvp_status_t kvp_pool_can_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault)
    kvp_status_t kvp_pool_touch(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault)
    kvp_status_t kvp_pool_set_ref_cnt(kvp_pool_t *pool, int32_t id, int32_t ref_cnt)
    kvp_status_t kvp_pool_pop_detached(kvp_pool_t *pool, int32_t n, int32_t *out)
    kvp_status_t kvp_pool_detach(kvp_pool_t *pool, int32_t id)
    kvp_status_t kvp_pool_attach(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                                 kvp_fault_t *fault)
    bint kvp_pool_is_reachable(const kvp_pool_t *pool, const kvp_key_t *key, int32_t id)
    int64_t kvp_pool_find_prefix(const kvp_pool_t *pool, const kvp_key_t *keys, int64_t n, int32_t *out)
    kvp_status_t kvp_pool_cache(kvp_pool_t *pool, const kvp_key_t *keys, const int32_t *ids, int64_t n,
                                int32_t first_tokens, int32_t step_tokens, kvp_cache_mode_t mode, kvp_fault_t *fault)
    kvp_status_t kvp_pool_insert_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens)
    kvp_status_t kvp_pool_insert_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id)
    bint kvp_pool_remove_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id)
    kvp_status_t kvp_pool_set_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens)
    void kvp_pool_reset_hash(kvp_pool_t *pool, int32_t id)
    int32_t kvp_pool_drop_hashes(kvp_pool_t *pool, int32_t id)
    void kvp_pool_reset_hashes(kvp_pool_t *pool)
    int32_t kvp_pool_primary(const kvp_pool_t *pool, int32_t id)
    int32_t kvp_pool_next_secondary(const kvp_pool_t *pool, int32_t id, int32_t entry)
    int32_t kvp_pool_num_evictable(const kvp_pool_t *pool)
    kvp_status_t kvp_pool_check(const kvp_pool_t *pool, char *reason, size_t size)
