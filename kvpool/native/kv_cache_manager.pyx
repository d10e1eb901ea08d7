"""The calls of ``KVCacheManager`` that a scheduler makes at every step, compiled.

Two cases are served here. With one group of full attention whose blocks are as long as the hashes' (nearly every model),
allocation, look-up and free. With several groups of full attention, sliding windows and chunked local attention, the step
that finds every slot it needs in the tables (nearly every decode step).

The state stays in the managers' dicts of block tables and counts, and in the pool. Any other call (events, metrics,
external tokens, a hit that ends inside a block, drafts ...) goes on to ``kvpool.cache.manager``, which finds the state as
it would have left it itself.
"""
cimport cython
from cpython.dict cimport PyDict_GetItemWithError, PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy

from kvpool.native.allocator cimport too_few_blocks
from kvpool.native.batch cimport (
    MOST, NOT_PLAIN, SMALL, ids_of_size, is_plain_number, keys_of_size, num_skipped_tokens, plain_number, release_batch,
)
from kvpool.native.block cimport BlockHome, kvpool_lock_acquire, kvpool_lock_release, num_free_of, parse_digest
from kvpool.native.block_sequence cimport BlockSequence, new_sequence
from kvpool.native.kvp cimport (
    KVP_CACHE_PROMOTE, KVP_NULL_BLOCK, KVP_OK, KVP_PLACE_BY_HASH, KVP_PLACE_HEAD, kvp_key_t, kvp_map_reserve,
    kvp_pool_allocate, kvp_pool_drop_hashes, kvp_pool_free, kvp_pool_is_reachable, kvp_status_t,
)
from kvpool.native.memory cimport kvpool_share_memory
from kvpool.native.prefix_cache cimport PrefixCache
from kvpool.native.request cimport RequestCore

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.requests.status import RequestStatus

kvpool_share_memory()

__all__ = ["KVCacheManagerCore"]

cdef object WAITING = RequestStatus.WAITING
cdef object PREEMPTED = RequestStatus.PREEMPTED
cdef object RUNNING = RequestStatus.RUNNING


cdef inline bint is_zero(object number) noexcept:
    return PyLong_CheckExact(number) and not number


cdef class GroupTables:
    """The state of one group's manager, and what it needs to tell whether a step leaves the group as it is."""
    cdef object tables        # dicts by request id: BlockSequence,
    cdef object num_cached    # leading blocks of the table that are cached,
    cdef object partial_hits  # a hit that ends inside a block
    cdef Py_ssize_t block_size
    cdef Py_ssize_t window   # tokens that a token attends to, those retained in addition with them; 0: no window
    cdef Py_ssize_t chunk_size  # tokens of a chunk of local attention; 0: none
    cdef Py_ssize_t aligned  # tokens; blocks are cached up to a multiple of it
    cdef bint caches

    def __init__(self, manager, window, chunk_size, aligned):
        self.tables = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.block_size = manager.block_size
        self.window = min(window, INT32_MAX)
        self.chunk_size = min(chunk_size, INT32_MAX)
        self.aligned = min(aligned, INT32_MAX)
        self.caches = manager.enable_caching and manager.kv_cache_spec.prefix_cacheable

    cdef bint stays(self, object request_id, Py_ssize_t num_slots, Py_ssize_t num_read, Py_ssize_t num_to_cache) except -1:
        """Whether the request has the blocks for ``num_slots`` tokens, none of them falls out of its window once
        ``num_read`` tokens are computed, and the first ``num_to_cache`` tokens fill none that is not cached."""
        cdef PyObject *found = PyDict_GetItemWithError(self.tables, request_id)
        cdef PyObject *cached
        cdef BlockSequence table
        cdef Py_ssize_t num_skipped
        if found is NULL:
            return False
        table = <BlockSequence?><object>found
        if (PyDict_GetItemWithError(self.partial_hits, request_id) is not NULL
                or table.length * self.block_size < num_slots):
            return False
        num_skipped = num_skipped_tokens(num_read, self.window, self.chunk_size) // self.block_size
        num_skipped = min(num_skipped, table.length)
        if num_skipped > 0 and table.ids[num_skipped - 1] != KVP_NULL_BLOCK:
            return False
        if not self.caches:
            return True
        cached = PyDict_GetItemWithError(self.num_cached, request_id)
        return (cached is not NULL and
                plain_number(<object>cached) >= num_to_cache // self.aligned * self.aligned // self.block_size)


@cython.auto_pickle(False)
cdef class KVCacheManagerCore:
    """The compiled calls of ``KVCacheManager``; ``_bind_full_attention`` or ``_bind_groups`` turn them on."""
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

    def _unbind(self):
        """From now on every call goes to the general code."""
        self.pool = None
        self.groups = None

    def _bind_full_attention(self, PrefixCache pool not None, manager, blocks_class, no_blocks, max_model_len,
                             watermark_blocks):
        """Serves plain calls from here, but for blocks of a size that no number of tokens here reaches.

        Args:
            pool: the native pool of the manager.
            manager: a ``FullAttentionManager`` of group 0, with ``block_size`` equal to the hashes' where caching is on.
            blocks_class, no_blocks: ``KVCacheBlocks`` and its shared empty instance.
        """
        if not 0 < manager.block_size <= MOST:
            return
        self.home = pool.checked_home()
        self.tables = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.blocks_class = blocks_class
        self.no_blocks = no_blocks
        self.block_size = self.hash_size = manager.block_size
        self.longest = min(max_model_len, INT32_MAX)
        self.watermark = min(watermark_blocks, INT32_MAX)
        self.caches = manager.enable_caching
        self.pool = pool

    def _bind_groups(self, PrefixCache pool not None, groups, no_blocks, max_model_len, watermark_blocks,
                     bint enable_caching, hash_block_size):
        """Serves the steps that change nothing from here.

        Args:
            groups: of every group the manager, its window or 0, its chunk size or 0, and the tokens to a multiple of which it
                caches (1 where that is not known: some more steps go to the general code).
        """
        if not all(0 < size <= MOST for size in (hash_block_size, *(group[0].block_size for group in groups))):
            return
        self.home = pool.checked_home()
        self.no_blocks = no_blocks
        self.longest = min(max_model_len, INT32_MAX)
        self.watermark = min(watermark_blocks, INT32_MAX)
        self.caches = enable_caching
        self.hash_size = hash_block_size
        self.groups = [GroupTables(*group) for group in groups]

    # ---- allocation ----

    cdef bint changes_nothing(self, RequestCore request, Py_ssize_t num_new_tokens, Py_ssize_t num_lookahead_tokens) except -1:
        """Whether a running request has all that its next tokens need, in every group."""
        cdef Py_ssize_t computed, num_slots, num_to_cache, in_flight = request.num_in_flight_tokens
        cdef GroupTables group
        if (num_new_tokens < 1 or num_lookahead_tokens < 0 or not is_plain_number(request.num_computed_tokens)
                or not is_plain_number(in_flight)
                or self.watermark > 0 and request.status is not RUNNING):
            return False
        computed = min(request.num_computed_tokens, self.longest)
        num_slots = min(computed + num_new_tokens + num_lookahead_tokens, self.longest)
        num_to_cache = min(computed + num_new_tokens, PyList_GET_SIZE(request._all_token_ids))
        if self.caches and num_to_cache // self.hash_size > PyList_GET_SIZE(request.current_hashes()):
            return False
        for group in self.groups:
            if not group.stays(request.request_id, num_slots, computed - in_flight, num_to_cache):
                return False
        return True

    def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None,
                       num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False,
                       num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0, has_scheduled_reqs=True,
                       skip_zeroing_group_ids=()):
        """Give the request slots for its next tokens, and publish the blocks that these fill.

        Args:
            request: its ``num_computed_tokens`` are those before this call.
            num_new_tokens: tokens to be computed, drafts included.
            num_new_computed_tokens, new_computed_blocks: the hit, as from ``get_computed_blocks``; only for a request
                that has no blocks yet.
            num_lookahead_tokens: slots beyond the new tokens, for drafts to come.
            num_external_computed_tokens: tokens after the hit whose contents come from elsewhere.
            delay_cache_blocks: publish nothing now; ``cache_blocks`` does when the contents have come.
            num_encoder_tokens: length of the encoder's input, for cross-attention groups.
            full_sequence_must_fit: None unless the free blocks suffice for all of ``request.num_tokens``.
            reserved_blocks: free blocks that must be left over.
            has_scheduled_reqs: whether others run in this step, so that the watermark counts for a request that does
                not run yet.
            skip_zeroing_group_ids: groups whose external blocks are not listed in ``take_new_block_ids``.

        Returns:
            The new blocks per group, without the hit; None if too few blocks are free. Then nothing has changed but
            one thing, as in vLLM: blocks of this request that no token will attend to any more are free.

        Raises:
            InvalidArgumentError: nothing to allocate, a negative number, computed blocks with caching off or for a
                request that has blocks, more computed tokens than it has or can have, fewer block hashes than tokens,
                full blocks of tokens beyond ``max_model_len`` to publish. Nothing has changed.
            BlockStateError: with ``verify_hits``, a block of the hit was given away since the lookup. Nothing has
                changed; look up again. More tokens are computed than a state reaches that is to be copied.
            TypeError: a number that is no integer. Nothing has changed.
            NoFreeBlocksError: the request's counts don't go with its tables. Nothing has changed, as for None.

        O(new blocks), and for the first call O(blocks of the hit).
        """
        cdef object blocks
        cdef Py_ssize_t num_new = plain_number(num_new_tokens)
        cdef Py_ssize_t num_lookahead = plain_number(num_lookahead_tokens)
        cdef Py_ssize_t num_hit = plain_number(num_new_computed_tokens)
        cdef Py_ssize_t num_reserved = plain_number(reserved_blocks)
        if num_new < 1 or num_lookahead < 0 or num_hit < 0 or num_reserved < 0 or not isinstance(request, RequestCore):
            pass
        elif self.pool is not None:
            if (is_zero(num_external_computed_tokens) and not delay_cache_blocks and is_zero(num_encoder_tokens)):
                blocks = self.allocate(request, num_new, num_hit, new_computed_blocks, num_lookahead,
                                       full_sequence_must_fit, num_reserved, has_scheduled_reqs)
                if blocks is not NotImplemented:
                    return blocks
        elif (self.groups is not None and num_hit == num_reserved == 0
                and (new_computed_blocks is None or new_computed_blocks is self.no_blocks)
                and is_zero(num_external_computed_tokens) and is_zero(num_encoder_tokens) and not delay_cache_blocks
                and not full_sequence_must_fit and self.changes_nothing(request, num_new, num_lookahead)):
            return self.no_blocks
        return super().allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens,
            num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit,
            reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids,
        )

    def allocate_decode(self, requests):
        """One new token for each of the requests: ``[allocate_slots(request, 1) for request in requests]``.

        Returns:
            Per request the new blocks, mostly none, or None where too few blocks were free. Later requests may fit
            where an earlier one did not.

        Raises:
            InvalidArgumentError: a negative number of computed tokens, fewer block hashes than tokens, a full block of
                tokens beyond ``max_model_len`` to publish. Nothing has changed for any of the requests.
            BlockStateError: see ``allocate_slots``. Nothing has changed for any of the requests.
        """
        cdef list batch = list(requests)
        cdef list results
        cdef Py_ssize_t i
        cdef object blocks
        if (self.pool is None and self.groups is None) or not self.have_hashes(batch):
            return super().allocate_decode(batch)
        results = []
        for i in range(PyList_GET_SIZE(batch)):
            if self.pool is not None:
                blocks = self.allocate(<RequestCore>batch[i], 1, 0, None, 0, False, 0, True)
            else:
                blocks = self.no_blocks if self.changes_nothing(<RequestCore>batch[i], 1, 0) else NotImplemented
            if blocks is NotImplemented:
                blocks = super().allocate_slots(batch[i], 1)
            results.append(blocks)
        return results

    cdef bint have_hashes(self, list batch) except -1:
        """Whether every request is one of ours, with a next token that has a slot and the hashes to cache what that fills."""
        cdef RequestCore request
        cdef Py_ssize_t num_tokens
        for item in batch:
            if not isinstance(item, RequestCore):
                return False
            request = <RequestCore>item
            num_tokens = min(min(request.num_computed_tokens, self.longest) + 1, PyList_GET_SIZE(request._all_token_ids))
            if num_tokens > self.longest or request.num_computed_tokens < 0:
                return False
            if self.caches and num_tokens // self.hash_size > PyList_GET_SIZE(request.current_hashes()):
                return False
        return True

    cdef object allocate(self, RequestCore request, Py_ssize_t num_new_tokens, Py_ssize_t num_new_computed_tokens,
                         object new_computed_blocks, Py_ssize_t num_lookahead_tokens, bint full_sequence_must_fit,
                         Py_ssize_t reserved_blocks, bint has_scheduled_reqs):
        """``allocate_slots`` for plain numbers; NotImplemented, and nothing has changed, for all else.

        What can run code of the caller (an attribute of foreign blocks, a truth value, ids that are compared) comes first;
        then all is read, and from there on the state is this call's alone until it is changed.
        """
        cdef Py_ssize_t num_tokens, local, computed, num_slots, num_full, num_required, num_held, num_cached
        cdef Py_ssize_t num_new, num_hits = 0, num_kept = 0, num_free
        cdef BlockSequence table, hits = None
        cdef list hashes
        if not is_plain_number(request.num_computed_tokens):
            return NotImplemented
        local = request.num_computed_tokens + num_new_computed_tokens
        if new_computed_blocks is not None and new_computed_blocks is not self.no_blocks:
            hits = self.hits_of(new_computed_blocks)
            if hits is None:
                return NotImplemented
        elif num_new_computed_tokens != 0:
            return NotImplemented
        if self.watermark > 0 and has_scheduled_reqs:
            if type(request.status) is not RequestStatus:
                return NotImplemented
            if request.status is WAITING or request.status is PREEMPTED:
                num_kept = self.watermark
        hashes = request.current_hashes()
        num_cached = self.cached_of(request)
        table = self.table_of(request)
        num_held = table.length if table is not None else 0
        if num_cached > num_held or hits is not None and not self.are_usable(hits, hashes, local, num_held, num_cached):
            return NotImplemented
        num_hits = hits.length if hits is not None else 0
        num_tokens = PyList_GET_SIZE(request._all_token_ids)
        computed = min(local, self.longest)
        num_slots = min(computed + num_new_tokens + num_lookahead_tokens, self.longest)
        num_full = min(computed + num_new_tokens, num_tokens) // self.block_size
        num_required = (num_slots + self.block_size - 1) // self.block_size
        num_free = num_free_of(self.home)
        if self.pool.is_observed() and (num_required > num_held or self.caches and max(num_cached, 0) < num_full):
            return NotImplemented
        if self.caches and (num_full > PyList_GET_SIZE(hashes) or num_full > max(num_required, num_held + num_hits)):
            return NotImplemented
        # Hits that nobody uses leave the free list: they count as taken.
        cdef Py_ssize_t num_revived = self.count_free(hits) if num_hits > 0 else 0
        cdef Py_ssize_t whole = (min(num_tokens, self.longest) + self.block_size - 1) // self.block_size
        if full_sequence_must_fit and max(whole - num_hits - num_held, 0) + num_revived + num_kept > num_free:
            return None
        num_new = max(num_required - num_hits - num_held, 0)
        if num_new + num_revived + num_kept > num_free - reserved_blocks:
            return None
        if num_new == 0 and hits is None and (not self.caches or num_full <= max(num_cached, 0)):
            return self.no_blocks
        return self.change(request, table, hits, hashes, num_new, max(num_cached, 0), num_full)

    cdef BlockSequence table_of(self, RequestCore request):
        cdef PyObject *found = PyDict_GetItemWithError(self.tables, request.request_id)
        cdef BlockSequence table
        if found is NULL:
            return None
        table = <BlockSequence?><object>found
        if table.home is not self.home:
            raise BlockStateError(f"the table of request {request.request_id!r} is of another pool")
        return table

    cdef Py_ssize_t cached_of(self, RequestCore request) except -2:
        """-1: the request is new."""
        cdef PyObject *found = PyDict_GetItemWithError(self.num_cached, request.request_id)
        cdef Py_ssize_t num_cached
        if found is NULL:
            return -1
        num_cached = plain_number(<object>found)
        if num_cached == NOT_PLAIN:
            raise InvalidArgumentError(f"request {request.request_id!r} can't have {<object>found!r} cached blocks")
        return num_cached

    cdef object change(self, RequestCore request, BlockSequence table, BlockSequence hits, list hashes,
                       Py_ssize_t num_new, Py_ssize_t num_cached, Py_ssize_t num_full):
        """What can fail comes before the first change: memory, then hashes. The dicts last: there ids are compared."""
        cdef BlockSequence new_blocks = None
        cdef kvp_key_t few[SMALL]
        cdef kvp_key_t *keys = few
        cdef Py_ssize_t i, num_before, num_published = 0
        cdef bint is_new = table is None or hits is not None
        if is_new and (hits is not None or num_new > 0):
            table = new_sequence(self.home, num_new if hits is None else hits.length + num_new)
        if num_new > 0:
            table.reserve(num_new)
            new_blocks = new_sequence(self.home, num_new)
        if hits is not None:
            num_cached = hits.length
        if self.caches and num_full > num_cached:
            num_published = num_full - num_cached
            num_before = hits.length if hits is not None else 0 if table is None else table.length
            if num_full > PyList_GET_SIZE(hashes) or num_full > num_before + num_new:
                raise InvalidArgumentError(f"{num_full} blocks are to be published of {num_before + num_new}")
        try:
            if num_published > 0:
                keys = keys_of_size(num_published, few)
                self.make_room_in_map(num_published)
                for i in range(num_published):
                    parse_digest(<object>PyList_GET_ITEM(hashes, num_cached + i), 0, &keys[i])
            if hits is not None:
                self.pool.touch_nodes(hits.ids, hits.length, "touch")
                memcpy(table.ids, hits.ids, <size_t>hits.length * sizeof(int32_t))
                table.length = hits.length
            if new_blocks is not None:
                self.take(new_blocks, num_new)
                memcpy(table.ids + table.length, new_blocks.ids, <size_t>num_new * sizeof(int32_t))
                table.length += num_new
            if num_published > 0:
                self.publish(table, hits, keys, num_new, num_cached, num_published)
        finally:
            release_batch(keys, few)
        if is_new and table is not None:
            self.keep(request, table, num_cached, num_cached + num_published)
        if num_published > 0:
            PyDict_SetItem(self.num_cached, request.request_id, num_full)
        elif hits is not None:
            PyDict_SetItem(self.num_cached, request.request_id, num_cached)
        return self.no_blocks if new_blocks is None else self.blocks_class((new_blocks,))

    cdef int make_room_in_map(self, Py_ssize_t num_keys) except -1:
        kvpool_lock_acquire(&self.home.lock)
        cdef kvp_status_t status = kvp_map_reserve(&self.home.pool.map, <int32_t>num_keys, 0)
        kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            raise MemoryError(f"no memory for {num_keys} hashes; nothing has changed")
        return 0

    cdef int publish(self, BlockSequence table, BlockSequence hits, const kvp_key_t *keys, Py_ssize_t num_new,
                     Py_ssize_t first, Py_ssize_t n) except -1:
        """The table's blocks [first, first + n) get their hashes; if one can't, all that was taken is given back."""
        try:
            self.pool.cache_keys(keys, table.ids + first, n, <int32_t>((first + 1) * self.block_size),
                                 <int32_t>self.block_size, KVP_CACHE_PROMOTE, "cache_full_blocks")
        except BaseException:
            table.length -= num_new
            kvpool_lock_acquire(&self.home.lock)
            kvp_pool_free(self.home.pool, table.ids + table.length, num_new, KVP_PLACE_HEAD, NULL)
            kvpool_lock_release(&self.home.lock)
            if hits is not None:
                self.free_reversed(table)
            raise
        return 0

    cdef int keep(self, RequestCore request, BlockSequence table, Py_ssize_t first, Py_ssize_t past) except -1:
        """Makes it the request's table; if that fails, its blocks are free again, [first, past) without their hashes."""
        cdef Py_ssize_t i
        try:
            PyDict_SetItem(self.tables, request.request_id, table)
        except BaseException:
            kvpool_lock_acquire(&self.home.lock)
            for i in range(first, min(past, table.length)):
                kvp_pool_drop_hashes(self.home.pool, table.ids[i])
            kvpool_lock_release(&self.home.lock)
            self.free_reversed(table)
            raise
        return 0

    cdef int take(self, BlockSequence blocks, Py_ssize_t n) except -1:
        kvpool_lock_acquire(&self.home.lock)
        cdef kvp_status_t status = kvp_pool_allocate(self.home.pool, <int32_t>n, blocks.ids)
        kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            too_few_blocks(<int32_t>n)
        blocks.length = n
        return 0

    # ---- hits ----

    cdef BlockSequence hits_of(self, object new_computed_blocks):
        """The one table of a hit; None sends the call to the general code, which says what is wrong, if anything is."""
        cdef object groups = new_computed_blocks.blocks
        if type(groups) is not tuple or len(<tuple>groups) != 1 or type((<tuple>groups)[0]) is not BlockSequence:
            return None
        return <BlockSequence>(<tuple>groups)[0]

    cdef bint are_usable(self, BlockSequence hits, list hashes, Py_ssize_t local, Py_ssize_t num_held,
                         Py_ssize_t num_cached) except -1:
        """Whether a request that is new may adopt a hit as it is: whole blocks, each still carrying the request's hash."""
        cdef kvp_key_t key
        cdef Py_ssize_t i
        if (not self.caches or num_held > 0 or num_cached >= 0 or hits.home is not self.home or hits.length == 0
                or local != hits.length * self.block_size or hits.length > PyList_GET_SIZE(hashes)):
            return False
        for i in range(hits.length):
            parse_digest(<object>PyList_GET_ITEM(hashes, i), 0, &key)
            if hits.ids[i] <= KVP_NULL_BLOCK or not kvp_pool_is_reachable(self.home.pool, &key, hits.ids[i]):
                return False
        return True

    cdef Py_ssize_t count_free(self, BlockSequence hits) noexcept:
        cdef Py_ssize_t i, count = 0
        for i in range(hits.length):
            count += self.home.pool.ref_cnt[hits.ids[i]] == 0
        return count

    def get_computed_blocks(self, request):
        """The longest cached prefix of the request, to be handed to ``allocate_slots``. Takes no reference.

        At least one token is left to compute: its logits are wanted. O(blocks of the request).

        Returns:
            The blocks per group, and the number of tokens that they hold.
        """
        cdef BlockSequence hits
        if not self.looks_up(request):
            return super().get_computed_blocks(request)
        hits = self.prefix_hit(request)
        if hits is None:
            return self.no_blocks, 0
        return self.blocks_class((hits,)), hits.length * self.block_size

    def get_computed_blocks_and_boundary(self, request):
        """``get_computed_blocks``, and the token where a group that keeps few states should keep one.

        Some groups (sliding window and Mamba under sparse retention) may have cached less of a prompt than others.
        Where the others' hit ends, prompts part: set ``request.shared_prefix_boundary`` to this, and the state there
        is kept the next time. 0 where all groups agree.

        vLLM: ``get_computed_blocks``.
        """
        cdef BlockSequence hits
        if not self.looks_up(request):
            return super().get_computed_blocks_and_boundary(request)
        hits = self.prefix_hit(request)
        if hits is None:
            return self.no_blocks, 0, 0
        return self.blocks_class((hits,)), hits.length * self.block_size, 0  # one group agrees with itself

    cdef bint looks_up(self, object request) except -1:
        """Whether the request's hit is found here. The general code serves requests of others, one that skips the cache
        and one whose hits are events."""
        if not isinstance(request, RequestCore) or (<RequestCore>request).skip_reading_prefix_cache:
            return False
        if (self.pool is not None and self.pool.enable_kv_cache_events
                and getattr(request, "kv_cache_report_mode", "incremental") == "full"):
            return False
        return self.pool is not None and self.caches  # last: the request's own code may have bound another pool

    cdef BlockSequence prefix_hit(self, RequestCore request):
        cdef list hashes = request.current_hashes()
        cdef Py_ssize_t n = min(PyList_GET_SIZE(hashes), (PyList_GET_SIZE(request._all_token_ids) - 1) // self.block_size)
        return self.find_prefix(hashes, n) if n > 0 else None

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
        """Give all blocks of the request back, the last ones to be reused first. Nothing happens if it has none."""
        cdef BlockSequence table
        if self.pool is None:
            super().free(request)
            return
        request_id = request.request_id
        self.num_cached.pop(request_id, None)
        self.partial_hits.pop(request_id, None)
        table = self.tables.pop(request_id, None)
        if table is None or table.length == 0:
            return
        if table.home is not self.home:
            self.pool.free_blocks(table[::-1])  # every block to its own pool
        else:
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
