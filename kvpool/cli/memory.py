"""Whether a pool can be held in memory at all, known before it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MIN_BYTES_PER_BLOCK = {"native": 64}
_MIN_BYTES_PER_BLOCK_OBJECT = 128


def check_pool_memory(implementations: Iterable[str], num_blocks: int) -> None:
    """MemoryError if the pool of one of them is certain to exceed the memory that is free. The system may grant it all
    the same, and end the process when it is used."""
    free = free_bytes()
    for name in implementations:
        num_bytes = num_blocks * _MIN_BYTES_PER_BLOCK.get(name, _MIN_BYTES_PER_BLOCK_OBJECT)
        if free is not None and num_bytes > free:
            raise MemoryError(
                f"{num_blocks:,} blocks of {name} take at least {num_bytes / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are"
                " free"
            )


def free_bytes() -> int | None:
    """Memory that can be had without swapping; None where that is not known."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
