"""Mamba layers: a request continues from one state, so a hit needs only the state at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.cache.managers.base import PrefixHit, PrefixLookup
from kvpool.cache.managers.full_attention import fine_grained_hashes
from kvpool.cache.managers.mamba_align import AlignedMambaBlocks
from kvpool.cache.spec import KVCacheSpec, MambaSpec
from kvpool.hashing.block_hash import resolve_block_hashes

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock


class MambaManager(AlignedMambaBlocks):
    """States of Mamba layers. vLLM: ``MambaManager``, without the states it offers to external stores.

    In the mode "align" (``AlignedMambaBlocks``) a table is mostly null and a step fills one block; in the others the
    table is as for attention, with ``num_speculative_blocks`` more blocks at its end.
    """

    served_specs = (MambaSpec,)
    supports_fine_grained_hash_lookup: ClassVar[bool] = True

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Not in the mode "align", where scratch blocks move."""
        return self.mamba_cache_mode != "align"

    # Blocks for a request

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last: its state stands for those before it."""
        return max(num_computed_tokens - 1, 0)

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
        """See the base class. More than the pool has, if the hit is a state that the present step computes: the
        request has to wait for the next."""
        if new_computed_blocks and new_computed_blocks[-1].block_hash in self.cached_blocks_this_step:
            return self.block_pool.num_gpu_blocks + 1
        if self.mamba_cache_mode == "align":
            # Draft models have no Mamba layers: no slots for lookahead, which would break the alignment.
            return self._num_aligned_blocks_to_allocate(
                request_id,
                num_tokens_main_model,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                apply_admission_cap,
                prefill_end,
            )
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens + self.block_size * self.num_speculative_blocks,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if self.mamba_cache_mode == "align":
            return self._allocate_aligned_blocks(request_id, num_tokens_main_model)
        num_tokens += self.block_size * self.num_speculative_blocks
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        if self.mamba_cache_mode == "align":
            self._remove_aligned_range(request_id, first_block, last_block)
        else:
            super()._remove_blocks_in_range(request_id, first_block, last_block)

    def _shorten(self, request_id: str, num_blocks: int) -> None:
        """States that steps have changed are of no use: all of the table goes, when the request is freed."""

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        self._forget_aligned(request_id)
        return super().pop_blocks_for_free(request_id)

    def new_step_starts(self) -> None:
        """States that were cached before are computed by now."""
        self.cached_blocks_this_step.clear()

    # Prefix cache

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """See the base class; in the mode "align" the state at the end of the prompt is cached too, and
        ``num_prompt_tokens`` and ``num_computed_tokens`` of the request are read."""
        request_id = request.request_id
        num_before = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        num_after = self.num_cached_block.get(request_id, 0)
        if self.mamba_cache_mode == "align":
            key = self._cache_partial_tail_block(request, num_tokens, retention_interval)
            if key is not None:
                self.cached_blocks_this_step.add(key)
        if num_after > num_before:
            for block in self.req_to_blocks[request_id][num_before:num_after]:
                if block.block_hash is not None:  # neither null nor masked
                    self.cached_blocks_this_step.add(block.block_hash)

    @classmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """See the base class. Looks from the end for one cached state; all blocks before it are null. No block is
        dropped for EAGLE, as draft models have no Mamba layers. O(hashes)."""
        block_hashes, max_length, group_ids, block_pool, spec, _, alignment_tokens = lookup
        block_size = hit_size = spec.block_size
        fine_hashes = fine_grained_hashes(block_hashes, block_pool.hash_block_size, block_size, alignment_tokens)
        if fine_hashes is None:
            hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        else:
            hashes, hit_size = fine_hashes, alignment_tokens
        for i in range(min(max_length // hit_size, len(hashes)) - 1, -1, -1):
            hit_length = (i + 1) * hit_size
            if hit_length % alignment_tokens:
                continue
            cached = block_pool.get_cached_block(hashes[i], group_ids)
            if cached is not None:
                null_blocks = [block_pool.null_block] * (i * hit_size // block_size)
                return tuple([*null_blocks, block] for block in cached), hit_length
        return tuple([] for _ in group_ids), 0

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
        """See the base class: the one block that ends at a boundary is kept. O(blocks)."""
        if retention_interval is None or alignment_tokens is None:
            return None
        block_size = kv_cache_spec.block_size
        mask = [False] * (end_block - start_block)
        if retention_interval:
            num_between = retention_interval // block_size
            if num_between <= 1:
                return None
            for end in range(start_block // num_between * num_between + num_between, end_block + 1, num_between):
                mask[end - 1 - start_block] = True
        for boundary in reachable_boundaries:
            end = boundary // alignment_tokens * alignment_tokens // block_size
            if start_block < end <= end_block:
                mask[end - 1 - start_block] = True
        return mask
