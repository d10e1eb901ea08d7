# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
# cython: embedsignature=True, freethreading_compatible=True
"""What a scheduler asks of a cache manager at every step, compiled: all of it for the case that nearly every model is, one
group of full attention whose blocks are as long as the hashes'; for groups of full attention, windows and stretches
together, the step that changes nothing, which nearly every decode step is.

The state is that of the managers: their dicts of block tables and counts, and the pool. A call that is anything but plain
(events, metrics, external tokens, a hit that ends inside a block, drafts ...) goes on to the general code, which finds the
state as it would have left it.
"""
from cpython.dict cimport PyDict_GetItem, PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from kvpool._allocator cimport too_few_blocks
from kvpool._batch cimport SMALL, ids_of_size, release_batch
from kvpool._block cimport BlockHome, kvpool_lock_acquire, kvpool_lock_release, parse_digest
from kvpool._block_sequence cimport BlockSequence, new_sequence
from kvpool._kvp cimport (
    KVP_NULL_BLOCK, KVP_OK, KVP_PLACE_BY_HASH, kvp_key_t, kvp_pool_allocate, kvp_pool_free,
    kvp_pool_is_reachable, kvp_status_t,
)
from kvpool._prefix_cache cimport PrefixCache
from kvpool._request cimport RequestBase

from kvpool.request_status import RequestStatus

cdef object WAITING = RequestStatus.WAITING
cdef object PREEMPTED = RequestStatus.PREEMPTED
cdef object RUNNING = RequestStatus.RUNNING


cdef class GroupTables:
    """The state of one group's manager, and what it needs to tell whether a step leaves the group as it is."""
    cdef object tables        # dicts by request id: BlockSequence,
    cdef object num_cached    # leading blocks of the table that are cached,
    cdef object partial_hits  # a hit that ends inside a block
    cdef Py_ssize_t block_size
    cdef Py_ssize_t window   # tokens that a token attends to, those retained in addition with them; 0: no window
    cdef Py_ssize_t stretch  # tokens of a stretch of chunked local attention; 0: none
    cdef Py_ssize_t aligned  # tokens; blocks are cached up to a multiple of it
    cdef bint caches

    def __init__(self, manager, window, stretch, aligned):
        self.tables = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.block_size = manager.block_size
        self.window = window
        self.stretch = stretch
        self.aligned = aligned
        self.caches = manager.enable_caching and manager.kv_cache_spec.prefix_cacheable

    cdef bint stays(self, object request_id, Py_ssize_t num_slots, Py_ssize_t num_read, Py_ssize_t num_to_cache) except -1:
        """Whether the request has the blocks for ``num_slots`` tokens, none of them falls out of its window once
        ``num_read`` tokens are computed, and the first ``num_to_cache`` tokens fill none that is not cached."""
        cdef PyObject *found = PyDict_GetItem(self.tables, request_id)
        cdef PyObject *cached
        cdef BlockSequence table
        cdef Py_ssize_t num_skipped = 0
        if found is NULL:
            return False
        table = <BlockSequence?><object>found
        if table.length * self.block_size < num_slots or PyDict_GetItem(self.partial_hits, request_id) is not NULL:
            return False
        if self.window > 0:
            num_skipped = (num_read - self.window + 1) // self.block_size if num_read >= self.window else 0
        elif self.stretch > 0:
            num_skipped = num_read // self.stretch * self.stretch // self.block_size
        num_skipped = min(num_skipped, table.length)
        if num_skipped > 0 and table.ids[num_skipped - 1] != KVP_NULL_BLOCK:
            return False
        if not self.caches:
            return True
        cached = PyDict_GetItem(self.num_cached, request_id)
        return (cached is not NULL and
                <Py_ssize_t><object>cached >= num_to_cache // self.aligned * self.aligned // self.block_size)


cdef class KVCacheManagerBase:
    """Hot half of ``KVCacheManager``; see there. ``bind_full_attention`` or ``bind_groups`` turn it on."""
    cdef PrefixCache pool
    cdef list groups        # of GroupTables
    cdef Py_ssize_t hash_size
    cdef BlockHome home
    cdef object tables      # dict: request id -> BlockSequence
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
        self.block_size = self.hash_size = manager.block_size
        self.longest = max_model_len
        self.watermark = watermark_blocks
        self.caches = manager.enable_caching
        self.pool = pool

    def bind_groups(self, PrefixCache pool not None, groups, no_blocks, Py_ssize_t max_model_len,
                    Py_ssize_t watermark_blocks, bint enable_caching, Py_ssize_t hash_block_size):
        """Serves the steps that change nothing from here.

        Args:
            groups: of every group the manager, its window or 0, its stretch or 0, and the tokens to a multiple of which
                it caches (1 where that is not known: some steps more go to the general code).
        """
        self.home = pool.the_home()
        self.groups = [GroupTables(*group) for group in groups]
        self.no_blocks = no_blocks
        self.longest = max_model_len
        self.watermark = watermark_blocks
        self.caches = enable_caching
        self.hash_size = hash_block_size

    # ---- allocation ----

    cdef bint changes_nothing(self, RequestBase request, Py_ssize_t num_new_tokens, Py_ssize_t num_lookahead_tokens) except -1:
        """Whether a running request has all that its next tokens need, in every group."""
        cdef Py_ssize_t computed = min(request.num_computed_tokens, self.longest)
        cdef Py_ssize_t num_slots = min(computed + num_new_tokens + num_lookahead_tokens, self.longest)
        cdef Py_ssize_t num_to_cache = min(computed + num_new_tokens, PyList_GET_SIZE(request._all_token_ids))
        cdef Py_ssize_t i
        if (num_new_tokens < 1 or num_lookahead_tokens < 0 or request.num_computed_tokens < 0
                or self.watermark > 0 and request.status is not RUNNING
                or self.caches and num_to_cache // self.hash_size > PyList_GET_SIZE(request.current_hashes())):
            return False
        for i in range(PyList_GET_SIZE(self.groups)):
            if not (<GroupTables>PyList_GET_ITEM(self.groups, i)).stays(
                    request.request_id, num_slots, computed - request.num_in_flight_tokens, num_to_cache):
                return False
        return True

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
        elif (self.groups is not None and isinstance(request, RequestBase) and type(num_new_tokens) is int
                and num_new_computed_tokens == 0 and (new_computed_blocks is None or new_computed_blocks is self.no_blocks)
                and type(num_lookahead_tokens) is int and not num_external_computed_tokens and not num_encoder_tokens
                and not delay_cache_blocks and not full_sequence_must_fit and not reserved_blocks
                and self.changes_nothing(request, num_new_tokens, num_lookahead_tokens)):
            return self.no_blocks
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
        if (self.pool is None and self.groups is None) or not self.have_hashes(batch):
            return super().allocate_decode(batch)
        results = []
        for i in range(PyList_GET_SIZE(batch)):
            if self.pool is not None:
                blocks = self.allocate(<RequestBase>batch[i], 1, 0, None, 0, False, 0, True)
            else:
                blocks = self.no_blocks if self.changes_nothing(<RequestBase>batch[i], 1, 0) else NotImplemented
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
            if self.caches and num_tokens // self.hash_size > PyList_GET_SIZE(request.current_hashes()):
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
        cdef BlockSequence table = self.table_of(request)
        cdef Py_ssize_t num_held = table.length if table is not None else 0
        cdef Py_ssize_t num_required = (num_slots + self.block_size - 1) // self.block_size
        cdef Py_ssize_t num_new, num_hits = 0, num_kept = 0, num_free = self.home.pool.free_list.num_free
        cdef BlockSequence hits = None
        if (num_new_tokens < 1 or num_lookahead_tokens < 0 or reserved_blocks < 0 or num_new_computed_tokens < 0
                or request.num_computed_tokens < 0 or (self.pool.is_observed() and
                (num_required > num_held or num_full > 0 and self.caches and self.cached_of(request) < num_full))):
            return NotImplemented
        if self.caches and num_full > PyList_GET_SIZE(request.current_hashes()):
            return NotImplemented
        if new_computed_blocks is not None and new_computed_blocks is not self.no_blocks:
            hits = self.usable_hits(request, new_computed_blocks, local, num_held)
            if hits is None:
                return NotImplemented
            num_hits = hits.length
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

    cdef BlockSequence table_of(self, RequestBase request):
        cdef PyObject *found = PyDict_GetItem(self.tables, request.request_id)
        return <BlockSequence?><object>found if found is not NULL else None

    cdef Py_ssize_t cached_of(self, RequestBase request) except -1:
        cdef PyObject *found = PyDict_GetItem(self.num_cached, request.request_id)
        return 0 if found is NULL else <Py_ssize_t><object>found

    cdef object change(self, RequestBase request, BlockSequence table, BlockSequence hits, Py_ssize_t num_new,
                       Py_ssize_t num_full):
        """Memory first: what can fail comes before the first change."""
        cdef BlockSequence new_blocks = None
        cdef Py_ssize_t num_cached
        cdef bint is_new = table is None or hits is not None
        if is_new and (hits is not None or num_new > 0):
            table = new_sequence(self.home, num_new if hits is None else hits.length + num_new)
        if num_new > 0:
            table.reserve(num_new)
            new_blocks = new_sequence(self.home, num_new)
        if hits is not None:
            self.pool.touch_nodes(hits.ids, hits.length, "touch")
            memcpy(table.ids, hits.ids, <size_t>hits.length * sizeof(int32_t))
            table.length = hits.length
            PyDict_SetItem(self.num_cached, request.request_id, hits.length)
        if is_new and table is not None:
            PyDict_SetItem(self.tables, request.request_id, table)
        if new_blocks is not None:
            self.take(new_blocks, num_new)
            memcpy(table.ids + table.length, new_blocks.ids, <size_t>num_new * sizeof(int32_t))
            table.length += num_new
        if self.caches and num_full > 0:
            num_cached = self.cached_of(request)
            if num_full > num_cached:
                self.pool.cache_range(table, request.current_hashes(), 1, num_cached, num_full - num_cached,
                                      self.block_size, 0, None)
                PyDict_SetItem(self.num_cached, request.request_id, num_full)
        return self.no_blocks if new_blocks is None else self.blocks_class((new_blocks,))

    cdef int take(self, BlockSequence blocks, Py_ssize_t n) except -1:
        kvpool_lock_acquire(&self.home.lock)
        cdef kvp_status_t status = kvp_pool_allocate(self.home.pool, <int32_t>n, blocks.ids)
        kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            too_few_blocks(<int32_t>n)
        blocks.length = n
        return 0

    # ---- hits ----

    cdef BlockSequence usable_hits(self, RequestBase request, object new_computed_blocks, Py_ssize_t local,
                                   Py_ssize_t num_held):
        """The blocks of a hit that a request without blocks may adopt as it is: whole blocks, each still carrying the
        request's own hash. None sends the call to the general code, which says what is wrong, if anything is."""
        cdef tuple groups = new_computed_blocks.blocks
        cdef list hashes = request.current_hashes()
        cdef BlockSequence hits
        cdef kvp_key_t key
        cdef Py_ssize_t i
        if (not self.caches or num_held > 0 or len(groups) != 1 or type(groups[0]) is not BlockSequence
                or request.request_id in self.num_cached):
            return None
        hits = <BlockSequence>groups[0]
        if (hits.home is not self.home or hits.length == 0 or local != hits.length * self.block_size
                or hits.length > PyList_GET_SIZE(hashes)):
            return None
        for i in range(hits.length):
            parse_digest(<object>PyList_GET_ITEM(hashes, i), 0, &key)
            if hits.ids[i] <= KVP_NULL_BLOCK or not kvp_pool_is_reachable(self.home.pool, &key, hits.ids[i]):
                return None
        return hits

    cdef Py_ssize_t count_free(self, BlockSequence hits) noexcept:
        cdef Py_ssize_t i, count = 0
        for i in range(hits.length):
            count += self.home.pool.ref_cnt[hits.ids[i]] == 0
        return count

    def get_computed_blocks(self, request):
        cdef RequestBase ours
        cdef list hashes
        cdef BlockSequence hits
        cdef Py_ssize_t n
        if (self.pool is None or not self.caches or not isinstance(request, RequestBase)
                or request.skip_reading_prefix_cache):
            return super().get_computed_blocks(request)
        ours = <RequestBase>request
        hashes = ours.current_hashes()
        n = min(PyList_GET_SIZE(hashes), (PyList_GET_SIZE(ours._all_token_ids) - 1) // self.block_size)
        hits = self.find_prefix(hashes, n) if n > 0 else None
        if hits is None:
            return self.no_blocks, 0
        return self.blocks_class((hits,)), hits.length * self.block_size

    cdef BlockSequence find_prefix(self, list hashes, Py_ssize_t n):
        cdef int32_t small[SMALL]
        cdef int32_t *ids = ids_of_size(n, small)
        cdef BlockSequence hits = None
        cdef Py_ssize_t found
        try:
            found = self.pool.find_prefix(hashes, n, 0, ids)
            if found > 0:
                hits = new_sequence(self.home, found)
                memcpy(hits.ids, ids, <size_t>found * sizeof(int32_t))
                hits.length = found
        finally:
            release_batch(ids, small)
        return hits

    # ---- giving back ----

    def free(self, request):
        cdef BlockSequence table
        if self.pool is None:
            super().free(request)
            return
        request_id = request.request_id
        self.num_cached.pop(request_id, None)
        self.partial_hits.pop(request_id, None)
        table = self.tables.pop(request_id, None)
        if table is not None and table.length > 0:
            self.free_reversed(table)

    cdef int free_reversed(self, BlockSequence table) except -1:
        """The last block first, without turning the table round: somebody may hold it."""
        cdef int32_t small[SMALL]
        cdef int32_t *ids = ids_of_size(table.length, small)
        cdef kvp_status_t status
        cdef Py_ssize_t i, last = table.length - 1
        for i in range(table.length):
            ids[last - i] = table.ids[i]
        kvpool_lock_acquire(&self.home.lock)
        status = kvp_pool_free(self.home.pool, ids, table.length, KVP_PLACE_BY_HASH, NULL)
        kvpool_lock_release(&self.home.lock)
        release_batch(ids, small)
        if status != KVP_OK:
            self.pool.free_blocks(table[::-1])  # says what is wrong, or skips it
        return 0
