"""Block hashes: keys of the prefix cache, and views at coarser block sizes.

A block hash is a digest over the tokens of a block and the hash of the block before it, so it stands for the whole
prefix that ends with the block. A key of the prefix cache is that digest followed by the KV cache group id, 4 bytes
big-endian. Digests are at most 32 bytes long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NewType, overload

from kvpool.errors import InvalidArgumentError

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

GROUP_ID_BYTES = 4
MAX_DIGEST_BYTES = 32
MAX_KEY_BYTES = MAX_DIGEST_BYTES + GROUP_ID_BYTES


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The key of a block hash in one KV cache group. OverflowError if group_id is negative or needs over 4 bytes."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The digest in a key."""
    return BlockHash(key[:-GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group id in a key."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


def check_key(key: object) -> None:
    """Refuse what cannot be a key: TypeError unless bytes, InvalidArgumentError unless 4 to 36 bytes long."""
    if not isinstance(key, bytes):
        raise TypeError(f"a block hash must be bytes, not {type(key).__name__}")
    if len(key) > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            f"a block hash is at most {MAX_DIGEST_BYTES} bytes long, this one has {len(key) - GROUP_ID_BYTES}"
        )
    if len(key) < GROUP_ID_BYTES:
        raise InvalidArgumentError(f"a key ends with a group id of {GROUP_ID_BYTES} bytes, this one has {len(key)}")


class BlockHashListWithBlockSize:
    """Read-only view of a request's block hashes at a multiple of the size they were computed for.

    Hashes are chained, so the hash at the last fine boundary inside a coarse block covers the coarse block's whole
    prefix: it is the coarse block's hash. Nothing is copied; a list that grows makes the view grow.

    Args:
        block_hashes: one digest per ``hash_block_size`` tokens.
        hash_block_size: tokens per digest.
        target_block_size: tokens per block of the view, a multiple of ``hash_block_size`` (InvalidArgumentError).

    Attributes:
        scale_factor: digests per block of the view.

    vLLM: ``BlockHashListWithBlockSize``; an index below 0 counts from the view's end here.
    """

    __slots__ = ("block_hashes", "scale_factor")

    def __init__(self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int) -> None:
        if hash_block_size <= 0 or target_block_size < hash_block_size or target_block_size % hash_block_size:
            raise InvalidArgumentError(
                f"block size {target_block_size} is not a multiple of the hash block size {hash_block_size}"
            )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("block hash index out of range")
        return self.block_hashes[(index + 1) * self.scale_factor - 1]

    def __iter__(self) -> Iterator[BlockHash]:
        for index in range(len(self)):
            yield self[index]


BlockHashList = Sequence[BlockHash] | BlockHashListWithBlockSize


def resolve_block_hashes(
    block_hashes: BlockHashList,
    hash_block_size: int,
    block_size: int,
    *,
    supports_fine_grained_hash_lookup: bool = False,
    alignment_tokens: int | None = None,
) -> BlockHashList:
    """The block hashes at ``block_size`` tokens per block.

    Args:
        block_hashes: digests per ``hash_block_size`` tokens, or a view made for ``block_size``.
        hash_block_size, block_size: tokens; the second a multiple of the first, else InvalidArgumentError.
        supports_fine_grained_hash_lookup, alignment_tokens: a group that can be hit inside a block, and the
            granularity of its hits; where that is finer than a block (and divides it), the fine hashes come back.
    """
    if block_size == hash_block_size:
        return block_hashes
    if isinstance(block_hashes, BlockHashListWithBlockSize):
        if block_hashes.scale_factor * hash_block_size != block_size:
            raise InvalidArgumentError(
                f"block hashes are viewed at {block_hashes.scale_factor * hash_block_size} tokens, not {block_size}"
            )
        return block_hashes
    is_hit_inside_block = (
        supports_fine_grained_hash_lookup
        and alignment_tokens is not None
        and alignment_tokens < block_size
        and block_size % alignment_tokens == 0
    )
    if is_hit_inside_block:
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)


def select_block_hashes(
    block_hashes: BlockHashList, hash_block_size: int, block_size: int, first: int, past: int
) -> list[BlockHash]:
    """Hashes of the blocks [first, past) at ``block_size`` tokens, fewer where the list ends before.

    O(past - first): a request's list grows with its length, a call that caches one more block must not.
    """
    if first < 0:
        raise InvalidArgumentError(f"a number of cached blocks must be at least 0, not {first}")
    resolved = resolve_block_hashes(block_hashes, hash_block_size, block_size)
    selected = resolved[first:past]
    return selected if type(selected) is list else list(selected)
