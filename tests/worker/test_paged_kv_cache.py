"""The memory of keys and values: writes by slot and by row, gathers, copies, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.native.step_outputs import compute_kv_rows  # noqa: E402
from kvpool.worker.memory import device_memory, paged_kv_cache  # noqa: E402
from kvpool.worker.memory.device_memory import CacheMemoryError, cgroup_bytes_left, cgroup_folders, free_memory  # noqa: E402
from kvpool.worker.memory.paged_kv_cache import FEW_ROWS, PagedKVCache  # noqa: E402

pytestmark = pytest.mark.dataplane

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
BLOCKS, HEADS, LAYERS = 9, 2, 3
# head sizes with and without words of 16 bytes
SHAPES = [(1, 8, "float32"), (7, 3, "float32"), (16, 16, "bfloat16"), (32, 5, "float16"), (16, 1, "float64")]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def cache(request: pytest.FixtureRequest, device: str) -> PagedKVCache:
    block_size, head_size, dtype = request.param
    return PagedKVCache(BLOCKS, block_size, HEADS, head_size, LAYERS, getattr(torch, dtype), device)


def make_cache(**changes: Any) -> PagedKVCache:
    sizes = {"num_blocks": BLOCKS, "block_size": 4, "num_kv_heads": HEADS, "head_size": 8, "num_layers": LAYERS}
    return PagedKVCache(**{**sizes, **changes})


def make_tokens(cache: PagedKVCache, n: int, seed: int = 0) -> tuple[Any, Any]:
    """Keys and values as a fused projection has them: views with gaps between tokens."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(n, 4 * HEADS, cache.head_size, generator=generator).to(cache.dtype).to(cache.device)
    return fused[:, 2 * HEADS : 3 * HEADS], fused[:, 3 * HEADS :]


def fill(cache: PagedKVCache, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=generator))


@pytest.mark.parametrize("n", [0, 1, FEW_ROWS - 1, FEW_ROWS, 3 * FEW_ROWS])
def test_tokens_are_written_to_their_slots_and_nowhere_else(cache: PagedKVCache, n: int) -> None:
    fill(cache)
    expected = cache.storage.clone()
    num_slots = BLOCKS * cache.block_size
    slots = random.Random(n).sample(range(num_slots), min(n, num_slots - 1))
    slots += [-1] * (n - len(slots))
    random.Random(n).shuffle(slots)
    key, value = make_tokens(cache, n)
    cache.write(1, key, value, torch.tensor(slots, dtype=torch.int64, device=cache.device))
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, place = divmod(slot, cache.block_size)
            expected[1, block, 0, place] = key[token]
            expected[1, block, 1, place] = value[token]
    assert torch.equal(cache.storage, expected)


def test_rows_write_what_slots_write(cache: PagedKVCache) -> None:
    slots = np.array([3 * cache.block_size, BLOCKS * cache.block_size - 1, *range(cache.block_size)], np.int64)
    key, value = make_tokens(cache, len(slots))
    rows = np.empty((2, len(slots)), np.int64)
    compute_kv_rows(slots, cache.block_size, *rows)
    cache.write_rows(2, key, value, *torch.from_numpy(rows).to(cache.device))
    cache.write(0, key, value, torch.from_numpy(slots).to(cache.device))
    assert torch.equal(cache.layers[0], cache.layers[2]) and cache.layers[0].any() and not cache.layers[1].any()


def test_padding_among_rows_ends_in_the_null_block() -> None:
    cache = make_cache()
    rows = np.empty((2, 3), np.int64)
    compute_kv_rows(np.array([-1, 9, -1]), cache.block_size, *rows)
    key, value = make_tokens(cache, 3)
    cache.write_rows(0, key, value, *torch.from_numpy(rows))
    keys, values = cache.gather(0, [2])
    assert torch.equal(keys[1], key[1]) and torch.equal(values[1], value[1])
    assert not cache.layers[0][3:].any() and not cache.layers[0][1].any()


@pytest.mark.parametrize(
    ("strides", "offset"),
    [
        ((24, 8, 1), 0),
        ((24, 8, 1), 2),
        ((18, 8, 1), 0),
        ((24, 9, 1), 0),
        ((8, 600, 1), 4),
        ((40, 20, 2), 0),
        ((0, 0, 1), 0),
    ],
)
def test_keys_may_lie_anywhere(strides: tuple[int, int, int], offset: int) -> None:
    cache, n = make_cache(), 20
    memory = torch.randn(4_000)
    key, value = (torch.as_strided(memory, (n, HEADS, 8), strides, place) for place in (offset, 1_500 + offset))
    cache.write(0, key, value, torch.arange(4, 4 + n))
    keys, values = cache.gather(0, range(1, 6))
    assert torch.equal(keys, key) and torch.equal(values, value)


@pytest.mark.parametrize("offset", [0, 3], ids=["odd", "even again"])
def test_memory_at_an_odd_address_is_written_too(offset: int) -> None:
    cache, n = make_cache(), 20
    buffer = np.zeros(4 * n * HEADS * 8 + 64, np.uint8)
    start = -buffer.ctypes.data % 16 + 4
    memory = torch.from_numpy(buffer[start : start + 4 * (n * HEADS * 8 + offset)].view(np.float32))
    key = memory[offset:].view(n, HEADS, 8).copy_(torch.randn(n, HEADS, 8))
    assert key.data_ptr() % 16 == 4 * (1 + offset) % 16
    cache.write(0, key, key, torch.arange(4, 4 + n))
    assert torch.equal(cache.gather(0, range(1, 6))[0], key)


def test_other_dtypes_are_converted(device: str) -> None:
    cache = make_cache(dtype=torch.bfloat16, device=device)
    for n in (2, 20):
        key, value = torch.randn(2, n, HEADS, 8, device=device)
        cache.write(0, key, value, torch.arange(4, 4 + n, device=device))
        keys, values = cache.gather(0, range(1, BLOCKS))
        assert torch.equal(keys[:n], key.bfloat16()) and torch.equal(values[:n], value.bfloat16())


def test_every_bit_pattern_survives() -> None:
    cache = make_cache(dtype=torch.bfloat16, num_blocks=2_049, block_size=2)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, HEADS, 8)
    key, slots = patterns.view(torch.bfloat16), torch.randperm(4_096)
    cache.write(0, key, key.flip(0), slots)
    keys, values = cache.gather(0, range(2_048))
    assert torch.equal(keys.view(torch.int16)[slots], patterns)
    assert torch.equal(values.view(torch.int16)[slots], patterns.flip(0))


@pytest.mark.parametrize("slot", [-2, -(2**62), BLOCKS * 4, 2**62])
def test_a_slot_outside_is_named_and_nothing_is_written(slot: int) -> None:
    cache = make_cache()
    for n in (3, 30):
        slots = torch.arange(1, n + 1)
        slots[n // 2] = slot
        with pytest.raises(InvalidArgumentError, match=f"slot {slot} of 36"):
            cache.write(0, *make_tokens(cache, n), slots)
        assert not cache.storage.any()


@pytest.mark.cuda
def test_slots_outside_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    slots = torch.tensor([4, -2, BLOCKS * 4, 2**62, -(2**62), 5], device="cuda")
    cache = make_cache(device="cuda")
    key, value = make_tokens(cache, 6)
    cache.write(1, key, value, slots)
    keys, values = cache.gather(1, [1])
    assert torch.equal(keys[:2], key[[0, 5]]) and torch.equal(values[:2], value[[0, 5]])
    assert cache.storage.ne(0).sum() == 2 * 2 * HEADS * 8
    monkeypatch.setenv("KVPOOL_DEBUG", "1")
    checking = make_cache(device="cuda")
    with pytest.raises(InvalidArgumentError, match="slot"):
        checking.write(1, key, value, slots)
    assert not checking.storage.any()


def test_tokens_and_slots_that_do_not_fit_are_refused(device: str) -> None:
    cache = make_cache(device=device)
    key, value = make_tokens(cache, 3)
    slots = torch.arange(3, device=device)
    for wrong in ((key[:2], value, slots), (key, value[:, :1], slots), (key, value, slots[:2])):
        with pytest.raises(InvalidArgumentError, match="a token has"):
            cache.write(0, *wrong)
    with pytest.raises(TypeError, match="int32"):
        cache.write(0, key, value, slots.int())
    assert not cache.storage.any()


def test_rows_outside_never_reach_memory() -> None:
    cache = make_cache()
    for n in (2, 20):
        key, value = make_tokens(cache, n)
        for wrong in (-1, BLOCKS * 8):
            with pytest.raises((IndexError, RuntimeError)):
                cache.write_rows(1, key, value, torch.full((n,), wrong), torch.arange(n))
    assert not cache.storage[[0, 2]].any()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple])
def test_blocks_are_gathered_in_the_order_of_their_ids(cache: PagedKVCache, kind: Any) -> None:
    fill(cache)
    ids = [4, 0, 8, 4]
    keys, values = cache.gather(1, kind(ids))
    assert keys.shape == (len(ids) * cache.block_size, HEADS, cache.head_size) and keys.dtype == cache.dtype
    assert torch.equal(keys, cache.layers[1][ids, 0].flatten(0, 1))
    assert torch.equal(values, cache.layers[1][ids, 1].flatten(0, 1))
    assert [part.shape[0] for part in cache.gather(1, kind([]))] == [0, 0]


def test_a_workspace_is_filled_and_returned(cache: PagedKVCache) -> None:
    fill(cache)
    shape = (3 * cache.block_size, HEADS, cache.head_size)
    out = tuple(torch.full(shape, 7, dtype=cache.dtype, device=cache.device) for _ in range(2))
    for _ in range(2):
        keys, values = cache.gather(0, [3, 2], out=out)
        assert keys.data_ptr() == out[0].data_ptr() and values.data_ptr() == out[1].data_ptr()
        assert torch.equal(keys, cache.layers[0][[3, 2], 0].flatten(0, 1))
        assert torch.equal(values, cache.layers[0][[3, 2], 1].flatten(0, 1))
        assert all((part[2 * cache.block_size :] == 7).all() for part in out)


def test_a_workspace_that_does_not_fit_is_refused() -> None:
    cache = make_cache()
    good = torch.empty(8, HEADS, 8)
    for wrong in (good[:7], good.double(), torch.empty(8, HEADS, 9), torch.empty(8, HEADS, 16)[:, :, ::2]):
        with pytest.raises(InvalidArgumentError, match="no room"):
            cache.gather(0, [1, 2], out=(good, wrong))


def copied(storage: Any, sources: list[int], targets: list[int]) -> Any:
    expected = storage.clone()
    for source, target in zip(sources, targets):
        expected[:, target] = storage[:, source]
    return expected


@pytest.mark.parametrize("by_index", [False, True], ids=["one by one", "by index"])
def test_copies_read_all_sources_first(cache: PagedKVCache, by_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By index is the way of CUDA, in parts of a layer here."""
    if by_index and cache.device.type == "cpu":
        cache._is_cpu = False
    monkeypatch.setattr(paged_kv_cache, "COPY_BYTES", 1)
    fill(cache)
    rng = random.Random(5)
    pairs = [([1, 2], [2, 1]), ([1, 2, 3], [2, 3, 4]), ([3, 2, 1], [4, 3, 2]), ([5, 5], [6, 7]), ([0], [1]), ([2], [2])]
    for _ in range(20):
        targets = rng.sample(range(1, BLOCKS), rng.randrange(BLOCKS))
        pairs.append(([rng.randrange(BLOCKS) for _ in targets], targets))
    for sources, targets in pairs:
        expected = copied(cache.storage, sources, targets)
        cache.copy_blocks(sources, targets)
        assert torch.equal(cache.storage, expected), (sources, targets)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([1, 2], [3], "2 sources, 1 targets"),
        ([1, 2], [3, 3], "block 3 is a target twice"),
        ([1], [0], "null block"),
        ([1, 9], [2, 3], "block 9 of 9"),
        ([1, 2], [2, -1], "block -1 of 9"),
    ],
)
def test_refused_copies_change_nothing(device: str, sources: list[int], targets: list[int], message: str) -> None:
    cache = make_cache(device=device)
    fill(cache)
    before = cache.storage.clone()
    with pytest.raises(InvalidArgumentError, match=message):
        cache.copy_blocks(sources, targets)
    assert torch.equal(cache.storage, before)


def test_zeroed_blocks_are_zero_in_all_layers(cache: PagedKVCache) -> None:
    fill(cache)
    expected = cache.storage.clone()
    expected[:, [2, 8]] = 0
    cache.zero_blocks([8, 2, 8])
    cache.zero_blocks([])
    assert torch.equal(cache.storage, expected)
    cache.layers[0][1] = float("nan")
    cache.zero_blocks([1])
    assert not cache.storage[:, 1].any()


@pytest.mark.parametrize(
    "ids", [[BLOCKS], [1, -1], torch.tensor([2**40]), torch.tensor([BLOCKS]), torch.tensor([-1]), [2**70]]
)
def test_ids_outside_are_refused_and_named(ids: Any) -> None:
    cache = make_cache()
    fill(cache)
    before = cache.storage.clone()
    for call in (lambda: cache.gather(0, ids), lambda: cache.zero_blocks(ids), lambda: cache.copy_blocks(ids, ids)):
        with pytest.raises(
            InvalidArgumentError, match=r"block (9|-1|1099511627776|1180591620717411303424) of 9 blocks"
        ):
            call()
    assert torch.equal(cache.storage, before)


@pytest.mark.parametrize("ids", [[1.5], torch.ones(2, 2, dtype=torch.int64), np.ones(1), ["1"]])
def test_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    with pytest.raises(TypeError):
        make_cache().zero_blocks(ids)


def test_layers_are_views_of_one_zeroed_allocation(device: str) -> None:
    cache = make_cache(device=device, dtype=torch.float16)
    assert cache.nbytes == cache.storage.nbytes == sum(layer.nbytes for layer in cache.layers)
    assert [tuple(layer.shape) for layer in cache.layers] == [(BLOCKS, 2, 4, HEADS, 8)] * LAYERS
    assert not cache.storage.any()
    cache.layers[2][4, 1, 3] = 1
    assert cache.storage[2, 4, 1, 3].eq(1).all() and cache.storage.sum() == HEADS * 8


@pytest.mark.parametrize(
    "wrong", [{name: 0} for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "num_layers")]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        make_cache(**wrong)
    with pytest.raises(InvalidArgumentError, match="int8"):
        make_cache(dtype=torch.int8)


def test_more_than_is_free_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = make_cache().nbytes // BLOCKS
    monkeypatch.setattr(device_memory, "free_memory", lambda device: 9 * block_bytes - 1)
    with pytest.raises(CacheMemoryError, match=f"9 blocks of {block_bytes} bytes .* enough for 8 blocks"):
        make_cache()
    assert make_cache(num_blocks=8).num_blocks == 8


def test_what_is_not_given_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")

    def zeros(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(np, "zeros", zeros)
    with pytest.raises(MemoryError, match="are free") as caught:
        make_cache()
    assert str(caught.value.__cause__) == "no room"


def test_a_cache_for_another_machine_is_refused(device: str) -> None:
    if device == "cpu":
        pytest.importorskip("psutil")
    with pytest.raises(CacheMemoryError, match=r"enough for \d+ blocks"):
        make_cache(num_blocks=2**50, device=device)
    assert free_memory(torch.device(device)) > 2**20


def make_cgroup(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")


def test_limits_of_control_groups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    root = tmp_path / "cgroup"
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    make_cgroup(root / "outer", "max\n", 5, 0)
    make_cgroup(root / "outer/inner", "1000\n", 700, 50)
    folders = cgroup_folders(root, membership)
    assert folders == [root / "outer/inner", root / "outer", root]
    assert [cgroup_bytes_left(folder) for folder in folders] == [350, None, None]
    make_cgroup(root / "outer", "1000\n", 2000, 50)
    assert cgroup_bytes_left(root / "outer") == 0
    monkeypatch.setattr(device_memory, "cgroup_folders", lambda: folders[:1])
    assert free_memory(torch.device("cpu")) == 350
    for text in ("", "12:memory:/old\n", "0::/../elsewhere\n"):
        membership.write_text(text)
        assert cgroup_folders(root, membership) == [root]
    assert cgroup_folders(root, tmp_path / "missing") == []
