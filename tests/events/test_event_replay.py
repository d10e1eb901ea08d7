"""What is remembered for replays, and how requests for it are served: in pieces, in turn, in a share of the time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from kvpool.events import replay
from kvpool.events.replay import (
    END_OF_REPLAY,
    MAX_WAITING_REQUESTS,
    MAX_WAITING_REQUESTS_PER_CLIENT,
    STALL_SECONDS,
    RememberedBatches,
    ReplayServer,
)

zmq = pytest.importorskip("zmq")


def remember(numbers: Iterable[int], max_batches: int = 1000, max_bytes: int = 10**6, size: int = 1) -> Any:
    remembered = RememberedBatches(max_batches, max_bytes)
    for number in numbers:
        remembered.append(number, bytes(size))
    return remembered


def numbers_of(remembered: RememberedBatches) -> list[int]:
    return [remembered.at(place)[0] for place in range(remembered.first_place, remembered.end_place)]


def test_batches_and_bytes_are_bounded() -> None:
    assert numbers_of(remember(range(10), max_batches=3)) == [7, 8, 9]
    remembered = remember(range(10), max_bytes=40, size=10)
    assert numbers_of(remembered) == [6, 7, 8, 9] and remembered.num_bytes == 40
    remembered.append(10, bytes(25))
    assert numbers_of(remembered) == [9, 10] and remembered.num_bytes == 35
    remembered.append(11, bytes(41))
    assert numbers_of(remembered) == [] and remembered.num_bytes == 0
    assert numbers_of(remember(range(10), max_batches=0)) == []


def test_the_first_batch_of_a_replay_is_found() -> None:
    remembered = remember([0, 3, 4, 9, 20], max_batches=4)
    for wanted, found in ((0, 3), (3, 3), (4, 4), (5, 9), (9, 9), (10, 20), (20, 20)):
        assert remembered.at(remembered.find(wanted))[0] == found
    assert remembered.find(21) == remembered.find(2**64 - 1) == remembered.end_place


class Router:
    """A ROUTER as the server sees it, with room for so many messages of each client."""

    def __init__(self, room: int = 10**9) -> None:
        self.requests: deque[tuple[bytes, ...]] = deque()
        self.sent: list[tuple[bytes, ...]] = []
        self.room = room
        self.gone: set[bytes] = set()
        self.counts: dict[bytes, int] = {}

    def ask(self, client: bytes, first: int) -> None:
        self.requests.append((client, b"", first.to_bytes(8, "big")))

    def recv_multipart(self, flags: int) -> tuple[bytes, ...]:
        assert flags == zmq.NOBLOCK
        if not self.requests:
            raise zmq.Again
        return self.requests.popleft()

    def send_multipart(self, message: tuple[bytes, ...], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if message[0] in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.counts.get(message[0], 0) >= self.room:
            raise zmq.Again
        self.counts[message[0]] = self.counts.get(message[0], 0) + 1
        self.sent.append(message)

    def fetched(self, client: bytes) -> list[int | None]:
        """Numbers that a client got, None for an end."""
        frames = [message for message in self.sent if message[0] == client]
        return [None if number == END_OF_REPLAY else int.from_bytes(number, "big") for _, _, _, number, _ in frames]


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def server(router: Router) -> ReplayServer:
    return ReplayServer(zmq, router, remember(range(200)), b"t")


def work(server: ReplayServer, seconds: float = 60.0) -> None:
    """Until there is nothing to do."""
    end = time.monotonic() + seconds
    server.work()
    while (wait_ms := server.next_work_ms()) is not None:
        assert time.monotonic() < end
        time.sleep(wait_ms / 1000)
        server.work()


def test_answers_of_one_client_come_one_after_the_other(router: Router, server: ReplayServer) -> None:
    router.ask(b"a", 50)
    router.ask(b"b", 150)
    router.ask(b"a", 190)
    work(server)
    assert router.fetched(b"a") == [*range(50, 200), None, *range(190, 200), None]
    assert router.fetched(b"b") == [*range(150, 200), None]
    assert server.num_refused == server.num_abandoned == 0


def test_clients_take_turns(router: Router, server: ReplayServer) -> None:
    """Who asked for little does not wait until the other has all."""
    router.ask(b"a", 0)
    router.ask(b"b", 199)
    work(server)
    clients = [message[0] for message in router.sent]
    assert clients.index(b"b") < clients.count(b"a") / 2


def test_work_takes_a_share_of_the_time(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a turn the server rests three times as long, whatever comes; one turn is a few milliseconds."""
    cost, clock = 0.0001, [0.0]
    monkeypatch.setattr(replay.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(replay.time, "monotonic", lambda: clock[0])
    server = ReplayServer(zmq, router, remember(range(1000)), b"t")
    send, receive = router.send_multipart, router.recv_multipart

    def send_slowly(*arguments: Any) -> None:
        clock[0] += cost
        send(*arguments)

    def receive_slowly(*arguments: Any) -> Any:
        clock[0] += cost
        return receive(*arguments)

    monkeypatch.setattr(router, "send_multipart", send_slowly)
    monkeypatch.setattr(router, "recv_multipart", receive_slowly)
    clock[0], worked, turns = 1.0, 0.0, 0
    while clock[0] < 11.0:
        for client in range(20):
            router.ask(b"%d" % client, 0)
        before = clock[0]
        server.work()
        assert clock[0] - before < 0.02, "a turn is short"
        worked += clock[0] - before
        turns += clock[0] > before
        before = clock[0]
        server.work()
        assert clock[0] == before and not server.reads_requests, "then it rests"
        clock[0] += (server.next_work_ms() or 1) / 1000
    assert turns > 100 and worked < 0.27 * 10.0
    assert server.num_refused > 0


def test_requests_that_wait_are_bounded(router: Router) -> None:
    server = ReplayServer(zmq, router, remember(range(20)), b"t")
    router.room = 0
    for client in range(2 * MAX_WAITING_REQUESTS):
        router.ask(b"%d" % client, 0)
    for _ in range(20):
        server.work()
        time.sleep(max(server.next_work_ms() or 0, 1) / 1000)
    assert not router.requests and server.num_refused == MAX_WAITING_REQUESTS
    router.room = 10**9
    work(server)
    assert all(router.fetched(b"%d" % client) == [*range(20), None] for client in range(MAX_WAITING_REQUESTS))
    router.ask(b"late", 0)
    work(server)
    assert router.fetched(b"late") == [*range(20), None]


def test_one_client_has_few_requests_open(router: Router, server: ReplayServer) -> None:
    for _ in range(50):
        router.ask(b"greedy", 0)
    router.ask(b"modest", 0)
    work(server)
    assert router.fetched(b"greedy") == MAX_WAITING_REQUESTS_PER_CLIENT * [*range(200), None]
    assert router.fetched(b"modest") == [*range(200), None]
    assert server.num_refused == 50 - MAX_WAITING_REQUESTS_PER_CLIENT


def test_who_fetches_slowly_gets_everything(router: Router, server: ReplayServer) -> None:
    router.room = 10
    router.ask(b"slow", 0)
    end = time.monotonic() + 20.0
    while router.fetched(b"slow")[-1:] != [None]:
        server.work()
        router.counts.clear()
        time.sleep(0.001)
        assert time.monotonic() < end
    assert router.fetched(b"slow") == [*range(200), None]
    assert server.next_work_ms() in (None, 0, 1)


def test_who_fetches_nothing_loses_his_answer(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(replay.time, "monotonic", lambda: clock[0])
    server = ReplayServer(zmq, router, remember(range(200)), b"t")
    router.room = 40
    for _ in range(MAX_WAITING_REQUESTS_PER_CLIENT):
        router.ask(b"stuck", 0)
    while clock[0] < STALL_SECONDS - 1:
        server.work()
        clock[0] += 0.1
    assert server.num_abandoned == 0 and server.next_work_ms() is not None
    while clock[0] < STALL_SECONDS + 1:
        server.work()
        clock[0] += 0.1
    assert server.num_abandoned == 1
    assert router.fetched(b"stuck") == list(range(40))
    server.work()
    assert server.next_work_ms() is None, "nothing is kept of it"


def test_who_is_gone_loses_his_answer(router: Router, server: ReplayServer) -> None:
    router.ask(b"gone", 0)
    router.ask(b"here", 0)
    router.gone = {b"gone"}
    work(server)
    assert server.num_abandoned == 1
    assert router.fetched(b"here") == [*range(200), None]


def test_what_is_forgotten_in_the_meantime_is_a_gap(router: Router) -> None:
    remembered = remember(range(100), max_batches=100)
    server = ReplayServer(zmq, router, remembered, b"t")
    router.room = 10
    router.ask(b"slow", 0)
    server.work()
    for number in range(100, 150):
        remembered.append(number, b"x")
    router.room = 10**9
    work(server)
    assert router.fetched(b"slow") == [*range(10), *range(50, 100), None]


def test_an_answer_ends_although_batches_go_on(router: Router) -> None:
    """It is what had been published when it was asked for; the rest comes by the stream."""
    remembered = remember(range(100))
    server = ReplayServer(zmq, router, remembered, b"t")
    router.room = 10
    router.ask(b"a", 0)
    server.work()
    number = 100
    end = time.monotonic() + 20.0
    while router.fetched(b"a")[-1:] != [None]:
        for _ in range(20):
            remembered.append(number, b"x")
            number += 1
        server.work()
        router.counts.clear()
        time.sleep(0.001)
        assert time.monotonic() < end
    assert router.fetched(b"a") == [*range(100), None]
