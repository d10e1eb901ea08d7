/* _lock.h - one lock a pool. Under the GIL a call is atomic already and the lock is nothing; on free-threaded builds
 * it is a PyMutex. No Python code runs while it is held. */
#ifndef KVPOOL_LOCK_H
#define KVPOOL_LOCK_H

#include <Python.h>

#ifdef Py_GIL_DISABLED
typedef PyMutex kvpool_lock_t;
#define kvpool_lock_acquire(lock) PyMutex_Lock(lock)
#define kvpool_lock_release(lock) PyMutex_Unlock(lock)
/* A pointer that is written once, under the lock, and read without it. */
#define kvpool_read_once(place) __atomic_load_n((place), __ATOMIC_ACQUIRE)
#define kvpool_write_once(place, value) __atomic_store_n((place), (value), __ATOMIC_RELEASE)
#else
typedef char kvpool_lock_t;
#define kvpool_lock_acquire(lock) ((void)(lock))
#define kvpool_lock_release(lock) ((void)(lock))
#define kvpool_read_once(place) (*(place))
#define kvpool_write_once(place, value) ((void)(*(place) = (value)))
#endif

#endif
