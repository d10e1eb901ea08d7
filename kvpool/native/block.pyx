"""Where blocks live, and the view of one block.

A ``BlockHome`` owns the native state (a pool's arrays, or the links of a stand-alone queue) and the table of the views
that were handed out. Views hold their home, the home holds no view by itself: the pool or queue fills and empties the
table, so no cycle exists and nothing here needs the garbage collector. A view that outlives its pool keeps the arrays.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLong
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT32_MAX, UINT32_MAX, int32_t, uint8_t, uint32_t
from libc.string cimport memcpy

from kvpool.native.kvp cimport (
    KVP_DIGEST_BYTES, KVP_ERR_BLOCK_ID, KVP_ERR_DIGEST_LENGTH, KVP_ERR_DUPLICATE, KVP_ERR_HAS_HASH, KVP_ERR_IN_USE,
    KVP_ERR_NO_FREE_BLOCKS, KVP_ERR_NO_MEMORY, KVP_ERR_NOT_IN_USE, KVP_ERR_NOT_QUEUED, KVP_ERR_NULL_BLOCK,
    KVP_ERR_QUEUED, KVP_ERR_REF_OVERFLOW, KVP_NONE, KVP_NULL_BLOCK, KVP_OK, KVP_TOKENS_UNKNOWN, kvp_entry_t,
    kvp_fault_t, kvp_free_list_after, kvp_free_list_before, kvp_free_list_is_queued, kvp_key_t, kvp_map_entry,
    kvp_pool_destroy, kvp_pool_primary, kvp_pool_reset_hash, kvp_pool_set_hash, kvp_pool_set_ref_cnt, kvp_status_t,
)
from kvpool.native.memory cimport kvp_calloc, kvp_free, kvpool_share_memory

from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError

kvpool_share_memory()

__all__ = ["KVCacheBlock"]

cdef enum:
    GROUP_ID_BYTES = 4


@cython.final
@cython.no_gc
cdef class BlockHome:
    """Native state and the table of its views; ``pool`` is NULL for a stand-alone queue."""

    def __cinit__(self):
        self.owner = None

    def __dealloc__(self):
        close_views(self)
        kvp_pool_destroy(self.pool)
        kvp_free(self.own_links.links)


@cython.final
@cython.no_gc
cdef class ViewTable:
    """Held by a pool or a queue alone, so that the views go with it, also when the garbage collector takes it apart."""

    def __cinit__(self, BlockHome home not None):
        self.home = home

    def __dealloc__(self):
        if self.home is not None:
            close_views(self.home)


cdef int open_views(BlockHome home, int32_t capacity) except -1:
    """Room for one view per block and the two fake ends. Zeroed memory: untouched, it costs nothing."""
    home.views = <PyObject **>kvp_calloc(<size_t>capacity + 2, sizeof(PyObject *))
    if home.views is NULL:
        raise MemoryError(f"no memory for a table of {capacity} block views")
    home.num_views = capacity
    return 0


cdef void close_views(BlockHome home) noexcept:
    cdef PyObject **views
    cdef Py_ssize_t i
    kvpool_lock_acquire(&home.lock)
    views, home.views = home.views, NULL
    kvpool_lock_release(&home.lock)
    if views is NULL:
        return
    for i in range(<Py_ssize_t>home.num_views + 2):
        if views[i] is not NULL:
            Py_DECREF(<object>views[i])
    kvp_free(views)


cdef KVCacheBlock make_view(BlockHome home, int32_t node, int32_t block_id):
    cdef KVCacheBlock block = KVCacheBlock.__new__(KVCacheBlock)
    block.home = home
    block.node = node
    block.block_id = block_id
    return block


cdef object remember(BlockHome home, Py_ssize_t place, KVCacheBlock block):
    """The view kept at this place of the table: the one of another thread that came first, else this one."""
    cdef object kept = block
    kvpool_lock_acquire(&home.lock)
    if home.views is not NULL:
        if home.views[place] is not NULL:
            kept = <object>home.views[place]
        else:
            Py_INCREF(block)
            kvpool_write_once(&home.views[place], <PyObject *>block)
    kvpool_lock_release(&home.lock)
    return kept


cdef object kept_view(BlockHome home, int32_t node):
    return remember(home, node, make_view(home, node, node))


cdef object fake_end(BlockHome home, int32_t which):
    cdef Py_ssize_t place = <Py_ssize_t>home.num_views + (1 if which == FAKE_TAIL else 0)
    cdef PyObject *kept = NULL if home.views is NULL else kvpool_read_once(&home.views[place])
    if kept is not NULL:
        return <object>kept
    return remember(home, place, make_view(home, which, KVP_NONE))


# ---- keys ----

cdef bytes key_bytes(const kvp_entry_t *entry):
    cdef bytes key = PyBytes_FromStringAndSize(NULL, entry.digest_len + GROUP_ID_BYTES)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(key)
    memcpy(at, entry.digest, entry.digest_len)
    at += entry.digest_len
    at[0] = <uint8_t>(entry.group_id >> 24)
    at[1] = <uint8_t>(entry.group_id >> 16)
    at[2] = <uint8_t>(entry.group_id >> 8)
    at[3] = <uint8_t>entry.group_id
    return key


cdef int refuse_digest(object digest) except -1:
    if not PyBytes_Check(digest):
        raise TypeError(f"a block hash is bytes, not {type(digest).__name__}: {digest!r}")
    raise InvalidArgumentError(
        f"block hash of {PyBytes_GET_SIZE(digest)} bytes, at most {KVP_DIGEST_BYTES} fit: {digest!r}"
    )


cdef int parse_key(object key, kvp_key_t *out) except -1:
    cdef const uint8_t *group
    if not PyBytes_Check(key):
        raise TypeError(f"a block hash with group id is bytes, not {type(key).__name__}: {key!r}")
    cdef Py_ssize_t length = PyBytes_GET_SIZE(key) - GROUP_ID_BYTES
    if length < 0 or length > KVP_DIGEST_BYTES:
        raise InvalidArgumentError(
            f"key of {length + GROUP_ID_BYTES} bytes: a hash of 0 to {KVP_DIGEST_BYTES} and a group id of "
            f"{GROUP_ID_BYTES} are wanted: {key!r}"
        )
    out.digest = <uint8_t *>PyBytes_AS_STRING(key)
    out.digest_len = <uint32_t>length
    group = out.digest + length
    out.group_id = (<uint32_t>group[0] << 24) | (<uint32_t>group[1] << 16) | (<uint32_t>group[2] << 8) | group[3]
    return 0


cdef uint32_t parse_unusual_group(object group_id) except? 0xFFFFFFFF:
    cdef long long value = PyLong_AsLongLong(group_id)
    if value < 0 or value > UINT32_MAX:
        raise OverflowError(f"group id {group_id} is not in 0 .. 2**32 - 1")
    return <uint32_t>value


cdef int32_t parse_tokens(object num_tokens) except? -2:
    if num_tokens is None:
        return KVP_TOKENS_UNKNOWN
    cdef long long value = PyLong_AsLongLong(num_tokens)
    if value < 0 or value > INT32_MAX:
        raise InvalidArgumentError(f"num_tokens {num_tokens} is not in 0 .. 2**31 - 1")
    return <int32_t>value


# ---- the one place that raises ----

cdef int raise_status(kvp_status_t status, const kvp_fault_t *fault, str call, BlockHome home) except -1:
    """Turns a status into an exception that names the call, the block and its place in the batch."""
    if status == KVP_OK:
        return 0
    if status == KVP_ERR_NO_MEMORY:
        raise MemoryError(f"{call}: no memory for further hashes; nothing has changed")
    if status == KVP_ERR_NO_FREE_BLOCKS:
        raise NoFreeBlocksError(f"{call}: too few free blocks")
    if status == KVP_ERR_DIGEST_LENGTH:
        raise InvalidArgumentError(f"{call}: a block hash has at most {KVP_DIGEST_BYTES} bytes")
    cdef str where = "" if fault is NULL or fault.index < 0 else f" (entry {fault.index} of the batch)"
    cdef object block = "?" if fault is NULL else fault.block_id
    if status == KVP_ERR_BLOCK_ID:
        last = "the last of the pool" if home is None else home.num_views - 1
        raise BlockStateError(f"{call}: block id {block}{where} is not in 0 .. {last}")
    cdef dict reasons = {
        KVP_ERR_NULL_BLOCK: "is the null block, which is never freed, queued or cached",
        KVP_ERR_NOT_IN_USE: "is not in use (ref_cnt 0): freed twice?",
        KVP_ERR_REF_OVERFLOW: "has as many references as can be counted",
        KVP_ERR_NOT_QUEUED: "is not in the free list",
        KVP_ERR_QUEUED: "is in the free list",
        KVP_ERR_IN_USE: "is in use",
        KVP_ERR_HAS_HASH: "carries another hash already",
        KVP_ERR_DUPLICATE: "is in the batch twice",
    }
    raise BlockStateError(f"{call}: block {block}{where} {reasons.get(status, f'failed with status {<int>status}')}; "
                          "nothing has changed")


# ---- the view of one block ----

@cython.final
@cython.no_gc
cdef class HandMade:
    """State of a block that no pool made."""


cdef HandMade hand_made_state(KVCacheBlock block):
    if block.hand_made is None:
        raise BlockStateError("this KVCacheBlock was never initialised: use KVCacheBlock(block_id)")
    return block.hand_made


cdef inline bint in_pool(KVCacheBlock block) noexcept:
    return block.home is not None and block.home.pool is not NULL and block.node >= 0


cdef inline bint is_fake(KVCacheBlock block) noexcept:
    return block.node == FAKE_HEAD or block.node == FAKE_TAIL


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class KVCacheBlock:
    """KVCacheBlock(block_id, ref_cnt=0, *, is_null=False, _block_hash=None, _block_hash_num_tokens=None)\n--\n\n\
    One block of a KV cache: its id, number of users, hash and place in the free list.

    ``pool.blocks[block_id]`` is always the same object; equality is identity. A block is in use (``ref_cnt`` > 0),
    queued (in a free list) or detached (neither: taken from the free list by hand). ``KVCacheBlock(block_id)`` makes
    one that belongs to no pool, for stand-alone queues and maps.

    Args:
        block_id: index of the block in the cache tensors.
        ref_cnt: number of users, >= 0.
        is_null: whether it stands for a block that is never written.

    Raises:
        TypeError, OverflowError: ref_cnt is no int, or too large.
        InvalidArgumentError: ref_cnt is negative.

    vLLM: ``KVCacheBlock``. The links are read-only here, and a pool's block refuses a ``ref_cnt`` that contradicts
    the free list (BlockStateError).
    """

    def __cinit__(self):
        self.node = KVP_NONE

    def __init__(self, block_id, ref_cnt=0, *, bint is_null=False, _block_hash=None, _block_hash_num_tokens=None):
        cdef HandMade state = HandMade.__new__(HandMade)
        cdef int32_t own_id = block_id
        if isinstance(ref_cnt, bool):
            raise TypeError(f"ref_cnt is an int, not bool: {ref_cnt}")
        state.ref_cnt = ref_cnt
        if state.ref_cnt < 0:
            raise InvalidArgumentError(f"ref_cnt {ref_cnt} is negative")
        state.is_null = is_null
        state.block_hash, state.num_tokens = _block_hash, _block_hash_num_tokens
        if self.home is not None or self.hand_made is not None:
            raise BlockStateError(f"block {self.block_id} is initialised already")
        self.block_id = own_id
        self.hand_made = state

    @property
    def ref_cnt(self):
        """Number of users. Set to 0, a block in use becomes detached; set to 1 or more, a detached one is in use.

        A pool's block refuses, with BlockStateError, a negative value and any but 0 while it is queued or null.
        """
        if in_pool(self):
            return self.home.pool.ref_cnt[self.node]
        return 0 if is_fake(self) else hand_made_state(self).ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, value):
        cdef kvp_status_t status
        cdef kvp_fault_t fault
        if isinstance(value, bool):
            raise TypeError(f"ref_cnt is an int, not bool: {value}")
        cdef long long count = PyLong_AsLongLong(value)
        if count < 0 or count > INT32_MAX:
            raise BlockStateError(f"ref_cnt {value} of block {self.block_id} is not in 0 .. 2**31 - 1")
        if in_pool(self):
            kvpool_lock_acquire(&self.home.lock)
            status = kvp_pool_set_ref_cnt(self.home.pool, self.node, <int32_t>count)
            kvpool_lock_release(&self.home.lock)
            fault.index, fault.block_id = KVP_NONE, self.block_id
            raise_status(status, &fault, f"ref_cnt = {value}", self.home)
        elif is_fake(self):
            raise BlockStateError("the fake ends of a queue are never in use")
        else:
            hand_made_state(self).ref_cnt = count

    @property
    def block_hash(self):
        """Primary key of the block in the prefix cache: digest and group id, None if it has none."""
        cdef int32_t entry
        cdef bytes key = None
        if not in_pool(self):
            return None if is_fake(self) else hand_made_state(self).block_hash
        kvpool_lock_acquire(&self.home.lock)
        entry = kvp_pool_primary(self.home.pool, self.node)
        if entry != KVP_NONE:
            key = key_bytes(kvp_map_entry(&self.home.pool.map, entry))
        kvpool_lock_release(&self.home.lock)
        return key

    @property
    def block_hash_num_tokens(self):
        """Number of tokens of the prefix that ``block_hash`` stands for, None if unknown."""
        cdef int32_t entry, num_tokens = KVP_TOKENS_UNKNOWN
        if not in_pool(self):
            return None if is_fake(self) else hand_made_state(self).num_tokens
        kvpool_lock_acquire(&self.home.lock)
        entry = kvp_pool_primary(self.home.pool, self.node)
        if entry != KVP_NONE:
            num_tokens = kvp_map_entry(&self.home.pool.map, entry).num_tokens
        kvpool_lock_release(&self.home.lock)
        return None if num_tokens == KVP_TOKENS_UNKNOWN else num_tokens

    @property
    def _block_hash(self):
        return self.block_hash

    @_block_hash.setter
    def _block_hash(self, value):
        self.reset_hash()
        if value is not None:
            self.set_block_hash(value)

    @property
    def _block_hash_num_tokens(self):
        return self.block_hash_num_tokens

    @property
    def is_null(self):
        """Whether this is a null block: never written, never free, never cached."""
        if in_pool(self):
            return self.node == KVP_NULL_BLOCK
        return False if is_fake(self) else hand_made_state(self).is_null

    @is_null.setter
    def is_null(self, value):
        if in_pool(self) or is_fake(self):
            raise BlockStateError(f"block {self.block_id}: its pool says which block is null")
        hand_made_state(self).is_null = value

    @property
    def pool(self):
        """The pool that owns the block; None for a hand-made one and after the pool is gone."""
        return None if self.home is None or self.home.owner is None else self.home.owner()

    @property
    def prev_free_block(self):
        """Neighbour towards the head of the free list, None if not queued."""
        cdef BlockHome home = self.home
        cdef int32_t before
        if home is None or self.node == FAKE_HEAD or (self.node == FAKE_TAIL and home.tail_severed):
            return None
        if self.node != FAKE_TAIL and not kvp_free_list_is_queued(home.links, self.node):
            return None
        before = kvp_free_list_before(home.links, KVP_NONE if self.node == FAKE_TAIL else self.node)
        return fake_end(home, FAKE_HEAD) if before == KVP_NONE else view_of(home, before)

    @prev_free_block.setter
    def prev_free_block(self, value):
        self._sever(FAKE_TAIL, value, self.prev_free_block)

    @property
    def next_free_block(self):
        """Neighbour towards the tail of the free list, None if not queued."""
        cdef BlockHome home = self.home
        cdef int32_t after
        if home is None or self.node == FAKE_TAIL or (self.node == FAKE_HEAD and home.head_severed):
            return None
        if self.node != FAKE_HEAD and not kvp_free_list_is_queued(home.links, self.node):
            return None
        after = kvp_free_list_after(home.links, KVP_NONE if self.node == FAKE_HEAD else self.node)
        return fake_end(home, FAKE_TAIL) if after == KVP_NONE else view_of(home, after)

    @next_free_block.setter
    def next_free_block(self, value):
        self._sever(FAKE_HEAD, value, self.next_free_block)

    def _sever(self, int32_t end, value, now):
        """Links belong to the queue; only the fake end of a stand-alone one can be cut off, as vLLM's tests do."""
        if value is now:
            return
        if value is not None or self.node != end or self.home.pool is not NULL:
            raise BlockStateError(f"the links of block {self.block_id} are the free list's own: use the queue's calls")
        if end == FAKE_TAIL:
            self.home.tail_severed = True
        else:
            self.home.head_severed = True

    def set_block_hash(self, block_hash, num_tokens=None):
        """Give the block a hash, without making it reachable through the prefix cache.

        Raises:
            BlockStateError: it has one already, or is a pool's null block.
        """
        cdef kvp_key_t key
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        cdef HandMade state
        cdef int32_t tokens = parse_tokens(num_tokens)
        parse_key(block_hash, &key)
        if in_pool(self):
            kvpool_lock_acquire(&self.home.lock)
            status = kvp_pool_set_hash(self.home.pool, &key, self.node, tokens)
            kvpool_lock_release(&self.home.lock)
            fault.index, fault.block_id = KVP_NONE, self.block_id
            raise_status(status, &fault, "set_block_hash", self.home)
            return
        if is_fake(self):
            raise BlockStateError("the fake ends of a queue carry no hash")
        state = hand_made_state(self)
        if state.block_hash is not None:
            raise BlockStateError(f"set_block_hash: block {self.block_id} carries another hash already")
        state.block_hash = block_hash
        state.num_tokens = num_tokens

    def reset_hash(self):
        """Take the block's hash away; a pool's prefix cache forgets that key of the block as well."""
        cdef HandMade state
        if in_pool(self):
            kvpool_lock_acquire(&self.home.lock)
            kvp_pool_reset_hash(self.home.pool, self.node)
            kvpool_lock_release(&self.home.lock)
        elif not is_fake(self):
            state = hand_made_state(self)
            state.block_hash = None
            state.num_tokens = None

    def __repr__(self):
        before, after = self.prev_free_block, self.next_free_block
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, _block_hash={self.block_hash!r}, "
            f"_block_hash_num_tokens={self.block_hash_num_tokens}, "
            f"prev_free_block={None if before is None else before.block_id}, "
            f"next_free_block={None if after is None else after.block_id})"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError("a KVCacheBlock is a view of one process's pool: it can't be pickled or copied, send block_id")
