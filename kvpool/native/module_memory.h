/* _memory.h - memory of the extension modules, from csrc/kvp_alloc.h. Each module has its own copy of the core; in a debug
 * build all of them go by the state of the copy in kvpool.native.memory. */
#ifndef KVPOOL_MEMORY_H
#define KVPOOL_MEMORY_H

#include <Python.h>

#include "kvp_alloc.h"

#if defined(KVP_DEBUG)

#define KVPOOL_MEMORY_STATE "kvpool.native.memory._state"

static inline PyObject *kvpool_memory_state(void) { return PyCapsule_New(kvp_alloc_state(), KVPOOL_MEMORY_STATE, NULL); }

static inline int kvpool_share_memory(void) {
    PyObject *const module = PyImport_ImportModule("kvpool.native.memory");
    PyObject *const capsule = module == NULL ? NULL : PyObject_GetAttrString(module, "_state");
    void *const state = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, KVPOOL_MEMORY_STATE);
    if (state != NULL) {
        kvp_alloc_share((kvp_alloc_state_t *)state);
    }
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return state == NULL ? -1 : 0;
}

static inline long long kvpool_fail_allocation(long long n) {
    const long long num_failed = kvp_alloc_state()->num_failed;
    kvp_alloc_state()->until_failure = n;
    kvp_alloc_state()->num_failed = 0;
    return num_failed;
}

static inline long long kvpool_num_live_allocations(void) { return kvp_alloc_state()->num_live; }

#else

static inline PyObject *kvpool_memory_state(void) { Py_RETURN_NONE; }
static inline int kvpool_share_memory(void) { return 0; }
static inline long long kvpool_fail_allocation(long long n) { return n - n; }
static inline long long kvpool_num_live_allocations(void) { return 0; }

#endif

#endif
