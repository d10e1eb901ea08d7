"""Specs: bytes of a block, blocks of a request, dtypes by name, and what they refuse."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from kvpool.cache.spec import (
    DTYPE_BYTES,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    dtype_name,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from kvpool.errors import InvalidArgumentError

NUMBERS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**NUMBERS)
WINDOW = SlidingWindowSpec(**NUMBERS, sliding_window=100)
LOCAL = ChunkedLocalAttentionSpec(**NUMBERS, attention_chunk_size=64)
CROSS = CrossAttentionSpec(**NUMBERS)
SINK = SinkFullAttentionSpec(**NUMBERS, sink_len=32)
MAMBA = MambaSpec(16, shapes=((4, 8), (10,)), dtypes=("float32", "bfloat16"))


class TorchDtype:
    """Looks like torch's, which isn't needed here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@pytest.mark.parametrize("spec", [FULL, WINDOW, LOCAL, CROSS, SINK])
def test_a_block_has_a_key_and_a_value_per_head_and_token(spec: Any) -> None:
    assert spec.page_size_bytes == spec.unpadded_page_size_bytes == 2 * 16 * 8 * 128 * 2


def test_what_changes_the_size_of_a_block() -> None:
    assert replace(FULL, dtype="float8_e4m3fn").page_size_bytes == 2 * 16 * 8 * 128
    assert replace(FULL, head_size_v=64).page_size_bytes == 16 * 8 * (128 + 64) * 2
    assert replace(FULL, head_size_v=0).page_size_bytes == 16 * 8 * 128 * 2
    assert replace(FULL, state_content_bytes=132).page_size_bytes == 16 * 8 * 132
    padded = replace(FULL, page_size_padded=70_000)
    assert (padded.page_size_bytes, padded.unpadded_page_size_bytes) == (70_000, 65_536)
    assert FULL.copy_with_new_block_size(32) == replace(FULL, block_size=32)
    assert FULL.copy_with_new_block_size(32).page_size_bytes == 2 * FULL.page_size_bytes
    with pytest.raises(InvalidArgumentError, match="page_size_padded must be at least 65536"):
        replace(FULL, page_size_padded=65_535)


def test_a_mamba_state_has_the_size_of_its_tensors() -> None:
    assert MAMBA.page_size_bytes == 4 * 8 * 4 + 10 * 2
    assert replace(MAMBA, block_size=1024).page_size_bytes == MAMBA.page_size_bytes
    assert replace(MAMBA, page_size_padded=4096).page_size_bytes == 4096
    with pytest.raises(InvalidArgumentError):
        replace(MAMBA, page_size_padded=147)
    with pytest.raises(InvalidArgumentError, match="2 shapes, but 1 dtypes"):
        MambaSpec(16, ((4, 8), (10,)), ("float32",))


@pytest.mark.parametrize(
    ("spec", "arguments", "num_blocks"),
    [
        (FULL, (1000,), 63),
        (SINK, (1000,), 63),
        (FULL, (1008,), 63),
        (FULL, (1009, 32), 64),
        # 99 tokens of the window before the next one, and what is in flight; one block more for a crooked start
        (WINDOW, (1000, 32), 10),
        (WINDOW, (1000, 29), 9),
        (WINDOW, (50, 32), 5),
        (WINDOW, (1000,), 64),
        (replace(WINDOW, extra_retained_tokens=13), (1000, 32), 10),
        (replace(WINDOW, extra_retained_tokens=14), (1000, 32), 11),
        (LOCAL, (1000, 32), 6),
        (LOCAL, (1000, 33), 7),
        (LOCAL, (50, 32), 4),
        (LOCAL, (1000,), 63),
        (CROSS, (1000, 32, 1500), 94),
        (CROSS, (1000,), 0),
        (MAMBA, (1000,), 1),
        (replace(MAMBA, num_speculative_blocks=3), (1000,), 4),
        (replace(MAMBA, mamba_cache_mode="align"), (1000,), 2),
        (
            replace(MAMBA, mamba_cache_mode="align", num_speculative_blocks=3, num_prefill_checkpoint_blocks=1),
            (1000,),
            6,
        ),
    ],
)
def test_blocks_that_a_request_holds_at_most(spec: Any, arguments: tuple[int, ...], num_blocks: int) -> None:
    assert spec.max_blocks_per_request(*arguments) == num_blocks
    assert spec.max_memory_usage_bytes(*arguments) == num_blocks * spec.page_size_bytes


def test_admission_goes_by_the_same_bound() -> None:
    assert WINDOW.max_admission_blocks_per_request(max_in_flight_tokens=32, max_model_len=1000) == 10
    assert LOCAL.max_admission_blocks_per_request(max_in_flight_tokens=32, max_model_len=1000) == 6


def test_specs_compare_by_value_and_can_be_keys() -> None:
    assert FullAttentionSpec(**NUMBERS) == FULL
    assert len({FULL, FullAttentionSpec(**NUMBERS), WINDOW, LOCAL, CROSS, SINK, MAMBA}) == 6
    assert FULL != CROSS
    assert MambaSpec(16, [[4, 8], [10]], ["float32", "bfloat16"]) == MAMBA  # type: ignore[arg-type,list-item]
    with pytest.raises(FrozenInstanceError):
        FULL.block_size = 32  # type: ignore[misc]
    assert FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16") == FULL


def test_dtypes_are_names() -> None:
    assert replace(FULL, dtype=TorchDtype("bfloat16")) == FULL
    assert replace(FULL, dtype=TorchDtype("float8_e5m2")).page_size_bytes == FULL.page_size_bytes // 2
    assert (dtype_name("half"), dtype_name("fp8"), dtype_name("float")) == ("float16", "float8_e4m3fn", "float32")
    numpy = pytest.importorskip("numpy")
    assert dtype_name(numpy.dtype("float16")) == "float16"
    for wrong in ("float17", "", None, 2):
        with pytest.raises(InvalidArgumentError, match="unknown dtype"):
            dtype_name(wrong)


def test_sizes_of_dtypes_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPE_BYTES.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == size
            assert dtype_name(getattr(torch, name)) == name


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: replace(FULL, block_size=0), InvalidArgumentError),
        (lambda: replace(FULL, block_size=True), TypeError),
        (lambda: replace(FULL, block_size=16.0), TypeError),
        (lambda: replace(FULL, num_kv_heads=0), InvalidArgumentError),
        (lambda: replace(FULL, head_size=-1), InvalidArgumentError),
        (lambda: replace(WINDOW, sliding_window=0), InvalidArgumentError),
        (lambda: replace(WINDOW, extra_retained_tokens=-1), InvalidArgumentError),
        (lambda: replace(LOCAL, attention_chunk_size=0), InvalidArgumentError),
        (lambda: replace(MAMBA, mamba_cache_mode="some"), InvalidArgumentError),
        (lambda: replace(MAMBA, num_speculative_blocks=-1), InvalidArgumentError),
        (lambda: replace(MAMBA, prefill_checkpoint_alignment=0), InvalidArgumentError),
        (lambda: KVCacheSpec(0), InvalidArgumentError),
        (lambda: KVCacheSpec(16).page_size_bytes, NotImplementedError),
        (lambda: KVCacheSpec(16).max_memory_usage_bytes(100), NotImplementedError),
    ],
)
def test_impossible_numbers_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_kinds() -> None:
    kinds = [get_kv_cache_spec_kind(spec).value for spec in (FULL, WINDOW, LOCAL, CROSS, SINK, MAMBA, KVCacheSpec(4))]
    assert kinds == [
        "full_attention",
        "sliding_window",
        "chunked_local_attention",
        "cross_attention",
        "sink_full_attention",
        "mamba",
        "unknown",
    ]
    assert get_kv_cache_spec_sliding_window(WINDOW) == 100
    assert get_kv_cache_spec_sliding_window(replace(FULL, sliding_window=100)) is None


def test_when_new_blocks_need_zeros() -> None:
    def config(*kv_cache_specs: KVCacheSpec) -> KVCacheConfig:
        return KVCacheConfig(10, [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(kv_cache_specs)])

    assert not config(FULL, WINDOW).needs_kv_cache_zeroing
    assert config(FULL, replace(WINDOW, dtype="float16")).has_mixed_precision_kv_cache
    assert config(FULL, replace(WINDOW, dtype="float16")).needs_kv_cache_zeroing
    assert config(FULL, MAMBA).has_mamba_layers and config(FULL, MAMBA).needs_kv_cache_zeroing
    assert not config(FULL, MAMBA).has_mixed_precision_kv_cache
    assert not KVCacheConfig(num_blocks=1).needs_kv_cache_zeroing


@pytest.mark.vllm
def test_sizes_are_vllms() -> None:
    pytest.importorskip("vllm.v1.core.block_pool")
    import torch
    from vllm.v1 import kv_cache_interface as theirs

    for spec in (
        FULL,
        WINDOW,
        LOCAL,
        CROSS,
        SINK,
        replace(FULL, head_size_v=64),
        replace(FULL, page_size_padded=99_999),
    ):
        fields = {**vars(spec), "dtype": getattr(torch, spec.dtype)}
        other = getattr(theirs, type(spec).__name__)(**fields)
        assert spec.page_size_bytes == other.page_size_bytes
        assert get_kv_cache_spec_kind(spec).value == theirs.get_kv_cache_spec_kind(other).value
        assert get_kv_cache_spec_sliding_window(spec) == theirs.get_kv_cache_spec_sliding_window(other)
    fields = {**vars(MAMBA), "dtypes": (torch.float32, torch.bfloat16)}
    del fields["mamba_type"]
    assert MAMBA.page_size_bytes == theirs.MambaSpec(**fields).page_size_bytes
