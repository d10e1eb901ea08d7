"""What an allocation refuses, before it changes anything.

Worst is a stale hit. Between a lookup and the allocation that uses it, other requests may take the blocks of the hit:
they are free, and nothing holds them. A block that was taken has lost its hash or carries another one. Using it would
show one request another one's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cache.coordinator import KVCacheCoordinator
from kvpool.cache.managers import MambaManager, SingleTypeKVCacheManager
from kvpool.cache.spec import ceil_div
from kvpool.common.arguments import show, to_int
from kvpool.errors import BlockStateError, InvalidArgumentError
from kvpool.hashing.block_hash import GROUP_ID_BYTES

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock, Request

HitsByGroup = Sequence[Sequence["KVCacheBlock"]]


def to_count(name: str, number: object) -> int:
    """The number as an exact int, which is what tables and counts are kept with.

    Raises:
        TypeError: no integer.
        InvalidArgumentError: negative.
    """
    count = number if type(number) is int else to_int(name, number)
    if count < 0:
        raise InvalidArgumentError(f"{name} must not be negative: {show(count)}")
    return count


def refuse_missing_hashes(request: Request, num_tokens: int, hash_block_size: int) -> None:
    """InvalidArgumentError if the request has too few hashes to publish its first ``num_tokens`` tokens."""
    num_hashes = len(request.block_hashes)
    if num_tokens // hash_block_size > num_hashes:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has {num_hashes} block hashes of {hash_block_size} tokens, too few to "
            f"publish {num_tokens} tokens"
        )


def refuse_tokens_without_slots(
    coordinator: KVCacheCoordinator, request: Request, num_tokens: int, num_slots: int
) -> None:
    """InvalidArgumentError if a group would have to publish more blocks of the request than it has with ``num_slots``
    slots: a request that is longer than the model allows."""
    for group_id, manager in enumerate(coordinator.single_type_managers):
        if not (manager.enable_caching and manager.kv_cache_spec.prefix_cacheable):
            continue
        num_full_blocks = coordinator.get_num_cacheable_tokens(num_tokens, group_id) // manager.block_size
        num_held_blocks = len(manager.req_to_blocks.get(request.request_id, ()))
        if num_full_blocks > max(num_held_blocks, ceil_div(num_slots, manager.block_size)):
            raise InvalidArgumentError(
                f"{num_tokens} tokens of request {request.request_id!r} are to be published, but it has slots for "
                f"{max(num_slots, num_held_blocks * manager.block_size)}: slots end at max_model_len"
            )


def refuse_computed(coordinator: KVCacheCoordinator, request_id: str, hits: HitsByGroup) -> None:
    """InvalidArgumentError if the request cannot adopt computed tokens: hits of another number of groups, with
    caching off, or for a request that has blocks."""
    managers = coordinator.single_type_managers
    if len(hits) != len(managers):
        raise InvalidArgumentError(
            f"computed blocks of {len(hits)} groups, but there are {len(managers)} KV cache groups"
        )
    has_hits = any(hits)
    if has_hits and not coordinator.block_pool.enable_caching:
        raise InvalidArgumentError("Computed blocks should be empty when prefix caching is disabled")
    has_blocks = has_hits if coordinator.is_running(request_id) else any(coordinator.get_blocks(request_id))
    if has_blocks:
        raise InvalidArgumentError(f"request {request_id!r} has blocks already and can adopt none")


def refuse_stale_hits(
    managers: Sequence[SingleTypeKVCacheManager],
    request: Request,
    hits: HitsByGroup,
    num_local_computed_tokens: int,
    total_computed_tokens: int,
) -> None:
    """Raise BlockStateError if a block of the hit does not carry the request's own hash for its place.

    Null blocks and blocks that lie before the window are not looked at. O(blocks of the hit).

    Args:
        managers: one per group.
        request: whose ``block_hashes`` count.
        hits: blocks per group.
        num_local_computed_tokens: where the hit ends.
        total_computed_tokens: the same with tokens computed elsewhere.
    """
    for manager, blocks in zip(managers, hits):
        if not blocks:
            continue
        pool: Any = manager.block_pool
        hashes, block_size = request.block_hashes, manager.block_size
        suffix = manager.kv_cache_group_id.to_bytes(GROUP_ID_BYTES, "big")
        contain = pool.cached_block_hash_to_block.contain
        scale, num_whole = block_size // pool.hash_block_size, num_local_computed_tokens // block_size
        first = max(manager.get_num_skipped_tokens(total_computed_tokens), 0) // block_size
        for i in range(first, len(blocks)):
            block = blocks[i]
            end = (i + 1) * scale
            is_as_usual = i < num_whole and end <= len(hashes) and block.block_hash == hashes[end - 1] + suffix
            if is_as_usual or block.is_null:
                continue
            ends = _possible_ends(manager, i, num_local_computed_tokens)
            keys = [hashes[end - 1] + suffix for end in ends if end <= len(hashes)]
            if block.block_hash not in keys and not any(contain(key, block.block_id) for key in keys):
                raise BlockStateError(
                    f"block {i} of the prefix hit of request {request.request_id!r} in group "
                    f"{manager.kv_cache_group_id} was given away since the lookup: {block!r}"
                )


def _possible_ends(manager: SingleTypeKVCacheManager, i: int, num_local_computed_tokens: int) -> range:
    """Numbers of hashes at which block i of a hit may end: at its own end; where the hit ends inside it, also at any
    place from there on, but for a Mamba state, which is that of one place."""
    hash_size = manager.block_pool.hash_block_size
    end = (i + 1) * manager.block_size // hash_size
    if not i * manager.block_size < num_local_computed_tokens < (i + 1) * manager.block_size:
        return range(end, end + 1)
    hit_end = num_local_computed_tokens // hash_size
    return range(hit_end, hit_end + 1 if isinstance(manager, MambaManager) else end + 1)
