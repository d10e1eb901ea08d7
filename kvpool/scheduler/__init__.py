"""Continuous batching over a KV cache manager: see ``kvpool.scheduler.scheduler`` for the rules and a loop."""

from __future__ import annotations

from kvpool.scheduler.admission import RequestTooLargeError
from kvpool.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvpool.scheduler.output import CachedRequestData, NewRequestData, RequestOutput, SchedulerOutput, StepResult
from kvpool.scheduler.queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue, create_request_queue
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.stats import SchedulerStats

__all__ = [
    "CachedRequestData",
    "FCFSRequestQueue",
    "NewRequestData",
    "PriorityRequestQueue",
    "RequestOutput",
    "RequestQueue",
    "RequestTooLargeError",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "SchedulingPolicy",
    "StepResult",
    "create_request_queue",
]
