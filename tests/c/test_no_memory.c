/* test_no_memory.c - each allocation of the core fails once: the status says so, nothing has changed, nothing is lost.
 * Build and run: make ctest (make asan: under the sanitizers); both build with KVP_DEBUG, which csrc/kvp_alloc.h needs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kvp.h"
#include "kvp_alloc.h"

enum { NUM_BLOCKS = 40, MANY = 400 };

static const uint64_t SECRET[KVP_SECRET_WORDS] = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 7u};

static kvp_key_t make_key(uint8_t digest[KVP_DIGEST_BYTES], uint32_t value) {
    memset(digest, 0, KVP_DIGEST_BYTES);
    memcpy(digest, &value, sizeof value);
    return (kvp_key_t){digest, KVP_DIGEST_BYTES, 0};
}

static void fail_allocation(int64_t n) {
    kvp_alloc_state()->until_failure = n;
    kvp_alloc_state()->num_failed = 0;
}

static bool has_failed(void) {
    const bool failed = kvp_alloc_state()->num_failed > 0;
    fail_allocation(0);
    return failed;
}

static bool is_sound(const kvp_pool_t *pool) {
    char reason[256];
    return kvp_pool_check(pool, reason, sizeof reason) == KVP_OK;
}

static void test_creation(void) {
    int64_t n = 1;
    for (bool failed = true; failed; n++) {
        kvp_pool_t *pool = NULL;
        fail_allocation(n);
        const kvp_status_t status = kvp_pool_create(NUM_BLOCKS, true, true, SECRET, &pool);
        failed = has_failed();
        CHECK(status == (failed ? KVP_ERR_NO_MEMORY : KVP_OK) && (pool == NULL) == failed);
        kvp_pool_destroy(pool);
        CHECK(kvp_alloc_state()->num_live == 0);
    }
    CHECK(n == 3); /* one allocation */
    for (bool failed = true; failed; n++) {
        kvp_map_t *map = NULL;
        fail_allocation(n - 2);
        const kvp_status_t status = kvp_map_create(SECRET, &map);
        failed = has_failed();
        CHECK(status == (failed ? KVP_ERR_NO_MEMORY : KVP_OK) && (map == NULL) == failed);
        kvp_map_destroy(map);
        CHECK(kvp_alloc_state()->num_live == 0);
    }
    CHECK(n == 6); /* the map and its slots */
}

/* One more hash after the other, each refused once where it needs memory; then all of them are there. */
static void test_further_hashes(void) {
    kvp_pool_t *pool = NULL;
    uint8_t digest[KVP_DIGEST_BYTES];
    int32_t ids[4], num_refused = 0;
    CHECK(kvp_pool_create(NUM_BLOCKS, true, true, SECRET, &pool) == KVP_OK);
    CHECK(kvp_pool_allocate(pool, 4, ids) == KVP_OK);
    const int64_t live = kvp_alloc_state()->num_live;
    for (uint32_t value = 0; value < MANY; value++) {
        const kvp_key_t key = make_key(digest, value);
        const int32_t id = ids[random_below(4)], num_entries = pool->map.num_entries, num_keys = pool->map.num_keys;
        for (bool failed = true; failed;) {
            fail_allocation(1);
            const kvp_status_t status = kvp_pool_insert_hash(pool, &key, id, 4);
            failed = has_failed();
            CHECK(status == (failed ? KVP_ERR_NO_MEMORY : KVP_OK) && is_sound(pool));
            CHECK(kvp_pool_is_reachable(pool, &key, id) == !failed);
            if (failed) {
                num_refused++;
                CHECK(pool->map.num_entries == num_entries && pool->map.num_keys == num_keys);
                CHECK(kvp_map_reserve(&pool->map, 1, 1) == KVP_OK);
            }
        }
    }
    CHECK(num_refused >= 4 && pool->map.num_entries == MANY && kvp_alloc_state()->num_live >= live);
    CHECK(kvp_pool_free(pool, ids, 4, KVP_PLACE_BY_HASH, NULL) == KVP_OK && is_sound(pool));
    kvp_pool_destroy(pool);
    CHECK(kvp_alloc_state()->num_live == 0);
}

/* A batch of primary hashes beside many secondary ones: the slots have to grow, and can't. */
static void test_a_batch(void) {
    kvp_pool_t *pool = NULL;
    uint8_t digests[4][KVP_DIGEST_BYTES];
    kvp_key_t keys[4];
    kvp_fault_t fault;
    int32_t ids[5];
    int32_t num_refused = 0;
    CHECK(kvp_pool_create(NUM_BLOCKS, true, true, SECRET, &pool) == KVP_OK);
    CHECK(kvp_pool_allocate(pool, 5, ids) == KVP_OK);
    for (uint32_t value = 0; value < MANY; value++) {
        keys[0] = make_key(digests[0], 1000 + value);
        CHECK(kvp_pool_insert_hash(pool, &keys[0], ids[4], 4) == KVP_OK);
        for (uint32_t i = 0; i < 4; i++) {
            keys[i] = make_key(digests[i], i);
        }
        fail_allocation(1);
        const kvp_status_t status = kvp_pool_cache(pool, keys, ids, 4, 4, 4, KVP_CACHE_PROMOTE, &fault);
        const bool failed = has_failed();
        CHECK(status == (failed ? KVP_ERR_NO_MEMORY : KVP_OK) && is_sound(pool));
        for (int32_t i = 0; i < 4; i++) {
            CHECK(kvp_pool_is_reachable(pool, &keys[i], ids[i]) == !failed);
            (void)kvp_pool_drop_hashes(pool, ids[i]);
        }
        num_refused += failed;
    }
    CHECK(num_refused > 0);
    kvp_pool_destroy(pool);
    CHECK(kvp_alloc_state()->num_live == 0);
}

static void test_a_stand_alone_map(void) {
    kvp_map_t *map = NULL;
    uint8_t digest[KVP_DIGEST_BYTES];
    int32_t entry, num_refused = 0;
    CHECK(kvp_map_create(SECRET, &map) == KVP_OK);
    for (uint32_t value = 0; value < MANY; value++) {
        const kvp_key_t key = make_key(digest, value);
        kvp_status_t status = KVP_ERR_NO_MEMORY;
        for (int64_t n = 1; status != KVP_OK; n++) {
            fail_allocation(n);
            status = kvp_map_add(map, &key, (int32_t)value, &entry);
            CHECK(has_failed() == (status == KVP_ERR_NO_MEMORY));
            CHECK((kvp_map_find(map, &key) != KVP_NONE) == (status == KVP_OK));
            CHECK(map->num_keys == (int32_t)value + (status == KVP_OK));
            num_refused += status != KVP_OK;
        }
    }
    CHECK(num_refused >= 6);
    kvp_map_destroy(map);
    CHECK(kvp_alloc_state()->num_live == 0);
}

int main(void) {
    test_creation();
    test_further_hashes();
    test_a_batch();
    test_a_stand_alone_map();
    return report("no memory");
}
