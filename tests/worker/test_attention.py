"""Attention over the paged cache by plain torch, against float64 token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_oracle import (  # noqa: E402
    KINDS,
    Request,
    Shape,
    check,
    check_layers,
    draw_requests,
    make_case,
)

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from kvpool.worker.attention import (  # noqa: E402
    AttentionBackend,
    AttentionLayer,
    decodes,
)
from kvpool.worker.attention.cascade import CascadeBackend  # noqa: E402
from kvpool.worker.attention.gather import GatherBackend  # noqa: E402
from kvpool.worker.attention.key_rows import Workspace  # noqa: E402
from kvpool.worker.step.block_table import BlockTableConfig, MultiGroupBlockTable  # noqa: E402
from kvpool.worker.step.step_tensors import StepTensorBuilder  # noqa: E402

pytestmark = pytest.mark.dataplane

NAN = float("nan")
NOWHERE = 2**30  # a block id that no cache has: looking it up is an IndexError
SCALE = 0.3
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module", params=["gather", "cascade"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """One of each for all tests, so that each step finds the memory of the ones before. Cascade wherever it can."""
    return CascadeBackend(min_saved_bytes=0) if request.param == "cascade" else GatherBackend()


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_random_steps(backend: AttentionBackend, kind: str, window: int | None) -> None:
    rng = random.Random(f"{kind} {window}")
    for block_size, group in ((1, 1), (1, 4), (7, 1), (7, 3), (7, 4), (16, 3), (32, 1), (32, 4)):
        shape = Shape(block_size, rng.choice([1, 2, 3]), group, rng.choice([8, 16, 20]))
        requests = draw_requests(rng, kind, block_size, rng.choice([30, 100]))
        case = make_case(rng, shape, requests, window=window, fill=rng.choice([1e4, NAN]), stale=NOWHERE)
        check(backend, case, AttentionLayer(SCALE, window, rng.choice([None, None, 1.5])), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(backend: AttentionBackend, dtype: Any) -> None:
    rng = random.Random(4)
    for kind in KINDS:
        for window, soft_cap in ((None, None), (12, None), (None, 2.0)):
            case = make_case(rng, Shape(dtype=dtype), draw_requests(rng, kind, 16, 60), window=window, fill=NAN)
            check(backend, case, AttentionLayer(SCALE, window, soft_cap), TOLERANCES[dtype])


def test_large_steps_are_read_in_parts(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    sizes: list[int] = []
    read = Workspace.read

    def count(self: Workspace, kv_cache: Any, key_rows: Any) -> Any:
        sizes.append(key_rows.numel())
        return read(self, kv_cache, key_rows)

    monkeypatch.setattr(Workspace, "read", count)
    shape = Shape(16, 8, 2, 64)  # 4 KiB a key row
    case = make_case(rng, shape, [Request(300, 1) for _ in range(7)])
    check(backend, case, AttentionLayer(0.125), 2e-5)
    assert max(sizes) * 4096 <= 4 << 20 and len(sizes) == 2 * 3  # 3, 3, 1 requests, twice
    sizes.clear()
    case = make_case(rng, replace(shape, num_kv_heads=1), [Request(700, 150), Request(0, 400)])
    check(backend, case, AttentionLayer(0.125), 2e-5)
    assert sizes == [850, 400] * 2  # each request once, however many tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_long_sequences_are_read_in_pieces(
    backend: AttentionBackend, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(15)
    case = make_case(rng, Shape(dtype=dtype), [Request(2400, 1), Request(30, 1), Request(1023, 1), Request(1024, 1)])
    check(backend, case, AttentionLayer(SCALE), TOLERANCES[dtype])
    monkeypatch.setattr(decodes, "SPLIT_TOKENS", 16)
    for kind in KINDS:
        for window, soft_cap in ((None, None), (40, None), (None, 2.0)):
            requests = draw_requests(rng, kind, 7, 100)
            case = make_case(rng, Shape(7, dtype=dtype), requests, window=window, fill=NAN, stale=NOWHERE)
            check(backend, case, AttentionLayer(SCALE, window, soft_cap), TOLERANCES[dtype])


def test_layers_of_a_group_may_differ(backend: AttentionBackend) -> None:
    rng = random.Random(16)
    case = make_case(rng, Shape(), draw_requests(rng, "shared", 16, 100), fill=NAN, stale=NOWHERE)
    kinds = [AttentionLayer(SCALE), AttentionLayer(SCALE, 9), AttentionLayer(0.1), AttentionLayer(SCALE, None, 2.0)]
    check_layers(backend, case, kinds * 2, TOLERANCES[torch.float32])


def test_a_step_without_requests_and_queries_of_any_strides(backend: AttentionBackend) -> None:
    case = make_case(random.Random(6), Shape(), [Request(20, 1), Request(9, 12)])
    layer = AttentionLayer(SCALE)
    backend.plan(case.step)
    wanted = backend.attend(case.query, case.kv_cache, 0, layer)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(backend.attend(strided, case.kv_cache, 0, layer), wanted)
    none = np.zeros(0, dtype=np.int32)
    empty = {"rows": case.step.rows[:0], "seq_lens": case.step.seq_lens[:0], "positions": case.step.positions[:0]}
    starts = np.zeros(1, dtype=np.int32)
    step = replace(case.step, **empty, host_rows=none, host_seq_lens=none, host_query_starts=starts)
    backend.plan(step)
    assert backend.attend(case.query[:0], case.kv_cache, 0, layer).shape == (0, *case.query.shape[1:])


def test_what_does_not_go_together_is_refused() -> None:
    case = make_case(random.Random(7), Shape(), [Request(20, 1)])
    layer = AttentionLayer(SCALE)
    for backend in (GatherBackend(), CascadeBackend()):
        with pytest.raises(InvalidArgumentError, match="before a step"):
            backend.attend(case.query, case.kv_cache, 0, layer)
        backend.plan(case.step)
        for query, kv_cache, group_id, said in (
            (case.query, case.kv_cache, 1, "group 1 of 1"),
            (case.query[:0], case.kv_cache, 0, "for 1 tokens"),
            (case.query[:, :, :8], case.kv_cache, 0, "heads of 16"),
            (case.query[:, :5], case.kv_cache, 0, "5 query heads"),
            (case.query, case.kv_cache[:, 0], 0, "isn't"),
            (case.query.bfloat16(), case.kv_cache, 0, "bfloat16"),
        ):
            with pytest.raises(InvalidArgumentError, match=said):
                backend.attend(query, kv_cache, group_id, layer)
    for arguments in ({"sliding_window": 0}, {"soft_cap": 0.0}, {"soft_cap": NAN}):
        with pytest.raises(InvalidArgumentError, match="a s"):
            AttentionLayer(SCALE, **arguments)


# Through the tables, step after step.

BLOCK, WIDTH, WINDOW, HEADS, SIZE = 4, 16, 6, 2, 8


@dataclass
class Sequence:
    """A request of the run: its keys, values and queries, made before anything is cached; and its blocks by group."""

    keys: Any
    values: Any
    queries: Any
    blocks: tuple[list[int], list[int]]
    num_computed: int = 0


def test_a_hybrid_model_step_after_step(backend: AttentionBackend) -> None:
    """Full and sliding layers through a table each; chunks, then decodes; blocks outside the window are lost."""
    configs = [BlockTableConfig(BLOCK, WIDTH)] * 2
    builder = StepTensorBuilder(MultiGroupBlockTable(configs, 4, 64), 64, with_kv_rows=True)
    caches = [torch.full((128, 2, BLOCK, HEADS, SIZE), NAN) for _ in range(2)]
    layers = [AttentionLayer(SCALE), AttentionLayer(SCALE, WINDOW)]
    rng, generator = random.Random(8), torch.Generator().manual_seed(8)
    free = rng.sample(range(1, 128), 127)
    sequences = {}
    for name, length in (("a", 30), ("b", 45), ("c", 22)):
        draws = [torch.randn((length, n, SIZE), generator=generator) for n in (HEADS, HEADS, 3 * HEADS)]
        blocks = tuple([free.pop() for _ in range(-(-length // BLOCK))] for _ in range(2))
        sequences[name] = Sequence(*draws, blocks)
    sequences["c"].keys[:BLOCK], sequences["c"].values[:BLOCK] = (
        getattr(sequences["a"], part)[:BLOCK] for part in ("keys", "values")
    )
    sequences["c"].blocks[0][0] = sequences["a"].blocks[0][0]
    row_of = {"a": 2, "b": 0, "c": 3}
    known: list[str] = []
    while any(s.num_computed < len(s.keys) for s in sequences.values()):
        step = builder.build(next_step(rng, sequences, known), row_of)
        running = [s for name, s in sequences.items() if name in known and s.num_computed < len(s.keys)]
        assert step.host_seq_lens.tolist() == step.seq_lens.tolist() and step.host_rows.tolist() == step.rows.tolist()
        assert step.host_query_starts.tolist() == step.query_starts.tolist() and len(running) == len(step.host_rows)
        backend.plan(step)
        news = np.diff(step.host_query_starts).tolist()
        parts = [(s, slice(s.num_computed, s.num_computed + new)) for s, new in zip(running, news)]
        keys, values, query = (
            torch.cat([getattr(s, part)[place] for s, place in parts]) for part in ("keys", "values", "queries")
        )
        for group_id, (layer, cache) in enumerate(zip(layers, caches)):
            rows = cache.view(-1, HEADS, SIZE)
            rows[step.groups[group_id].key_rows], rows[step.groups[group_id].value_rows] = keys, values
            wanted = torch.cat([dense(s, place, layer) for s, place in parts])
            torch.testing.assert_close(backend.attend(query, cache, group_id, layer), wanted, rtol=0, atol=1e-5)
        for sequence, place in parts:
            sequence.num_computed = place.stop
            lost = max(0, place.stop - WINDOW + 1) // BLOCK
            caches[1][sequence.blocks[1][:lost]] = NAN


def next_step(rng: random.Random, sequences: dict[str, Sequence], known: list[str]) -> SchedulerOutput:
    """One token for some requests, several for others; all that are known run, and one more begins."""
    running = [name for name in known if sequences[name].num_computed < len(sequences[name].keys)]
    new = [name for name in sequences if name not in known][:1]
    left = {name: len(sequences[name].keys) - sequences[name].num_computed for name in (*running, *new)}
    scheduled = {name: min(count, rng.choice([1, 1, 7])) for name, count in left.items()}
    cached = CachedRequestData(
        running,
        [False] * len(running),
        [None] * len(running),
        [sequences[name].num_computed for name in running],
        [0] * len(running),
        [[]] * len(running),
    )
    data = [NewRequestData(name, [1] * len(sequences[name].keys), sequences[name].blocks, 0) for name in new]
    known += new
    return SchedulerOutput(1, data, cached, scheduled, sum(scheduled.values()), *([] for _ in range(5)))


def dense(sequence: Sequence, place: slice, layer: AttentionLayer) -> Any:
    """Attention of some tokens of a sequence, from its keys and values as they were drawn."""
    keys, values = (part[: place.stop].repeat_interleave(3, 1) for part in (sequence.keys, sequence.values))
    scores = torch.einsum("qhd,khd->hqk", sequence.queries[place], keys) * layer.scale
    distance = torch.arange(place.start, place.stop)[:, None] - torch.arange(place.stop)
    hidden = (distance < 0) | (distance >= (layer.sliding_window or 10**6))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


# What is shared.


def test_shared_blocks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key_rows_read: list[int] = []
    read = Workspace.read

    def count(self: Workspace, kv_cache: Any, key_rows: Any) -> Any:
        key_rows_read.append(key_rows.numel())
        return read(self, kv_cache, key_rows)

    monkeypatch.setattr(Workspace, "read", count)
    requests = [Request(520, 1), *(Request(515 + i, 1, shared=32, sharer=0) for i in range(7))]
    requests += [Request(512, 9, shared=32, sharer=0), Request(0, 30), Request(90, 1)]
    case = make_case(random.Random(9), Shape(16, 3, 3, 64), requests, fill=NAN)
    backend = CascadeBackend()
    check(backend, case, AttentionLayer(0.125), 2e-5)
    alone, own_decodes, own_prefill, shared = 91 + 30, 8 * 10, 9, 512
    assert sum(key_rows_read) == 2 * (alone + own_decodes + own_prefill + shared)
    key_rows_read.clear()
    check(backend, case, AttentionLayer(0.125, soft_cap=5.0), 2e-5)
    assert sum(key_rows_read) >= 2 * 9 * 513  # a cap goes the way of "gather"
    key_rows_read.clear()
    few = [Request(40, 1), Request(40, 1, shared=2, sharer=0)]
    check(backend, make_case(random.Random(9), Shape(16, 3, 3, 64), few), AttentionLayer(0.125), 2e-5)
    assert key_rows_read == [82, 82]  # too little to be worth it
