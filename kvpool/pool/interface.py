"""What the code above the two pools knows of them: blocks, and the calls that a half has to have.

``BlockPoolBase`` (``kvpool.pool.observed``) is written over ``BlockPoolHalf``. The native half is
``kvpool.native.pool.BlockPoolCore``; in the twin, ``kvpool.reference.BlockPool``, they are methods like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from kvpool.events.wire import KVCacheEvent
from kvpool.hashing.block_hash import BlockHashWithGroupId


class Block(Protocol):
    """A block of a pool, native or of the twin; see ``KVCacheBlock``."""

    ref_cnt: int

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool: ...

    @property
    def block_hash(self) -> BlockHashWithGroupId | None: ...

    @property
    def block_hash_num_tokens(self) -> int | None: ...

    @property
    def pool(self) -> Any: ...


BlockT = TypeVar("BlockT", bound=Block)
_Block_co = TypeVar("_Block_co", bound=Block, covariant=True)


class PrefixMap(Protocol[_Block_co]):
    """Blocks by hash; see ``BlockHashToBlockMap``."""

    def get_one_block(self, key: BlockHashWithGroupId) -> _Block_co | None: ...

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool: ...


if TYPE_CHECKING:
    from typing import Generic
else:

    class Generic:
        """Pools are generic to type checkers alone: a layout from ``typing.Generic`` would keep a recorder from
        giving a pool its own class."""

        def __class_getitem__(cls, block):
            return cls


class BlockPoolHalf(Generic[BlockT]):
    """The calls and attributes that each of the two pools brings. Those with an underscore are for ``BlockPoolBase``
    alone: they change blocks and tell nobody."""

    num_gpu_blocks: int
    enable_caching: bool
    hash_block_size: int
    enable_kv_cache_events: bool
    metrics_collector: Any
    medium: str
    blocks: Sequence[BlockT]
    null_block: BlockT
    cached_block_hash_to_block: PrefixMap[BlockT]
    cached_block_hashes_by_block: Mapping[int, frozenset[BlockHashWithGroupId]]
    _reuse_watchers: dict[int, Callable[[BlockT], None]]
    kv_event_queue: list[KVCacheEvent]

    def _create(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool,
        metrics_collector: Any,
        medium: str,
        uncached_first: bool,
        on_invalid_free: str,
    ) -> None:
        """Check the arguments of ``BlockPool`` and make its blocks; once."""
        self._is_missing("_create")

    def get_new_blocks(self, num_blocks: int) -> list[BlockT]:
        self._is_missing("get_new_blocks")

    def touch(self, blocks: Sequence[BlockT]) -> None:
        self._is_missing("touch")

    def free_blocks(self, ordered_blocks: Iterable[BlockT], prepend: bool = False) -> None:
        self._is_missing("free_blocks")

    def get_num_free_blocks(self) -> int:
        self._is_missing("get_num_free_blocks")

    def _take_blocks(self, num_blocks: int) -> list[BlockT]:
        """Blocks from the head of the free list, with one reference and the hashes they had."""
        self._is_missing("_take_blocks")

    def _free_blocks_to_tail(self, blocks: Iterable[BlockT]) -> None:
        """``free_blocks``, hash or not to the tail."""
        self._is_missing("_free_blocks_to_tail")

    def _cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[BlockT],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None,
    ) -> None:
        """``cache_full_blocks`` without events."""
        self._is_missing("_cache_full_blocks")

    def _insert_block_hash(self, key: BlockHashWithGroupId, block: BlockT, num_tokens: int | None) -> None:
        """Make a key lead to a block: its primary hash if it has none, else a secondary one."""
        self._is_missing("_insert_block_hash")

    def _cached_block_hashes(self, block: BlockT) -> list[BlockHashWithGroupId]:
        """The keys that lead to a block, the primary one first."""
        self._is_missing("_cached_block_hashes")

    def _remove_cached_block_hashes(self, block: BlockT) -> list[BlockHashWithGroupId]:
        """Take all keys of a block away; returns them, the primary one first."""
        self._is_missing("_remove_cached_block_hashes")

    def _reset_hashes(self) -> None:
        """Take the hashes of all blocks."""
        self._is_missing("_reset_hashes")

    def _count_eviction(self) -> None:
        """Add one to the evictions of ``stats``."""
        self._is_missing("_count_eviction")

    def _is_missing(self, call: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} is not assembled with a half that has {call}")
