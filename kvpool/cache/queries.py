"""What can be asked of a KV cache manager: tables, statistics, events, and whether a sequence can fit at all.

Nothing here changes a block. The calls named ``take_...`` return what has come up since the last call, and
``make_prefix_cache_stats`` starts its counts anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.blocks import KVCacheBlockCopy, KVCacheBlocks
from kvpool.cache.managers import MambaManager
from kvpool.cache.spec import (
    CrossAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from kvpool.errors import InvalidArgumentError
from kvpool.events.wire import BlockStored, KVCacheEvent
from kvpool.metrics.stats import PrefixCacheStats

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock, Request
    from kvpool.cache.coordinator import KVCacheCoordinator

logger = logging.getLogger("kvpool")

# The id of a request that has nothing yet, for counting; no string, so that no request has it.
_NOBODY: Any = object()


class KVCacheQueries:
    """Part of ``KVCacheManager``, which documents the attributes."""

    kv_cache_config: KVCacheConfig
    coordinator: KVCacheCoordinator
    block_pool: Any
    max_model_len: int
    enable_caching: bool

    def __init__(self, log_stats: bool) -> None:
        groups = self.kv_cache_config.kv_cache_groups
        self.num_kv_cache_groups = len(groups)
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        # Never started anew, for exporters whose counters only go up.
        self.prefix_cache_totals = PrefixCacheStats() if log_stats else None
        # Shared by all calls that have nothing to return; tuples, so that nobody puts something in.
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in groups))
        self._event_metadata = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in groups
        ]

    # Room

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0.0 to 1.0; cached blocks that nobody uses are free."""
        share: float = self.block_pool.get_usage()
        return share

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody uses included. O(1)."""
        num_blocks: int = self.block_pool.get_num_free_blocks()
        return num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool that requests can have: all but the null block."""
        num_blocks: int = self.block_pool.num_gpu_blocks
        return num_blocks - 1

    @property
    def enable_partial_hash_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        return self.coordinator.enable_partial_hash_hits

    def get_num_required_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The most blocks that a sequence takes at a time on its way to ``num_tokens`` tokens, over all groups, without
        any hit. Longer than ``max_model_len`` counts as that.

        Raises:
            InvalidArgumentError: a negative number.
        """
        if num_tokens < 0 or num_encoder_tokens < 0:
            raise InvalidArgumentError(f"numbers of tokens must not be negative: {num_tokens}, {num_encoder_tokens}")
        num_tokens = min(num_tokens, self.max_model_len)
        num_blocks = self.coordinator.get_num_blocks_to_allocate(
            request_id=_NOBODY,
            num_tokens=num_tokens,
            new_computed_blocks=self.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=num_encoder_tokens,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
            prefill_end=num_tokens,
        )
        for group in self.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
                # One running state is counted. While a step writes the next one, the state before is still needed, and
                # one that is cached inside its block is copied.
                num_blocks += int(num_tokens > spec.block_size) + int(self.enable_partial_hash_hits)
        return num_blocks

    def can_ever_fit(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Whether a sequence of ``num_tokens`` tokens fits into the empty pool. Where it does not,
        ``allocate_slots(..., full_sequence_must_fit=True)`` returns None for ever: reject the request.

        vLLM: nothing; such a request blocks its queue.
        """
        return self.get_num_required_blocks(num_tokens, num_encoder_tokens) <= self.num_usable_blocks

    # Tables

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        """The blocks as ``KVCacheBlocks``; without any, always the same instance."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's tables: not copies. Empty for an unknown request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids in the request's tables, one list per group."""
        return self.get_blocks(request_id).get_block_ids()

    def find_miscounted_block(self, request_ids: Iterable[str]) -> str | None:
        """What is wrong, if the requests are all that have blocks: a block with other than as many references as tables
        that it is in, or one in no table that is not free. None if nothing is. O(blocks).

        Raises:
            InvariantError: the pool itself is broken, see ``BlockPool.check``.
        """
        pool = self.block_pool
        users = Counter(
            block_id
            for request_id in request_ids
            for table in self.get_block_ids(request_id)
            for block_id in table
            if block_id != pool.null_block.block_id
        )
        for block_id, count in users.items():
            ref_cnt = pool.blocks[block_id].ref_cnt
            if ref_cnt != count:
                return f"block {block_id} has ref_cnt {ref_cnt} and is in {count} block tables"
        num_free, expected = self.get_num_free_blocks(), self.num_usable_blocks - len(users)
        if num_free != expected:
            return f"{num_free} free blocks, {expected} in no table"
        pool.check()
        return None

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, how many leading blocks all requests that hold blocks have in common; for kernels that compute a
        shared prefix once. 0 for an unknown request, and in groups other than full attention.

        vLLM: the call is there and returns zeros since cascade attention is gone; these are the values it had.
        """
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """The part of a hit up to ``num_computed_tokens``; the hit stays as it is. A Mamba group may end before.

        Raises:
            InvalidArgumentError: not a multiple of a group's block size, or more than its blocks hold.
        """
        truncated: list[Sequence[KVCacheBlock]] = []
        for group_blocks, manager in zip(blocks.blocks, self.coordinator.single_type_managers):
            if not manager.kv_cache_spec.prefix_cacheable:
                truncated.append([])
                continue
            num_blocks, rest = divmod(num_computed_tokens, manager.block_size)
            is_too_far = num_blocks > len(group_blocks) and not isinstance(manager, MambaManager)
            if rest or is_too_far or num_computed_tokens < 0:
                raise InvalidArgumentError(
                    f"{num_computed_tokens} tokens are no whole blocks of {manager.block_size} tokens of the "
                    f"{len(group_blocks)} in group {manager.kv_cache_group_id}"
                )
            truncated.append(list(group_blocks[:num_blocks]))
        return self.create_kv_cache_blocks(tuple(truncated))

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of the request that other requests could hit now: the longest prefix that carries a hash, in the
        group where it is shortest."""
        longest_by_group = [
            max((block.block_hash_num_tokens or 0 for block in blocks), default=0)
            for group, blocks in zip(
                self.kv_cache_config.kv_cache_groups, self.coordinator.get_blocks(request.request_id)
            )
            if group.kv_cache_spec.prefix_cacheable and not isinstance(group.kv_cache_spec, CrossAttentionSpec)
        ]
        return min(longest_by_group, default=0)

    # Statistics, and what has come up since the last call

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether the request may be given cached blocks."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count the lookup of a request that was admitted; a scheduler that looks up again and again for a request
        that does not fit calls this once. Requests that skip the cache are not counted.

        Args:
            request: its ``num_tokens`` are the query; those of requests that were preempted are counted apart.
            num_hits: tokens of its hit.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return
        for stats in (self.prefix_cache_stats, self.prefix_cache_totals):
            if stats is not None:
                stats.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since the last call, which starts them anew; None without ``log_stats``."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """The pool's events since the last call, stored blocks with the kind and the window of their group."""
        events: list[KVCacheEvent] = self.block_pool.take_events()
        for event in events:
            if not isinstance(event, BlockStored) or event.group_idx is None:
                continue
            if not 0 <= event.group_idx < len(self._event_metadata):
                logger.warning("An event names KV cache group %s, which does not exist", event.group_idx)
                continue
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._event_metadata[event.group_idx]
        return events

    def take_new_block_ids(self) -> list[int]:
        """Ids of the attention blocks allocated since the last call, each once per allocation, for workers that have
        to zero them. Always [] where contents of a block can do no harm, see ``needs_kv_cache_zeroing``."""
        return [
            block_id for manager in self.coordinator.single_type_managers for block_id in manager.take_new_block_ids()
        ]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """List the request's blocks from ``start_token`` on in ``take_new_block_ids`` once more, as when a load from
        elsewhere has failed. InvalidArgumentError if that is inside a block: its beginning is still good."""
        listing = [manager for manager in self.coordinator.single_type_managers if manager.records_new_block_ids]
        for manager in listing:
            if start_token < 0 or start_token % manager.block_size:
                raise InvalidArgumentError(f"token {start_token} begins no block of {manager.block_size} tokens")
        for manager in listing:
            blocks = manager.req_to_blocks.get(request_id) or []
            manager.new_block_ids.extend(block.block_id for block in blocks[start_token // manager.block_size :])

    def find_copy_target_ids(self) -> list[int]:
        """Ids of the blocks that ``take_kv_cache_block_copies`` will have copies made in."""
        return [
            target.block_id
            for manager in self.coordinator.single_type_managers
            for _, target in manager.pending_cow_copies
        ]

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        """Copies that a worker has to make before the next step (a hit that ends inside a block is continued in a
        copy of it), and the blocks of both ends, each held by a reference that the caller gives back afterwards."""
        pairs = [
            pair for manager in self.coordinator.single_type_managers for pair in manager.take_pending_cow_copies()
        ]
        copies = [KVCacheBlockCopy(source.block_id, target.block_id) for source, target in pairs]
        return copies, [block for pair in pairs for block in pair]
