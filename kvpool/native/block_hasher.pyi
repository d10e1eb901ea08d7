from kvpool.hashing.hashing import Algorithm, Digest

__all__ = ["BlockHasherBase"]

class BlockHasherBase:
    @property
    def block_size(self) -> int: ...
    def __init__(self, block_size: int, algorithm: Algorithm, digest: Digest) -> None: ...
