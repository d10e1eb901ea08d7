"""Chunked local attention: a token sees its own chunk of ``attention_chunk_size`` tokens, up to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.base import SingleTypeKVCacheManager, refuse_context_parallelism
from kvpool.cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import resolve_block_hashes

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock
    from kvpool.hashing.block_hash import BlockHashList


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Block tables of chunked local attention layers. vLLM: ``ChunkedLocalAttentionManager``."""

    def __init__(
        self, kv_cache_spec: ChunkedLocalAttentionSpec, block_pool: BlockPool, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the chunk of the next token: with chunks of 8, 0 of 7 computed tokens, 8 of 8 and 8 of
        13."""
        return max(num_computed_tokens, 0) // self.attention_chunk_size * self.attention_chunk_size

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
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """See the base class. Tokens before the chunk of token ``max_length`` count as computed, whether they are
        cached or not: their blocks are null. From there on, a run of cached blocks. O(blocks)."""
        if not isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
            raise InvalidArgumentError(f"chunked local attention is looked up for another spec: {kv_cache_spec!r}")
        refuse_context_parallelism(dcp_world_size, pcp_world_size)
        if drop_eagle_block:
            raise InvalidArgumentError("chunked local attention can't be combined with EAGLE")
        block_size = kv_cache_spec.block_size
        if block_size != alignment_tokens:
            raise InvalidArgumentError(
                f"chunked local attention can't be combined with groups of other block sizes: its blocks have "
                f"{block_size} tokens, hits end at multiples of {alignment_tokens}"
            )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        chunk_size = kv_cache_spec.attention_chunk_size
        first = max(max_length, 0) // chunk_size * chunk_size // block_size
        tables: tuple[list[KVCacheBlock], ...] = tuple([block_pool.null_block] * first for _ in kv_cache_group_ids)
        for i in range(first, min(max_length // block_size, len(hashes))):
            cached = block_pool.get_cached_block(hashes[i], kv_cache_group_ids)
            if cached is None:
                break
            for table, block in zip(tables, cached):
                table.append(block)
        return tables, len(tables[0]) * block_size
