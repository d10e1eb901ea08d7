"""Hashes that cover some tokens after their block, which vLLM has since 0.33, for drafters that read ahead of a block.

A pool never computes a hash; what it has to do is to tell in its events what a hash covers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import vllm.v1.core.kv_cache_utils as vllm_blocks

from kvpool.pool.event_stream import EventFormat

if TYPE_CHECKING:
    from kvpool.backend import BlockPool

    _Base = BlockPool
else:
    _Base = object


def with_lookahead(form: EventFormat, num_tokens: int) -> EventFormat:
    """A form of events whose extra keys are those of a block and of the tokens behind it.

    Args:
        num_tokens: how many of them a hash covers.
    """

    def extra_keys(request: Any, start: int, end: int, first_feature: int) -> Any:
        return vllm_blocks.generate_lookahead_block_hash_extra_keys(
            request, start, end, end + num_tokens, first_feature
        )

    return replace(form, extra_keys=extra_keys)


class LookaheadEvents(_Base):
    """Mixed into the pool: its BlockStored events have ``lookahead_token_ids`` where hashes look ahead.

    Attributes:
        num_hash_lookahead_tokens: tokens after each block that its hash covers; 0 in a vLLM that has no such hashes.
    """

    num_hash_lookahead_tokens: int

    def _build_full_blocks_event(
        self,
        request: Any,
        hashes: Any,
        parents: Any,
        num_cached_blocks: int,
        run: list[int],
        first: int,
        past: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> Any:
        event = super()._build_full_blocks_event(
            request, hashes, parents, num_cached_blocks, run, first, past, block_size, kv_cache_group_id
        )
        return self._told(event, request, ((i + 1) * block_size for i in run))

    def _build_partial_block_event(self, request: Any, key: Any, num_hashes: int, kv_cache_group_id: int) -> Any:
        event = super()._build_partial_block_event(request, key, num_hashes, kv_cache_group_id)
        return self._told(event, request, (num_hashes * self.hash_block_size,))

    def _told(self, event: Any, request: Any, ends: Iterable[int]) -> Any:
        """The event, with the tokens that lie behind each of these ends."""
        if self.num_hash_lookahead_tokens:
            event.lookahead_token_ids = [
                request.all_token_ids[end : end + self.num_hash_lookahead_tokens] for end in ends
            ]
        return event
