"""Full attention: every block of a request is read until it ends, so a hit is a run of cached blocks from the start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from kvpool.cache.managers.base import PrefixHit, PrefixLookup, SingleTypeKVCacheManager
from kvpool.cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize, make_block_hash_with_group_id, resolve_block_hashes

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock
    from kvpool.hashing.block_hash import BlockHashList


class FullAttentionManager(SingleTypeKVCacheManager):
    """Block tables of full attention layers. vLLM: ``FullAttentionManager``.

    Where block hashes are finer than blocks, the end of a prompt inside its last block is cached too, and hits can
    end inside a block.
    """

    served_specs = (FullAttentionSpec, ChunkedLocalAttentionSpec)
    supports_fine_grained_hash_lookup: ClassVar[bool] = True

    @classmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """See the base class. O(blocks of the hit); inside a block, O(hashes of a block) more."""
        block_hashes, max_length, group_ids, block_pool, spec, drops_block, alignment_tokens = lookup
        block_size = spec.block_size
        fine_hashes = fine_grained_hashes(block_hashes, block_pool.hash_block_size, block_size, alignment_tokens)
        if fine_hashes is None:
            hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        else:
            hashes = BlockHashListWithBlockSize(fine_hashes, alignment_tokens, block_size)

        found: list[list[KVCacheBlock]] = []  # for each block, the one of each group
        for block_hash in islice(hashes, max(max_length, 0) // block_size):
            cached = block_pool.get_cached_block(block_hash, group_ids)
            if cached is None:
                break
            found.append(cached)
        hit_length = len(found) * block_size

        if fine_hashes is not None:
            scale = block_size // alignment_tokens
            first = len(found) * scale
            past = min(first + scale - 1, max_length // alignment_tokens, len(fine_hashes))
            for i in range(past - 1, first - 1, -1):
                cached = block_pool.get_cached_block(fine_hashes[i], group_ids)
                if cached is not None:
                    found.append(cached)
                    hit_length = (i + 1) * alignment_tokens
                    break

        if drops_block and hit_length > 0:
            hit_length -= min(alignment_tokens, block_size)
        hit_length -= hit_length % alignment_tokens
        del found[ceil_div(hit_length, block_size) :]
        return tuple([cached[k] for cached in found] for k in range(len(group_ids))), hit_length

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """See the base class; ``num_prompt_tokens`` of the request is read as well where hashes are finer than
        blocks."""
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        if self.block_size != self.block_pool.hash_block_size:
            self._cache_partial_tail_block(request, num_tokens)

    def _cache_partial_tail_block(self, request: Any, num_tokens: int) -> None:
        """Cache the end of the prompt, if it is inside a block and computed: the longest prefix that a request with
        the same prompt can hit. Boundaries before it in the same block are left out."""
        hash_size = self.block_pool.hash_block_size
        # Such a request computes its last token again; EAGLE's looks all up and drops a hash block.
        longest = request.num_prompt_tokens if self.use_eagle else request.num_prompt_tokens - 1
        num_hashes = longest // hash_size
        boundary = num_hashes * hash_size
        if boundary <= 0 or boundary > num_tokens or boundary % self.block_size == 0:
            return
        table = self.req_to_blocks[request.request_id]
        block_idx = boundary // self.block_size
        if block_idx >= len(table):
            return
        block = table[block_idx]
        pool, group_id = self.block_pool, self.kv_cache_group_id
        key = make_block_hash_with_group_id(request.block_hashes[num_hashes - 1], group_id)
        if block.block_hash == key or pool.cached_block_hash_to_block.contain(key, block.block_id):
            return  # every step of a running request comes here
        pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=boundary,
            kv_cache_group_id=group_id,
            block_size=self.block_size,
        )


def fine_grained_hashes(
    block_hashes: BlockHashList, hash_block_size: int, block_size: int, alignment_tokens: int
) -> Sequence[Any] | None:
    """The hashes by which a hit can end inside a block; None if hits end at whole blocks.

    Raises:
        InvalidArgumentError: hits may end inside a block, but not where the hashes are, or the hashes inside a block
            are not visible.
    """
    if alignment_tokens >= block_size or block_size % alignment_tokens:
        return None
    if alignment_tokens != hash_block_size or isinstance(block_hashes, BlockHashListWithBlockSize):
        raise InvalidArgumentError(
            f"hits end at multiples of {alignment_tokens} tokens, inside blocks of {block_size}: "
            f"block hashes of {alignment_tokens} tokens are needed"
        )
    return block_hashes
