"""What attention over the paged cache is put together from: who shares blocks, lengths, masks, merged results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.worker.attention import AttentionLayer  # noqa: E402
from kvpool.worker.attention.batch import put, selection_of, take  # noqa: E402
from kvpool.worker.attention.decodes import PADDING_SHARE, split_by_length  # noqa: E402
from kvpool.worker.attention.dense import attend_causal, attend_dense, merge  # noqa: E402
from kvpool.worker.attention.prefills import CausalBias  # noqa: E402
from kvpool.worker.attention.sharing import find_sharers  # noqa: E402

pytestmark = pytest.mark.dataplane

SCALE = 0.3


def trees(rng: random.Random) -> Iterator[list[Any]]:
    for _ in range(300):
        tables: list[Any] = []
        for _ in range(rng.randrange(8)):
            known = rng.choice(tables).tolist() if tables else []
            kept = known[: rng.randrange(len(known) + 1)]
            tables.append(np.array(kept + [rng.randrange(1000) for _ in range(rng.randrange(5))], dtype=np.int32))
        yield tables


def most_saved(tables: list[Any], depth: int, cost: float) -> float:
    """Blocks saved at best by requests that are alike up to ``depth``, by trying every block that comes next."""
    together = max(0.0, (len(tables) - 1) * depth - cost) if len(tables) > 1 else 0.0
    nexts = {int(table[depth]) for table in tables if len(table) > depth}
    parts = ([table for table in tables if len(table) > depth and table[depth] == block] for block in nexts)
    return max(together, sum(most_saved(part, depth + 1, cost) for part in parts))


def test_the_tree_is_cut_where_most_is_saved() -> None:
    rng = random.Random(10)
    seen = 0
    for tables in trees(rng):
        cost = rng.choice([0, 0.5, 3])
        found = find_sharers(tables, cost)
        taken = [i for sharers in found for i in sharers.requests.tolist()]
        assert len(taken) == len(set(taken))
        for sharers in found:
            assert sharers.requests.size > 1 and sharers.num_blocks > 0 and (np.diff(sharers.requests) > 0).all()
            assert len({tuple(tables[i][: sharers.num_blocks]) for i in sharers.requests}) == 1
            assert min(tables[i].size for i in sharers.requests) >= sharers.num_blocks
        saved = sum((s.requests.size - 1) * s.num_blocks - cost for s in found)
        assert saved == pytest.approx(most_saved(tables, 0, cost))
        seen += len(found)
    assert seen > 100


def test_a_long_chain_of_requests_is_no_recursion_without_end() -> None:
    tables = [np.arange(1, i + 1, dtype=np.int32) for i in range(2000)]
    assert find_sharers(tables, 0) != []


@pytest.mark.parametrize("with_bias", [False, True])
def test_halves_merge_to_the_whole(with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    query, keys, values = (torch.randn((2, 3, n, 8), generator=generator) for n in (5, 40, 40))
    bias = torch.zeros(2, 1, 1, 40)
    if with_bias:
        bias[0, ..., 30:] = bias[1, ..., 35:] = float("-inf")
    plain, capped = AttentionLayer(SCALE), AttentionLayer(SCALE, soft_cap=1e7)
    whole, whole_lse = attend_dense(query, keys, values, bias, plain)
    by_hand, lse = attend_dense(query, keys, values, bias, capped, with_lse=True)
    torch.testing.assert_close(by_hand, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=5e-6)
    for layer in (plain, capped):
        parts = [
            attend_dense(query, keys[:, :, cut], values[:, :, cut], bias[..., cut], layer, with_lse=True)
            for cut in (slice(0, 13), slice(13, 40))
        ]
        torch.testing.assert_close(merge(*parts[0], *parts[1]), whole, rtol=0, atol=2e-6)


def test_causal_attention_is_aligned_to_the_end() -> None:
    generator = torch.Generator().manual_seed(12)
    for num_queries, num_keys in ((6, 6), (5, 23)):
        query, keys, values = (
            torch.randn((3, 2, n, 8), generator=generator) for n in (num_queries, num_keys, num_keys)
        )
        bias = CausalBias(8, 1, None, query).view(num_queries, num_keys - num_queries)
        layer = AttentionLayer(SCALE)
        wanted, _ = attend_dense(query, keys, values, bias, layer)
        torch.testing.assert_close(attend_causal(query, keys, values, layer), wanted)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_masks_are_views_of_one_matrix(window: int | None) -> None:
    rng = random.Random(13)
    causal_bias = CausalBias(4, 3, window, torch.empty(0))
    for _ in range(40):
        num_queries, distance = rng.randrange(1, 5), rng.choice([rng.randrange(9), rng.randrange(90)])
        bias = causal_bias.view(num_queries, distance)
        assert bias.shape == (3 * num_queries, distance + num_queries)
        for row in range(3 * num_queries):
            for key in range(distance + num_queries):
                behind = distance + row // 3 - key
                is_seen = behind >= 0 and (window is None or behind < window)
                assert bias[row, key] == (0.0 if is_seen else float("-inf"))


def test_tokens_are_a_range_only_where_they_are_in_line() -> None:
    device = torch.device("cpu")
    for indices, wanted in (([], slice(0, 0)), ([4], slice(4, 5)), ([2, 3, 4], slice(2, 5))):
        assert selection_of(np.array(indices, dtype=np.int64), device) == wanted
    for indices in ([0, 2, 1, 3], [3, 4, 6], [4, 3]):
        selected = selection_of(np.array(indices), device)
        assert selected.tolist() == indices
        target = torch.zeros(8)
        put(target, selected, torch.tensor(indices, dtype=torch.float32))
        assert take(target, selected).tolist() == indices


def test_padding_is_a_share_of_what_is_read() -> None:
    rng = random.Random(14)
    for _ in range(100):
        lengths = np.array(
            [rng.choice([rng.randrange(1, 30), rng.randrange(1, 900)]) for _ in range(rng.randrange(40))]
        )
        spare = rng.choice([0, 100])
        parts = list(split_by_length(lengths, spare))
        assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
        for part in parts:
            room = int(lengths[part].max()) * part.size
            assert room - int(lengths[part].sum()) <= PADDING_SHARE * room + spare
        assert len(parts) <= 30  # lengths from 900 to 1, each part from 20 % shorter ones on, at the least
    in_order = list(split_by_length(np.array([90, 100, 95]), 0))
    assert [part.tolist() for part in in_order] == [[0, 1, 2]]
