"""Devices and their memory: what there is, how many blocks it holds, and taking it only where it is free."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvpool.cache.sizing import num_blocks_for_memory
from kvpool.cache.spec import KVCacheGroupSpec
from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError, KvpoolError

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.9
"""Of the free memory, what a cache takes at most whose size is left open."""


class CacheMemoryError(KvpoolError, MemoryError):
    """A KV cache does not fit into the memory that is free. The message says how many blocks would."""


def allocate_blocks(
    shape: tuple[int, ...], num_blocks: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """A zeroed tensor with ``num_blocks`` blocks of equal size.

    On the CPU, unless pinned, pages are taken as they are written, and huge ones where the system gives them to who
    asks: numpy does, and blocks all over the cache are then reached a quarter faster.

    Raises:
        CacheMemoryError: it is larger than ``free_memory``, or there is no room for it for another reason.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    free = free_memory(device)
    cause: Exception | None = None
    if free is None or num_bytes <= free:
        try:
            if device.type == "cpu" and not pinned:
                return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:  # a lack of memory is a RuntimeError to torch
            cause = error
    block_bytes = num_bytes // num_blocks
    fitting = "" if free is None else f"; {free} are free, enough for {free // block_bytes} blocks"
    raise CacheMemoryError(
        f"{num_blocks} blocks of {block_bytes} bytes need {num_bytes} bytes on {device}{fitting}"
    ) from cause


def free_memory(device: torch.device) -> int | None:
    """Bytes that an allocation on a device could get, without swapping; None where that is not known.

    CUDA: what the driver has free, and what torch's allocator keeps unused in whole segments. CPU: what the system has
    available, or what the process's control group leaves if that is less.
    """
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        stats = torch.cuda.memory_stats(device)
        held, used, in_parts = (
            int(stats.get(f"{name}.all.current", 0))
            for name in ("reserved_bytes", "active_bytes", "inactive_split_bytes")
        )
        return free + max(0, held - used - in_parts)
    if device.type != "cpu":
        return None
    import psutil

    available = int(psutil.virtual_memory().available)
    limits = [left for left in (cgroup_bytes_left(folder) for folder in cgroup_folders()) if left is not None]
    return min([available, *limits])


def cgroup_folders(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of the control groups (version 2) that this process is in, from its own up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    paths = [line[len("0::/") :] for line in lines if line.startswith("0::/")]
    if not paths or ".." in Path(paths[0]).parts:
        return [root]
    own = root / paths[0]
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def cgroup_bytes_left(folder: Path) -> int | None:
    """What the memory limit of a control group leaves, 0 or more; file pages count as free. None without a limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)))


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
