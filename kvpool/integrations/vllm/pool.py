"""The level ``pool``: vLLM's block pool, blocks, free queue and prefix map on native state.

vLLM's names lead to kvpool's classes, the pool's with vLLM's own as a further base: it is one for ``isinstance``, and
what kvpool does not define comes from there and works on the native state. There is no second copy of anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import vllm.v1.core.block_pool as vllm_pool
import vllm.v1.core.kv_cache_utils as vllm_blocks
from vllm.distributed import kv_events as vllm_events

from kvpool import backend
from kvpool.common.environment import read_choice
from kvpool.events import wire
from kvpool.integrations.vllm.announcement import announce_waiting
from kvpool.integrations.vllm.hooks import Hooks
from kvpool.integrations.vllm.lookahead import LookaheadEvents, with_lookahead
from kvpool.pool.event_stream import EventFormat

TARGETS = (
    "vllm.v1.core.block_pool.BlockPool",
    "vllm.v1.core.block_pool.BlockHashToBlockMap",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock",
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue",
    "vllm.v1.core.kv_cache_utils.BlockHashListWithBlockSize",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
    "vllm.v1.core.kv_cache_utils.generate_lookahead_block_hash_extra_keys",
    "vllm.v1.core.kv_cache_utils.get_block_hash",
    "vllm.v1.core.kv_cache_utils.get_group_id",
    "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash",
    "vllm.v1.core.kv_cache_utils.resolve_block_hashes",
    "vllm.v1.core.kv_cache_utils.to_event_extra_keys",
    "vllm.v1.core.kv_cache_metrics.KVCacheMetricsCollector",
    "vllm.v1.hisparse.block_pool.SharedEventQueueBlockPool",
    "vllm.distributed.kv_events.AllBlocksCleared",
    "vllm.distributed.kv_events.BlockRemoved",
    "vllm.distributed.kv_events.BlockStored",
)

INVALID_FREE_VARIABLE = "KVPOOL_ON_INVALID_FREE"
# vLLM's own classes, as they were before anything was replaced.
VllmBlockPool = vllm_pool.BlockPool
VllmBlockHashToBlockMap = vllm_pool.BlockHashToBlockMap
VllmKVCacheBlock = vllm_blocks.KVCacheBlock
VllmFreeKVCacheBlockQueue = vllm_blocks.FreeKVCacheBlockQueue
# The arguments behind the fifth are not in the same places in all versions.
_POOL_SIGNATURE = inspect.signature(VllmBlockPool)

# Modules of vLLM that subclass the pool while they are imported: made anew over the native one.
_SUBCLASSES = (("vllm.v1.hisparse.block_pool", "SharedEventQueueBlockPool"),)


def on_invalid_free() -> str:
    """What a pool does about a double free: ``KVPOOL_ON_INVALID_FREE``, ``raise`` (the default) or ``warn``.

    Raises:
        InvalidArgumentError: the variable has another value.
    """
    return read_choice(INVALID_FREE_VARIABLE, ("raise", "warn"))


def _with_known_fields(event: Any) -> Callable[..., Any]:
    """The event's class, or where it lacks some of kvpool's fields (an older vLLM) one that leaves those out."""
    known = frozenset(event.__struct_fields__)
    wanted = frozenset(getattr(wire, event.__name__).__struct_fields__)
    if wanted <= known:
        make: Callable[..., Any] = event
        return make
    return lambda **fields: event(**{name: value for name, value in fields.items() if name in known})


_EVENT_FORMAT = EventFormat(
    stored=_with_known_fields(vllm_events.BlockStored),
    removed=_with_known_fields(vllm_events.BlockRemoved),
    cleared=vllm_events.AllBlocksCleared,
    hash_converter=lambda: vllm_blocks.maybe_convert_block_hash,
    # vLLM may know keys that kvpool does not: its own functions say which there are.
    has_extra_keys=lambda request: True,
    extra_keys=vllm_blocks.generate_block_hash_extra_keys,
    to_event_extra_keys=vllm_blocks.to_event_extra_keys,
)


class BlockPool(LookaheadEvents, backend.BlockPool, VllmBlockPool):  # type: ignore[misc,valid-type]
    """kvpool's pool under vLLM's name: same calls, same events of vLLM's own classes, same order of reuse.

    Its arguments are those of the vLLM at hand, in that one's order.

    What corrupts vLLM's pool (a double free, a dirty block) is refused before anything changes, or with
    ``KVPOOL_ON_INVALID_FREE=warn`` skipped, logged with the block and counted in ``stats.invalid_frees``.
    """

    event_format = _EVENT_FORMAT

    def __init__(self, *arguments: Any, **named: Any) -> None:
        bound = _POOL_SIGNATURE.bind(*arguments, **named)
        bound.apply_defaults()
        options = bound.arguments
        self.num_hash_lookahead_tokens = options.pop("num_hash_lookahead_tokens", 0)
        super().__init__(**options, on_invalid_free=on_invalid_free())
        if self.num_hash_lookahead_tokens:
            self.event_format = with_lookahead(_EVENT_FORMAT, self.num_hash_lookahead_tokens)
        self._accept_by_hand()
        announce_waiting()

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        beyond = [block_id for block_id in block_ids if block_id >= self.num_gpu_blocks]
        if beyond:
            # An id from a worker: vLLM's message names the connector. It asserts, so the check below stays as well.
            VllmBlockPool.evict_blocks(self, beyond)
        super().evict_blocks(block_ids)


# Whoever asks how a pool is made is told what this vLLM's own pool takes.
BlockPool.__init__.__signature__ = inspect.signature(VllmBlockPool.__init__)  # type: ignore[attr-defined]


def install(hooks: Hooks) -> None:
    """Put the native classes in the place of vLLM's, in every module that has them."""
    on_invalid_free()
    subclasses = [(sys.modules[module], name) for module, name in _SUBCLASSES if _can_import(module)]
    for stock, new, name in (
        (VllmKVCacheBlock, backend.KVCacheBlock, "KVCacheBlock"),
        (VllmFreeKVCacheBlockQueue, backend.FreeKVCacheBlockQueue, "FreeKVCacheBlockQueue"),
        (VllmBlockHashToBlockMap, backend.BlockHashToBlockMap, "BlockHashToBlockMap"),
        (VllmBlockPool, BlockPool, "BlockPool"),
    ):
        hooks.replace_in_modules(stock, new, [name])
    for module, name in subclasses:
        hooks.replace_in_modules(getattr(module, name), getattr(_made_anew(module), name), [name])


def _can_import(module: str) -> bool:
    """Whether this vLLM has the module; imports it."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def _made_anew(module: ModuleType) -> ModuleType:
    """The module run once more, beside the imported one, so that its classes have the bases of now."""
    spec = importlib.util.find_spec(module.__name__)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{module.__name__} has no source to be run again")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again
