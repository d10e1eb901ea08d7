"""Requests as a pool reads them: tokens, and one chained digest per hash block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

Digests = Callable[[Sequence[int], int], "list[bytes]"]


def chained_digests(token_ids: Sequence[int], hash_block_size: int) -> list[bytes]:
    """sha256 over the digest before and the tokens of the block, for every full block."""
    digests: list[bytes] = []
    before = b"start of a sequence"
    for end in range(hash_block_size, len(token_ids) + 1, hash_block_size):
        tokens = ",".join(map(str, token_ids[end - hash_block_size : end]))
        before = hashlib.sha256(before + tokens.encode()).digest()
        digests.append(before)
    return digests


class TokenRequest:
    """The attributes that vLLM's pool and kvpool's read from a request."""

    def __init__(
        self, token_ids: Sequence[int], hash_block_size: int = 4, digests: Digests = chained_digests, **attributes: Any
    ) -> None:
        self.all_token_ids = list(token_ids)
        self.block_hashes = digests(self.all_token_ids, hash_block_size)
        self.mm_features: list[Any] = []
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.prompt_embeds: Any = None
        self.session_id: str | None = None
        self._prompt_embeds_per_block_hashes: dict[tuple[int, int], bytes] = {}
        vars(self).update(attributes)


class Lora:
    """An adapter, with vLLM's attribute names."""

    def __init__(self, name: str = "poems", adapter_id: int = 7, path: str = "/adapters/poems") -> None:
        self.name = self.lora_name = name
        self.adapter_id = self.lora_int_id = adapter_id
        self.lora_path = path


class Picture:
    """A multimodal input, with vLLM's attribute names."""

    class Place:
        def __init__(self, offset: int, length: int) -> None:
            self.offset = offset
            self.length = length

    def __init__(self, identifier: str, offset: int, length: int) -> None:
        self.identifier = identifier
        self.mm_position = self.Place(offset, length)


def lookup_key(digest: bytes, group_id: int = 0) -> bytes:
    """A key of the prefix map, spelled out: digest and 4 bytes of group id, big-endian."""
    return digest + bytes([group_id >> 24 & 255, group_id >> 16 & 255, group_id >> 8 & 255, group_id & 255])


def external(digest: bytes) -> int:
    """A digest as events show it by default: its last 8 bytes as an unsigned integer."""
    return int.from_bytes(digest[-8:], "big")
