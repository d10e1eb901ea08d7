/* fuzz_pool.c - histories of calls on the block pool, against pool_model.h.
 *
 * Ids, counts and keys are what a caller could hand over by mistake: negative, past the end, twice in a batch, the null
 * block, a digest that is too long. After each call the status, the fault and every answer are compared, the pool is
 * checked, and everything that can be read of it is compared with the model. A call that was refused must have left
 * each byte of the pool as it was (but for the links on which segments are strung, which mean nothing in between). */
#include <string.h>

#include "input.h"
#include "kvp_internal.h"
#include "pool_model.h"

enum { MAX_DIGEST = 64, POOL_BYTES = 96 * 1024, MAX_STEPS = 400 };

typedef struct {
    kvp_pool_t *pool;
    model_t model;
    uint8_t digests[MODEL_KEYS + 1][MAX_DIGEST];
    kvp_key_t keys[MODEL_KEYS + 1];
    bool allocation_fails;
} state_t;

/* ---- the keys: equal bytes of other lengths and groups; where `collide` is set, all in one slot ---- */

static void make_keys(state_t *state, bool collide) {
    memset(state->digests, 0, sizeof state->digests);
    for (int i = 0; i < MODEL_KEYS; i++) {
        const uint8_t value = (uint8_t)(i / 4);
        const uint32_t lengths[] = {KVP_DIGEST_BYTES, KVP_DIGEST_BYTES, 8, value};
        state->digests[i][collide && lengths[i % 4] == KVP_DIGEST_BYTES ? KVP_DIGEST_BYTES - 1 : 0] = value;
        state->keys[i] = (kvp_key_t){state->digests[i], lengths[i % 4], i % 4 == 1 ? UINT32_MAX : 0};
    }
    state->keys[OVERLONG_KEY] = (kvp_key_t){state->digests[OVERLONG_KEY], MAX_DIGEST, 0};
}

static int next_key(input_t *input) {
    const uint32_t byte = next_byte(input);
    return byte >= 250 ? OVERLONG_KEY : (int)(byte % MODEL_KEYS);
}

/* ---- what was before, byte by byte ---- */

typedef struct {
    _Alignas(64) char bytes[POOL_BYTES];
    size_t size;
} snapshot_t;

static void put(snapshot_t *snapshot, const void *bytes, size_t size) {
    REQUIRE(snapshot->size + size <= POOL_BYTES);
    if (size > 0) {
        memcpy(snapshot->bytes + snapshot->size, bytes, size);
    }
    snapshot->size += size;
}

static void take_snapshot(snapshot_t *snapshot, const kvp_pool_t *pool) {
    const kvp_free_list_t *const list = &pool->free_list;
    snapshot->size = 0;
    put(snapshot, pool, sizeof *pool);
    put(snapshot, list->links, ((size_t)list->capacity + 1) * sizeof *list->links);
    put(snapshot, pool->ref_cnt, (size_t)pool->num_blocks * sizeof *pool->ref_cnt);
    put(snapshot, pool->map.has_hash, (size_t)pool->num_blocks);
    put(snapshot, pool->map.primary, (size_t)pool->num_blocks * sizeof *pool->map.primary);
    put(snapshot, pool->map.slots, pool->map.num_slots * sizeof *pool->map.slots);
    put(snapshot, pool->map.extra, (size_t)pool->map.extra_capacity * sizeof *pool->map.extra);
}

/* ---- comparison ---- */

static void compare_hash(const state_t *state, int32_t entry, const model_hash_t *hash, int32_t id) {
    const kvp_entry_t *const at = kvp_map_entry(&state->pool->map, entry);
    if (!kvpi_key_equals(at, &state->keys[hash->key]) || at->block_id != id || at->num_tokens != hash->num_tokens ||
        ((at->flags & KVP_ENTRY_IN_MAP) != 0) != hash->in_map) {
        FOUND("entry %d of block %d is not key %d with %d tokens", entry, id, hash->key, hash->num_tokens);
    }
}

static void compare_block(const state_t *state, int32_t id) {
    const kvp_pool_t *const pool = state->pool;
    const model_block_t *const block = &state->model.blocks[id];
    REQUIRE(pool->ref_cnt[id] == block->ref_cnt);
    REQUIRE(kvp_free_list_is_queued(&pool->free_list, id) == model_is_queued(&state->model, id));
    const int32_t primary = kvp_pool_primary(pool, id);
    REQUIRE((primary != KVP_NONE) == (block->primary.key != NO_KEY));
    if (primary != KVP_NONE) {
        compare_hash(state, primary, &block->primary, id);
    }
    int32_t entry = KVP_NONE;
    for (int i = 0; i < block->num_secondary; i++) {
        entry = kvp_pool_next_secondary(pool, id, entry);
        REQUIRE(entry != KVP_NONE);
        compare_hash(state, entry, &block->secondary[i], id);
    }
    REQUIRE(kvp_pool_next_secondary(pool, id, entry) == KVP_NONE);
}

static void compare(const state_t *state) {
    const kvp_pool_t *const pool = state->pool;
    const model_t *const model = &state->model;
    char reason[256];
    if (kvp_pool_check(pool, reason, sizeof reason) != KVP_OK) {
        FOUND("check: %s", reason);
    }
    REQUIRE(pool->free_list.num_free == model->num_free);
    int32_t id = KVP_NONE, back = KVP_NONE;
    for (int32_t i = 0; i < model->num_free; i++) {
        id = kvp_free_list_after(&pool->free_list, id);
        back = kvp_free_list_before(&pool->free_list, back);
        REQUIRE(id == model->queue[i] && back == model->queue[model->num_free - 1 - i]);
    }
    REQUIRE(pool->num_evicted == model->num_evicted && pool->num_detached == model_num_detached(model));
    REQUIRE(kvp_pool_num_evictable(pool) == model_num_evictable(model));
    for (id = 0; id < model->num_blocks; id++) {
        compare_block(state, id);
    }
    for (int key = 0; key <= MODEL_KEYS; key++) {
        const int32_t entry = kvp_map_find(&pool->map, &state->keys[key]);
        REQUIRE((entry == KVP_NONE ? KVP_NONE : kvp_map_entry(&pool->map, entry)->block_id) == model_find(model, key));
    }
}

/* ---- calls ---- */

typedef struct {
    int32_t ids[MODEL_BATCH];
    int64_t n;
} batch_t;

/* A heap copy of the batch, exactly as long as it is, so that a read past its end is seen. */
static int32_t *exact(const batch_t *batch) {
    int32_t *const ids = malloc((size_t)batch->n * sizeof *ids + (batch->n == 0));
    REQUIRE(ids != NULL);
    memcpy(ids, batch->ids, (size_t)batch->n * sizeof *ids);
    return ids;
}

static batch_t next_batch(input_t *input, const state_t *state, bool in_range) {
    const int32_t last = state->model.num_blocks - 1;
    batch_t batch = {.n = next_below(input, 12)};
    if (batch.n == 11) {
        batch.n = next_below(input, MODEL_BATCH + 1);
    }
    for (int64_t i = 0; i < batch.n; i++) {
        batch.ids[i] = in_range ? (int32_t)next_below(input, (uint32_t)last + 1) : next_int(input, 0, last);
    }
    return batch;
}

static int32_t next_id(input_t *input, const state_t *state) {
    return (int32_t)next_below(input, (uint32_t)state->model.num_blocks);
}

static void same_fault(kvp_status_t status, kvp_status_t wanted, kvp_fault_t fault, kvp_fault_t wanted_fault) {
    if (status != wanted ||
        (status != KVP_OK && (fault.index != wanted_fault.index || fault.block_id != wanted_fault.block_id))) {
        FOUND("status %d at %lld (block %d), the model says %d at %lld (block %d)", status, (long long)fault.index,
              fault.block_id, wanted, (long long)wanted_fault.index, wanted_fault.block_id);
    }
}

static kvp_status_t take_blocks(input_t *input, state_t *state, uint32_t how) {
    int32_t out[MODEL_BLOCKS], wanted[MODEL_BLOCKS];
    const int32_t n = next_int(input, 0, state->model.num_blocks);
    kvp_status_t status, expected;
    if (how == 2) {
        status = kvp_pool_pop_detached(state->pool, n, out);
        expected = model_pop_detached(&state->model, n, wanted);
    } else {
        status = how == 0 ? kvp_pool_allocate(state->pool, n, out) : kvp_pool_take(state->pool, n, out);
        expected = model_take(&state->model, n, how == 0 && state->model.enable_caching, wanted);
    }
    REQUIRE(status == expected);
    REQUIRE(status != KVP_OK || memcmp(out, wanted, (size_t)n * sizeof *out) == 0);
    return status;
}

static kvp_status_t on_batch(input_t *input, state_t *state, uint32_t how) {
    const kvp_placement_t where = (kvp_placement_t)next_below(input, 3);
    const batch_t batch = next_batch(input, state, how == 3);
    int32_t *const ids = exact(&batch);
    kvp_fault_t fault = {0, 0}, wanted_fault = {0, 0};
    kvp_status_t status, expected;
    model_t unchanged;
    switch (how) {
    case 0:
        status = kvp_pool_free(state->pool, ids, batch.n, where, &fault);
        expected = model_free(&state->model, ids, batch.n, where, &wanted_fault);
        break;
    case 1:
        unchanged = state->model;
        status = kvp_pool_can_free(state->pool, ids, batch.n, &fault);
        expected = model_free(&unchanged, ids, batch.n, where, &wanted_fault);
        break;
    case 2:
        status = kvp_pool_touch(state->pool, ids, batch.n, &fault);
        expected = model_touch(&state->model, ids, batch.n, &wanted_fault);
        break;
    default:
        status = kvp_pool_attach(state->pool, ids, batch.n, where, &fault);
        expected = model_attach(&state->model, ids, batch.n, where == KVP_PLACE_HEAD, &wanted_fault);
        break;
    }
    free(ids);
    same_fault(status, expected, fault, wanted_fault);
    return status;
}

static kvp_status_t cache(input_t *input, state_t *state) {
    const kvp_cache_mode_t mode = (kvp_cache_mode_t)next_below(input, 2);
    const int32_t first_tokens = next_int(input, 0, 20), step_tokens = next_int(input, 0, 4);
    const batch_t batch = next_batch(input, state, false);
    int32_t *const ids = exact(&batch);
    int keys[MODEL_BATCH];
    kvp_key_t parsed[MODEL_BATCH];
    for (int64_t i = 0; i < batch.n; i++) {
        keys[i] = next_key(input);
        parsed[i] = state->keys[keys[i]];
    }
    kvp_fault_t fault = {0, 0}, wanted_fault = {0, 0};
    const kvp_status_t status =
        kvp_pool_cache(state->pool, parsed, ids, batch.n, first_tokens, step_tokens, mode, &fault);
    if (status == KVP_ERR_NO_MEMORY && state->allocation_fails) {
        free(ids);
        return KVP_OK;
    }
    const kvp_status_t expected =
        model_cache(&state->model, keys, ids, batch.n, first_tokens, step_tokens, mode, &wanted_fault);
    free(ids);
    same_fault(status, expected, fault, wanted_fault);
    return status;
}

/* One key, one block. Without memory a call has not happened; it may have grown the map's arrays. */
static kvp_status_t on_key(input_t *input, state_t *state, uint32_t how) {
    const int key = next_key(input);
    const int32_t id = next_int(input, 0, state->model.num_blocks - 1), tokens = next_int(input, -1, 30);
    kvp_status_t status, expected;
    switch (how) {
    case 0: status = kvp_pool_insert_hash(state->pool, &state->keys[key], id, tokens); break;
    case 1: status = kvp_pool_insert_key(state->pool, &state->keys[key], id); break;
    default: status = kvp_pool_set_hash(state->pool, &state->keys[key], id, tokens); break;
    }
    if (status == KVP_ERR_NO_MEMORY && state->allocation_fails) {
        return KVP_OK;
    }
    expected = how == 2 ? model_set_hash(&state->model, key, id, tokens)
                        : model_insert(&state->model, key, id, how == 0 ? tokens : KVP_TOKENS_UNKNOWN, how == 0);
    REQUIRE(status == expected);
    return status;
}

static void find_prefix(input_t *input, state_t *state) {
    kvp_key_t keys[MODEL_BATCH];
    int32_t out[MODEL_BATCH], wanted[MODEL_BATCH];
    const int64_t n = next_below(input, MODEL_BATCH + 1);
    int64_t hits = -1;
    for (int64_t i = 0; i < n; i++) {
        const int key = next_key(input);
        keys[i] = state->keys[key];
        wanted[i] = model_find(&state->model, key);
        hits = hits < 0 && wanted[i] == KVP_NONE ? i : hits;
    }
    hits = hits < 0 ? n : hits;
    REQUIRE(kvp_pool_find_prefix(state->pool, keys, n, out) == hits);
    REQUIRE(memcmp(out, wanted, (size_t)hits * sizeof *out) == 0);
}

static kvp_status_t on_block(input_t *input, state_t *state, uint32_t how) {
    const int32_t id = next_id(input, state);
    const int key = next_key(input);
    kvp_status_t status;
    int32_t ref_cnt;
    switch (how) {
    case 0:
        ref_cnt = next_int(input, 0, 3);
        status = kvp_pool_set_ref_cnt(state->pool, id, ref_cnt);
        REQUIRE(status == model_set_ref_cnt(&state->model, id, ref_cnt));
        return status;
    case 1:
        status = kvp_pool_detach(state->pool, id);
        REQUIRE(status == model_detach(&state->model, id));
        return status;
    case 2: REQUIRE(kvp_pool_drop_hashes(state->pool, id) == model_drop_hashes(&state->model, id)); return KVP_OK;
    case 3:
        kvp_pool_reset_hash(state->pool, id);
        model_reset_hash(&state->model, id);
        return KVP_OK;
    case 4:
        REQUIRE(kvp_pool_remove_key(state->pool, &state->keys[key], id) == model_remove_key(&state->model, key, id));
        return KVP_OK;
    default:
        REQUIRE(kvp_pool_is_reachable(state->pool, &state->keys[key], id) ==
                (model_find_block(&state->model, key, id) != NULL));
        return KVP_OK;
    }
}

static kvp_status_t step(input_t *input, state_t *state) {
    const uint32_t call = next_below(input, 24);
    switch (call) {
    case 0:
    case 1:
    case 2: return take_blocks(input, state, 0);
    case 3:
    case 4: return take_blocks(input, state, call - 2);
    case 5:
    case 6:
    case 7:
    case 8: return on_batch(input, state, call - 5);
    case 9:
    case 10: return on_batch(input, state, 0);
    case 11:
    case 12: return cache(input, state);
    case 13:
    case 14:
    case 15: return on_key(input, state, call - 13);
    case 16:
    case 17:
    case 18:
    case 19:
    case 20:
    case 21: return on_block(input, state, call - 16);
    case 22: find_prefix(input, state); return KVP_OK;
    default:
        /* A reset is one of 16 such bytes, or nothing would ever fill up. */
        if (next_below(input, 16) == 0) {
            kvp_pool_reset_hashes(state->pool);
            model_reset_hashes(&state->model);
        }
        return KVP_OK;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static state_t state;
    static snapshot_t before, after;
    input_t input = {data, data + size};
    const uint32_t options = next_byte(&input);
    const int32_t num_blocks = next_int(&input, 1, MODEL_BLOCKS);
    uint64_t secret[KVP_SECRET_WORDS] = {0};
    if ((options & 8) == 0) {
        for (int i = 0; i < KVP_SECRET_WORDS; i++) {
            secret[i] = ((uint64_t)next_byte(&input) << 56) + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1);
        }
    }
    if (num_blocks < 1 || num_blocks > MODEL_BLOCKS) {
        if (num_blocks < 1 || num_blocks == INT32_MAX) {
            REQUIRE(kvp_pool_create(num_blocks, true, true, secret, &state.pool) == KVP_ERR_BLOCK_ID);
        }
        return 0;
    }
    if ((options & 32) != 0) {
        allocations_left = 0;
        REQUIRE(kvp_pool_create(num_blocks, true, true, secret, &state.pool) == KVP_ERR_NO_MEMORY);
    }
    REQUIRE(kvp_pool_create(num_blocks, options & 1, options & 2, secret, &state.pool) == KVP_OK);
    model_init(&state.model, num_blocks);
    state.model.enable_caching = options & 1;
    state.model.uncached_first = options & 2;
    state.model.null_takes_hashes = state.pool->null_takes_hashes = options & 4;
    make_keys(&state, (options & 8) != 0);
    for (int i = 0; i < MAX_STEPS && !input_empty(&input); i++) {
        const uint32_t byte = next_byte(&input);
        state.allocation_fails = byte >= 240;
        allocations_left = state.allocation_fails ? (long)(byte & 1) : -1;
        take_snapshot(&before, state.pool);
        if (step(&input, &state) != KVP_OK) {
            take_snapshot(&after, state.pool);
            if (before.size != after.size || memcmp(before.bytes, after.bytes, before.size) != 0) {
                FOUND("a call that was refused has changed the pool");
            }
        }
        allocations_left = -1;
        compare(&state);
    }
    kvp_pool_destroy(state.pool);
    return 0;
}
