"""Cross attention: the keys and values of an encoder's output, allocated once a request and never shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.base import PrefixHit, PrefixLookup, SingleTypeKVCacheManager
from kvpool.cache.spec import CrossAttentionSpec
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Block tables of cross attention layers; numbers of tokens are those of the encoder's output.

    vLLM: ``CrossAttentionManager``.
    """

    served_specs = (CrossAttentionSpec,)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Nothing: an encoder's output is not cached. InvalidArgumentError for a hit."""
        if new_computed_blocks:
            raise InvalidArgumentError("cross attention has no computed blocks")

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Nothing: an encoder's output does not come from elsewhere."""

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """InvalidArgumentError (a ValueError, as in vLLM): an encoder's output is not cached."""
        raise InvalidArgumentError("blocks of cross attention are never cached: prefix caching must be off")

    @classmethod
    def _find_longest_hit(cls, lookup: PrefixLookup) -> PrefixHit:
        """NotImplementedError: an encoder's output is not cached."""
        raise NotImplementedError("blocks of cross attention are never cached")
