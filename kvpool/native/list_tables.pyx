"""Block tables that are plain lists of ints, over the native pool; see ``kvpool.pool.list_tables``."""
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t

from kvpool.native.allocator cimport BlockAllocator, set_item, too_few_blocks
from kvpool.native.batch cimport SMALL, ids_of_size, parse_count, release_batch
from kvpool.native.block cimport (
    BlockHome, key_bytes, kvpool_lock_acquire, kvpool_lock_release, num_free_of, parse_digest, raise_status,
)
from kvpool.native.block_hasher cimport BlockHasherCore
from kvpool.native.kvp cimport (
    KVP_CACHE_IDEMPOTENT, KVP_NONE, KVP_OK, KVP_PLACE_BY_HASH, KVP_PLACE_HEAD, kvp_fault_t, kvp_key_t, kvp_map_entry,
    kvp_pool_allocate, kvp_pool_cache, kvp_pool_find_prefix, kvp_pool_free, kvp_pool_primary,
    kvp_pool_touch, kvp_status_t,
)
from kvpool.native.kvp_hash_input cimport KVP_HASH_INPUT_MAX_PARENT, kvp_hash_input_room
from kvpool.native.memory cimport kvpool_share_memory

from operator import index

import kvpool.pool.list_tables as operations
from kvpool.hashing.block_hash import get_block_hash
from kvpool.errors import BlockStateError

kvpool_share_memory()

__all__ = ["allocate_table", "cache_completed_blocks", "find_prefix_of_tokens", "free_table", "touch_table"]

cdef extern from "Python.h":
    PyObject *new_int "PyLong_FromLong"(long value) except NULL  # a new reference, for a list to take

cdef enum:
    GROUP = 0
    BLOCK_TOKENS = 256  # larger blocks are hashed by kvpool.pool.list_tables
    BLOCK_BYTES = 2048  # holds their serialization


cdef bint is_plain(object pool) noexcept:
    """A native pool whose every change may happen unseen."""
    return isinstance(pool, BlockAllocator) and not (<BlockAllocator>pool).is_observed()


cdef bint can_hash(object hasher) noexcept:
    if not isinstance(hasher, BlockHasherCore):
        return False
    cdef Py_ssize_t size = (<BlockHasherCore>hasher).block_size
    return (size <= BLOCK_TOKENS and (<BlockHasherCore>hasher).is_native_size(size)
            and kvp_hash_input_room(KVP_HASH_INPUT_MAX_PARENT, <size_t>size) <= BLOCK_BYTES)


cdef int read_id(object block_id, int32_t *out) except -1:
    """An id as the C core takes it; what is outside of 32 bits is outside of every pool, and refused there as -1."""
    cdef int overflow = 0
    cdef long value
    if not PyLong_CheckExact(block_id):
        raise TypeError(f"a block id in a table must be an int, not {type(block_id).__name__}: {block_id!r}")
    value = PyLong_AsLongAndOverflow(block_id, &overflow)
    out[0] = <int32_t>value if overflow == 0 and 0 <= value < 2**31 - 1 else -1
    return 0


cdef int read_table(list table, Py_ssize_t n, int32_t *ids, bint is_reversed) except -1:
    cdef Py_ssize_t i
    for i in range(n):
        read_id(<object>PyList_GET_ITEM(table, i), &ids[n - 1 - i if is_reversed else i])
    return 0


def allocate_table(pool, num_blocks):
    """``pool.allocate_ids`` as a new list. O(num_blocks).

    Raises:
        NoFreeBlocksError: there are fewer; nothing has changed.
    """
    if not is_plain(pool):
        return operations.allocate_table(pool, num_blocks)
    cdef BlockHome home = (<BlockAllocator>pool).checked_home()
    cdef int32_t i, n = parse_count(num_blocks)
    cdef int32_t small[SMALL]
    cdef kvp_status_t status
    cdef bint is_done = False
    if n > num_free_of(home):
        too_few_blocks(n)
    cdef list table = PyList_New(n)
    cdef int32_t *ids = ids_of_size(n, small)
    try:
        kvpool_lock_acquire(&home.lock)
        status = kvp_pool_allocate(home.pool, n, ids)
        kvpool_lock_release(&home.lock)
        if status != KVP_OK:
            too_few_blocks(n)
        try:
            for i in range(n):
                set_item(table, i, new_int(ids[i]))
            is_done = True
        finally:
            if not is_done:
                kvpool_lock_acquire(&home.lock)
                kvp_pool_free(home.pool, ids, n, KVP_PLACE_HEAD, NULL)
                kvpool_lock_release(&home.lock)
    finally:
        release_batch(ids, small)
    return table


def touch_table(pool, list block_ids not None):
    """``pool.touch_ids`` of a list. O(len)."""
    if not is_plain(pool):
        return operations.touch_table(pool, block_ids)
    cdef Py_ssize_t n = PyList_GET_SIZE(block_ids)
    cdef int32_t small[SMALL]
    cdef int32_t *ids = ids_of_size(n, small)
    (<BlockAllocator>pool).checked_home()
    try:
        read_table(block_ids, n, ids, False)
        (<BlockAllocator>pool).touch_nodes(ids, n, "touch_table")
    finally:
        release_batch(ids, small)


def free_table(pool, list table not None):
    """``pool.free_ids`` of a list, the last block first, so that a prefix is evicted from its end. O(len)."""
    if not is_plain(pool) or (<BlockAllocator>pool).on_invalid_free == "warn":
        return operations.free_table(pool, table)
    cdef BlockHome home = (<BlockAllocator>pool).checked_home()
    cdef Py_ssize_t n = PyList_GET_SIZE(table)
    cdef int32_t small[SMALL]
    cdef int32_t *ids = ids_of_size(n, small)
    cdef kvp_fault_t fault
    cdef kvp_status_t status
    try:
        read_table(table, n, ids, True)
        kvpool_lock_acquire(&home.lock)
        status = kvp_pool_free(home.pool, ids, n, KVP_PLACE_BY_HASH, &fault)
        kvpool_lock_release(&home.lock)
        raise_status(status, &fault, "free_table", home)
    finally:
        release_batch(ids, small)


def find_prefix_of_tokens(pool, hasher, list token_ids not None, max_blocks):
    """Cached blocks of the longest prefix, up to the first miss or ``max_blocks``. O(tokens of the hit), with hashing.

    Args:
        hasher: a ``BlockHasher``, the one that ``cache_completed_blocks`` is given.
        token_ids: from the start of the prompt.
    """
    if not is_plain(pool) or not can_hash(hasher):
        return operations.find_prefix_of_tokens(pool, hasher, token_ids, max_blocks)
    cdef Py_ssize_t most = min(index(max_blocks), INT32_MAX)
    cdef BlockHome home = (<BlockAllocator>pool).checked_home()
    cdef BlockHasherCore native = hasher
    cdef Py_ssize_t size = native.block_size, start = 0
    cdef bytes digest = hasher.none_hash
    cdef list found = []
    cdef int32_t few_tokens[BLOCK_TOKENS]
    cdef uint8_t few_bytes[BLOCK_BYTES]
    cdef kvp_key_t key
    cdef int32_t block_id
    cdef int64_t hits
    # The size is asked for each time: tokens that are no ints are made ones by code of the caller.
    while PyList_GET_SIZE(found) < most and start + size <= PyList_GET_SIZE(token_ids):
        digest = native.hash_at(digest, token_ids, start, size, few_tokens, few_bytes)
        parse_digest(digest, GROUP, &key)
        kvpool_lock_acquire(&home.lock)
        hits = kvp_pool_find_prefix(home.pool, &key, 1, &block_id)
        kvpool_lock_release(&home.lock)
        if hits == 0:
            break
        found.append(block_id)
        start += size
    return found


cdef Py_ssize_t num_hashed_blocks(BlockHome home, list table) except -1:
    """Those with a hash come first."""
    cdef Py_ssize_t low = 0, high = PyList_GET_SIZE(table), middle
    cdef int32_t block_id
    while low < high:
        middle = (low + high) // 2
        read_id(<object>PyList_GET_ITEM(table, middle), &block_id)
        if not 0 <= block_id < home.pool.num_blocks:
            raise_outside(block_id, middle)
        if kvp_pool_primary(home.pool, block_id) == KVP_NONE:
            high = middle
        else:
            low = middle + 1
    return low


cdef int raise_outside(int32_t block_id, Py_ssize_t i) except -1:
    raise BlockStateError(f"entry {i} of the table is no block of the pool: {block_id}")


cdef int32_t cache_or_replace(BlockHome home, bytes digest, int32_t block_id) except -2:
    """Caches the block; or gives it back, if another one has that hash, and returns that one with a new reference."""
    cdef kvp_key_t key
    cdef kvp_fault_t fault
    cdef kvp_status_t status
    cdef int32_t twin
    parse_digest(digest, GROUP, &key)
    kvpool_lock_acquire(&home.lock)
    if kvp_pool_find_prefix(home.pool, &key, 1, &twin) == 0:
        twin = block_id
        status = kvp_pool_cache(home.pool, &key, &block_id, 1, 0, 0, KVP_CACHE_IDEMPOTENT, &fault)
    else:
        # The twin first: only a block that nobody has can fail behind it, and then the reference goes back.
        status = kvp_pool_touch(home.pool, &twin, 1, &fault)
        if status == KVP_OK:
            status = kvp_pool_free(home.pool, &block_id, 1, KVP_PLACE_BY_HASH, &fault)
            if status != KVP_OK:
                kvp_pool_free(home.pool, &twin, 1, KVP_PLACE_BY_HASH, NULL)
    kvpool_lock_release(&home.lock)
    raise_status(status, &fault, "cache_completed_blocks", home)
    return twin


def cache_completed_blocks(pool, hasher, list table not None, list token_ids not None, max_new_blocks):
    """Make the first blocks of a table that have no hash reachable by the tokens up to their end. A block whose tokens
    are cached already is given back, and the cached one takes its place in the table.
    O(log(len(table)) + tokens of the new blocks), with hashing.

    Args:
        token_ids: of the request, from the start; only full blocks of them count.
        max_new_blocks: so many blocks at most.

    Raises:
        KvpoolError: KV cache events are on, which this call knows too little for.
    """
    if not is_plain(pool) or not can_hash(hasher):
        return operations.cache_completed_blocks(pool, hasher, table, token_ids, max_new_blocks)
    cdef BlockHome home = (<BlockAllocator>pool).checked_home()
    cdef BlockHasherCore native = hasher
    cdef Py_ssize_t size = native.block_size
    cdef Py_ssize_t most = min(index(max_new_blocks), INT32_MAX)
    cdef bytes digest = hasher.none_hash
    cdef Py_ssize_t i = num_hashed_blocks(home, table), past = i + most
    if i > 0:
        digest = parent_of(home, table, i)
    cdef int32_t few_tokens[BLOCK_TOKENS]
    cdef uint8_t few_bytes[BLOCK_BYTES]
    cdef int32_t block_id, twin
    # Sizes are asked for each time: tokens that are no ints are made ones by code of the caller.
    while i < past and i < PyList_GET_SIZE(table) and (i + 1) * size <= PyList_GET_SIZE(token_ids):
        digest = native.hash_at(digest, token_ids, i * size, size, few_tokens, few_bytes)
        if i >= PyList_GET_SIZE(table):
            break
        read_id(<object>PyList_GET_ITEM(table, i), &block_id)
        twin = cache_or_replace(home, digest, block_id)
        if twin != block_id:
            table[i] = twin
        i += 1


cdef bytes parent_of(BlockHome home, list table, Py_ssize_t i):
    cdef int32_t block_id
    read_id(<object>PyList_GET_ITEM(table, i - 1), &block_id)
    return get_block_hash(key_bytes(kvp_map_entry(&home.pool.map, kvp_pool_primary(home.pool, block_id))))
