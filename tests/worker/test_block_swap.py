"""Blocks to host memory and back."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.worker.memory import block_swap, device_memory  # noqa: E402
from kvpool.worker.memory.block_swap import BlockSwap, put_in, runs, take_out  # noqa: E402
from kvpool.worker.memory.device_memory import CacheMemoryError  # noqa: E402
from kvpool.worker.memory.paged_kv_cache import PagedKVCache  # noqa: E402

pytestmark = pytest.mark.dataplane

BLOCKS, HOST_BLOCKS, LAYERS = 12, 7, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def make_cache(device: str = "cpu", block_size: int = 4, num_blocks: int = BLOCKS) -> PagedKVCache:
    cache = PagedKVCache(num_blocks, block_size, 2, 8, LAYERS, torch.bfloat16, device)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=torch.Generator().manual_seed(num_blocks)))
    return cache


def check_random_swaps(cache: PagedKVCache, swap: BlockSwap, seed: int) -> None:
    """Against the same copies of a tensor's blocks, one at a time."""
    rng = random.Random(seed)
    blocks, host = cache.storage.transpose(0, 1).cpu().clone(), swap.host.clone()
    for _ in range(30):
        n = rng.randrange(min(swap.num_host_blocks, cache.num_blocks - 1) + 1)
        first = rng.randrange(1, cache.num_blocks - n + 1)
        ids = [*range(first, first + n)] if rng.random() < 0.5 else rng.sample(range(1, cache.num_blocks), n)
        host_ids = rng.sample(range(swap.num_host_blocks), n)
        if rng.random() < 0.5:
            swap.swap_out(ids, host_ids)
            for block, place in zip(ids, host_ids):
                host[place] = blocks[block]
        else:
            swap.swap_in(host_ids, ids)
            for block, place in zip(ids, host_ids):
                blocks[block] = host[place]
        swap.wait()
        swap.synchronize()
        assert torch.equal(swap.host, host) and torch.equal(cache.storage.transpose(0, 1).cpu(), blocks)


def test_random_swaps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(device)
    check_random_swaps(cache, BlockSwap(cache, HOST_BLOCKS), 1)
    monkeypatch.setattr(block_swap, "BUFFER_BYTES", 2 * cache.nbytes // BLOCKS)
    check_random_swaps(cache, BlockSwap(cache, HOST_BLOCKS), 2)


def test_what_comes_back_is_what_went(device: str) -> None:
    cache = make_cache(device)
    swap = BlockSwap(cache, HOST_BLOCKS)
    gone = cache.storage[:, [3, 4, 9]].clone()
    swap.swap_out([3, 4, 9], [6, 0, 1])
    swap.wait()
    cache.zero_blocks([3, 4, 9])
    swap.swap_in([6, 0, 1], [10, 3, 4])
    swap.wait()
    assert torch.equal(cache.storage[:, [10, 3, 4]], gone) and not cache.storage[:, 9].any()


@pytest.mark.parametrize("room", [1, 2, 5, 40])
def test_the_way_through_a_buffer(room: int) -> None:
    """What CUDA does, on tensors of the CPU."""
    generator = torch.Generator().manual_seed(room)
    blocks, host = (torch.randn(number, 3, 5, generator=generator) for number in (20, 9))
    blocks = blocks.transpose(0, 1).contiguous().transpose(0, 1)  # block by block it lies apart, as in a cache
    buffer = torch.zeros(room, 3, 5)
    ids, host_ids = [7, 8, 3, 4, 5, 19, 0], [0, 1, 2, 4, 5, 6, 8]
    expected = host.clone()
    expected[host_ids] = blocks[ids]
    take_out(blocks, host, buffer, ids, host_ids)
    assert torch.equal(host, expected)
    expected = blocks.clone()
    ids = [11, 2, 12, 13, 14, 1, 6]
    expected[ids] = host[host_ids]
    put_in(blocks, host, buffer, ids, host_ids)
    assert torch.equal(blocks, expected)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [1, 2, 3], [(4, 1, 3)]),
        ([4, 5, 6], [1, 3, 4], [(4, 1, 1), (5, 3, 2)]),
        ([4, 3, 4], [1, 2, 3], [(4, 1, 1), (3, 2, 2)]),
        ([4, 4], [1, 2], [(4, 1, 1), (4, 2, 1)]),
    ],
)
def test_runs(one: list[int], other: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert list(runs(one, other)) == expected


def test_neighbours_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    swap = BlockSwap(cache, HOST_BLOCKS)
    lengths: list[int] = []

    def counted(one: Any, other: Any, stock: Any = runs) -> Any:
        for run in stock(one, other):
            lengths.append(run[2])
            yield run

    monkeypatch.setattr(block_swap, "runs", counted)
    swap.swap_out([6, 3, 4, 5], [4, 1, 2, 3])
    assert lengths == [4]


@pytest.mark.parametrize(
    ("kind", "block_ids", "host_ids", "message"),
    [
        ("out", [1, 2], [0], "swap_out: 2 sources, 1 targets"),
        ("out", [1, BLOCKS], [0, 1], "swap_out: block 12 of 12"),
        ("out", [1, 2], [0, HOST_BLOCKS], r"swap_out \(host\): block 7 of 7"),
        ("out", [1, 2], [3, 3], "block 3 is a target twice"),
        ("in", [2, 2], [3, 4], "block 2 is a target twice"),
        ("in", [0, 2], [3, 4], "null block"),
        ("in", [1], [-1], "block -1 of 7"),
    ],
)
def test_refused_swaps_change_nothing(
    device: str, kind: str, block_ids: list[int], host_ids: list[int], message: str
) -> None:
    cache = make_cache(device)
    swap = BlockSwap(cache, HOST_BLOCKS)
    swap.swap_out([5, 6], [0, 3])
    swap.synchronize()
    before, host = cache.storage.clone(), swap.host.clone()
    with pytest.raises(InvalidArgumentError, match=message):
        if kind == "out":
            swap.swap_out(block_ids, host_ids)
        else:
            swap.swap_in(host_ids, block_ids)
    assert torch.equal(cache.storage, before) and torch.equal(swap.host, host)


def test_host_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    with pytest.raises(InvalidArgumentError, match="0 blocks"):
        BlockSwap(cache, 0)
    monkeypatch.setattr(device_memory, "free_memory", lambda device: 3 * cache.nbytes // BLOCKS)
    with pytest.raises(CacheMemoryError, match="enough for 3 blocks"):
        BlockSwap(cache, 4)
    assert BlockSwap(cache, 3).host.shape == (3, LAYERS, 2, 4, 2, 8)


@pytest.mark.cuda
def test_order_between_computing_and_swapping() -> None:
    """Swaps follow what was queued before them, and what is queued after ``wait`` follows them, while the host runs
    ahead of both."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cache = make_cache("cuda", block_size=256, num_blocks=600)
    swap = BlockSwap(cache, 512)
    assert swap.host.is_pinned()
    busy = torch.randn(4096, 4096, device="cuda")
    ids, hosts = list(range(1, 513)), list(range(512))
    for turn in range(1, 6):
        for _ in range(10):
            busy = busy @ busy / 64
        cache.storage[:, 1:513] = turn
        swap.swap_out(ids, hosts)
        swap.wait()
        cache.storage[:, 1:513] = -turn
        swap.swap_in(hosts, ids)
        swap.wait()
        came_back = cache.storage[:, 1:513].eq(turn).all()
        assert bool(came_back) and swap.host.eq(turn).all()
