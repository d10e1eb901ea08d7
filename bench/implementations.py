"""The pools under test: ``native``, ``reference`` (kvpool's twin in pure Python) and ``vllm`` (if it is installed)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HASH_BLOCK_SIZE = 16  # tokens
NAMES = ("native", "reference", "vllm")


@dataclass(frozen=True)
class Implementation:
    """A block pool class under the name the reports use.

    Attributes:
        name: one of ``NAMES``.
        version: of the package the class comes from.
        pool_class: takes (num_gpu_blocks, enable_caching, hash_block_size), as vLLM's.
    """

    name: str
    version: str
    pool_class: Callable[..., Any]

    def make_pool(self, num_blocks: int, enable_caching: bool = True) -> Any:
        """A new pool of ``num_blocks`` blocks, the null block included; events and metrics are off."""
        return self.pool_class(num_blocks, enable_caching, HASH_BLOCK_SIZE)


def is_vllm_installed() -> bool:
    """Whether vLLM can be found; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def load(name: str) -> Implementation:
    """The implementation of that name.

    Raises:
        ImportError: vLLM or the extension is missing, or KVPOOL_PURE_PYTHON=1 hides the extension.
        KeyError: no such name.
    """
    return {"native": _load_native, "reference": _load_reference, "vllm": _load_vllm}[name]()


def load_installed(names: tuple[str, ...] = NAMES) -> dict[str, Implementation]:
    """Those of ``names`` that can run here: all, but vLLM only where it is installed."""
    return {name: load(name) for name in names if name != "vllm" or is_vllm_installed()}


def is_release_build() -> bool:
    """Whether the extension was built without debug asserts and sanitizers: only then its times mean anything."""
    from kvpool.native.pool import BUILD_INFO

    return not BUILD_INFO["debug"] and not BUILD_INFO["sanitize"]


def _load_native() -> Implementation:
    from kvpool import __version__
    from kvpool.backend import BACKEND, BlockPool

    if BACKEND != "native":
        raise ImportError("KVPOOL_PURE_PYTHON=1 hides the native pool: unset it to run the benchmarks")
    return Implementation("native", __version__, BlockPool)


def _load_reference() -> Implementation:
    from kvpool import __version__
    from kvpool.reference import BlockPool

    return Implementation("reference", __version__, BlockPool)


def _load_vllm() -> Implementation:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.v1.core.block_pool import BlockPool

    return Implementation("vllm", vllm.__version__, BlockPool)
