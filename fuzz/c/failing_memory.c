/* failing_memory.c - calloc and realloc of the core, one of which fails where a target says so.
 * Linked with -Wl,--wrap=calloc,--wrap=realloc. */
#include "input.h"

long allocations_left = -1;

void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *memory, size_t size);

static bool fails(void) { return allocations_left >= 0 && allocations_left-- == 0; }

void *__wrap_calloc(size_t n, size_t size) { return fails() ? NULL : __real_calloc(n, size); }

void *__wrap_realloc(void *memory, size_t size) { return fails() ? NULL : __real_realloc(memory, size); }
