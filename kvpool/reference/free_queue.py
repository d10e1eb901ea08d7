"""The free list: a doubly linked list through the blocks themselves, head first to be reused.

Invariants (``kvpool.reference.check`` names them):
F1. A queued block has two neighbours; a block that is not queued has none. Both ends are fake blocks with id -1.
F2. Walks from either end meet the same ``num_free_blocks`` blocks, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, NoReturn

from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError
from kvpool.reference.block import KVCacheBlock, Owner, refuse_copy

_END_BLOCK_ID = -1


def check_num_blocks(num_blocks: object) -> int:
    """A count of blocks as an int. TypeError for a bool or what is no integer, InvalidArgumentError below 0."""
    if isinstance(num_blocks, bool):
        raise TypeError("a number of blocks must be an int, not bool")
    count = index(num_blocks)  # type: ignore[arg-type]
    if count < 0:
        raise InvalidArgumentError(f"a number of blocks must be at least 0, not {count}")
    return count


class _QueueEnd(KVCacheBlock):
    """Fake head or tail. Its link can be set to None, which severs the end; nothing else can be assigned."""

    __slots__ = ("_list",)

    def __init__(self, queue: FreeKVCacheBlockQueue) -> None:
        super().__init__(_END_BLOCK_ID)
        self._queue = self._list = queue

    def _check_severing(self, value: object) -> None:
        if value is not None:
            raise BlockStateError("the links of a free list are set by its methods")
        if not self._list._can_be_severed:
            raise BlockStateError("the free list of a pool cannot be severed")

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        return self._prev

    @prev_free_block.setter
    def prev_free_block(self, value: None) -> None:
        self._check_severing(value)
        self._prev = None

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        return self._next

    @next_free_block.setter
    def next_free_block(self, value: None) -> None:
        self._check_severing(value)
        self._next = None


class FreeKVCacheBlockQueue:
    """Free blocks in the order of their reuse, a doubly linked list whose head is reused first.

    ``pool.free_block_queue`` is that of a pool and changes the pool: what is taken out is detached (``ref_cnt`` 0,
    neither queued nor in use), what is put in must be detached. ``FreeKVCacheBlockQueue(blocks)`` queues hand-made
    blocks. Every method is O(blocks it is given or returns), wherever they are in the list.

    Args:
        blocks: hand-made blocks, the first content, head first; none may be in a queue already or appear twice
            (BlockStateError).

    Attributes:
        fake_free_list_head, fake_free_list_tail: the ends, blocks with id -1 that are never popped; the neighbour of
            each is the first or last block, or the other end.

    vLLM: ``FreeKVCacheBlockQueue``.
    """

    __slots__ = ("_num_free", "_set_aside", "fake_free_list_head", "fake_free_list_tail")

    _can_be_severed = True

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        head, tail = _QueueEnd(self), _QueueEnd(self)
        head._next, tail._prev = tail, head
        self.fake_free_list_head: KVCacheBlock = head
        self.fake_free_list_tail: KVCacheBlock = tail
        self._num_free = 0
        self._set_aside: list[KVCacheBlock] = []
        self.append_n(blocks)

    @property
    def num_free_blocks(self) -> int:
        """Number of queued blocks. Set to less, by code that plays a full cache as vLLM's tests do, the last blocks are
        set aside, detached; set to more, they come back to the end. BlockStateError for more than there are."""
        return self._num_free

    @num_free_blocks.setter
    def num_free_blocks(self, value: int) -> None:
        value = check_num_blocks(value)
        aside = self._set_aside
        if value > self._num_free + len(aside):
            raise BlockStateError(
                f"num_free_blocks = {value}: there are {self._num_free} blocks in the queue and {len(aside)} set aside"
            )
        while self._num_free > value:
            block = self.fake_free_list_tail._prev
            assert block is not None
            self.remove(block)
            aside.append(block)
        while self._num_free < value:
            self.append(aside[-1])
            aside.pop()

    # What a pool's queue does differently: which blocks may come in, and counting those that neither side has.

    def _refuse_unless_admissible(self, block: KVCacheBlock) -> None:
        if block._pool is not None:
            raise BlockStateError(f"the block belongs to a pool, not to this queue: {block!r}")

    def _may_hold(self, block: KVCacheBlock) -> bool:
        return block._pool is None and (not isinstance(block, _QueueEnd) or block._queue is self)

    def _note_detached(self, num_blocks: int) -> None:
        """num_blocks left the list (negative: came in) with nobody using them."""

    def _check_admissible(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if not isinstance(block, KVCacheBlock):
                raise TypeError(f"a free list holds KVCacheBlock, not {type(block).__name__}")
            if block._next is not None or isinstance(block, _QueueEnd):
                raise BlockStateError(f"the block is in a free list already: {block!r}")
            self._refuse_unless_admissible(block)
        if len(blocks) > 1 and len(set(blocks)) != len(blocks):
            seen: set[KVCacheBlock] = set()
            twice = next(block for block in blocks if block in seen or seen.add(block))  # type: ignore[func-returns-value]
            raise BlockStateError(f"the block appears twice: {twice!r}")

    # Links only: the callers have checked.

    def _link_between(self, before: KVCacheBlock, blocks: Iterable[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            before._next = block
            block._prev = before
            before = block
        # Filling in each block's forward link when the next one comes leaves only the last to connect.
        before._next = after
        after._prev = before

    def _link_at_head(self, blocks: Sequence[KVCacheBlock]) -> None:
        head = self.fake_free_list_head
        assert head._next is not None
        self._link_between(head, blocks, head._next)
        self._num_free += len(blocks)

    def _link_at_tail(self, blocks: Sequence[KVCacheBlock]) -> None:
        tail = self.fake_free_list_tail
        assert tail._prev is not None
        self._link_between(tail._prev, blocks, tail)
        self._num_free += len(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the block at the head. NoFreeBlocksError (a ValueError) if there is none."""
        if self._num_free == 0:
            raise NoFreeBlocksError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take n blocks from the head.

        Raises:
            NoFreeBlocksError: fewer are queued (an AssertionError too, as in vLLM); nothing has changed.
            TypeError, InvalidArgumentError: n is no int, or negative.
        """
        n = check_num_blocks(n)
        if n > self._num_free:
            raise NoFreeBlocksError(f"{n} blocks asked for, {self._num_free} are free")
        if n == 0:
            return []
        head = self.fake_free_list_head
        block: Any = head._next
        if block is None:
            raise BlockStateError("the head of the free list is severed")
        popped = []
        for _ in range(n):
            following = block._next
            block._prev = block._next = None
            popped.append(block)
            block = following
        head._next = block
        block._prev = head
        self._num_free -= n
        self._note_detached(n)
        return popped

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle. BlockStateError (a RuntimeError) if it is not in this queue."""
        if not isinstance(block, KVCacheBlock):
            raise TypeError(f"a free list holds KVCacheBlock, not {type(block).__name__}")
        before, after = block._prev, block._next
        if before is None or after is None or block._queue is not self:
            raise BlockStateError(f"remove() called on an invalid block: {block!r}")
        before._next = after
        after._prev = before
        block._prev = block._next = None
        self._num_free -= 1
        self._note_detached(1)

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail: reused last. BlockStateError if it is in a queue already."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the tail in the given order. BlockStateError, and nothing changed, if one is in a queue
        already or appears twice."""
        blocks = list(blocks)
        if not blocks:
            return
        if self.fake_free_list_tail._prev is None:
            raise BlockStateError("the tail of the free list is severed")
        self._check_admissible(blocks)
        self._link_at_tail(blocks)
        self._adopt(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the head in the given order: the first one is reused next. Errors as ``append_n``."""
        blocks = list(blocks)
        if not blocks:
            return
        if self.fake_free_list_head._next is None:
            raise BlockStateError("the head of the free list is severed")
        self._check_admissible(blocks)
        self._link_at_head(blocks)
        self._adopt(blocks)

    def _adopt(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            block._queue = self
        self._note_detached(-len(blocks))

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All queued blocks from head to tail, O(their number). BlockStateError if the head is severed."""
        if self.fake_free_list_head._next is None:
            raise BlockStateError("the head of the free list is severed")
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Blocks behind the cursor (None: from the head) in the order of their reuse; none if it is not queued.

        Each step reads the list as it is then; the walk ends where a block was taken out under it.

        BlockStateError: the cursor is queued elsewhere, or belongs to a pool that this is not the queue of.
        """
        if cursor is not None and not self._may_hold(cursor):
            raise BlockStateError(f"the cursor is a block of another queue: {cursor!r}")
        block = self.fake_free_list_head._next if cursor is None else cursor._next
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block._next

    def __len__(self) -> int:
        return self._num_free

    def __reduce__(self) -> NoReturn:
        refuse_copy("FreeKVCacheBlockQueue")


class PoolFreeQueue(FreeKVCacheBlockQueue):
    """The free list of a pool. Its methods change the pool: what they take out is detached, neither free nor in use,
    and they put in nothing but the pool's own detached blocks."""

    __slots__ = ("_pool",)

    _can_be_severed = False

    def __init__(self, pool: Owner) -> None:
        super().__init__(())
        self._pool = pool

    def _refuse_unless_admissible(self, block: KVCacheBlock) -> None:
        if block._pool is not self._pool:
            raise BlockStateError(f"the block belongs to another pool or to none: {block!r}")
        if block._ref_cnt or block._is_null:
            raise BlockStateError(f"only a block that nobody uses can be put into the free list: {block!r}")

    def _may_hold(self, block: KVCacheBlock) -> bool:
        return block._queue is self

    def _note_detached(self, num_blocks: int) -> None:
        self._pool._num_detached += num_blocks
