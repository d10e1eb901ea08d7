# Memory of the extension modules. One that allocates, or frees, calls kvpool_share_memory() once, before anything else.
cdef extern from "module_memory.h":
    void *kvp_malloc(size_t size)
    void *kvp_calloc(size_t n, size_t size)
    void *kvp_realloc(void *memory, size_t size)
    void kvp_free(void *memory)
    object kvpool_memory_state()
    int kvpool_share_memory() except -1
    long long kvpool_fail_allocation(long long n)
    long long kvpool_num_live_allocations()
