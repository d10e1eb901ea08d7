"""The pool's rows of the target table: what is measured, and how many times faster than vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.implementations import Implementation
from bench.workloads import (
    BATCH,
    CachedPoolWorkload,
    CacheFullBlocks,
    ChurnedGetAndFree,
    CreatePool,
    EvictingGet,
    FreeOfCached,
    GetAndFree,
    GetAndFreeIds,
    GetCachedBlock,
    LongestPrefixHit,
    TouchOfFree,
    Workload,
)

BATCHES = (1, 16, 256, 4_096)
POOL_SIZES = (1_000, 100_000, 2_000_000)
USUAL_POOL = 100_000
LARGE_POOL = 2_000_000
HOT_BATCHES = 3  # all that a pool of 1,000 has
MAX_GROWTH = 2.0  # cost of a batch at the largest pool over its cost at the smallest
MAX_OVER_C = 1.5  # allocate_ids + free_ids over the same loop in C
MAX_BYTES_PER_BLOCK = 96
MAX_GC_OBJECTS = 9
C_ROW = f"get_free/on/{BATCH}/{USUAL_POOL}"

MakeWorkload = Callable[[Implementation], Workload]


@dataclass(frozen=True)
class Row:
    """One line of a report.

    Attributes:
        name: stable key, e.g. in ratios.json.
        title: the operation in words.
        make: the workload on a new pool of an implementation.
        target: at least so many times faster than vLLM; None: nothing promised.
    """

    name: str
    title: str
    make: MakeWorkload
    target: float | None = None


CACHED_WORKLOADS: dict[str, tuple[str, type[CachedPoolWorkload], float]] = {
    "evict": ("get_new_blocks that evicts cached blocks", EvictingGet, 15),
    "free_cached": ("free_blocks of cached blocks", FreeOfCached, 10),
    "touch": ("touch of free cached blocks", TouchOfFree, 25),
    "cache_full": ("cache_full_blocks, events off", CacheFullBlocks, 20),
    "prefix_hit": ("longest prefix hit", LongestPrefixHit, 15),
    "get_cached": ("get_cached_block, one hash a call", GetCachedBlock, 4),
}
GET_FREE_TARGETS = {True: (10, 25, 30, 30), False: (5, 12, 15, 15)}


def get_free_rows(enable_caching: bool) -> list[Row]:
    """get_new_blocks + free_blocks at each batch size."""
    state = "on" if enable_caching else "off"
    return [
        Row(
            f"get_free/{state}/{batch}",
            f"get_new_blocks + free_blocks, caching {state}, batch {batch:,}",
            partial(GetAndFree, num_blocks=USUAL_POOL, batch=batch, enable_caching=enable_caching),
            target,
        )
        for batch, target in zip(BATCHES, GET_FREE_TARGETS[enable_caching], strict=True)
    ]


def churned_row(batch: int) -> Row:
    """get_new_blocks + free_blocks on a pool whose free list is in random order; no target of its own."""
    return Row(
        f"get_free/churned/{batch}",
        f"the same on a churned pool, batch {batch:,}",
        partial(ChurnedGetAndFree, num_blocks=USUAL_POOL, batch=batch),
    )


def cached_rows() -> list[Row]:
    """The operations on cached blocks, batches of 256, a pool that fits the processor's cache."""
    return [
        Row(name, f"{title}, batch {BATCH}" if name != "get_cached" else title, make, target)
        for name, (title, make, target) in CACHED_WORKLOADS.items()
    ]


def ids_row() -> Row:
    return Row(
        f"ids/{BATCH}",
        f"allocate_ids + free_ids, batch {BATCH}",
        partial(GetAndFreeIds, num_blocks=USUAL_POOL, batch=BATCH),
        60,
    )


def create_row(num_blocks: int) -> Row:
    return Row(
        f"create/{num_blocks}",
        f"creation of a pool of {num_blocks:,} blocks",
        partial(CreatePool, num_blocks=num_blocks),
        100,
    )


def target_rows(create_blocks: int = LARGE_POOL) -> list[Row]:
    """All rows that are a ratio to vLLM, in the order of the target table."""
    return [
        *get_free_rows(True),
        churned_row(BATCH),
        *get_free_rows(False),
        *cached_rows(),
        ids_row(),
        create_row(create_blocks),
    ]


def growth_rows(num_blocks: int) -> list[Row]:
    """The same three batches over and over in a pool of one size: costs that must not grow with the pool."""
    rows = [
        Row("get_free/on/256", "get_new_blocks + free_blocks", partial(GetAndFree, num_blocks=num_blocks, batch=BATCH)),
        Row("ids/256", "allocate_ids + free_ids", partial(GetAndFreeIds, num_blocks=num_blocks, batch=BATCH)),
    ]
    return rows + [
        Row(
            f"{name}/{order}",
            f"{title}, {order}",
            partial(make, num_blocks=num_blocks, active_batches=HOT_BATCHES, is_churned=is_churned),
        )
        for name, (title, make, _) in CACHED_WORKLOADS.items()
        for order, is_churned in (("ids in order", False), ("random ids", True))
    ]


def round_the_pool_rows(num_blocks: int) -> list[Row]:
    """Each call meets other blocks, in random order, until the whole pool had its turn: the cost of cache misses."""
    churned = Row(
        "get_free/churned/256",
        "get_new_blocks + free_blocks",
        partial(ChurnedGetAndFree, num_blocks=num_blocks, batch=BATCH),
    )
    return [churned] + [
        Row(name, title, partial(make, num_blocks=num_blocks)) for name, (title, make, _) in CACHED_WORKLOADS.items()
    ]


def cold_rows() -> list[Row]:
    """Per-step costs of one call, for samples that find the processor's caches full of other data."""
    one_call = {"num_blocks": USUAL_POOL, "batches_per_round": 1}
    get_free = [
        Row(
            f"get_free/churned/{batch}",
            f"get_new_blocks + free_blocks, churned pool, batch {batch}",
            partial(ChurnedGetAndFree, num_blocks=USUAL_POOL, batch=batch, blocks_per_round=batch),
        )
        for batch in (16, BATCH)
    ]
    return get_free + [
        Row(name, f"{title}, {BATCH} blocks", partial(make, **one_call))
        for name, (title, make, _) in CACHED_WORKLOADS.items()
    ]
