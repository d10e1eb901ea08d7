"""Blocks of the native pool taken, shared and given back: reference counts and the free list.

Methods only translate: Python objects to ids, one call into the C core per batch, and its status to the one function
that raises. ``PrefixCache`` adds the hashes, ``BlockPoolCore`` the calls with ids.
"""
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from kvpool.native.batch cimport SMALL, ids_of_size, parse_count, release_batch
from kvpool.native.block cimport (
    BlockHome, ViewTable, KVCacheBlock as _KVCacheBlock, borrowed_view, view_of, kvpool_lock_acquire,
    kvpool_lock_release,
    node_in, num_free_of, open_views, raise_status,
)
from kvpool.native.kvp cimport (
    KVP_ERR_NO_FREE_BLOCKS, KVP_ERR_NO_MEMORY, KVP_NULL_BLOCK, KVP_OK, KVP_PLACE_BY_HASH, KVP_PLACE_HEAD, KVP_PLACE_TAIL, kvp_fault_t,
    kvp_placement_t, kvp_pool_allocate, kvp_pool_can_free, kvp_pool_check, kvp_pool_create, kvp_pool_free,
    kvp_pool_free_valid,
    kvp_pool_nbytes, kvp_pool_num_evictable, kvp_pool_take, kvp_pool_touch, kvp_status_t,
)
from kvpool.native.block_sequence cimport new_sequence
from kvpool.native.prefix_map cimport map_of_home, probing_secret
from kvpool.native.memory cimport kvpool_share_memory
from kvpool.native.free_queue cimport queue_of_home

import weakref

from kvpool.native.block import KVCacheBlock
from kvpool.native.views import BlockList, PoolStats, SecondaryHashes
from kvpool.pool.skipped_frees import log_skipped
from kvpool.errors import BlockStateError, InvalidArgumentError, InvariantError, NoFreeBlocksError

kvpool_share_memory()

__all__ = ["BlockAllocator"]

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define kvpool_prefetch(address) __builtin_prefetch(address)
    #else
    #define kvpool_prefetch(address) ((void)(address))
    #endif
    """
    void prefetch "kvpool_prefetch"(const void *address)

cdef enum:
    LOOK_AHEAD = 8
    MOST_NAMED = 4  # entries that a call skipped, in the log

cdef int too_few_blocks(int32_t n) except -1:
    raise NoFreeBlocksError(f"Cannot get {n} free blocks from the pool")


cdef int fill_list(list blocks, BlockHome home, const int32_t *ids, int32_t n) except -1:
    """Puts the views into a new list."""
    cdef int32_t i
    cdef PyObject *view
    for i in range(n):
        view = borrowed_view(home, ids[i])
        incref(view)
        set_item(blocks, i, view)
    return 0


cdef bint is_idle_hand_made(object item) except -1:
    """A block that no pool made and that nobody uses: to free it changes nothing."""
    return type(item) is KVCacheBlock and (<_KVCacheBlock>item).hand_made is not None and item.ref_cnt == 0


cdef class BlockAllocator:
    """The calls of ``BlockPool`` for allocation and reference counts."""

    def _create(self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events, metrics_collector,
                medium, uncached_first, on_invalid_free):
        if isinstance(num_gpu_blocks, bool) or not isinstance(num_gpu_blocks, int):
            raise TypeError(f"num_gpu_blocks must be an int, not {type(num_gpu_blocks).__name__}: {num_gpu_blocks!r}")
        if not 0 < num_gpu_blocks < INT32_MAX:
            raise InvalidArgumentError(f"num_gpu_blocks must be in 1 .. 2**31 - 2, not {num_gpu_blocks}")
        if isinstance(hash_block_size, bool) or not isinstance(hash_block_size, int):
            raise TypeError(f"hash_block_size must be an int, not {type(hash_block_size).__name__}: {hash_block_size!r}")
        if hash_block_size < 1:
            raise InvalidArgumentError(f"hash_block_size must be positive, not {hash_block_size}")
        if on_invalid_free not in ("raise", "warn"):
            raise InvalidArgumentError(f"on_invalid_free must be 'raise' or 'warn', not {on_invalid_free!r}")
        cdef int32_t num_blocks = num_gpu_blocks
        cdef bint caches = enable_caching, first = uncached_first, has_events = enable_kv_cache_events
        cdef str policy = on_invalid_free
        # No code of the caller runs from here on.
        if self.home is not None:
            raise BlockStateError("this pool is initialised already")
        cdef BlockHome home = BlockHome.__new__(BlockHome)
        cdef kvp_status_t status = kvp_pool_create(num_blocks, caches, first, probing_secret(), &home.pool)
        if status == KVP_ERR_NO_MEMORY:
            raise MemoryError(f"no memory for a pool of {num_blocks} blocks")
        raise_status(status, NULL, f"a pool of {num_blocks} blocks", home)
        home.links = &home.pool.free_list
        open_views(home, num_blocks)
        home.owner = weakref.ref(self)
        self.table = ViewTable(home)
        self.num_gpu_blocks = num_blocks
        self.enable_caching = caches
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = has_events
        self.metrics_collector = metrics_collector
        self.medium = medium
        self.uncached_first = first
        self.on_invalid_free = policy
        self._reuse_watchers = {}
        self.blocks = BlockList(home)
        self.cached_block_hashes_by_block = SecondaryHashes(home)
        self.stats = PoolStats(home)
        self.null_block = view_of(home, KVP_NULL_BLOCK)
        self.free_block_queue = queue_of_home(home)
        self.cached_block_hash_to_block = map_of_home(home, None)
        self.home = home

    def _accept_by_hand(self):
        """From now on the pool bears what vLLM's code and tests do by hand: the null block can be given a hash, blocks
        that no pool made can be cached and (while nobody uses them) freed. None of them ever joins the free list."""
        self.checked_home().pool.null_takes_hashes = True
        self.takes_hand_made = True

    cdef BlockHome checked_home(self):
        if self.home is None:
            raise BlockStateError("this pool was never initialised")
        return self.home

    def new_block_table(self):
        """An empty block table, which a request's blocks are kept in."""
        return new_sequence(self.checked_home(), 0)

    # ---- blocks of a batch ----

    cdef int own_ids(self, list blocks, int32_t *ids, str call) except -1:
        """Ids of blocks that must all be this pool's own."""
        cdef Py_ssize_t i
        cdef Py_ssize_t n = PyList_GET_SIZE(blocks)
        for i in range(n):
            # Views lie anywhere in memory: those ahead are on their way while one is read.
            if i + LOOK_AHEAD < n:
                prefetch(PyList_GET_ITEM(blocks, i + LOOK_AHEAD))
            ids[i] = node_in(self.home, PyList_GET_ITEM(blocks, i))
            if ids[i] < 0:
                self.refuse(blocks[i], i, call)
        return 0

    cdef int refuse(self, object item, Py_ssize_t i, str call) except -1:
        if type(item) is not KVCacheBlock:
            raise TypeError(f"{call}: entry {i} of the batch is no KVCacheBlock but {type(item).__name__}: {item!r}")
        raise BlockStateError(f"{call}: entry {i} of the batch is not a block of this pool: {item!r}; "
                              "nothing has changed")

    cdef int own_id(self, object block, str call) except -1:
        cdef int32_t node = node_in(self.checked_home(), <PyObject *>block)
        if node < 0:
            self.refuse(block, 0, call)
        return node

    # ---- allocation ----

    cdef list take(self, int32_t n, bint keep_hashes):
        cdef BlockHome home = self.checked_home()
        cdef int32_t small[SMALL]
        cdef int32_t *ids
        cdef kvp_status_t status = KVP_ERR_NO_FREE_BLOCKS
        cdef bint is_done = False
        if n > num_free_of(home):
            too_few_blocks(n)
        cdef list blocks = PyList_New(n)
        ids = ids_of_size(n, small)
        try:
            kvpool_lock_acquire(&home.lock)
            status = kvp_pool_take(home.pool, n, ids) if keep_hashes else kvp_pool_allocate(home.pool, n, ids)
            kvpool_lock_release(&home.lock)
            if status != KVP_OK:
                too_few_blocks(n)
            fill_list(blocks, home, ids, n)
            is_done = True
        finally:
            if status == KVP_OK and not is_done:
                kvpool_lock_acquire(&home.lock)
                kvp_pool_free(home.pool, ids, n, KVP_PLACE_HEAD, NULL)
                kvpool_lock_release(&home.lock)
            release_batch(ids, small)
        return blocks

    def get_new_blocks(self, num_blocks):
        """Take blocks from the head of the free list, each with one reference. Hashes that they still carry are
        evicted now, not earlier. O(num_blocks).

        Raises:
            NoFreeBlocksError: fewer are free (a ValueError, as in vLLM); nothing has changed.
            TypeError, InvalidArgumentError: num_blocks is no int, or negative.
        """
        cdef int32_t n = parse_count(num_blocks)
        if self.is_observed():
            return self._get_new_blocks_observed(n)
        return self.take(n, False)

    def _take_blocks(self, num_blocks):
        """As ``get_new_blocks``, but hashes stay: for a caller that reports each eviction before it happens."""
        return self.take(parse_count(num_blocks), True)

    # ---- free ----

    def free_blocks(self, ordered_blocks, bint prepend=False):
        """Give one reference of each entry back. Blocks that nobody uses any more become free, in the given order:
        those with a hash at the tail, the others at the head (see ``uncached_first``). O(len).

        Args:
            ordered_blocks: the block to be reused first comes first; null blocks are skipped, blocks of another pool
                are given back to it.
            prepend: all of them to the head.

        Raises:
            BlockStateError: an entry has no reference left to give back (a double free, also within the batch), or
                belongs to no pool; nothing has changed. With ``on_invalid_free="warn"`` such entries are skipped,
                logged and counted.
        """
        cdef BlockHome home = self.checked_home()
        cdef list blocks = ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
        cdef Py_ssize_t i, n = PyList_GET_SIZE(blocks)
        cdef int32_t small[SMALL]
        cdef int32_t *ids = ids_of_size(n, small)
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        try:
            for i in range(n):
                ids[i] = node_in(home, PyList_GET_ITEM(blocks, i))
                if ids[i] < 0:
                    self.free_of_several_pools(blocks, prepend)
                    return
            kvpool_lock_acquire(&home.lock)
            status = kvp_pool_free(home.pool, ids, n, KVP_PLACE_HEAD if prepend else KVP_PLACE_BY_HASH, &fault)
            kvpool_lock_release(&home.lock)
            if status == KVP_OK:
                return
            if self.on_invalid_free == "warn":
                self.free_valid(ids, n, KVP_PLACE_HEAD if prepend else KVP_PLACE_BY_HASH, "free_blocks")
                return
            raise_status(status, &fault, "free_blocks", home)
        finally:
            release_batch(ids, small)

    cdef int free_valid(self, const int32_t *ids, Py_ssize_t n, kvp_placement_t where, str call) except -1:
        """``kvp_pool_free`` of the entries that can be freed; the others are counted and logged. O(n)."""
        cdef BlockHome home = self.home
        cdef kvp_fault_t faults[MOST_NAMED]
        cdef int64_t i, num_skipped
        cdef int32_t block_id
        kvpool_lock_acquire(&home.lock)
        num_skipped = kvp_pool_free_valid(home.pool, ids, n, where, faults, MOST_NAMED)
        home.invalid_frees += num_skipped
        kvpool_lock_release(&home.lock)
        first = []
        for i in range(min(num_skipped, <int64_t>MOST_NAMED)):
            block_id = faults[i].block_id
            is_known = 0 <= block_id < home.num_views
            first.append((faults[i].index, view_of(home, block_id) if is_known else block_id))
        log_skipped(call, first, num_skipped)
        return 0

    cdef int free_of_several_pools(self, list blocks, bint prepend) except -1:
        """``free_blocks`` with blocks of other pools: every pool checks its share, under its own ``on_invalid_free``,
        before any of them changes."""
        cdef dict shares = {id(self): (self, [])}
        cdef list homeless = []
        cdef Py_ssize_t i
        # Pools of other classes run code of the caller.
        for i, item in enumerate(tuple(blocks)):
            pool = item.pool if type(item) is KVCacheBlock and (<_KVCacheBlock>item).node >= 0 else None
            if pool is not None:
                shares.setdefault(id(pool), (pool, []))[1].append(item)
            elif self.on_invalid_free == "warn" and type(item) is KVCacheBlock:
                homeless.append((i, item))
            elif self.takes_hand_made and is_idle_hand_made(item):
                continue
            else:
                self.refuse(item, i, "free_blocks")
        for pool, share in shares.values():
            if pool.on_invalid_free == "raise":
                pool._check_free(share)
        self.home.invalid_frees += len(homeless)
        for pool, share in shares.values():
            pool.free_blocks(share, prepend)
        log_skipped("free_blocks", homeless, len(homeless))
        return 0

    cdef int free_checked(self, list blocks, str call, bint check_only, kvp_placement_t where) except -1:
        self.checked_home()
        cdef int32_t small[SMALL]
        cdef int32_t *ids = ids_of_size(len(blocks), small)
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        try:
            self.own_ids(blocks, ids, call)
            kvpool_lock_acquire(&self.home.lock)
            if check_only:
                status = kvp_pool_can_free(self.home.pool, ids, len(blocks), &fault)
            else:
                status = kvp_pool_free(self.home.pool, ids, len(blocks), where, &fault)
            kvpool_lock_release(&self.home.lock)
            raise_status(status, &fault, call, self.home)
        finally:
            release_batch(ids, small)
        return 0

    def _check_free(self, blocks):
        """Raises what ``free_blocks`` would raise for blocks of this pool; changes nothing."""
        self.free_checked(list(blocks), "free_blocks", True, KVP_PLACE_TAIL)

    def _free_blocks_to_tail(self, blocks):
        """One reference less each; all that reach 0 go to the tail, cached or not."""
        self.free_checked(list(blocks), "unpin_blocks", False, KVP_PLACE_TAIL)

    # ---- touch ----

    cdef int touch_nodes(self, const int32_t *ids, Py_ssize_t n, str call) except -1:
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        kvpool_lock_acquire(&self.home.lock)
        status = kvp_pool_touch(self.home.pool, ids, n, &fault)
        kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            raise_status(status, &fault, call, self.home)
        return 0

    def touch(self, blocks):
        """Add one reference to each entry; free ones leave the free list. Null blocks are skipped. O(len).

        Raises:
            BlockStateError: a block of another pool or of none, or a detached one; nothing has changed.
        """
        self.checked_home()
        cdef list batch = blocks if type(blocks) is list else list(blocks)
        cdef Py_ssize_t n = PyList_GET_SIZE(batch)
        cdef int32_t small[SMALL]
        cdef int32_t *ids = ids_of_size(n, small)
        try:
            self.own_ids(batch, ids, "touch")
            self.touch_nodes(ids, n, "touch")
        finally:
            release_batch(ids, small)
        if self.metrics_collector is not None:
            for block in batch:
                self.metrics_collector.on_block_accessed(block)

    # ---- numbers ----

    def is_block_writable(self, block):
        """Whether the block has one user and no hash, so that this user may write into it."""
        return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

    def get_num_free_blocks(self):
        """Number of blocks that can be taken now, cached ones that nobody uses included. O(1)."""
        return num_free_of(self.checked_home())

    def get_usage(self):
        """Share of the allocatable blocks that are not free, 0.0 to 1.0. Cached blocks without users are free."""
        cdef BlockHome home = self.checked_home()
        cdef int32_t usable = home.pool.num_blocks - 1
        return 1.0 - <double>num_free_of(home) / usable if usable > 0 else 0

    @property
    def num_evictable_blocks(self):
        """Number of free blocks that carry a hash: what a look-up can still find and an allocation may evict.
        O(free blocks)."""
        return kvp_pool_num_evictable(self.checked_home().pool)

    @property
    def nbytes(self):
        """Memory that the pool takes for its bookkeeping, bytes: its arrays and its table of block objects; in plain
        Python an estimate, the size of one block object times their number."""
        cdef BlockHome home = self.checked_home()
        return kvp_pool_nbytes(home.pool) + (<size_t>home.num_views + 2) * sizeof(PyObject *)

    def check(self):
        """Recompute every invariant of the pool; InvariantError says what is wrong. O(num_gpu_blocks + hashes)."""
        cdef char reason[256]
        cdef BlockHome home = self.checked_home()
        kvpool_lock_acquire(&home.lock)
        cdef kvp_status_t status = kvp_pool_check(home.pool, reason, sizeof(reason))
        kvpool_lock_release(&home.lock)
        if status != KVP_OK:
            raise InvariantError((<bytes>reason).decode())

    def __reduce_ex__(self, protocol):
        raise TypeError("a BlockPool names memory of one device and one process: it can't be pickled or copied")
