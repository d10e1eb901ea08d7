"""Full attention with sink tokens at the front, whose keys and values are learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.cache.managers.full_attention import FullAttentionManager
from kvpool.cache.spec import SinkFullAttentionSpec
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import BlockPool


class SinkFullAttentionManager(FullAttentionManager):
    """Block tables of sink attention layers, without the sink tokens: those have a place of their own in the
    worker. vLLM: ``SinkFullAttentionManager``, which takes two keyword arguments less.

    Raises:
        InvalidArgumentError: the sink tokens do not fill a whole number of blocks, at least one.
    """

    def __init__(self, kv_cache_spec: SinkFullAttentionSpec, block_pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        sink_len = kv_cache_spec.sink_len
        if sink_len is None or sink_len <= 0 or sink_len % self.block_size:
            raise InvalidArgumentError(f"sink_len must be a positive multiple of {self.block_size}, not {sink_len}")
