/* kvp_alloc.c - memory that runs out when a test says so. Nothing of it is in a release build. */
#include "kvp_internal.h"

#include "kvp_alloc.h"

#if defined(KVP_DEBUG)

static kvp_alloc_state_t own_state;
static kvp_alloc_state_t *state = &own_state;

kvp_alloc_state_t *kvp_alloc_state(void) { return state; }

void kvp_alloc_share(kvp_alloc_state_t *shared) {
    if (shared != state) {
        shared->num_live += state->num_live;
        state->num_live = 0;
        state = shared;
    }
}

static bool fails(void) {
    if (state->until_failure == 0 || --state->until_failure > 0) {
        return false;
    }
    state->num_failed++;
    return true;
}

static void *counted(void *memory) {
    state->num_live += memory != NULL;
    return memory;
}

void *kvp_malloc(size_t size) { return fails() ? NULL : counted(malloc(size == 0 ? 1 : size)); }

void *kvp_calloc(size_t n, size_t size) {
    return fails() ? NULL : counted(calloc(n == 0 ? 1 : n, size == 0 ? 1 : size));
}

void *kvp_realloc(void *memory, size_t size) {
    if (fails()) {
        return NULL;
    }
    void *const moved = realloc(memory, size == 0 ? 1 : size);
    state->num_live += memory == NULL && moved != NULL;
    return moved;
}

void kvp_free(void *memory) {
    state->num_live -= memory != NULL;
    free(memory);
}

#else

/* ISO C wants a declaration in every file. */
typedef int kvpi_nothing_to_count_t;

#endif
