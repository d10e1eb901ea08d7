"""Which device, and how many blocks it has room for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from kvpool.cache.sizing import num_blocks_for_memory
from kvpool.cache.spec import KVCacheGroupSpec
from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.worker.memory.device_memory import free_memory

MEMORY_SHARE = 0.9
"""Of the free memory, what a cache takes at most whose size is left open."""


def default_device() -> str:
    """CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """Raises InvalidArgumentError for what is neither the CPU nor a CUDA device that is here."""
    found = re.fullmatch(r"cpu|cuda(:(?P<number>[0-9]{1,3}))?", name)
    if found is None:
        raise InvalidArgumentError(f"a device is cpu, cuda or cuda:NUMBER, not {show(name)}")
    if name != "cpu" and int(found["number"] or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"{name} is not here: there are {torch.cuda.device_count()} CUDA devices")


def num_blocks_that_fit(groups: Sequence[KVCacheGroupSpec], device: str, num_local_ranks: int) -> int | None:
    """Blocks that a rank's share of ``MEMORY_SHARE`` of the free memory holds; None where that is not known.

    Ranks of one machine share its memory on the CPU; each has a GPU of its own.

    Raises:
        InvalidArgumentError: not even one fits.
    """
    free = free_memory(torch.device(device))
    if free is None:
        return None
    fitting = num_blocks_for_memory(groups, int(free * MEMORY_SHARE))
    return fitting // num_local_ranks if torch.device(device).type == "cpu" else fitting
