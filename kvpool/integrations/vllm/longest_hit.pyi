from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["bind", "find_full", "find_local", "find_window", "get_block_ids"]

def bind(names: Mapping[str, Any]) -> None: ...
def find_full(
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: Sequence[int],
    block_pool: Any,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> tuple[tuple[list[Any], ...], int]: ...
def find_window(
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: Sequence[int],
    block_pool: Any,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> tuple[tuple[list[Any], ...], int]: ...
def find_local(
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: Sequence[int],
    block_pool: Any,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> tuple[tuple[list[Any], ...], int]: ...
def get_block_ids(
    self: Any, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
) -> tuple[list[int], ...] | None: ...
