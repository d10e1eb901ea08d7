"""An order in which the keys of blocks can be inserted so that every lookup is what it was.

A key may lead to several blocks, the first inserted one first, and a block may have several keys, its ``block_hash``
first. Both are orders of insertion, so there is one order that has them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

Entry = tuple[int, bytes]  # block id and key


def order_of_insertion(
    keys_of_block: Mapping[int, Sequence[bytes]], blocks_of_key: Mapping[bytes, Sequence[int]]
) -> list[Entry]:
    """All entries, each after those that have to come before it, otherwise by block. O(entries * log(entries)).

    Args:
        keys_of_block: for every block that has some.
        blocks_of_key: for every key that leads to more than one block.

    Raises:
        ValueError: there is none.
    """
    rows: list[list[Entry]] = [[(block_id, key) for key in keys] for block_id, keys in keys_of_block.items()]
    rows += [[(block_id, key) for block_id in block_ids] for key, block_ids in blocks_of_key.items()]
    if not blocks_of_key:  # as nearly always
        return sorted(_flat(rows), key=lambda entry: entry[0])
    num_before: dict[Entry, int] = {entry: 0 for row in rows for entry in row}
    after: dict[Entry, list[Entry]] = defaultdict(list)
    for row in rows:
        for first, second in pairwise(row):
            after[first].append(second)
            num_before[second] += 1
    ready = [entry for entry, count in num_before.items() if count == 0]
    heapify(ready)
    ordered = []
    while ready:
        entry = heappop(ready)
        ordered.append(entry)
        for later in after[entry]:
            num_before[later] -= 1
            if num_before[later] == 0:
                heappush(ready, later)
    if len(ordered) != len(num_before):
        raise ValueError("keys that could not have been inserted one after the other")
    return ordered


def _flat(rows: Iterable[list[Entry]]) -> Iterable[Entry]:
    return (entry for row in rows for entry in row)
