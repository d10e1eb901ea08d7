/* kvp_free_list.c - the blocks nobody uses, in order of reuse.
 *
 * A circular doubly linked list over two int32 arrays. The sentinel, one index past the last node, closes the circle:
 * the head is next[sentinel], the tail prev[sentinel], and no operation has a special case for either end.
 *
 * A node outside the list carries KVP_POISON in both links. That makes "is it queued?" one load, and it is what lets
 * every call refuse a node that is linked twice or unlinked twice.
 *
 * A batch is first strung into a segment, beside the list. Only a segment that is complete is spliced in, in O(1); one
 * that fails half way is dropped again and the list was never touched.
 */
#include "kvp_internal.h"

void kvp_free_list_init(kvp_free_list_t *list, int32_t *prev, int32_t *next, int32_t capacity, int32_t first) {
    list->prev = prev;
    list->next = next;
    list->capacity = capacity;
    list->num_free = first < capacity ? capacity - first : 0;
    for (int32_t node = 0; node < first && node < capacity; node++) {
        prev[node] = next[node] = KVP_POISON;
    }
    for (int32_t node = first; node < capacity; node++) {
        prev[node] = node - 1;
        next[node] = node + 1;
    }
    if (list->num_free > 0) {
        prev[first] = capacity;
        next[capacity] = first;
        prev[capacity] = capacity - 1;
    } else {
        next[capacity] = prev[capacity] = capacity;
    }
}

void kvp_free_list_move(kvp_free_list_t *list, int32_t *prev, int32_t *next, int32_t capacity) {
    const int32_t old_sentinel = list->capacity;
    for (int32_t node = 0; node < old_sentinel; node++) {
        prev[node] = list->prev[node] == old_sentinel ? capacity : list->prev[node];
        next[node] = list->next[node] == old_sentinel ? capacity : list->next[node];
    }
    for (int32_t node = old_sentinel; node < capacity; node++) {
        prev[node] = next[node] = KVP_POISON;
    }
    next[capacity] = list->num_free > 0 ? list->next[old_sentinel] : capacity;
    prev[capacity] = list->num_free > 0 ? list->prev[old_sentinel] : capacity;
    list->prev = prev;
    list->next = next;
    list->capacity = capacity;
}

bool kvp_free_list_is_queued(const kvp_free_list_t *list, int32_t node) { return list->next[node] != KVP_POISON; }

kvp_status_t kvp_free_list_pop_n(kvp_free_list_t *list, int32_t n, int32_t *out) {
    if (n > list->num_free) {
        return KVP_ERR_NO_FREE_BLOCKS;
    }
    int32_t *const prev = list->prev, *const next = list->next;
    const int32_t sentinel = list->capacity;
    int32_t node = next[sentinel];
    for (int32_t i = 0; i < n; i++) {
        kvp_assert(I1, node >= 0 && node < sentinel);
        const int32_t after = next[node];
        prev[node] = next[node] = KVP_POISON;
        out[i] = node;
        node = after;
    }
    next[sentinel] = node;
    prev[node] = sentinel;
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

void kvpi_segment_link_tail(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    if (segment->length == 0) {
        return;
    }
    const int32_t sentinel = list->capacity, tail = list->prev[sentinel];
    list->next[tail] = segment->first;
    list->prev[segment->first] = tail;
    list->next[segment->last] = sentinel;
    list->prev[sentinel] = segment->last;
    list->num_free += segment->length;
}

void kvpi_segment_link_head(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    if (segment->length == 0) {
        return;
    }
    const int32_t sentinel = list->capacity, head = list->next[sentinel];
    list->next[segment->last] = head;
    list->prev[head] = segment->last;
    list->prev[segment->first] = sentinel;
    list->next[sentinel] = segment->first;
    list->num_free += segment->length;
}

void kvpi_segment_drop(kvp_free_list_t *list, const kvpi_segment_t *segment) {
    int32_t node = segment->first;
    for (int32_t i = 0; i < segment->length; i++) {
        const int32_t after = list->next[node];
        list->prev[node] = list->next[node] = KVP_POISON;
        node = after;
    }
}

static kvp_status_t string_segment(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvpi_segment_t *segment,
                                   kvp_fault_t *fault) {
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
    kvpi_segment_t segment = {0};
    const kvp_status_t status = string_segment(list, nodes, n, &segment, fault);
    if (status == KVP_OK) {
        kvpi_segment_link_tail(list, &segment);
    }
    return status;
}

kvp_status_t kvp_free_list_prepend_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault) {
    kvpi_segment_t segment = {0};
    const kvp_status_t status = string_segment(list, nodes, n, &segment, fault);
    if (status == KVP_OK) {
        kvpi_segment_link_head(list, &segment);
    }
    return status;
}

int32_t kvp_free_list_after(const kvp_free_list_t *list, int32_t node) {
    const int32_t after = list->next[node == KVP_NONE ? list->capacity : node];
    return after == list->capacity ? KVP_NONE : after;
}

int32_t kvp_free_list_before(const kvp_free_list_t *list, int32_t node) {
    const int32_t before = list->prev[node == KVP_NONE ? list->capacity : node];
    return before == list->capacity ? KVP_NONE : before;
}
