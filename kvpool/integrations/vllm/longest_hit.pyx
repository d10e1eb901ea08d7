# cython: cdivision=True, binding=True, embedsignature=False
# cdivision: divisors are block sizes, at least 1. binding: these functions become methods of vLLM's classes.
"""vLLM's longest cache hit of full, sliding-window and local attention over the native prefix map, and the block ids of
its ``KVCacheBlocks``: one pass over the hashes, no key object and no call per block.

A lookup in a pool of another class, hashes in another container than a list, or a hit that may end inside a block go on
to vLLM's method.
"""
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint32_t

from kvpool.native.allocator cimport incref, set_item
from kvpool.native.batch cimport plain_number
from kvpool.native.block cimport (
    BlockHome, KVCacheBlock as _KVCacheBlock, borrowed_view, kvpool_lock_acquire, kvpool_lock_release, parse_digest,
    parse_group,
)
from kvpool.native.kvp cimport KVP_NONE, KVP_NULL_BLOCK, kvp_key_t, kvp_map_entry, kvp_map_find
from kvpool.native.memory cimport kvp_free, kvp_malloc, kvpool_share_memory
from kvpool.native.prefix_cache cimport PrefixCache

from kvpool.native.block import KVCacheBlock

kvpool_share_memory()

__all__ = ["bind", "find_full", "find_local", "find_window", "get_block_ids"]

cdef enum:
    MANY_GROUPS = 16

# vLLM's, set by ``bind``.
cdef object pool_class, scaled_hashes_class
cdef object full_specs, window_specs, local_specs
cdef object stock_get_block_ids, stock_find_full, stock_find_window, stock_find_local


def bind(names):
    """Takes what is vLLM's from a mapping of the names above."""
    global pool_class, scaled_hashes_class, full_specs, window_specs, local_specs
    global stock_get_block_ids, stock_find_full, stock_find_window, stock_find_local
    pool_class = names["BlockPool"] if issubclass(names["BlockPool"], PrefixCache) else None
    scaled_hashes_class = names["BlockHashListWithBlockSize"]
    full_specs, window_specs, local_specs = names["full_specs"], names["window_specs"], names["local_specs"]
    stock_get_block_ids = names["get_block_ids"]
    stock_find_full, stock_find_window = names["find_full"], names["find_window"]
    stock_find_local = names["find_local"]


cdef class Lookup:
    """The blocks of a list of hashes in one or several groups: row i of ``ids`` has a block of each group."""
    cdef BlockHome home
    cdef list hashes  # the caller's: its size is asked for at every look at it
    cdef Py_ssize_t scale
    cdef Py_ssize_t num_groups
    cdef uint32_t groups[MANY_GROUPS]
    cdef int32_t *ids
    cdef Py_ssize_t num_rows  # wanted
    cdef Py_ssize_t room      # rows that ids has: those that there are hashes for

    def __dealloc__(self):
        kvp_free(self.ids)

    cdef int reserve(self, Py_ssize_t num_rows) except -1:
        self.num_rows = num_rows
        self.room = min(num_rows, num_hashes_of(self))
        self.ids = <int32_t *>kvp_malloc(<size_t>(self.room * self.num_groups) * sizeof(int32_t))
        if self.ids is NULL:
            raise MemoryError(f"no memory for a hit of {self.room} blocks")
        return 0

    cdef bint find(self, Py_ssize_t i) except -1:
        """Whether every group has a block of hash i; if so, the first inserted ones are in row i."""
        cdef kvp_key_t key
        cdef int32_t entry
        cdef Py_ssize_t g
        if i >= self.room or i >= num_hashes_of(self):
            return False
        parse_digest(<object>PyList_GET_ITEM(self.hashes, (i + 1) * self.scale - 1), 0, &key)
        for g in range(self.num_groups):
            key.group_id = self.groups[g]
            entry = kvp_map_find(&self.home.pool.map, &key)
            if entry == KVP_NONE:
                return False
            self.ids[i * self.num_groups + g] = kvp_map_entry(&self.home.pool.map, entry).block_id
        return True

    cdef int clear(self, Py_ssize_t i) except -1:
        cdef Py_ssize_t g
        if i >= self.room:
            raise IndexError(f"no hash {i} of {self.room}")
        for g in range(self.num_groups):
            self.ids[i * self.num_groups + g] = KVP_NULL_BLOCK
        return 0

    cdef tuple blocks(self, Py_ssize_t num_rows):
        """A list of blocks for each group: the first ``num_rows`` rows."""
        return tuple([self.column(g, num_rows) for g in range(self.num_groups)])

    cdef list column(self, Py_ssize_t g, Py_ssize_t num_rows):
        cdef list column
        cdef PyObject *view
        cdef Py_ssize_t i
        if num_rows > self.room:
            raise IndexError(f"no block {num_rows} of {self.room}")
        column = PyList_New(num_rows)
        for i in range(num_rows):
            view = borrowed_view(self.home, self.ids[i * self.num_groups + g])
            incref(view)
            set_item(column, i, view)
        return column


cdef Lookup open_lookup(object block_hashes, object group_ids, object pool, Py_ssize_t block_size,
                        Py_ssize_t max_length):
    """A lookup of whole blocks of a prefix of ``max_length`` tokens; None if it is not one for here."""
    cdef Lookup lookup
    cdef Py_ssize_t hash_block_size, g
    cdef tuple groups
    if (type(pool) is not pool_class or type(group_ids) is not list or block_size < 1
            or not 0 < PyList_GET_SIZE(group_ids) <= MANY_GROUPS):
        return None
    lookup = Lookup.__new__(Lookup)
    lookup.home = (<PrefixCache>pool).checked_home()
    hash_block_size = plain_number((<PrefixCache>pool).hash_block_size)
    if hash_block_size < 1 or block_size % hash_block_size != 0:
        return None
    lookup.scale = block_size // hash_block_size
    if type(block_hashes) is scaled_hashes_class and block_hashes.scale_factor == lookup.scale:
        block_hashes = block_hashes.block_hashes
    if type(block_hashes) is not list:
        return None
    lookup.hashes = block_hashes
    groups = tuple(group_ids)
    lookup.num_groups = min(len(groups), MANY_GROUPS)
    for g in range(lookup.num_groups):
        lookup.groups[g] = parse_group(groups[g])
    lookup.reserve(max(0, max_length) // block_size)
    return lookup


cdef inline bint are_plain(max_length, alignment_tokens) except -1:
    return plain_number(max_length) >= 0 and plain_number(alignment_tokens) > 0


cdef inline Py_ssize_t num_hashes_of(Lookup lookup) noexcept:
    return PyList_GET_SIZE(lookup.hashes) // lookup.scale


# ---- vLLM's class methods ----

def find_full(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
              alignment_tokens, dcp_world_size=1, pcp_world_size=1):
    """``FullAttentionManager.find_longest_cache_hit``: blocks from the start up to the first miss."""
    cdef Lookup lookup = None
    cdef Py_ssize_t block_size, alignment, length, n, i = 0
    if are_plain(max_length, alignment_tokens) and isinstance(kv_cache_spec, full_specs):
        block_size, alignment = plain_number(kv_cache_spec.block_size * dcp_world_size), alignment_tokens
        # An alignment that divides the block asks for hits inside of it.
        if alignment >= block_size or block_size % alignment != 0:
            lookup = open_lookup(block_hashes, kv_cache_group_ids, block_pool, block_size, max_length)
    if lookup is None:
        return stock_find_full.__func__(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec,
                                        drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size)
    n = min(lookup.num_rows, num_hashes_of(lookup))
    kvpool_lock_acquire(&lookup.home.lock)
    try:
        while i < n and lookup.find(i):
            i += 1
    finally:
        kvpool_lock_release(&lookup.home.lock)
    length = i * block_size
    if drop_eagle_block and length > 0:
        length -= min(alignment, block_size)
    length -= length % alignment
    return lookup.blocks((length + block_size - 1) // block_size), length


def find_window(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
                alignment_tokens, dcp_world_size=1, pcp_world_size=1):
    """``SlidingWindowManager.find_longest_cache_hit``: the last run of blocks, from the right, that fills a window."""
    cdef Lookup lookup = None
    cdef Py_ssize_t block_size, alignment, num_wanted, i, below, length, num_run = 0
    cdef bint is_complete = False, drops = bool(drop_eagle_block)
    if (are_plain(max_length, alignment_tokens) and dcp_world_size == 1 and pcp_world_size == 1
            and isinstance(kv_cache_spec, window_specs)):
        block_size, alignment = plain_number(kv_cache_spec.block_size), alignment_tokens
        lookup = open_lookup(block_hashes, kv_cache_group_ids, block_pool, block_size, max_length)
    if lookup is None or num_hashes_of(lookup) < lookup.num_rows:
        return stock_find_window.__func__(cls, block_hashes, max_length, kv_cache_group_ids, block_pool,
                                          kv_cache_spec, drop_eagle_block, alignment_tokens, dcp_world_size,
                                          pcp_world_size)
    num_wanted = cls._contiguous_blocks_for_hit(kv_cache_spec.sliding_window, block_size, drops)
    length = i = lookup.num_rows
    kvpool_lock_acquire(&lookup.home.lock)
    try:
        while i > 0 and not is_complete:
            i -= 1
            if not lookup.find(i):
                lookup.clear(i)
                num_run = 0
            elif num_run == 0 and (i + (0 if drops else 1)) * block_size % alignment != 0:
                lookup.clear(i)  # a hit can't end here
            else:
                num_run += 1
                is_complete = num_run >= num_wanted
    finally:
        kvpool_lock_release(&lookup.home.lock)
    # Below a whole window there are placeholders; what is less than a window has to reach down to the first block.
    length = i + num_run if is_complete else num_run
    for below in range(i if is_complete else 0):
        lookup.clear(below)
    if not is_complete:
        while length * block_size % alignment != 0:
            length -= 1
    if drops and length > 0:
        length -= 1
        while length * block_size % alignment != 0:
            length -= 1
    return lookup.blocks(length), length * block_size


def find_local(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
               alignment_tokens, dcp_world_size=1, pcp_world_size=1):
    """``ChunkedLocalAttentionManager.find_longest_cache_hit``: placeholders up to the chunk that the next token is in,
    and in that chunk the blocks up to the first miss."""
    cdef Lookup lookup = None
    cdef Py_ssize_t block_size, chunk_size, i, n
    if (are_plain(max_length, alignment_tokens) and drop_eagle_block is False and dcp_world_size == 1
            and pcp_world_size == 1 and isinstance(kv_cache_spec, local_specs)
            and kv_cache_spec.block_size == alignment_tokens):
        block_size, chunk_size = alignment_tokens, plain_number(kv_cache_spec.attention_chunk_size)
        if chunk_size > 0:
            lookup = open_lookup(block_hashes, kv_cache_group_ids, block_pool, block_size, max_length)
    if lookup is None or num_hashes_of(lookup) < lookup.num_rows:
        return stock_find_local.__func__(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec,
                                         drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size)
    n = <Py_ssize_t>max_length // chunk_size * chunk_size // block_size
    for i in range(n):
        lookup.clear(i)
    kvpool_lock_acquire(&lookup.home.lock)
    try:
        while n < lookup.num_rows and lookup.find(n):
            n += 1
    finally:
        kvpool_lock_release(&lookup.home.lock)
    return lookup.blocks(n), n * block_size


# ---- block ids ----

cdef list ids_of(object blocks):
    cdef list ids = []
    cdef object block
    for block in blocks:
        ids.append((<_KVCacheBlock>block).block_id if type(block) is KVCacheBlock else block.block_id)
    return ids


def get_block_ids(self, allow_none=False, *, group_ids=None):
    """``KVCacheBlocks.get_block_ids``."""
    cdef object groups = self.blocks
    cdef Py_ssize_t num_blocks = 0
    if group_ids is not None or type(groups) is not tuple:
        return stock_get_block_ids(self, allow_none, group_ids=group_ids)
    if allow_none:
        for blocks in <tuple>groups:
            num_blocks += len(blocks)
        if num_blocks == 0:
            return None
    return tuple([ids_of(blocks) for blocks in <tuple>groups])
