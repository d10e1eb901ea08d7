"""The messages of a recording: how the manager was made, its state, requests, calls and their results.

Each is a msgpack array that begins with the message's name. Block ids and other rows of small numbers are packed, four
bytes each, the lowest first. A request is a number, from its first appearance until it is freed; its own id is not in
the recording, nor are its tokens: their number and the block hashes are all that a manager reads of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from operator import index
from typing import Annotated, Any

import msgspec
from msgspec import Meta

FORMAT_VERSION = 1
_INT32 = "i"  # type code
ITEM_BYTES = array(_INT32).itemsize
IS_LITTLE_ENDIAN = sys.byteorder == "little"

MAX_IDS = 1 << 24
MAX_ROWS = 1 << 20
MAX_HASHES = 1 << 22
MAX_KEYS = 1 << 16  # in one message
MAX_DIGEST_BYTES = 32
MAX_GROUPS = 256
MAX_FIELDS = 64  # of a spec, and items of one

Packed = Annotated[bytes, Meta(max_length=MAX_IDS * ITEM_BYTES)]
Number = int  # whatever a caller has passed: 64 bits are the most that a message holds
Count = Annotated[int, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
GroupId = Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
Word = Annotated[str, Meta(max_length=100)]
Digest = bytes  # of 32 bytes at most, if the caller is right
Key = Annotated[bytes, Meta(min_length=4, max_length=MAX_DIGEST_BYTES + 4)]
Shape = Annotated[list[int], Meta(max_length=MAX_FIELDS)]
FieldValue = int | Word | Annotated[list[int | Word | Shape], Meta(max_length=MAX_FIELDS)] | None
ByGroup = Annotated[list[Packed], Meta(max_length=MAX_GROUPS)]


def number(value: Any) -> int:
    """A caller's number as messages have it. TypeError for what is none."""
    return value if type(value) is int else int(index(value))


def pack(numbers: Iterable[int]) -> bytes:
    """Packed int32. OverflowError or TypeError for what is none."""
    packed = array(_INT32, numbers)
    if not IS_LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


class NotPackedError(ValueError):
    """Bytes that are no row of numbers."""


def unpack(packed: bytes) -> list[int]:
    """The numbers again. NotPackedError if there is a rest."""
    if len(packed) % ITEM_BYTES:
        raise NotPackedError(f"a row of numbers in {len(packed)} bytes")
    numbers = array(_INT32)
    numbers.frombytes(packed)
    if not IS_LITTLE_ENDIAN:
        numbers.byteswap()
    return numbers.tolist()


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages."""


# ---- what a file begins with ----


class GroupSetup(Message):
    """A KV cache group. kind: the class of its spec; fields: those of the spec, by name."""

    kind: Word
    fields: Annotated[dict[Word, FieldValue], Meta(max_length=MAX_FIELDS)]
    is_eagle_group: bool


class PoolSetup(Message):
    """The pool's own options."""

    uncached_first: bool
    on_invalid_free: Word
    strict_partial: bool
    dedup_events: bool
    dense_events: bool
    is_observed: bool  # by a metrics collector


class ManagerSetup(Message):
    """The arguments of ``KVCacheManager``."""

    num_blocks: Size
    groups: Annotated[list[GroupSetup], Meta(max_length=MAX_GROUPS)]
    retention_interval: Number | None
    config_hash_block_size: Number | None
    max_model_len: Annotated[int, Meta(ge=1)]
    scheduler_block_size: Number | None
    hash_block_size: Number | None
    enable_caching: bool
    use_eagle: bool
    enable_kv_cache_events: bool
    watermark: Annotated[float, Meta(ge=0.0)]
    max_in_flight_tokens: Number | None
    num_prefill_lookahead: Number
    enable_mamba_shared_prefix_checkpoint: bool
    verify_hits: bool
    pool: PoolSetup


class Recording(Message, tag="recording"):
    """The first message of a file.

    Attributes:
        format_version: of this module.
        kvpool, backend, python: what was running: versions, native or reference.
        recording_id: the same in both files of a recording.
        segment: number of the file in its recording, from 0.
        setup: how the manager was made.
    """

    format_version: Count
    kvpool: Word
    backend: Word
    python: Word
    recording_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    segment: Count
    setup: ManagerSetup


# ---- the state, in several messages ----


class PoolState(Message, tag="snapshot"):
    """Begins a snapshot.

    Attributes:
        reason: "start", "ring" (the file before is full) or "gap" (what happened since the last message is not known).
        num_operations: before it, since the recording began.
        free_ids: the free list, in order of reuse.
        used_ids, ref_cnts: blocks in use. What is neither free nor used nor null is detached.
        watched_ids: blocks whose reuse somebody waits for.
    """

    reason: Word
    num_operations: Count
    free_ids: Packed
    used_ids: Packed
    ref_cnts: Packed
    watched_ids: Packed


class HashesState(Message, tag="hashes"):
    """Keys of blocks, in an order in which they can be inserted. num_tokens: -1 where it is not known."""

    block_ids: Packed
    num_tokens: Packed
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)]


class GroupState(Message, tag="group"):
    """A group's manager, but for its requests. keys_of_step: of Mamba states that this step computes."""

    group_id: GroupId
    new_block_ids: Packed
    copy_source_ids: Packed
    copy_target_ids: Packed
    keys_of_step: Annotated[list[Key], Meta(max_length=MAX_KEYS)]


class TableState(Message, tag="table"):
    """What a group's manager has of a request; None: nothing.

    Attributes:
        block_ids: its table; an empty one is not the same as none.
        num_cached_blocks: that need no caching.
        partial_hit: index and block of a hit that ends inside the block.
        num_retired_blocks, has_allocated, checkpoint: of aligned Mamba states.
    """

    group_id: GroupId
    request: Count
    block_ids: Packed | None
    num_cached_blocks: Index | None
    partial_hit: tuple[Index, Index] | None
    num_retired_blocks: Index | None
    has_allocated: bool
    checkpoint: tuple[Index, Index] | None


class SnapshotEnd(Message, tag="snapshot_end"):
    """All of the state has been told."""


# ---- requests ----


class RequestState(Message, tag="request"):
    """A request that is new, or has changed; tells all of it but the hashes that are kept.

    Attributes:
        request: its number.
        is_own: whether its class is kvpool's.
        has_own_status: whether its status is one of kvpool's.
        status: 0 running, 1 waiting, 2 preempted.
        num_kept_hashes: of those told before; new_hashes follow them.
    """

    request: Count
    is_own: bool
    has_own_status: bool
    status: Annotated[int, Meta(ge=0, le=2)]
    num_tokens: Count
    num_computed_tokens: Number
    num_prompt_tokens: Number
    num_in_flight_tokens: Number
    shared_prefix_boundary: Number
    skip_reading_prefix_cache: bool
    num_kept_hashes: Count
    new_hashes: Annotated[list[Digest], Meta(max_length=MAX_HASHES)]


class NewHashes(Message, tag="new_hashes"):
    """One more hash for each of some requests."""

    requests: Packed
    hashes: Annotated[list[Digest], Meta(max_length=MAX_HASHES)]


# ---- calls ----


class Operation(Message):
    """Base of the calls; the name of a message is that of the call, ``pool.`` before those of the block pool."""


class GetComputedBlocks(Operation, tag="get_computed_blocks"):
    request: Count


class GetComputedBlocksAndBoundary(Operation, tag="get_computed_blocks_and_boundary"):
    request: Count


LAST_HIT, NO_HIT = 0, 1


class AllocateSlots(Operation, tag="allocate_slots"):
    """new_computed_blocks: block ids by group; or ``LAST_HIT``, what the last lookup has found; or ``NO_HIT``, the
    manager's ``empty_kv_cache_blocks``."""

    request: Count
    num_new_tokens: Number
    num_new_computed_tokens: Number
    new_computed_blocks: Annotated[int, Meta(ge=LAST_HIT, le=NO_HIT)] | ByGroup | None
    num_lookahead_tokens: Number
    num_external_computed_tokens: Number
    delay_cache_blocks: bool
    num_encoder_tokens: Number
    full_sequence_must_fit: bool
    reserved_blocks: Number
    has_scheduled_reqs: bool
    skip_zeroing_group_ids: Annotated[list[Number], Meta(max_length=MAX_GROUPS)]


class PlainAllocations(Message, tag="plain_allocations"):
    """Calls of ``allocate_slots`` one after the other, each an operation, and their results.

    Attributes:
        requests, num_tokens, num_computed_tokens, num_new_tokens: packed, an item for each call: its request, the
            tokens that this has and has computed, and the argument. All other arguments are at their defaults.
        block_ids, numbers: as in the ``Result`` of ``allocate_decode``.
    """

    requests: Packed
    num_tokens: Packed
    num_computed_tokens: Packed
    num_new_tokens: Packed
    block_ids: Annotated[list[Packed], Meta(max_length=MAX_ROWS)]
    numbers: Annotated[list[Number], Meta(max_length=MAX_ROWS)]


class AllocateDecode(Operation, tag="allocate_decode"):
    """Numbers of the requests, and of the tokens that they have and have computed."""

    requests: Packed
    num_tokens: Packed
    num_computed_tokens: Packed


class CacheBlocks(Operation, tag="cache_blocks"):
    request: Count
    num_computed_tokens: Number


class Free(Operation, tag="free"):
    """The request's number is not used again."""

    request: Count


class PopBlocksForFree(Operation, tag="pop_blocks_for_free"):
    """The request's number is not used again."""

    request: Count


class RemoveSkippedBlocks(Operation, tag="remove_skipped_blocks"):
    request: Count
    processed_computed_tokens: Number
    num_prompt_tokens: Number | None


class EvictBlocks(Operation, tag="evict_blocks"):
    block_ids: Packed


class ResetPrefixCache(Operation, tag="reset_prefix_cache"):
    pass


class NewStepStarts(Operation, tag="new_step_starts"):
    pass


class TakeBack(Operation, tag="take_back"):
    request: Count
    num_computed_tokens: Number


class DropPending(Operation, tag="drop_pending"):
    pass


class ReleaseOrphans(Operation, tag="release_orphans"):
    pass


class RecordBlocksForZeroing(Operation, tag="record_blocks_for_zeroing"):
    request: Count
    start_token: Number


class TakeNewBlockIds(Operation, tag="take_new_block_ids"):
    pass


class TakeKVCacheBlockCopies(Operation, tag="take_kv_cache_block_copies"):
    pass


class GetNumRequiredBlocks(Operation, tag="get_num_required_blocks"):
    num_tokens: Number
    num_encoder_tokens: Number


class PoolGetNewBlocks(Operation, tag="pool.get_new_blocks"):
    num_blocks: Number


class PoolFreeBlocks(Operation, tag="pool.free_blocks"):
    block_ids: Packed
    prepend: bool


class PoolTouch(Operation, tag="pool.touch"):
    block_ids: Packed


class PoolCacheFullBlocks(Operation, tag="pool.cache_full_blocks"):
    request: Count
    block_ids: Packed
    num_cached_blocks: Number
    num_full_blocks: Number
    block_size: Number
    kv_cache_group_id: Number
    block_mask: Annotated[list[bool], Meta(max_length=MAX_HASHES)] | None


class PoolCachePartialBlock(Operation, tag="pool.cache_partial_block"):
    request: Count
    block_id: Count
    num_tokens: Number
    kv_cache_group_id: Number
    block_size: Number
    replace_existing_hashes: bool


class PoolMoveBlockHashes(Operation, tag="pool.move_block_hashes"):
    src_block_id: Count
    dst_block_id: Count


class PoolAddReference(Operation, tag="pool.add_reference"):
    block_id: Count


class PoolUnpinBlocks(Operation, tag="pool.unpin_blocks"):
    block_ids: Packed


class PoolEvictBlocks(Operation, tag="pool.evict_blocks"):
    block_ids: Packed


class PoolResetPrefixCache(Operation, tag="pool.reset_prefix_cache"):
    pass


class PoolAllocateIds(Operation, tag="pool.allocate_ids"):
    n: Number


class PoolFreeIds(Operation, tag="pool.free_ids"):
    block_ids: Packed
    prepend: bool


class PoolTouchIds(Operation, tag="pool.touch_ids"):
    block_ids: Packed


class PoolCacheIds(Operation, tag="pool.cache_ids"):
    block_hashes: Annotated[list[Digest], Meta(max_length=MAX_HASHES)]
    block_ids: Packed
    group_id: Number


# ---- what became of a call ----


class Result(Message, tag="result"):
    """What the call before has returned.

    Attributes:
        block_ids: rows of blocks; None where a call found no room.
        numbers: all else, see ``kvpool.playback.calls``.
    """

    block_ids: Annotated[list[Packed], Meta(max_length=MAX_ROWS)] | None
    numbers: Annotated[list[Number], Meta(max_length=MAX_ROWS)]


REFUSED, FAILED, INTERRUPTED = "refused", "failed", "interrupted"


class Failure(Message, tag="failure"):
    """The call before ended with an exception. how: ``REFUSED`` by kvpool, with nothing changed; ``FAILED`` otherwise;
    ``INTERRUPTED`` by what a replay can't repeat, such as Ctrl-C. error: the exception's class."""

    how: Word
    error: Word


OPERATIONS: tuple[type[Operation], ...] = tuple(Operation.__subclasses__())
NAME_OF: dict[type[Operation], str] = {kind: str(kind.__struct_config__.tag) for kind in OPERATIONS}
MESSAGES: tuple[type[Message], ...] = (
    Recording,
    PoolState,
    HashesState,
    GroupState,
    TableState,
    SnapshotEnd,
    RequestState,
    NewHashes,
    PlainAllocations,
    *OPERATIONS,
    Result,
    Failure,
)
