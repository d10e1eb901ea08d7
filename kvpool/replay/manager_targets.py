"""Targets over cache managers, all with the three calls that a scheduler makes: look up, allocate, free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvpool.replay.target import EvictionCounter, ReplayTarget
from kvpool.replay.trace import TraceRequest
from kvpool.requests.status import RequestStatus


@dataclass(slots=True)
class ManagedRequest:
    """request: the manager's request, of prompt tokens alone. hits: the manager's blocks of the last lookup."""

    request: Any
    num_prompt_tokens: int
    num_output_tokens: int
    hits: Any = None
    num_hit_tokens: int = 0


class ManagerTarget(ReplayTarget[ManagedRequest]):
    """Serves the trace from a ``KVCacheManager`` with one group of full attention.

    The output's blocks are allocated with the prompt's, as room for tokens to come: they are held and not cached.
    make_request: called with a unique id and the prompt's length in tokens, returns a request for the manager.
    """

    def __init__(
        self, name: str, manager: Any, make_request: Callable[[str, int], Any], num_blocks: int, block_size: int
    ) -> None:
        super().__init__(name, manager.block_pool, num_blocks, block_size)
        self._manager = manager
        self._make_request = make_request

    def prepare(self, request: TraceRequest, hashes: list[bytes]) -> ManagedRequest:
        made = self._make_request(str(request.line), request.input_length)
        made.block_hashes = hashes
        return ManagedRequest(made, request.input_length, request.output_length)

    def find_prefix(self, served: ManagedRequest) -> int:
        manager, request = self._manager, served.request
        start = perf_counter_ns()
        found = manager.get_computed_blocks(request)
        self.manager_ns += perf_counter_ns() - start
        served.hits, served.num_hit_tokens = found[:2]  # vLLM's has a third value
        return served.num_hit_tokens // self._block_size

    def admit(self, served: ManagedRequest) -> bool:
        manager, request, hits, num_hit_tokens = self._manager, served.request, served.hits, served.num_hit_tokens
        num_new_tokens, num_output_tokens = served.num_prompt_tokens - num_hit_tokens, served.num_output_tokens
        start = perf_counter_ns()
        new_blocks = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hits, num_output_tokens)
        self.manager_ns += perf_counter_ns() - start
        return new_blocks is not None

    def block_ids(self, served: ManagedRequest) -> np.ndarray:
        return np.array(self._manager.get_block_ids(served.request.request_id)[0], np.int32)

    def free(self, served: ManagedRequest) -> None:
        manager, request = self._manager, served.request
        start = perf_counter_ns()
        manager.free(request)
        self.manager_ns += perf_counter_ns() - start


class VllmManagerTarget(ManagerTarget):
    """Serves the trace from vLLM's ``KVCacheManager``."""

    def __init__(self, name: str, manager: Any, num_blocks: int, block_size: int) -> None:
        super().__init__(name, manager, PlainRequest, num_blocks, block_size)
        self._evictions = EvictionCounter(num_blocks)

    @property
    def evicted_blocks(self) -> int:
        return self._evictions.num_evicted

    def admit(self, served: ManagedRequest) -> bool:
        is_admitted = super().admit(served)
        if is_admitted:
            num_hits, num_cached = served.num_hit_tokens // self._block_size, len(served.request.block_hashes)
            self._evictions.note_admission(self.block_ids(served), num_hits, num_cached)
        return is_admitted


class PlainRequest:
    """What vLLM's manager reads of a request while events are off, without the tokens and their hasher."""

    __slots__ = (
        "block_hashes",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "request_id",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
    )

    def __init__(self, request_id: str, num_tokens: int) -> None:
        self.request_id = request_id
        self.num_tokens = self.num_prompt_tokens = num_tokens
        self.num_computed_tokens = self.num_in_flight_tokens = self.shared_prefix_boundary = 0
        self.skip_reading_prefix_cache = False
        self.status = RequestStatus.WAITING  # equal to vLLM's
        self.block_hashes: list[bytes] = []
