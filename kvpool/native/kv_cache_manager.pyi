from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["KVCacheManagerCore"]

class KVCacheManagerCore:
    def allocate_slots(
        self,
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
    def allocate_decode(self, requests: Iterable[Any]) -> list[Any]: ...
    def get_computed_blocks(self, request: Any) -> tuple[Any, int]: ...
    def get_computed_blocks_and_boundary(self, request: Any) -> tuple[Any, int, int]: ...
    def free(self, request: Any) -> None: ...
