"""Digests of block tables by what a rank is told: for workers that have no tables."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from kvpool.scheduler.output import BlockIds, SchedulerOutput


class TableDigests:
    """Follows the block tables that a rank is told, by the rules of ``kvpool/scheduler/output.py``.

    What a step appends goes into digests of the tables; the ids themselves are not kept.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, list[int]] = {}

    def apply(self, output: SchedulerOutput) -> list[int]:
        """A digest for each of ``num_scheduled_tokens``, in that order. O(requests + new block ids).

        Raises:
            KeyError: a request goes on that never came.
        """
        digests = self._by_request
        for request_id in output.finished_request_ids:
            digests.pop(request_id, None)
        for new in output.scheduled_new_requests:
            digests[new.request_id] = self._extended([0] * len(new.block_ids), new.block_ids)
        cached = output.scheduled_cached_requests
        for request_id, is_resumed, block_ids in zip(cached.request_ids, cached.resumed, cached.new_block_ids):
            if block_ids is not None:
                before = [0] * len(block_ids) if is_resumed else digests[request_id]
                digests[request_id] = self._extended(before, block_ids)
        return [combine_groups(digests[request_id]) for request_id in output.num_scheduled_tokens]

    def _extended(self, before: Sequence[int], block_ids: BlockIds) -> list[int]:
        return [crc32(array("i", ids), digest) for digest, ids in zip(before, block_ids)]


def combine_groups(digests: Sequence[int]) -> int:
    """One digest of those of a request's tables in all KV cache groups."""
    return digests[0] if len(digests) == 1 else crc32(array("Q", digests))
