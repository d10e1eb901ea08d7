"""Views of block hashes at coarser block sizes."""

from __future__ import annotations

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize, resolve_block_hashes

DIGESTS = [bytes([i]) for i in range(7)]


def test_a_coarse_block_has_the_hash_of_its_last_fine_block() -> None:
    view = BlockHashListWithBlockSize(DIGESTS, 2, 6)
    assert len(view) == 2 and list(view) == [b"\2", b"\5"]
    assert (view[0], view[1], view[-1]) == (b"\2", b"\5", b"\5")
    assert view[:1] == [b"\2"] and view[1:] == [b"\5"] and view[::-1] == [b"\5", b"\2"]
    for index in (2, -3):
        with pytest.raises(IndexError):
            view[index]


def test_a_view_grows_with_its_list() -> None:
    digests = DIGESTS[:2]
    view = BlockHashListWithBlockSize(digests, 1, 3)
    assert list(view) == []
    digests += DIGESTS[2:]
    assert list(view) == [b"\2", b"\5"]


@pytest.mark.parametrize("sizes", [(2, 3), (4, 2), (0, 4), (2, 0), (2, -2)])
def test_sizes_that_do_not_fit(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        BlockHashListWithBlockSize(DIGESTS, *sizes)


def test_hashes_are_resolved_only_where_sizes_differ() -> None:
    assert resolve_block_hashes(DIGESTS, 4, 4) is DIGESTS
    view = resolve_block_hashes(DIGESTS, 2, 4)
    assert list(view) == [b"\1", b"\3", b"\5"]
    assert resolve_block_hashes(view, 2, 4) is view
    with pytest.raises(InvalidArgumentError):
        resolve_block_hashes(view, 2, 8)
    with pytest.raises(InvalidArgumentError):
        resolve_block_hashes(DIGESTS, 4, 6)


def test_a_group_that_can_be_hit_inside_a_block_keeps_the_fine_hashes() -> None:
    for alignment, is_fine in ((2, True), (4, True), (8, False), (None, False), (3, False)):
        resolved = resolve_block_hashes(
            DIGESTS, 2, 8, supports_fine_grained_hash_lookup=True, alignment_tokens=alignment
        )
        assert (resolved is DIGESTS) == is_fine
    assert resolve_block_hashes(DIGESTS, 2, 8, alignment_tokens=2) is not DIGESTS
