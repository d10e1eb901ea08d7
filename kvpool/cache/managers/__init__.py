"""Managers of one KV cache group each, one attention type a file, and the choice among them."""

from __future__ import annotations

from typing import Any

from kvpool.cache.managers.base import SingleTypeKVCacheManager
from kvpool.cache.managers.chunked_local import ChunkedLocalAttentionManager
from kvpool.cache.managers.cross_attention import CrossAttentionManager
from kvpool.cache.managers.full_attention import FullAttentionManager
from kvpool.cache.managers.mamba import MambaManager
from kvpool.cache.managers.sink_full_attention import SinkFullAttentionManager
from kvpool.cache.managers.sliding_window import SlidingWindowManager
from kvpool.cache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RecyclingSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.errors import InvalidArgumentError

MANAGER_OF_SPEC: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
}


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """Class of the manager for a spec or for the nearest of its bases. InvalidArgumentError if there is none."""
    for spec_class in type(kv_cache_spec).__mro__:
        if spec_class in MANAGER_OF_SPEC:
            return MANAGER_OF_SPEC[spec_class]
    raise InvalidArgumentError(f"no manager for a {type(kv_cache_spec).__name__}")


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    max_in_flight_tokens: int,
    max_model_len: int,
    role: str | None = None,
    **kwargs: Any,
) -> SingleTypeKVCacheManager:
    """A manager for a KV cache group. vLLM: ``get_manager_for_kv_cache_spec``.

    Args:
        kv_cache_spec: spec of the group.
        max_in_flight_tokens, max_model_len: tokens; bound what a request holds where blocks are given back while it
            runs, as in the sizing of the pool.
        role: None or "default".
        kwargs: the other arguments of the manager (``SingleTypeKVCacheManager``).

    Raises:
        InvalidArgumentError: there is no manager for the spec or the role.
    """
    if role not in (None, "default"):
        raise InvalidArgumentError(f"no manager for groups of the role {role!r}")
    manager_class = get_manager_class(kv_cache_spec)
    if isinstance(kv_cache_spec, RecyclingSpec):
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.max_admission_blocks_per_request(
            max_in_flight_tokens=max_in_flight_tokens, max_model_len=max_model_len
        )
    return manager_class(kv_cache_spec, **kwargs)


__all__ = [
    "MANAGER_OF_SPEC",
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_class",
    "get_manager_for_kv_cache_spec",
]
