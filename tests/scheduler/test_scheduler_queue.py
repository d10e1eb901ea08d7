"""Waiting queues: order of service, and leaving from anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.scheduler import FCFSRequestQueue, PriorityRequestQueue, SchedulingPolicy, create_request_queue


class Waiting:
    def __init__(self, request_id: str, priority: int = 0, arrival_time: float = 0.0) -> None:
        self.request_id, self.priority, self.arrival_time = request_id, priority, arrival_time


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def drain(queue: Any) -> list[str]:
    popped = []
    while queue:
        assert queue.peek_request() is queue.peek_request()
        popped.append(queue.pop_request().request_id)
    return popped


@pytest.fixture(params=SchedulingPolicy)
def queue(request: pytest.FixtureRequest) -> Any:
    return create_request_queue(request.param)


def test_policies() -> None:
    assert isinstance(create_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(create_request_queue(SchedulingPolicy.PRIORITY), PriorityRequestQueue)


def test_first_come_first_served() -> None:
    queue = FCFSRequestQueue()
    for request_id in "bac":
        queue.add_request(Waiting(request_id, priority=ord(request_id)))
    assert ids(queue) == ["b", "a", "c"]
    assert drain(queue) == ["b", "a", "c"]


def test_back_to_the_front() -> None:
    queue = FCFSRequestQueue()
    queue.add_request(Waiting("a"))
    queue.prepend_request(Waiting("late"))
    queue.prepend_request(Waiting("early"))
    assert drain(queue) == ["early", "late", "a"]


def test_priority_then_arrival_then_id() -> None:
    queue = PriorityRequestQueue()
    for request in [Waiting("d", 1, 1.0), Waiting("c", 0, 3.0), Waiting("b", 0, 3.0), Waiting("a", 0, 2.0)]:
        queue.add_request(request)
    queue.prepend_request(Waiting("z", -1, 9.0))
    queue.prepend_request(Waiting("y", 1, 0.5))
    assert ids(queue) == ["z", "a", "b", "c", "y", "d"]
    assert drain(queue) == ["z", "a", "b", "c", "y", "d"]


def test_empty(queue: Any) -> None:
    assert not queue
    assert len(queue) == 0
    assert list(queue) == []
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_membership_is_identity(queue: Any) -> None:
    request = Waiting("a")
    queue.add_request(request)
    assert request in queue
    assert Waiting("a") not in queue
    assert "a" not in queue
    with pytest.raises(InvalidArgumentError):
        queue.remove_request(Waiting("a"))
    queue.remove_request(request)
    assert request not in queue
    with pytest.raises(InvalidArgumentError):
        queue.remove_request(request)


def test_an_id_is_queued_once(queue: Any) -> None:
    queue.add_request(Waiting("a"))
    for call in (queue.add_request, queue.prepend_request):
        with pytest.raises(InvalidArgumentError):
            call(Waiting("a"))
    assert ids(queue) == ["a"]


def test_an_id_comes_back_with_another_place() -> None:
    queue = PriorityRequestQueue()
    first, second = Waiting("a", priority=0), Waiting("a", priority=5)
    queue.add_request(first)
    queue.add_request(Waiting("b", priority=3))
    queue.remove_request(first)
    queue.add_request(second)
    assert ids(queue) == ["b", "a"]
    assert drain(queue) == ["b", "a"]


def test_removal_leaves_little_behind() -> None:
    queue = PriorityRequestQueue()
    stay = Waiting("stay", priority=1_000_000)
    queue.add_request(stay)
    for number in range(2_000):
        request = Waiting(str(number), priority=number)
        queue.add_request(request)
        queue.remove_request(request)
        assert len(queue._heap) < 50
    assert drain(queue) == ["stay"]


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(queue: Any, seed: int) -> None:
    """Both queues against a sorted list."""
    rng = random.Random(seed)
    is_fcfs = isinstance(queue, FCFSRequestQueue)
    model: list[Waiting] = []

    def put(request: Waiting, at_front: bool) -> None:
        model.insert(0 if at_front else len(model), request)
        if not is_fcfs:
            model.sort(key=lambda r: (r.priority, r.arrival_time, r.request_id))

    for number in range(400):
        action = rng.choice(["add", "add", "prepend", "pop", "remove"])
        request = Waiting(f"r{number}", rng.randrange(3), float(rng.randrange(5)))
        if action == "add":
            queue.add_request(request)
            put(request, at_front=False)
        elif action == "prepend":
            queue.prepend_request(request)
            put(request, at_front=True)
        elif model and action == "pop":
            assert queue.pop_request() is model.pop(0)
        elif model:
            victim = model.pop(rng.randrange(len(model)))
            queue.remove_request(victim)
            assert victim not in queue
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
        if number % 10 == 0:
            assert list(queue) == model
    assert drain(queue) == ids(model)
