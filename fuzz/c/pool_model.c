/* pool_model.c - see pool_model.h. */
#include "pool_model.h"

#include <string.h>

static const model_hash_t NO_HASH = {.key = NO_KEY};

void model_init(model_t *model, int32_t num_blocks) {
    memset(model, 0, sizeof *model);
    model->num_blocks = num_blocks;
    for (int32_t id = 0; id < num_blocks; id++) {
        model->blocks[id].primary = NO_HASH;
        if (id > 0) {
            model->queue[model->num_free++] = id;
        }
    }
}

static kvp_status_t fail(kvp_fault_t *fault, int64_t index, int32_t id, kvp_status_t status) {
    *fault = (kvp_fault_t){index, id};
    return status;
}

static bool is_id(const model_t *model, int32_t id) { return id >= 0 && id < model->num_blocks; }

/* ---- the queue ---- */

static int32_t place_in_queue(const model_t *model, int32_t id) {
    for (int32_t i = 0; i < model->num_free; i++) {
        if (model->queue[i] == id) {
            return i;
        }
    }
    return -1;
}

bool model_is_queued(const model_t *model, int32_t id) { return place_in_queue(model, id) >= 0; }

static void unqueue(model_t *model, int32_t id) {
    const int32_t place = place_in_queue(model, id);
    memmove(model->queue + place, model->queue + place + 1, (size_t)(model->num_free - place - 1) * sizeof(int32_t));
    model->num_free--;
}

static void enqueue(model_t *model, int32_t place, int32_t id) {
    memmove(model->queue + place + 1, model->queue + place, (size_t)(model->num_free - place) * sizeof(int32_t));
    model->queue[place] = id;
    model->num_free++;
}

int32_t model_num_detached(const model_t *model) {
    int32_t count = 0;
    for (int32_t id = 1; id < model->num_blocks; id++) {
        count += model->blocks[id].ref_cnt == 0 && !model_is_queued(model, id);
    }
    return count;
}

static bool has_hash(const model_block_t *block) { return block->primary.key != NO_KEY || block->num_secondary > 0; }

int32_t model_num_evictable(const model_t *model) {
    int32_t count = 0;
    for (int32_t i = 0; i < model->num_free; i++) {
        count += has_hash(&model->blocks[model->queue[i]]);
    }
    return count;
}

kvp_status_t model_take(model_t *model, int32_t n, bool drops_hashes, int32_t *out) {
    if (n < 0 || n > model->num_free) {
        return KVP_ERR_NO_FREE_BLOCKS;
    }
    for (int32_t i = 0; i < n; i++) {
        out[i] = model->queue[0];
        unqueue(model, out[i]);
        model->blocks[out[i]].ref_cnt = 1;
        if (drops_hashes) {
            model->num_evicted += model_drop_hashes(model, out[i]) > 0;
        }
    }
    return KVP_OK;
}

kvp_status_t model_free(model_t *model, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *fault) {
    model_t next = *model;
    int32_t at_head = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!is_id(model, ids[i])) {
            return fail(fault, i, ids[i], KVP_ERR_BLOCK_ID);
        }
        if (ids[i] == KVP_NULL_BLOCK) {
            continue;
        }
        model_block_t *const block = &next.blocks[ids[i]];
        if (block->ref_cnt == 0) {
            return fail(fault, i, ids[i], KVP_ERR_NOT_IN_USE);
        }
        if (--block->ref_cnt == 0) {
            const bool is_cached = block->primary.key != NO_KEY && model->enable_caching;
            if (where == KVP_PLACE_HEAD || (where == KVP_PLACE_BY_HASH && model->uncached_first && !is_cached)) {
                enqueue(&next, at_head++, ids[i]);
            } else {
                enqueue(&next, next.num_free, ids[i]);
            }
        }
    }
    *model = next;
    return KVP_OK;
}

kvp_status_t model_touch(model_t *model, const int32_t *ids, int64_t n, kvp_fault_t *fault) {
    for (int64_t i = 0; i < n; i++) {
        if (!is_id(model, ids[i])) {
            return fail(fault, i, ids[i], KVP_ERR_BLOCK_ID);
        }
        if ((int64_t)model->blocks[ids[i]].ref_cnt + n > INT32_MAX) {
            return fail(fault, i, ids[i], KVP_ERR_REF_OVERFLOW);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] != KVP_NULL_BLOCK && model->blocks[ids[i]].ref_cnt == 0 && !model_is_queued(model, ids[i])) {
            return fail(fault, i, ids[i], KVP_ERR_NOT_QUEUED);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] != KVP_NULL_BLOCK && model->blocks[ids[i]].ref_cnt++ == 0) {
            unqueue(model, ids[i]);
        }
    }
    return KVP_OK;
}

kvp_status_t model_set_ref_cnt(model_t *model, int32_t id, int32_t ref_cnt) {
    if (ref_cnt < 0) {
        return KVP_ERR_NOT_IN_USE;
    }
    if (id == KVP_NULL_BLOCK) {
        return ref_cnt == 0 ? KVP_OK : KVP_ERR_NULL_BLOCK;
    }
    if (model_is_queued(model, id)) {
        return ref_cnt == 0 ? KVP_OK : KVP_ERR_QUEUED;
    }
    model->blocks[id].ref_cnt = ref_cnt;
    return KVP_OK;
}

kvp_status_t model_pop_detached(model_t *model, int32_t n, int32_t *out) {
    if (n < 0 || n > model->num_free) {
        return KVP_ERR_NO_FREE_BLOCKS;
    }
    for (int32_t i = 0; i < n; i++) {
        out[i] = model->queue[0];
        unqueue(model, out[i]);
    }
    return KVP_OK;
}

kvp_status_t model_detach(model_t *model, int32_t id) {
    if (!model_is_queued(model, id)) {
        return KVP_ERR_NOT_QUEUED;
    }
    unqueue(model, id);
    return KVP_OK;
}

kvp_status_t model_attach(model_t *model, const int32_t *ids, int64_t n, bool at_head, kvp_fault_t *fault) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == KVP_NULL_BLOCK) {
            return fail(fault, i, ids[i], KVP_ERR_NULL_BLOCK);
        }
        if (model->blocks[ids[i]].ref_cnt > 0) {
            return fail(fault, i, ids[i], KVP_ERR_IN_USE);
        }
    }
    model_t next = *model;
    for (int64_t i = 0; i < n; i++) {
        if (model_is_queued(&next, ids[i])) {
            return fail(fault, i, ids[i], KVP_ERR_QUEUED);
        }
        enqueue(&next, at_head ? (int32_t)i : next.num_free, ids[i]);
    }
    *model = next;
    return KVP_OK;
}

/* ---- hashes ---- */

model_hash_t *model_find_block(model_t *model, int key, int32_t id) {
    model_block_t *const block = &model->blocks[id];
    if (block->primary.key == key && block->primary.in_map) {
        return &block->primary;
    }
    for (int i = 0; i < block->num_secondary; i++) {
        if (block->secondary[i].key == key) {
            return &block->secondary[i];
        }
    }
    return NULL;
}

int32_t model_find(const model_t *model, int key) {
    int32_t found = KVP_NONE;
    int64_t stamp = INT64_MAX;
    for (int32_t id = 0; id < model->num_blocks; id++) {
        const model_block_t *const block = &model->blocks[id];
        if (block->primary.key == key && block->primary.in_map && block->primary.stamp < stamp) {
            stamp = block->primary.stamp;
            found = id;
        }
        for (int i = 0; i < block->num_secondary; i++) {
            if (block->secondary[i].key == key && block->secondary[i].stamp < stamp) {
                stamp = block->secondary[i].stamp;
                found = id;
            }
        }
    }
    return found;
}

static kvp_status_t check_key(const model_t *model, int key, int32_t id) {
    if (!is_id(model, id)) {
        return KVP_ERR_BLOCK_ID;
    }
    if (id == KVP_NULL_BLOCK && !model->null_takes_hashes) {
        return KVP_ERR_NULL_BLOCK;
    }
    return key == OVERLONG_KEY ? KVP_ERR_DIGEST_LENGTH : KVP_OK;
}

static void put_in_map(model_t *model, model_hash_t *hash) {
    hash->in_map = true;
    hash->stamp = model->clock++;
}

kvp_status_t model_set_hash(model_t *model, int key, int32_t id, int32_t num_tokens) {
    const kvp_status_t status = check_key(model, key, id);
    if (status != KVP_OK) {
        return status;
    }
    if (model->blocks[id].primary.key != NO_KEY) {
        return KVP_ERR_HAS_HASH;
    }
    model->blocks[id].primary = (model_hash_t){.key = key, .num_tokens = num_tokens};
    return KVP_OK;
}

kvp_status_t model_insert(model_t *model, int key, int32_t id, int32_t num_tokens, bool from_block) {
    const kvp_status_t status = check_key(model, key, id);
    if (status != KVP_OK || model_find_block(model, key, id) != NULL) {
        return status;
    }
    model_block_t *const block = &model->blocks[id];
    if (block->primary.key == key) {
        if (!from_block) {
            put_in_map(model, &block->primary);
        }
    } else if (block->primary.key == NO_KEY && from_block) {
        block->primary = (model_hash_t){.key = key, .num_tokens = num_tokens};
        put_in_map(model, &block->primary);
    } else {
        model_hash_t *const hash = &block->secondary[block->num_secondary++];
        *hash = (model_hash_t){.key = key, .num_tokens = num_tokens};
        put_in_map(model, hash);
    }
    return KVP_OK;
}

bool model_remove_key(model_t *model, int key, int32_t id) {
    model_hash_t *const hash = model_find_block(model, key, id);
    if (hash == NULL) {
        return false;
    }
    model_block_t *const block = &model->blocks[id];
    if (hash == &block->primary) {
        hash->in_map = false;
        return true;
    }
    const int place = (int)(hash - block->secondary);
    memmove(hash, hash + 1, (size_t)(block->num_secondary - place - 1) * sizeof *hash);
    block->num_secondary--;
    return true;
}

void model_reset_hash(model_t *model, int32_t id) { model->blocks[id].primary = NO_HASH; }

int32_t model_drop_hashes(model_t *model, int32_t id) {
    model_block_t *const block = &model->blocks[id];
    const int32_t dropped = block->primary.in_map + block->num_secondary;
    block->primary = NO_HASH;
    block->num_secondary = 0;
    return dropped;
}

void model_reset_hashes(model_t *model) {
    for (int32_t id = 0; id < model->num_blocks; id++) {
        (void)model_drop_hashes(model, id);
    }
}

kvp_status_t model_cache(model_t *model, const int *keys, const int32_t *ids, int64_t n, int32_t first_tokens,
                         int32_t step_tokens, kvp_cache_mode_t mode, kvp_fault_t *fault) {
    model_t next = *model;
    bool seen[MODEL_BLOCKS] = {false};
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == KVP_NULL_BLOCK || ids[i] == KVP_NONE) {
            continue;
        }
        const kvp_status_t status = check_key(model, keys[i], ids[i]);
        if (status != KVP_OK) {
            return fail(fault, i, ids[i], status);
        }
        if (seen[ids[i]]) {
            return fail(fault, i, ids[i], KVP_ERR_DUPLICATE);
        }
        seen[ids[i]] = true;
        const int32_t num_tokens = step_tokens == 0 ? KVP_TOKENS_UNKNOWN : (int32_t)(first_tokens + i * step_tokens);
        model_hash_t *const primary = &next.blocks[ids[i]].primary;
        if (primary->key != NO_KEY) {
            const bool is_longer = primary->num_tokens != KVP_TOKENS_UNKNOWN && primary->num_tokens < num_tokens;
            if (mode == KVP_CACHE_IDEMPOTENT ? primary->key != keys[i] : !is_longer) {
                return fail(fault, i, ids[i], KVP_ERR_HAS_HASH);
            }
            if (mode == KVP_CACHE_IDEMPOTENT) {
                if (model_find_block(&next, keys[i], ids[i]) == NULL) {
                    put_in_map(&next, primary);
                }
                continue;
            }
            (void)model_drop_hashes(&next, ids[i]);
        }
        if (model_find_block(&next, keys[i], ids[i]) == NULL) {
            *primary = (model_hash_t){.key = keys[i], .num_tokens = num_tokens};
            put_in_map(&next, primary);
        }
    }
    *model = next;
    return KVP_OK;
}
