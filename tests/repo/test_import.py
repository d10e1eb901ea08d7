"""What `import kvpool` loads and costs, seen from a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import IS_PURE_PYTHON

import kvpool

HEAVY = ("torch", "vllm", "numpy", "typer", "rich", "matplotlib", "transformers", "zmq", "prometheus_client", "asyncio")
REPEATS = 5


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_nothing_heavy() -> None:
    code = f"import sys, kvpool; print([name for name in {HEAVY} if name in sys.modules])"
    assert run(code) == "[]"


def test_a_pool_of_blocks_needs_no_numpy() -> None:
    code = """
import sys, kvpool
pool = kvpool.BlockPool(5, True, 4, True, kvpool.KVCacheMetricsCollector(1.0))
pool.free_blocks(pool.get_new_blocks(3))
print("numpy" in sys.modules, pool.allocate_ids(2).tolist(), "numpy" in sys.modules)
"""
    assert run(code) == "False [1, 2] True"


@pytest.mark.timing
def test_the_import_takes_less_than_100_ms() -> None:
    # Processor time, so that other processes on the machine do not count.
    code = "import time; t = time.process_time(); import kvpool; print(time.process_time() - t)"
    seconds = min(float(run(code)) for _ in range(REPEATS))
    assert seconds < 0.1


def test_the_backend_follows_the_environment() -> None:
    code = """
import kvpool
from kvpool import reference
print(kvpool.BACKEND, kvpool.BlockPool is reference.BlockPool, kvpool.KVCacheBlock is reference.KVCacheBlock)
"""
    assert run(code, KVPOOL_PURE_PYTHON="1") == "reference True True"
    if not IS_PURE_PYTHON:
        for value in ("", "0"):
            assert run(code, KVPOOL_PURE_PYTHON=value) == "native False False"


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1", "no"])
def test_a_value_that_selects_no_backend_is_refused_by_name(value: str) -> None:
    code = "try:\n    import kvpool\nexcept ValueError as error:\n    print(type(error).__name__, error)"
    assert run(code, KVPOOL_PURE_PYTHON=value) == f"InvalidArgumentError KVPOOL_PURE_PYTHON is 0 or 1, not {value!r}"


def test_the_twin_works_without_the_extension() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("kvpool.native."):
            raise ImportError(f"no extension: {name}")
sys.meta_path.insert(0, Refuse())
import kvpool
pool = kvpool.BlockPool(5, True, 4)
print(kvpool.BACKEND, [block.block_id for block in pool.get_new_blocks(2)])
"""
    assert run(code, KVPOOL_PURE_PYTHON="1") == "reference [1, 2]"
    if not IS_PURE_PYTHON:
        broken = code.replace(
            "import kvpool\n", "try:\n    import kvpool\nexcept ImportError as e:\n    print(e); sys.exit()\n"
        )
        assert run(broken, KVPOOL_PURE_PYTHON="").startswith("no extension: kvpool.native.")


def test_what_is_exported_exists() -> None:
    assert {
        "BlockPool",
        "KVCacheBlock",
        "FreeKVCacheBlockQueue",
        "BlockHashToBlockMap",
        "KVCacheMetricsCollector",
    } <= set(kvpool.__all__)
    for name in kvpool.__all__:
        assert getattr(kvpool, name) is not None
    assert ("reference" if IS_PURE_PYTHON else "native") == kvpool.BACKEND


def test_both_backends_have_the_same_calls() -> None:
    code = """
import kvpool
from kvpool import reference
hidden = {"__weakref__", "__dict__", "__slots__"}
for name in ("BlockPool", "KVCacheBlock", "FreeKVCacheBlockQueue", "BlockHashToBlockMap"):
    public = lambda cls: {attribute for attribute in dir(cls) if not attribute.startswith("_")}
    native, twin = public(getattr(kvpool, name)), public(getattr(reference, name))
    # attributes that the reference sets on instances are members of the native class
    twin |= {a for a in native if a not in twin and hasattr(
        {"BlockPool": reference.BlockPool(2, True, 4)}.get(name, object()), a)}
    print(name, sorted(native - twin), sorted(twin - native))
"""
    if not IS_PURE_PYTHON:
        assert run(code).splitlines() == [
            f"{name} [] []" for name in ("BlockPool", "KVCacheBlock", "FreeKVCacheBlockQueue", "BlockHashToBlockMap")
        ]
