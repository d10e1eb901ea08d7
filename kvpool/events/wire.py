"""KV cache events: what a pool stored, removed or cleared, in the wire format of vLLM 0.32.

An event is a msgspec struct tagged with its class name; a batch is an array-like struct. The encoded bytes equal
vLLM's field for field, so consumers (routers, indexers) need no change. Field order and defaults are part of the
format: new fields go to the end and have a default.

Inside the pool a block hash is bytes. In events it is by default the last 8 bytes as an unsigned integer, which is
what consumers of vLLM see; ``KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` publishes the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvpool.common.environment import read_switch

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"

USE_INT_BLOCK_HASHES_VARIABLE = "KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES"

ExternalBlockHash = bytes | int


def _low_64_bits(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _unchanged(block_hash: bytes) -> bytes:
    return block_hash


def external_block_hash_converter() -> Callable[[bytes], ExternalBlockHash]:
    """The conversion that the environment asks for now; for loops, where one look at the environment is enough.

    Raises:
        InvalidArgumentError: the variable is neither ``"0"`` nor ``"1"``. A pool with events asks when it is made.
    """
    return _low_64_bits if read_switch(USE_INT_BLOCK_HASHES_VARIABLE, default=True) else _unchanged


def to_external_block_hash(block_hash: bytes) -> ExternalBlockHash:
    """A block hash as events publish it.

    Args:
        block_hash: digest without group id, any length.

    Returns:
        Its last 8 bytes as an unsigned integer, or the digest itself where the environment variable
        ``KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES`` is ``"0"`` at the time of the call.

    Raises:
        InvalidArgumentError: the variable is neither ``"0"`` nor ``"1"``.
    """
    return external_block_hash_converter()(block_hash)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that are published together.

    Attributes:
        ts: seconds since the epoch, by the publishing machine's wall clock, as vLLM has it. It may jump: the order of
            batches is that of their sequence numbers, and nothing in kvpool depends on it.
        events: the events, in the order in which they happened.
        data_parallel_rank: rank of the publishing engine, None where there is one.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base class of the events of a KV cache."""


class BlockStored(KVCacheEvent):
    """Blocks became reachable by their hashes (or were reused, see ``emit_cached_block_events``).

    Attributes:
        block_hashes: one per stored block, in token order.
        parent_block_hash: hash of the block before the first one, None at the start of a sequence.
        token_ids: tokens of the range. By default the range may include blocks that were not stored (null or masked
            out), as in vLLM; a pool with ``dense_events`` publishes a run of stored blocks only.
        block_size: tokens per block; for a partial block, the tokens it adds.
        lora_id, lora_name: adapter of the request. Consumers should key on the name, the id is for old ones.
        medium: where the blocks lie, ``MEDIUM_GPU`` and so on.
        extra_keys: per block, what besides tokens went into its hash, untagged; None for a block without.
        group_idx: KV cache group.
        kv_cache_spec_kind, kv_cache_spec_sliding_window: attention kind of the group, where the publisher tells.
        locality, ownership: tier of the publisher, where there are several.
        session_id: session of the request that caused the event; blocks may be shared with other sessions.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    def __hash__(self) -> int:
        # Hashes identify content, so they and the place are enough to spread events over a table.
        return hash((tuple(self.block_hashes), self.parent_block_hash, self.block_size, self.medium, self.group_idx))


class BlockRemoved(KVCacheEvent):
    """Hashes that no longer lead to a block.

    Attributes:
        block_hashes: as in ``BlockStored``.
        medium, group_idx, locality, ownership: as in ``BlockStored``.
    """

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium, self.group_idx))


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache was reset: none of the hashes published so far leads to a block."""

    def __hash__(self) -> int:
        return hash(AllBlocksCleared)


class KVEventBatch(EventBatch):
    """A batch of KV cache events, typed so that it can be decoded."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
