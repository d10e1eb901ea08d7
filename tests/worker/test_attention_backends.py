"""Attention backends of CUDA: against stand-ins of their packages, in Triton's interpreter, on CUDA; and the choice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_attention_packages  # noqa: E402
from attention_oracle import KINDS, Request, Shape, check, check_layers, draw_requests, make_case  # noqa: E402

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.worker.attention import (  # noqa: E402
    BACKENDS,
    PREFERRED_ON_CUDA,
    AttentionBackend,
    AttentionLayer,
    create_backend,
    flash_attn_backend,
    flashinfer_backend,
    why_unusable,
)
from kvpool.worker.attention.flash_attn_backend import FlashAttnBackend  # noqa: E402
from kvpool.worker.attention.flashinfer_backend import FlashInferBackend  # noqa: E402

pytestmark = pytest.mark.dataplane

NOWHERE = 2**30  # a block id that no cache has: looking it up is an IndexError
SCALE = 0.3
HALF_TOLERANCE = 4e-3
CUDA = torch.device("cuda")


@pytest.fixture(params=["flashinfer", "flash_attn"])
def stood_in(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """A backend that finds a stand-in where it looks for its package."""
    with fake_attention_packages.installed():
        yield FlashAttnBackend() if request.param == "flash_attn" else FlashInferBackend(torch.device("cpu"))


def shape_for(backend: AttentionBackend, rng: random.Random, **sizes: Any) -> Shape:
    block_size = 256 if backend.name == "flash_attn" else rng.choice([1, 7, 16, 32])
    return Shape(block_size, rng.choice([1, 2]), rng.choice([1, 3, 4, 8]), 16, dtype=torch.float16, **sizes)


def check_kind(backend: AttentionBackend, rng: random.Random, kind: str, window: int | None, cap: float | None) -> None:
    shape = shape_for(backend, rng)
    longest = 100 if shape.block_size < 256 or kind == "uneven" else 600
    requests = draw_requests(rng, kind, shape.block_size, longest)
    case = make_case(rng, shape, requests, window=window, fill=1e3, stale=NOWHERE)
    check(backend, case, AttentionLayer(SCALE, window, cap), HALF_TOLERANCE)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 1.5), (1, None), (20, None), (300, 1.5)])
def test_against_a_stand_in(stood_in: AttentionBackend, window: int | None, cap: float | None) -> None:
    rng = random.Random(f"{window} {cap}")
    for kind in KINDS:
        check_kind(stood_in, rng, kind, window, cap)


def test_layers_of_a_group_may_differ(stood_in: AttentionBackend) -> None:
    rng = random.Random(2)
    case = make_case(rng, shape_for(stood_in, rng), draw_requests(rng, "mixed", 16, 60), fill=1e3, stale=NOWHERE)
    kinds = [AttentionLayer(SCALE), AttentionLayer(SCALE, 9), AttentionLayer(0.1), AttentionLayer(SCALE, 9, 2.0)]
    check_layers(stood_in, case, kinds * 2, HALF_TOLERANCE)


def test_other_dtypes_are_refused(stood_in: AttentionBackend) -> None:
    rng = random.Random(3)
    case = make_case(rng, replace(shape_for(stood_in, rng), dtype=torch.float32), [Request(20, 1)])
    stood_in.plan(case.step)
    with pytest.raises(InvalidArgumentError, match=r"float16 and bfloat16, not in torch\.float32"):
        stood_in.attend(case.query, case.kv_cache, 0, AttentionLayer(SCALE))


def test_flash_attn_wants_large_blocks() -> None:
    case = make_case(random.Random(4), Shape(16, dtype=torch.float16), [Request(20, 1)])
    with fake_attention_packages.installed():
        backend = FlashAttnBackend()
        backend.plan(case.step)
        with pytest.raises(InvalidArgumentError, match=r"256 tokens, not 16"):
            backend.attend(case.query, case.kv_cache, 0, AttentionLayer(SCALE))


def test_flashinfer_wants_compressed_rows() -> None:
    case = make_case(random.Random(5), Shape(dtype=torch.float16), [Request(20, 1)])
    group = replace(case.step.groups[0], block_starts=None, blocks=None, last_block_lens=None)
    with fake_attention_packages.installed():
        backend = FlashInferBackend(torch.device("cpu"))
        assert backend.with_compressed
        backend.plan(replace(case.step, groups=[group]))
        with pytest.raises(InvalidArgumentError, match="compressed rows"):
            backend.attend(case.query, case.kv_cache, 0, AttentionLayer(SCALE))


def shifted(compress: Callable[..., Any], part: str, by: int) -> Callable[..., Any]:
    def changed(*arguments: Any) -> Any:
        rows = compress(*arguments)
        tensor = getattr(rows, part).clone()
        tensor[0] += by
        return replace(rows, **{part: tensor})

    return changed


@pytest.mark.parametrize(("part", "by"), [("starts", 1), ("blocks", 1), ("last_block_lens", -1)])
def test_the_stand_in_of_flashinfer_notices(part: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "compress", shifted(flashinfer_backend.compress, part, by))
    case = make_case(random.Random(6), Shape(dtype=torch.float16), [Request(20, 1), Request(40, 1)])
    with fake_attention_packages.installed(), pytest.raises(AssertionError):
        check(FlashInferBackend(torch.device("cpu")), case, AttentionLayer(SCALE), HALF_TOLERANCE)


def test_the_stand_in_of_flash_attn_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_backend, "window_size", lambda layer: (layer.sliding_window, 0))
    case = make_case(random.Random(7), Shape(256, dtype=torch.float16), [Request(20, 1), Request(40, 9)])
    with fake_attention_packages.installed(), pytest.raises(AssertionError, match="off by"):
        check(FlashAttnBackend(), case, AttentionLayer(SCALE, 5), HALF_TOLERANCE)


def test_on_the_cpu_cascade_is_the_choice() -> None:
    assert (
        create_backend(None, "cpu").name == "cascade" and create_backend(None, torch.device("cpu"), 3).name == "cascade"
    )
    assert create_backend("gather", "cpu", 2, block_size=16, dtype=torch.float32).name == "gather"
    assert create_backend(None, "meta").name == "gather"
    for name in BACKENDS:
        assert (why_unusable(name, torch.device("cpu")) is None) == (name in ("gather", "cascade"))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("paged", {}, "'paged' is unknown; there are gather, cascade, triton, flashinfer, flash_attn"),
        ("triton", {}, "'triton' needs a CUDA device, not 'cpu'"),
        ("flashinfer", {}, "'flashinfer' needs a CUDA device, not 'cpu'"),
        ("flash_attn", {}, "'flash_attn' needs a CUDA device, not 'cpu'"),
        ("gather", {"num_groups": 0}, "0 KV cache groups"),
    ],
)
def test_a_backend_that_cannot_be_used_says_why(name: str, arguments: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        create_backend(name, "cpu", **arguments)


def test_the_choice_on_cuda() -> None:
    half = {"dtype": torch.bfloat16}
    with fake_attention_packages.installed():
        for name in ("flashinfer", "flash_attn"):
            assert why_unusable(name, CUDA) is None
            assert "not in torch.float32" in str(why_unusable(name, CUDA, dtype=torch.float32))
        assert why_unusable("flash_attn", CUDA, block_size=512, **half) is None
        assert "256 tokens, not 16" in str(why_unusable("flash_attn", CUDA, block_size=16, **half))
    assert "needs the package flashinfer-python" in str(missing("flashinfer"))
    assert "needs the package flash-attn" in str(missing("flash_attn"))
    assert "needs the package triton" in str(missing("triton"))
    assert [name for name in PREFERRED_ON_CUDA if name in BACKENDS] == list(PREFERRED_ON_CUDA)


def missing(name: str) -> str | None:
    """What is said where a package is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, None)
        return why_unusable(name, CUDA)


def test_the_best_on_cuda_is_what_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("FlashInferBackend", "FlashAttnBackend", "TritonBackend", "GatherBackend"):
        monkeypatch.setattr(f"kvpool.worker.attention.{name}", lambda *_, name=name: made.append(name))
    monkeypatch.setitem(sys.modules, "triton", None)
    half, single = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
    create_backend(None, CUDA, block_size=16, **half)
    with fake_attention_packages.installed():
        create_backend(None, CUDA, block_size=16, **half)
        create_backend(None, CUDA, block_size=16, **single)
        create_backend(None, CUDA)
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        create_backend(None, CUDA, block_size=16, **half)
        create_backend(None, CUDA, block_size=256, **half)
        monkeypatch.setitem(sys.modules, "triton", object())
        create_backend(None, CUDA, block_size=16, **half)
    assert made == [
        "GatherBackend",
        "FlashInferBackend",
        *["GatherBackend"] * 3,
        "FlashAttnBackend",
        "TritonBackend",
    ]


INTERPRETED = """
import random, torch
from kvpool.worker.attention import AttentionLayer
from kvpool.worker.attention.triton_backend import TritonBackend
from attention_oracle import KINDS, Shape, check, draw_requests, make_case
rng, backend, cases = random.Random(8), TritonBackend(), 0
for kind in KINDS:
    for window, cap in ((None, None), (None, 1.5), (1, None), (20, 1.5)):
        shape = Shape(rng.choice([1, 7, 16, 32]), rng.choice([1, 2]), rng.choice([1, 3, 4]), rng.choice([8, 16, 20]))
        requests = draw_requests(rng, kind, shape.block_size, 50)
        case = make_case(rng, shape, requests, window=window, fill=rng.choice([1e4, float("nan")]), stale=2**30)
        check(backend, case, AttentionLayer(0.3, window, cap), 2e-5)
        cases += 1
print(cases)
"""


def test_decodes_by_the_own_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    folder = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path]), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["24"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_on_cuda(name: str, dtype: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    block_size = 256 if name == "flash_attn" else 16
    reason = why_unusable(name, CUDA, block_size=block_size, dtype=dtype)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    backend = create_backend(name, CUDA, block_size=block_size, dtype=dtype)
    tolerance = {torch.float32: 1e-3, torch.float16: HALF_TOLERANCE, torch.bfloat16: 3e-2}[dtype]
    rng = random.Random(9)
    for kind in KINDS:
        for window, cap in ((None, None), (None, 1.5), (1, None), (20, None)):
            shape = Shape(block_size, 2, rng.choice([1, 3, 4]), 64, dtype, "cuda")
            requests = draw_requests(rng, kind, block_size, 100)
            # A stale id that exists: an index outside the cache would end the process.
            case = make_case(rng, shape, requests, window=window, fill=1e3)
            check(backend, case, AttentionLayer(0.125, window, cap), tolerance)


@pytest.mark.cuda
def test_on_cuda_something_is_chosen() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for dtype in (torch.float32, torch.bfloat16):
        assert create_backend(None, CUDA, block_size=16, dtype=dtype).name in PREFERRED_ON_CUDA
