"""What the KV cache manager hands to a scheduler: blocks per KV cache group, and copies between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock


class KVCacheBlockCopy(NamedTuple):
    """A copy that a worker has to make before the step: the contents of one block into another, by id.

    vLLM: ``KVCacheBlockCopy``.
    """

    src_block_id: int
    dst_block_id: int


@dataclass(slots=True)
class KVCacheBlocks:
    """Blocks of a request, per KV cache group: its table, a hit, or what an allocation added.

    Attributes:
        blocks: ``blocks[group_id][i]`` is the i-th block in token order; the groups can differ in length. Empty
            groups may be tuples. Whoever gets an instance must not change what is in it: tables are not copied.

    vLLM: ``KVCacheBlocks``.
    """

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Group by group, these blocks and then the others. InvalidArgumentError if the numbers of groups differ."""
        if len(self.blocks) != len(other.blocks):
            raise InvalidArgumentError(f"blocks of {len(self.blocks)} and of {len(other.blocks)} groups do not add up")
        return KVCacheBlocks(tuple([*mine, *others] for mine, others in zip(self.blocks, other.blocks)))

    @overload
    def get_block_ids(
        self, allow_none: Literal[False] = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(
        self, allow_none: bool, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None: ...

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """The ids, per group.

        Args:
            allow_none: return None where there is no block in any group.
            group_ids: the groups to include, None for all.
        """
        groups = self.blocks if group_ids is None else tuple(self.blocks[group_id] for group_id in group_ids)
        if allow_none and not any(groups):
            return None
        return tuple(_ids_of(group) for group in groups)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a hash. InvalidArgumentError unless there is one group."""
        if len(self.blocks) != 1:
            raise InvalidArgumentError(f"only one group has unhashed block ids, not {len(self.blocks)}")
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, ids of the blocks without a hash, null blocks left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """As many groups, without a block."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))


def _ids_of(blocks: Sequence[KVCacheBlock]) -> list[int]:
    """A native sequence gives its ids without an object for each block."""
    block_ids: Callable[[], list[int]] | None = getattr(blocks, "block_ids", None)
    return [block.block_id for block in blocks] if block_ids is None else block_ids()
