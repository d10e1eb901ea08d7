"""What goes into a block hash beside the tokens: LoRA adapter, multimodal inputs, the salt, prompt embeddings.

Requests are read by attribute name, those of vLLM's ``Request``: ``mm_features``, ``lora_request``, ``cache_salt``,
``prompt_embeds``. An attribute that a request lacks counts as None.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from kvpool.errors import InvalidArgumentError

_EMBEDDING_CACHE_ATTRIBUTE = "_prompt_embeds_per_block_hashes"

ExtraKeys = tuple[Any, ...] | None


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
