"""Sliding window attention: blocks that have left the window are given back, and a hit needs only the blocks of the
window before its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.base import PrefixHit, PrefixLookup, SingleTypeKVCacheManager, refuse_context_parallelism
from kvpool.cache.spec import KVCacheSpec, SlidingWindowSpec, ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import resolve_block_hashes

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Block tables of sliding window layers. vLLM: ``SlidingWindowManager``."""

    served_specs = (SlidingWindowSpec,)

    def __init__(self, kv_cache_spec: SlidingWindowSpec, block_pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        self.sliding_window = kv_cache_spec.sliding_window
        self.extra_retained_tokens = kv_cache_spec.extra_retained_tokens

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """The next token sees itself and ``sliding_window - 1`` tokens before it: with a window of 4 and 7 computed
        tokens, 3 .. 6 of them and so 0 .. 3 - 1 are skipped, less those that are retained in addition."""
        return max(num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens, 0)

    @staticmethod
    def _contiguous_blocks_for_hit(window_size: int, block_size: int, use_eagle: bool) -> int:
        """Number of cached blocks in a row that make a hit: those of the tokens that the next one sees, and the one
        that is dropped."""
        return ceil_div(window_size - 1, block_size) + use_eagle

    @classmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """See the base class. Looks from the end for enough cached blocks in a row; fewer do if they begin with the
        first token. O(max_length / block_size)."""
        block_hashes, max_length, group_ids, block_pool, spec, drops_block, alignment_tokens = lookup
        block_size = spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        num_needed = cls._contiguous_blocks_for_hit(spec.sliding_window, block_size, drops_block)

        def align_down(num_blocks: int) -> int:
            while num_blocks * block_size % alignment_tokens:
                num_blocks -= 1
            return num_blocks

        row: list[list[KVCacheBlock]] = []  # cached blocks in a row, the last one first: for each, that of each group
        first = 0
        is_enough = False
        for i in range(min(max_length // block_size, len(hashes)) - 1, -1, -1):
            cached = block_pool.get_cached_block(hashes[i], group_ids)
            if cached is None:
                row.clear()
                continue
            if not row and (i if drops_block else i + 1) * block_size % alignment_tokens:
                continue  # a hit can't end here
            row.append(cached)
            if len(row) >= num_needed:
                first, is_enough = i, True
                break

        num_blocks = first + len(row)
        if not is_enough:
            num_blocks = align_down(num_blocks)
        if drops_block and num_blocks:
            num_blocks = align_down(num_blocks - 1)
        row.reverse()
        null_blocks = [block_pool.null_block] * first
        tables = tuple((null_blocks + [cached[k] for cached in row])[:num_blocks] for k in range(len(group_ids)))
        return tables, num_blocks * block_size

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
        """See the base class: only the window before a place where hits can end is reachable. O(blocks)."""
        if not isinstance(kv_cache_spec, SlidingWindowSpec):
            raise InvalidArgumentError(f"a sliding window is masked for another spec: {kv_cache_spec!r}")
        refuse_context_parallelism(dcp_world_size, 1)
        block_size = kv_cache_spec.block_size
        if alignment_tokens is None or alignment_tokens % block_size:
            return None
        num_needed = cls._contiguous_blocks_for_hit(kv_cache_spec.sliding_window, block_size, use_eagle)
        # EAGLE looks one block beyond the end of the hit.
        num_beyond = int(use_eagle)
        mask = [False] * (end_block - start_block)

        def keep(first: int, past: int) -> None:
            first, past = max(first, start_block), min(past, end_block)
            if first < past:
                mask[first - start_block : past - start_block] = [True] * (past - first)

        interval = alignment_tokens if retention_interval is None else retention_interval
        if interval:
            num_between = interval // block_size
            if num_needed >= num_between:
                return None
            ends = range((start_block - num_beyond) // num_between * num_between, end_block + num_needed, num_between)
            for end in ends:
                if end > 0:
                    keep(end + num_beyond - num_needed, end + num_beyond)
            if final_segment_end_block is not None and not use_eagle:
                last_end = final_segment_end_block // num_between * num_between
                keep(max(last_end, final_segment_end_block - num_needed), final_segment_end_block)
        if retention_interval is not None:
            for boundary in reachable_boundaries:
                end = boundary // alignment_tokens * alignment_tokens // block_size + num_beyond
                keep(end - num_needed, end)
        return mask
