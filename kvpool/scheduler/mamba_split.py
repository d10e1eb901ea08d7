"""Where a prefill has to be cut when the cache keeps Mamba states.

A state exists only where a step ends. With ``mamba_cache_mode="align"`` the block at index i of a Mamba group holds the
state after exactly (i + 1) * block_size tokens, so steps of a prefill end at multiples of the block size, and at a few
places more where a state is worth keeping: others resume there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.cache.spec import MambaSpec

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.kv_cache_manager import KVCacheManager


class MambaSplit:
    """Shortens the parts that prefills are computed in (vLLM: ``_mamba_block_aligned_split``).

    Args:
        manager: of a configuration with Mamba groups in "align" mode, see ``is_needed``.
        max_prefill_tokens: tokens a request gets in one step at most.
    """

    def __init__(self, manager: KVCacheManager, max_prefill_tokens: int) -> None:
        self._block_size = next(
            group.kv_cache_spec.block_size
            for group in manager.kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, MambaSpec)
        )
        self._max_prefill_tokens = max_prefill_tokens
        self._hash_block_size = manager.hash_block_size
        self._drops_last_block = manager.use_eagle
        self._has_partial_hits = manager.hash_block_size < self._block_size and manager.enable_partial_hash_hits
        self._keeps_shared_prefix = self._has_partial_hits and manager.mamba_shared_prefix_checkpoint

    @staticmethod
    def is_needed(manager: KVCacheManager) -> bool:
        """Whether there is a Mamba group that keeps states at block boundaries."""
        specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        return any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" for spec in specs)

    def clip(self, request: Request, num_computed_tokens: int, num_tokens: int) -> int:
        """How many of ``num_tokens`` tokens to compute now, from ``num_computed_tokens`` on.

        0 when not even the next block boundary is within reach, but would be with a whole step's budget: the request
        waits for a step that has room. Decoding is never shortened. O(1).
        """
        start, block_size = num_computed_tokens, self._block_size
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_tokens
        end = start + num_tokens
        if end < prefill_end:
            aligned_end = end // block_size * block_size
            if aligned_end > start or block_size <= self._max_prefill_tokens:
                end = aligned_end
        stops = [stop for stop in self._stops(request, start, end) if start < stop < end]
        return max(min(stops, default=end) - start, 0)

    def _stops(self, request: Request, start: int, end: int) -> list[int]:
        """Places where the step has to end if it would pass them; 0 stands for none."""
        block_size = self._block_size
        last_boundary = self._last_resumable(request.num_tokens, block_size)
        stops = [last_boundary]
        if start % block_size:
            stops.append((start // block_size + 1) * block_size)
        if self._has_partial_hits:
            tail = self._last_resumable(request.num_prompt_tokens, self._hash_block_size)
            stops.append(tail if last_boundary < tail < request.num_prompt_tokens else 0)
        shared_prefix = request.shared_prefix_boundary
        if start < shared_prefix < end:
            is_kept = self._keeps_shared_prefix and shared_prefix <= request.num_prompt_tokens
            stops.append(shared_prefix if is_kept else start + (shared_prefix - start) // block_size * block_size)
        return stops

    def _last_resumable(self, num_tokens: int, granularity: int) -> int:
        """The last multiple from which a prompt of that length is resumed: at least one token is left to compute, or
        with EAGLE a block of the hit is dropped."""
        if self._drops_last_block:
            return max(num_tokens // granularity * granularity - granularity, 0)
        return max((num_tokens - 1) // granularity * granularity, 0)
