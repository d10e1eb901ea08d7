from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["Group", "Plan", "allocate_slots", "bind", "cache_blocks", "free"]

def bind(names: Mapping[str, Any]) -> None: ...

class Group:
    def __init__(
        self, manager: Any, attention: str, window_or_chunk: int, most_blocks: int, caches_all: bool, caches_tails: bool
    ) -> None: ...

class Plan:
    def __init__(
        self,
        manager: Any,
        groups: list[Any],  # of Group
        alignment: int,
        dropping_groups: Collection[int],
        caches_only_hashed: bool,
    ) -> None: ...

def allocate_slots(
    self: Any,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: Any = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_blocks: bool = False,
    num_encoder_tokens: int = 0,
    full_sequence_must_fit: bool = False,
    reserved_blocks: int = 0,
    has_scheduled_reqs: bool = True,
    skip_zeroing_group_ids: Sequence[int] = (),
) -> Any: ...
def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None: ...
def free(self: Any, request: Any) -> None: ...
