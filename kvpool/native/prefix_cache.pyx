"""The prefix cache of the native pool: which blocks a hash leads to, and which hashes a block carries."""
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t

from kvpool.native.allocator cimport BlockAllocator
from kvpool.native.batch cimport SMALL, ids_of_size, keys_of_size, release_batch
from kvpool.native.block cimport (
    BlockHome, KVCacheBlock as _KVCacheBlock, view_of, key_bytes, kvpool_lock_acquire, kvpool_lock_release,
    node_in,
    parse_digest, parse_group, parse_key, parse_tokens, raise_status,
)
from kvpool.native.block_sequence cimport BlockSequence
from kvpool.native.prefix_map cimport map_of_home
from kvpool.native.kvp cimport (
    KVP_CACHE_PROMOTE, KVP_ENTRY_IN_MAP, KVP_NONE, KVP_NULL_BLOCK, KVP_OK, kvp_cache_mode_t, kvp_fault_t, kvp_key_t, kvp_map_entry,
    kvp_map_find, kvp_pool_cache, kvp_pool_drop_hashes, kvp_pool_find_prefix, kvp_pool_insert_hash, kvp_pool_next_secondary,
    kvp_pool_primary, kvp_pool_reset_hashes, kvp_pool_t, kvp_status_t,
)
from kvpool.native.memory cimport kvpool_share_memory

from kvpool.native.prefix_map import BlockHashToBlockMap
from kvpool.hashing.block_hash import make_block_hash_with_group_id, resolve_block_hashes
from kvpool.errors import BlockStateError, InvalidArgumentError

kvpool_share_memory()

__all__ = ["PrefixCache"]


cdef enum:
    KEYS = 128  # keys looked up in one go


cdef bint is_null_block(object block) except -1:
    """A null block of another pool or a hand-made one: still a placeholder."""
    return type(block) is _KVCacheBlock and block.is_null


cdef class PrefixCache(BlockAllocator):
    """The calls of ``BlockPool`` for hashes."""

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        """The first cached block with this hash in each group, or None if one of the groups has none. O(groups).

        Raises:
            TypeError, InvalidArgumentError: block_hash is not bytes, or over 32 long.
            OverflowError: a group id is negative or needs over 4 bytes.
        """
        cdef BlockHome home = self.checked_home()
        cdef list groups = kv_cache_group_ids if type(kv_cache_group_ids) is list else list(kv_cache_group_ids)
        cdef list found = []
        cdef kvp_key_t key
        cdef uint32_t group
        cdef int32_t entry, block_id
        # A group may be an object with code of its own, which may change the list.
        for group_id in groups:
            group = parse_group(group_id)
            parse_digest(block_hash, group, &key)
            kvpool_lock_acquire(&home.lock)
            entry = kvp_map_find(&home.pool.map, &key)
            block_id = kvp_map_entry(&home.pool.map, entry).block_id if entry != KVP_NONE else KVP_NONE
            kvpool_lock_release(&home.lock)
            if entry == KVP_NONE:
                return None if self.hand_made is None else self.cached_by_hand(block_hash, groups)
            found.append(view_of(home, block_id))
        return found

    cdef Py_ssize_t find_prefix(self, list hashes, Py_ssize_t n, uint32_t group_id, int32_t *ids) except -1:
        """Ids of the first inserted blocks of hashes[0], hashes[1] ... up to the first miss or n; returns how many."""
        cdef kvp_key_t keys[KEYS]
        cdef Py_ssize_t done = 0, i, size
        cdef int64_t found
        n = min(n, PyList_GET_SIZE(hashes))
        while done < n:
            size = min(n - done, KEYS)
            for i in range(size):
                parse_digest(<object>PyList_GET_ITEM(hashes, done + i), group_id, &keys[i])
            kvpool_lock_acquire(&self.home.lock)
            found = kvp_pool_find_prefix(self.home.pool, keys, size, ids + done)
            kvpool_lock_release(&self.home.lock)
            done += found
            if found < size:
                break
        return done

    def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
                          block_mask=None):
        """Make the full blocks [num_cached_blocks, num_full_blocks) of a request reachable by their hashes.

        A block that carries the hash of fewer tokens (a partial block that has filled up) loses it first.
        O(num_full_blocks - num_cached_blocks).

        Args:
            request: its ``block_hashes`` has one digest per ``hash_block_size`` tokens.
            blocks: all blocks of the request in token order. Null blocks are skipped.
            num_cached_blocks, num_full_blocks: how many were cached before and are to be cached after.
            block_size: tokens per block, a multiple of ``hash_block_size``.
            kv_cache_group_id: group that the blocks belong to.
            block_mask: one entry per block of the range; False skips the block.

        Raises:
            BlockStateError: a block carries the hash of as many tokens or of an unknown number, is in the range
                twice, or belongs to another pool or to none. Nothing has changed.
            InvalidArgumentError: too few blocks or hashes, a mask or a block size that does not fit.
        """
        if self.enable_kv_cache_events:
            return self._cache_full_blocks_observed(request, blocks, num_cached_blocks, num_full_blocks, block_size,
                                                    kv_cache_group_id, block_mask)
        self._cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
                                block_mask)

    def _cache_full_blocks(self, request, blocks, Py_ssize_t num_cached_blocks, Py_ssize_t num_full_blocks,
                           Py_ssize_t block_size, kv_cache_group_id, block_mask=None):
        self.checked_home()
        if num_cached_blocks >= num_full_blocks:
            return
        cdef uint32_t group_id = parse_group(kv_cache_group_id)
        cdef Py_ssize_t hash_size = self.hash_block_size
        cdef Py_ssize_t n = num_full_blocks - num_cached_blocks
        if num_cached_blocks < 0 or block_size < 1 or num_full_blocks > INT32_MAX // block_size:
            raise InvalidArgumentError(f"blocks [{num_cached_blocks}, {num_full_blocks}) of {block_size} tokens")
        if hash_size < 1 or block_size % hash_size != 0:
            raise InvalidArgumentError(f"block_size {block_size} is not a multiple of hash_block_size {hash_size}")
        # Plain bools, so that no code of the caller runs while keys point into its hashes.
        cdef list mask = None if block_mask is None else [bool(keep) for keep in block_mask]
        if mask is not None and PyList_GET_SIZE(mask) != n:
            raise InvalidArgumentError(f"block_mask has {len(mask)} entries for {n} blocks")
        cdef object batch = blocks if type(blocks) is list or type(blocks) is BlockSequence else list(blocks)
        if len(batch) < num_full_blocks:
            raise InvalidArgumentError(f"{len(batch)} blocks, {num_full_blocks} are to be full")
        cdef object hashes = request.block_hashes
        cdef Py_ssize_t scale = block_size // hash_size
        if type(hashes) is not list:
            hashes = list(resolve_block_hashes(hashes, hash_size, block_size))
            scale = 1
        try:
            self.cache_range(batch, hashes, scale, num_cached_blocks, n, block_size, group_id, mask)
        except BlockStateError:
            # Nothing has changed yet, so what a hand-made block in the batch takes need not be asked before.
            if not self.takes_hand_made or not self.cache_hand_made(list(batch), hashes, scale, num_cached_blocks, n,
                                                                    block_size, group_id, mask):
                raise

    cdef int cache_range(self, object blocks, list hashes, Py_ssize_t scale, Py_ssize_t first, Py_ssize_t n,
                         Py_ssize_t block_size, uint32_t group_id, list mask) except -1:
        """Blocks [first, first + n) of a list or a table; ``hashes[scale * (i + 1) - 1]`` is the hash of block i."""
        cdef int32_t small[SMALL]
        cdef kvp_key_t few[SMALL]
        cdef kvp_key_t *keys = few
        cdef int32_t *ids = ids_of_size(n, small)
        cdef Py_ssize_t i, at
        try:
            keys = keys_of_size(n, few)
            self.nodes_to_cache(blocks, first, n, mask, ids)
            for i in range(n):
                if ids[i] == KVP_NONE:
                    continue
                at = (first + i + 1) * scale - 1
                if at >= PyList_GET_SIZE(hashes):
                    raise InvalidArgumentError(f"{len(hashes)} block hashes, block {first + i} of the request needs "
                                               f"number {at}")
                parse_digest(<object>PyList_GET_ITEM(hashes, at), group_id, &keys[i])
            self.cache_keys(keys, ids, n, <int32_t>((first + 1) * block_size), <int32_t>block_size, KVP_CACHE_PROMOTE,
                            "cache_full_blocks")
        finally:
            release_batch(ids, small)
            release_batch(keys, few)
        return 0

    cdef int nodes_to_cache(self, object blocks, Py_ssize_t first, Py_ssize_t n, list mask, int32_t *ids) except -1:
        """Ids of the blocks; KVP_NONE for null blocks and those that the mask leaves out."""
        cdef const int32_t *known = NULL
        cdef int32_t node
        cdef Py_ssize_t i, length
        if type(blocks) is BlockSequence and (<BlockSequence>blocks).home is not self.home:
            blocks = list(blocks)
        if type(blocks) is BlockSequence:
            length = (<BlockSequence>blocks).length
            known = (<BlockSequence>blocks).ids
        else:
            length = PyList_GET_SIZE(<list>blocks)
        # No code of the caller runs from here on, but to raise.
        if first < 0 or first > length or n > length - first or mask is not None and PyList_GET_SIZE(mask) != n:
            raise InvalidArgumentError(f"{length} blocks, {first + n} are to be full")
        for i in range(n):
            ids[i] = KVP_NONE
            if mask is not None and not mask[i]:
                continue
            node = known[first + i] if known is not NULL else node_in(self.home, PyList_GET_ITEM(<list>blocks, first + i))
            if node > KVP_NULL_BLOCK:
                ids[i] = node
            elif node != KVP_NULL_BLOCK and not is_null_block(blocks[first + i]):
                self.refuse(blocks[first + i], first + i, "cache_full_blocks")
        return 0

    cdef int cache_keys(self, const kvp_key_t *keys, const int32_t *ids, Py_ssize_t n, int32_t first_tokens,
                        int32_t step_tokens, kvp_cache_mode_t mode, str call) except -1:
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        kvpool_lock_acquire(&self.home.lock)
        status = kvp_pool_cache(self.home.pool, keys, ids, n, first_tokens, step_tokens, mode, &fault)
        kvpool_lock_release(&self.home.lock)
        if status != KVP_OK:
            raise_status(status, &fault, call, self.home)
        return 0

    def _cached_block_hashes(self, block):
        """Keys under which a lookup finds the block: its ``block_hash`` first, then the others as inserted."""
        cdef int32_t node = self.own_id(block, "cached hashes")
        cdef kvp_pool_t *pool = self.home.pool
        cdef list keys = []
        kvpool_lock_acquire(&self.home.lock)
        cdef int32_t entry = kvp_pool_primary(pool, node)
        if entry != KVP_NONE and kvp_map_entry(&pool.map, entry).flags & KVP_ENTRY_IN_MAP:
            keys.append(key_bytes(kvp_map_entry(&pool.map, entry)))
        entry = kvp_pool_next_secondary(pool, node, KVP_NONE)
        while entry != KVP_NONE:
            keys.append(key_bytes(kvp_map_entry(&pool.map, entry)))
            entry = kvp_pool_next_secondary(pool, node, entry)
        kvpool_lock_release(&self.home.lock)
        return keys

    def _remove_cached_block_hashes(self, block):
        """Every hash of the block is gone; returns the keys under which a lookup found it."""
        cdef int32_t node = self.own_id(block, "cached hashes")
        cdef list keys = self._cached_block_hashes(block)
        kvpool_lock_acquire(&self.home.lock)
        kvp_pool_drop_hashes(self.home.pool, node)
        kvpool_lock_release(&self.home.lock)
        return keys

    def _insert_block_hash(self, block_hash_with_group_id, block, num_tokens=None):
        """Makes the block reachable under one more key: its ``block_hash`` if it has none, else a further one."""
        cdef kvp_key_t key
        cdef kvp_fault_t fault
        cdef kvp_status_t status
        cdef int32_t tokens = parse_tokens(num_tokens)
        fault.index, fault.block_id = KVP_NONE, self.own_id(block, "insert hash")
        parse_key(block_hash_with_group_id, &key)
        kvpool_lock_acquire(&self.home.lock)
        status = kvp_pool_insert_hash(self.home.pool, &key, fault.block_id, tokens)
        kvpool_lock_release(&self.home.lock)
        raise_status(status, &fault, "insert hash", self.home)

    def _reset_hashes(self):
        cdef BlockHome home = self.checked_home()
        kvpool_lock_acquire(&home.lock)
        kvp_pool_reset_hashes(home.pool)
        kvpool_lock_release(&home.lock)
        self.hand_made = None
        self.cached_block_hash_to_block = map_of_home(home, None)

    # ---- blocks that no pool made ----

    cdef list cached_by_hand(self, object block_hash, list groups):
        cdef list found = []
        for group_id in groups:
            block = self.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    cdef int cache_hand_made(self, list blocks, list hashes, Py_ssize_t scale, Py_ssize_t first, Py_ssize_t n,
                             Py_ssize_t block_size, uint32_t group_id, list mask) except -1:
        """``cache_range`` for a batch that has hand-made blocks in it: the pool's own go the usual way, those beside
        them into the map beside the pool's."""
        cdef Py_ssize_t i, at
        cdef list own = [True] * n if mask is None else mask
        cdef list by_hand = []
        for i in range(n):
            item = blocks[first + i]
            if not own[i] or type(item) is not _KVCacheBlock or (<_KVCacheBlock>item).hand_made is None or item.is_null:
                continue
            at = (first + i + 1) * scale - 1
            if at >= len(hashes):
                raise InvalidArgumentError(f"{len(hashes)} block hashes, block {first + i} of the request needs number {at}")
            if item.block_hash is not None:
                raise BlockStateError(f"cache_full_blocks: block {item.block_id} (entry {first + i} of the batch) carries "
                                      "another hash already; nothing has changed")
            by_hand.append((item, make_block_hash_with_group_id(hashes[at], group_id), (first + i + 1) * block_size))
            own[i] = False
        if not by_hand:
            return 0
        self.cache_range(blocks, hashes, scale, first, n, block_size, group_id, own)
        if self.hand_made is None:
            self.hand_made = BlockHashToBlockMap()
            self.cached_block_hash_to_block = map_of_home(self.home, self.hand_made)
        for item, key, num_tokens in by_hand:
            item.set_block_hash(key, num_tokens)
            self.hand_made.insert(key, item)
        return 1

    def _count_eviction(self):
        cdef BlockHome home = self.checked_home()
        home.pool.num_evicted += 1
