"""The tests can fail: defects that real allocators had, put into the reference, are noticed by the random tests.

``tests.mutants`` builds more of them, in native code too, and runs the tests against each; here only that they could.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from churn import Churn, WrongContents
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants.catalogue import FAULTS
from pools_in_step import PoolsInStep
from token_requests import TokenRequest, chained_digests

from kvpool import reference
from kvpool.errors import BlockStateError
from kvpool.reference.prefix_map import BlockHashToBlockMap

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = settings(
    max_examples=1500,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


class StaleHashes(reference.BlockPool):
    """Hashes of reused blocks are never dropped."""

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        return self._cached_block_hashes(block)


class StaleSecondaryHashes(reference.BlockPool):
    """Only the primary hash of a reused block is dropped."""

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        keys = self._cached_block_hashes(block)
        self._forget_primary_hash(block)
        block._block_hash = block._block_hash_num_tokens = None
        return keys


class ReversedFree(reference.BlockPool):
    """Freed blocks join the list in the opposite order."""

    def free_blocks(self, ordered_blocks: Any, prepend: bool = False) -> None:
        super().free_blocks(list(ordered_blocks)[::-1], prepend)


class UncachedAppended(reference.BlockPool):
    """Blocks without a hash go to the tail."""

    def __init__(self, *args: Any, uncached_first: bool, **kwargs: Any) -> None:
        super().__init__(*args, uncached_first=False, **kwargs)


class TouchLeavesQueued(reference.BlockPool):
    """A touched block stays in the free list."""

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if block.block_id != 0:
                block._ref_cnt += 1


class CoarseHashIndex(reference.BlockPool):
    """Block i of any size takes hash i of the request."""

    def cache_full_blocks(self, request: Any, blocks: Any, first: int, past: int, size: int, *rest: Any) -> None:
        wrong = TokenRequest(request.all_token_ids, self.hash_block_size)
        wrong.block_hashes = [digest for digest in request.block_hashes for _ in range(size // self.hash_block_size)]
        super().cache_full_blocks(wrong, blocks, first, past, size, *rest)


class DoubleFreeIgnored(reference.BlockPool):
    """A double free is skipped without a word."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, on_invalid_free="warn", **kwargs)


class LastCopyFound(reference.BlockPool):
    """A lookup finds the copy that was cached last."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: Any) -> Any:
        found = super().get_cached_block(block_hash, kv_cache_group_ids)
        if found is None:
            return None
        keys = [block_hash + group_id.to_bytes(4, "big") for group_id in kv_cache_group_ids]
        entries = [self.cached_block_hash_to_block._cache[key] for key in keys]
        return [list(entry.values())[-1] if isinstance(entry, dict) else entry for entry in entries]


class OneBlockPerHash(reference.BlockPool):
    """A second copy replaces the first in the map."""

    def _cache_full_blocks(self, request: Any, *args: Any) -> None:
        hash_map = self.cached_block_hash_to_block
        super()._cache_full_blocks(request, *args)
        for key, entry in list(hash_map._cache.items()):
            if isinstance(entry, dict):
                BlockHashToBlockMap._pop(hash_map, key, next(iter(entry)))


class PartialMutation(reference.BlockPool):
    """A refused allocation has taken what there was."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        if num_blocks > self.get_num_free_blocks():
            super().get_new_blocks(self.get_num_free_blocks())
        return super().get_new_blocks(num_blocks)


class WrongTokenCount(reference.BlockPool):
    """Full blocks are registered with the tokens before them, not after."""

    def _cache_full_blocks(self, request: Any, blocks: Any, first: int, past: int, size: int, *rest: Any) -> None:
        super()._cache_full_blocks(request, blocks, first, past, size, *rest)
        for block in blocks[first:past]:
            if block.block_hash_num_tokens:
                block._block_hash_num_tokens -= size


class EventsOutOfOrder(reference.BlockPool):
    """BlockRemoved events of one block come in the opposite order."""

    def _emit_block_removed_events(self, block_hashes: Any) -> None:
        super()._emit_block_removed_events(list(block_hashes)[::-1])


class SilentEviction(reference.BlockPool):
    """A reused block's hashes leave without an event."""

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        return bool(self._remove_cached_block_hashes(block))


MUTANTS = [
    StaleHashes,
    StaleSecondaryHashes,
    ReversedFree,
    UncachedAppended,
    TouchLeavesQueued,
    CoarseHashIndex,
    DoubleFreeIgnored,
    LastCopyFound,
    OneBlockPerHash,
    PartialMutation,
    WrongTokenCount,
    EventsOutOfOrder,
    SilentEviction,
]


@pytest.fixture(autouse=True)
def quiet(caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL, logger="kvpool")


def run_machine(pool_class: type) -> None:
    class Machine(PoolsInStep):
        @staticmethod
        def make_pools(*args: Any, **kwargs: Any) -> list[Any]:
            return [pool_class(*args, **kwargs)]

    run_state_machine_as_test(Machine, settings=SETTINGS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_state_machine_notices(mutant: type) -> None:
    with pytest.raises(AssertionError):
        run_machine(mutant)


@pytest.mark.parametrize("mutant", [StaleHashes, TouchLeavesQueued], ids=lambda mutant: mutant.__name__)
def test_the_churn_notices(mutant: type) -> None:
    pool = mutant(16, True, 4)
    pool.check = lambda: None  # the contents alone must tell
    with pytest.raises(AssertionError) as raised:
        Churn(pool, 0).run(400)
    assert raised.type in (WrongContents, BlockStateError)


def without_the_last_token(token_ids: Sequence[int], hash_block_size: int) -> list[bytes]:
    """Digests of blocks whose last token was forgotten."""
    blind = [-1 if i % hash_block_size == hash_block_size - 1 else token for i, token in enumerate(token_ids)]
    return chained_digests(blind, hash_block_size)


def without_a_chain(token_ids: Sequence[int], hash_block_size: int) -> list[bytes]:
    """Digests of blocks that do not know what came before."""
    starts = range(0, len(token_ids) - hash_block_size + 1, hash_block_size)
    return [chained_digests(token_ids[i : i + hash_block_size], hash_block_size)[0] for i in starts]


@pytest.mark.parametrize("digests", [without_the_last_token, without_a_chain])
def test_the_churn_notices_wrong_hashes(digests: Any) -> None:
    with pytest.raises(WrongContents):
        Churn(reference.BlockPool(16, True, 4), 0, digests=digests).run(400)


def test_faults_of_the_mutants_are_still_there_to_be_made() -> None:
    """Their texts are in the tree. A name tells one."""
    for fault in FAULTS:
        for edit in fault.edits:
            assert (ROOT / edit.path).read_text(encoding="utf-8").count(edit.old) == edit.count, (fault.name, edit.old)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
