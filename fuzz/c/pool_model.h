/* pool_model.h - what the block pool of kvp.h promises, over plain arrays that are searched from end to end.
 *
 * Nothing here is shared with the core but its names: the free list is an array in order of reuse, a hash is an index
 * into a table of keys, "first inserted" is the smallest stamp. A call that may fail half way works on a copy. */
#ifndef KVP_FUZZ_POOL_MODEL_H
#define KVP_FUZZ_POOL_MODEL_H

#include "kvp.h"

enum { MODEL_BLOCKS = 40, MODEL_KEYS = 24, MODEL_BATCH = 48, NO_KEY = -1, OVERLONG_KEY = MODEL_KEYS };

typedef struct {
    int key; /* NO_KEY: none */
    bool in_map;
    int32_t num_tokens;
    int64_t stamp; /* when it came into the map */
} model_hash_t;

typedef struct {
    int32_t ref_cnt;
    model_hash_t primary;
    model_hash_t secondary[MODEL_KEYS + 1];
    int num_secondary;
} model_block_t;

typedef struct {
    model_block_t blocks[MODEL_BLOCKS];
    int32_t num_blocks;
    int32_t queue[MODEL_BLOCKS];
    int32_t num_free;
    int64_t num_evicted;
    int64_t clock;
    bool enable_caching;
    bool uncached_first;
    bool null_takes_hashes;
} model_t;

void model_init(model_t *model, int32_t num_blocks);
bool model_is_queued(const model_t *model, int32_t id);
int32_t model_num_detached(const model_t *model);
int32_t model_num_evictable(const model_t *model);
/* First inserted block of the key, or KVP_NONE. */
int32_t model_find(const model_t *model, int key);
model_hash_t *model_find_block(model_t *model, int key, int32_t id);

kvp_status_t model_take(model_t *model, int32_t n, bool drops_hashes, int32_t *out);
kvp_status_t model_free(model_t *model, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *fault);
kvp_status_t model_touch(model_t *model, const int32_t *ids, int64_t n, kvp_fault_t *fault);
kvp_status_t model_set_ref_cnt(model_t *model, int32_t id, int32_t ref_cnt);
kvp_status_t model_pop_detached(model_t *model, int32_t n, int32_t *out);
kvp_status_t model_detach(model_t *model, int32_t id);
kvp_status_t model_attach(model_t *model, const int32_t *ids, int64_t n, bool at_head, kvp_fault_t *fault);

kvp_status_t model_set_hash(model_t *model, int key, int32_t id, int32_t num_tokens);
kvp_status_t model_insert(model_t *model, int key, int32_t id, int32_t num_tokens, bool from_block);
bool model_remove_key(model_t *model, int key, int32_t id);
void model_reset_hash(model_t *model, int32_t id);
int32_t model_drop_hashes(model_t *model, int32_t id);
void model_reset_hashes(model_t *model);
kvp_status_t model_cache(model_t *model, const int *keys, const int32_t *ids, int64_t n, int32_t first_tokens,
                         int32_t step_tokens, kvp_cache_mode_t mode, kvp_fault_t *fault);

#endif
