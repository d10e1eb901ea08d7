/* kvp_pool_hash.c - which hashes a block carries, and the calls that give and take them.
 *
 * A block's primary hash lies in the entry of its own index: reading block_hash is one load, and a block with one hash
 * costs no bookkeeping at all. Secondary hashes (partial prefixes that end inside the block) are extra entries, chained
 * to the primary by next_of_block in insertion order, so that whoever reuses the block can drop every one of them: a
 * key must never outlive the tokens it stands for.
 */
#include "kvp_internal.h"

enum { LOOK_AHEAD = 8 };

/* ---- reading ---- */

int64_t kvp_pool_find_prefix(const kvp_pool_t *pool, const kvp_key_t *keys, int64_t n, int32_t *out) {
    uint32_t tags[LOOK_AHEAD];
    const kvp_map_t *const map = &pool->map;
    for (int64_t i = 0; i < n && i < LOOK_AHEAD; i++) {
        tags[i] = kvpi_key_tag(map, &keys[i]);
        kvpi_map_prefetch(map, tags[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t entry = kvpi_map_find_tagged(map, &keys[i], tags[i % LOOK_AHEAD]);
        if (entry == KVP_NONE) {
            return i;
        }
        out[i] = kvpi_map_entry(map, entry)->block_id;
        if (i + LOOK_AHEAD < n) {
            tags[i % LOOK_AHEAD] = kvpi_key_tag(map, &keys[i + LOOK_AHEAD]);
            kvpi_map_prefetch(map, tags[i % LOOK_AHEAD]);
        }
    }
    return n;
}

/* The primary is where a hash mostly is: one load, where the map takes a probe. */
bool kvp_pool_is_reachable(const kvp_pool_t *pool, const kvp_key_t *key, int32_t id) {
    const kvp_entry_t *const primary = &pool->map.primary[id];
    return ((primary->flags & KVP_ENTRY_IN_MAP) != 0 && kvpi_key_equals(primary, key)) ||
           kvp_map_find_block(&pool->map, key, id) != KVP_NONE;
}

int32_t kvp_pool_primary(const kvp_pool_t *pool, int32_t id) {
    return (pool->map.has_hash[id] & KVP_HAS_PRIMARY) != 0 ? id : KVP_NONE;
}

int32_t kvp_pool_next_secondary(const kvp_pool_t *pool, int32_t id, int32_t entry) {
    return kvpi_map_entry(&pool->map, entry == KVP_NONE ? id : entry)->next_of_block - 1;
}

/* ---- secondary chain ---- */

static void add_secondary(kvp_map_t *map, const kvp_key_t *key, int32_t id, int32_t num_tokens) {
    const int32_t index = kvpi_map_take_extra(map);
    kvp_entry_t *last = &map->primary[id];
    while (last->next_of_block != 0) {
        last = kvpi_map_entry(map, last->next_of_block - 1);
    }
    last->next_of_block = index + 1;
    kvpi_entry_set(map, kvpi_map_entry(map, index), key, id, num_tokens);
    kvpi_map_link(map, index);
    map->has_hash[id] |= KVP_HAS_SECONDARY;
}

static void remove_secondary(kvp_map_t *map, int32_t id, int32_t index) {
    kvp_entry_t *before = &map->primary[id];
    while (before->next_of_block != index + 1) {
        before = kvpi_map_entry(map, before->next_of_block - 1);
    }
    before->next_of_block = kvpi_map_entry(map, index)->next_of_block;
    kvpi_map_unlink(map, index);
    kvpi_map_return_extra(map, index);
    if (map->primary[id].next_of_block == 0) {
        map->has_hash[id] &= (uint8_t)~KVP_HAS_SECONDARY;
    }
}

static void set_primary(kvp_map_t *map, const kvp_key_t *key, int32_t id, int32_t num_tokens) {
    kvpi_entry_set(map, &map->primary[id], key, id, num_tokens);
    map->has_hash[id] |= KVP_HAS_PRIMARY;
}

static bool drop_primary(kvp_map_t *map, int32_t id) {
    kvp_entry_t *const entry = &map->primary[id];
    const bool in_map = (entry->flags & KVP_ENTRY_IN_MAP) != 0;
    if (in_map) {
        kvpi_map_unlink(map, id);
    }
    entry->flags = 0;
    map->has_hash[id] &= (uint8_t)~KVP_HAS_PRIMARY;
    return in_map;
}

/* ---- taking hashes away ---- */

int32_t kvp_pool_drop_hashes(kvp_pool_t *pool, int32_t id) {
    kvp_map_t *const map = &pool->map;
    int32_t dropped = 0;
    if ((map->has_hash[id] & KVP_HAS_PRIMARY) != 0) {
        dropped += drop_primary(map, id);
    }
    while ((map->has_hash[id] & KVP_HAS_SECONDARY) != 0) {
        remove_secondary(map, id, map->primary[id].next_of_block - 1);
        dropped++;
    }
    return dropped;
}

void kvp_pool_reset_hash(kvp_pool_t *pool, int32_t id) {
    if ((pool->map.has_hash[id] & KVP_HAS_PRIMARY) != 0) {
        (void)drop_primary(&pool->map, id);
    }
}

void kvp_pool_reset_hashes(kvp_pool_t *pool) {
    kvp_map_t *const map = &pool->map;
    kvpi_map_clear(map);
    /* What is left are hashes that were set on a block by hand and never put into the map. */
    for (int32_t id = 0; id < pool->num_blocks; id++) {
        if (map->has_hash[id] != 0) {
            map->primary[id].flags = 0;
            map->has_hash[id] = 0;
        }
    }
}

bool kvp_pool_remove_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id) {
    const int32_t index = kvp_map_find_block(&pool->map, key, id);
    if (index == KVP_NONE) {
        return false;
    }
    if (index == id) {
        kvpi_map_unlink(&pool->map, index);
    } else {
        remove_secondary(&pool->map, id, index);
    }
    return true;
}

/* ---- giving hashes ---- */

static kvp_status_t check_key(const kvp_pool_t *pool, const kvp_key_t *key, int32_t id) {
    if ((uint32_t)id >= (uint32_t)pool->num_blocks) {
        return KVP_ERR_BLOCK_ID;
    }
    if (id == KVP_NULL_BLOCK && !pool->null_takes_hashes) {
        return KVP_ERR_NULL_BLOCK;
    }
    return key->digest_len > KVP_DIGEST_BYTES ? KVP_ERR_DIGEST_LENGTH : KVP_OK;
}

kvp_status_t kvp_pool_set_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens) {
    const kvp_status_t status = check_key(pool, key, id);
    if (status != KVP_OK) {
        return status;
    }
    if ((pool->map.has_hash[id] & KVP_HAS_PRIMARY) != 0) {
        return KVP_ERR_HAS_HASH;
    }
    set_primary(&pool->map, key, id, num_tokens);
    return KVP_OK;
}

/* Common half of the two insertions. A primary that was taken out of the map by hand is put back from the map's side
 * only: from the block's side it has that hash already, and vLLM leaves it at that. */
static kvp_status_t insert(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens, bool from_block) {
    kvp_map_t *const map = &pool->map;
    kvp_status_t status = check_key(pool, key, id);
    if (status != KVP_OK || kvp_map_find_block(map, key, id) != KVP_NONE) {
        return status;
    }
    const bool has_primary = (map->has_hash[id] & KVP_HAS_PRIMARY) != 0;
    const bool is_its_primary = has_primary && kvpi_key_equals(&map->primary[id], key);
    if (is_its_primary && from_block) {
        return KVP_OK;
    }
    const bool to_primary = is_its_primary || (from_block && !has_primary);
    status = kvp_map_reserve(map, 1, to_primary ? 0 : 1);
    if (status != KVP_OK) {
        return status;
    }
    if (!to_primary) {
        add_secondary(map, key, id, num_tokens);
        return KVP_OK;
    }
    if (!is_its_primary) {
        set_primary(map, key, id, num_tokens);
    }
    kvpi_map_link(map, id);
    return KVP_OK;
}

kvp_status_t kvp_pool_insert_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens) {
    return insert(pool, key, id, num_tokens, true);
}

kvp_status_t kvp_pool_insert_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id) {
    return insert(pool, key, id, KVP_TOKENS_UNKNOWN, false);
}

/* ---- a batch ---- */

static inline bool is_skipped(int32_t id) { return id == KVP_NULL_BLOCK || id == KVP_NONE; }

static inline int32_t tokens_at(int32_t first_tokens, int32_t step_tokens, int64_t i) {
    return step_tokens == 0 ? KVP_TOKENS_UNKNOWN : (int32_t)(first_tokens + i * step_tokens);
}

static kvp_status_t check_cacheable(const kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens,
                                    kvp_cache_mode_t mode) {
    const kvp_status_t status = check_key(pool, key, id);
    if (status != KVP_OK) {
        return status;
    }
    const uint8_t has_hash = pool->map.has_hash[id];
    if ((has_hash & KVP_MARKED) != 0) {
        return KVP_ERR_DUPLICATE;
    }
    if ((has_hash & KVP_HAS_PRIMARY) == 0) {
        return KVP_OK;
    }
    const kvp_entry_t *const now = &pool->map.primary[id];
    if (mode == KVP_CACHE_IDEMPOTENT) {
        return kvpi_key_equals(now, key) ? KVP_OK : KVP_ERR_HAS_HASH;
    }
    return now->num_tokens != KVP_TOKENS_UNKNOWN && now->num_tokens < num_tokens ? KVP_OK : KVP_ERR_HAS_HASH;
}

kvp_status_t kvp_pool_cache(kvp_pool_t *pool, const kvp_key_t *keys, const int32_t *ids, int64_t n,
                            int32_t first_tokens, int32_t step_tokens, kvp_cache_mode_t mode, kvp_fault_t *fault) {
    kvp_map_t *const map = &pool->map;
    kvp_status_t status = KVP_OK;
    int64_t i = 0;
    for (; i < n && status == KVP_OK; i++) {
        if (!is_skipped(ids[i])) {
            status = check_cacheable(pool, &keys[i], ids[i], tokens_at(first_tokens, step_tokens, i), mode);
            if (status == KVP_OK) {
                map->has_hash[ids[i]] |= KVP_MARKED;
            }
        }
    }
    const int64_t checked = status == KVP_OK ? n : i - 1;
    for (int64_t j = 0; j < checked; j++) {
        if (!is_skipped(ids[j])) {
            map->has_hash[ids[j]] &= (uint8_t)~KVP_MARKED;
        }
    }
    if (status != KVP_OK) {
        return kvpi_fault(fault, checked, ids[checked], status);
    }
    if (n > INT32_MAX || kvp_map_reserve(map, (int32_t)n, 0) != KVP_OK) {
        return kvpi_fault(fault, KVP_NONE, KVP_NONE, KVP_ERR_NO_MEMORY);
    }
    for (i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (i + LOOK_AHEAD < n && !is_skipped(ids[i + LOOK_AHEAD])) {
            kvp_prefetch(&map->primary[ids[i + LOOK_AHEAD]]);
            kvpi_map_prefetch(map, kvpi_key_tag(map, &keys[i + LOOK_AHEAD]));
        }
        if (is_skipped(id)) {
            continue;
        }
        if ((map->has_hash[id] & KVP_HAS_PRIMARY) != 0) {
            if (mode == KVP_CACHE_IDEMPOTENT) {
                /* Out of the map by hand; the key may be back as a secondary one. */
                if ((map->primary[id].flags & KVP_ENTRY_IN_MAP) == 0 &&
                    kvp_map_find_block(map, &keys[i], id) == KVP_NONE) {
                    kvpi_map_link(map, id);
                }
                continue;
            }
            (void)kvp_pool_drop_hashes(pool, id);
        }
        if (kvp_unlikely(map->has_hash[id] != 0) && kvp_map_find_block(map, &keys[i], id) != KVP_NONE) {
            continue;
        }
        set_primary(map, &keys[i], id, tokens_at(first_tokens, step_tokens, i));
        kvpi_map_link(map, id);
    }
    return KVP_OK;
}
