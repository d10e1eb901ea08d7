/* kvp_check.c - recomputes every invariant of kvp.h from the arrays and names the first that does not hold. */
#include "kvp_internal.h"

#include <stdio.h>
#include <stdlib.h>

#define FAIL(...)                                  \
    do {                                           \
        (void)snprintf(reason, size, __VA_ARGS__); \
        return KVP_ERR_INVARIANT;                  \
    } while (0)

kvp_status_t kvp_free_list_check(const kvp_free_list_t *list, char *reason, size_t size) {
    const int32_t sentinel = list->capacity;
    const kvp_link_t *const links = list->links;
    int32_t before = sentinel, node = links[sentinel].next, count = 0;
    while (node != sentinel) {
        if (node < 0 || node > sentinel) {
            FAIL("I1: the node after %d is %d", before, node);
        }
        if (links[node].prev != before) {
            FAIL("I1: the node before %d is %d, not %d", node, links[node].prev, before);
        }
        if (++count > list->num_free) {
            FAIL("I1: the walk has more than num_free = %d nodes", list->num_free);
        }
        before = node;
        node = links[node].next;
    }
    if (links[sentinel].prev != before || count != list->num_free) {
        FAIL("I1: the walk has %d nodes, num_free is %d, tail is %d, not %d", count, list->num_free,
             links[sentinel].prev, before);
    }
    int32_t linked = 0;
    for (int32_t i = 0; i < sentinel; i++) {
        if ((links[i].prev == KVP_POISON) != (links[i].next == KVP_POISON)) {
            FAIL("I2: block %d is linked on one side only", i);
        }
        linked += links[i].next != KVP_POISON;
    }
    if (linked != count) {
        FAIL("I2: %d blocks carry links, %d are in the list", linked, count);
    }
    return KVP_OK;
}

static uint32_t distance_from_home(const kvp_map_t *map, uint32_t slot) {
    const uint32_t home = (uint32_t)(((uint64_t)map->slots[slot].tag * map->num_slots) >> 32);
    return slot >= home ? slot - home : slot + map->num_slots - home;
}

/* Away from home, the slot before is taken, and by one that is at most one place closer to its own home: from slot to
 * slot that makes the order of homes, and a run without a gap from home to here. */
static bool is_in_order(const kvp_map_t *map, uint32_t slot) {
    const uint32_t distance = distance_from_home(map, slot), before = (slot == 0 ? map->num_slots : slot) - 1;
    return distance == 0 || (map->slots[before].entry != 0 && distance_from_home(map, before) + 1 >= distance);
}

static kvp_status_t check_ring(const kvp_map_t *map, uint32_t slot, int32_t *num_entries, char *reason, size_t size) {
    const int32_t first = map->slots[slot].entry - 1;
    const kvp_entry_t *const head = kvp_map_entry(map, first);
    const kvp_key_t key = {(const uint8_t *)head->digest, head->digest_len, head->group_id};
    if (head->tag != map->slots[slot].tag || head->tag != kvpi_key_tag(map, &key) || !is_in_order(map, slot)) {
        FAIL("I6: slot %u can't be found from the home of its key", slot);
    }
    if (kvp_map_find(map, &key) != first) {
        FAIL("I6: the key of entry %d is found at another entry: it has two slots", first);
    }
    int32_t index = first;
    do {
        const kvp_entry_t *const entry = kvp_map_entry(map, index);
        if ((entry->flags & KVP_ENTRY_IN_MAP) == 0 || !kvpi_key_equals(entry, &key)) {
            FAIL("I7: entry %d is in the ring of entry %d, but not of its key", index, first);
        }
        if (kvp_map_entry(map, entry->next_same_key)->prev_same_key != index) {
            FAIL("I7: the ring is broken after entry %d", index);
        }
        if (kvp_map_find_block(map, &key, entry->block_id) != index) {
            FAIL("I8: block %d is twice in the ring of entry %d", entry->block_id, first);
        }
        if (++*num_entries > map->num_entries) {
            FAIL("I9: the rings have more than num_entries = %d entries", map->num_entries);
        }
        index = entry->next_same_key;
    } while (index != first);
    return KVP_OK;
}

kvp_status_t kvpi_map_check(const kvp_map_t *map, char *reason, size_t size) {
    int32_t num_keys = 0, num_entries = 0, num_unused = 0;
    for (uint32_t slot = 0; slot < map->num_slots; slot++) {
        if (map->slots[slot].entry != 0) {
            num_keys++;
            const kvp_status_t status = check_ring(map, slot, &num_entries, reason, size);
            if (status != KVP_OK) {
                return status;
            }
        }
    }
    for (int32_t unused = map->extra_unused; unused != 0; unused = kvp_map_entry(map, unused - 1)->next_of_block) {
        if (kvp_map_entry(map, unused - 1)->flags != 0 || ++num_unused > map->extra_used) {
            FAIL("I9: the list of unused extra entries is broken at entry %d", unused - 1);
        }
    }
    if (num_keys != map->num_keys || num_entries != map->num_entries) {
        FAIL("I9: %d keys and %d entries in the map, counted %d and %d", map->num_keys, map->num_entries, num_keys,
             num_entries);
    }
    return KVP_OK;
}

/* I8 for one block; counts its entries that are in the map. */
static kvp_status_t check_block_hashes(const kvp_pool_t *pool, int32_t id, int32_t *num_in_map, int32_t *num_extra,
                                       char *reason, size_t size) {
    const kvp_map_t *const map = &pool->map;
    const kvp_entry_t *const primary = &map->primary[id];
    const int wanted = ((primary->flags & KVP_ENTRY_SET) != 0 ? KVP_HAS_PRIMARY : 0) |
                       (primary->next_of_block != 0 ? KVP_HAS_SECONDARY : 0);
    if (map->has_hash[id] != wanted) {
        FAIL("I8: has_hash[%d] is %d, the entries say %d", id, map->has_hash[id], wanted);
    }
    *num_in_map += (primary->flags & KVP_ENTRY_IN_MAP) != 0;
    for (int32_t entry = primary->next_of_block; entry != 0; entry = kvp_map_entry(map, entry - 1)->next_of_block) {
        const kvp_entry_t *const secondary = kvp_map_entry(map, entry - 1);
        if (secondary->block_id != id || (secondary->flags & KVP_ENTRY_IN_MAP) == 0) {
            FAIL("I8: secondary entry %d of block %d is not its own or not in the map", entry - 1, id);
        }
        ++*num_in_map;
        if (++*num_extra > map->extra_used) {
            FAIL("I8: the secondary chain of block %d has no end", id);
        }
    }
    return KVP_OK;
}

kvp_status_t kvp_pool_check(const kvp_pool_t *pool, char *reason, size_t size) {
    kvp_status_t status = kvp_free_list_check(&pool->free_list, reason, size);
    if (status == KVP_OK) {
        status = kvpi_map_check(&pool->map, reason, size);
    }
    if (status != KVP_OK) {
        return status;
    }
    int32_t in_use = 0, in_map = 0, num_extra = 0;
    for (int32_t id = 0; id < pool->num_blocks; id++) {
        const bool queued = kvp_free_list_is_queued(&pool->free_list, id);
        if (pool->ref_cnt[id] < 0 || (queued && pool->ref_cnt[id] != 0)) {
            FAIL("I3: block %d is %s with ref_cnt %d", id, queued ? "queued" : "not queued", pool->ref_cnt[id]);
        }
        in_use += pool->ref_cnt[id] > 0;
        status = check_block_hashes(pool, id, &in_map, &num_extra, reason, size);
        if (status != KVP_OK) {
            return status;
        }
    }
    if (pool->free_list.num_free + in_use + pool->num_detached != pool->num_blocks - 1) {
        FAIL("I4: %d free + %d in use + %d detached is not %d", pool->free_list.num_free, in_use, pool->num_detached,
             pool->num_blocks - 1);
    }
    if (pool->ref_cnt[KVP_NULL_BLOCK] != 0 || kvp_free_list_is_queued(&pool->free_list, KVP_NULL_BLOCK) ||
        (pool->map.has_hash[KVP_NULL_BLOCK] != 0 && !pool->null_takes_hashes)) {
        FAIL("I5: the null block is in use, queued or cached");
    }
    if (in_map != pool->map.num_entries) {
        FAIL("I8: the blocks have %d entries in the map, the map has %d", in_map, pool->map.num_entries);
    }
    return KVP_OK;
}
