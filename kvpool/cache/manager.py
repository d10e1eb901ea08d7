"""KVCacheManager: what a scheduler asks for blocks, and tells of tokens that are computed.

A request's life here: ``get_computed_blocks`` says how much of its prompt is cached, ``allocate_slots`` adopts these
blocks and adds new ones for the tokens of the next step, again and again, and publishes full blocks as it goes;
``free`` gives everything back, last block first, to be hit until it is reused.

    | computed | new_computed | external | new             | look-ahead |
    |          | the hit      |          | to be computed  | for drafts |
               ^ request.num_computed_tokens

What is left of "new" has slots or is a hit; what is right of it gets slots now. Tokens that are final, up to
``request.num_tokens``, are published; drafts are not.

Requests are read by attribute name, those of ``kvpool.Request`` and of vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.blocks import KVCacheBlocks
from kvpool.cache.checks import (
    refuse_computed,
    refuse_missing_hashes,
    refuse_stale_hits,
    refuse_tokens_without_slots,
    to_count,
)
from kvpool.cache.coordinator import get_kv_cache_coordinator, resolve_kv_cache_block_sizes
from kvpool.cache.spec import KVCacheConfig
from kvpool.cache.withdrawal import KVCacheWithdrawal
from kvpool.common.arguments import to_float, to_int
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock, Request
    from kvpool.cache.coordinator.base import BlocksByGroup
    from kvpool.metrics.residency import KVCacheMetricsCollector

# Statuses (by name, so that another engine's enumeration counts too) of requests that the watermark holds back.
_STATUSES_NOT_RUNNING = ("WAITING", "PREEMPTED")
_ONLY_INTS = {int}
_NUMBER_NAMES = (
    "num_new_tokens",
    "num_new_computed_tokens",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "num_encoder_tokens",
    "reserved_blocks",
    "num_computed_tokens",
)
_MAX_NUM_TOKENS = 2**62  # sums of two are in range of the native manager


class KVCacheManagerBase(KVCacheWithdrawal):
    """Block tables, prefix cache and free blocks of one engine.

    Args:
        kv_cache_config: number of blocks, KV cache groups.
        max_model_len: longest sequence, tokens; slots are never given beyond it.
        scheduler_block_size, hash_block_size: tokens; None for what fits the groups, see
            ``resolve_kv_cache_block_sizes``.
        enable_caching: keep freed blocks' contents to be hit again.
        use_eagle: leave the last block of a hit to be computed again, for draft layers.
        log_stats: count lookups, see ``make_prefix_cache_stats``.
        enable_kv_cache_events: record what is stored and removed, see ``take_events``.
        watermark: share of the blocks, 0.0 or more, that an admission has to leave free while others run.
        max_in_flight_tokens: tokens scheduled and not yet processed, at most; None for ``max_model_len``.
        num_prefill_lookahead: tokens beyond a prefill's end that draft layers write (multi-module MTP).
        enable_mamba_shared_prefix_checkpoint: keep Mamba states where requests' prompts part, with EAGLE.
        metrics_collector: handed to the pool.
        verify_hits: refuse a hit whose blocks were given away since the lookup; off is vLLM's behaviour, which
            computes with whatever is in them now.
        block_pool_class: makes the pool, with the arguments of ``BlockPool``; None for ``kvpool.BlockPool``. A
            ``functools.partial`` of it sets the pool's own options.

    Raises:
        InvalidArgumentError: sizes that do not fit together, a negative watermark.

    vLLM: ``KVCacheManager``. ``get_computed_blocks`` returns two values here, and hits are verified.
    """

    _block_pool_class: Callable[..., Any] | None = None  # where the caller names none

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int | None = None,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        *,
        max_in_flight_tokens: int | None = None,
        num_prefill_lookahead: int = 0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
        verify_hits: bool = True,
        block_pool_class: Callable[..., Any] | None = None,
    ) -> None:
        self._unbind()
        max_model_len = to_int("max_model_len", max_model_len, 1, _MAX_NUM_TOKENS)
        if max_in_flight_tokens is not None:
            max_in_flight_tokens = to_int("max_in_flight_tokens", max_in_flight_tokens, 0, _MAX_NUM_TOKENS)
        watermark = to_float("watermark", watermark)
        if watermark < 0.0:
            raise InvalidArgumentError(f"watermark must be non-negative, not {watermark}")
        scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, enable_caching, scheduler_block_size, hash_block_size
        )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.verify_hits = verify_hits
        self.watermark_blocks = int(min(watermark, 1.0) * kv_cache_config.num_blocks)
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            use_eagle=use_eagle,
            enable_caching=enable_caching,
            enable_kv_cache_events=enable_kv_cache_events,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            metrics_collector=metrics_collector,
            num_prefill_lookahead=num_prefill_lookahead,
            enable_mamba_shared_prefix_checkpoint=enable_mamba_shared_prefix_checkpoint,
            block_pool_class=block_pool_class or self._block_pool_class,
        )
        self.block_pool = self.coordinator.block_pool
        self.hash_block_size = hash_block_size
        self.mamba_shared_prefix_checkpoint = self.coordinator.keeps_shared_prefix_checkpoints
        super().__init__(log_stats)
        self._bind()

    # The native half serves from its own code what it can, once all is made.

    def _unbind(self) -> None:
        """From now on every call goes to the general code."""

    def _bind(self) -> None:
        """From now on what a step needs is served by compiled code, where there is one for these groups."""

    # Prefix hits

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of the request, to be handed to ``allocate_slots``. Takes no reference.

        At least one token is left to compute: its logits are wanted. O(blocks of the request).

        Returns:
            The blocks per group, and the number of tokens that they hold.
        """
        return self.get_computed_blocks_and_boundary(request)[:2]

    def get_computed_blocks_and_boundary(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """``get_computed_blocks``, and the token where a group that keeps few states should keep one.

        Some groups (sliding window and Mamba under sparse retention) may have cached less of a prompt than others.
        Where the others' hit ends, prompts part: set ``request.shared_prefix_boundary`` to this, and the state there
        is kept the next time. 0 where all groups agree.

        vLLM: ``get_computed_blocks``.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        blocks, num_tokens, num_uncached = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        if (
            self.enable_kv_cache_events
            and num_tokens > 0
            and getattr(request, "kv_cache_report_mode", "incremental") == "full"
        ):
            self.coordinator.emit_cached_block_events(request, blocks)
        boundary = num_tokens + num_uncached if num_uncached else 0
        return self.create_kv_cache_blocks(blocks), num_tokens, boundary

    # Allocation

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> KVCacheBlocks | None:
        """Give the request slots for its next tokens, and publish the blocks that these fill.

        Args:
            request: its ``num_computed_tokens`` are those before this call.
            num_new_tokens: tokens to be computed, drafts included.
            num_new_computed_tokens, new_computed_blocks: the hit, as from ``get_computed_blocks``; only for a request
                that has no blocks yet.
            num_lookahead_tokens: slots beyond the new tokens, for drafts to come.
            num_external_computed_tokens: tokens after the hit whose contents come from elsewhere.
            delay_cache_blocks: publish nothing now; ``cache_blocks`` does when the contents have come.
            num_encoder_tokens: length of the encoder's input, for cross-attention groups.
            full_sequence_must_fit: None unless the free blocks suffice for all of ``request.num_tokens``.
            reserved_blocks: free blocks that must be left over.
            has_scheduled_reqs: whether others run in this step, so that the watermark counts for a request that does
                not run yet.
            skip_zeroing_group_ids: groups whose external blocks are not listed in ``take_new_block_ids``.

        Returns:
            The new blocks per group, without the hit; None if too few blocks are free. Then nothing has changed but
            one thing, as in vLLM: blocks of this request that no token will attend to any more are free.

        Raises:
            InvalidArgumentError: nothing to allocate, a negative number, computed blocks with caching off or for a
                request that has blocks, more computed tokens than it has or can have, fewer block hashes than tokens,
                full blocks of tokens beyond ``max_model_len`` to publish. Nothing has changed.
            BlockStateError: with ``verify_hits``, a block of the hit was given away since the lookup. Nothing has
                changed; look up again. More tokens are computed than a state reaches that is to be copied.
            TypeError: a number that is no integer. Nothing has changed.
            NoFreeBlocksError: the request's counts don't go with its tables. Nothing has changed, as for None.

        O(new blocks), and for the first call O(blocks of the hit).
        """
        num_own_computed_tokens = request.num_computed_tokens
        numbers = (
            num_new_tokens,
            num_new_computed_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            num_encoder_tokens,
            reserved_blocks,
            num_own_computed_tokens,
        )
        if not _ONLY_INTS.issuperset(map(type, numbers)) or min(numbers) < 0:
            # What is kept of them is read by compiled code later: exact ints, before anything changes.
            (
                num_new_tokens,
                num_new_computed_tokens,
                num_lookahead_tokens,
                num_external_computed_tokens,
                num_encoder_tokens,
                reserved_blocks,
                num_own_computed_tokens,
            ) = map(to_count, _NUMBER_NAMES, numbers)
        if num_new_tokens == num_new_computed_tokens == num_external_computed_tokens == 0:
            raise InvalidArgumentError("nothing to allocate: num_new_tokens is 0, and there are no computed tokens")
        coordinator, request_id = self.coordinator, request.request_id
        local_computed = num_own_computed_tokens + num_new_computed_tokens
        total_computed = local_computed + num_external_computed_tokens
        computed = min(total_computed, self.max_model_len)
        need_slot = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        main_model = min(computed + num_new_tokens, self.max_model_len)
        to_cache = -1 if delay_cache_blocks else min(computed + num_new_tokens, request.num_tokens)
        hits = self.empty_kv_cache_blocks.blocks if new_computed_blocks is None else new_computed_blocks.blocks
        adopts_computed = hits is not self.empty_kv_cache_blocks.blocks or num_external_computed_tokens > 0

        # 1. What can't be is refused, and nothing has changed.
        if self.enable_caching and to_cache >= 0:
            refuse_missing_hashes(request, to_cache, self.hash_block_size)
            if to_cache > need_slot:
                num_slots = max(need_slot, total_computed if num_external_computed_tokens else 0)
                refuse_tokens_without_slots(coordinator, request, to_cache, num_slots)
        if adopts_computed:
            self._refuse_computed(request, hits, local_computed, total_computed)
        processed = max(0, computed - request.num_in_flight_tokens)
        for manager in coordinator.single_type_managers:
            manager.refuse_lost_source(request_id, processed)

        # 2. Where the whole sequence has to fit, it is counted.
        num_kept_free = 0
        if has_scheduled_reqs and self.watermark_blocks and request.status.name in _STATUSES_NOT_RUNNING:
            num_kept_free = self.watermark_blocks
        if full_sequence_must_fit and not self._has_room_for_all(
            request, hits, local_computed, computed, num_encoder_tokens, num_kept_free
        ):
            return None

        # 3. Blocks that no token attends to are free before anything is taken, so that fewer cached blocks are evicted.
        # Steps in flight still read what lies in their windows, and rejected drafts take the boundary back. Then the
        # step is counted.
        coordinator.remove_skipped_blocks(request_id, processed, num_prompt_tokens=request.num_prompt_tokens)
        notes = self._note_tables(request_id)
        num_blocks = coordinator.get_num_blocks_to_allocate(
            request_id,
            need_slot,
            hits,
            num_encoder_tokens,
            total_computed,
            local_computed,
            main_model,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        if num_blocks + num_kept_free + reserved_blocks > self.block_pool.get_num_free_blocks():
            self._undo_count(request_id, notes)
            return None

        # 4. Blocks are taken, and full ones published.
        try:
            if adopts_computed:
                coordinator.allocate_new_computed_blocks(
                    request_id, hits, local_computed, num_external_computed_tokens, skip_zeroing_group_ids
                )
            new_blocks = coordinator.allocate_new_blocks(request_id, need_slot, main_model, num_encoder_tokens)
            if to_cache >= 0:
                coordinator.cache_blocks(request, to_cache)
        except BaseException:  # counts that don't belong together: a group needs more than was foreseen
            self._undo_allocation(request, local_computed, notes, hits)
            raise
        return self.create_kv_cache_blocks(new_blocks)

    def _refuse_computed(self, request: Request, hits: BlocksByGroup, local_computed: int, total_computed: int) -> None:
        """Raise what ``allocate_slots`` raises for computed blocks that the request's tables can't begin with."""
        if total_computed > max(self.max_model_len, request.num_tokens):
            raise InvalidArgumentError(
                f"{total_computed} computed tokens are more than request {request.request_id!r} can have"
            )
        refuse_computed(self.coordinator, request.request_id, hits)
        if self.verify_hits:
            refuse_stale_hits(self.coordinator.single_type_managers, request, hits, local_computed, total_computed)

    def _has_room_for_all(
        self,
        request: Request,
        hits: BlocksByGroup,
        local_computed: int,
        computed: int,
        num_encoder_tokens: int,
        num_kept_free: int,
    ) -> bool:
        """Whether the free blocks suffice for all tokens that the request has, and so many are left over."""
        num_tokens = min(request.num_tokens, self.max_model_len)
        num_blocks = self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=hits,
            num_encoder_tokens=num_encoder_tokens,
            total_computed_tokens=computed,
            num_local_computed_tokens=local_computed,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return num_blocks + num_kept_free <= self.get_num_free_blocks()

    def allocate_decode(self, requests: Iterable[Request]) -> list[KVCacheBlocks | None]:
        """One new token for each of the requests: ``[allocate_slots(request, 1) for request in requests]``.

        Returns:
            Per request the new blocks, mostly none, or None where too few blocks were free. Later requests may fit
            where an earlier one did not.

        Raises:
            InvalidArgumentError: a negative number of computed tokens, fewer block hashes than tokens, a full block of
                tokens beyond ``max_model_len`` to publish. Nothing has changed for any of the requests.
            BlockStateError: see ``allocate_slots``. Nothing has changed for any of the requests.
        """
        requests = list(requests)
        for request in requests:
            to_count("num_computed_tokens", request.num_computed_tokens)
        if self.enable_caching:
            for request in requests:
                num_tokens = min(request.num_computed_tokens + 1, self.max_model_len + 1, request.num_tokens)
                refuse_missing_hashes(request, num_tokens, self.hash_block_size)
                if num_tokens > self.max_model_len:
                    refuse_tokens_without_slots(self.coordinator, request, num_tokens, self.max_model_len)
                computed_tokens = min(request.num_computed_tokens, self.max_model_len)
                for manager in self.coordinator.single_type_managers:
                    manager.refuse_lost_source(
                        request.request_id, max(0, computed_tokens - request.num_in_flight_tokens)
                    )
        return [self.allocate_slots(request, 1) for request in requests]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks of the request's first ``num_computed_tokens`` tokens; for contents that came after
        ``allocate_slots(..., delay_cache_blocks=True)``. Nothing happens with caching off.

        Raises:
            InvalidArgumentError: a negative number, fewer block hashes than tokens, a group without blocks for them.
                Nothing has changed.
        """
        num_computed_tokens = to_count("num_computed_tokens", num_computed_tokens)
        if self.enable_caching:
            refuse_missing_hashes(request, num_computed_tokens, self.hash_block_size)
            refuse_tokens_without_slots(self.coordinator, request, num_computed_tokens, 0)
            self.coordinator.cache_blocks(request, num_computed_tokens)

    # Giving back

    def free_copied_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back the references of ``take_kv_cache_block_copies``, once the copies are made or can't be overtaken.
        O(blocks)."""
        self.block_pool.free_blocks(blocks)

    def free(self, request: Request) -> None:
        """Give all blocks of the request back, the last ones to be reused first. Nothing happens if it has none."""
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request, but leave its blocks to the caller, who has to give them back in reverse by
        ``block_pool.free_blocks``: for blocks that a step in flight still uses.

        Returns:
            Its blocks in token order, group by group; [] if it has none.
        """
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no later token attends to; null blocks take their places in the table.

        Args:
            request_id: the request.
            processed_computed_tokens: computed tokens beyond any step in flight; a negative number counts as 0.
            num_prompt_tokens: length of the prompt.
        """
        self.coordinator.remove_skipped_blocks(request_id, max(processed_computed_tokens, 0), num_prompt_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take the hashes of blocks, by id, so that they cannot be hit any more; blocks in use stay allocated."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes, as when the model's weights change. False, and nothing changes, while blocks are used."""
        if not self.coordinator.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # Steps

    def new_step_starts(self) -> None:
        """To be called once before the requests of a step are scheduled: Mamba states that a step publishes can be
        hit from the next step on."""
        self.coordinator.new_step_starts()
