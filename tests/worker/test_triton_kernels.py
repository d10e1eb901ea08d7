"""Triton kernels of the worker: in the interpreter, compiled for GPUs that are not here, and on one that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.worker.kernels.decode import MAX_PARTIAL_BYTES, MAX_TOKENS, MIN_TOKENS, Split, plan_split  # noqa: E402

pytestmark = pytest.mark.dataplane

ROOT = Path(__file__).resolve().parents[2]
PARTIAL_BYTES = 4 * 32 * 128

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpool.worker.kernels.decode import MERGE_TILE, decode_kernel, merge_kernel
from kvpool.worker.kernels.slot_write import slot_write_kernel

shared = {"HEAD_SIZE": 128, "HEAD_TILE": 128, "BLOCK_SIZE": 16, "WINDOW": 0}
grouped = {
    "NUM_KV_HEADS": 8, "GROUP": 4, "GROUP_TILE": 16, "TOKEN_TILE": 64, "HAS_SOFT_CAP": True, "IS_SPLIT": True,
    "WIDENS": False, **shared
}
single = {**grouped, "GROUP": 1, "GROUP_TILE": 1, "IS_SPLIT": False, "HAS_SOFT_CAP": False, "WINDOW": 100}
merge = {"NUM_HEADS": 32, "SPLIT_TILE": MERGE_TILE, **shared}
write = {"HEAD_SIZE": 100, "TOKEN_ITEMS": 800, "TILE": 1024}
integers = dict.fromkeys(("table_ptr", "rows_ptr", "seq_lens_ptr"), "*i32") | {"slots_ptr": "*i64"}
floats = dict.fromkeys(("partial_ptr", "partial_lse_ptr"), "*fp32") | {"scale": "fp32", "soft_cap": "fp32"}
for kernel, constants, dtype in (
    (decode_kernel, grouped, "bf16"), (decode_kernel, {**grouped, "TOKEN_TILE": 32}, "fp32"),
    (decode_kernel, single, "fp16"), (merge_kernel, merge, "bf16"), (slot_write_kernel, write, "bf16"),
):
    names = kernel.arg_names
    tensors = dict.fromkeys(("query_ptr", "cache_ptr", "out_ptr", "key_ptr", "value_ptr"), "*" + dtype)
    types = {name: (integers | floats | tensors).get(name, "i32") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    for capability in (80, 90):
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert "cubin" in compiled.asm and f"sm_{capability}" in compiled.asm["ptx"]
        assert compiled.metadata.shared < 100_000
        print(capability)
"""


def run_python(arguments: list[str], **environment: str) -> list[str]:
    """Triton reads its environment when it is imported, hence a process of its own."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_python([str(ROOT / "tests" / "support" / "triton_oracles.py")], TRITON_INTERPRET="1") == ["6", "8"]


def test_the_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert run_python(["-c", COMPILED], TRITON_CACHE_DIR=str(tmp_path)) == ["80", "90"] * 5


@pytest.mark.parametrize(
    ("num_programs", "max_tokens", "expected"),
    [
        (8, 100, Split(256, 1)),
        (8, 256, Split(256, 1)),
        (8, 257, Split(256, 2)),
        (8, 131_072, Split(2_048, 64)),
        (256 * 8, 1_000, Split(1_024, 1)),
        (256 * 8, 2_049, Split(2_048, 2)),
        (132, 8_192, Split(2_048, 4)),
        (10_000, 1, Split(256, 1)),
    ],
)
def test_stretches(num_programs: int, max_tokens: int, expected: Split) -> None:
    assert plan_split(num_programs, max_tokens, 132, PARTIAL_BYTES) == expected


def test_stretches_cover_all_tokens_within_their_limits() -> None:
    for num_programs in (1, 8, 100, 4_096):
        for max_tokens in (1, 255, 256, 5_000, 40_000, 10**6):
            for partial_bytes in (256, PARTIAL_BYTES * num_programs, MAX_PARTIAL_BYTES, 2 * MAX_PARTIAL_BYTES):
                split = plan_split(num_programs, max_tokens, 108, partial_bytes)
                assert (split.number - 1) * split.tokens < max_tokens <= split.number * split.tokens
                assert split.tokens % MIN_TOKENS == 0
                assert split.number == 1 or split.number * partial_bytes <= MAX_PARTIAL_BYTES
                assert split.tokens <= MAX_TOKENS or (split.number + 1) * partial_bytes > MAX_PARTIAL_BYTES / 2


def decode_arguments(**changes: Any) -> dict[str, Any]:
    rows = torch.zeros(3, dtype=torch.int32)
    arguments = {
        "query": torch.zeros(3, 4, 8),
        "kv_cache": torch.zeros(5, 2, 16, 2, 8),
        "block_table": torch.zeros(6, 4, dtype=torch.int32),
        "rows": rows,
        "seq_lens": rows,
        "scale": 1.0,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": torch.zeros(3, 3, 8)},
        {"query": torch.zeros(3, 4, 16)},
        {"query": torch.zeros(3, 4, 8, dtype=torch.float64)},
        {"query": torch.zeros(3, 8, 4).transpose(1, 2)},
        {"kv_cache": torch.zeros(5, 2, 16, 2, 8, dtype=torch.int8)},
        {"rows": torch.zeros(2, dtype=torch.int32)},
        {"seq_lens": torch.zeros(6, dtype=torch.int32)[::2]},
        {"block_table": torch.zeros(6, 8, dtype=torch.int32)[:, ::2]},
        {"out": torch.zeros(3, 4, 9)},
        {"sliding_window": 0},
        {"soft_cap": 0.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_does_not_fit_together_is_refused(wrong: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    from kvpool.worker.kernels.decode import paged_decode

    with pytest.raises(InvalidArgumentError):
        paged_decode(**decode_arguments(**wrong))
    empty = torch.zeros(0, dtype=torch.int32)
    assert paged_decode(**decode_arguments(query=torch.zeros(0, 4, 8), rows=empty, seq_lens=empty)).shape == (0, 4, 8)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 300, 8_000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["fused", "heads first", "gaps"])
def test_slot_writes_on_cuda(num_tokens: int, dtype: str, layout: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from triton_oracles import SlotWrites, check_slot_writes

    for cache_dtype in (None, torch.bfloat16):
        case = SlotWrites(num_tokens, 16, 8, 128, getattr(torch, dtype), cache_dtype, layout, num_blocks=600)
        check_slot_writes(case, "cuda")
        check_slot_writes(SlotWrites(num_tokens, 7, 40, 80, getattr(torch, dtype), num_blocks=900), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
def test_decodes_on_cuda(dtype: str, block_size: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from triton_oracles import Decode, check_decode

    kind = getattr(torch, dtype)
    lens = tuple(1 + (i * 977) % 3_000 for i in range(16))
    for case in (
        Decode(lens, 32, 8, 128, block_size, kind, splits=(None, Split(256, 12))),
        Decode(lens, 12, 12, 64, block_size, kind, window=500),
        Decode((9_000, 3, 0, 700), 8, 1, 256, block_size, kind, soft_cap=30.0, splits=(None, Split(512, 18))),
        Decode((2_500, 900), 9, 3, 80, block_size, kind, window=1_024, soft_cap=50.0),
    ):
        check_decode(case, "cuda")


@pytest.mark.cuda
def test_a_decode_is_captured_and_replayed_with_other_lengths() -> None:
    """Nothing waits for the device, or the capture of a CUDA graph would fail."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from triton_oracles import Decode, batch_of, decoded

    from kvpool.worker.kernels.decode import paged_decode

    case = Decode((1_500, 700, 20), 8, 2, 64, 16, torch.float32)
    query, cache, table, rows, seq_lens = batch_of(case, "cuda")
    cache.nan_to_num_(0.0, 0.0, 0.0)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arguments = (query, cache, table, rows, seq_lens, 0.1)
    paged_decode(*arguments, out=out, max_seq_len=1_600)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(*arguments, out=out, max_seq_len=1_600)
    for lengths in ((1_500, 700, 20), (3, 699, 17)):
        seq_lens.copy_(torch.tensor(lengths))
        out.zero_()
        graph.replay()
        assert (out.double() - decoded(*arguments[:5], 0.1, case)).abs().max() < 1e-4
