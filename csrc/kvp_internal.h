/* kvp_internal.h - what the core's files share and nobody else sees: asserts, warnings, prototypes by file. */
#ifndef KVP_INTERNAL_H
#define KVP_INTERNAL_H

#include "kvp.h"

/* Cython's generated C can't live under these, so they are set here and not on the command line. */
#if defined(__GNUC__)
#pragma GCC diagnostic error "-Wall"
#pragma GCC diagnostic error "-Wextra"
#pragma GCC diagnostic error "-Wconversion"
#pragma GCC diagnostic error "-Wsign-conversion"
#pragma GCC diagnostic error "-Wshadow"
#endif

/* Checks of ourselves. Debug builds stop at the first broken invariant; release builds carry none of this. */
#if defined(KVP_DEBUG)
#include <stdio.h>
#include <stdlib.h>
#define kvp_assert(invariant, condition)                                                                 \
    do {                                                                                                 \
        if (!(condition)) {                                                                              \
            (void)fprintf(stderr, "%s:%d: %s broken: %s\n", __FILE__, __LINE__, #invariant, #condition); \
            abort();                                                                                     \
        }                                                                                                \
    } while (0)
#else
#define kvp_assert(invariant, condition) ((void)0)
#endif

#if defined(__GNUC__)
#define kvp_likely(condition) __builtin_expect(!!(condition), 1)
#define kvp_unlikely(condition) __builtin_expect(!!(condition), 0)
#define kvp_prefetch(address) __builtin_prefetch(address)
#else
#define kvp_likely(condition) (condition)
#define kvp_unlikely(condition) (condition)
#define kvp_prefetch(address) ((void)(address))
#endif

/* Writes where a batch failed and hands the status through. */
static inline kvp_status_t kvpi_fault(kvp_fault_t *fault, int64_t index, int32_t block_id, kvp_status_t status) {
    if (fault != NULL) {
        fault->index = index;
        fault->block_id = block_id;
    }
    return status;
}

/* kvp_free_list.c */

/* Nodes strung together beside the list, so that a batch that fails can be taken back. The string hangs on a link of
 * its own behind the sentinel: pushing has no special case for the first node. */
typedef struct {
    int32_t head; /* index of that link */
    int32_t last;
    int32_t length;
} kvpi_segment_t;

enum { KVPI_FIRST_SEGMENT = 1, KVPI_SECOND_SEGMENT = 2 };

static inline kvpi_segment_t kvpi_segment(const kvp_free_list_t *list, int32_t which) {
    return (kvpi_segment_t){list->capacity + which, list->capacity + which, 0};
}

static inline void kvpi_segment_push(kvp_free_list_t *list, kvpi_segment_t *segment, int32_t node) {
    list->links[segment->last].next = node;
    /* Not poison, so that the node already counts as queued: the same node again in the batch is noticed. */
    list->links[node] = (kvp_link_t){segment->last, list->capacity};
    segment->last = node;
    segment->length++;
}

void kvpi_segment_link_tail(kvp_free_list_t *list, const kvpi_segment_t *segment);
void kvpi_segment_link_head(kvp_free_list_t *list, const kvpi_segment_t *segment);
void kvpi_segment_drop(kvp_free_list_t *list, const kvpi_segment_t *segment);

static inline void kvpi_free_list_unlink(kvp_free_list_t *list, int32_t node) {
    const kvp_link_t link = list->links[node];
    kvp_assert(I1, list->links[link.prev].next == node && list->links[link.next].prev == node);
    list->links[link.prev].next = link.next;
    list->links[link.next].prev = link.prev;
    list->links[node] = (kvp_link_t){KVP_POISON, KVP_POISON};
    list->num_free--;
}

/* kvp_prefix_map.c */

size_t kvpi_map_slots_for(int64_t keys);
void kvpi_map_init(kvp_map_t *map, const uint64_t secret[KVP_SECRET_WORDS]);
void kvpi_map_release(kvp_map_t *map);
kvp_entry_t *kvpi_map_entry(const kvp_map_t *map, int32_t index);
bool kvpi_key_equals(const kvp_entry_t *entry, const kvp_key_t *key);
void kvpi_entry_set(const kvp_map_t *map, kvp_entry_t *entry, const kvp_key_t *key, int32_t block_id,
                    int32_t num_tokens);
/* Puts a set entry at the end of its key's ring; room was reserved before. */
void kvpi_map_link(kvp_map_t *map, int32_t index);
void kvpi_map_unlink(kvp_map_t *map, int32_t index);
int32_t kvpi_map_take_extra(kvp_map_t *map);
void kvpi_map_return_extra(kvp_map_t *map, int32_t index);
void kvpi_map_clear(kvp_map_t *map);
void kvpi_map_prefetch(const kvp_map_t *map, uint32_t tag);
uint32_t kvpi_key_tag(const kvp_map_t *map, const kvp_key_t *key);
int32_t kvpi_map_find_tagged(const kvp_map_t *map, const kvp_key_t *key, uint32_t tag);

/* kvp_check.c */

kvp_status_t kvpi_map_check(const kvp_map_t *map, char *reason, size_t size);

#endif
