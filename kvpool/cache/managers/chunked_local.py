"""Chunked local attention: a token sees its own chunk of ``attention_chunk_size`` tokens, up to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.base import PrefixHit, PrefixLookup, SingleTypeKVCacheManager
from kvpool.cache.spec import ChunkedLocalAttentionSpec
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import resolve_block_hashes

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock


def num_tokens_before_chunk(num_computed_tokens: int, attention_chunk_size: int) -> int:
    """Tokens before the chunk of the token that comes next."""
    return max(num_computed_tokens, 0) // attention_chunk_size * attention_chunk_size


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Block tables of chunked local attention layers. vLLM: ``ChunkedLocalAttentionManager``."""

    served_specs = (ChunkedLocalAttentionSpec,)

    def __init__(
        self, kv_cache_spec: ChunkedLocalAttentionSpec, block_pool: BlockPool, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the chunk of the next token: with chunks of 8, 0 of 7 computed tokens, 8 of 8 and 8 of
        13."""
        return num_tokens_before_chunk(num_computed_tokens, self.attention_chunk_size)

    @classmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """See the base class. Tokens before the chunk of token ``max_length`` count as computed, whether they are
        cached or not: their blocks are null. From there on, a run of cached blocks. O(blocks)."""
        block_hashes, max_length, group_ids, block_pool, spec, drops_block, alignment_tokens = lookup
        if drops_block:
            raise InvalidArgumentError("chunked local attention can't be combined with EAGLE")
        block_size = spec.block_size
        if block_size != alignment_tokens:
            raise InvalidArgumentError(
                f"chunked local attention can't be combined with groups of other block sizes: its blocks have "
                f"{block_size} tokens, hits end at multiples of {alignment_tokens}"
            )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        first = num_tokens_before_chunk(max_length, spec.attention_chunk_size) // block_size
        tables: tuple[list[KVCacheBlock], ...] = tuple([block_pool.null_block] * first for _ in group_ids)
        for i in range(first, min(max_length // block_size, len(hashes))):
            cached = block_pool.get_cached_block(hashes[i], group_ids)
            if cached is None:
                break
            for table, block in zip(tables, cached):
                table.append(block)
        return tables, len(tables[0]) * block_size
