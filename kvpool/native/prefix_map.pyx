"""BlockHashToBlockMap: the prefix map, with the calls of vLLM's class of that name."""
cimport cython
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_Check
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, uint64_t
from libc.string cimport memcpy

from kvpool.native.block cimport (
    BlockHome, KVCacheBlock, view_of, key_bytes, kvpool_lock_acquire, kvpool_lock_release, kvpool_lock_t,
    parse_key, raise_status,
)
from kvpool.native.kvp cimport (
    KVP_ENTRY_IN_MAP, KVP_NONE, KVP_OK, KVP_SECRET_WORDS, kvp_fault_t, kvp_key_t, kvp_map_add, kvp_map_create, kvp_map_destroy,
    kvp_map_discard, kvp_map_entry, kvp_map_find, kvp_map_find_block, kvp_map_t, kvp_pool_insert_key,
    kvp_pool_next_secondary, kvp_pool_primary, kvp_pool_remove_key, kvp_status_t,
)
from kvpool.native.memory cimport kvpool_share_memory

import os

from kvpool.pool.map_entries import MapEntries
from kvpool.errors import BlockStateError

kvpool_share_memory()

__all__ = ["BlockHashToBlockMap"]

cdef uint64_t SECRET[KVP_SECRET_WORDS]


cdef int draw_secret() except -1:
    cdef bytes secret = os.urandom(sizeof(SECRET))
    memcpy(SECRET, <char *>secret, sizeof(SECRET))
    return 0


draw_secret()


cdef const uint64_t *probing_secret() noexcept:
    """Mixed into every hash of this process's maps."""
    return SECRET


cdef int32_t parse_wanted_id(object block_id) noexcept:
    """An id to look for; one that no block can have is found nowhere. Never runs code of the caller."""
    cdef int overflow = 0
    cdef long value
    if not PyLong_Check(block_id):
        return INT32_MIN
    value = PyLong_AsLongAndOverflow(block_id, &overflow)
    return <int32_t>value if overflow == 0 and -1 <= value <= INT32_MAX else INT32_MIN


@cython.final
cdef class BlockHashToBlockMap:
    """BlockHashToBlockMap()\n--\n\n\
    The blocks that hold the tokens of a hash: from a key (digest and group id) to blocks in insertion order.

    ``pool.cached_block_hash_to_block`` is that of a pool and changes the pool. ``BlockHashToBlockMap()`` stands alone
    and takes hand-made blocks. Keys are bytes, 4 to 36 long (``make_block_hash_with_group_id``): else TypeError or
    InvalidArgumentError. ``len`` is the number of keys. All methods are O(1).

    vLLM: ``BlockHashToBlockMap``.
    """
    cdef BlockHome home     # None: stand-alone
    cdef kvp_map_t *map
    cdef bint owns_map
    cdef kvpool_lock_t lock
    cdef dict blocks        # stand-alone: entry -> block
    cdef BlockHashToBlockMap hand_made  # a pool's map: hand-made blocks that its engine had cached; mostly None

    def __init__(self):
        if self.map is not NULL:
            raise BlockStateError("this map is initialised already")
        cdef dict blocks = {}
        if kvp_map_create(SECRET, &self.map) != KVP_OK:
            raise MemoryError("no memory for a prefix map")
        self.owns_map = True
        self.blocks = blocks

    def __dealloc__(self):
        if self.owns_map:
            kvp_map_destroy(self.map)

    cdef kvpool_lock_t *checked_lock(self) except NULL:
        if self.map is NULL:
            raise BlockStateError("this map was never initialised")
        return &self.lock if self.owns_map else &self.home.lock

    def get_one_block(self, key):
        """The first inserted of the key's blocks, None if there is none."""
        cdef kvp_key_t parsed
        cdef kvpool_lock_t *lock = self.checked_lock()
        parse_key(key, &parsed)
        kvpool_lock_acquire(lock)
        cdef int32_t entry = kvp_map_find(self.map, &parsed)
        cdef int32_t block_id = kvp_map_entry(self.map, entry).block_id if entry != KVP_NONE else KVP_NONE
        kvpool_lock_release(lock)
        if entry == KVP_NONE:
            return None if self.hand_made is None else self.hand_made.get_one_block(key)
        return self.blocks[entry] if self.owns_map else view_of(self.home, block_id)

    def contain(self, key, block_id):
        """Whether the key leads to the block with this id."""
        cdef kvp_key_t parsed
        cdef kvpool_lock_t *lock = self.checked_lock()
        cdef int32_t wanted = parse_wanted_id(block_id)
        parse_key(key, &parsed)
        kvpool_lock_acquire(lock)
        cdef int32_t entry = kvp_map_find_block(self.map, &parsed, wanted)
        kvpool_lock_release(lock)
        return entry != KVP_NONE or (self.hand_made is not None and self.hand_made.contain(key, block_id))

    def insert(self, key, block):
        """Make the key lead to the block, behind those it leads to already; the same id twice is one entry."""
        cdef kvp_key_t parsed
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        cdef int32_t entry
        cdef kvpool_lock_t *lock = self.checked_lock()
        parse_key(key, &parsed)
        if type(block) is not KVCacheBlock:
            raise TypeError(f"a map holds KVCacheBlock objects, not {type(block).__name__}: {block!r}")
        cdef KVCacheBlock view = block
        fault.index, fault.block_id = KVP_NONE, view.block_id
        if not self.owns_map:
            if view.home is not self.home:
                raise BlockStateError(f"insert: block {view.block_id} is not a block of this pool")
            kvpool_lock_acquire(lock)
            status = kvp_pool_insert_key(self.home.pool, &parsed, view.node)
            kvpool_lock_release(lock)
            raise_status(status, &fault, "insert", self.home)
            return
        entry = kvp_map_find_block(self.map, &parsed, view.block_id)
        if entry == KVP_NONE:
            raise_status(kvp_map_add(self.map, &parsed, view.block_id, &entry), &fault, "insert", None)
            try:
                self.blocks[entry] = block
            except BaseException:
                kvp_map_discard(self.map, entry)
                raise
            return
        self.blocks[entry] = block

    def pop(self, key, block_id):
        """Take one block from under the key. None, and nothing changed, if the key does not lead to that id."""
        cdef kvp_key_t parsed
        cdef int32_t entry
        cdef kvpool_lock_t *lock = self.checked_lock()
        cdef int32_t wanted = parse_wanted_id(block_id)
        parse_key(key, &parsed)
        if self.owns_map:
            entry = kvp_map_find_block(self.map, &parsed, wanted)
            if entry == KVP_NONE:
                return None
            kvp_map_discard(self.map, entry)
            return self.blocks.pop(entry)
        kvpool_lock_acquire(lock)
        cdef bint removed = kvp_pool_remove_key(self.home.pool, &parsed, wanted)
        kvpool_lock_release(lock)
        if removed:
            return view_of(self.home, wanted)
        return None if self.hand_made is None else self.hand_made.pop(key, block_id)

    def __len__(self):
        self.checked_lock()
        return self.map.num_keys + (0 if self.hand_made is None else len(self.hand_made))

    # ---- all of it, for MapEntries ----

    @property
    def _cache(self):
        """The map as vLLM's private dict shows it; changes go to the map."""
        self.checked_lock()
        return MapEntries(self)

    def _blocks_of(self, key):
        """The key's blocks in insertion order."""
        cdef kvp_key_t parsed
        cdef kvpool_lock_t *lock = self.checked_lock()
        cdef list nodes = []
        parse_key(key, &parsed)
        kvpool_lock_acquire(lock)
        cdef int32_t first = kvp_map_find(self.map, &parsed)
        cdef int32_t entry = first
        while entry != KVP_NONE:
            nodes.append(entry if self.owns_map else kvp_map_entry(self.map, entry).block_id)
            entry = kvp_map_entry(self.map, entry).next_same_key
            if entry == first:
                break
        kvpool_lock_release(lock)
        if self.owns_map:
            return [self.blocks[node] for node in nodes]
        return [view_of(self.home, node) for node in nodes] + (
            [] if self.hand_made is None else self.hand_made._blocks_of(key))

    def _keys(self):
        """All keys: of a stand-alone map in insertion order, else in the order of their first blocks. O(blocks)."""
        cdef kvpool_lock_t *lock = self.checked_lock()
        cdef list keys = []
        cdef int32_t node, entry
        kvpool_lock_acquire(lock)
        if self.owns_map:
            for entry in self.blocks:
                self.add_if_first(keys, entry)
        else:
            for node in range(self.home.pool.num_blocks):
                if self.map.has_hash[node] == 0:
                    continue
                entry = kvp_pool_primary(self.home.pool, node)
                if entry != KVP_NONE and kvp_map_entry(self.map, entry).flags & KVP_ENTRY_IN_MAP:
                    self.add_if_first(keys, entry)
                entry = kvp_pool_next_secondary(self.home.pool, node, KVP_NONE)
                while entry != KVP_NONE:
                    self.add_if_first(keys, entry)
                    entry = kvp_pool_next_secondary(self.home.pool, node, entry)
        kvpool_lock_release(lock)
        return keys if self.hand_made is None else list(dict.fromkeys(keys + self.hand_made._keys()))

    cdef int add_if_first(self, list keys, int32_t entry) except -1:
        cdef kvp_key_t parsed
        cdef bytes key = key_bytes(kvp_map_entry(self.map, entry))
        parse_key(key, &parsed)
        if kvp_map_find(self.map, &parsed) == entry:
            keys.append(key)
        return 0

    def __reduce_ex__(self, protocol):
        raise TypeError("a BlockHashToBlockMap is a view of native state: it can't be pickled or copied")


cdef object map_of_home(BlockHome home, object hand_made):
    """A new view of a pool's map. Lookups go on in ``hand_made``, a stand-alone map or None, where the pool has no block
    of its own."""
    cdef BlockHashToBlockMap view = BlockHashToBlockMap.__new__(BlockHashToBlockMap)
    view.hand_made = hand_made
    view.home = home
    view.map = &home.pool.map
    return view
