/* kvp_prefix_map.c - from a key (digest, group) to the blocks that hold its tokens.
 *
 * Two arrays. Slots (8 bytes: tag, entry) are probed; entries (64 bytes, one cache line) hold the key and what hangs
 * on it. A lookup that misses touches slots only, unless two tags are equal; one that hits touches one entry.
 *
 * The tag is the high half of a 64-bit hash of the digest, keyed by a per-process secret: whoever chooses digests (a
 * client chooses its prompt) can't choose where they land. home = tag * num_slots >> 32 keeps the slots in tag order,
 * works for any number of slots, and needs no entry to move a slot: the tag tells how far from home it is.
 *
 * In a probe run the slots are in the order of their homes (Robin Hood): a search ends at the first slot that is closer
 * to its home than the search is by then, and a deletion shifts back no further than to the next slot that is at home.
 * In no particular order, either would go on to the end of the run, two to three times as far at this load.
 *
 * Slots are sized for KVP_LOAD of all primary entries, so a pool whose every block is cached never grows the table.
 *
 * Equal keys (the same prompt computed twice) form a ring of entries in insertion order; the slot names the first.
 * The ring gives O(1) append and removal however many copies there are.
 */
#include "kvp_internal.h"

#include <string.h>

#include "kvp_alloc.h"

enum { LOAD_NUMERATOR = 3, LOAD_DENOMINATOR = 4, SLOTS_MIN = 8, EXTRA_MIN = 8 };

/* ---- hashing ---- */

static inline uint64_t fold_multiply(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
    __extension__ typedef unsigned __int128 uint128_t;
    const uint128_t product = (uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    const uint64_t a_lo = (uint32_t)a, a_hi = a >> 32, b_lo = (uint32_t)b, b_hi = b >> 32;
    const uint64_t lo = a_lo * b_lo, mid1 = a_hi * b_lo, mid2 = a_lo * b_hi, hi = a_hi * b_hi;
    const uint64_t carry = ((lo >> 32) + (uint32_t)mid1 + (uint32_t)mid2) >> 32;
    return (lo + (mid1 << 32) + (mid2 << 32)) ^ (hi + (mid1 >> 32) + (mid2 >> 32) + carry);
#endif
}

static inline void load_digest(uint64_t words[KVP_DIGEST_BYTES / 8], const kvp_key_t *key) {
    if (kvp_likely(key->digest_len == KVP_DIGEST_BYTES)) {
        memcpy(words, key->digest, KVP_DIGEST_BYTES);
    } else {
        memset(words, 0, KVP_DIGEST_BYTES);
        /* A longer one is equal to no entry, since the lengths differ: no more of it is read than fits. */
        memcpy(words, key->digest, key->digest_len < KVP_DIGEST_BYTES ? key->digest_len : KVP_DIGEST_BYTES);
    }
}

uint32_t kvpi_key_tag(const kvp_map_t *map, const kvp_key_t *key) {
    const uint64_t *const secret = map->secret;
    uint64_t words[KVP_DIGEST_BYTES / 8];
    load_digest(words, key);
    const uint64_t low = fold_multiply(words[0] ^ secret[0], words[1] ^ secret[1]);
    const uint64_t high = fold_multiply(words[2] ^ secret[2], words[3] ^ secret[3]);
    const uint64_t rest = ((uint64_t)key->group_id << 8) | key->digest_len;
    return (uint32_t)(fold_multiply(low ^ secret[1] ^ rest, high ^ secret[3]) >> 32);
}

bool kvpi_key_equals(const kvp_entry_t *entry, const kvp_key_t *key) {
    uint64_t words[KVP_DIGEST_BYTES / 8];
    load_digest(words, key);
    return (entry->flags & KVP_ENTRY_SET) != 0 && entry->group_id == key->group_id &&
           entry->digest_len == key->digest_len && memcmp(entry->digest, words, KVP_DIGEST_BYTES) == 0;
}

/* ---- slots ---- */

static inline uint32_t home_of(const kvp_map_t *map, uint32_t tag) {
    return (uint32_t)(((uint64_t)tag * map->num_slots) >> 32);
}

static inline uint32_t slot_after(const kvp_map_t *map, uint32_t slot) {
    return slot + 1 == map->num_slots ? 0 : slot + 1;
}

size_t kvpi_map_slots_for(int64_t keys) {
    const int64_t slots = keys * LOAD_DENOMINATOR / LOAD_NUMERATOR + 1;
    return slots < SLOTS_MIN ? SLOTS_MIN : (size_t)slots;
}

/* What a search or a deletion goes through from there on lies in two cache lines more often than in one. (Past the last
 * slot, nothing is read.) */
void kvpi_map_prefetch(const kvp_map_t *map, uint32_t tag) {
    const kvp_slot_t *const home = &map->slots[home_of(map, tag)];
    kvp_prefetch(home);
    kvp_prefetch(home + 7);
}

/* How far the slot is from the home of the tag that is, or would be, in it. */
static inline uint32_t distance_of(const kvp_map_t *map, uint32_t slot, uint32_t tag) {
    const uint32_t home = home_of(map, tag);
    return slot >= home ? slot - home : slot + map->num_slots - home;
}

/* Where the key is (first: 1 + its first entry), or where it goes to (first: 0). */
typedef struct {
    uint32_t slot;
    int32_t first;
} kvp_place_t;

static inline kvp_place_t probe(const kvp_map_t *map, const kvp_key_t *key, uint32_t tag) {
    uint32_t slot = home_of(map, tag);
    for (uint32_t distance = 0;; distance++, slot = slot_after(map, slot)) {
        const kvp_slot_t at = map->slots[slot];
        if (at.entry == 0) {
            return (kvp_place_t){slot, 0};
        }
        if (at.tag == tag) {
            if (kvpi_key_equals(kvpi_map_entry(map, at.entry - 1), key)) {
                return (kvp_place_t){slot, at.entry};
            }
        } else if (distance_of(map, slot, at.tag) < distance) {
            return (kvp_place_t){slot, 0};
        }
    }
}

/* The slots of the run from there on make room; each stays in the order of homes. */
static void fill_slot(kvp_map_t *map, uint32_t slot, kvp_slot_t filling) {
    while (map->slots[slot].entry != 0) {
        const kvp_slot_t moved = map->slots[slot];
        map->slots[slot] = filling;
        filling = moved;
        slot = slot_after(map, slot);
    }
    map->slots[slot] = filling;
}

/* Backward shift of all that are not at home, so no tombstone is ever needed. */
static void empty_slot(kvp_map_t *map, uint32_t hole) {
    for (;;) {
        const uint32_t after = slot_after(map, hole);
        const kvp_slot_t next = map->slots[after];
        if (next.entry == 0 || home_of(map, next.tag) == after) {
            break;
        }
        map->slots[hole] = next;
        hole = after;
    }
    map->slots[hole] = (kvp_slot_t){0};
}

static bool grow_slots(kvp_map_t *map, uint32_t num_slots) {
    kvp_slot_t *const old = map->slots, *const slots = kvp_calloc(num_slots, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    const uint32_t num_old = map->num_slots;
    map->slots = slots;
    map->num_slots = num_slots;
    for (uint32_t i = 0; i < num_old; i++) {
        if (old[i].entry != 0) {
            uint32_t slot = home_of(map, old[i].tag), distance = 0;
            while (slots[slot].entry != 0 && distance_of(map, slot, slots[slot].tag) >= distance) {
                slot = slot_after(map, slot);
                distance++;
            }
            fill_slot(map, slot, old[i]);
        }
    }
    if (map->owns_slots) {
        kvp_free(old);
    }
    map->owns_slots = true;
    return true;
}

/* ---- entries ---- */

kvp_entry_t *kvpi_map_entry(const kvp_map_t *map, int32_t index) {
    return index < map->num_blocks ? &map->primary[index] : &map->extra[index - map->num_blocks];
}

const kvp_entry_t *kvp_map_entry(const kvp_map_t *map, int32_t index) { return kvpi_map_entry(map, index); }

void kvpi_entry_set(const kvp_map_t *map, kvp_entry_t *entry, const kvp_key_t *key, int32_t block_id,
                    int32_t num_tokens) {
    load_digest(entry->digest, key);
    entry->group_id = key->group_id;
    entry->digest_len = (uint8_t)key->digest_len;
    entry->num_tokens = num_tokens;
    entry->block_id = block_id;
    entry->tag = kvpi_key_tag(map, key);
    entry->flags = KVP_ENTRY_SET;
}

static kvp_key_t key_of(const kvp_entry_t *entry) {
    return (kvp_key_t){(const uint8_t *)entry->digest, entry->digest_len, entry->group_id};
}

void kvpi_map_link(kvp_map_t *map, int32_t index) {
    kvp_entry_t *const entry = kvpi_map_entry(map, index);
    const kvp_key_t key = key_of(entry);
    const kvp_place_t place = probe(map, &key, entry->tag);
    kvp_assert(I7, (entry->flags & (KVP_ENTRY_SET | KVP_ENTRY_IN_MAP)) == KVP_ENTRY_SET);
    if (place.first == 0) {
        fill_slot(map, place.slot, (kvp_slot_t){entry->tag, index + 1});
        entry->next_same_key = entry->prev_same_key = index;
        map->num_keys++;
    } else {
        const int32_t first = place.first - 1;
        kvp_entry_t *const head = kvpi_map_entry(map, first);
        entry->next_same_key = first;
        entry->prev_same_key = head->prev_same_key;
        kvpi_map_entry(map, head->prev_same_key)->next_same_key = index;
        head->prev_same_key = index;
    }
    entry->flags |= KVP_ENTRY_IN_MAP;
    map->num_entries++;
}

void kvpi_map_unlink(kvp_map_t *map, int32_t index) {
    kvp_entry_t *const entry = kvpi_map_entry(map, index);
    /* The entry itself tells where the key sits: probing by index compares no digest. */
    const bool alone = entry->next_same_key == index;
    kvp_assert(I7, (entry->flags & KVP_ENTRY_IN_MAP) != 0);
    if (alone) {
        uint32_t slot = home_of(map, entry->tag);
        while (map->slots[slot].entry != index + 1) {
            kvp_assert(I6, map->slots[slot].entry != 0);
            slot = slot_after(map, slot);
        }
        empty_slot(map, slot);
        map->num_keys--;
    } else {
        const kvp_key_t key = key_of(entry);
        const kvp_place_t place = probe(map, &key, entry->tag);
        kvp_assert(I6, place.first != 0);
        if (place.first == index + 1) {
            map->slots[place.slot].entry = entry->next_same_key + 1;
        }
        kvpi_map_entry(map, entry->prev_same_key)->next_same_key = entry->next_same_key;
        kvpi_map_entry(map, entry->next_same_key)->prev_same_key = entry->prev_same_key;
    }
    entry->flags &= (uint8_t)~KVP_ENTRY_IN_MAP;
    map->num_entries--;
}

int32_t kvpi_map_take_extra(kvp_map_t *map) {
    if (map->extra_unused != 0) {
        const int32_t index = map->extra_unused - 1;
        map->extra_unused = kvpi_map_entry(map, index)->next_of_block;
        kvpi_map_entry(map, index)->next_of_block = 0;
        return index;
    }
    kvp_assert(I9, map->extra_used < map->extra_capacity);
    /* After a reset the array holds what it held before, links of returned entries too. */
    map->extra[map->extra_used].next_of_block = 0;
    return map->num_blocks + map->extra_used++;
}

void kvpi_map_return_extra(kvp_map_t *map, int32_t index) {
    kvp_entry_t *const entry = kvpi_map_entry(map, index);
    entry->flags = 0;
    entry->next_of_block = map->extra_unused;
    map->extra_unused = index + 1;
}

kvp_status_t kvp_map_reserve(kvp_map_t *map, int32_t keys, int32_t extra) {
    const int64_t room = map->extra_capacity - map->extra_used + (map->extra_unused != 0);
    if (extra > room) {
        int64_t capacity = map->extra_capacity < EXTRA_MIN ? EXTRA_MIN : 2 * (int64_t)map->extra_capacity;
        if (capacity < (int64_t)map->extra_used + extra) {
            capacity = (int64_t)map->extra_used + extra;
        }
        if (capacity + map->num_blocks >= INT32_MAX) {
            return KVP_ERR_NO_MEMORY;
        }
        kvp_entry_t *const grown = kvp_realloc(map->extra, (size_t)capacity * sizeof *grown);
        if (grown == NULL) {
            return KVP_ERR_NO_MEMORY;
        }
        memset(grown + map->extra_capacity, 0, (size_t)(capacity - map->extra_capacity) * sizeof *grown);
        map->extra = grown;
        map->extra_capacity = (int32_t)capacity;
    }
    const int64_t wanted = (int64_t)map->num_keys + keys;
    if (wanted > map->num_blocks && kvpi_map_slots_for(wanted) > map->num_slots) {
        const size_t slots = kvpi_map_slots_for(2 * wanted);
        if (slots > UINT32_MAX || !grow_slots(map, (uint32_t)slots)) {
            return KVP_ERR_NO_MEMORY;
        }
    }
    return KVP_OK;
}

void kvpi_map_init(kvp_map_t *map, const uint64_t secret[KVP_SECRET_WORDS]) {
    memset(map, 0, sizeof *map);
    memcpy(map->secret, secret, sizeof map->secret);
}

void kvpi_map_release(kvp_map_t *map) {
    kvp_free(map->extra);
    if (map->owns_slots) {
        kvp_free(map->slots);
    }
}

/* Every ring, then every slot. What lies in primary entries that are in no ring is the pool's business. */
void kvpi_map_clear(kvp_map_t *map) {
    for (uint32_t slot = 0; slot < map->num_slots && map->num_keys > 0; slot++) {
        if (map->slots[slot].entry == 0) {
            continue;
        }
        const int32_t first = map->slots[slot].entry - 1;
        int32_t index = first;
        do {
            kvp_entry_t *const entry = kvpi_map_entry(map, index);
            index = entry->next_same_key;
            entry->flags = 0;
            entry->next_of_block = 0;
            if (map->has_hash != NULL) {
                map->has_hash[entry->block_id] = 0;
                map->primary[entry->block_id].flags = 0;
                map->primary[entry->block_id].next_of_block = 0;
            }
        } while (index != first);
        map->slots[slot] = (kvp_slot_t){0};
        map->num_keys--;
    }
    map->num_entries = 0;
    map->extra_used = map->extra_unused = 0;
}

/* ---- lookups ---- */

int32_t kvpi_map_find_tagged(const kvp_map_t *map, const kvp_key_t *key, uint32_t tag) {
    return probe(map, key, tag).first - 1;
}

int32_t kvp_map_find(const kvp_map_t *map, const kvp_key_t *key) {
    return key->digest_len > KVP_DIGEST_BYTES ? KVP_NONE : kvpi_map_find_tagged(map, key, kvpi_key_tag(map, key));
}

int32_t kvp_map_find_block(const kvp_map_t *map, const kvp_key_t *key, int32_t block_id) {
    const int32_t first = kvp_map_find(map, key);
    for (int32_t index = first; index != KVP_NONE;) {
        const kvp_entry_t *const entry = kvpi_map_entry(map, index);
        if (entry->block_id == block_id) {
            return index;
        }
        index = entry->next_same_key == first ? KVP_NONE : entry->next_same_key;
    }
    return KVP_NONE;
}

/* ---- the stand-alone map ---- */

kvp_status_t kvp_map_create(const uint64_t secret[KVP_SECRET_WORDS], kvp_map_t **out) {
    kvp_map_t *const map = kvp_malloc(sizeof *map);
    if (map == NULL) {
        return KVP_ERR_NO_MEMORY;
    }
    kvpi_map_init(map, secret);
    if (!grow_slots(map, SLOTS_MIN)) {
        kvp_free(map);
        return KVP_ERR_NO_MEMORY;
    }
    *out = map;
    return KVP_OK;
}

void kvp_map_destroy(kvp_map_t *map) {
    if (map != NULL) {
        kvpi_map_release(map);
        kvp_free(map);
    }
}

kvp_status_t kvp_map_add(kvp_map_t *map, const kvp_key_t *key, int32_t block_id, int32_t *entry) {
    if (key->digest_len > KVP_DIGEST_BYTES) {
        return KVP_ERR_DIGEST_LENGTH;
    }
    const kvp_status_t status = kvp_map_reserve(map, 1, 1);
    if (status != KVP_OK) {
        return status;
    }
    const int32_t index = kvpi_map_take_extra(map);
    kvpi_entry_set(map, kvpi_map_entry(map, index), key, block_id, KVP_TOKENS_UNKNOWN);
    kvpi_map_link(map, index);
    *entry = index;
    return KVP_OK;
}

void kvp_map_discard(kvp_map_t *map, int32_t entry) {
    kvpi_map_unlink(map, entry);
    kvpi_map_return_extra(map, entry);
}
