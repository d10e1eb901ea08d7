/* test_core.c - the C core without Python: scenarios with known answers, refusals, and a random walk that checks every
 * invariant after each step against a plain model. Build and run: make ctest (make asan: under the sanitizers). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kvp.h"

static const uint64_t SECRET[KVP_SECRET_WORDS] = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 7u};

static kvp_pool_t *make_pool(int32_t num_blocks) {
    kvp_pool_t *pool = NULL;
    CHECK(kvp_pool_create(num_blocks, true, true, SECRET, &pool) == KVP_OK);
    return pool;
}

static bool is_sound(const kvp_pool_t *pool) {
    char reason[256];
    const kvp_status_t status = kvp_pool_check(pool, reason, sizeof reason);
    if (status != KVP_OK) {
        printf("check: %s\n", reason);
    }
    return status == KVP_OK;
}

/* A key whose digest has `length` bytes, all made of `value`. */
static kvp_key_t make_key(uint8_t digest[KVP_DIGEST_BYTES], uint32_t value, uint32_t length, uint32_t group) {
    memset(digest, 0, KVP_DIGEST_BYTES);
    for (uint32_t i = 0; i < length && i < 4; i++) {
        digest[i] = (uint8_t)(value >> (8 * i));
    }
    return (kvp_key_t){digest, length, group};
}

static bool queue_is(const kvp_pool_t *pool, const int32_t *wanted, int32_t n) {
    int32_t id = KVP_NONE, i = 0;
    while ((id = kvp_free_list_after(&pool->free_list, id)) != KVP_NONE) {
        if (i >= n || wanted[i++] != id) {
            return false;
        }
    }
    return i == n;
}

static void test_creation(void) {
    kvp_pool_t *pool = NULL;
    CHECK(kvp_pool_create(0, true, true, SECRET, &pool) == KVP_ERR_BLOCK_ID);
    CHECK(kvp_pool_create(-1, true, true, SECRET, &pool) == KVP_ERR_BLOCK_ID);
    pool = make_pool(1);
    int32_t id;
    CHECK(pool->free_list.num_free == 0 && is_sound(pool));
    CHECK(kvp_pool_allocate(pool, 1, &id) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(kvp_pool_allocate(pool, 0, &id) == KVP_OK);
    kvp_pool_destroy(pool);
    kvp_pool_destroy(NULL);
}

static void test_memory_per_block(void) {
    kvp_pool_t *const pool = make_pool(100000);
    CHECK(kvp_pool_nbytes(pool) <= 88 * 100000u + 1024u);
    kvp_pool_destroy(pool);
}

static void test_order_of_reuse(void) {
    kvp_pool_t *const pool = make_pool(7);
    int32_t ids[6];
    uint8_t digest[2][KVP_DIGEST_BYTES];
    CHECK(kvp_pool_allocate(pool, 4, ids) == KVP_OK);
    const kvp_key_t keys[2] = {make_key(digest[0], 1, 32, 0), make_key(digest[1], 2, 32, 0)};
    CHECK(kvp_pool_cache(pool, keys, ids, 2, 4, 4, KVP_CACHE_PROMOTE, NULL) == KVP_OK);
    const int32_t reversed[4] = {ids[3], ids[2], ids[1], ids[0]};
    CHECK(kvp_pool_free(pool, reversed, 4, KVP_PLACE_BY_HASH, NULL) == KVP_OK);
    CHECK(queue_is(pool, (int32_t[]){4, 3, 5, 6, 2, 1}, 6));
    CHECK(kvp_pool_num_evictable(pool) == 2 && is_sound(pool));
    CHECK(kvp_pool_allocate(pool, 5, ids) == KVP_OK && pool->num_evicted == 1);
    CHECK(kvp_map_find(&pool->map, &keys[1]) == KVP_NONE && kvp_map_find(&pool->map, &keys[0]) == 1);
    CHECK(is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_refusals_change_nothing(void) {
    kvp_pool_t *const pool = make_pool(5);
    int32_t ids[4];
    kvp_fault_t fault = {0};
    CHECK(kvp_pool_allocate(pool, 2, ids) == KVP_OK);
    CHECK(kvp_pool_free(pool, (int32_t[]){1, 2, 1}, 3, KVP_PLACE_BY_HASH, &fault) == KVP_ERR_NOT_IN_USE);
    CHECK(fault.index == 2 && fault.block_id == 1);
    CHECK(kvp_pool_free(pool, (int32_t[]){1, 5}, 2, KVP_PLACE_TAIL, &fault) == KVP_ERR_BLOCK_ID && fault.index == 1);
    CHECK(kvp_pool_free(pool, (int32_t[]){2, -1}, 2, KVP_PLACE_HEAD, &fault) == KVP_ERR_BLOCK_ID);
    CHECK(kvp_pool_free(pool, (int32_t[]){2, 3}, 2, KVP_PLACE_HEAD, &fault) == KVP_ERR_NOT_IN_USE);
    CHECK(kvp_pool_can_free(pool, (int32_t[]){2, 2}, 2, &fault) == KVP_ERR_NOT_IN_USE);
    CHECK(kvp_pool_can_free(pool, (int32_t[]){2, 0, 1}, 3, &fault) == KVP_OK);
    CHECK(kvp_pool_touch(pool, (int32_t[]){3, 9}, 2, &fault) == KVP_ERR_BLOCK_ID);
    CHECK(kvp_pool_allocate(pool, 3, ids) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(queue_is(pool, (int32_t[]){3, 4}, 2) && pool->ref_cnt[1] == 1 && pool->ref_cnt[2] == 1 && is_sound(pool));
    CHECK(kvp_pool_free(pool, (int32_t[]){0, 0, 1, 0}, 4, KVP_PLACE_BY_HASH, NULL) == KVP_OK);
    CHECK(pool->ref_cnt[0] == 0 && queue_is(pool, (int32_t[]){1, 3, 4}, 3) && is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_reference_counts(void) {
    kvp_pool_t *const pool = make_pool(4);
    int32_t ids[3];
    CHECK(kvp_pool_allocate(pool, 1, ids) == KVP_OK);
    CHECK(kvp_pool_touch(pool, (int32_t[]){1, 0, 1, 2}, 4, NULL) == KVP_OK);
    CHECK(pool->ref_cnt[1] == 3 && pool->ref_cnt[2] == 1 && pool->ref_cnt[0] == 0 && queue_is(pool, (int32_t[]){3}, 1));
    CHECK(kvp_pool_free(pool, (int32_t[]){1, 1, 1}, 3, KVP_PLACE_TAIL, NULL) == KVP_OK);
    CHECK(queue_is(pool, (int32_t[]){3, 1}, 2));
    CHECK(kvp_pool_set_ref_cnt(pool, 2, INT32_MAX) == KVP_OK);
    CHECK(kvp_pool_touch(pool, (int32_t[]){3, 2}, 2, NULL) == KVP_ERR_REF_OVERFLOW);
    CHECK(pool->ref_cnt[3] == 0);
    CHECK(kvp_pool_set_ref_cnt(pool, 3, 1) == KVP_ERR_QUEUED);
    CHECK(kvp_pool_set_ref_cnt(pool, 0, 1) == KVP_ERR_NULL_BLOCK);
    CHECK(kvp_pool_set_ref_cnt(pool, 2, 0) == KVP_OK && pool->num_detached == 1 && is_sound(pool));
    CHECK(kvp_pool_touch(pool, (int32_t[]){2}, 1, NULL) == KVP_ERR_NOT_QUEUED);
    CHECK(kvp_pool_attach(pool, (int32_t[]){2, 2}, 2, KVP_PLACE_TAIL, NULL) == KVP_ERR_QUEUED && is_sound(pool));
    CHECK(kvp_pool_attach(pool, (int32_t[]){2}, 1, KVP_PLACE_HEAD, NULL) == KVP_OK);
    CHECK(queue_is(pool, (int32_t[]){2, 3, 1}, 3) && is_sound(pool));
    CHECK(kvp_pool_detach(pool, 3) == KVP_OK && kvp_pool_detach(pool, 3) == KVP_ERR_NOT_QUEUED && is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_equal_keys(void) {
    kvp_pool_t *const pool = make_pool(200);
    uint8_t digest[KVP_DIGEST_BYTES];
    const kvp_key_t key = make_key(digest, 77, 3, 9);
    for (int32_t id = 1; id < 200; id++) {
        CHECK(kvp_pool_insert_hash(pool, &key, id, 4) == KVP_OK);
    }
    CHECK(pool->map.num_keys == 1 && pool->map.num_entries == 199 && is_sound(pool));
    CHECK(kvp_pool_insert_hash(pool, &key, 5, 4) == KVP_OK && pool->map.num_entries == 199);
    for (int32_t id = 1; id < 200; id++) {
        CHECK(kvp_map_find(&pool->map, &key) == id); /* the first inserted that is left */
        CHECK(kvp_pool_drop_hashes(pool, id) == 1);
    }
    CHECK(kvp_map_find(&pool->map, &key) == KVP_NONE && pool->map.num_keys == 0 && is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_keys_differ_by_length_and_group(void) {
    kvp_pool_t *const pool = make_pool(8);
    uint8_t digest[4][KVP_DIGEST_BYTES];
    const kvp_key_t keys[4] = {make_key(digest[0], 0, 3, 0), make_key(digest[1], 0, 4, 0), make_key(digest[2], 0, 3, 1),
                               make_key(digest[3], 0, 0, 0)};
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){1, 2, 3, 4}, 4, 0, 0, KVP_CACHE_IDEMPOTENT, NULL) == KVP_OK);
    for (int32_t i = 0; i < 4; i++) {
        CHECK(kvp_map_find(&pool->map, &keys[i]) == i + 1);
    }
    const kvp_key_t too_long = {digest[0], 33, 0};
    CHECK(kvp_pool_insert_hash(pool, &too_long, 5, 4) == KVP_ERR_DIGEST_LENGTH && is_sound(pool));
    CHECK(kvp_map_find(&pool->map, &too_long) == KVP_NONE);
    kvp_pool_destroy(pool);
}

static void test_dirty_blocks(void) {
    kvp_pool_t *const pool = make_pool(8);
    uint8_t digest[4][KVP_DIGEST_BYTES];
    kvp_fault_t fault = {0};
    kvp_key_t keys[3];
    for (uint32_t i = 0; i < 3; i++) {
        keys[i] = make_key(digest[i], 100 + i, 32, 0);
    }
    const kvp_key_t old = make_key(digest[3], 55, 32, 0);
    CHECK(kvp_pool_insert_hash(pool, &old, 2, 8) == KVP_OK);
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){1, 2, 3}, 3, 4, 4, KVP_CACHE_PROMOTE, &fault) == KVP_ERR_HAS_HASH);
    CHECK(fault.index == 1 && fault.block_id == 2 && pool->map.num_keys == 1 && is_sound(pool));
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){1, 3, 1}, 3, 4, 4, KVP_CACHE_PROMOTE, &fault) == KVP_ERR_DUPLICATE);
    CHECK(fault.index == 2 && pool->map.num_keys == 1 && is_sound(pool));
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){1, 2, 3}, 3, 8, 4, KVP_CACHE_PROMOTE, &fault) == KVP_OK);
    CHECK(kvp_map_find(&pool->map, &old) == KVP_NONE && kvp_map_find(&pool->map, &keys[1]) == 2 && is_sound(pool));
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){1, 2, 3}, 3, 0, 0, KVP_CACHE_IDEMPOTENT, &fault) == KVP_OK);
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){2}, 1, 0, 0, KVP_CACHE_IDEMPOTENT, &fault) == KVP_ERR_HAS_HASH);
    CHECK(kvp_pool_cache(pool, keys, (int32_t[]){0, KVP_NONE, 3}, 3, 99, 1, KVP_CACHE_PROMOTE, &fault) == KVP_OK);
    CHECK(pool->map.num_keys == 3);
    CHECK(is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_secondary_hashes(void) {
    kvp_pool_t *const pool = make_pool(4);
    enum { N = 300 };
    uint8_t digest[KVP_DIGEST_BYTES];
    for (uint32_t i = 0; i < N; i++) {
        const kvp_key_t key = make_key(digest, i, 32, i % 3);
        CHECK(kvp_pool_insert_hash(pool, &key, 1 + (int32_t)(i % 3), (int32_t)i) == KVP_OK);
    }
    CHECK(pool->map.num_entries == N && pool->map.num_keys == N && is_sound(pool));
    int32_t count = 0;
    for (int32_t entry = kvp_pool_next_secondary(pool, 1, KVP_NONE); entry != KVP_NONE;
         entry = kvp_pool_next_secondary(pool, 1, entry)) {
        count++;
        CHECK(kvp_map_entry(&pool->map, entry)->num_tokens == 3 * count); /* as inserted */
    }
    CHECK(count == N / 3 - 1);
    const kvp_key_t gone = make_key(digest, 3, 32, 0);
    CHECK(kvp_pool_remove_key(pool, &gone, 1) && !kvp_pool_remove_key(pool, &gone, 1) && is_sound(pool));
    CHECK(kvp_pool_drop_hashes(pool, 1) == N / 3 - 1 && is_sound(pool));
    kvp_pool_reset_hashes(pool);
    CHECK(pool->map.num_entries == 0 && kvp_pool_primary(pool, 2) == KVP_NONE && is_sound(pool));
    kvp_pool_destroy(pool);
}

/* Entries that were returned before a reset are handed out again after it, without their old links. */
static void test_secondary_hashes_after_reset(void) {
    kvp_pool_t *const pool = make_pool(4);
    uint8_t digest[KVP_DIGEST_BYTES];
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 12; i++) {
            const kvp_key_t key = make_key(digest, i, 32, 0);
            CHECK(kvp_pool_insert_hash(pool, &key, 1 + (int32_t)(i % 3), 4) == KVP_OK);
        }
        CHECK(kvp_pool_drop_hashes(pool, 2) == 4 && is_sound(pool));
        kvp_pool_reset_hashes(pool);
        CHECK(pool->map.num_entries == 0 && is_sound(pool));
    }
    kvp_pool_destroy(pool);
}

static void test_hashes_set_by_hand(void) {
    kvp_pool_t *const pool = make_pool(4);
    uint8_t digest[2][KVP_DIGEST_BYTES];
    const kvp_key_t key = make_key(digest[0], 5, 8, 0), other = make_key(digest[1], 6, 8, 0);
    CHECK(kvp_pool_set_hash(pool, &key, 1, 4) == KVP_OK && kvp_map_find(&pool->map, &key) == KVP_NONE);
    CHECK(kvp_pool_set_hash(pool, &other, 1, 4) == KVP_ERR_HAS_HASH && is_sound(pool));
    CHECK(kvp_pool_insert_key(pool, &key, 1) == KVP_OK && kvp_map_find(&pool->map, &key) == 1);
    CHECK(kvp_pool_remove_key(pool, &key, 1) && kvp_pool_primary(pool, 1) == 1 && is_sound(pool));
    CHECK(kvp_pool_insert_hash(pool, &key, 1, 4) == KVP_OK && kvp_map_find(&pool->map, &key) == KVP_NONE);
    CHECK(kvp_pool_insert_key(pool, &other, 1) == KVP_OK && is_sound(pool));
    kvp_pool_reset_hashes(pool);
    CHECK(pool->map.has_hash[1] == 0 && is_sound(pool));
    CHECK(kvp_pool_set_hash(pool, &key, KVP_NULL_BLOCK, 4) == KVP_ERR_NULL_BLOCK);
    CHECK(kvp_pool_insert_hash(pool, &key, 4, 4) == KVP_ERR_BLOCK_ID);
    kvp_pool_destroy(pool);
}

/* A primary that was taken out of the map while its key came back as a secondary one: the block is in the ring once. */
static void test_cached_again_under_a_secondary_key(void) {
    kvp_pool_t *const pool = make_pool(4);
    uint8_t digest[KVP_DIGEST_BYTES];
    const kvp_key_t key = make_key(digest, 5, 32, 0);
    const int32_t id = 1;
    CHECK(kvp_pool_insert_key(pool, &key, id) == KVP_OK && kvp_pool_primary(pool, id) == KVP_NONE);
    CHECK(kvp_pool_set_hash(pool, &key, id, 4) == KVP_OK && is_sound(pool));
    CHECK(kvp_pool_cache(pool, &key, &id, 1, 0, 0, KVP_CACHE_IDEMPOTENT, NULL) == KVP_OK && is_sound(pool));
    CHECK(pool->map.num_entries == 1 && kvp_pool_is_reachable(pool, &key, id));
    CHECK(kvp_pool_drop_hashes(pool, id) == 1 && kvp_map_find(&pool->map, &key) == KVP_NONE && is_sound(pool));
    kvp_pool_destroy(pool);
}

/* No entry has a digest that is longer than digests can be; where only an answer comes back, it is a miss. */
static void test_overlong_digests_are_misses(void) {
    kvp_pool_t *const pool = make_pool(4);
    uint8_t digest[2 * KVP_DIGEST_BYTES] = {1};
    const kvp_key_t key = {digest, KVP_DIGEST_BYTES, 0}, overlong = {digest, 2 * KVP_DIGEST_BYTES, 0};
    int32_t out[2];
    CHECK(kvp_pool_insert_hash(pool, &key, 1, 4) == KVP_OK);
    CHECK(kvp_pool_find_prefix(pool, (kvp_key_t[]){key, overlong}, 2, out) == 1 && out[0] == 1);
    CHECK(!kvp_pool_is_reachable(pool, &overlong, 1) && kvp_map_find(&pool->map, &overlong) == KVP_NONE);
    CHECK(!kvp_pool_remove_key(pool, &overlong, 1) && kvp_pool_is_reachable(pool, &key, 1) && is_sound(pool));
    CHECK(kvp_pool_set_hash(pool, &overlong, 2, 4) == KVP_ERR_DIGEST_LENGTH && is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_negative_counts_take_nothing(void) {
    kvp_pool_t *const pool = make_pool(4);
    int32_t out[4];
    CHECK(kvp_pool_allocate(pool, -1, out) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(kvp_pool_take(pool, INT32_MIN, out) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(kvp_pool_pop_detached(pool, -3, out) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(queue_is(pool, (int32_t[]){1, 2, 3}, 3) && is_sound(pool));
    kvp_pool_destroy(pool);
}

static void test_stand_alone_map(void) {
    kvp_map_t *map = NULL;
    uint8_t digest[KVP_DIGEST_BYTES];
    int32_t entries[100];
    CHECK(kvp_map_create(SECRET, &map) == KVP_OK);
    for (uint32_t i = 0; i < 100; i++) {
        const kvp_key_t key = make_key(digest, i / 2, 4, 0);
        CHECK(kvp_map_add(map, &key, (int32_t)i, &entries[i]) == KVP_OK);
    }
    CHECK(map->num_keys == 50 && map->num_entries == 100);
    for (uint32_t i = 0; i < 100; i += 2) {
        const kvp_key_t key = make_key(digest, i / 2, 4, 0);
        CHECK(kvp_map_find(map, &key) == entries[i] && kvp_map_find_block(map, &key, (int32_t)i + 1) == entries[i + 1]);
        kvp_map_discard(map, entries[i]);
        CHECK(kvp_map_find(map, &key) == entries[i + 1]);
    }
    CHECK(map->num_keys == 50 && map->num_entries == 50);
    kvp_map_destroy(map);
}

static void test_free_list_moves(void) {
    kvp_free_list_t list;
    kvp_link_t links[6], more_links[11];
    int32_t out[5];
    CHECK(kvp_free_list_links(3) == 6 && kvp_free_list_links(8) == 11);
    kvp_free_list_init(&list, links, 3, 3);
    char reason[128];
    CHECK(kvp_free_list_append_n(&list, (int32_t[]){2, 0}, 2, NULL) == KVP_OK);
    kvp_free_list_move(&list, more_links, 8);
    CHECK(kvp_free_list_check(&list, reason, sizeof reason) == KVP_OK);
    CHECK(kvp_free_list_prepend_n(&list, (int32_t[]){7, 5}, 2, NULL) == KVP_OK);
    kvp_fault_t fault = {0};
    CHECK(kvp_free_list_append_n(&list, (int32_t[]){1, 1}, 2, &fault) == KVP_ERR_QUEUED && fault.index == 1);
    CHECK(kvp_free_list_append_n(&list, (int32_t[]){1, 7}, 2, &fault) == KVP_ERR_QUEUED && fault.block_id == 7);
    CHECK(kvp_free_list_check(&list, reason, sizeof reason) == KVP_OK && list.num_free == 4);
    CHECK(kvp_free_list_pop_n(&list, 4, out) == KVP_OK && out[0] == 7 && out[1] == 5 && out[2] == 2 && out[3] == 0);
    CHECK(kvp_free_list_pop_n(&list, 1, out) == KVP_ERR_NO_FREE_BLOCKS);
    CHECK(kvp_free_list_after(&list, KVP_NONE) == KVP_NONE && kvp_free_list_before(&list, KVP_NONE) == KVP_NONE);
}

/* The checker itself must notice: break one thing at a time. */
static void test_checker_notices(void) {
    enum { DEFECTS = 9 };
    for (int defect = 0; defect < DEFECTS; defect++) {
        kvp_pool_t *const pool = make_pool(6);
        int32_t ids[2];
        uint8_t digest[2][KVP_DIGEST_BYTES];
        const kvp_key_t keys[2] = {make_key(digest[0], 1, 32, 0), make_key(digest[1], 2, 32, 0)};
        CHECK(kvp_pool_allocate(pool, 2, ids) == KVP_OK);
        CHECK(kvp_pool_cache(pool, keys, ids, 2, 4, 4, KVP_CACHE_PROMOTE, NULL) == KVP_OK && is_sound(pool));
        switch (defect) {
        case 0: pool->free_list.num_free++; break;
        case 1: pool->free_list.links[4].prev = 5; break;
        case 2: pool->ref_cnt[4] = 1; break;
        case 3: pool->ref_cnt[1] = 0; break;
        case 4: pool->ref_cnt[KVP_NULL_BLOCK] = 1; break;
        case 5: pool->map.has_hash[1] = 0; break;
        case 6: pool->map.num_keys--; break;
        case 7: pool->map.primary[1].tag ^= 1u; break;
        default: pool->map.primary[2].digest[0] ^= 1u; break;
        }
        char reason[256];
        CHECK(kvp_pool_check(pool, reason, sizeof reason) == KVP_ERR_INVARIANT);
        kvp_pool_destroy(pool);
    }
}

/* ---- random walk against a model of plain arrays ---- */

enum { WALK_BLOCKS = 24, WALK_KEYS = 10, WALK_STEPS = 60000 };

typedef struct {
    int32_t ref_cnt[WALK_BLOCKS];
    int32_t key[WALK_BLOCKS];      /* primary key of a block, -1: none */
    int64_t cached_at[WALK_BLOCKS]; /* order of insertion */
    int64_t clock;
} model_t;

static void model_evict(model_t *model, int32_t id) { model->key[id] = -1; }

static int32_t model_find(const model_t *model, int32_t key) {
    int32_t found = KVP_NONE;
    for (int32_t id = 1; id < WALK_BLOCKS; id++) {
        if (model->key[id] == key && (found == KVP_NONE || model->cached_at[id] < model->cached_at[found])) {
            found = id;
        }
    }
    return found;
}

static void walk_step(kvp_pool_t *pool, model_t *model) {
    int32_t ids[WALK_BLOCKS];
    uint8_t digest[KVP_DIGEST_BYTES];
    const int32_t id = 1 + (int32_t)random_below(WALK_BLOCKS - 1);
    const int32_t key_index = (int32_t)random_below(WALK_KEYS);
    const kvp_key_t key = make_key(digest, (uint32_t)key_index, 32, 0);
    switch (random_below(6)) {
    case 0: {
        const int32_t n = (int32_t)random_below(6), before = pool->free_list.num_free;
        const kvp_status_t status = kvp_pool_allocate(pool, n, ids);
        CHECK(status == (n > before ? KVP_ERR_NO_FREE_BLOCKS : KVP_OK));
        for (int32_t i = 0; i < n && status == KVP_OK; i++) {
            CHECK(model->ref_cnt[ids[i]] == 0);
            model->ref_cnt[ids[i]] = 1;
            model_evict(model, ids[i]);
        }
        break;
    }
    case 1: {
        const kvp_status_t status = kvp_pool_free(pool, &id, 1, (kvp_placement_t)random_below(3), NULL);
        CHECK(status == (model->ref_cnt[id] > 0 ? KVP_OK : KVP_ERR_NOT_IN_USE));
        model->ref_cnt[id] -= status == KVP_OK;
        break;
    }
    case 2:
        CHECK(kvp_pool_touch(pool, &id, 1, NULL) == KVP_OK);
        model->ref_cnt[id]++;
        break;
    case 3: {
        const kvp_status_t status = kvp_pool_cache(pool, &key, &id, 1, 0, 0, KVP_CACHE_IDEMPOTENT, NULL);
        const bool has_other = model->key[id] != -1 && model->key[id] != key_index;
        CHECK(status == (has_other ? KVP_ERR_HAS_HASH : KVP_OK));
        if (status == KVP_OK && model->key[id] == -1) {
            model->key[id] = key_index;
            model->cached_at[id] = model->clock++;
        }
        break;
    }
    case 4:
        CHECK(kvp_pool_drop_hashes(pool, id) == (model->key[id] != -1));
        model_evict(model, id);
        break;
    default: {
        const int32_t entry = kvp_map_find(&pool->map, &key);
        CHECK((entry == KVP_NONE ? KVP_NONE : kvp_map_entry(&pool->map, entry)->block_id) ==
              model_find(model, key_index));
        break;
    }
    }
    CHECK(memcmp(pool->ref_cnt, model->ref_cnt, sizeof model->ref_cnt) == 0);
}

static void test_random_walk(void) {
    kvp_pool_t *const pool = make_pool(WALK_BLOCKS);
    model_t model = {.clock = 0};
    for (int32_t id = 0; id < WALK_BLOCKS; id++) {
        model.key[id] = -1;
    }
    for (int step = 0; step < WALK_STEPS && num_failed == 0; step++) {
        walk_step(pool, &model);
        CHECK(is_sound(pool));
    }
    kvp_pool_destroy(pool);
}

/* A full table under churn: backward shift must keep every key reachable, and the table must not grow. */
static void test_churn_of_a_full_map(void) {
    enum { BLOCKS = 500 };
    kvp_pool_t *const pool = make_pool(BLOCKS);
    uint8_t digest[KVP_DIGEST_BYTES];
    const uint32_t num_slots = pool->map.num_slots;
    uint32_t next_key = 0;
    for (int32_t id = 1; id < BLOCKS; id++) {
        const kvp_key_t key = make_key(digest, next_key++, 32, 0);
        CHECK(kvp_pool_insert_hash(pool, &key, id, 4) == KVP_OK);
    }
    for (int round = 0; round < 20000; round++) {
        const int32_t id = 1 + (int32_t)random_below(BLOCKS - 1);
        const kvp_key_t key = make_key(digest, next_key++, 32, 0);
        CHECK(kvp_pool_drop_hashes(pool, id) == 1 && kvp_pool_insert_hash(pool, &key, id, 4) == KVP_OK);
        CHECK(round % 500 != 0 || is_sound(pool));
    }
    CHECK(pool->map.num_slots == num_slots && pool->map.num_keys == BLOCKS - 1);
    kvp_pool_destroy(pool);
}

int main(void) {
    test_creation();
    test_memory_per_block();
    test_order_of_reuse();
    test_refusals_change_nothing();
    test_reference_counts();
    test_equal_keys();
    test_keys_differ_by_length_and_group();
    test_dirty_blocks();
    test_secondary_hashes();
    test_secondary_hashes_after_reset();
    test_hashes_set_by_hand();
    test_cached_again_under_a_secondary_key();
    test_overlong_digests_are_misses();
    test_negative_counts_take_nothing();
    test_stand_alone_map();
    test_free_list_moves();
    test_checker_notices();
    test_random_walk();
    test_churn_of_a_full_map();
    return report("C core");
}
