"""Block hashes: keys of the prefix cache, views at coarser block sizes, and the extra keys that go into a hash.

A block hash is a digest over the tokens of a block and the hash of the block before it, so it stands for the whole
prefix that ends with the block. A key of the prefix cache is that digest followed by the KV cache group id, 4 bytes
big-endian. Digests are at most 32 bytes long.

Requests are read by attribute name, those of vLLM's ``Request``: ``mm_features``, ``lora_request``, ``cache_salt``,
``prompt_embeds``. An attribute that a request lacks counts as None.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NewType, overload

from kvpool.errors import InvalidArgumentError

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

GROUP_ID_BYTES = 4
MAX_DIGEST_BYTES = 32
MAX_KEY_BYTES = MAX_DIGEST_BYTES + GROUP_ID_BYTES

_EMBEDDING_CACHE_ATTRIBUTE = "_prompt_embeds_per_block_hashes"

ExtraKeys = tuple[Any, ...] | None


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


def _multimodal_keys(features: Sequence[Any], start: int, end: int, index: int) -> tuple[list[Any], int]:
    """Keys of the multimodal inputs that overlap tokens [start, end), and the index of the input to go on with.

    Inputs are sorted by offset and do not overlap. The offset in a key is relative to the block: the same picture
    at another place among equal placeholder tokens must not hit.
    """
    keys: list[Any] = []
    if not features:
        return keys, index
    last = features[-1].mm_position
    if last.offset + last.length <= start:
        return keys, index
    if index < 0:
        index += len(features)
        if index < 0:
            raise InvalidArgumentError(f"there are only {len(features)} multimodal inputs")
    while index < len(features):
        feature = features[index]
        offset = feature.mm_position.offset
        past = offset + feature.mm_position.length
        if offset >= end:
            break
        if past > start:
            if feature.identifier is None:
                raise InvalidArgumentError(f"multimodal input {index} has no identifier")
            keys.append(("mm", feature.identifier, offset - start))
            if past > end:
                break
        index += 1
    return keys, index


def _tensor_bytes(tensor: Any) -> Any:
    """The raw bytes of a tensor (torch) or an array (numpy), as a buffer."""
    if not hasattr(tensor, "detach"):
        return tensor.tobytes()
    # torch is not imported here: whoever made the tensor has done it. Not every dtype exists in numpy, bytes do.
    torch = sys.modules[type(tensor).__module__.partition(".")[0]]
    return tensor.detach().flatten().cpu().contiguous().view(torch.uint8).numpy().data


def _prompt_embedding_keys(request: Any, start: int, end: int) -> list[tuple[str, bytes]]:
    """Key of the prompt embeddings of tokens [start, end): their sha256, kept on the request where it has room."""
    embeddings = getattr(request, "prompt_embeds", None)
    if embeddings is None:
        return []
    known: dict[tuple[int, int], bytes] | None = getattr(request, _EMBEDDING_CACHE_ATTRIBUTE, None)
    digest = known.get((start, end)) if known is not None else None
    if digest is None:
        digest = hashlib.sha256(_tensor_bytes(embeddings[start:end])).digest()
        if known is not None:
            known[start, end] = digest
    return [("prompt_embeds", digest)]


def has_extra_keys(request: Any) -> bool:
    """Whether any block of the request can have extra keys."""
    return bool(
        getattr(request, "mm_features", None)
        or getattr(request, "lora_request", None)
        or getattr(request, "cache_salt", None)
        or getattr(request, "prompt_embeds", None) is not None
    )


def generate_block_hash_extra_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys, int]:
    """What besides its tokens tells a block apart: LoRA, multimodal inputs, cache salt, prompt embeddings.

    Args:
        request: see the module's first lines.
        start_token_idx, end_token_idx: token range of the block, [start, end).
        start_mm_idx: multimodal input to start with: what the call for the block before returned, 0 at first;
            a negative index counts from the end.

    Returns:
        The tagged keys in a fixed order, or None where there are none, and the multimodal index for the next block.
    """
    features = getattr(request, "mm_features", None) or ()
    multimodal_keys, next_mm_idx = _multimodal_keys(features, start_token_idx, end_token_idx, start_mm_idx)
    keys: list[Any] = []
    lora = getattr(request, "lora_request", None)
    if lora:
        # The path belongs to the key: a name pointed at another adapter must not hit the old one's blocks.
        keys.append(("lora", lora.lora_name, lora.lora_path))
    keys += multimodal_keys
    salt = getattr(request, "cache_salt", None)
    if salt and start_token_idx == 0:
        # Later blocks get it through the chain.
        keys.append(("cache_salt", salt))
    keys += _prompt_embedding_keys(request, start_token_idx, end_token_idx)
    return (tuple(keys) if keys else None), next_mm_idx


def to_event_extra_keys(extra_keys: Iterable[ExtraKeys] | None) -> list[ExtraKeys] | None:
    """Extra keys as events publish them: without tags (bare LoRA name, salt and digest; ``(identifier, offset)``).

    Args:
        extra_keys: one entry per block, as from ``generate_block_hash_extra_keys``.

    Returns:
        One entry per block, or None where there is no block.
    """
    event_keys: list[ExtraKeys] = [
        keys if keys is None else tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
        for keys in extra_keys or ()
    ]
    return event_keys or None


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
