/* kvp_free_list.c - the blocks nobody uses, in order of reuse.
 *
 * A circular doubly linked list over an array of link pairs: whoever needs one link of a node needs the other, and they
 * share a cache line. The sentinel, one index past the last node, closes the circle: the head is its next, the tail its
 * prev, and no operation has a special case for either end.
 *
 * A node outside the list carries KVP_POISON in both links. That makes "is it queued?" one load, and it is what lets
 * every call refuse a node that is linked twice or unlinked twice.
 *
 * A batch is first strung into a segment, beside the list. Only a segment that is complete is spliced in, in O(1); one
 * that fails half way is dropped again and the list was never touched.
 */
#include "kvp_internal.h"

static const kvp_link_t UNLINKED = {KVP_POISON, KVP_POISON};

size_t kvp_free_list_links(int32_t capacity) { return (size_t)capacity + 1 + KVPI_SECOND_SEGMENT; }

void kvp_free_list_init(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity, int32_t first) {
    list->links = links;
    list->capacity = capacity;
    list->num_free = first < capacity ? capacity - first : 0;
    for (int32_t node = 0; node < first && node < capacity; node++) {
        links[node] = UNLINKED;
    }
    for (int32_t node = first; node < capacity; node++) {
        links[node] = (kvp_link_t){node - 1, node + 1};
    }
    if (list->num_free > 0) {
        links[first].prev = capacity;
        links[capacity] = (kvp_link_t){capacity - 1, first};
    } else {
        links[capacity] = (kvp_link_t){capacity, capacity};
    }
}

void kvp_free_list_move(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity) {
    const int32_t old_sentinel = list->capacity;
    for (int32_t node = 0; node < capacity; node++) {
        links[node] = node < old_sentinel ? list->links[node] : UNLINKED;
    }
    links[capacity] = (kvp_link_t){capacity, capacity};
    if (list->num_free > 0) {
        links[capacity] = list->links[old_sentinel];
        links[links[capacity].next].prev = capacity;
        links[links[capacity].prev].next = capacity;
    }
    list->links = links;
    list->capacity = capacity;
}

bool kvp_free_list_is_queued(const kvp_free_list_t *list, int32_t node) { return list->links[node].next != KVP_POISON; }

kvp_status_t kvp_free_list_pop_n(kvp_free_list_t *list, int32_t n, int32_t *out) {
    if ((uint32_t)n > (uint32_t)list->num_free) {
        return KVP_ERR_NO_FREE_BLOCKS;
    }
    const int32_t sentinel = list->capacity;
    int32_t node = list->links[sentinel].next;
    for (int32_t i = 0; i < n; i++) {
        kvp_assert(I1, node >= 0 && node < sentinel);
        out[i] = node;
        node = list->links[node].next;
        list->links[out[i]] = UNLINKED;
    }
    list->links[sentinel].next = node;
    list->links[node].prev = sentinel;
    list->num_free -= n;
    return KVP_OK;
}

kvp_status_t kvp_free_list_remove(kvp_free_list_t *list, int32_t node) {
    if (!kvp_free_list_is_queued(list, node)) {
        return KVP_ERR_NOT_QUEUED;
    }
    kvpi_free_list_unlink(list, node);
    return KVP_OK;
}

/* Between two neighbours of the list. */
static void splice(kvp_free_list_t *list, const kvpi_segment_t *segment, int32_t before, int32_t after) {
    if (segment->length > 0) {
        const int32_t first = list->links[segment->head].next;
        list->links[before].next = first;
        list->links[first].prev = before;
        list->links[segment->last].next = after;
        list->links[after].prev = segment->last;
        list->num_free += segment->length;
    }
}

void kvpi_segment_link_tail(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    splice(list, segment, list->links[list->capacity].prev, list->capacity);
}

void kvpi_segment_link_head(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    splice(list, segment, list->capacity, list->links[list->capacity].next);
}

void kvpi_segment_drop(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    int32_t node = list->links[segment->head].next;
    for (int32_t i = 0; i < segment->length; i++) {
        const int32_t after = list->links[node].next;
        list->links[node] = UNLINKED;
        node = after;
    }
}

static kvp_status_t string_segment(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvpi_segment_t *segment,
                                   kvp_fault_t *fault) {
    *segment = kvpi_segment(list, KVPI_FIRST_SEGMENT);
    for (int64_t i = 0; i < n; i++) {
        if (kvp_free_list_is_queued(list, nodes[i])) {
            kvpi_segment_drop(list, segment);
            return kvpi_fault(fault, i, nodes[i], KVP_ERR_QUEUED);
        }
        kvpi_segment_push(list, segment, nodes[i]);
    }
    return KVP_OK;
}

kvp_status_t kvp_free_list_append_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault) {
    kvpi_segment_t segment;
    const kvp_status_t status = string_segment(list, nodes, n, &segment, fault);
    if (status == KVP_OK) {
        kvpi_segment_link_tail(list, &segment);
    }
    return status;
}

kvp_status_t kvp_free_list_prepend_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault) {
    kvpi_segment_t segment;
    const kvp_status_t status = string_segment(list, nodes, n, &segment, fault);
    if (status == KVP_OK) {
        kvpi_segment_link_head(list, &segment);
    }
    return status;
}

int32_t kvp_free_list_after(const kvp_free_list_t *list, int32_t node) {
    const int32_t after = list->links[node == KVP_NONE ? list->capacity : node].next;
    return after == list->capacity ? KVP_NONE : after;
}

int32_t kvp_free_list_before(const kvp_free_list_t *list, int32_t node) {
    const int32_t before = list->links[node == KVP_NONE ? list->capacity : node].prev;
    return before == list->capacity ? KVP_NONE : before;
}
