"""The plugin: what register() replaces and puts back, how it is switched, and that it never does harm."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

import kvpool
from kvpool import backend
from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import announcement, drift, levels
from kvpool.integrations.vllm import pool as level

pytestmark = pytest.mark.vllm

# Other tests of this process may have made vLLM quiet.
FRESH = {"VLLM_LOGGING_LEVEL": "INFO"}
REPOSITORY = Path(__file__).resolve().parents[2]
CORE = "vllm.v1.core"
# Where vLLM 0.32 holds the classes: shown by running its tests with empty subclasses.
HOLDERS = {
    "BlockPool": (
        f"{CORE}.block_pool",
        f"{CORE}.kv_cache_coordinator",
        f"{CORE}.single_type_kv_cache_manager",
        "vllm.v1.hisparse.block_pool",
    ),
    "KVCacheBlock": (
        f"{CORE}.kv_cache_utils",
        f"{CORE}.block_pool",
        f"{CORE}.kv_cache_coordinator",
        f"{CORE}.kv_cache_manager",
        f"{CORE}.single_type_kv_cache_manager",
        f"{CORE}.sched.scheduler",
    ),
    "FreeKVCacheBlockQueue": (f"{CORE}.kv_cache_utils", f"{CORE}.block_pool"),
    "BlockHashToBlockMap": (f"{CORE}.block_pool",),
}
NATIVE = {
    "BlockPool": level.BlockPool,
    "KVCacheBlock": kvpool.KVCacheBlock,
    "FreeKVCacheBlockQueue": kvpool.FreeKVCacheBlockQueue,
    "BlockHashToBlockMap": kvpool.BlockHashToBlockMap,
}


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    integration.unregister()
    monkeypatch.setenv(levels.VARIABLE, "pool")
    yield
    integration.unregister()


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What the plugin logs; vLLM's loggers pass nothing on to the root."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = announcement.logger
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level_before)


def held() -> dict[str, Any]:
    return {f"{module}.{name}": getattr(import_module(module), name) for name in HOLDERS for module in HOLDERS[name]}


def check_stock() -> None:
    assert all(value.__module__.startswith("vllm.") for value in held().values())


def test_the_names_lead_to_the_native_classes_in_every_module() -> None:
    before = held()
    integration.register()
    for path, value in held().items():
        assert value is NATIVE[path.rpartition(".")[2]], path
    integration.unregister()
    assert held() == before
    check_stock()


def test_no_imported_module_of_vllm_keeps_a_stock_class() -> None:
    held()
    stock_classes = [value for name, value in vars(level).items() if name.startswith("Vllm")]
    assert len(stock_classes) == 4
    integration.register()
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("vllm."):
            for name, value in list(vars(module).items()):
                assert not any(value is one for one in stock_classes), f"{module_name}.{name}"


def test_vllms_subclass_of_the_pool_is_made_anew() -> None:
    holders = ("vllm.v1.hisparse.block_pool", f"{CORE}.single_type_kv_cache_manager")
    before = [import_module(name).SharedEventQueueBlockPool for name in holders]
    integration.register()
    now = [import_module(name).SharedEventQueueBlockPool for name in holders]
    assert now[0] is now[1] and issubclass(now[0], level.BlockPool)
    integration.unregister()
    assert [import_module(name).SharedEventQueueBlockPool for name in holders] == before


def test_one_line_however_often_it_is_called(lines: list[logging.LogRecord]) -> None:
    for _ in range(3):
        integration.register()
    assert [record.getMessage() for record in lines] == [f"kvpool: active (pool) on vLLM {levels.vllm_version()}"]
    assert lines[0].levelno == logging.INFO


def test_a_line_before_vllms_log_is_in_place_comes_with_the_first_pool(lines: list[logging.LogRecord]) -> None:
    announcement.logger.setLevel(logging.WARNING)
    integration.register()
    assert not lines
    announcement.logger.setLevel(logging.INFO)
    for _ in range(2):
        import_module(f"{CORE}.block_pool").BlockPool(4, True, 4)
        assert [record.getMessage() for record in lines] == [f"kvpool: active (pool) on vLLM {levels.vllm_version()}"]


def test_off(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.VARIABLE, "0")
    integration.register()
    check_stock()
    assert not lines
    status = integration.status()
    assert status is not None and status.levels == () and not status.is_refusal


def one_warning(lines: list[logging.LogRecord]) -> str:
    integration.register()
    integration.register()
    check_stock()
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING
    message = lines[0].getMessage()
    assert message.startswith("kvpool: not active, vLLM runs as it is: ")
    status = integration.status()
    assert status is not None and status.is_refusal
    return message


@pytest.mark.parametrize("value", ["pool,poool", "manager", "true", "no"])
def test_a_value_that_makes_no_sense(
    value: str, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(levels.VARIABLE, value)
    assert f"{levels.VARIABLE}={value!r}: " in one_warning(lines)


def test_an_unknown_policy_for_invalid_frees(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(level.INVALID_FREE_VARIABLE, "ignore")
    assert "KVPOOL_ON_INVALID_FREE is raise or warn, not 'ignore'" in one_warning(lines)


def test_a_vllm_that_nobody_checked(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "vllm_version", lambda: "9.9.0")
    assert "vLLM 9.9.0 is not one that this kvpool was checked against" in one_warning(lines)


def test_a_hook_point_that_moved(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = json.loads(drift.KNOWN.read_text())
    recorded = known[levels.vllm_version()]
    recorded["files"] = dict.fromkeys(recorded["files"], "of other bytes")
    recorded["members"][f"{CORE}.block_pool.BlockPool"]["source"] = "another source"
    recorded["members"][f"{CORE}.kv_cache_utils.get_group_id"] = {}
    monkeypatch.setattr(drift, "KNOWN", tmp_path / "known.json")
    drift.KNOWN.write_text(json.dumps(known))
    message = one_warning(lines)
    assert f"{CORE}.block_pool.BlockPool: its source has changed" in message
    assert f"{CORE}.kv_cache_utils.get_group_id is new" in message
    assert "KVCacheBlock" not in message


def test_another_plugin_was_there_first(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    pools = import_module(f"{CORE}.block_pool")
    monkeypatch.setattr(pools, "BlockPool", type("BlockPool", (pools.BlockPool,), {"__module__": "elsewhere"}))
    integration.register()
    assert f"{CORE}.block_pool.BlockPool has been replaced by elsewhere.BlockPool" in lines[0].getMessage()
    assert pools.BlockPool.__module__ == "elsewhere"


def test_a_level_that_fails_half_way_is_undone(lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    def install(hooks: Any) -> None:
        level.install(hooks)
        assert import_module(f"{CORE}.block_pool").BlockPool is level.BlockPool
        raise AttributeError("no such hook")

    monkeypatch.setattr(levels, "load_level", lambda name: SimpleNamespace(TARGETS=level.TARGETS, install=install))
    assert "AttributeError: no such hook" in one_warning(lines)


@pytest.mark.parametrize("wanted", ["1", "pool", "hasher", "tables"])
def test_the_pure_python_twin_does_not_take_vllms_place(
    wanted: str, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(levels.VARIABLE, wanted)
    monkeypatch.setattr(backend, "BACKEND", "reference")
    told = "KVPOOL_PURE_PYTHON=1 selects the pure-Python twin, which takes no place in vLLM"
    assert one_warning(lines).endswith(told)


PLUGINS_LOADED = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.core.block_pool import BlockPool
print(type(BlockPool(4, True, 4)).__module__)
"""


@pytest.mark.parametrize(
    ("value", "told"),
    [("1", "kvpool: not active, vLLM runs as it is: "), ("true", "KVPOOL_PURE_PYTHON is 0 or 1, not 'true'")],
)
def test_whoever_asks_for_the_twin_gets_a_stock_vllm_and_is_told_once(
    tmp_path: Path, value: str, told: str, installed: str
) -> None:
    environment = os.environ | FRESH | {"PYTHONPATH": installed, "KVPOOL_PURE_PYTHON": value, levels.VARIABLE: "1"}
    command = [sys.executable, "-c", PLUGINS_LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert "vllm.v1.core.block_pool" in done.stdout.splitlines()
    said = (done.stdout + done.stderr).splitlines()
    assert sum(told in line for line in said) == 1, said
    assert not any("kvpool: active" in line for line in said)


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A PYTHONPATH on which kvpool is installed, its entry point for vLLM with it."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["vllm.general_plugins"].items()
    metadata = tmp_path / "kvpool-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\n{} = {}\n".format(*entry))
    return os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def test_vllm_itself_loads_the_plugin_and_shows_its_line(tmp_path: Path, installed: str) -> None:
    """A fresh process, as an engine's: the entry point of an installed kvpool, vLLM's loader and its log."""
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from vllm.v1.core.block_pool import BlockPool
print(type(BlockPool(4, True, 4)).__module__)
"""
    environment = os.environ | FRESH | {"PYTHONPATH": installed, levels.VARIABLE: "pool"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert level.BlockPool.__module__ in done.stdout.splitlines()
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "kvpool: active" in line]
    assert "INFO" in line and line.endswith(f"kvpool: active (pool) on vLLM {levels.vllm_version()}")
