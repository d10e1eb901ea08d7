"""The native pool, and the names that the package takes from the extension modules.

``BlockPoolCore`` has the calls of ``BlockPool`` that run at every step: with block objects in ``BlockAllocator`` and
``PrefixCache``, and here with arrays of ids, for callers that need no object per block.
"""
cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport INT32_MAX, int32_t, uint32_t
from libc.string cimport memcpy

from kvpool.native.allocator cimport too_few_blocks
from kvpool.native.batch cimport (
    SMALL, IdBuffer, IdCopy, copy_ids, data_of, ids_of_size, keys_of_size, new_ids, open_buffer, parse_count, read_ids, release_batch,
)
from kvpool.native.block cimport (
    BlockHome, view_of, kvpool_lock_acquire, kvpool_lock_release, num_free_of, parse_digest, parse_group,
    raise_status,
)
from kvpool.native.kvp cimport (
    KVP_CACHE_IDEMPOTENT, KVP_OK, KVP_PLACE_BY_HASH, KVP_PLACE_HEAD, kvp_fault_t, kvp_key_t, kvp_pool_allocate,
    kvp_pool_free, kvp_status_t,
)
from kvpool.native.memory cimport kvpool_share_memory
from kvpool.native.prefix_cache cimport PrefixCache

from kvpool.native.block import KVCacheBlock
from kvpool.native.prefix_map import BlockHashToBlockMap
from kvpool.native.free_queue import FreeKVCacheBlockQueue
from kvpool.errors import BlockStateError, InvalidArgumentError, KvpoolError

kvpool_share_memory()

__all__ = ["BUILD_INFO", "BlockHashToBlockMap", "BlockPoolCore", "FreeKVCacheBlockQueue", "KVCacheBlock"]

cdef extern from *:
    """
    #ifndef KVPOOL_BUILD_FLAGS
    #define KVPOOL_BUILD_FLAGS ""
    #endif
    #if defined(__clang__)
    #define KVPOOL_COMPILER "clang " __clang_version__
    #elif defined(__GNUC__)
    #define KVPOOL_COMPILER "gcc " __VERSION__
    #else
    #define KVPOOL_COMPILER "unknown"
    #endif
    #ifdef KVP_DEBUG
    #define KVPOOL_IS_DEBUG 1
    #else
    #define KVPOOL_IS_DEBUG 0
    #endif
    """
    const char *KVPOOL_BUILD_FLAGS
    const char *KVPOOL_COMPILER
    int KVPOOL_IS_DEBUG

BUILD_INFO = {
    "compiler": KVPOOL_COMPILER.decode().strip(),
    "flags": KVPOOL_BUILD_FLAGS.decode(),
    "debug": bool(KVPOOL_IS_DEBUG),
    "sanitize": "-fsanitize" in KVPOOL_BUILD_FLAGS.decode(),
}


@cython.auto_pickle(False)
cdef class BlockPoolCore(PrefixCache):
    """The calls of ``BlockPool`` that are compiled, those with ids included."""

    def allocate_ids(self, n, out=None):
        """Take blocks as ``get_new_blocks`` does, and return their ids. O(n).

        Args:
            n: number of blocks.
            out: a writable int32 buffer of exactly n items to fill, or None.

        Returns:
            out, or a new int32 array of shape (n,).

        Raises:
            NoFreeBlocksError: fewer are free (a ValueError, as in vLLM); nothing has changed.
            TypeError: n is no int, or out no writable int32 buffer.
            InvalidArgumentError: n is negative, or out of another length.
        """
        cdef BlockHome home = self.checked_home()
        cdef int32_t count = parse_count(n)
        cdef IdBuffer buffer
        cdef kvp_status_t status
        cdef object result = new_ids(count) if out is None and count <= num_free_of(home) else out
        if out is not None:
            buffer = open_buffer(out, True)
            if buffer.length != count:
                raise InvalidArgumentError(f"out has {buffer.length} items for {count} ids")
        if count > num_free_of(home):
            too_few_blocks(count)
        if self.is_observed():
            buffer = None
            return self.allocate_observed(count, result)
        kvpool_lock_acquire(&home.lock)
        status = kvp_pool_allocate(home.pool, count, data_of(result) if out is None else buffer.data)
        kvpool_lock_release(&home.lock)
        if status != KVP_OK:
            too_few_blocks(count)
        return result

    cdef object allocate_observed(self, int32_t count, object out):
        """Whoever watches runs code of the caller: only behind it is the array looked at."""
        cdef list blocks = list(self._get_new_blocks_observed(count))
        cdef IdBuffer buffer
        try:
            buffer = open_buffer(out, True)
            if buffer.length != count or PyList_GET_SIZE(blocks) != count:
                raise InvalidArgumentError(f"out has {buffer.length} items for {len(blocks)} ids")
            self.own_ids(blocks, buffer.data, "allocate_ids")
        except BaseException:
            self.free_blocks(blocks, True)
            raise
        return out

    def free_ids(self, ids, bint prepend=False):
        """Give references back as ``free_blocks`` does, by ids: an int32 buffer of shape (n,). An id outside the pool
        is an invalid entry like any other: BlockStateError, or skipped. O(n)."""
        cdef BlockHome home = self.checked_home()
        cdef IdBuffer buffer
        cdef const int32_t *data
        cdef Py_ssize_t n
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        buffer = read_ids(ids, &data, &n)
        kvpool_lock_acquire(&home.lock)
        status = kvp_pool_free(home.pool, data, n, KVP_PLACE_HEAD if prepend else KVP_PLACE_BY_HASH, &fault)
        kvpool_lock_release(&home.lock)
        if status == KVP_OK:
            return
        if self.on_invalid_free == "warn":
            self.free_valid(data, n, KVP_PLACE_HEAD if prepend else KVP_PLACE_BY_HASH, "free_ids")
            return
        raise_status(status, &fault, "free_ids", home)

    def get_ref_counts(self):
        """``ref_cnt`` of every block, a new int32 array of shape (num_gpu_blocks,). O(blocks)."""
        cdef BlockHome home = self.checked_home()
        cdef object counts = new_ids(home.pool.num_blocks)
        kvpool_lock_acquire(&home.lock)
        memcpy(data_of(counts), home.pool.ref_cnt, <size_t>home.pool.num_blocks * sizeof(int32_t))
        kvpool_lock_release(&home.lock)
        return counts

    def touch_ids(self, ids):
        """Add references as ``touch`` does, by ids: an int32 buffer of shape (n,). BlockStateError names an id outside
        the pool. O(n)."""
        self.checked_home()
        cdef IdBuffer buffer
        cdef const int32_t *data
        cdef Py_ssize_t n
        if self.metrics_collector is not None:
            self.touch_observed(ids)
            return
        buffer = read_ids(ids, &data, &n)
        self.touch_nodes(data, n, "touch_ids")

    cdef int touch_observed(self, object ids) except -1:
        """A collector is code of the caller: the ids are copied."""
        cdef BlockHome home = self.home
        cdef IdCopy own = copy_ids(ids)
        cdef Py_ssize_t i
        self.touch_nodes(own.data, own.length, "touch_ids")
        for i in range(own.length):
            self.metrics_collector.on_block_accessed(view_of(home, own.data[i]))
        return 0

    def find_prefix_ids(self, block_hashes, group_id=0, max_blocks=None):
        """Ids of the first cached block of each hash, up to the first miss.

        Args:
            block_hashes: digests in token order.
            group_id: KV cache group.
            max_blocks: where to stop at the latest, None for no limit.

        Returns:
            An int32 array of shape (hits,). O(hits).
        """
        self.checked_home()
        cdef uint32_t group = parse_group(group_id)
        cdef Py_ssize_t n = INT32_MAX if max_blocks is None else parse_count(max_blocks), done
        cdef list hashes = block_hashes if type(block_hashes) is list else list(block_hashes)
        cdef int32_t small[SMALL]
        n = min(n, PyList_GET_SIZE(hashes))
        cdef int32_t *ids = ids_of_size(n, small)
        try:
            done = self.find_prefix(hashes, n, group, ids)
            found = new_ids(done)
            memcpy(data_of(found), ids, <size_t>done * sizeof(int32_t))
        finally:
            release_batch(ids, small)
        return found

    def cache_ids(self, block_hashes, ids, group_id=0):
        """Make blocks reachable by their hashes. Null blocks and blocks that have the hash already are skipped. O(n).

        Args:
            block_hashes: one digest per id.
            ids: int32 buffer of shape (n,).
            group_id: KV cache group.

        Raises:
            BlockStateError: a block carries another hash or is in the batch twice, an id is not of the pool. Nothing
                has changed.
            InvalidArgumentError: not one digest per id, or one over 32 bytes.
            KvpoolError: events are enabled; they name tokens, which this call does not know.
        """
        self.checked_home()
        if self.enable_kv_cache_events:
            raise KvpoolError("cache_ids knows no tokens, so it can't report a BlockStored event: use cache_full_blocks")
        cdef uint32_t group = parse_group(group_id)
        cdef list hashes = block_hashes if type(block_hashes) is list else list(block_hashes)
        cdef IdBuffer buffer
        cdef const int32_t *data
        cdef Py_ssize_t i, n
        buffer = read_ids(ids, &data, &n)
        if n != PyList_GET_SIZE(hashes):
            raise InvalidArgumentError(f"{len(hashes)} block hashes for {n} ids")
        cdef kvp_key_t few[SMALL]
        cdef kvp_key_t *keys = keys_of_size(n, few)
        try:
            for i in range(n):
                if data[i] < 0:
                    raise BlockStateError(f"cache_ids: block id {data[i]} (entry {i} of the batch) is not in "
                                          f"0 .. {self.num_gpu_blocks - 1}")
                parse_digest(<object>PyList_GET_ITEM(hashes, i), group, &keys[i])
            self.cache_keys(keys, data, n, 0, 0, KVP_CACHE_IDEMPOTENT, "cache_ids")
        finally:
            release_batch(keys, few)
