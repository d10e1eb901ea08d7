# cython: cdivision=True, binding=True, embedsignature=False
# cdivision: divisors are block sizes, at least 1. binding: these functions become methods of vLLM's classes.
"""What vLLM's scheduler asks of its KVCacheManager at every step, compiled, over the state of vLLM's own managers.

A ``Plan`` is what was found out once about a KVCacheManager whose pool is native and whose groups are full attention,
sliding windows or local attention; ``manager.make_plan`` makes it. Tables stay lists of blocks in vLLM's dicts, counts
stay in vLLM's dicts, and every change happens in the order in which vLLM makes it, so that each call leaves what vLLM's
method would have left. A call that is not plain (tokens from elsewhere, delayed caching, encoder tokens, a hit that ends
inside a block, a request of another class) goes on to vLLM's method before anything has changed.

Blocks are taken, freed and cached by the pool's own methods, which report events and metrics where those are on.
"""
from cpython.dict cimport PyDict_Contains, PyDict_GetItemWithError, PyDict_SetItem, PyDict_Size
from cpython.list cimport PyList_Check, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t

from kvpool.native.batch cimport MOST, NOT_PLAIN, num_skipped_tokens, plain_number
from kvpool.native.block cimport BlockHome, node_in, parse_digest
from kvpool.native.kvp cimport KVP_NULL_BLOCK, kvp_key_t, kvp_pool_is_reachable
from kvpool.native.prefix_cache cimport PrefixCache

from kvpool.errors import InvalidArgumentError

__all__ = ["Group", "Plan", "allocate_slots", "bind", "cache_blocks", "free"]

cdef enum Attention:
    FULL
    WINDOW
    LOCAL

# vLLM's, set by ``bind``: its classes, the methods that are replaced, and what makes a plan.
cdef object request_class, status_class, blocks_class
cdef object WAITING, PREEMPTED
cdef object stock_allocate_slots, stock_cache_blocks, stock_free
cdef object replay_boundaries, make_plan


def bind(names):
    """Takes what is vLLM's from a mapping of the names above."""
    global request_class, status_class, blocks_class, WAITING, PREEMPTED
    global stock_allocate_slots, stock_cache_blocks, stock_free, replay_boundaries, make_plan
    request_class, status_class, blocks_class = names["Request"], names["RequestStatus"], names["KVCacheBlocks"]
    WAITING, PREEMPTED = status_class.WAITING, status_class.PREEMPTED
    stock_allocate_slots, stock_cache_blocks = names["allocate_slots"], names["cache_blocks"]
    stock_free = names["free"]
    replay_boundaries, make_plan = names["replay_boundaries"], names["make_plan"]


cdef Plan plan_of(object manager):
    """The plan of a KVCacheManager, made at its first call; None for one that is left to vLLM."""
    cdef object plan = getattr(manager, "_kvpool_plan", None)
    if plan is None:
        plan = make_plan(manager)
        manager._kvpool_plan = False if plan is None else plan
    return plan if type(plan) is Plan and (<Plan>plan).is_plain else None


cdef inline Py_ssize_t blocks_for(Py_ssize_t num_tokens, Py_ssize_t block_size) noexcept:
    return (num_tokens + block_size - 1) // block_size


cdef class Group:
    """Group(manager, attention, window_or_chunk, most_blocks, caches_all, caches_tails)\n--\n\n\
    One KV cache group.

    Args:
        manager: vLLM's manager of the group; its dicts are used as they are.
        attention: "full", "window" or "local".
        window_or_chunk: tokens of a window, those kept below it included, or of a chunk of local attention; 0: neither.
        most_blocks: the most that one request is counted for at admission; -1: no limit.
        caches_all: every full block is cached; else vLLM's manager says which.
        caches_tails: the prompt's last hash may end inside a block, which is cached under it, too.
    """
    cdef object manager
    cdef object tables      # dict: request id -> list of blocks
    cdef object num_cached  # dict: request id -> leading blocks of the table that are cached
    cdef object partial_hits
    cdef object null_block
    cdef Attention attention
    cdef object group_id
    cdef Py_ssize_t block_size
    cdef Py_ssize_t window_or_chunk
    cdef Py_ssize_t most_blocks
    cdef bint caches
    cdef bint caches_all
    cdef bint caches_tails
    cdef bint drops_last
    cdef bint records_new

    def __init__(self, manager, str attention not None, window_or_chunk, most_blocks, bint caches_all, bint caches_tails):
        self.manager = manager
        self.tables = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.null_block = manager._null_block
        self.attention = {"full": FULL, "window": WINDOW, "local": LOCAL}[attention]
        self.group_id = manager.kv_cache_group_id
        # Of a size that no number here reaches there is nothing to serve: 0 says so to the plan.
        self.block_size = max(plain_number(manager.block_size), 0)
        self.window_or_chunk = min(window_or_chunk, INT32_MAX)
        self.most_blocks = min(most_blocks, INT32_MAX)
        self.caches = manager.enable_caching
        self.caches_all = caches_all
        self.caches_tails = caches_tails
        self.drops_last = manager.use_eagle
        self.records_new = manager._record_new_block_ids

    cdef PyObject *find_table(self, object request_id) except? NULL:
        """Borrowed: to be read before anything else is called. NULL: the request has none."""
        cdef PyObject *table = PyDict_GetItemWithError(self.tables, request_id)
        if table is not NULL and not PyList_Check(<object>table):
            raise TypeError(f"a table of vLLM is a list, not {<object>table!r}")
        return table

    cdef Py_ssize_t num_held(self, object request_id) except -1:
        cdef PyObject *table = self.find_table(request_id)
        return 0 if table is NULL else PyList_GET_SIZE(<object>table)

    cdef Py_ssize_t num_cached_of(self, object request_id) except -1:
        cdef PyObject *count = PyDict_GetItemWithError(self.num_cached, request_id)
        return 0 if count is NULL else <Py_ssize_t><object>count

    cdef bint is_plain(self, object request_id) except -1:
        """Whether the group holds a list of blocks for the request, or nothing."""
        cdef PyObject *table = PyDict_GetItemWithError(self.tables, request_id)
        if table is not NULL and not PyList_Check(<object>table):
            return False
        return PyDict_Size(self.partial_hits) == 0 or not PyDict_Contains(self.partial_hits, request_id)

    cdef list table_of(self, object request_id):
        """The request's table; an empty one is made, as where vLLM reads its defaultdict."""
        cdef PyObject *table = self.find_table(request_id)
        cdef list new
        if table is not NULL:
            return <list>table
        new = []
        PyDict_SetItem(self.tables, request_id, new)
        return new

    cdef Py_ssize_t num_skipped(self, Py_ssize_t num_computed) noexcept:
        """Tokens that attention no longer reads when so many are computed."""
        return num_skipped_tokens(num_computed, self.window_or_chunk if self.attention == WINDOW else 0,
                                  self.window_or_chunk if self.attention == LOCAL else 0)

    cdef bint has_blocks_to_skip(self, object request_id, Py_ssize_t num_computed) except -1:
        cdef Py_ssize_t num_tokens = self.num_skipped(num_computed), n
        cdef PyObject *table
        if num_tokens == 0:
            return False
        table = self.find_table(request_id)
        if table is NULL:
            return True  # vLLM makes an empty table
        n = min(num_tokens // self.block_size, PyList_GET_SIZE(<object>table))
        return n > 0 and PyList_GET_ITEM(<object>table, n - 1) is not <PyObject *>self.null_block


cdef class Plan:
    """Plan(manager, groups, alignment, dropping_groups, caches_only_hashed)\n--\n\n\
    What the compiled calls know about one KVCacheManager.

    Args:
        manager: vLLM's KVCacheManager; the plan does not hold it.
        groups: one ``Group`` per KV cache group, in order.
        alignment: tokens; what a hybrid coordinator caches is a multiple of it. 0: the coordinator is no hybrid one.
        dropping_groups: the coordinator's set of groups whose hits lose their last block.
        caches_only_hashed: a full block without a hash is not cached yet; else each one has to have its hash.
    """
    cdef PrefixCache pool
    cdef BlockHome home
    cdef list groups
    cdef object coordinator
    cdef object no_blocks
    cdef object no_hits
    cdef object dropping_groups
    cdef Py_ssize_t longest
    cdef Py_ssize_t watermark
    cdef Py_ssize_t hash_block_size
    cdef Py_ssize_t alignment
    cdef Py_ssize_t num_unsettled
    cdef bint is_plain
    cdef bint has_windows
    cdef bint is_hybrid
    cdef bint caches_only_hashed

    def __init__(self, manager, list groups not None, alignment, dropping_groups, bint caches_only_hashed):
        cdef Group group
        self.is_plain = False
        self.pool = manager.block_pool
        self.home = self.pool.checked_home()
        self.groups = groups
        self.coordinator = manager.coordinator
        self.no_blocks = manager.empty_kv_cache_blocks
        self.no_hits = self.no_blocks.blocks
        self.longest = min(manager.max_model_len, INT32_MAX)
        self.watermark = min(manager.watermark_blocks, INT32_MAX)
        self.hash_block_size = plain_number(self.pool.hash_block_size)
        self.is_hybrid = alignment > 0
        self.alignment = min(max(alignment, 1), INT32_MAX)
        self.dropping_groups = dropping_groups
        self.caches_only_hashed = caches_only_hashed
        self.num_unsettled = min(self.coordinator.num_reprefillable_tokens, INT32_MAX)
        self.has_windows = False
        is_plain = self.hash_block_size > 0
        for group in groups:
            self.has_windows = self.has_windows or group.attention != FULL
            is_plain = is_plain and group.block_size > 0 and (group.window_or_chunk > 0 or group.attention == FULL)
        self.is_plain = is_plain

    # ---- allocation ----

    cdef object allocate(self, object request, Py_ssize_t num_new_tokens, Py_ssize_t num_hit_tokens,
                         object new_computed_blocks, Py_ssize_t num_lookahead_tokens, bint must_fit,
                         Py_ssize_t reserved_blocks, bint has_scheduled_reqs):
        """``allocate_slots`` for plain numbers; NotImplemented, and nothing has changed, for all else."""
        cdef object request_id = request.request_id
        cdef object tokens = request._all_token_ids
        cdef Py_ssize_t num_computed = plain_number(request.num_computed_tokens)
        cdef Py_ssize_t num_in_flight = plain_number(request.num_in_flight_tokens) if self.has_windows else 0
        cdef Py_ssize_t num_tokens = PyList_GET_SIZE(tokens) if PyList_Check(tokens) else NOT_PLAIN
        cdef Py_ssize_t local, computed, num_slots, num_to_cache, num_free, num_kept, processed = 0
        cdef object hits_by_group
        cdef tuple hits = None
        if (num_tokens == NOT_PLAIN or num_computed == NOT_PLAIN or num_in_flight == NOT_PLAIN
                or num_new_tokens == 0 and num_hit_tokens == 0):
            return NotImplemented
        local = num_computed + num_hit_tokens
        computed = min(local, self.longest)
        num_slots = min(computed + num_new_tokens + num_lookahead_tokens, self.longest)
        num_to_cache = min(computed + num_new_tokens, num_tokens)
        if new_computed_blocks is not None:
            if type(new_computed_blocks) is not blocks_class:
                return NotImplemented
            hits_by_group = new_computed_blocks.blocks
            if hits_by_group is not self.no_hits:
                if type(hits_by_group) is not tuple:
                    return NotImplemented
                hits = <tuple>hits_by_group
        num_kept = self.headroom(request, has_scheduled_reqs)
        if self.has_windows:
            processed = max(0, computed - num_in_flight)
        if num_kept == NOT_PLAIN or not self.are_plain(request_id) or hits is not None and not self.can_adopt(
                hits, request_id, local):
            return NotImplemented
        if num_to_cache > num_slots:
            self.refuse_tokens_without_slots(request_id, num_to_cache, num_slots)
        num_free = self.home.pool.free_list.num_free
        if (hits is None and not must_fit and num_kept <= num_free - reserved_blocks
                and self.needs_no_block(request_id, num_slots, processed)):
            self.cache(request, request_id, num_to_cache)
            return self.no_blocks
        if must_fit and num_kept + self.num_needed(request_id, hits, min(num_tokens, self.longest), computed,
                                                   True) > num_free:
            return None
        self.skip_blocks(request_id, processed)
        num_free = self.home.pool.free_list.num_free
        if num_kept + self.num_needed(request_id, hits, num_slots, local, False) > num_free - reserved_blocks:
            return None
        if hits is not None:
            self.adopt(hits, request_id, local)
        blocks = self.extend(request_id, num_slots)
        self.cache(request, request_id, num_to_cache)
        return blocks

    cdef int refuse_tokens_without_slots(self, object request_id, Py_ssize_t num_tokens, Py_ssize_t num_slots) except -1:
        """A request longer than the model allows: its last full blocks have no place in its table."""
        cdef Group group
        for group in self.groups:
            if group.caches and self.num_cacheable(group, num_tokens) // group.block_size > max(
                    group.num_held(request_id), blocks_for(num_slots, group.block_size)):
                raise InvalidArgumentError(f"{num_tokens} tokens of request {request_id!r} are to be published, but it has "
                                           f"slots for {num_slots}: slots end at max_model_len")
        return 0

    cdef bint are_plain(self, object request_id) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.groups)):
            if not (<Group>self.groups[i]).is_plain(request_id):
                return False
        return True

    cdef Py_ssize_t headroom(self, object request, bint has_scheduled_reqs) except -2:
        """Blocks that have to stay free beside what a request takes; NOT_PLAIN if it has a status of another kind."""
        cdef object status
        if self.watermark == 0 or not has_scheduled_reqs:
            return 0
        status = request.status
        if status is WAITING or status is PREEMPTED:
            return self.watermark
        return 0 if type(status) is status_class else NOT_PLAIN

    cdef bint needs_no_block(self, object request_id, Py_ssize_t num_slots, Py_ssize_t processed) except -1:
        """Whether the request has all slots and no block that attention is done with: most steps of a decode."""
        cdef Group group
        cdef Py_ssize_t i
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            if group.num_held(request_id) * group.block_size < num_slots:
                return False
            if group.attention != FULL and group.has_blocks_to_skip(request_id, processed):
                return False
        return True

    cdef bint can_adopt(self, tuple hits, object request_id, Py_ssize_t num_computed) except -1:
        """Whether a request without blocks can take the hits as they are: whole blocks of this pool."""
        cdef Group group
        cdef object blocks
        cdef Py_ssize_t i, j
        if len(hits) != len(self.groups):
            return False
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            blocks = hits[i]
            if (type(blocks) is not list or group.num_held(request_id) > 0
                    or PyDict_Contains(group.num_cached, request_id)):
                return False
            if PyList_GET_SIZE(blocks) > 0 and (not group.caches or num_computed % group.block_size != 0):
                return False
            for j in range(PyList_GET_SIZE(blocks)):
                if node_in(self.home, PyList_GET_ITEM(blocks, j)) < 0:
                    return False
        return True

    cdef Py_ssize_t num_needed(self, object request_id, tuple hits, Py_ssize_t num_slots, Py_ssize_t num_computed,
                               bint is_capped) except -1:
        """Blocks that leave the free list when the request gets its slots: new ones, and hits that nobody uses."""
        cdef Group group
        cdef list found
        cdef Py_ssize_t i, j, num_required, num_held, num_skipped, num_found, needed = 0
        cdef int32_t node
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            num_required = blocks_for(num_slots, group.block_size)
            if is_capped and group.most_blocks >= 0:
                num_required = min(num_required, group.most_blocks)
            num_held = group.num_held(request_id)
            if PyDict_Contains(group.num_cached, request_id):
                needed += max(num_required - num_held, 0)
                continue
            num_skipped = group.num_skipped(num_computed) // group.block_size
            found = <list>hits[i] if hits is not None else None
            num_found = PyList_GET_SIZE(found) if found is not None else 0
            needed += max(num_required - max(num_skipped, num_held + num_found), 0)
            for j in range(max(0, num_skipped - num_held), num_found):
                node = node_in(self.home, PyList_GET_ITEM(found, j))
                needed += node > KVP_NULL_BLOCK and self.home.pool.ref_cnt[node] == 0
        return needed

    cdef int skip_blocks(self, object request_id, Py_ssize_t processed) except -1:
        """Gives back the blocks that attention is done with, the last first, up to one that was given back before."""
        cdef Group group
        cdef list table, freed
        cdef Py_ssize_t i, at
        if not self.has_windows:
            return 0
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            if group.attention == FULL or not group.has_blocks_to_skip(request_id, processed):
                continue
            table = group.table_of(request_id)
            freed = []
            at = min(group.num_skipped(processed) // group.block_size, PyList_GET_SIZE(table)) - 1
            # What lay in the table may run code of the caller as it goes.
            while 0 <= at < PyList_GET_SIZE(table) and table[at] is not group.null_block:
                freed.append(table[at])
                table[at] = group.null_block
                at -= 1
            if freed:
                self.pool.free_blocks(freed)
        return 0

    cdef int adopt(self, tuple hits, object request_id, Py_ssize_t num_computed) except -1:
        cdef Group group
        cdef list table, blocks
        cdef Py_ssize_t i, num_skipped
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            blocks = <list>hits[i]
            table = group.table_of(request_id)
            num_skipped = group.num_skipped(num_computed) // group.block_size
            if num_skipped > 0:
                blocks = blocks[num_skipped:]
            if group.caches:
                self.pool.touch(blocks)
            table.extend([group.null_block] * num_skipped)
            table.extend(blocks)
            PyDict_SetItem(group.num_cached, request_id, PyList_GET_SIZE(table))
        return 0

    cdef object extend(self, object request_id, Py_ssize_t num_slots):
        """New blocks for the slots that no block has: a KVCacheBlocks of them."""
        cdef Group group
        cdef list table, new_blocks, groups = None
        cdef Py_ssize_t i, num_new, num_groups = len(self.groups)
        for i in range(num_groups):
            group = <Group>self.groups[i]
            table = group.table_of(request_id)
            num_new = blocks_for(num_slots, group.block_size) - PyList_GET_SIZE(table)
            if num_new <= 0:
                continue
            new_blocks = self.pool.get_new_blocks(num_new)
            table.extend(new_blocks)
            if group.records_new:
                group.manager.new_block_ids.extend([block.block_id for block in new_blocks])
            if groups is None:
                groups = [[] for _ in range(num_groups)]
            groups[i] = new_blocks
        return self.no_blocks if groups is None else blocks_class(tuple(groups))

    # ---- caching ----

    cdef Py_ssize_t num_cacheable(self, Group group, Py_ssize_t num_tokens) noexcept:
        """Leading tokens, of those that are computed, whose blocks a group may cache now."""
        cdef Py_ssize_t settled = max(0, num_tokens - self.num_unsettled)
        cdef Py_ssize_t aligned = num_tokens - num_tokens % self.alignment
        if not self.is_hybrid:
            return settled
        if group.drops_last and aligned > 0:
            return min(settled, settled - settled % self.alignment + group.block_size)
        return aligned

    cdef int cache(self, object request, object request_id, Py_ssize_t num_tokens) except -1:
        cdef Group group
        cdef Py_ssize_t i, num_cacheable, num_full, num_cached
        for i in range(len(self.groups)):
            group = <Group>self.groups[i]
            if not group.caches:
                continue
            num_cacheable = self.num_cacheable(group, num_tokens)
            num_full = num_cacheable // group.block_size
            num_cached = group.num_cached_of(request_id)
            if num_cached < num_full:
                if not group.caches_all:
                    self.cache_some(group, request, num_cacheable)
                    continue
                if self.caches_only_hashed:
                    num_full = min(num_full, self.num_hashed(request) * self.hash_block_size // group.block_size)
            if num_cached < num_full:
                self.pool.cache_full_blocks(request, group.table_of(request_id), num_cached, num_full,
                                            group.block_size, group.group_id)
                PyDict_SetItem(group.num_cached, request_id, num_full)
            if group.caches_tails:
                self.cache_tail(group, request, request_id, num_cacheable)
        return 0

    cdef Py_ssize_t num_hashed(self, object request) except -1:
        return len(request.block_hashes)

    cdef int cache_some(self, Group group, object request, Py_ssize_t num_tokens) except -1:
        """Windows of which only those blocks are cached that a hit can need: vLLM's manager knows which."""
        group.manager.cache_blocks(
            request, num_tokens, retention_interval=self.coordinator.retention_interval,
            replay_boundaries=replay_boundaries(request.num_prompt_tokens, self.coordinator.scheduler_block_size,
                                                use_eagle=bool(self.dropping_groups)),
        )
        return 0

    cdef int cache_tail(self, Group group, object request, object request_id, Py_ssize_t num_tokens) except -1:
        """The prompt's last whole hash, where it ends inside a block that does not carry it yet."""
        cdef Py_ssize_t limit = <Py_ssize_t>request.num_prompt_tokens - (0 if group.drops_last else 1)
        cdef Py_ssize_t num_hashes = limit // self.hash_block_size
        cdef Py_ssize_t end
        cdef PyObject *table
        cdef object hashes
        cdef kvp_key_t key
        cdef int32_t node
        if self.caches_only_hashed and num_hashes > 0:
            num_hashes = min(num_hashes, self.num_hashed(request))
        end = num_hashes * self.hash_block_size
        if num_hashes <= 0 or end > num_tokens or end % group.block_size == 0:
            return 0
        hashes = request.block_hashes
        table = group.find_table(request_id)
        if (table is not NULL and type(hashes) is list and num_hashes <= PyList_GET_SIZE(hashes)
                and end // group.block_size < PyList_GET_SIZE(<object>table)):
            node = node_in(self.home, PyList_GET_ITEM(<object>table, end // group.block_size))
            parse_digest(hashes[num_hashes - 1], <int>group.group_id, &key)
            if node > KVP_NULL_BLOCK and kvp_pool_is_reachable(self.home.pool, &key, node):
                return 0
        group.manager._cache_partial_tail_block(request, num_tokens)
        return 0


# ---- vLLM's methods ----

def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None,
                   num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False,
                   num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0, has_scheduled_reqs=True,
                   skip_zeroing_group_ids=()):
    """``KVCacheManager.allocate_slots``."""
    cdef Plan plan = plan_of(self)
    cdef object blocks
    cdef Py_ssize_t num_new = plain_number(num_new_tokens)
    cdef Py_ssize_t num_hit = plain_number(num_new_computed_tokens)
    cdef Py_ssize_t num_lookahead = plain_number(num_lookahead_tokens)
    cdef Py_ssize_t num_reserved = plain_number(reserved_blocks)
    if (plan is not None and type(request) is request_class and not num_external_computed_tokens
            and not delay_cache_blocks and not num_encoder_tokens and num_new >= 0 and num_hit >= 0
            and num_lookahead >= 0 and num_reserved >= 0):
        blocks = plan.allocate(request, num_new, num_hit, new_computed_blocks, num_lookahead, full_sequence_must_fit,
                               num_reserved, has_scheduled_reqs)
        if blocks is not NotImplemented:
            return blocks
    return stock_allocate_slots(
        self, request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens,
        num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit, reserved_blocks,
        has_scheduled_reqs, skip_zeroing_group_ids,
    )


def cache_blocks(self, request, num_computed_tokens):
    """``KVCacheManager.cache_blocks``."""
    cdef Plan plan = plan_of(self)
    cdef Py_ssize_t num_tokens = plain_number(num_computed_tokens)
    if (plan is None or type(request) is not request_class or num_tokens == NOT_PLAIN
            or not plan.are_plain(request.request_id)):
        return stock_cache_blocks(self, request, num_computed_tokens)
    plan.cache(request, request.request_id, num_tokens)


def free(self, request):
    """``KVCacheManager.free``."""
    cdef Plan plan = plan_of(self)
    cdef Group group
    if plan is None:
        return stock_free(self, request)
    request_id = request.request_id
    for group in plan.groups:
        table = group.tables.pop(request_id, ())
        group.num_cached.pop(request_id, None)
        group.partial_hits.pop(request_id, None)
        plan.pool.free_blocks(table[::-1])
