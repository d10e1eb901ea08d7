from collections.abc import Iterable
from typing import Any

from kvpool.hashing.block_hash import BlockHash
from kvpool.requests.token_ids import TokenIds

__all__ = ["RequestCore", "TokenList"]

class TokenList(list[int]):
    first_changed: int
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __delitem__(self, index: Any, /) -> None: ...
    def insert(self, index: Any, value: int) -> None: ...
    def pop(self, index: Any = -1) -> int: ...
    def remove(self, value: int) -> None: ...
    def clear(self) -> None: ...
    def reverse(self) -> None: ...
    def sort(self, **options: Any) -> None: ...
    def __imul__(self, factor: Any, /) -> TokenList: ...  # type: ignore[misc]

class RequestCore:
    request_id: str
    status: Any
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    prompt_is_token_ids: list[bool] | None
    mm_features: Any
    lora_request: Any
    cache_salt: str | None
    session_id: str | None
    arrival_time: float
    priority: int
    max_tokens: int
    skip_reading_prefix_cache: bool
    spec_token_ids: list[int]
    all_token_ids: TokenIds
    output_token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    shared_prefix_boundary: int
    @staticmethod
    def are_token_ids(tokens: list[Any]) -> bool: ...
    @staticmethod
    def are_plain(
        request_id: Any,
        max_tokens: Any,
        priority: Any,
        arrival_time: Any,
        skip_reading_prefix_cache: Any,
        cache_salt: Any,
        session_id: Any,
    ) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_tokens_with_spec(self) -> int: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...
    @block_hashes.setter
    def block_hashes(self, block_hashes: list[BlockHash]) -> None: ...
    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None: ...
    def update_block_hashes(self) -> None: ...
