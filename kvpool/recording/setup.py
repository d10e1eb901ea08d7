"""How a manager was made, as a message, and a manager that is made in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import index
from typing import Any

from kvpool.cache import spec as specs
from kvpool.cache.managers import MANAGER_OF_SPEC
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvpool.errors import InvalidArgumentError
from kvpool.recording.operations import GroupSetup, ManagerSetup, PoolSetup

_SPECS: dict[str, type[KVCacheSpec]] = {
    kind.__name__: kind
    for kind in (
        specs.FullAttentionSpec,
        specs.SlidingWindowSpec,
        specs.ChunkedLocalAttentionSpec,
        specs.MambaSpec,
        specs.CrossAttentionSpec,
        specs.SinkFullAttentionSpec,
    )
}
_MANAGERS = {kind: MANAGER_OF_SPEC[kind] for kind in _SPECS.values()}


class NotRecordableError(Exception):
    """Something that a recording has no words for."""


class SilentCollector:
    """A metrics collector that counts nothing: what a pool does where somebody watches it is not the same code."""

    def on_block_allocated(self, block: Any) -> None:
        pass

    def on_block_accessed(self, block: Any) -> None:
        pass

    def on_block_evicted(self, block: Any) -> None:
        pass

    def reset(self) -> None:
        pass


def describe_manager(manager: Any, arguments: dict[str, Any]) -> ManagerSetup:
    """The setup of a manager.

    Args:
        manager: a ``KVCacheManager``.
        arguments: those that it was made with, all of them, by name.

    Raises:
        NotRecordableError: a spec or a group's manager of a class that is not kvpool's.
    """
    config: KVCacheConfig = arguments["kv_cache_config"]
    pool = manager.block_pool
    return ManagerSetup(
        num_blocks=pool.num_gpu_blocks,
        groups=[
            _describe_group(group, single)
            for group, single in zip(config.kv_cache_groups, manager.coordinator.single_type_managers)
        ],
        retention_interval=_int_or_none(config.prefix_cache_retention_interval),
        config_hash_block_size=_int_or_none(config.hash_block_size),
        max_model_len=manager.max_model_len,
        scheduler_block_size=_int_or_none(arguments["scheduler_block_size"]),
        hash_block_size=_int_or_none(arguments["hash_block_size"]),
        enable_caching=bool(arguments["enable_caching"]),
        use_eagle=bool(arguments["use_eagle"]),
        enable_kv_cache_events=bool(arguments["enable_kv_cache_events"]),
        watermark=float(arguments["watermark"]),
        max_in_flight_tokens=_int_or_none(arguments["max_in_flight_tokens"]),
        num_prefill_lookahead=index(arguments["num_prefill_lookahead"]),
        enable_mamba_shared_prefix_checkpoint=bool(arguments["enable_mamba_shared_prefix_checkpoint"]),
        verify_hits=bool(arguments["verify_hits"]),
        pool=PoolSetup(
            uncached_first=bool(pool.uncached_first),
            on_invalid_free=pool.on_invalid_free,
            strict_partial=bool(pool.strict_partial),
            dedup_events=bool(pool.dedup_events),
            dense_events=bool(pool.dense_events),
            is_observed=pool.metrics_collector is not None,
        ),
    )


def _int_or_none(value: Any) -> int | None:
    return None if value is None else index(value)


def _describe_group(group: KVCacheGroupSpec, manager: Any) -> GroupSetup:
    kind = next((kind for kind in type(group.kv_cache_spec).__mro__ if kind in _MANAGERS), None)
    if kind is None or type(manager) is not _MANAGERS[kind]:
        raise NotRecordableError(f"a group of {type(manager).__name__} for {type(group.kv_cache_spec).__name__}")
    values = {field.name: getattr(group.kv_cache_spec, field.name) for field in fields(kind)}
    return GroupSetup(kind.__name__, values, bool(group.is_eagle_group))


def make_manager(setup: ManagerSetup, manager_class: Callable[..., Any], pool_class: Callable[..., Any]) -> Any:
    """A manager of this setup, of the given classes.

    Raises:
        TypeError, InvalidArgumentError: values that make none.
    """
    groups = [
        KVCacheGroupSpec([f"group {i}"], _make_spec(group), group.is_eagle_group)
        for i, group in enumerate(setup.groups)
    ]
    pool = setup.pool
    return manager_class(
        KVCacheConfig(setup.num_blocks, groups, setup.retention_interval, setup.config_hash_block_size),
        setup.max_model_len,
        setup.scheduler_block_size,
        setup.hash_block_size,
        setup.enable_caching,
        setup.use_eagle,
        enable_kv_cache_events=setup.enable_kv_cache_events,
        watermark=setup.watermark,
        max_in_flight_tokens=setup.max_in_flight_tokens,
        num_prefill_lookahead=setup.num_prefill_lookahead,
        enable_mamba_shared_prefix_checkpoint=setup.enable_mamba_shared_prefix_checkpoint,
        metrics_collector=SilentCollector() if pool.is_observed else None,
        verify_hits=setup.verify_hits,
        block_pool_class=partial(
            pool_class,
            uncached_first=pool.uncached_first,
            on_invalid_free=pool.on_invalid_free,
            strict_partial=pool.strict_partial,
            dedup_events=pool.dedup_events,
            dense_events=pool.dense_events,
        ),
    )


def _make_spec(group: GroupSetup) -> KVCacheSpec:
    kind = _SPECS.get(group.kind)
    if kind is None:
        raise InvalidArgumentError(f"no kind of group: {group.kind!r}")
    unknown = group.fields.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise InvalidArgumentError(f"a {group.kind} has no {min(unknown)!r}")
    values: dict[str, Any] = dict(group.fields)
    return kind(**values)
