"""Everything that a pool's caller can see, as plain values: for comparisons before and after, and of two pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def free_ids(pool: Any) -> list[int]:
    """The free list from head to tail."""
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def block_ids(blocks: Iterable[Any] | None) -> list[int] | None:
    return None if blocks is None else [block.block_id for block in blocks]


def event_fields(event: Any) -> tuple[Any, ...]:
    """Class name and all fields; events compare by value whatever package defines their class."""
    return (type(event).__name__, *((name, getattr(event, name)) for name in event.__struct_fields__))


def state_of(pool: Any, keys: Iterable[bytes] = ()) -> dict[str, Any]:
    """All visible state.

    Args:
        pool: a pool of kvpool, or vLLM's (which has no counters).
        keys: keys whose lookups belong to the state; those that blocks carry do so anyway.
    """
    blocks = list(pool.blocks)
    secondary = {i: set(pool.cached_block_hashes_by_block[i]) for i in list(pool.cached_block_hashes_by_block)}
    primary = [block.block_hash for block in blocks]
    known = set(keys).union(*secondary.values()) | {key for key in primary if key is not None}
    prefix_map = pool.cached_block_hash_to_block
    lookups = {}
    for key in sorted(known):
        first = prefix_map.get_one_block(key)
        if first is not None:
            lookups[key] = (first.block_id, [b.block_id for b in blocks if prefix_map.contain(key, b.block_id)])
    stats = getattr(pool, "stats", None)
    return {
        "free": free_ids(pool),
        "num_free": pool.get_num_free_blocks(),
        "backwards": _ids_backwards(pool.free_block_queue),
        "ref_cnt": [block.ref_cnt for block in blocks],
        "hash": primary,
        "num_tokens": [block.block_hash_num_tokens for block in blocks],
        "secondary": secondary,
        "num_keys": len(prefix_map),
        "lookups": lookups,
        "events": [event_fields(event) for event in pool.kv_event_queue],
        "watched": list(pool._reuse_watchers),
        "stats": None if stats is None else (stats.evictions, stats.invalid_frees),
        "usage": pool.get_usage(),
    }


def _ids_backwards(queue: Any) -> list[int]:
    ids = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        ids.append(block.block_id)
        block = block.prev_free_block
    return ids


class CallLog:
    """A collector that writes down the calls, with the block's id."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_block_allocated(self, block: Any) -> None:
        self.calls.append(("allocated", block.block_id))

    def on_block_accessed(self, block: Any) -> None:
        self.calls.append(("accessed", block.block_id))

    def on_block_evicted(self, block: Any) -> None:
        self.calls.append(("evicted", block.block_id))

    def reset(self) -> None:
        self.calls.append(("reset", -1))

    def take(self) -> list[tuple[str, int]]:
        calls, self.calls = self.calls, []
        return calls
