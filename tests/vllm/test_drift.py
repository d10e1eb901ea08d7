"""The fingerprints of what kvpool replaces: what counts as a change, what does not, and that what is recorded fits the
installed vLLM."""

from __future__ import annotations

import ast
import inspect
import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.integrations.vllm import drift, levels, sources
from kvpool.integrations.vllm.closure import closure_of
from kvpool.integrations.vllm.members import Member, member_of

SOURCE = '''
"""A module."""
from collections import OrderedDict as Ordered

LIMIT = 3

class Pool:
    """A pool."""

    def __init__(self, size, *, name="x"):
        self.size = size  # as it is

    def take(self, n: int = 1) -> list:
        """Take some."""
        return list(range(n))

if LIMIT:
    def inside(): return 1
else:
    def other(): return 2
'''
NAMES = ("Pool", "Pool.take", "LIMIT", "Ordered", "inside", "other", "Pool.missing")
TARGETS = tuple(f"vllm.core.pool.{name}" for name in NAMES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package vllm of one module, recorded as version 1.2.0."""
    package = tmp_path / "vllm" / "core"
    package.mkdir(parents=True)
    (package / "pool.py").write_text(SOURCE)
    monkeypatch.setattr(drift, "KNOWN", tmp_path / "known.json")
    drift.record("1.2.0+cpu", TARGETS, tmp_path)
    yield tmp_path
    sources.tree_of.cache_clear()


def changed(folder: Path, old: str, new: str) -> list[str]:
    assert old in SOURCE
    (folder / "vllm" / "core" / "pool.py").write_text(SOURCE.replace(old, new))
    sources.tree_of.cache_clear()
    return drift.differences("1.2.0", TARGETS, folder)


def test_what_was_recorded_is_known(folder: Path) -> None:
    assert drift.differences("1.2.0", TARGETS, folder) == []
    assert drift.differences("1.2.0+cu130", TARGETS, folder) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # as it is", ""),
        ('"""A pool."""', '"""Another text."""'),
        ('        """Take some."""\n', ""),
        ("list(range(n))", "list(\n            range(n)\n        )"),
        ('"""A module."""', "import os"),
    ],
)
def test_text_that_does_nothing_is_no_change(folder: Path, old: str, new: str) -> None:
    assert changed(folder, old, new) == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("range(n)", "range(n + 1)", ["vllm.core.pool.Pool: its source", "vllm.core.pool.Pool.take: its source"]),
        ("self.size = size", "self.size = 2", ["vllm.core.pool.Pool: its source"]),
        ('name="x"', "name=None", ["signature (self, size, *, name='x') is now (self, size, *, name=None)"]),
        ("LIMIT = 3", "LIMIT = 4", ["vllm.core.pool.LIMIT: its source"]),
        ("OrderedDict as", "Counter as", ["vllm.core.pool.Ordered: its source"]),
        ("def inside(): return 1", "def inside(): return 3", ["vllm.core.pool.inside: its source"]),
        ("def other()", "def another()", ["vllm.core.pool.other is gone"]),
        ("def take", "def missing", ["vllm.core.pool.Pool.take is gone", "vllm.core.pool.Pool.missing is new"]),
        ('"x"', "1.0", ["name='x'"]),
    ],
)
def test_changes_are_named(folder: Path, old: str, new: str, named: list[str]) -> None:
    found = "\n".join(changed(folder, old, new))
    for text in named:
        assert text in found


def test_a_value_of_another_type_is_a_change(folder: Path) -> None:
    assert "LIMIT" in " ".join(changed(folder, "LIMIT = 3", "LIMIT = 3.0"))


def test_a_target_nobody_recorded_is_a_difference(folder: Path) -> None:
    (found,) = drift.differences("1.2.0", ["vllm.core.pool.new"], folder)
    assert found.startswith("vllm.core.pool.new is not recorded")


def test_a_module_that_moved(folder: Path) -> None:
    (folder / "vllm" / "core" / "pool.py").rename(folder / "vllm" / "pool.py")
    found = drift.differences("1.2.0", TARGETS, folder)
    assert len(found) == len(TARGETS) - 1  # one was never there
    assert all(text.endswith("is gone") for text in found)


def test_an_unknown_version_is_a_difference_even_where_no_source_has_changed(folder: Path) -> None:
    found = drift.differences("1.3.0", TARGETS, folder)
    assert found == [
        "vLLM 1.3.0 is not one that this kvpool was checked against (1.2.0)",
        "compared with 1.2.0: no hook point differs",
    ]


def test_an_unknown_version_is_compared_with_the_latest_known(folder: Path) -> None:
    (folder / "vllm" / "core" / "pool.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    sources.tree_of.cache_clear()
    drift.record("1.10.0", TARGETS, folder)
    assert list(drift.known_versions()) == ["1.2.0", "1.10.0"]
    assert drift.differences("1.11.0", TARGETS, folder)[1] == "compared with 1.10.0: no hook point differs"
    assert drift.differences("1.2.0", TARGETS, folder) == ["vllm.core.pool.LIMIT: its source has changed"]


def test_a_long_list_is_cut() -> None:
    text = drift.describe([f"difference {i}" for i in range(drift.MAX_NAMED + 3)])
    assert text.endswith("and 3 more") and "difference 0" in text


# ---- what is recorded ----

CORE = "vllm.v1.core"
MANAGERS = f"{CORE}.single_type_kv_cache_manager"
INTERFACE = "vllm.v1.kv_cache_interface"
# What differs between two recorded versions, next to each other, and was looked at: how kvpool serves both.
LOOKED_AT = {
    ("0.32.0", "0.33.0"): {
        # Hashes may cover tokens after their block: the pool takes their number and tells of them in its events.
        "vllm.distributed.kv_events.BlockStored",
        f"{CORE}.block_pool.BlockPool",
        f"{CORE}.kv_cache_utils.generate_lookahead_block_hash_extra_keys",
        # Such hashes are left to vLLM's hasher.
        f"{CORE}.kv_cache_utils.get_request_block_hasher",
        # The number is handed on, and no group drops a block then: Plan.dropping_groups.
        f"{CORE}.kv_cache_manager.KVCacheManager.__init__",
        f"{CORE}.kv_cache_coordinator.KVCacheCoordinator",
        f"{CORE}.kv_cache_coordinator.KVCacheCoordinatorNoPrefixCache",
        f"{CORE}.kv_cache_coordinator.UnitaryKVCacheCoordinator",
        f"{CORE}.kv_cache_coordinator.HybridKVCacheCoordinator",
        # A full block waits for its hash: Plan.caches_only_hashed.
        f"{MANAGERS}.SingleTypeKVCacheManager",
        f"{MANAGERS}.FullAttentionManager",
        # Null blocks in front of a table are not given back, which the pool would not have done either.
        f"{CORE}.kv_cache_utils.null_head_len",
        f"{CORE}.kv_cache_utils.trim_null_head",
        f"{CORE}.kv_cache_manager.trim_null_head",
        f"{MANAGERS}.trim_null_head",
        # get_unhashed_block_ids_all_groups passes over them.
        f"{CORE}.kv_cache_manager.KVCacheBlocks",
        # As generate_lookahead_block_hash_extra_keys and KVCacheCoordinator above.
        f"{CORE}.block_pool.generate_lookahead_block_hash_extra_keys",
        f"{CORE}.kv_cache_coordinator.get_kv_cache_coordinator",
        # Groups that have no plan: Mamba, HiSparse.
        f"{MANAGERS}.HiSparseResidentManager",
        f"{MANAGERS}.MambaManager",
        f"{INTERFACE}.get_mamba_prefill_checkpoint_position",
        # Fields of workers and of the planning of memory; no plan reads them.
        f"{INTERFACE}.FullAttentionSpec",
        f"{INTERFACE}.KVCacheSpec",
        f"{INTERFACE}.KVQuantMode",
        f"{INTERFACE}.MLAAttentionSpec",
        f"{INTERFACE}.SinkFullAttentionSpec",
        f"{INTERFACE}.SlidingWindowSpec",
        "vllm.v1.structured_output.request.StructuredOutputRequest",
    },
}
COMPILED = {
    f"{CORE}.kv_cache_manager.KVCacheManager.allocate_slots": "manager_steps.allocate_slots",
    f"{CORE}.kv_cache_manager.KVCacheManager.cache_blocks": "manager_steps.cache_blocks",
    f"{CORE}.kv_cache_manager.KVCacheManager.free": "manager_steps.free",
    f"{CORE}.kv_cache_manager.KVCacheBlocks.get_block_ids": "longest_hit.get_block_ids",
    f"{MANAGERS}.FullAttentionManager.find_longest_cache_hit": "longest_hit.find_full",
    f"{MANAGERS}.SlidingWindowManager.find_longest_cache_hit": "longest_hit.find_window",
    f"{MANAGERS}.ChunkedLocalAttentionManager.find_longest_cache_hit": "longest_hit.find_local",
}


def test_of_every_version_the_same_is_recorded() -> None:
    first, *others = drift.known_versions().values()
    assert others
    for recorded in others:
        assert set(COMPILED) <= recorded.members.keys() and len(recorded.members) > 200
        assert recorded.files.keys() == first.files.keys()


def test_each_change_from_version_to_version_was_looked_at() -> None:
    known = drift.known_versions()
    pairs = list(itertools.pairwise(known))
    assert pairs == list(LOOKED_AT)
    for older, newer in pairs:
        before, after = known[older].members, known[newer].members
        changed = {name for name in after if not after[name].is_same_as(before.get(name, Member()))}
        assert changed | (before.keys() - after.keys()) == LOOKED_AT[older, newer]


@pytest.mark.parametrize("version", drift.known_versions())
@pytest.mark.parametrize("target", COMPILED)
def test_compiled_calls_have_the_parameters_of_every_version(version: str, target: str) -> None:
    module, name = COMPILED[target].split(".")
    compiled = getattr(import_module(f"kvpool.integrations.vllm.{module}"), name)
    assert str(inspect.signature(compiled)) == drift.known_versions()[version].members[target].signature


@pytest.mark.parametrize("version", drift.known_versions())
def test_the_pool_takes_the_arguments_of_every_version(version: str) -> None:
    signature = drift.known_versions()[version].members[f"{CORE}.block_pool.BlockPool"].signature
    (function,) = ast.parse(f"def f{signature}: pass").body
    assert isinstance(function, ast.FunctionDef)
    named = {argument.arg for argument in function.args.args} - {"self"}
    # BlockPool of the level takes this one itself; all others it hands on.
    handed_on: dict[str, Any] = dict.fromkeys(named - {"num_hash_lookahead_tokens"})
    inspect.signature(kvpool.BlockPool).bind(**handed_on)


@pytest.mark.vllm
def test_the_installed_vllm_is_recorded_in_full() -> None:
    pytest.importorskip("vllm.v1.core.block_pool")
    targets = levels.targets_of(levels.NAMES)
    assert len(targets) > 20
    recorded = drift.known_versions()[levels.vllm_version()]
    installed = sources.installed_sources()
    assert drift.differences(levels.vllm_version(), targets, installed) == []
    closure = closure_of(targets, installed)
    assert closure.keys() == recorded.members.keys() == recorded.closure(targets).keys()
    assert len(closure) > 200
    for name, relies_on in closure.items():
        # The file's hash spares the look at its names: here each one is looked at.
        assert member_of(name, installed, relies_on) == recorded.members[name], name
