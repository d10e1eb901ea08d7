from collections.abc import Callable
from typing import Any

from kvpool.hashing.hashing import Algorithm, Digest
from kvpool.native.block_hasher import BlockHasherCore

__all__ = ["RequestHasher"]

class RequestHasher(BlockHasherCore):
    def __init__(
        self,
        block_size: int,
        algorithm: Algorithm,
        digest: Digest,
        hash_function: Callable[[Any], bytes],
        stock: Callable[[Any], list[Any]],
        request_class: type,
        names: Any,
    ) -> None: ...
    def __call__(self, request: Any) -> list[Any]: ...
