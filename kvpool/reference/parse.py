"""Arguments of the twin, converted as the native half converts them: all of them before anything is read or changed, so
that no code of a caller runs between a check and what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import GROUP_ID_BYTES, MAX_DIGEST_BYTES
from kvpool.reference.block import KVCacheBlock

_EXACT = {KVCacheBlock}


def check_types(blocks: Sequence[Any], what: str) -> None:
    """TypeError unless every entry is a KVCacheBlock. Nothing of an entry is read."""
    if _EXACT.issuperset(map(type, blocks)):
        return
    for block in blocks:
        if not isinstance(block, KVCacheBlock):
            raise TypeError(f"a pool {what} KVCacheBlock, not {type(block).__name__}")


def group_suffix(group_id: Any) -> bytes:
    """The end of a key. TypeError for no integer, OverflowError for one that needs more bytes."""
    return index(group_id).to_bytes(GROUP_ID_BYTES, "big")


def check_digest(digest: Any) -> None:
    """TypeError unless bytes, InvalidArgumentError if too long."""
    if not isinstance(digest, bytes):
        raise TypeError(f"a block hash is bytes, not {type(digest).__name__}")
    if len(digest) > MAX_DIGEST_BYTES:
        raise InvalidArgumentError(f"block hash of {len(digest)} bytes, at most {MAX_DIGEST_BYTES} fit")
