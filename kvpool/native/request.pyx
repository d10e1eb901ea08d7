"""The part of a request that changes at every step, compiled: its tokens, their number, and the block hashes that follow
them. ``kvpool.reference.request`` says the same in Python."""
cimport cython
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE, PyList_GetSlice
from cpython.long cimport PyLong_CheckExact
from libc.math cimport isfinite

from kvpool.native.block_hasher cimport BlockHasherCore

from kvpool.hashing.hashing import BlockHasherBase
from kvpool.requests.request_base import to_token_ids

__all__ = ["RequestCore", "TokenList"]

cdef extern from "Python.h":
    const Py_ssize_t NOTHING_CHANGED "PY_SSIZE_T_MAX"
    int cut_list "PyList_SetSlice"(list items, Py_ssize_t first, Py_ssize_t past, void *nothing) except -1

cdef extern from "plain_ints.h":
    bint kvpool_is_token_id(object number) noexcept
    bint kvpool_is_ascii(object text) noexcept


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


cdef inline bint is_text_or_none(object text) noexcept:
    return text is None or kvpool_is_ascii(text)


@cython.auto_pickle(False)
cdef class RequestCore:
    """Tokens, counts and hashes of a request; see ``Request``."""

    def __cinit__(self):
        # There from the start: they are read without a look whether they are.
        self._all_token_ids = TokenList()
        self._output_token_ids = []
        self.hashes = []

    def _create(self, list all_token_ids not None, block_hasher, Py_ssize_t hash_block_size):
        if PyList_GET_SIZE(self._all_token_ids) > 0 or PyList_GET_SIZE(self.hashes) > 0:  # initialised again
            self._all_token_ids, self._output_token_ids, self.hashes = TokenList(), [], []
        list.extend(self._all_token_ids, all_token_ids)
        self._block_hasher = block_hasher
        self.hash_block_size = hash_block_size
        self.native_hasher = None
        if isinstance(block_hasher, BlockHasherCore) and type(block_hasher).__call__ is BlockHasherBase.__call__:
            self.native_hasher = block_hasher
        self.spec_token_ids = []

    @staticmethod
    def are_token_ids(list tokens not None):
        """Whether all are exact ints from 0 to ``MAX_TOKEN_ID``."""
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(tokens)):
            if not kvpool_is_token_id(<object>PyList_GET_ITEM(tokens, i)):
                return False
        return True

    @staticmethod
    def are_plain(request_id, max_tokens, priority, arrival_time, skip_reading_prefix_cache, cache_salt, session_id):
        """Whether these arguments of a request are what they are stored as, and in range."""
        return (
            kvpool_is_ascii(request_id)
            and PyLong_CheckExact(max_tokens) and max_tokens > 0
            and PyLong_CheckExact(priority)
            and (arrival_time is None or PyFloat_CheckExact(arrival_time) and isfinite(PyFloat_AS_DOUBLE(arrival_time)))
            and (skip_reading_prefix_cache is False or skip_reading_prefix_cache is True)
            and is_text_or_none(cache_salt)
            and is_text_or_none(session_id)
        )

    @property
    def num_tokens(self):
        """Number of tokens, prompt and output."""
        return PyList_GET_SIZE(self._all_token_ids)

    @property
    def num_output_tokens(self):
        """Number of output tokens so far."""
        return PyList_GET_SIZE(self._output_token_ids)

    @property
    def num_tokens_with_spec(self):
        """Number of tokens, the drafts in ``spec_token_ids`` included."""
        return PyList_GET_SIZE(self._all_token_ids) + <Py_ssize_t>len(self.spec_token_ids)

    cdef list current_hashes(self):
        """The hashes without those from the first block on in which a token changed."""
        cdef Py_ssize_t first = self._all_token_ids.first_changed
        if first != NOTHING_CHANGED:
            self._all_token_ids.first_changed = NOTHING_CHANGED
            # What a foreign hasher covers with a hash is unknown: all its hashes go.
            del self.hashes[(first // self.hash_block_size if self.hash_block_size > 0 else 0):]
            self._before_append = None
        return self.hashes

    @property
    def block_hashes(self):
        """A digest per full hash block, in token order; those of tokens that were changed by hand are gone."""
        return self.current_hashes()

    @block_hashes.setter
    def block_hashes(self, list block_hashes not None):
        self._all_token_ids.first_changed = NOTHING_CHANGED
        self._before_append = None
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
        """Add one output token or several, and the hashes of blocks that are full now. O(new tokens).

        Raises:
            TypeError: a token that is no integer.
            InvalidArgumentError: a token below 0 or above ``MAX_TOKEN_ID``. After any error, also one of the hasher,
                nothing has changed.
        """
        cdef list new = None
        cdef list hashes
        cdef object before = None
        cdef Py_ssize_t num_tokens, num_output_tokens, num_hashes
        if not kvpool_is_token_id(token_ids):
            new = to_token_ids(token_ids if hasattr(token_ids, "__iter__") else [token_ids], self.are_token_ids)
        hashes = self.current_hashes()
        num_tokens, num_hashes = PyList_GET_SIZE(self._all_token_ids), PyList_GET_SIZE(hashes)
        num_output_tokens = PyList_GET_SIZE(self._output_token_ids)
        if self.hash_block_size <= 0 and self._block_hasher is not None:
            before = num_tokens, num_hashes
        try:
            if new is None:
                PyList_Append(self._output_token_ids, token_ids)
                PyList_Append(self._all_token_ids, token_ids)
            else:
                self._output_token_ids.extend(new)
                list.extend(self._all_token_ids, new)
            self.refresh()
        except BaseException:
            cut_list(self._output_token_ids, num_output_tokens, PyList_GET_SIZE(self._output_token_ids), NULL)
            cut_list(self._all_token_ids, num_tokens, PyList_GET_SIZE(self._all_token_ids), NULL)
            cut_list(hashes, num_hashes, PyList_GET_SIZE(hashes), NULL)
            self.hashes = hashes
            raise
        self._before_append = before

    def update_block_hashes(self):
        """Bring ``block_hashes`` up to date: stale ones go, those of new full blocks come."""
        self.refresh()
