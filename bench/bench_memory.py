"""Memory of a pool and what it costs the garbage collector, each figure from a fresh process.

``python -m bench.bench_memory native 100000`` prints the figures of one pool as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from bench.implementations import HASH_BLOCK_SIZE, Implementation, load
from bench.rows import MAX_BYTES_PER_BLOCK, MAX_GC_OBJECTS, POOL_SIZES
from bench.workloads import BLOCKS_PER_ROUND, GROUP, HashedRequest, make_digests

FIXED_BYTES = 512  # structs and alignment, whatever the number of blocks: they show in small pools only
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class MemoryFigures:
    """What one pool takes, its blocks all cached by sha256.

    Attributes:
        implementation, num_blocks: of the pool.
        native_bytes_per_block: ``nbytes`` over the blocks; None where the pool has no native memory to report.
        gc_objects: objects the garbage collector tracks because of the pool, right after its creation.
        gc_objects_in_use: the same after every block was handed out, cached and given back.
        resident_bytes_per_block: growth of the process (RSS) over creation and use, block objects included.
    """

    implementation: str
    num_blocks: int
    native_bytes_per_block: float | None
    gc_objects: int
    gc_objects_in_use: int
    resident_bytes_per_block: float


def count_tracked() -> int:
    """Objects the garbage collector tracks now."""
    gc.collect()
    return len(gc.get_objects())


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def cache_all(pool: Any, digests: list[bytes]) -> None:
    """Hands every block out, gives it its hash, and takes it back. A few thousand at a time: no list of all blocks."""
    for start in range(0, len(digests), BLOCKS_PER_ROUND):
        hashes = digests[start : start + BLOCKS_PER_ROUND]
        blocks = pool.get_new_blocks(len(hashes))
        pool.cache_full_blocks(HashedRequest(hashes), blocks, 0, len(blocks), HASH_BLOCK_SIZE, GROUP)
        pool.free_blocks(blocks)


def measure_memory(implementation: Implementation, num_blocks: int) -> MemoryFigures:
    """Makes one pool, uses all of it and counts. Call it in a fresh process: RSS hides what was freed before."""
    digests = make_digests(num_blocks - 1)
    implementation.make_pool(2)  # what the first pool of a process loads is not the pool's
    tracked, resident = count_tracked(), resident_bytes()
    pool = implementation.make_pool(num_blocks)
    created = count_tracked()
    cache_all(pool, digests)
    in_use = count_tracked()
    nbytes = getattr(pool, "nbytes", None) if implementation.name == "native" else None
    return MemoryFigures(
        implementation=implementation.name,
        num_blocks=num_blocks,
        native_bytes_per_block=None if nbytes is None else nbytes / num_blocks,
        gc_objects=created - tracked,
        gc_objects_in_use=in_use - tracked,
        resident_bytes_per_block=(resident_bytes() - resident) / num_blocks,
    )


def is_memory_target_met(figures: MemoryFigures) -> bool:
    """Bytes a block (nbytes without the pool's fixed part) and tracked objects against the target table."""
    if figures.native_bytes_per_block is None:
        return False
    is_small = figures.native_bytes_per_block - FIXED_BYTES / figures.num_blocks <= MAX_BYTES_PER_BLOCK
    return is_small and max(figures.gc_objects, figures.gc_objects_in_use) <= MAX_GC_OBJECTS


def measure_in_fresh_process(name: str, num_blocks: int) -> MemoryFigures:
    """The figures of one pool, from a process that has made no other."""
    command = [sys.executable, "-m", "bench.bench_memory", name, str(num_blocks)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout
    return MemoryFigures(**json.loads(answer.splitlines()[-1]))


@pytest.mark.parametrize("num_blocks", POOL_SIZES)
def test_memory(benchmark, implementation: Implementation, num_blocks: int) -> None:  # type: ignore[no-untyped-def]
    """The time is that of the whole process and means nothing; the figures are in ``extra_info``."""
    benchmark.group = f"memory pool={num_blocks}"
    figures = benchmark.pedantic(measure_in_fresh_process, args=(implementation.name, num_blocks), rounds=1)
    benchmark.extra_info.update(asdict(figures))
    if implementation.name == "native":
        assert is_memory_target_met(figures), figures


if __name__ == "__main__":
    print(json.dumps(asdict(measure_memory(load(sys.argv[1]), int(sys.argv[2])))))
