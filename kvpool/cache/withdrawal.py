"""Taking back what a KV cache manager has given for tokens that nobody has computed, or may not have.

A step that fails, or a call that is interrupted, leaves blocks that were made findable when they were allocated and
whose contents never came. A scheduler takes them back by these calls; after them no prefix hit leads to such a block.
Evicted hashes stay evicted: a worker may have written over the blocks already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvpool.cache.managers import MambaManager
from kvpool.cache.managers.base import AllocationNote
from kvpool.cache.queries import KVCacheQueries

if TYPE_CHECKING:
    from kvpool.backend import KVCacheBlock, Request


class KVCacheWithdrawal(KVCacheQueries):
    """Part of ``KVCacheManager``, which documents the attributes."""

    @property
    def has_recurrent_states(self) -> bool:
        """Whether a step changes states in place, so that it can't be computed again from where it began."""
        return any(isinstance(manager, MambaManager) for manager in self.coordinator.single_type_managers)

    def take_back(self, request: Request, num_computed_tokens: int) -> None:
        """Take what the request was given for tokens beyond ``num_computed_tokens``: blocks that hold no others are
        free, and hashes that cover such a token are gone. O(blocks of the request); a second call changes nothing.

        Tables of Mamba states only lose their hashes: free the request, it has to start again.
        """
        for manager in self.coordinator.single_type_managers:
            manager.take_back(request.request_id, num_computed_tokens)

    def _note_tables(self, request_id: str) -> list[AllocationNote]:
        """Per group what ``_undo_allocation`` needs, before anything is counted or taken for the request."""
        return [manager.note(request_id) for manager in self.coordinator.single_type_managers]

    def _undo_count(self, request_id: str, notes: Sequence[AllocationNote]) -> None:
        """Take back what groups have noted while they counted the blocks of an allocation that is refused."""
        for manager, note in zip(self.coordinator.single_type_managers, notes):
            if isinstance(manager, MambaManager):
                manager.undo_count(request_id, note)

    def _undo_allocation(
        self,
        request: Request,
        num_computed_tokens: int,
        notes: Sequence[AllocationNote],
        hits: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        """Set the tables back to what they were before an allocation that has failed in the middle, with all that goes
        with them, and take the hashes that it has given. Hits count as used last, and what was evicted stays so."""
        groups = list(zip(self.coordinator.single_type_managers, notes, hits))
        for manager, note, blocks in reversed(groups):  # new blocks go back to the head of the free list, as they came
            manager.undo_allocation(request.request_id, num_computed_tokens, note, blocks)

    def find_uncomputed_ids(self, request: Request, num_computed_tokens: int) -> list[int]:
        """Ids of the request's blocks that can be hit and hold a token beyond ``num_computed_tokens``."""
        return [
            block_id
            for manager in self.coordinator.single_type_managers
            for block_id in manager.find_uncomputed_ids(request.request_id, num_computed_tokens)
        ]

    def find_own_cached_ids(self, request: Request) -> list[int]:
        """Ids of the blocks that can be hit and are in use by this request alone."""
        return [
            block.block_id
            for blocks in self.coordinator.get_blocks(request.request_id)
            for block in blocks
            if block.ref_cnt == 1 and block.block_hash is not None and not block.is_null
        ]

    def drop_pending(self) -> None:
        """Forget the copies and the blocks to zero that a step would have told workers of; the copies' references are
        what ``release_orphans`` gives back, their targets can't be hit."""
        for manager in self.coordinator.single_type_managers:
            self.block_pool.evict_blocks([target.block_id for _, target in manager.pending_cow_copies])
            manager.take_pending_cow_copies()
            manager.take_new_block_ids()

    def release_orphans(self) -> int:
        """Give back references that no block table accounts for, as a call leaves them that was interrupted between
        taking blocks and entering them. Only for whoever owns all references to the pool's blocks. O(blocks).

        Returns:
            How many references there were.
        """
        import numpy as np  # takes longer to import than the rest of the package

        tables = chain.from_iterable(
            manager.req_to_blocks.values() for manager in self.coordinator.single_type_managers
        )
        ids = np.fromiter(chain.from_iterable(map(_block_ids, tables)), np.int64)
        held = self.block_pool.get_ref_counts()
        surplus = held - np.bincount(ids, minlength=len(held))
        surplus[self.block_pool.null_block.block_id] = 0
        orphans = np.repeat(np.arange(len(held), dtype=np.int32), np.maximum(surplus, 0))
        self.block_pool.free_ids(orphans)
        return len(orphans)


def _block_ids(table: Iterable[object]) -> Iterable[int]:
    ids: Iterable[int] = table.block_ids() if hasattr(table, "block_ids") else [block.block_id for block in table]  # type: ignore[attr-defined]
    return ids
