__all__ = ["BlockHasherCore"]

class BlockHasherCore:
    @property
    def block_size(self) -> int: ...
