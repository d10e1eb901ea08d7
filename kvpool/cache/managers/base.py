"""What the managers of all attention types have in common: the block tables of requests over one pool.

A manager serves one KV cache group. It keeps for every request the list of its blocks in token order, the block
table; blocks that a request does not need (any more) are the null block there. The order of calls for a request,
as the coordinator makes them: ``find_longest_cache_hit``; ``remove_skipped_blocks``;
``get_num_blocks_to_allocate``, and if that many are free: for a request that is new, ``add_local_computed_blocks``
and ``allocate_external_computed_blocks``; ``allocate_new_blocks``; ``cache_blocks``; at the end ``free``.

Tokens come in ranges: [0, local) were computed before and hit the prefix cache, [local, local + external) come from
elsewhere, [.., num_tokens) are to be computed.

A hit can end inside a block where the type supports it (``supports_fine_grained_hash_lookup``). The request would
write into a block that others read: ``allocate_new_blocks`` gives it a block of its own there, and the pair (source,
copy) is handed out by ``take_pending_cow_copies``; both have a reference more until whoever copies gives it back.

Misuse is refused with InvalidArgumentError, which is what vLLM's AssertionErrors become here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvpool.cache.spec import AttentionSpec, KVCacheSpec, ceil_div
from kvpool.errors import BlockStateError, InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock
    from kvpool.hashing.block_hash import BlockHashList


# For each group the blocks from the first token on; tokens.
PrefixHit = tuple[tuple[list["KVCacheBlock"], ...], int]


class PrefixLookup(NamedTuple):
    """What ``find_longest_cache_hit`` is asked; see there."""

    block_hashes: BlockHashList
    max_length: int
    group_ids: list[int]
    block_pool: BlockPool
    spec: Any
    drops_block: bool
    alignment_tokens: int


class AllocationNote(NamedTuple):
    """What a manager holds for a request before an allocation; None where it has nothing.

    Attributes:
        num_blocks: in its table.
        num_cached_blocks, partial_hit: the manager's entries for the request.
        last_hashes: ids and hashes of the last blocks of the table that can be hit.
        num_copies, num_new_ids: lengths of the manager's lists for ``take_pending_cow_copies`` and
            ``take_new_block_ids``.
        is_allocated, checkpoint: of aligned Mamba states.
    """

    num_blocks: int | None
    num_cached_blocks: int | None
    partial_hit: tuple[int, KVCacheBlock] | None
    last_hashes: frozenset[tuple[int, Any]]
    num_copies: int
    num_new_ids: int
    is_allocated: bool = False
    checkpoint: tuple[int, int] | None = None


def set_or_remove(values: dict[str, Any], request_id: str, value: Any) -> None:
    """None: the request has no entry."""
    if value is None:
        values.pop(request_id, None)
    else:
        values[request_id] = value


class SingleTypeKVCacheManager(ABC):
    """Block tables of one KV cache group. vLLM: ``SingleTypeKVCacheManager``.

    Args:
        kv_cache_spec: spec of the group's layers.
        block_pool: the pool, shared with the other groups.
        enable_caching: whether prefix caching is on.
        kv_cache_group_id: index of the group.
        scheduler_block_size: tokens; steps end at multiples of it, a multiple of the group's block size.
        dcp_world_size, pcp_world_size: context parallelism, which is not supported: 1.
        needs_kv_cache_zeroing: whether the ids of new blocks are collected for ``take_new_block_ids``.
        max_admission_blocks_per_request: blocks that one request holds at most where blocks are given back while it
            runs; None for no bound.

    Attributes:
        block_size: tokens per block.
        req_to_blocks: block table by request id.
        num_cached_block: by request id, number of leading blocks of the table that need no more caching. Who is not
            in it is new.
        use_eagle: whether hits of this group drop their last block (see ``find_longest_cache_hit``); set by the
            coordinator.
        cache_hit_alignment_tokens: tokens; hits end at multiples of it. Set by the coordinator.
        new_block_ids: ids that ``take_new_block_ids`` will return.
    """

    served_specs: ClassVar[tuple[type[KVCacheSpec], ...]]
    supports_fine_grained_hash_lookup: ClassVar[bool] = False
    retains_longer_hit: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        needs_kv_cache_zeroing: bool = False,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        refuse_context_parallelism(dcp_world_size, pcp_world_size)
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.scheduler_block_size = scheduler_block_size
        self.cache_hit_alignment_tokens = scheduler_block_size
        self.dcp_world_size = self.pcp_world_size = 1
        self.block_size = kv_cache_spec.block_size
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.use_eagle = False
        self.shared_prefix_checkpoint = False
        self.req_to_blocks: defaultdict[str, MutableSequence[KVCacheBlock]] = defaultdict(block_pool.new_block_table)
        self.num_cached_block: dict[str, int] = {}
        self.new_block_ids: list[int] = []
        self._null_block = block_pool.null_block
        self._record_new_block_ids = needs_kv_cache_zeroing and isinstance(kv_cache_spec, AttentionSpec)
        self._partial_hit_reqs: dict[str, tuple[int, KVCacheBlock]] = {}
        self._pending_cow_copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []

    # What a request needs

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Number of free blocks that the calls which follow will take from the pool. O(len(new_computed_blocks)).

        Args:
            num_tokens: tokens that need a slot, those that have one included.
            new_computed_blocks: what the request has just hit; free ones among them count, as they leave the pool's
                free list. Empty for a request that is not new.
            total_computed_tokens: local and external computed tokens.
            num_local_computed_tokens: tokens of the hit.
            num_tokens_main_model: num_tokens without lookahead slots of a draft model.
            apply_admission_cap: count at most ``max_admission_blocks_per_request`` for the whole sequence.
            prefill_end: token at which the prefill ends, for Mamba's checkpoints; 0 if each step may make one.
        """
        num_required_blocks = ceil_div(num_tokens, self.block_size)
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            num_required_blocks = min(num_required_blocks, self.max_admission_blocks_per_request)
        num_held_blocks = len(self.req_to_blocks.get(request_id, ()))
        if request_id in self.num_cached_block:
            if new_computed_blocks:
                raise InvalidArgumentError(f"request {request_id!r} runs already and has no new computed blocks")
            # Slots of rejected draft tokens can make it hold more than it needs.
            return max(num_required_blocks - num_held_blocks, 0)

        num_skipped_blocks = max(self.get_num_skipped_tokens(total_computed_tokens), 0) // self.block_size
        num_present_blocks = len(new_computed_blocks) + num_held_blocks
        num_new_blocks = max(num_required_blocks - max(num_skipped_blocks, num_present_blocks), 0)
        if self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens):
            num_new_blocks += 1
        num_skipped_hits = max(num_skipped_blocks - num_held_blocks, 0)
        return num_new_blocks + self._get_num_evictable_blocks(new_computed_blocks[num_skipped_hits:])

    @staticmethod
    def _get_num_evictable_blocks(blocks: Sequence[KVCacheBlock]) -> int:
        return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)

    def _has_partial_local_hit(
        self, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int
    ) -> bool:
        """Whether the hit ends inside a block."""
        return len(new_computed_blocks) > 0 and num_local_computed_tokens % self.block_size != 0

    # Blocks for a request

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the block table of a new request with the blocks it has hit; those that are skipped are null.

        Raises:
            InvalidArgumentError: the request has blocks, or hit some although caching is off.
        """
        if self.req_to_blocks.get(request_id):
            raise InvalidArgumentError(f"request {request_id!r} has blocks already")
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        num_skipped_blocks = max(self.get_num_skipped_tokens(num_tokens), 0) // self.block_size
        hits = list(new_computed_blocks[num_skipped_blocks:])
        if self.enable_caching:
            self.block_pool.touch(hits)
        elif hits:
            raise InvalidArgumentError("Computed blocks should be empty when prefix caching is disabled")
        self._add_to_table(request_id, [self._null_block] * num_skipped_blocks + hits)
        self.num_cached_block[request_id] = num_skipped_blocks + len(hits)
        if self._has_partial_local_hit(hits, num_local_computed_tokens):
            # The block of its own that the request will get there is cached again when it is full.
            block_idx = num_local_computed_tokens // self.block_size
            self._partial_hit_reqs[request_id] = (block_idx, hits[-1])
            self.num_cached_block[request_id] = block_idx

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Add the blocks that will receive external tokens. All groups must have their hits before one comes here:
        new blocks are taken from the free list, where the hits of the others may be.

        Args:
            record_for_zeroing: whether the new blocks go into ``new_block_ids``.
        """
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        num_skipped_tokens = max(self.get_num_skipped_tokens(num_tokens), 0)
        if min(num_tokens - num_skipped_tokens, num_external_computed_tokens) <= 0:
            return
        num_held_blocks = len(self.req_to_blocks.get(request_id, ()))
        new_blocks = self.block_pool.get_new_blocks(max(ceil_div(num_tokens, self.block_size) - num_held_blocks, 0))
        self._add_to_table(request_id, new_blocks)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids += [block.block_id for block in new_blocks]

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Give the request slots for num_tokens tokens, those it has included.

        Returns:
            Blocks that are new in its table, in token order.

        Raises:
            NoFreeBlocksError: too few are free; nothing has changed.
            BlockStateError: a hit that ends inside a block isn't in the table any more; nothing has changed.
        """
        num_held_blocks = len(self.req_to_blocks.get(request_id, ()))
        num_appended = max(ceil_div(num_tokens, self.block_size) - num_held_blocks, 0)
        partial_hit = self._partial_hit_reqs.get(request_id)
        if partial_hit is None:
            if num_appended == 0:
                return []
            appended = new_blocks = self.block_pool.get_new_blocks(num_appended)
        else:
            self.refuse_lost_source(request_id, 0)
            new_blocks = self.block_pool.get_new_blocks(1 + num_appended)
            private_block, *appended = new_blocks
            self._apply_cow(request_id, *partial_hit, private_block)
            del self._partial_hit_reqs[request_id]
            self.new_block_ids.append(private_block.block_id)
        self._add_to_table(request_id, appended)
        if self._record_new_block_ids:
            self.new_block_ids += [block.block_id for block in appended]
        return new_blocks

    def _add_to_table(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """References that the request holds now go into its table; where that has no memory, back to the pool."""
        try:
            self.req_to_blocks[request_id] += blocks
        except BaseException:
            self.block_pool.free_blocks(blocks, prepend=True)
            raise

    def refuse_lost_source(self, request_id: str, num_processed_tokens: int) -> None:
        """BlockStateError if the block that the request's next step has to copy is not in its table any more, or would
        leave it in ``remove_skipped_blocks(request_id, num_processed_tokens)``."""
        if request_id not in self._partial_hit_reqs:
            return
        block_idx, source_block = self._partial_hit_reqs[request_id]
        table = self.req_to_blocks.get(request_id, ())
        is_skipped = block_idx < self.get_num_skipped_tokens(num_processed_tokens) // self.block_size
        if is_skipped or block_idx >= len(table) or table[block_idx] is not source_block:
            raise BlockStateError(
                f"block {block_idx} of request {request_id!r}, which its next step has to copy, is not in its table "
                f"with {num_processed_tokens} computed tokens"
            )

    def _apply_cow(self, request_id: str, block_idx: int, source_block: KVCacheBlock, cow_block: KVCacheBlock) -> None:
        """Put cow_block in the place of source_block. The request's reference to the source and one more of the
        copy live until the contents are copied, so that neither is reused before."""
        self.req_to_blocks[request_id][block_idx] = cow_block
        self._pending_cow_copies.append((source_block, cow_block))
        self.block_pool.add_reference(cow_block)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give blocks back that the request will not read again; the null block takes their place.

        Args:
            processed_computed_tokens: computed tokens without those of steps in flight, whose attention still reads
                the blocks of its own window. Below 0 counts as 0.
            num_prompt_tokens: not used here.
        """
        num_skipped_tokens = self.get_num_skipped_tokens(processed_computed_tokens)
        if num_skipped_tokens > 0:
            self._remove_blocks_in_range(request_id, 0, num_skipped_tokens // self.block_size)

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Give the blocks [first_block, last_block) of the table back, last first; what is before a null block was
        given back earlier. O(blocks given back)."""
        table = self.req_to_blocks.get(request_id, [])
        removed = []
        for i in range(min(last_block, len(table)) - 1, first_block - 1, -1):
            if table[i].is_null:
                break
            removed.append(table[i])
            table[i] = self._null_block
        if removed:
            self.block_pool.free_blocks(removed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Number of leading tokens that the computation of the next token does not read; at least 0."""
        return 0

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget the request. Returns its blocks in token order, for the caller to free, last first; none for an
        unknown request."""
        self.num_cached_block.pop(request_id, None)
        self._partial_hit_reqs.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Forget the request and give its blocks back, last first, so that the end of a prefix is evicted first."""
        self.block_pool.free_blocks(self.pop_blocks_for_free(request_id)[::-1])

    def find_uncomputed_ids(self, request_id: str, num_computed_tokens: int) -> list[int]:
        """Ids of the request's blocks whose hash covers a token beyond the computed ones. O(blocks of the request)."""
        return [
            block.block_id
            for block in self.req_to_blocks.get(request_id, ())
            if (block.block_hash_num_tokens or 0) > num_computed_tokens
        ]

    def take_back(self, request_id: str, num_computed_tokens: int, num_kept_blocks: int | None = None) -> None:
        """Take the blocks for tokens beyond the computed ones, and hashes that cover such a token. What is done is
        not undone by a second call, and each part leaves nothing worse than a reference that is in no table.

        Args:
            num_kept_blocks: how many blocks stay; None: those of computed tokens.
        """
        self.block_pool.evict_blocks(self.find_uncomputed_ids(request_id, num_computed_tokens))
        if request_id in self.num_cached_block:
            num_full_blocks = num_computed_tokens // self.block_size
            self.num_cached_block[request_id] = min(self.num_cached_block[request_id], num_full_blocks)
        if num_kept_blocks is None:
            num_kept_blocks = ceil_div(num_computed_tokens, self.block_size)
        self._shorten(request_id, num_kept_blocks)

    def _shorten(self, request_id: str, num_blocks: int) -> None:
        self.block_pool.free_blocks(self._cut(request_id, num_blocks)[::-1])

    def _cut(self, request_id: str, num_blocks: int) -> Sequence[KVCacheBlock]:
        """Takes all but the first blocks out of the request's table, and returns them."""
        table = self.req_to_blocks.get(request_id)
        if table is None or len(table) <= num_blocks:
            return []
        kept, removed = table[:num_blocks], table[num_blocks:]
        shortened = self.block_pool.new_block_table()
        shortened += kept
        self.req_to_blocks[request_id] = shortened
        return removed

    # An allocation that fails

    def note(self, request_id: str) -> AllocationNote:
        """What ``undo_allocation`` needs to know, before anything is taken for the request. O(blocks of its table that
        are not cached)."""
        table = self.req_to_blocks.get(request_id)
        num_cached_blocks = self.num_cached_block.get(request_id)
        return AllocationNote(
            None if table is None else len(table),
            num_cached_blocks,
            self._partial_hit_reqs.get(request_id),
            frozenset(self._last_hashes(request_id, num_cached_blocks or 0)),
            len(self._pending_cow_copies),
            len(self.new_block_ids),
        )

    def undo_allocation(
        self, request_id: str, num_computed_tokens: int, note: AllocationNote, hits: Sequence[KVCacheBlock]
    ) -> None:
        """Set all back that has changed since the note, but for hashes that are gone: of blocks that were taken, and of
        the end of a prompt where its block was published as a whole.

        Args:
            num_computed_tokens: what covers more was published since the note, but for hits.
            hits: blocks that the request was to start with.
        """
        # Those that a window has passed by may be among the new blocks.
        table = self.req_to_blocks.get(request_id, ())
        hit_ids = {block.block_id for block, held in zip(hits, table) if block is held}
        new_ids = self.find_uncomputed_ids(request_id, num_computed_tokens)
        new_ids = [block_id for block_id in new_ids if block_id not in hit_ids]
        if note.num_blocks is not None:  # and what is computed, and was not published so far
            new_hashes = set(self._last_hashes(request_id, note.num_cached_blocks or 0)) - note.last_hashes
            new_ids += [block_id for block_id, _ in new_hashes]
        self.block_pool.evict_blocks(new_ids)
        while len(self._pending_cow_copies) > note.num_copies:
            self._undo_copy(request_id, *self._pending_cow_copies[-1])
            self._pending_cow_copies.pop()
        del self.new_block_ids[note.num_new_ids :]
        removed = self._cut(request_id, note.num_blocks or 0)
        if note.num_blocks is None:
            self.req_to_blocks.pop(request_id, None)
        set_or_remove(self.num_cached_block, request_id, note.num_cached_blocks)
        set_or_remove(self._partial_hit_reqs, request_id, note.partial_hit)
        # New ones back to where they were; hits to where freed blocks go.
        self.block_pool.free_blocks([block for block in removed if block.block_hash is None], prepend=True)
        self.block_pool.free_blocks([block for block in removed[::-1] if block.block_hash is not None])

    def _last_hashes(self, request_id: str, num_cached_blocks: int) -> list[tuple[int, Any]]:
        """Ids and hashes of the request's last blocks that can be hit: those behind the cached ones, and two before,
        as states of Mamba layers may be published later than the blocks that they are in."""
        if not self.enable_caching:
            return []
        table = self.req_to_blocks.get(request_id, ())
        last = table[max(num_cached_blocks - 2, 0) :]
        return [(block.block_id, block.block_hash) for block in last if block.block_hash is not None]

    def _undo_copy(self, request_id: str, source_block: KVCacheBlock, cow_block: KVCacheBlock) -> None:
        """The source has the place in the table again that ``_apply_cow`` gave to the copy."""
        table = self.req_to_blocks[request_id]
        table[next(i for i, block in enumerate(table) if block is cow_block)] = source_block
        self.block_pool.free_blocks([cow_block, cow_block], prepend=True)

    # Prefix cache

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Make the blocks that the first num_tokens tokens fill reachable by their hashes.

        Args:
            request: its ``request_id`` and ``block_hashes`` are read, and ``shared_prefix_boundary`` (tokens; the
                end of a prefix that another group has cached further), where it has one.
            num_tokens: computed tokens, those of blocks that are cached included.
            retention_interval: for types that can do without most of their blocks: None: every block that a hit can
                use; 0: only those for the boundaries; else also one place per so many tokens.
            replay_boundaries: tokens; where a request with the same prompt can resume.
        """
        if not self.kv_cache_spec.prefix_cacheable:
            return
        request_id = request.request_id
        num_cached_blocks = self.num_cached_block.get(request_id, 0)
        num_full_blocks = num_tokens // self.block_size
        if num_cached_blocks >= num_full_blocks:
            return
        reachable_boundaries = [*replay_boundaries]
        shared_prefix_boundary = getattr(request, "shared_prefix_boundary", 0)
        if shared_prefix_boundary:
            reachable_boundaries.append(shared_prefix_boundary)
        block_mask = self.reachable_block_mask(
            start_block=num_cached_blocks,
            end_block=num_full_blocks,
            alignment_tokens=self.cache_hit_alignment_tokens,
            kv_cache_spec=self.kv_cache_spec,
            use_eagle=self.use_eagle,
            retention_interval=retention_interval,
            reachable_boundaries=reachable_boundaries,
        )
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=block_mask,
        )
        self.num_cached_block[request_id] = num_full_blocks

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Which of the blocks [start_block, end_block) can be part of a hit; None if all can.

        Args:
            alignment_tokens: tokens; hits end at multiples of it. None if they end at any block.
            use_eagle: whether hits drop their last block.
            retention_interval: as for ``cache_blocks``.
            reachable_boundaries: tokens; hits that end there are wanted although retention_interval leaves them out.
            final_segment_end_block: where the sequence ends, if known: the blocks before it are kept as well.
        """
        return None

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> PrefixHit:
        """The longest prefix that all of the groups have in the cache.

        Args:
            block_hashes: hashes of the request, one per ``block_pool.hash_block_size`` tokens, or a view of them.
            max_length: tokens; no hit is longer.
            kv_cache_group_ids: groups with this spec, looked up together.
            drop_eagle_block: leave the last matched block out, so that the tokens which a draft model of the EAGLE
                kind starts from are computed again.
            alignment_tokens: tokens; the length of the hit is a multiple of it.

        Returns:
            For each group the blocks from the first token on, null where a block is not needed; and the length of
            the hit in tokens.
        """
        if not isinstance(kv_cache_spec, cls.served_specs):
            raise InvalidArgumentError(f"a {cls.__name__} looks up hits for another spec: {kv_cache_spec!r}")
        refuse_context_parallelism(dcp_world_size, pcp_world_size)
        return cls._find_longest_hit(
            PrefixLookup(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
            )
        )

    @classmethod
    @abstractmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """``find_longest_cache_hit``, for one of ``served_specs``."""

    # What the coordinator collects after a step

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Whether an index of a block table stands for the same tokens for ever (its block may become null)."""
        return True

    @property
    def records_new_block_ids(self) -> bool:
        return self._record_new_block_ids

    def take_new_block_ids(self) -> list[int]:
        """Ids of blocks given to requests since the last call, to be filled with zeros."""
        ids, self.new_block_ids = self.new_block_ids, []
        return ids

    @property
    def pending_cow_copies(self) -> Sequence[tuple[KVCacheBlock, KVCacheBlock]]:
        """What ``take_pending_cow_copies`` will return."""
        return self._pending_cow_copies

    def take_pending_cow_copies(self) -> list[tuple[KVCacheBlock, KVCacheBlock]]:
        """Pairs (source, copy) since the last call; each has a reference that the caller frees after the copy."""
        copies, self._pending_cow_copies = self._pending_cow_copies, []
        return copies

    def take_pending_boundary_state_offloads(self) -> list[tuple[str, int, KVCacheBlock, int]]:
        """States for external stores: none, as they are not offered."""
        return []

    def finalize_partial_tail_offload(
        self, request_id: str, num_computed_tokens: int, num_in_flight_tokens: int
    ) -> tuple[int, KVCacheBlock, int] | None:
        """The state of a finished request for external stores: none, as they are not offered."""
        return None

    def new_step_starts(self) -> None:  # noqa: B027
        """A scheduler step begins."""


def refuse_context_parallelism(dcp_world_size: int, pcp_world_size: int) -> None:
    if dcp_world_size != 1 or pcp_world_size != 1:
        raise InvalidArgumentError(
            f"context parallelism is not supported: dcp_world_size={dcp_world_size}, pcp_world_size={pcp_world_size}"
        )
