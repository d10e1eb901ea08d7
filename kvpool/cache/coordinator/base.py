"""What all coordinators have in common: one pool, one manager per KV cache group, and each call in group order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.backend import BlockPool
from kvpool.cache.managers import (
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    get_manager_for_kv_cache_spec,
)
from kvpool.cache.spec import KVCacheConfig, MambaSpec, SlidingWindowSpec
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock, Request
    from kvpool.hashing.block_hash import BlockHash
    from kvpool.metrics.residency import KVCacheMetricsCollector

BlocksByGroup = tuple[Sequence["KVCacheBlock"], ...]
CacheHit = tuple[tuple[list["KVCacheBlock"], ...], int, int]


def replay_boundaries(num_prompt_tokens: int, scheduler_block_size: int, use_eagle: bool) -> tuple[int, ...]:
    """Token positions where a later request with the same prompt may go on, so that sparse groups keep their state.

    The same prompt again can use all tokens but the last one. With EAGLE the block below that is what counts, and a
    longer prompt may go on a block later: the two differ where the prompt ends with a block.

    vLLM: ``replay_boundaries``.
    """
    if not use_eagle:
        return (num_prompt_tokens - 1,)
    ends = (num_prompt_tokens - 1, num_prompt_tokens)
    return tuple(sorted({max(end // scheduler_block_size - 1, 0) * scheduler_block_size for end in ends}))


def _check_retention_interval(retention_interval: int | None, block_size: int, config: KVCacheConfig) -> None:
    if retention_interval is None:
        return
    is_sparse = any(isinstance(group.kv_cache_spec, SlidingWindowSpec | MambaSpec) for group in config.kv_cache_groups)
    if not is_sparse and retention_interval != 0:
        raise InvalidArgumentError(
            f"prefix_cache_retention_interval is {retention_interval}, but no group has a sliding window or Mamba "
            "states; only 0 and None are possible"
        )
    if is_sparse and (retention_interval < 0 or retention_interval % block_size):
        raise InvalidArgumentError(
            f"prefix_cache_retention_interval must be a multiple of the scheduler's block size {block_size} and not "
            f"negative: {retention_interval}"
        )


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator is made with.

    Attributes:
        kv_cache_config: number of blocks, groups.
        max_model_len: longest sequence, tokens.
        max_in_flight_tokens: tokens that can be scheduled and not yet processed; bounds what groups with a window
            hold of one request.
        use_eagle: drop the last block of a hit in EAGLE groups (all of them, if no group says that it is one).
        enable_caching: whether freed blocks can be hit.
        enable_kv_cache_events: whether the pool records events.
        scheduler_block_size: tokens; a multiple of the other sizes, see ``resolve_kv_cache_block_sizes``.
        hash_block_size: tokens per block hash.
        metrics_collector: handed to the pool.
        num_prefill_lookahead: tokens beyond a prefill's end that draft layers write (multi-module MTP).
        enable_mamba_shared_prefix_checkpoint: keep Mamba states where requests' prompts part, where that is possible.
        allow_partial_hash_hits: hits may end inside a block, where ``partial_hash_hits_enabled``.
        block_pool_class: makes the pool, with the arguments of ``BlockPool``.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    max_in_flight_tokens: int
    use_eagle: bool
    enable_caching: bool
    enable_kv_cache_events: bool
    scheduler_block_size: int
    hash_block_size: int
    metrics_collector: KVCacheMetricsCollector | None = None
    num_prefill_lookahead: int = 0
    enable_mamba_shared_prefix_checkpoint: bool = False
    allow_partial_hash_hits: bool = True
    block_pool_class: Callable[..., Any] | None = None


class KVCacheCoordinator(ABC):
    """The managers of all KV cache groups over one pool.

    Attributes:
        enable_partial_hash_hits: whether hits may end inside a block.
        keeps_shared_prefix_checkpoints: whether Mamba states are kept where requests' prompts part.

    vLLM: ``KVCacheCoordinator``, without context parallelism and host pools.
    """

    enable_partial_hash_hits = False
    keeps_shared_prefix_checkpoints = False

    def __init__(self, settings: CoordinatorSettings) -> None:
        kv_cache_config, hash_block_size = settings.kv_cache_config, settings.hash_block_size
        scheduler_block_size, num_prefill_lookahead = settings.scheduler_block_size, settings.num_prefill_lookahead
        use_eagle, enable_caching = settings.use_eagle, settings.enable_caching
        groups = kv_cache_config.kv_cache_groups
        sizes = [hash_block_size, *(group.kv_cache_spec.block_size for group in groups)]
        if any(scheduler_block_size % size for size in sizes):
            raise InvalidArgumentError(
                f"the scheduler's block size {scheduler_block_size} is not a multiple of each of {sizes}"
            )
        self.kv_cache_config = kv_cache_config
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.num_reprefillable_tokens = max(0, num_prefill_lookahead - 1)
        self.eagle_group_ids = {i for i, group in enumerate(groups) if group.is_eagle_group}
        if use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(groups)))
        # A hit ends at a scheduler's block; what the drop takes away must contain all that the look-ahead spoilt.
        if enable_caching and self.eagle_group_ids and scheduler_block_size < num_prefill_lookahead:
            raise InvalidArgumentError(
                f"prefix caching with a prefill look-ahead of {num_prefill_lookahead} tokens needs blocks of as many "
                f"tokens; the scheduler's have {scheduler_block_size}"
            )
        self.retention_interval = kv_cache_config.prefix_cache_retention_interval
        _check_retention_interval(self.retention_interval, scheduler_block_size, kv_cache_config)

        self.block_pool = (settings.block_pool_class or BlockPool)(
            num_gpu_blocks=kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=settings.enable_kv_cache_events,
            metrics_collector=settings.metrics_collector,
        )
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(
                kv_cache_spec=group.kv_cache_spec,
                max_in_flight_tokens=settings.max_in_flight_tokens,
                max_model_len=settings.max_model_len,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=i,
                scheduler_block_size=scheduler_block_size,
                needs_kv_cache_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            )
            for i, group in enumerate(groups)
        )
        if use_eagle:
            for manager in self.single_type_managers:
                if isinstance(manager, MambaManager):
                    manager.drop_eagle_checkpoint_block = True
        # Groups as long as the encoder's input; looked up once, decodes come here for every token.
        self._is_encoder_group = tuple(isinstance(one, CrossAttentionManager) for one in self.single_type_managers)
        if enable_caching and any(self._is_encoder_group):
            raise InvalidArgumentError("cross-attention blocks are no prefix of anything: caching must be off")
        self.group_block_sizes = tuple(manager.block_size for manager in self.single_type_managers)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: BlocksByGroup,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Number of free blocks that the allocation described by the arguments takes, over all groups.

        Args:
            request_id: the request.
            num_tokens: tokens that need a slot, those that have one included.
            new_computed_blocks: hits per group, not yet in the request's tables; free ones count as taken.
            num_encoder_tokens: tokens for cross-attention groups.
            total_computed_tokens: computed tokens, hits and external ones included.
            num_local_computed_tokens: the same without external ones.
            num_tokens_main_model: ``num_tokens`` without look-ahead.
            apply_admission_cap: count groups with a window at the most that they hold at a time, for the question
                whether a whole sequence can be admitted.
            prefill_end: token where the prefill ends; Mamba states are kept there under sparse retention.
        """
        if self.retention_interval != 0:
            prefill_end = 0
        total = 0
        for manager, is_encoder, hits in zip(self.single_type_managers, self._is_encoder_group, new_computed_blocks):
            if is_encoder:
                # One allocation, as long as the encoder's input.
                total += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_encoder_tokens,
                    [],
                    0,
                    0,
                    num_encoder_tokens,
                    apply_admission_cap=apply_admission_cap,
                )
            else:
                total += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    hits,
                    total_computed_tokens,
                    num_local_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap=apply_admission_cap,
                    prefill_end=prefill_end,
                )
        return total

    def is_running(self, request_id: str) -> bool:
        """Whether a group already counts cached blocks of the request, so that it can take no hits any more."""
        return any(request_id in manager.num_cached_block for manager in self.single_type_managers)

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: BlocksByGroup,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> None:
        """Start the tables of a request with its hits, and with new blocks for tokens computed elsewhere.

        The hits of all groups are touched before anything is allocated: new blocks come from the head of the free
        list, where the next group's hits may be.

        Args:
            request_id: the request; nothing happens if it runs already.
            new_computed_blocks: hits per group.
            num_local_computed_tokens, num_external_computed_tokens: tokens of the hits, and of external ones.
            skip_zeroing_group_ids: groups whose external blocks are written by whoever loads them.
        """
        if self.is_running(request_id):
            if any(new_computed_blocks):
                raise InvalidArgumentError(f"request {request_id!r} runs already and can take no computed blocks")
            return
        for manager, hits in zip(self.single_type_managers, new_computed_blocks):
            manager.add_local_computed_blocks(request_id, hits, num_local_computed_tokens, num_external_computed_tokens)
        if num_external_computed_tokens > 0:
            for i, manager in enumerate(self.single_type_managers):
                manager.allocate_external_computed_blocks(
                    request_id,
                    num_local_computed_tokens,
                    num_external_computed_tokens,
                    record_for_zeroing=i not in skip_zeroing_group_ids,
                )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int, num_encoder_tokens: int = 0
    ) -> tuple[list[KVCacheBlock], ...]:
        """Extend the request's tables to ``num_tokens`` tokens (cross-attention: ``num_encoder_tokens``).

        Returns:
            The new blocks per group.

        Raises:
            NoFreeBlocksError: too few are free; ``get_num_blocks_to_allocate`` tells beforehand.
        """
        return tuple(
            manager.allocate_new_blocks(
                request_id, num_encoder_tokens if is_encoder else num_tokens, num_tokens_main_model
            )
            for manager, is_encoder in zip(self.single_type_managers, self._is_encoder_group)
        )

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        """Computed tokens whose blocks in the group may be published: those that no look-ahead writes again."""
        return max(0, num_computed_tokens - self.num_reprefillable_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks of its first ``num_computed_tokens`` tokens, in every cached group."""
        boundaries = replay_boundaries(
            request.num_prompt_tokens, self.scheduler_block_size, use_eagle=bool(self.eagle_group_ids)
        )
        for group_id, manager in enumerate(self.single_type_managers):
            if manager.enable_caching:
                manager.cache_blocks(
                    request,
                    self.get_num_cacheable_tokens(num_computed_tokens, group_id),
                    retention_interval=self.retention_interval,
                    replay_boundaries=boundaries,
                )

    def emit_cached_block_events(self, request: Request, computed_blocks: BlocksByGroup) -> None:
        """Publish hits as stored, for consumers that want to know what a request uses."""
        for group_id, blocks in enumerate(computed_blocks):
            if blocks:
                self.block_pool.emit_cached_block_events(
                    request,
                    len(blocks),
                    self.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.block_size,
                    group_id,
                )

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. False, and nothing happens, while blocks are in use."""
        is_reset: bool = self.block_pool.reset_prefix_cache()
        return is_reset

    def free(self, request_id: str) -> None:
        """Give the request's blocks back, last token first, group by group. An unknown request has none."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request, but leave its blocks (in token order, group by group) to the caller, who has to give
        them to ``block_pool.free_blocks`` in reverse."""
        return [block for manager in self.single_type_managers for block in manager.pop_blocks_for_free(request_id)]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no later token attends to, with null blocks in their place.

        Args:
            request_id: the request.
            processed_computed_tokens: computed tokens that are beyond any step in flight.
            num_prompt_tokens: length of the prompt.
        """
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    def get_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """The request's tables, one per group; empty for an unknown one. They are the managers' own."""
        return tuple(manager.req_to_blocks.get(request_id) or [] for manager in self.single_type_managers)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Per group, the number of leading blocks that every request with a table has in common with this one.

        Counted in full-attention groups; 0 in the others, whose tables begin with null blocks sooner or later.
        O(requests * common blocks).
        """
        return [
            _num_common_blocks(manager.req_to_blocks.get(request_id) or [], manager.req_to_blocks.values())
            if isinstance(manager, FullAttentionManager)
            else 0
            for manager in self.single_type_managers
        ]

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The longest prefix that is cached in every group.

        Args:
            block_hashes: the request's, one per ``hash_block_size`` tokens.
            max_cache_hit_length: tokens.

        Returns:
            The blocks per group (null blocks where a window or a state needs none), the tokens of the hit, and how
            many tokens further one of the groups would have reached.
        """

    def new_step_starts(self) -> None:
        """Tell the managers that a step of the scheduler begins."""
        for manager in self.single_type_managers:
            manager.new_step_starts()


def _num_common_blocks(table: Sequence[KVCacheBlock], all_tables: Any) -> int:
    tables = [other for other in all_tables if other]
    num_common = len(table)
    for i, block in enumerate(table):
        if block.ref_cnt < len(tables):
            num_common = i
            break
    for other in tables:
        num_common = min(num_common, len(other))
        if other[:num_common] != table[:num_common]:
            num_common = next(i for i in range(num_common) if other[i] is not table[i])
    return num_common
