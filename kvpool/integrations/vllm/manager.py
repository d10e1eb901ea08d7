"""The level ``manager``: compiled calls under vLLM's own KVCacheManager for what a scheduler does at every step."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core import kv_cache_coordinator as coordinators
from vllm.v1.core import kv_cache_manager as managers
from vllm.v1.core import single_type_kv_cache_manager as group_managers
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from kvpool import backend
from kvpool.integrations.vllm import longest_hit, manager_steps
from kvpool.integrations.vllm.hooks import Hooks
from kvpool.integrations.vllm.pool import BlockPool

_MANAGER = "vllm.v1.core.kv_cache_manager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_GROUPS = "vllm.v1.core.single_type_kv_cache_manager"
TARGETS = (
    # replaced
    f"{_MANAGER}.KVCacheManager.allocate_slots",
    f"{_MANAGER}.KVCacheManager.cache_blocks",
    f"{_MANAGER}.KVCacheManager.free",
    f"{_MANAGER}.KVCacheBlocks.get_block_ids",
    f"{_GROUPS}.FullAttentionManager.find_longest_cache_hit",
    f"{_GROUPS}.SlidingWindowManager.find_longest_cache_hit",
    f"{_GROUPS}.ChunkedLocalAttentionManager.find_longest_cache_hit",
    # what the replaced ones did, and now the compiled ones do
    f"{_MANAGER}.KVCacheManager.__init__",
    f"{_MANAGER}.KVCacheManager.create_kv_cache_blocks",
    f"{_COORDINATOR}.KVCacheCoordinator",
    f"{_COORDINATOR}.KVCacheCoordinatorNoPrefixCache",
    f"{_COORDINATOR}.UnitaryKVCacheCoordinator",
    f"{_COORDINATOR}.HybridKVCacheCoordinator",
    f"{_COORDINATOR}.replay_boundaries",
    f"{_GROUPS}.SingleTypeKVCacheManager",
    f"{_GROUPS}.FullAttentionManager",
    f"{_GROUPS}.SlidingWindowManager",
    f"{_GROUPS}.ChunkedLocalAttentionManager",
    f"{_GROUPS}.get_manager_for_kv_cache_spec",
    "vllm.v1.core.block_pool.BlockPool",
    "vllm.v1.core.kv_cache_utils.BlockHashListWithBlockSize",
    "vllm.v1.core.kv_cache_utils.null_head_len",
    "vllm.v1.core.kv_cache_utils.resolve_block_hashes",
    "vllm.v1.core.kv_cache_utils.trim_null_head",
    "vllm.v1.request.Request",
    "vllm.v1.request.RequestStatus",
)

_FIND = "find_longest_cache_hit"
_HIT_FINDERS = {
    "find_full": group_managers.FullAttentionManager,
    "find_window": group_managers.SlidingWindowManager,
    "find_local": group_managers.ChunkedLocalAttentionManager,
}
_STOCK_METHODS = {name: vars(managers.KVCacheManager)[name] for name in ("allocate_slots", "cache_blocks", "free")}
_STOCK_HITS = {name: vars(owner)[_FIND] for name, owner in _HIT_FINDERS.items()} | {
    "get_block_ids": managers.KVCacheBlocks.get_block_ids
}
_COORDINATORS = (
    coordinators.KVCacheCoordinatorNoPrefixCache,
    coordinators.UnitaryKVCacheCoordinator,
    coordinators.HybridKVCacheCoordinator,
)

# vLLM 0.33 has hashes that wait for tokens after their block, and caches no more than what has a hash.
_CACHES_ONLY_HASHED = "num_hash_lookahead_tokens" in inspect.signature(managers.KVCacheManager).parameters


def make_plan(manager: Any) -> manager_steps.Plan | None:
    """What the compiled calls have to know about a KVCacheManager; None where they don't serve it."""
    coordinator = manager.coordinator
    if (
        type(manager) is not managers.KVCacheManager
        or type(manager.block_pool) is not BlockPool
        or backend.BACKEND != "native"
        or type(coordinator) not in _COORDINATORS
        or manager.retained_hit_group_ids
    ):
        return None
    groups = [_make_group(group, manager, coordinator) for group in coordinator.single_type_managers]
    if not groups or None in groups:
        return None
    alignment = 0
    if isinstance(coordinator, coordinators.HybridKVCacheCoordinator):
        alignment = 1 if coordinator.enable_partial_hash_hits else coordinator.scheduler_block_size
    # Hashes that look ahead leave no block to be dropped: 0.33 has a set of its own for the groups that drop one.
    dropping = getattr(coordinator, "drop_eagle_group_ids", coordinator.eagle_group_ids)
    return manager_steps.Plan(manager, groups, alignment, dropping, _CACHES_ONLY_HASHED)


def _make_group(group: Any, manager: Any, coordinator: Any) -> manager_steps.Group | None:
    spec = group.kv_cache_spec
    if group.block_pool is not manager.block_pool or not spec.prefix_cacheable:
        return None
    most = group.max_admission_blocks_per_request
    most_blocks = -1 if most is None else most
    if type(group) is group_managers.FullAttentionManager:
        caches_tails = group.block_size != manager.block_pool.hash_block_size
        return manager_steps.Group(group, "full", 0, most_blocks, True, caches_tails)
    if type(group) is group_managers.SlidingWindowManager:
        window = group.sliding_window + group.extra_retained_tokens
        return manager_steps.Group(group, "window", window, most_blocks, _caches_all(group, coordinator), False)
    if type(group) is group_managers.ChunkedLocalAttentionManager:
        return manager_steps.Group(group, "local", group.attention_chunk_size, most_blocks, True, False)
    return None


def _caches_all(group: Any, coordinator: Any) -> bool:
    """Whether every full block of a sliding window is cached, whatever the request."""
    mask = group.reachable_block_mask(
        start_block=0,
        end_block=1,
        alignment_tokens=group.cache_hit_alignment_tokens,
        kv_cache_spec=group.kv_cache_spec,
        use_eagle=group.use_eagle,
        retention_interval=coordinator.retention_interval,
        dcp_world_size=group.dcp_world_size,
    )
    return mask is None


_NAMES = {
    "Request": Request,
    "RequestStatus": RequestStatus,
    "KVCacheBlocks": managers.KVCacheBlocks,
    "BlockHashListWithBlockSize": BlockHashListWithBlockSize,
    "BlockPool": BlockPool,
    "full_specs": (FullAttentionSpec, ChunkedLocalAttentionSpec),
    "window_specs": SlidingWindowSpec,
    "local_specs": ChunkedLocalAttentionSpec,
    "replay_boundaries": coordinators.replay_boundaries,
    "make_plan": make_plan,
}


def install(hooks: Hooks) -> None:
    """Replace the methods. The compiled functions keep vLLM's for whatever they do not serve."""
    manager_steps.bind(_STOCK_METHODS | _NAMES)
    longest_hit.bind(_STOCK_HITS | _NAMES)
    for name in _STOCK_METHODS:
        hooks.replace(managers.KVCacheManager, name, getattr(manager_steps, name))
    for name, owner in _HIT_FINDERS.items():
        hooks.replace(owner, _FIND, classmethod(getattr(longest_hit, name)))
    hooks.replace(managers.KVCacheBlocks, "get_block_ids", longest_hit.get_block_ids)
