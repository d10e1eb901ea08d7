"""FreeKVCacheBlockQueue: the free list, with the calls of vLLM's class of that name."""
cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memset

from kvpool.native.batch cimport parse_count
from kvpool.native.block cimport (
    FAKE_HEAD, FAKE_TAIL, BlockHome, ViewTable, KVCacheBlock, fake_end, view_of, kvpool_lock_acquire,
    kvpool_lock_release, open_views, raise_status,
)
from kvpool.native.kvp cimport (
    KVP_ERR_NOT_QUEUED, KVP_NONE, KVP_OK, KVP_PLACE_HEAD, KVP_PLACE_TAIL, kvp_fault_t, kvp_free_list_after,
    kvp_free_list_append_n, kvp_free_list_init, kvp_free_list_is_queued, kvp_free_list_links, kvp_free_list_move,
    kvp_free_list_pop_n, kvp_free_list_prepend_n, kvp_free_list_remove, kvp_link_t, kvp_placement_t, kvp_pool_attach, kvp_pool_detach,
    kvp_pool_pop_detached, kvp_status_t,
)
from kvpool.native.memory cimport kvp_free, kvp_malloc, kvp_realloc, kvpool_share_memory

from kvpool.errors import BlockStateError, NoFreeBlocksError

kvpool_share_memory()

__all__ = ["FreeKVCacheBlockQueue"]


cdef int give_room(BlockHome home, int32_t capacity) except -1:
    """A new, larger link array and view table for a stand-alone queue."""
    cdef kvp_link_t *links = <kvp_link_t *>kvp_malloc(kvp_free_list_links(capacity) * sizeof(kvp_link_t))
    cdef kvp_link_t *old_links = home.own_links.links
    cdef PyObject **views = NULL
    cdef PyObject *head = NULL
    cdef PyObject *tail = NULL
    if links is not NULL:
        if home.views is NULL:
            try:
                open_views(home, capacity)
            except MemoryError:
                kvp_free(links)
                raise
            views = home.views
        else:
            head, tail = home.views[home.num_views], home.views[home.num_views + 1]
            views = <PyObject **>kvp_realloc(home.views, (<size_t>capacity + 2) * sizeof(PyObject *))
    if views is NULL:
        kvp_free(links)
        raise MemoryError(f"no memory for a queue of {capacity} blocks")
    if old_links is NULL:
        kvp_free_list_init(&home.own_links, links, capacity, capacity)
    else:
        memset(views + home.num_views, 0, (<size_t>(capacity - home.num_views) + 2) * sizeof(PyObject *))
        views[capacity], views[capacity + 1] = head, tail
        kvp_free_list_move(&home.own_links, links, capacity)
        kvp_free(old_links)
    home.views = views
    home.num_views = capacity
    return 0


cdef int leave_home(KVCacheBlock block) except -1:
    """The place that a block had in a queue it is no longer in is for the next one that comes there."""
    cdef BlockHome home = block.home
    if home is not None and home.views is not NULL:
        home.views[block.node] = NULL
        home.vacant.append(block.node)
        Py_DECREF(block)
    return 0


@cython.final
@cython.no_gc
cdef class FreeKVCacheBlockQueue:
    """FreeKVCacheBlockQueue(blocks)\n--\n\n\
    Free blocks in the order of their reuse, a doubly linked list whose head is reused first.

    ``pool.free_block_queue`` is that of a pool and changes the pool: what is taken out is detached (``ref_cnt`` 0,
    neither queued nor in use), what is put in must be detached. ``FreeKVCacheBlockQueue(blocks)`` queues hand-made
    blocks. Every method is O(blocks it is given or returns), wherever they are in the list.

    Args:
        blocks: hand-made blocks, the first content, head first; none may be in a queue already or appear twice
            (BlockStateError).

    Attributes:
        fake_free_list_head, fake_free_list_tail: the ends, blocks with id -1 that are never popped; the neighbour of
            each is the first or last block, or the other end.

    vLLM: ``FreeKVCacheBlockQueue``.
    """
    cdef BlockHome home
    cdef ViewTable table
    cdef int32_t num_adopted
    cdef bint stand_alone
    cdef list set_aside
    cdef object __weakref__

    def __init__(self, blocks):
        cdef BlockHome home
        cdef list batch = list(blocks)
        if self.home is not None:
            raise BlockStateError("this queue is initialised already")
        home = BlockHome.__new__(BlockHome)
        home.links = &home.own_links
        home.vacant = []
        give_room(home, 8)
        self.table = ViewTable(home)
        self.stand_alone = True
        self.home = home
        self.append_n(batch)

    # ---- which node is this block? ----

    cdef int check_open(self) except -1:
        if self.home is None:
            raise BlockStateError("this queue was never initialised")
        return 0

    cdef int32_t adopt(self, KVCacheBlock block) except -1:
        """The node of a hand-made block, given on first sight and kept: its place in this queue's table."""
        cdef BlockHome home = self.home
        if block.home is home:
            return block.node
        if block.hand_made is None:
            raise BlockStateError(f"block {block.block_id} belongs to a pool: a stand-alone queue takes KVCacheBlock(i)")
        if block.home is not None and block.home.views is not NULL:
            if kvp_free_list_is_queued(block.home.links, block.node):
                raise BlockStateError(f"block {block.block_id} is in another queue")
        cdef int32_t node
        if home.vacant:
            node = home.vacant.pop()
        else:
            if self.num_adopted == home.num_views:
                if home.num_views > INT32_MAX // 2:
                    raise MemoryError("a queue holds at most 2**31 - 1 blocks")
                give_room(home, 2 * home.num_views)
            node = self.num_adopted
            self.num_adopted += 1
        leave_home(block)
        Py_INCREF(block)
        home.views[node] = <PyObject *>block
        block.home = home
        block.node = node
        return node

    cdef int32_t node_of(self, object item) except -1:
        if type(item) is not KVCacheBlock:
            raise TypeError(f"a queue holds KVCacheBlock objects, not {type(item).__name__}: {item!r}")
        cdef KVCacheBlock block = item
        if block.node == FAKE_HEAD or block.node == FAKE_TAIL:
            raise BlockStateError("the fake ends of a queue can't be queued")
        if self.stand_alone:
            return self.adopt(block)
        if block.home is not self.home:
            raise BlockStateError(f"block {block.block_id} is not a block of this pool")
        return block.node

    cdef bint may_hold(self, KVCacheBlock block):
        return block.home is self.home or (block.home is None and self.stand_alone)

    cdef list pop(self, int32_t n):
        cdef BlockHome home = self.home
        cdef int32_t i
        cdef kvp_status_t status
        cdef int32_t *nodes = <int32_t *>kvp_malloc((<size_t>n + 1) * sizeof(int32_t))
        if nodes is NULL:
            raise MemoryError()
        try:
            kvpool_lock_acquire(&home.lock)
            if self.stand_alone:
                status = kvp_free_list_pop_n(home.links, n, nodes)
            else:
                status = kvp_pool_pop_detached(home.pool, n, nodes)
            kvpool_lock_release(&home.lock)
            raise_status(status, NULL, "popleft_n", home)
            try:
                return [view_of(home, nodes[i]) for i in range(n)]
            except BaseException:
                self.put_back(nodes, n)
                raise
        finally:
            kvp_free(nodes)

    cdef int put_back(self, const int32_t *nodes, int32_t n) except -1:
        kvpool_lock_acquire(&self.home.lock)
        if self.stand_alone:
            kvp_free_list_prepend_n(self.home.links, nodes, n, NULL)
        else:
            kvp_pool_attach(self.home.pool, nodes, n, KVP_PLACE_HEAD, NULL)
        kvpool_lock_release(&self.home.lock)
        return 0

    cdef int link(self, object blocks, kvp_placement_t where, str call) except -1:
        cdef BlockHome home = self.home
        cdef list batch = list(blocks)
        cdef Py_ssize_t i, n = len(batch)
        cdef kvp_status_t status
        cdef kvp_fault_t fault
        if n == 0:
            return 0
        if (where == KVP_PLACE_TAIL and home.tail_severed) or (where == KVP_PLACE_HEAD and home.head_severed):
            raise BlockStateError(f"{call}: this end of the queue has been cut off")
        cdef int32_t *nodes = <int32_t *>kvp_malloc(<size_t>n * sizeof(int32_t))
        if nodes is NULL:
            raise MemoryError()
        try:
            for i in range(n):
                nodes[i] = self.node_of(batch[i])
            kvpool_lock_acquire(&home.lock)
            if not self.stand_alone:
                status = kvp_pool_attach(home.pool, nodes, n, where, &fault)
            elif where == KVP_PLACE_HEAD:
                status = kvp_free_list_prepend_n(home.links, nodes, n, &fault)
            else:
                status = kvp_free_list_append_n(home.links, nodes, n, &fault)
            kvpool_lock_release(&home.lock)
            if status != KVP_OK and fault.index >= 0:
                fault.block_id = (<KVCacheBlock>batch[fault.index]).block_id
            raise_status(status, &fault, call, home)
        finally:
            kvp_free(nodes)
        return 0

    # ---- vLLM's calls ----

    @property
    def num_free_blocks(self):
        """Number of queued blocks. Set to less, by code that plays a full cache as vLLM's tests do, the last blocks are
        set aside, detached; set to more, they come back to the end. BlockStateError for more than there are."""
        self.check_open()
        return self.home.links.num_free

    @num_free_blocks.setter
    def num_free_blocks(self, value):
        self.check_open()
        cdef int32_t wanted = parse_count(value)
        cdef list aside = [] if self.set_aside is None else self.set_aside
        if wanted > self.home.links.num_free + <int64_t>len(aside):
            raise BlockStateError(f"num_free_blocks = {value}: there are {self.home.links.num_free} blocks in the queue "
                                  f"and {len(aside)} set aside")
        self.set_aside = aside
        while self.home.links.num_free > wanted:
            block = self.fake_free_list_tail.prev_free_block
            self.remove(block)
            aside.append(block)
        while self.home.links.num_free < wanted:
            self.append(aside[len(aside) - 1])
            aside.pop()

    @property
    def fake_free_list_head(self):
        """The end before the first block; its ``next_free_block`` is the first block or the other end."""
        self.check_open()
        return fake_end(self.home, FAKE_HEAD)

    @property
    def fake_free_list_tail(self):
        """The end after the last block; its ``prev_free_block`` is the last block or the other end."""
        self.check_open()
        return fake_end(self.home, FAKE_TAIL)

    def popleft(self):
        """Take the block at the head. NoFreeBlocksError (a ValueError) if there is none."""
        self.check_open()
        if self.home.links.num_free == 0:
            raise NoFreeBlocksError("No free blocks available")
        return self.pop(1)[0]

    def popleft_n(self, n):
        """Take n blocks from the head.

        Raises:
            NoFreeBlocksError: fewer are queued (an AssertionError too, as in vLLM); nothing has changed.
            TypeError, InvalidArgumentError: n is no int, or negative.
        """
        self.check_open()
        cdef int32_t count = parse_count(n)
        if count > self.home.links.num_free:
            raise NoFreeBlocksError(f"popleft_n({n}): the queue holds {self.home.links.num_free} blocks")
        return self.pop(count)

    def remove(self, block):
        """Take a block out of the middle. BlockStateError (a RuntimeError) if it is not in this queue."""
        cdef kvp_status_t status = KVP_ERR_NOT_QUEUED
        self.check_open()
        if type(block) is not KVCacheBlock:
            raise TypeError(f"a queue holds KVCacheBlock objects, not {type(block).__name__}: {block!r}")
        if (<KVCacheBlock>block).home is self.home and (<KVCacheBlock>block).node >= 0:
            kvpool_lock_acquire(&self.home.lock)
            if self.stand_alone:
                status = kvp_free_list_remove(self.home.links, (<KVCacheBlock>block).node)
            else:
                status = kvp_pool_detach(self.home.pool, (<KVCacheBlock>block).node)
            kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            raise BlockStateError(f"remove() called on an invalid block: {block!r} is not in this queue")

    def append(self, block):
        """Put a block at the tail: reused last. BlockStateError if it is in a queue already."""
        self.check_open()
        self.link((block,), KVP_PLACE_TAIL, "append")

    def append_n(self, blocks):
        """Put blocks at the tail in the given order. BlockStateError, and nothing changed, if one is in a queue
        already or appears twice."""
        self.check_open()
        self.link(blocks, KVP_PLACE_TAIL, "append_n")

    def prepend_n(self, blocks):
        """Put blocks at the head in the given order: the first one is reused next. Errors as ``append_n``."""
        self.check_open()
        self.link(blocks, KVP_PLACE_HEAD, "prepend_n")

    def get_all_free_blocks(self):
        """All queued blocks from head to tail, O(their number). BlockStateError if the head is severed."""
        self.check_open()
        if self.home.head_severed:
            raise BlockStateError("get_all_free_blocks: this end of the queue has been cut off")
        cdef list blocks = []
        cdef int32_t node = kvp_free_list_after(self.home.links, KVP_NONE)
        while node != KVP_NONE:
            blocks.append(view_of(self.home, node))
            node = kvp_free_list_after(self.home.links, node)
        return blocks

    def iter_blocks_after(self, cursor):
        """Blocks behind the cursor (None: from the head) in the order of their reuse; none if it is not queued.

        Each step reads the list as it is then; the walk ends where a block was taken out under it.

        BlockStateError: the cursor is queued elsewhere, or belongs to a pool that this is not the queue of.
        """
        if cursor is not None and (type(cursor) is not KVCacheBlock or not self.may_hold(cursor)):
            raise BlockStateError(f"iter_blocks_after: {cursor!r} is a block of another queue")
        block = self.fake_free_list_head if cursor is None else cursor
        tail = self.fake_free_list_tail
        while True:
            block = block.next_free_block
            if block is None or block is tail:
                return
            yield block

    def __len__(self):
        return self.num_free_blocks

    def __reduce_ex__(self, protocol):
        raise TypeError("a FreeKVCacheBlockQueue is a view of native state: it can't be pickled or copied")


cdef object queue_of_home(BlockHome home):
    cdef FreeKVCacheBlockQueue queue = FreeKVCacheBlockQueue.__new__(FreeKVCacheBlockQueue)
    queue.home = home
    return queue
