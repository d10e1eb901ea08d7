"""Attention over the paged cache behind one small interface, chosen by device and by what is installed.

Every backend gives the same numbers up to rounding; they differ in where they run and how fast:

- ``gather``: plain torch, any device and dtype;
- ``cascade``: the same, with leading blocks that requests share read once;
- ``triton``: kvpool's own kernel for decodes, CUDA;
- ``flashinfer``: FlashInfer, CUDA, float16 and bfloat16;
- ``flash_attn``: flash-attn 2, CUDA, float16 and bfloat16, blocks of a multiple of 256 tokens.
"""

from __future__ import annotations

import importlib

import torch

from kvpool.errors import InvalidArgumentError
from kvpool.worker.attention.cascade import CascadeBackend
from kvpool.worker.attention.flash_attn_backend import PAGE_MULTIPLE, FlashAttnBackend
from kvpool.worker.attention.flashinfer_backend import DTYPES as HALF_DTYPES
from kvpool.worker.attention.flashinfer_backend import FlashInferBackend
from kvpool.worker.attention.gather import GatherBackend
from kvpool.worker.attention.interface import AttentionBackend, AttentionLayer
from kvpool.worker.attention.triton_backend import TritonBackend

__all__ = ["BACKENDS", "AttentionBackend", "AttentionLayer", "create_backend", "why_unusable"]

BACKENDS = ("gather", "cascade", "triton", "flashinfer", "flash_attn")
PREFERRED_ON_CUDA = ("flashinfer", "flash_attn", "triton", "gather")
PACKAGES = {"triton": "triton", "flashinfer": "flashinfer-python", "flash_attn": "flash-attn"}  # by module


def create_backend(
    name: str | None,
    device: torch.device | str,
    num_groups: int = 1,
    *,
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """A backend by name, or the best that device and packages allow.

    Args:
        name: one of ``BACKENDS``; None to choose: "cascade" on the CPU, on CUDA the first that is usable of
            "flashinfer", "flash_attn", "triton" and "gather", elsewhere "gather". Those that are not for every
            block size or dtype are chosen only where these are known.
        device: of the cache.
        num_groups: KV cache groups that it will be asked for.
        block_size, dtype: of the cache.

    Raises:
        InvalidArgumentError: no such backend, or it can't be used here; says why.
    """
    device = torch.device(device)
    if num_groups < 1:
        raise InvalidArgumentError(f"attention for {num_groups} KV cache groups")
    if name is None:
        name = _best(device, block_size, dtype)
    reason = why_unusable(name, device, block_size=block_size, dtype=dtype)
    if reason is not None:
        raise InvalidArgumentError(f"attention backend {name!r} {reason}")
    if name == "flashinfer":
        return FlashInferBackend(device)
    if name == "flash_attn":
        return FlashAttnBackend()
    if name == "triton":
        return TritonBackend()
    return CascadeBackend() if name == "cascade" else GatherBackend()


def why_unusable(
    name: str, device: torch.device, *, block_size: int | None = None, dtype: torch.dtype | None = None
) -> str | None:
    """Why a backend can't be used, None if it can. What is not known (None) is no reason."""
    if name not in BACKENDS:
        return f"is unknown; there are {', '.join(BACKENDS)}"
    if name in PACKAGES:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type!r}"
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # the last two where it doesn't go with torch or CUDA
            return f"needs the package {PACKAGES[name]}: {error}"
    if name in ("flashinfer", "flash_attn") and dtype is not None and dtype not in HALF_DTYPES:
        return f"computes in float16 and bfloat16, not in {dtype}"
    if name == "flash_attn" and block_size is not None and block_size % PAGE_MULTIPLE:
        return f"needs blocks of a multiple of {PAGE_MULTIPLE} tokens, not {block_size}"
    return None


def _best(device: torch.device, block_size: int | None, dtype: torch.dtype | None) -> str:
    if device.type == "cpu":
        return "cascade"
    if device.type != "cuda":
        return "gather"
    unsure = {"flashinfer": dtype is None, "flash_attn": dtype is None or block_size is None}
    return next(
        name
        for name in PREFERRED_ON_CUDA
        if not unsure.get(name) and why_unusable(name, device, block_size=block_size, dtype=dtype) is None
    )
