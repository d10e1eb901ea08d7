"""Block ids as a caller gives them: checked on the host, where a wrong one can be named, and sent to a device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from kvpool.errors import InvalidArgumentError

BlockIds = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
NULL_BLOCK_ID = 0


def checked_ids(block_ids: BlockIds, num_blocks: int, name: str) -> list[int]:
    """Block ids as a list. Reading them from a device waits for it. O(n).

    Raises:
        TypeError: no one-dimensional integers.
        InvalidArgumentError: an id outside ``0 .. num_blocks - 1``; ``name`` says whose in the message.
    """
    plain = block_ids.tolist() if isinstance(block_ids, (np.ndarray, torch.Tensor)) else block_ids
    ids = list(map(index, plain))
    if ids and (min(ids) < 0 or max(ids) >= num_blocks):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidArgumentError(f"{name}: block {wrong} of {num_blocks} blocks")
    return ids


def are_inside(ids: torch.Tensor, num_blocks: int) -> bool:
    """Whether ids of the host are all there, and one-dimensional: what spares large tensors a list. O(n)."""
    if ids.dim() != 1 or ids.numel() == 0:
        return False
    low, high = ids.aminmax()
    return int(low) >= 0 and int(high) < num_blocks


def check_pairs(sources: list[int], targets: list[int], name: str) -> None:
    """InvalidArgumentError unless each source has a target of its own. O(n)."""
    if len(sources) != len(targets):
        raise InvalidArgumentError(f"{name}: {len(sources)} sources, {len(targets)} targets")
    if len(set(targets)) != len(targets):
        repeated = next(target for target in targets if targets.count(target) > 1)
        raise InvalidArgumentError(f"{name}: block {repeated} is a target twice")


def check_not_null(ids: list[int], name: str) -> None:
    """InvalidArgumentError if the null block, which nobody's data is in, is among the ids. O(n)."""
    if NULL_BLOCK_ID in ids:
        raise InvalidArgumentError(f"{name}: the null block holds nobody's tokens")


def ids_on(device: torch.device, ids: list[int]) -> torch.Tensor:
    """Ids as int64 [n] on a device, sent without waiting for what it does."""
    if device.type != "cuda":
        return torch.tensor(ids, dtype=torch.int64, device=device)
    return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
