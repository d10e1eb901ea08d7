/* kvp_alloc.h - all memory of the core and of the modules over it comes from here.
 *
 * In a release build these are the C library's functions. In a debug build (KVP_DEBUG) the n-th allocation from now on
 * can be made to fail, and what is live is counted, so that a test can walk a call through every shortage it can meet.
 * Several copies of the core in one process can go by one state, kvp_alloc_share(). One thread at a time.
 */
#ifndef KVP_ALLOC_H
#define KVP_ALLOC_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(KVP_DEBUG)

typedef struct {
    int64_t until_failure; /* allocations up to the one that fails; 0: none fails */
    int64_t num_live;      /* not freed yet */
    int64_t num_failed;
} kvp_alloc_state_t;

/* What this copy of the core goes by; its own until another one is given. */
kvp_alloc_state_t *kvp_alloc_state(void);
void kvp_alloc_share(kvp_alloc_state_t *state);

void *kvp_malloc(size_t size);
void *kvp_calloc(size_t n, size_t size);
void *kvp_realloc(void *memory, size_t size);
void kvp_free(void *memory);

#else

/* Never for no bytes, for which NULL would be no failure. */
static inline void *kvp_malloc(size_t size) { return malloc(size == 0 ? 1 : size); }
static inline void *kvp_calloc(size_t n, size_t size) { return calloc(n == 0 ? 1 : n, size == 0 ? 1 : size); }
static inline void *kvp_realloc(void *memory, size_t size) { return realloc(memory, size == 0 ? 1 : size); }
static inline void kvp_free(void *memory) { free(memory); }

#endif

#endif
