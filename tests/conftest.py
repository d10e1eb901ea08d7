"""Every test that asks for `backend` runs on the extension and on the pure-Python twin.

A missing extension is an error. With KVPOOL_PURE_PYTHON=1 only the twin runs, and is what `kvpool` itself exports.
"""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from token_requests import TokenRequest

import kvpool
from kvpool import reference

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core or more: torch, here and in children, takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

IS_PURE_PYTHON = os.environ.get("KVPOOL_PURE_PYTHON") == "1"
BACKEND_NAMES = ["reference"] if IS_PURE_PYTHON else ["native", "reference"]
CLASS_NAMES = ("BlockPool", "KVCacheBlock", "FreeKVCacheBlockQueue", "BlockHashToBlockMap")

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=300, stateful_step_count=40, **_COMMON)
settings.register_profile("thorough", max_examples=2000, stateful_step_count=80, **_COMMON)
settings.load_profile(os.environ.get("KVPOOL_HYPOTHESIS_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """Modules and collected tests live as long as the session: no collection has to look at them again."""
    gc.collect()
    gc.freeze()


def make_backend(name: str) -> SimpleNamespace:
    """The four classes of a backend under their names, and the name."""
    module = kvpool if name == "native" else reference
    if name == "native":
        assert kvpool.BACKEND == "native"
    return SimpleNamespace(name=name, **{class_name: getattr(module, class_name) for class_name in CLASS_NAMES})


@pytest.fixture(params=BACKEND_NAMES)
def backend(request: pytest.FixtureRequest) -> SimpleNamespace:
    return make_backend(request.param)


@pytest.fixture
def make_pool(backend: SimpleNamespace) -> Any:
    """Makes pools, by default with caching on and 4 tokens per hash block; each is checked when the test ends."""
    pools: list[Any] = []

    def make(num_blocks: int, enable_caching: bool = True, hash_block_size: int = 4, *args: Any, **kwargs: Any) -> Any:
        pools.append(backend.BlockPool(num_blocks, enable_caching, hash_block_size, *args, **kwargs))
        pools[-1].check()
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()


@pytest.fixture
def make_request() -> type[TokenRequest]:
    return TokenRequest


@pytest.fixture
def no_garbage() -> Any:
    """The garbage collector has run before the test and stands still during it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
