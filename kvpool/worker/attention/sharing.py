"""Which requests share leading blocks, and which of them are best read together.

Requests form a tree by their leading blocks: a system prompt at the root, say, conversations behind it. A request is
read together with others at one depth only, so the tree is cut where the most reading is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.worker.step.step_tensors import HostArray

MAX_DEPTH = 32


@dataclass(frozen=True)
class Sharers:
    """Requests with the same leading blocks.

    Attributes:
        requests: int64 numpy array of at least two indices, ascending.
        num_blocks: leading blocks that all of them have, at least 1.
    """

    requests: HostArray
    num_blocks: int


def find_sharers(tables: Sequence[HostArray], min_saved_blocks: float) -> list[Sharers]:
    """The requests to read together.

    Args:
        tables: int32 numpy array of each request's leading blocks that may be shared; of any lengths, 0 too.
        min_saved_blocks: what reading together costs: it has to save the reading of more blocks than that.

    Returns:
        Disjoint sets of requests. O(r log r * blocks) at worst, usually O(blocks).
    """
    keys = [table.tobytes() for table in tables]
    order = sorted((i for i, table in enumerate(tables) if table.size > 0), key=keys.__getitem__)
    if len(order) < 2:
        return []
    in_common = [_num_in_common(tables[one], tables[other]) for one, other in itertools.pairwise(order)]
    _, found = _best_cut(in_common, 0, len(order), min_saved_blocks, 0)
    return [Sharers(np.sort(np.array(order[first:end])), num_blocks) for first, end, num_blocks in found]


def _num_in_common(one: HostArray, other: HostArray) -> int:
    length = min(one.size, other.size)
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _best_cut(
    in_common: list[int], first: int, end: int, cost: float, depth: int
) -> tuple[float, list[tuple[int, int, int]]]:
    """Blocks saved among the ordered requests ``first`` to ``end``, and (first, end, blocks) of who is read together.

    ``in_common[i]`` are blocks that requests i and i + 1 share. Either all are read together, or they are parted where
    they share the least.
    """
    if end - first < 2:
        return 0.0, []
    between = in_common[first : end - 1]
    least = min(between)
    together = (end - first - 1) * least - cost
    if max(between) == least or depth == MAX_DEPTH:
        return (together, [(first, end, least)]) if together > 0 else (0.0, [])
    saved, found, start = 0.0, [], first
    for place in [*(first + i for i, shared in enumerate(between) if shared == least), end - 1]:
        its_saved, its_found = _best_cut(in_common, start, place + 1, cost, depth + 1)
        saved, start = saved + its_saved, place + 1
        found += its_found
    return (together, [(first, end, least)]) if together >= max(saved, 0.0) and together > 0 else (saved, found)
