/* kvp_pool.c - reference counts, and the calls that move blocks between their users, the free list and the map.
 *
 * A batch call walks its ids once and changes state as it goes, since a check before the change would miss an id that
 * is in the batch twice. What it changed it can take back: kvp_pool_free() strings freed blocks into segments beside
 * the free list and splices them in when the last id was good; on a bad one the segments are dropped and the counts
 * raised again. kvp_pool_cache() marks the blocks it has validated for the same reason.
 *
 * has_hash[] repeats what the entries say, one byte a block instead of one cache line: allocating and freeing blocks
 * without a hash never touches the map.
 */
#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* madvise() */
#endif
#include "kvp_internal.h"

#include <string.h>

#include "kvp_alloc.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { CACHE_LINE = 64, LOOK_AHEAD = 8, HUGE_BYTES = 2 << 20 };

/* ---- creation ---- */

/* The arrays of a large pool are read at random places: with 4 KiB pages half of the time goes into finding them. The
 * memory is fresh from the system and untouched; where advice is not to be had, nothing is lost. */
static void ask_for_huge_pages(char *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const size_t skip = (HUGE_BYTES - (uintptr_t)memory % HUGE_BYTES) % HUGE_BYTES;
    if (bytes >= skip + 2 * (size_t)HUGE_BYTES) {
        (void)madvise(memory + skip, (bytes - skip) / HUGE_BYTES * HUGE_BYTES, MADV_HUGEPAGE);
    }
#else
    (void)memory;
    (void)bytes;
#endif
}

static size_t take(size_t *offset, size_t bytes) {
    const size_t start = (*offset + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    *offset = start + bytes;
    return start;
}

kvp_status_t kvp_pool_create(int32_t num_blocks, bool enable_caching, bool uncached_first,
                             const uint64_t secret[KVP_SECRET_WORDS], kvp_pool_t **out) {
    if (num_blocks < 1 || num_blocks == INT32_MAX) {
        return KVP_ERR_BLOCK_ID;
    }
    const size_t n = (size_t)num_blocks, slots = kvpi_map_slots_for(num_blocks);
    size_t bytes = 0;
    const size_t at_pool = take(&bytes, sizeof(kvp_pool_t)),
                 at_links = take(&bytes, kvp_free_list_links(num_blocks) * sizeof(kvp_link_t)),
                 at_ref_cnt = take(&bytes, n * sizeof(int32_t)), at_has_hash = take(&bytes, n),
                 at_slots = take(&bytes, slots * sizeof(kvp_slot_t)),
                 at_primary = take(&bytes, n * sizeof(kvp_entry_t));
    bytes += CACHE_LINE;
    char *const memory = kvp_calloc(1, bytes);
    if (memory == NULL) {
        return KVP_ERR_NO_MEMORY;
    }
    ask_for_huge_pages(memory, bytes);
    char *const base = memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE) % CACHE_LINE;
    kvp_pool_t *const pool = (kvp_pool_t *)(void *)(base + at_pool);
    kvpi_map_init(&pool->map, secret);
    pool->map.primary = (kvp_entry_t *)(void *)(base + at_primary);
    pool->map.slots = (kvp_slot_t *)(void *)(base + at_slots);
    pool->map.has_hash = (uint8_t *)(base + at_has_hash);
    pool->map.num_slots = (uint32_t)slots;
    pool->map.num_blocks = num_blocks;
    pool->ref_cnt = (int32_t *)(void *)(base + at_ref_cnt);
    pool->memory = memory;
    pool->memory_bytes = bytes;
    pool->num_blocks = num_blocks;
    pool->enable_caching = enable_caching;
    pool->uncached_first = uncached_first;
    kvp_free_list_init(&pool->free_list, (kvp_link_t *)(void *)(base + at_links), num_blocks, KVP_NULL_BLOCK + 1);
    *out = pool;
    return KVP_OK;
}

void kvp_pool_destroy(kvp_pool_t *pool) {
    if (pool != NULL) {
        kvpi_map_release(&pool->map);
        kvp_free(pool->memory);
    }
}

size_t kvp_pool_nbytes(const kvp_pool_t *pool) {
    return pool->memory_bytes + (size_t)pool->map.extra_capacity * sizeof(kvp_entry_t) +
           (pool->map.owns_slots ? pool->map.num_slots * sizeof(kvp_slot_t) : 0);
}

static inline bool is_block_id(const kvp_pool_t *pool, int32_t id) { return (uint32_t)id < (uint32_t)pool->num_blocks; }

/* ---- allocate, free, touch ---- */

/* Takes n blocks from the head; returns how many of them carry a hash, or KVP_NONE (and no change) if n are not free.
 * One walk for links and counts: a batch is short, but its blocks may lie anywhere. */
static int32_t take_from_head(kvp_pool_t *pool, int32_t n, int32_t *out) {
    kvp_free_list_t *const list = &pool->free_list;
    if ((uint32_t)n > (uint32_t)list->num_free) {
        return KVP_NONE;
    }
    kvp_link_t *const links = list->links;
    int32_t *const ref_cnt = pool->ref_cnt;
    const uint8_t *const has_hash = pool->map.has_hash;
    int32_t node = links[list->capacity].next, num_hashed = 0;
    for (int32_t i = 0; i < n; i++) {
        kvp_assert(I3, ref_cnt[node] == 0);
        const int32_t after = links[node].next;
        links[node] = (kvp_link_t){KVP_POISON, KVP_POISON};
        ref_cnt[node] = 1;
        num_hashed += has_hash[node] != 0;
        out[i] = node;
        node = after;
    }
    links[list->capacity].next = node;
    links[node].prev = list->capacity;
    list->num_free -= n;
    return num_hashed;
}

kvp_status_t kvp_pool_take(kvp_pool_t *pool, int32_t n, int32_t *out) {
    return take_from_head(pool, n, out) == KVP_NONE ? KVP_ERR_NO_FREE_BLOCKS : KVP_OK;
}

kvp_status_t kvp_pool_allocate(kvp_pool_t *pool, int32_t n, int32_t *out) {
    const uint8_t *const has_hash = pool->map.has_hash;
    const int32_t num_hashed = take_from_head(pool, n, out);
    if (num_hashed == KVP_NONE) {
        return KVP_ERR_NO_FREE_BLOCKS;
    }
    if (num_hashed == 0 || !pool->enable_caching) {
        return KVP_OK;
    }
    /* A second walk, so that the entries and then the slots of the blocks ahead are on their way from memory. */
    for (int32_t i = 0; i < n; i++) {
        if (i + 2 * LOOK_AHEAD < n && has_hash[out[i + 2 * LOOK_AHEAD]] != 0) {
            kvp_prefetch(&pool->map.primary[out[i + 2 * LOOK_AHEAD]]);
        }
        if (i + LOOK_AHEAD < n && has_hash[out[i + LOOK_AHEAD]] != 0) {
            kvpi_map_prefetch(&pool->map, pool->map.primary[out[i + LOOK_AHEAD]].tag);
        }
        if (has_hash[out[i]] != 0 && kvp_pool_drop_hashes(pool, out[i]) > 0) {
            pool->num_evicted++;
        }
    }
    return KVP_OK;
}

/* Whether a block that nobody uses any more is to be reused soon. */
static inline bool goes_to_head(const kvp_pool_t *pool, int32_t id, kvp_placement_t where) {
    if (where == KVP_PLACE_BY_HASH && pool->uncached_first) {
        return !pool->enable_caching || (pool->map.has_hash[id] & KVP_HAS_PRIMARY) == 0;
    }
    return where == KVP_PLACE_HEAD;
}

/* One reference less for ids[0 .. n-1]; what reaches 0 is strung into the two segments. On a bad id all is undone. */
static kvp_status_t release(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                            kvpi_segment_t *head, kvpi_segment_t *tail, kvp_fault_t *fault) {
    kvp_free_list_t *const list = &pool->free_list;
    int32_t *const ref_cnt = pool->ref_cnt;
    const uint8_t *const has_hash = pool->map.has_hash;
    const bool head_if_uncached = where == KVP_PLACE_BY_HASH && pool->uncached_first;
    const uint8_t cached = pool->enable_caching ? KVP_HAS_PRIMARY : 0;
    /* Copies, which the compiler can keep in registers. */
    kvpi_segment_t first = *head, last = *tail;
    kvp_status_t status = KVP_OK;
    int64_t i = 0;
    for (; i < n; i++) {
        const int32_t id = ids[i];
        if (kvp_unlikely(!is_block_id(pool, id))) {
            status = KVP_ERR_BLOCK_ID;
            break;
        }
        if (id == KVP_NULL_BLOCK) {
            continue;
        }
        if (kvp_unlikely(ref_cnt[id] == 0)) {
            status = KVP_ERR_NOT_IN_USE;
            break;
        }
        if (--ref_cnt[id] == 0) {
            if (head_if_uncached ? (has_hash[id] & cached) == 0 : where == KVP_PLACE_HEAD) {
                kvpi_segment_push(list, &first, id);
            } else {
                kvpi_segment_push(list, &last, id);
            }
        }
    }
    *head = first;
    *tail = last;
    if (kvp_likely(status == KVP_OK)) {
        return KVP_OK;
    }
    const int64_t failed = i;
    while (i-- > 0) {
        if (ids[i] != KVP_NULL_BLOCK) {
            ref_cnt[ids[i]]++;
        }
    }
    kvpi_segment_drop(list, head);
    kvpi_segment_drop(list, tail);
    return kvpi_fault(fault, failed, ids[failed], status);
}

kvp_status_t kvp_pool_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *fault) {
    kvpi_segment_t head = kvpi_segment(&pool->free_list, KVPI_FIRST_SEGMENT),
                   tail = kvpi_segment(&pool->free_list, KVPI_SECOND_SEGMENT);
    const kvp_status_t status = release(pool, ids, n, where, &head, &tail, fault);
    if (status == KVP_OK) {
        kvpi_segment_link_head(&pool->free_list, &head);
        kvpi_segment_link_tail(&pool->free_list, &tail);
    }
    return status;
}

int64_t kvp_pool_free_valid(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *faults,
                            int64_t room) {
    kvp_free_list_t *const list = &pool->free_list;
    kvpi_segment_t head = kvpi_segment(list, KVPI_FIRST_SEGMENT), tail = kvpi_segment(list, KVPI_SECOND_SEGMENT);
    int64_t num_skipped = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (id == KVP_NULL_BLOCK) {
            continue;
        }
        if (!is_block_id(pool, id) || pool->ref_cnt[id] == 0) {
            if (num_skipped < room) {
                faults[num_skipped] = (kvp_fault_t){i, id};
            }
            num_skipped++;
            continue;
        }
        if (--pool->ref_cnt[id] == 0) {
            kvpi_segment_push(list, goes_to_head(pool, id, where) ? &head : &tail, id);
        }
    }
    kvpi_segment_link_head(list, &head);
    kvpi_segment_link_tail(list, &tail);
    return num_skipped;
}

kvp_status_t kvp_pool_can_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault) {
    kvpi_segment_t head = kvpi_segment(&pool->free_list, KVPI_FIRST_SEGMENT),
                   tail = kvpi_segment(&pool->free_list, KVPI_SECOND_SEGMENT);
    const kvp_status_t status = release(pool, ids, n, KVP_PLACE_TAIL, &head, &tail, fault);
    if (status == KVP_OK) {
        for (int64_t i = 0; i < n; i++) {
            if (ids[i] != KVP_NULL_BLOCK) {
                pool->ref_cnt[ids[i]]++;
            }
        }
        kvpi_segment_drop(&pool->free_list, &tail);
    }
    return status;
}

kvp_status_t kvp_pool_touch(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault) {
    kvp_free_list_t *const list = &pool->free_list;
    int32_t *const ref_cnt = pool->ref_cnt;
    /* A count can overflow only in the last n steps before the limit; no batch of any size gets that close by chance. */
    const int32_t limit = n < INT32_MAX ? (int32_t)(INT32_MAX - n) : 0;
    for (int64_t i = 0; i < n; i++) {
        if (kvp_unlikely(!is_block_id(pool, ids[i]))) {
            return kvpi_fault(fault, i, ids[i], KVP_ERR_BLOCK_ID);
        }
        if (kvp_unlikely(ref_cnt[ids[i]] > limit)) {
            return kvpi_fault(fault, i, ids[i], KVP_ERR_REF_OVERFLOW);
        }
        kvp_prefetch(&list->links[ids[i]]);
    }
    if (kvp_unlikely(pool->num_detached > 0)) {
        for (int64_t i = 0; i < n; i++) {
            if (ids[i] != KVP_NULL_BLOCK && ref_cnt[ids[i]] == 0 && !kvp_free_list_is_queued(list, ids[i])) {
                return kvpi_fault(fault, i, ids[i], KVP_ERR_NOT_QUEUED);
            }
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (i + LOOK_AHEAD < n) {
            const kvp_link_t link = list->links[ids[i + LOOK_AHEAD]];
            kvp_prefetch(&list->links[link.prev > 0 ? link.prev : 0]);
            kvp_prefetch(&list->links[link.next > 0 ? link.next : 0]);
        }
        if (id == KVP_NULL_BLOCK) {
            continue;
        }
        if (ref_cnt[id]++ == 0) {
            kvpi_free_list_unlink(list, id);
        }
    }
    return KVP_OK;
}

kvp_status_t kvp_pool_set_ref_cnt(kvp_pool_t *pool, int32_t id, int32_t ref_cnt) {
    const int32_t now = pool->ref_cnt[id];
    if (ref_cnt < 0) {
        return KVP_ERR_NOT_IN_USE;
    }
    if (id == KVP_NULL_BLOCK) {
        return ref_cnt == 0 ? KVP_OK : KVP_ERR_NULL_BLOCK;
    }
    if (kvp_free_list_is_queued(&pool->free_list, id)) {
        return ref_cnt == 0 ? KVP_OK : KVP_ERR_QUEUED;
    }
    pool->num_detached += (ref_cnt == 0) - (now == 0);
    pool->ref_cnt[id] = ref_cnt;
    return KVP_OK;
}

/* ---- hand surgery on the free list ---- */

kvp_status_t kvp_pool_pop_detached(kvp_pool_t *pool, int32_t n, int32_t *out) {
    const kvp_status_t status = kvp_free_list_pop_n(&pool->free_list, n, out);
    if (status == KVP_OK) {
        pool->num_detached += n;
    }
    return status;
}

kvp_status_t kvp_pool_detach(kvp_pool_t *pool, int32_t id) {
    const kvp_status_t status = kvp_free_list_remove(&pool->free_list, id);
    if (status == KVP_OK) {
        pool->num_detached++;
    }
    return status;
}

kvp_status_t kvp_pool_attach(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                             kvp_fault_t *fault) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == KVP_NULL_BLOCK) {
            return kvpi_fault(fault, i, ids[i], KVP_ERR_NULL_BLOCK);
        }
        if (pool->ref_cnt[ids[i]] > 0) {
            return kvpi_fault(fault, i, ids[i], KVP_ERR_IN_USE);
        }
    }
    const kvp_status_t status = where == KVP_PLACE_HEAD ? kvp_free_list_prepend_n(&pool->free_list, ids, n, fault)
                                                        : kvp_free_list_append_n(&pool->free_list, ids, n, fault);
    if (status == KVP_OK) {
        pool->num_detached -= (int32_t)n;
    }
    return status;
}

int32_t kvp_pool_num_evictable(const kvp_pool_t *pool) {
    int32_t count = 0;
    for (int32_t id = kvp_free_list_after(&pool->free_list, KVP_NONE); id != KVP_NONE;
         id = kvp_free_list_after(&pool->free_list, id)) {
        count += pool->map.has_hash[id] != 0;
    }
    return count;
}
