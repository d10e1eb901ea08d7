"""vLLM's KVCacheManager in the histories of ``manager_histories``."""

from __future__ import annotations

from typing import Any, ClassVar

from manager_histories import Stack
from manager_layouts import Layout, ManagerRequest, make_spec
from pool_histories import OrderedSets


class VllmStack:
    """vLLM's manager with the methods of ``Stack``."""

    name = "vllm"
    options: ClassVar[dict[str, Any]] = {}  # of vLLM's manager, beside what a layout says

    def __init__(self, layout: Layout) -> None:
        import torch
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        groups = [
            kv_cache_interface.KVCacheGroupSpec(
                [f"layer.{i}"], make_spec(layout, group, kv_cache_interface, torch.float32), group[3]
            )
            for i, group in enumerate(layout.groups)
        ]
        config = kv_cache_interface.KVCacheConfig(
            layout.num_blocks, [], groups, prefix_cache_retention_interval=layout.retention_interval
        )
        self.manager = KVCacheManager(
            config,
            layout.max_model_len,
            layout.scheduler_block_size,
            Stack("reference", layout).pool.hash_block_size,
            max_in_flight_tokens=layout.max_in_flight_tokens,
            enable_caching=layout.enable_caching,
            use_eagle=layout.use_eagle,
            num_prefill_lookahead=layout.num_prefill_lookahead,
            log_stats=True,
            enable_kv_cache_events=True,
            watermark=layout.watermark,
            enable_mamba_shared_prefix_checkpoint=layout.shared_prefix_checkpoint,
            **self.options,
        )
        self.pool: Any = self.manager.block_pool
        self.check()

    def find_hit(self, request: ManagerRequest) -> tuple[Any, int, int]:
        return self.manager.get_computed_blocks(request)

    def decode(self, requests: list[ManagerRequest]) -> list[Any]:
        return [self.manager.allocate_slots(request, 1) for request in requests]

    def check(self) -> None:
        if not isinstance(self.pool.cached_block_hashes_by_block, OrderedSets):  # a reset makes a new dict
            self.pool.cached_block_hashes_by_block = OrderedSets(self.pool.cached_block_hashes_by_block)
