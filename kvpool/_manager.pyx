# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
# cython: embedsignature=True, freethreading_compatible=True
"""What a scheduler asks of a cache manager at every step, compiled, for the case that nearly every model is: one group of
full attention whose blocks are as long as the hashes'.

The state is that of ``FullAttentionManager``: its dicts of block tables and counts, and the pool. A call that is anything
but plain (events, metrics, external tokens, a hit that ends inside a block, drafts ...) goes on to the general code, which
finds the state as it would have left it.
"""
from cpython.dict cimport PyDict_GetItem, PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

from kvpool._allocator cimport incref, set_item
from kvpool._block cimport BlockHome, borrowed_handle, kvpool_lock_acquire, kvpool_lock_release, node_in, parse_digest
from kvpool._kvp cimport KVP_NONE, kvp_key_t, kvp_map_find_block, kvp_pool_find_prefix
from kvpool._prefix_cache cimport PrefixCache
from kvpool._request cimport RequestBase

from kvpool.request_status import RequestStatus

cdef enum:
    KEYS = 128  # keys looked up in one go

cdef object WAITING = RequestStatus.WAITING
cdef object PREEMPTED = RequestStatus.PREEMPTED


cdef class KVCacheManagerBase:
    """Hot half of ``KVCacheManager``; see there. ``bind_full_attention`` turns it on."""
    cdef PrefixCache pool
    cdef BlockHome home
    cdef object tables      # dict: request id -> list of blocks
    cdef object num_cached  # dict: request id -> leading blocks of the table that are cached
    cdef object partial_hits
    cdef object blocks_class
    cdef object no_blocks
    cdef Py_ssize_t block_size
    cdef Py_ssize_t longest
    cdef Py_ssize_t watermark
    cdef bint caches

    def bind_full_attention(self, PrefixCache pool not None, manager, blocks_class, no_blocks, Py_ssize_t max_model_len,
                            Py_ssize_t watermark_blocks):
        """Serves plain calls from here.

        Args:
            pool: the native pool of the manager.
            manager: a ``FullAttentionManager`` of group 0, with ``block_size`` equal to the hashes' where caching is on.
            blocks_class, no_blocks: ``KVCacheBlocks`` and its shared empty instance.
        """
        self.home = pool.the_home()
        self.tables = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.blocks_class = blocks_class
        self.no_blocks = no_blocks
        self.block_size = manager.block_size
        self.longest = max_model_len
        self.watermark = watermark_blocks
        self.caches = manager.enable_caching
        self.pool = pool

    # ---- allocation ----

    def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None,
                       num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False,
                       num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0, has_scheduled_reqs=True,
                       skip_zeroing_group_ids=()):
        cdef object blocks
        if (self.pool is not None and isinstance(request, RequestBase) and type(num_new_tokens) is int
                and not num_external_computed_tokens and not delay_cache_blocks and not num_encoder_tokens
                and type(num_lookahead_tokens) is int and type(reserved_blocks) is int
                and type(num_new_computed_tokens) is int):
            blocks = self.allocate(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
                                   num_lookahead_tokens, full_sequence_must_fit, reserved_blocks, has_scheduled_reqs)
            if blocks is not NotImplemented:
                return blocks
        return super().allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens,
            num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit,
            reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids,
        )

    def allocate_decode(self, requests):
        cdef list batch = list(requests)
        cdef list results
        cdef Py_ssize_t i
        cdef object blocks
        if self.pool is None or not self.have_hashes(batch):
            return super().allocate_decode(batch)
        results = []
        for i in range(PyList_GET_SIZE(batch)):
            blocks = self.allocate(<RequestBase>batch[i], 1, 0, None, 0, False, 0, True)
            if blocks is NotImplemented:
                blocks = super().allocate_slots(batch[i], 1)
            results.append(blocks)
        return results

    cdef bint have_hashes(self, list batch) except -1:
        """Whether every request is one of ours with the hashes to cache what its next token fills."""
        cdef RequestBase request
        cdef Py_ssize_t i, num_tokens
        for i in range(PyList_GET_SIZE(batch)):
            if not isinstance(<object>PyList_GET_ITEM(batch, i), RequestBase):
                return False
            request = <RequestBase>PyList_GET_ITEM(batch, i)
            num_tokens = min(request.num_computed_tokens + 1, PyList_GET_SIZE(request._all_token_ids))
            if self.caches and num_tokens // self.block_size > PyList_GET_SIZE(request.current_hashes()):
                return False
        return True

    cdef object allocate(self, RequestBase request, Py_ssize_t num_new_tokens, Py_ssize_t num_new_computed_tokens,
                         object new_computed_blocks, Py_ssize_t num_lookahead_tokens, bint full_sequence_must_fit,
                         Py_ssize_t reserved_blocks, bint has_scheduled_reqs):
        """``allocate_slots`` for plain arguments; NotImplemented, and nothing has changed, for all else."""
        cdef Py_ssize_t num_tokens = PyList_GET_SIZE(request._all_token_ids)
        cdef Py_ssize_t local = request.num_computed_tokens + num_new_computed_tokens
        cdef Py_ssize_t computed = min(local, self.longest)
        cdef Py_ssize_t num_slots = min(computed + num_new_tokens + num_lookahead_tokens, self.longest)
        cdef Py_ssize_t num_full = min(computed + num_new_tokens, num_tokens) // self.block_size
        cdef PyObject *found = PyDict_GetItem(self.tables, request.request_id)
        cdef list table = <list>found if found is not NULL else None
        cdef Py_ssize_t num_held = PyList_GET_SIZE(table) if table is not None else 0
        cdef Py_ssize_t num_required = (num_slots + self.block_size - 1) // self.block_size
        cdef Py_ssize_t num_new, num_hits = 0, num_kept = 0, num_free = self.home.pool.free_list.num_free
        cdef list hits = None
        if (num_new_tokens < 1 or num_lookahead_tokens < 0 or reserved_blocks < 0 or num_new_computed_tokens < 0
                or request.num_computed_tokens < 0 or (self.pool.is_observed() and
                (num_required > num_held or num_full > 0 and self.caches and self.cached_of(request) < num_full))):
            return NotImplemented
        if self.caches and num_full > PyList_GET_SIZE(request.current_hashes()):
            return NotImplemented
        if new_computed_blocks is not None and new_computed_blocks is not self.no_blocks:
            hits = self.usable_hits(request, new_computed_blocks, local, table)
            if hits is None:
                return NotImplemented
            num_hits = PyList_GET_SIZE(hits)
        elif num_new_computed_tokens != 0:
            return NotImplemented
        if self.watermark > 0 and has_scheduled_reqs:
            if type(request.status) is not RequestStatus:
                return NotImplemented
            if request.status is WAITING or request.status is PREEMPTED:
                num_kept = self.watermark
        # Hits that nobody uses leave the free list: they count as taken.
        cdef Py_ssize_t num_revived = self.count_free(hits) if num_hits > 0 else 0
        cdef Py_ssize_t whole = (min(num_tokens, self.longest) + self.block_size - 1) // self.block_size
        if full_sequence_must_fit and max(whole - num_hits - num_held, 0) + num_revived + num_kept > num_free:
            return None
        num_new = max(num_required - num_hits - num_held, 0)
        if num_new + num_revived + num_kept > num_free - reserved_blocks:
            return None
        return self.change(request, table, hits, num_new, num_full)

    cdef Py_ssize_t cached_of(self, RequestBase request) except -1:
        cdef PyObject *found = PyDict_GetItem(self.num_cached, request.request_id)
        return 0 if found is NULL else <Py_ssize_t><object>found

    cdef object change(self, RequestBase request, list table, list hits, Py_ssize_t num_new, Py_ssize_t num_full):
        cdef list new_blocks = None
        cdef Py_ssize_t num_cached
        if hits is not None:
            self.pool.touch(hits)
            table = hits[:]
            PyDict_SetItem(self.tables, request.request_id, table)
            PyDict_SetItem(self.num_cached, request.request_id, PyList_GET_SIZE(table))
        if num_new > 0:
            new_blocks = self.pool.take(<int32_t>num_new, False)
            if table is None:
                table = []
                PyDict_SetItem(self.tables, request.request_id, table)
            table.extend(new_blocks)
        if self.caches and num_full > 0:
            num_cached = self.cached_of(request)
            if num_full > num_cached:
                self.pool.cache_range(table, request.current_hashes(), 1, num_cached, num_full - num_cached,
                                      self.block_size, 0, None)
                PyDict_SetItem(self.num_cached, request.request_id, num_full)
        return self.no_blocks if new_blocks is None else self.blocks_class((new_blocks,))

    # ---- hits ----

    cdef list usable_hits(self, RequestBase request, object new_computed_blocks, Py_ssize_t local, list table):
        """The blocks of a hit that a request without blocks may adopt as it is: whole blocks, each still carrying the
        request's own hash. None sends the call to the general code, which says what is wrong, if anything is."""
        cdef tuple groups = new_computed_blocks.blocks
        cdef list hashes = request.current_hashes()
        cdef list hits
        cdef kvp_key_t key
        cdef Py_ssize_t i, n
        cdef int32_t node
        if (not self.caches or table or len(groups) != 1 or type(groups[0]) is not list
                or request.request_id in self.num_cached):
            return None
        hits = <list>groups[0]
        n = PyList_GET_SIZE(hits)
        if local != n * self.block_size or n > PyList_GET_SIZE(hashes):
            return None
        for i in range(n):
            node = node_in(self.home, PyList_GET_ITEM(hits, i))
            if node <= 0:
                return None
            parse_digest(<object>PyList_GET_ITEM(hashes, i), 0, &key)
            if kvp_map_find_block(&self.home.pool.map, &key, node) == KVP_NONE:
                return None
        return hits

    cdef Py_ssize_t count_free(self, list hits) noexcept:
        cdef Py_ssize_t i, count = 0
        for i in range(PyList_GET_SIZE(hits)):
            count += self.home.pool.ref_cnt[node_in(self.home, PyList_GET_ITEM(hits, i))] == 0
        return count

    def get_computed_blocks(self, request):
        cdef RequestBase ours
        cdef list hashes, hits
        cdef Py_ssize_t n
        if (self.pool is None or not self.caches or not isinstance(request, RequestBase)
                or request.skip_reading_prefix_cache):
            return super().get_computed_blocks(request)
        ours = <RequestBase>request
        hashes = ours.current_hashes()
        n = min(PyList_GET_SIZE(hashes), (PyList_GET_SIZE(ours._all_token_ids) - 1) // self.block_size)
        hits = self.find_prefix(hashes, n) if n > 0 else None
        if not hits:
            return self.no_blocks, 0
        return self.blocks_class((hits,)), PyList_GET_SIZE(hits) * self.block_size

    cdef list find_prefix(self, list hashes, Py_ssize_t n):
        cdef int32_t ids[KEYS]
        cdef kvp_key_t keys[KEYS]
        cdef list hits = []
        cdef Py_ssize_t done = 0, i, size
        cdef int64_t found
        while done < n:
            size = min(n - done, KEYS)
            for i in range(size):
                parse_digest(<object>PyList_GET_ITEM(hashes, done + i), 0, &keys[i])
            kvpool_lock_acquire(&self.home.lock)
            found = kvp_pool_find_prefix(self.home.pool, keys, size, ids)
            kvpool_lock_release(&self.home.lock)
            hits.extend(self.views_of(ids, found))
            done += found
            if found < size:
                break
        return hits

    cdef list views_of(self, const int32_t *ids, int64_t n):
        cdef list views = PyList_New(n)
        cdef PyObject *view
        cdef int64_t i
        for i in range(n):
            view = borrowed_handle(self.home, ids[i])
            incref(view)
            set_item(views, i, view)
        return views

    # ---- giving back ----

    def free(self, request):
        cdef list table
        if self.pool is None:
            super().free(request)
            return
        request_id = request.request_id
        self.num_cached.pop(request_id, None)
        self.partial_hits.pop(request_id, None)
        table = self.tables.pop(request_id, None)
        if table:
            self.pool.free_reversed(table)
