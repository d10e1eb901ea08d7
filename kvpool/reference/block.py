"""A block of the KV cache: its id, reference count, hash and place in the free list."""

from __future__ import annotations

from operator import index
from typing import Any, NoReturn, Protocol

from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.hashing.block_hash import BlockHashWithGroupId, check_key

_MOST = 2**31 - 1


class Owner(Protocol):
    """What a block asks of the pool that it is a part of."""

    _num_detached: int

    def _note_hash_set_by_hand(self, block: KVCacheBlock) -> None: ...

    def _forget_primary_hash(self, block: KVCacheBlock) -> None: ...


def refuse_copy(what: str) -> NoReturn:
    """Objects of a pool mean something by identity: a copy would be a second owner of the same memory."""
    raise TypeError(f"a {what} cannot be pickled or copied: its blocks stand for memory that has one owner")


class KVCacheBlock:
    """One block of a KV cache: its id, number of users, hash and place in the free list.

    ``pool.blocks[block_id]`` is always the same object; equality is identity. A block is in use (``ref_cnt`` > 0),
    queued (in a free list) or detached (neither: taken from the free list by hand). ``KVCacheBlock(block_id)`` makes
    one that belongs to no pool, for stand-alone queues and maps.

    Args:
        block_id: index of the block in the cache tensors.
        ref_cnt: number of users, >= 0.
        is_null: whether it stands for a block that is never written.

    Raises:
        TypeError, OverflowError: ref_cnt is no int, or too large.
        InvalidArgumentError: ref_cnt is negative.

    vLLM: ``KVCacheBlock``. The links are read-only here, and a pool's block refuses a ``ref_cnt`` that contradicts
    the free list (BlockStateError).
    """

    # `_next is None` means not queued: the ends of a list are blocks of their own, so a queued block has two links.
    # `_queue` is the free list that the links belong to; it goes stale when a hand-made block leaves its list.
    __slots__ = (
        "_block_hash",
        "_block_hash_num_tokens",
        "_block_id",
        "_is_null",
        "_next",
        "_pool",
        "_prev",
        "_queue",
        "_ref_cnt",
    )

    _block_id: int
    _ref_cnt: int
    _block_hash: BlockHashWithGroupId | None
    _block_hash_num_tokens: int | None
    _prev: KVCacheBlock | None
    _next: KVCacheBlock | None
    _queue: object
    _pool: Any  # an Owner
    _is_null: bool

    def __init__(
        self,
        block_id: int,
        ref_cnt: int = 0,
        *,
        is_null: bool = False,
        _block_hash: BlockHashWithGroupId | None = None,
        _block_hash_num_tokens: int | None = None,
    ) -> None:
        ref_cnt = _to_count(ref_cnt)
        if ref_cnt < 0:
            raise InvalidArgumentError(f"ref_cnt must be at least 0, not {ref_cnt}")
        self._block_id = block_id
        self._ref_cnt = ref_cnt
        self._block_hash = _block_hash
        self._block_hash_num_tokens = _block_hash_num_tokens
        self._prev = None
        self._next = None
        self._queue = None
        self._pool = None
        self._is_null = is_null

    @property
    def block_id(self) -> int:
        """Index of the block in the cache tensors; -1 for the two fake ends of a queue."""
        return self._block_id

    @property
    def pool(self) -> Any:
        """The pool that owns the block; None for a hand-made one and after the pool is gone."""
        return self._pool

    @property
    def is_null(self) -> bool:
        """Whether this is a null block: never written, never free, never cached."""
        return self._is_null

    @is_null.setter
    def is_null(self, value: bool) -> None:
        if self._pool is not None:
            raise BlockStateError(f"a pool says which block is null, the first: {self!r}")
        self._is_null = value

    @property
    def ref_cnt(self) -> int:
        """Number of users. Set to 0, a block in use becomes detached; set to 1 or more, a detached one is in use.

        A pool's block refuses, with BlockStateError, a negative value and any but 0 while it is queued or null.
        """
        return self._ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        if type(value) is int and 0 < value <= _MOST and self._ref_cnt > 0:
            # One user more or less of a block in use: what engines do by hand, and often.
            self._ref_cnt = value
            return
        value = _to_count(value)
        if not 0 <= value <= _MOST:
            raise BlockStateError(f"ref_cnt cannot become {value}: {self!r}")
        pool = self._pool
        if pool is not None and value != self._ref_cnt:
            if self._is_null:
                raise BlockStateError(f"the ref_cnt of the null block is always 0, not {value}")
            if self._next is not None:
                raise BlockStateError(f"a free block cannot have a ref_cnt of {value}; take it first: {self!r}")
            if value == 0:
                pool._num_detached += 1
            elif self._ref_cnt == 0:
                pool._num_detached -= 1
        self._ref_cnt = value

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Primary key of the block in the prefix cache: digest and group id, None if it has none."""
        return self._block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Number of tokens of the prefix that ``block_hash`` stands for, None if unknown."""
        return self._block_hash_num_tokens

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """Neighbour towards the head of the free list, None if not queued."""
        return self._prev

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """Neighbour towards the tail of the free list, None if not queued."""
        return self._next

    def set_block_hash(self, block_hash: BlockHashWithGroupId, num_tokens: int | None = None) -> None:
        """Give the block a hash, without making it reachable through the prefix cache.

        Raises:
            BlockStateError: it has one already, or is a pool's null block.
        """
        num_tokens = _to_num_tokens(num_tokens)
        check_key(block_hash)
        if self._block_hash is not None:
            raise BlockStateError(f"the block already has a hash: {self!r}")
        pool = self._pool
        if pool is not None:
            if self._is_null:
                raise BlockStateError("the null block cannot have a hash")
            pool._note_hash_set_by_hand(self)
        self._block_hash = block_hash
        self._block_hash_num_tokens = num_tokens

    def reset_hash(self) -> None:
        """Take the block's hash away; a pool's prefix cache forgets that key of the block as well."""
        if self._pool is not None:
            self._pool._forget_primary_hash(self)
        self._block_hash = None
        self._block_hash_num_tokens = None

    def __repr__(self) -> str:
        prev_id = None if self._prev is None else self._prev._block_id
        next_id = None if self._next is None else self._next._block_id
        return (
            f"KVCacheBlock(block_id={self._block_id}, ref_cnt={self._ref_cnt}, _block_hash={self._block_hash!r}, "
            f"_block_hash_num_tokens={self._block_hash_num_tokens}, prev_free_block={prev_id}, "
            f"next_free_block={next_id})"
        )

    def __reduce__(self) -> NoReturn:
        refuse_copy("KVCacheBlock")


def to_long(value: Any) -> int:
    """As the native half converts: TypeError for no integer, OverflowError beyond 64 bits."""
    number = index(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError("an integer is larger than 64 bits")
    return number


def _to_count(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"ref_cnt must be an int, not {type(value).__name__}")
    return to_long(value)


def _to_num_tokens(value: object) -> int | None:
    if value is None:
        return None
    number = to_long(value)
    if not 0 <= number <= _MOST:
        raise InvalidArgumentError(f"num_tokens {value} is not in 0 .. 2**31 - 1")
    return number
