"""Blocks of Mamba layers in the mode "align": one running state, and states kept where a step ends at a boundary.

A block holds one state. The table has an entry per ``block_size`` tokens as for attention, most of them null: of the
entries that a step adds only the last has a block, into which the step writes its state, followed by
``num_speculative_blocks`` scratch blocks for draft tokens. With S for the scratch blocks and a step that ends in
block n of the table:

    index    0 .. n-1                             n               n+1 .. n+S
             null, or a state that was kept       running state   scratch

- The step before wrote its state to an earlier index. This step reads it from there; once this step is processed,
  ``remove_skipped_blocks`` gives it back. When it is cached it is still reachable.
- Scratch blocks that fall behind index n are moved to the end of the table instead of being given back.
- Checkpoint: where a kernel can write out the state in the middle of a prefill step, the step reserves index n-1 for
  the state at the boundary that a later request will resume at.
- A state that is reachable at a boundary inside its block is overwritten by the next step. A request that hit it
  works on a copy (base class). The request that made it goes on with its block, because its worker knows the table:
  the hash moves to the copy, which has the references of the two sides until the contents are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.base import AllocationNote, SingleTypeKVCacheManager, set_or_remove
from kvpool.cache.spec import MambaSpec, ceil_div
from kvpool.errors import BlockStateError

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock
    from kvpool.hashing.block_hash import BlockHashWithGroupId


def get_mamba_prefill_checkpoint_position(num_tokens: int, hash_block_size: int, drop_eagle_block: bool) -> int:
    """The last boundary, in tokens, that a request with the same num_tokens tokens can resume at; 0 if none.

    A token at least is left to compute; with EAGLE it is the hash block that its hits drop.
    vLLM: the function of this name.
    """
    if drop_eagle_block:
        return max(num_tokens // hash_block_size - 1, 0) * hash_block_size
    return max(num_tokens - 1, 0) // hash_block_size * hash_block_size


def is_mamba_prefill_checkpoint_valid(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
) -> bool:
    """Whether the step [query_start, query_end) can write out the state at checkpoint_position: all in tokens.

    The step starts at a boundary, the position is at least one boundary further, inside the step, at a multiple of
    checkpoint_alignment from its start, and the block for it does not hold the state that the step starts from.
    vLLM: the function of this name.
    """
    if checkpoint_alignment is None:
        return False
    checkpoint_idx = ceil_div(query_end, mamba_block_size) - 2
    initial_state_idx = (query_start - 1) // mamba_block_size
    num_tokens_before = checkpoint_position - query_start
    return (
        query_start % hash_block_size == 0
        and checkpoint_idx > initial_state_idx
        and num_tokens_before >= hash_block_size
        and checkpoint_position < query_end
        and num_tokens_before % checkpoint_alignment == 0
    )


class AlignedMambaBlocks(SingleTypeKVCacheManager):
    """The part of ``MambaManager`` that is for the mode "align".

    Attributes:
        drop_eagle_checkpoint_block: whether requests resume a hash block earlier, with EAGLE; set by the coordinator.
        cached_blocks_this_step: keys of states that this step computes, so that nobody can start from them yet.
    """

    kv_cache_spec: MambaSpec

    def __init__(self, kv_cache_spec: MambaSpec, block_pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        self.mamba_cache_mode = kv_cache_spec.mamba_cache_mode
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        self.has_prefill_checkpoint_blocks = (
            self.mamba_cache_mode == "align" and kv_cache_spec.num_prefill_checkpoint_blocks > 0
        )
        self.drop_eagle_checkpoint_block = False
        self.cached_blocks_this_step: set[BlockHashWithGroupId] = set()
        self._num_retired_blocks: dict[str, int] = {}
        self._allocated_block_reqs: set[str] = set()
        # By request id, tokens and index of the checkpoint that the step makes.
        self._checkpoints: dict[str, tuple[int, int]] = {}
        # Of the last allocation: index of the first scratch block that moved, and those that did.
        self._last_move: tuple[int, Sequence[KVCacheBlock]] = 0, ()

    # Blocks for a request

    def _num_aligned_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        apply_admission_cap: bool,
        prefill_end: int,
    ) -> int:
        """``get_num_blocks_to_allocate``; notes the checkpoint of the step unless the whole sequence is counted.

        The count is never too low, which vLLM's can be: it misses the block of a state from elsewhere, and is
        negative for a table that is longer than it needs to be, so that the groups together seem to need less.
        """
        num_present_blocks = len(new_computed_blocks) + len(self.req_to_blocks.get(request_id, ()))
        num_required_blocks = ceil_div(num_tokens, self.block_size) + self.num_speculative_blocks
        num_external_blocks = 0
        if total_computed_tokens > num_local_computed_tokens and request_id not in self.num_cached_block:
            past_external = ceil_div(total_computed_tokens, self.block_size)
            if past_external > num_present_blocks:
                # The state that comes from elsewhere has a block; all before it is null, the hit as well.
                num_external_blocks = 1
                num_present_blocks = past_external
                new_computed_blocks = ()
        num_new_blocks = max(num_required_blocks - num_present_blocks, 0)
        num_private_blocks = int(
            request_id in self._partial_hit_reqs
            or self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens)
        )
        num_new_blocks += num_private_blocks
        checkpoint = self._find_checkpoint(request_id, total_computed_tokens, num_tokens, prefill_end)
        if not apply_admission_cap:
            if checkpoint is None:
                self._checkpoints.pop(request_id, None)
            else:
                self._checkpoints[request_id] = checkpoint
        # However long the step is, it fills the running state, and what comes with it.
        num_filled_blocks = 1 + num_private_blocks + (checkpoint is not None)
        if request_id not in self._allocated_block_reqs:
            num_filled_blocks += self.num_speculative_blocks
        num_new_blocks = min(num_new_blocks, num_filled_blocks)
        return num_new_blocks + num_external_blocks + self._get_num_evictable_blocks(new_computed_blocks)

    def _find_checkpoint(
        self, request_id: str, query_start: int, query_end: int, prefill_end: int
    ) -> tuple[int, int] | None:
        """Tokens and index of the checkpoint that the step [query_start, query_end) makes, if it makes one."""
        if not self.has_prefill_checkpoint_blocks or query_end < prefill_end:
            return None
        position = get_mamba_prefill_checkpoint_position(
            query_end, self.cache_hit_alignment_tokens, self.drop_eagle_checkpoint_block
        )
        index = ceil_div(query_end, self.block_size) - 2
        is_valid = index >= 0 and is_mamba_prefill_checkpoint_valid(
            query_start=query_start,
            query_end=query_end,
            checkpoint_position=position,
            hash_block_size=self.block_pool.hash_block_size,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self.kv_cache_spec.prefill_checkpoint_alignment,
        )
        if not is_valid:
            return None
        table = self.req_to_blocks.get(request_id, [])
        is_scratch = request_id in self._allocated_block_reqs and index >= len(table) - self.num_speculative_blocks
        is_vacant = index >= len(table) or table[index].is_null or is_scratch
        return (position, index) if is_vacant else None

    def _allocate_aligned_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """``allocate_new_blocks``. The new entries of the table come back, null ones and moved scratch blocks among
        them, after the private copy of a hit that ended inside a block, if there is one."""
        table = self.req_to_blocks.get(request_id, [])
        num_held_blocks = len(table)
        num_scratch = self.num_speculative_blocks
        num_required_blocks = ceil_div(num_tokens, self.block_size) + num_scratch
        num_checkpoints = int(request_id in self._checkpoints)
        partial_hit = self._partial_hit_reqs.get(request_id)
        if num_required_blocks <= num_held_blocks and partial_hit is None and not num_checkpoints:
            self._allocated_block_reqs.add(request_id)
            return []

        is_running = request_id in self._allocated_block_reqs
        past_null = num_required_blocks - num_scratch - 1 - num_checkpoints
        num_nulls = max(past_null - num_held_blocks, 0)
        first_scratch = num_held_blocks - num_scratch
        num_moved = min(max(past_null - first_scratch, 0), num_scratch) if is_running else 0
        moved = table[first_scratch : first_scratch + num_moved] if num_moved else []
        for block in moved:
            if not self.block_pool.is_block_writable(block):
                raise BlockStateError(f"a scratch block of request {request_id!r} is shared or cached: {block!r}")
        self.refuse_lost_source(request_id, 0)
        num_appended = max(num_required_blocks - num_held_blocks - num_nulls - num_moved, 0)
        new_blocks = self.block_pool.get_new_blocks(num_appended + (partial_hit is not None))

        # From here on nothing fails.
        table = self.req_to_blocks[request_id]
        self._last_move = first_scratch, moved
        table += [self._null_block] * num_nulls
        table += moved
        table[first_scratch : first_scratch + num_moved] = [self._null_block] * num_moved
        returned_blocks = list(table[num_held_blocks:])
        if partial_hit is not None:
            private_block, *new_blocks = new_blocks
            if is_running:
                self._keep_state_in_copy(partial_hit[1], private_block)
            else:
                self._apply_cow(request_id, *partial_hit, private_block)
                returned_blocks.insert(0, private_block)
            del self._partial_hit_reqs[request_id]
        table += new_blocks
        self._allocated_block_reqs.add(request_id)
        return returned_blocks + new_blocks

    def _keep_state_in_copy(self, source_block: KVCacheBlock, cow_block: KVCacheBlock) -> None:
        """Move the hash of a running state to a block that will hold a copy of it."""
        # The copy is asked for before it can be hit: whoever is interrupted here takes back what was asked for.
        self._pending_cow_copies.append((source_block, cow_block))
        self.block_pool.move_block_hashes(source_block, cow_block)
        self.block_pool.add_reference(source_block)
        if cow_block.block_hash is not None:
            self.cached_blocks_this_step.add(cow_block.block_hash)

    # An allocation that fails

    def note(self, request_id: str) -> AllocationNote:
        self._last_move = 0, ()
        return (
            super()
            .note(request_id)
            ._replace(
                is_allocated=request_id in self._allocated_block_reqs, checkpoint=self._checkpoints.get(request_id)
            )
        )

    def undo_count(self, request_id: str, note: AllocationNote) -> None:
        """What ``get_num_blocks_to_allocate`` has noted for a step that will not be."""
        set_or_remove(self._checkpoints, request_id, note.checkpoint)

    def undo_allocation(
        self, request_id: str, num_computed_tokens: int, note: AllocationNote, hits: Sequence[KVCacheBlock]
    ) -> None:
        first_scratch, moved = self._last_move
        if moved:
            table = self.req_to_blocks[request_id]
            past_held = note.num_blocks or 0
            for i in range(past_held, len(table)):
                if any(table[i] is block for block in moved):
                    table[i] = self._null_block
            table[first_scratch : first_scratch + len(moved)] = moved
            self._last_move = 0, ()
        keys = [
            block.block_hash
            for block in self.req_to_blocks.get(request_id, ())
            if (block.block_hash_num_tokens or 0) > num_computed_tokens and block.block_hash is not None
        ]
        super().undo_allocation(request_id, num_computed_tokens, note, hits)
        for key in keys:
            # What others have of the same tokens may be of this step as well: they wait for the next.
            if self.block_pool.cached_block_hash_to_block.get_one_block(key) is None:
                self.cached_blocks_this_step.discard(key)
        self.undo_count(request_id, note)
        if not note.is_allocated:
            self._allocated_block_reqs.discard(request_id)

    def _undo_copy(self, request_id: str, source_block: KVCacheBlock, cow_block: KVCacheBlock) -> None:
        if any(block is cow_block for block in self.req_to_blocks[request_id]):
            super()._undo_copy(request_id, source_block, cow_block)
            return
        if cow_block.block_hash is not None:
            self.cached_blocks_this_step.discard(cow_block.block_hash)
            self.block_pool.move_block_hashes(cow_block, source_block)
        self.block_pool.free_blocks([cow_block, source_block], prepend=True)  # the table has the source too

    # Giving blocks back

    def _remove_aligned_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """``_remove_blocks_in_range``: null blocks lie between states, so that it doesn't end at the first; what was
        gone through before is not gone through again."""
        table = self.req_to_blocks.get(request_id, [])
        first_block = max(first_block, self._num_retired_blocks.get(request_id, 0))
        last_block = min(last_block, len(table))
        if first_block >= last_block:
            return
        removed = []
        for i in range(last_block - 1, first_block - 1, -1):
            if not table[i].is_null:
                removed.append(table[i])
                table[i] = self._null_block
        if removed:
            self.block_pool.free_blocks(removed)
        self._num_retired_blocks[request_id] = last_block

    def _forget_aligned(self, request_id: str) -> None:
        self._allocated_block_reqs.discard(request_id)
        self._num_retired_blocks.pop(request_id, None)
        self._checkpoints.pop(request_id, None)

    # Prefix cache

    def _cache_partial_tail_block(
        self, request: Any, num_tokens: int, retention_interval: int | None
    ) -> BlockHashWithGroupId | None:
        """Cache the state at the end of the prompt, which need not be the end of a block. Returns its key, if one
        was given."""
        checkpoint = self._checkpoints.get(request.request_id)
        if checkpoint is not None:
            return self._cache_checkpoint(request, *checkpoint, retention_interval)
        if num_tokens <= 0 or num_tokens % self.block_pool.hash_block_size:
            return None
        last_boundary = get_mamba_prefill_checkpoint_position(
            request.num_prompt_tokens, self.block_pool.hash_block_size, self.drop_eagle_checkpoint_block
        )
        if num_tokens != last_boundary and not self._is_shared_prefix_end(request, num_tokens):
            return None
        block_idx = ceil_div(num_tokens, self.block_size) - 1
        table = self.req_to_blocks[request.request_id]
        if block_idx >= len(table) or table[block_idx].is_null:
            return None
        block = table[block_idx]
        key = self._cache_state(request, block, num_tokens)
        if key is not None and num_tokens % self.block_size:
            # The next step writes into this block.
            self._partial_hit_reqs[request.request_id] = (block_idx, block)
            self.num_cached_block[request.request_id] = block_idx
        return key

    def _is_shared_prefix_end(self, request: Any, num_tokens: int) -> bool:
        """Whether others resume here, and the state is one that the present prefill step computes: in decoding, the
        block would hold it only after the step."""
        return (
            self.shared_prefix_checkpoint
            and num_tokens == request.shared_prefix_boundary
            and request.num_computed_tokens < num_tokens <= request.num_prompt_tokens
        )

    def _cache_checkpoint(
        self, request: Any, position: int, index: int, retention_interval: int | None
    ) -> BlockHashWithGroupId | None:
        if position // self.block_pool.hash_block_size > len(request.block_hashes):
            return None  # the step goes beyond the tokens there are: no hash says what the state stands for
        block = self.req_to_blocks[request.request_id][index]
        is_wanted = position in (
            getattr(request, "shared_prefix_boundary", 0),
            get_mamba_prefill_checkpoint_position(
                request.num_prompt_tokens, self.cache_hit_alignment_tokens, self.drop_eagle_checkpoint_block
            ),
        )
        if not is_wanted and position % self.block_size == 0:
            block_idx = position // self.block_size - 1
            mask = self.reachable_block_mask(
                block_idx,
                block_idx + 1,
                self.cache_hit_alignment_tokens,
                self.kv_cache_spec,
                self.drop_eagle_checkpoint_block,
                retention_interval=retention_interval,
            )
            is_wanted = mask is None or mask[0]
        if not is_wanted:
            # The block holds neither this state nor the one at its end, whose hash it may have got in this step.
            self.block_pool._maybe_evict_cached_block(block)
            return None
        if block.block_hash_num_tokens == position:
            return None
        return self._cache_state(request, block, position, replace_existing_hashes=True)

    def _cache_state(
        self, request: Any, block: KVCacheBlock, num_tokens: int, replace_existing_hashes: bool = False
    ) -> BlockHashWithGroupId | None:
        return self.block_pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=num_tokens,
            kv_cache_group_id=self.kv_cache_group_id,
            block_size=self.block_size,
            replace_existing_hashes=replace_existing_hashes,
        )
