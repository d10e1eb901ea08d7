"""The invariants of a scheduler, recomputed from its state and that of its cache manager.

For every request r in ``requests``:

1.  r is in ``running`` or in ``waiting``, not in both, once; nothing else is in either.
2.  r in ``running``: status RUNNING;  r in ``waiting``: WAITING or PREEMPTED, no computed tokens, no blocks.
3.  ``len(running) <= max_num_seqs``, and ``running`` is in the order of service.
4.  r.num_computed_tokens <= r.num_tokens, and in each attention group the block table covers the computed tokens.
5.  r.num_in_flight_tokens == tokens of r in the steps under way.
6.  ref_cnt of a block == block tables that it is in; free blocks == blocks of the pool - 1 - blocks in tables.
7.  the invariants of the pool.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvpool.cache.spec import AttentionSpec
from kvpool.errors import InvariantError
from kvpool.requests.status import RequestStatus

if TYPE_CHECKING:
    from kvpool.scheduler.lifecycle import RequestLifecycle


def check_scheduler(scheduler: RequestLifecycle) -> None:
    """Raises InvariantError with the reason. O(requests + blocks)."""
    _check_queues(scheduler)
    _check_running(scheduler)
    _check_in_flight(scheduler)
    _check_blocks(scheduler)


def _require(is_fulfilled: bool, number: int, reason: str) -> None:
    if not is_fulfilled:
        raise InvariantError(f"scheduler invariant {number}: {reason}")


def _check_queues(scheduler: RequestLifecycle) -> None:
    waiting = list(scheduler.waiting)
    ids = [request.request_id for request in [*scheduler.running, *waiting]]
    _require(sorted(ids) == sorted(scheduler.requests), 1, f"{ids} in queues, {list(scheduler.requests)} in requests")
    for request in waiting:
        name, status, num_computed = repr(request.request_id), request.status, request.num_computed_tokens
        is_idle = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and num_computed == 0
        _require(is_idle, 2, f"{name} waits: {status.name}, {num_computed} tokens computed")
        block_ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        _require(not any(block_ids), 2, f"{name} waits with blocks {block_ids}")


def _check_running(scheduler: RequestLifecycle) -> None:
    running, manager = scheduler.running, scheduler.kv_cache_manager
    _require(len(running) <= scheduler.config.max_num_seqs, 3, f"{len(running)} requests run")
    _require(running == sorted(running, key=scheduler.order_of_service), 3, "running is out of order")
    specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    for request in running:
        name, num_computed = repr(request.request_id), request.num_computed_tokens
        _require(request.status is RequestStatus.RUNNING, 2, f"{name} runs: {request.status.name}")
        _require(num_computed <= request.num_tokens, 4, f"{name}: {num_computed} of {request.num_tokens} computed")
        for table, spec in zip(manager.get_block_ids(request.request_id), specs):
            is_covered = len(table) * spec.block_size >= num_computed or not isinstance(spec, AttentionSpec)
            _require(is_covered, 4, f"{name}: {num_computed} tokens in {len(table)} blocks")


def _check_in_flight(scheduler: RequestLifecycle) -> None:
    in_flight: Counter[int] = Counter()
    for under_way in scheduler.steps_under_way:
        for request, num_tokens in zip(under_way.requests, under_way.num_tokens):
            in_flight[id(request)] += num_tokens
    for request in scheduler.requests.values():
        count, expected = request.num_in_flight_tokens, in_flight[id(request)]
        _require(count == expected, 5, f"{request.request_id!r}: {count} tokens in flight, {expected} in steps")


def _check_blocks(scheduler: RequestLifecycle) -> None:
    wrong = scheduler.kv_cache_manager.find_miscounted_block(request.request_id for request in scheduler.running)
    _require(wrong is None, 6, wrong or "")
