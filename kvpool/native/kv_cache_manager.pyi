from collections.abc import Iterable, Sequence

from kvpool.cache.blocks import KVCacheBlocks
from kvpool.request import Request

__all__ = ["KVCacheManagerBase"]

class KVCacheManagerBase:
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
    ) -> KVCacheBlocks | None: ...
    def allocate_decode(self, requests: Iterable[Request]) -> list[KVCacheBlocks | None]: ...
    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]: ...
    def get_computed_blocks_and_boundary(self, request: Request) -> tuple[KVCacheBlocks, int, int]: ...
    def free(self, request: Request) -> None: ...
