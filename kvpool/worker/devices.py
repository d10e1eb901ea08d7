"""Which device, and how many blocks it has room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.kv_cache_spec import KVCacheGroupSpec
from kvpool.sizing import num_blocks_for_memory
from kvpool.worker.cache_memory import free_memory

MEMORY_SHARE = 0.9
"""Of the free memory, what a cache takes at most whose size is left open."""


def default_device() -> str:
    """CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def num_blocks_that_fit(groups: Sequence[KVCacheGroupSpec], device: str) -> int | None:
    """Blocks in ``MEMORY_SHARE`` of the memory that is free now; None where that is not known.

    Raises:
        InvalidArgumentError: not even one fits.
    """
    free = free_memory(torch.device(device))
    return None if free is None else num_blocks_for_memory(groups, int(free * MEMORY_SHARE))
