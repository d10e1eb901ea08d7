# cython: language_level=3, wraparound=False, initializedcheck=False, binding=False
# cython: embedsignature=True, freethreading_compatible=True
"""What a scheduler does with a request at every step, native: its tokens, their number, and the block hashes that
follow them. ``kvpool.reference.request`` says the same in Python."""
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE, PyList_GetSlice
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject

from kvpool._hash cimport BlockHasherBase

from kvpool._block_hashing import BlockHashing
from kvpool._request_operations import to_token_ids

cdef extern from "Python.h":
    const Py_ssize_t NOTHING_CHANGED "PY_SSIZE_T_MAX"


cdef class TokenList(list):
    """A list that remembers the first index at which it was changed, other than by adding to its end."""

    def __cinit__(self):
        self.first_changed = NOTHING_CHANGED

    cdef int note(self, object index) except -1:
        cdef Py_ssize_t lowest
        if isinstance(index, slice):
            places = range(len(self))[index]
            lowest = min(places[0], places[len(places) - 1]) if places else index.indices(len(self))[0]
        else:
            lowest = index.__index__()
            if lowest < 0:
                lowest = max(0, lowest + PyList_GET_SIZE(self))
        self.first_changed = min(self.first_changed, lowest)
        return 0

    def __setitem__(self, index, value):
        self.note(index)
        super().__setitem__(index, value)

    def __delitem__(self, index):
        self.note(index)
        super().__delitem__(index)

    def insert(self, index, value):
        self.note(index)
        super().insert(index, value)

    def pop(self, index=-1):
        self.note(index)
        return super().pop(index)

    def remove(self, value):
        self.note(0)
        super().remove(value)

    def clear(self):
        self.note(0)
        super().clear()

    def reverse(self):
        self.note(0)
        super().reverse()

    def sort(self, **options):
        self.note(0)
        super().sort(**options)

    def __imul__(self, factor):
        self.note(0)
        super().__imul__(factor)
        return self


cdef bint are_ints(list tokens) noexcept:
    cdef Py_ssize_t i
    for i in range(PyList_GET_SIZE(tokens)):
        if not PyLong_CheckExact(<object>PyList_GET_ITEM(tokens, i)):
            return False
    return True


cdef class RequestBase:
    """Tokens, counts and hashes of a request; see ``Request``."""

    def __cinit__(self):
        # There from the start: they are read without a look whether they are.
        self._all_token_ids = TokenList()
        self._output_token_ids = []
        self.hashes = []

    def __init__(self, list all_token_ids not None, block_hasher, Py_ssize_t hash_block_size):
        if PyList_GET_SIZE(self._all_token_ids) > 0 or PyList_GET_SIZE(self.hashes) > 0:  # initialised again
            self._all_token_ids, self._output_token_ids, self.hashes = TokenList(), [], []
        list.extend(self._all_token_ids, all_token_ids)
        self._block_hasher = block_hasher
        self.hash_block_size = hash_block_size
        self.native_hasher = None
        if isinstance(block_hasher, BlockHasherBase) and type(block_hasher).__call__ is BlockHashing.__call__:
            self.native_hasher = block_hasher
        self.spec_token_ids = []

    @staticmethod
    def has_only_ints(list tokens not None):
        """Whether all tokens are exact ints."""
        return are_ints(tokens)

    @property
    def num_tokens(self):
        return PyList_GET_SIZE(self._all_token_ids)

    @property
    def num_output_tokens(self):
        return PyList_GET_SIZE(self._output_token_ids)

    @property
    def num_tokens_with_spec(self):
        return PyList_GET_SIZE(self._all_token_ids) + <Py_ssize_t>len(self.spec_token_ids)

    cdef list current_hashes(self):
        """The hashes without those from the first block on in which a token changed."""
        cdef Py_ssize_t first = self._all_token_ids.first_changed
        if first != NOTHING_CHANGED:
            self._all_token_ids.first_changed = NOTHING_CHANGED
            # What a foreign hasher covers with a hash is unknown: all its hashes go.
            del self.hashes[(first // self.hash_block_size if self.hash_block_size > 0 else 0):]
        return self.hashes

    @property
    def block_hashes(self):
        return self.current_hashes()

    @block_hashes.setter
    def block_hashes(self, list block_hashes not None):
        self._all_token_ids.first_changed = NOTHING_CHANGED
        self.hashes = block_hashes

    cdef bint are_new_blocks_plain(self) except -1:
        """Whether no block without a hash can have extra keys; where that is not sure, the hasher finds out."""
        if self.lora_request or self.prompt_embeds is not None or self.mm_features:
            return False
        return PyList_GET_SIZE(self.hashes) > 0 or not self.cache_salt

    cdef int refresh(self) except -1:
        cdef list hashes
        cdef Py_ssize_t num_tokens, num_hashes, size = self.hash_block_size
        cdef bint are_plain
        if self._block_hasher is None:
            return 0
        hashes = self.current_hashes()
        if size <= 0:
            hashes.extend(self._block_hasher(self))
            return 0
        if PyList_GET_SIZE(self._all_token_ids) // size == PyList_GET_SIZE(hashes):
            return 0
        # Before anything is read: what is asked for its truth may change both lists.
        are_plain = self.native_hasher is not None and self.are_new_blocks_plain()
        num_tokens, num_hashes = PyList_GET_SIZE(self._all_token_ids), PyList_GET_SIZE(hashes)
        if are_plain and num_tokens // size > num_hashes:
            self.native_hasher._hash_plain_blocks(
                hashes[num_hashes - 1] if num_hashes > 0 else self.native_hasher.none_hash,
                PyList_GetSlice(self._all_token_ids, num_hashes * size, num_tokens), 0, hashes)
        else:
            hashes.extend(self._block_hasher(self))
        return 0

    def append_output_token_ids(self, token_ids):
        """Adds one output token or several, and the hashes of blocks that are full now. O(new tokens).

        Raises:
            TypeError: a token that is no integer; nothing has changed.
        """
        cdef list new
        if PyLong_CheckExact(token_ids):
            PyList_Append(self._output_token_ids, token_ids)
            PyList_Append(self._all_token_ids, token_ids)
        else:
            new = to_token_ids(token_ids if hasattr(token_ids, "__iter__") else [token_ids], self.has_only_ints)
            self._output_token_ids.extend(new)
            list.extend(self._all_token_ids, new)
        self.refresh()

    def update_block_hashes(self):
        """Brings ``block_hashes`` up to date: stale ones go, those of new full blocks come."""
        self.refresh()
