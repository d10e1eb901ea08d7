"""Blocks of one pool in token order, kept as int32 ids: what a request's table, a hit and an allocation are."""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_New
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t
from libc.string cimport memcmp, memcpy

from kvpool.native.block cimport BlockHome, view_of, node_in
from kvpool.native.memory cimport kvp_free, kvp_realloc, kvpool_share_memory

from collections.abc import Sequence

from kvpool.errors import BlockStateError

kvpool_share_memory()

__all__ = ["BlockSequence"]

cdef extern from "Python.h":
    void set_new_item "PyList_SET_ITEM"(list items, Py_ssize_t i, object item)
    # As lists do: first all code of the caller in the slice, then the length.
    int PySlice_Unpack(object index, Py_ssize_t *start, Py_ssize_t *stop, Py_ssize_t *step) except -1
    Py_ssize_t PySlice_AdjustIndices(Py_ssize_t length, Py_ssize_t *start, Py_ssize_t *stop, Py_ssize_t step)

cdef enum:
    ROOM = 4  # least growth, in ids


cdef BlockSequence new_sequence(BlockHome home, Py_ssize_t capacity):
    """An empty one with room for ``capacity`` ids."""
    cdef BlockSequence made = BlockSequence.__new__(BlockSequence)
    made.home = home
    if capacity > 0:
        made.reserve(capacity)
    return made


@cython.final
@cython.no_gc
cdef class BlockSequence:
    """Blocks of one pool, in order, read and written as a list of ``KVCacheBlock``; inside it is an int32 array of ids,
    4 bytes a block, and a block's object is made when it is asked for.

    Slices are lists. Equal to any list, tuple or ``BlockSequence`` of the same blocks. ``block_ids()`` gives the ids.
    Made by ``BlockPool.new_block_table``. Only blocks of the pool fit in, also its null block.

    Raises:
        TypeError, BlockStateError: something else than a block, a block of another pool, is put in; nothing has changed.
    """

    def __dealloc__(self):
        kvp_free(self.ids)

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        """Room for so many more ids: exactly as many in an empty one, half as much again in one that grows."""
        cdef Py_ssize_t wanted = self.length + num_more
        cdef Py_ssize_t capacity
        cdef int32_t *grown
        if wanted > self.capacity:
            capacity = wanted if self.capacity == 0 else max(wanted, self.capacity + self.capacity // 2 + ROOM)
            grown = <int32_t *>kvp_realloc(self.ids, <size_t>capacity * sizeof(int32_t))
            if grown is NULL:
                raise MemoryError(f"no memory for a table of {wanted} blocks")
            self.ids = grown
            self.capacity = capacity
        return 0

    cdef int32_t node_of(self, object block) except -1:
        cdef int32_t node = node_in(self.checked_home(), <PyObject *>block)
        if node >= 0:
            return node
        if hasattr(block, "block_id"):
            raise BlockStateError(f"not a block of the pool of this table: {block!r}")
        raise TypeError(f"a table holds blocks, not {type(block).__name__}: {block!r}")

    cdef BlockHome checked_home(self):
        if self.home is None:
            raise BlockStateError("tables are made by BlockPool.new_block_table()")
        return self.home

    cdef Py_ssize_t place(self, Py_ssize_t i) except -1:
        cdef Py_ssize_t at = i + self.length if i < 0 else i
        if at < 0 or at >= self.length:
            raise IndexError(f"index {i} of {self.length} blocks")
        return at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        cdef Py_ssize_t start, stop, step, i, n
        cdef list views
        if not isinstance(index, slice):
            return view_of(self.home, self.ids[self.place(index)])
        PySlice_Unpack(index, &start, &stop, &step)
        n = PySlice_AdjustIndices(self.length, &start, &stop, step)
        views = PyList_New(n)
        for i in range(n):
            if start + i * step >= self.length:  # the list may have set off the garbage collector, and that anything
                raise BlockStateError("the table got shorter while it was read")
            view = view_of(self.home, self.ids[start + i * step])
            Py_INCREF(view)
            set_new_item(views, i, view)
        return views

    def __setitem__(self, index, value):
        cdef BlockSequence checked
        cdef Py_ssize_t start, stop, step, i, n
        if not isinstance(index, slice):
            self.ids[self.place(index)] = self.node_of(value)
            return
        PySlice_Unpack(index, &start, &stop, &step)
        checked = self.of_blocks(list(value) if value is self else value)
        n = PySlice_AdjustIndices(self.length, &start, &stop, step)
        if n != checked.length:
            raise ValueError(f"{checked.length} blocks for a slice of {n}")
        for i in range(n):
            self.ids[start + i * step] = checked.ids[i]

    cdef BlockSequence of_blocks(self, object blocks):
        """The ids of any iterable of blocks, all checked."""
        cdef BlockSequence made
        if type(blocks) is BlockSequence and (<BlockSequence>blocks).home is self.checked_home():
            return <BlockSequence>blocks
        made = new_sequence(self.checked_home(), 0)
        for block in blocks:
            made.append(block)
        return made

    def append(self, block):
        """Add a block at the end. O(1), on the average."""
        cdef int32_t node = self.node_of(block)
        self.reserve(1)
        self.ids[self.length] = node
        self.length += 1

    def extend(self, blocks):
        """Add blocks at the end, all of them or none. O(len(blocks))."""
        cdef BlockSequence checked = self.of_blocks(blocks)
        cdef Py_ssize_t n = checked.length
        if n > 0:
            self.reserve(n)
            memcpy(self.ids + self.length, checked.ids, <size_t>n * sizeof(int32_t))
            self.length += n

    def __iadd__(self, blocks):
        self.extend(blocks)
        return self

    def block_ids(self):
        """The ids, a new list of int. O(len)."""
        return [self.ids[i] for i in range(self.length)]

    def id_bytes(self):
        """The ids, 4 bytes each in this machine's order. O(len)."""
        return PyBytes_FromStringAndSize(<char *>self.ids, self.length * <Py_ssize_t>sizeof(int32_t))

    def __eq__(self, other):
        cdef BlockSequence theirs
        cdef list items
        cdef Py_ssize_t i
        if type(other) is BlockSequence:
            theirs = <BlockSequence>other
            return (self.home is theirs.home and self.length == theirs.length
                    and (self.length == 0 or memcmp(self.ids, theirs.ids, <size_t>self.length * sizeof(int32_t)) == 0))
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        items = list(other)
        if len(items) != self.length:
            return False
        for i in range(self.length):
            if items[i] is not view_of(self.home, self.ids[i]):
                return False
        return True

    def __repr__(self):
        return f"BlockSequence({self.block_ids()})"

    def __reduce_ex__(self, protocol):
        raise TypeError("a table names blocks of one pool in one process: it can't be pickled or copied")


Sequence.register(BlockSequence)
