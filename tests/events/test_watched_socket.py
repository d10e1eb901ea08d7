"""The replay socket is replaced when it keeps too much that nobody can read: at the same port, which is never free."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_attackers import SHORT_MORE, frame, shake_hands

from kvpool.events.publisher import ZmqEventPublisher
from kvpool.events.wire import AllBlocksCleared, KVEventBatch
from kvpool.network import watched_socket
from kvpool.network.curve import CurveKeys, make_key_folder
from kvpool.network.watched_socket import WatchedSocket

zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells on Linux")

PATIENCE_SECONDS = 10.0
END = (-1).to_bytes(8, "big", signed=True)


def ask(dealer: Any, first: int = 0, patience_seconds: float = PATIENCE_SECONDS) -> list[int] | None:
    """The numbers of a replay; None if no answer comes."""
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    numbers: list[int] = []
    while dealer.poll(int(1000 * patience_seconds)):
        number = dealer.recv_multipart()[2]
        if number == END:
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    return None


def ask_again(dealer: Any) -> list[int]:
    """As a client has to, whose connection may be cut."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (numbers := ask(dealer, 0, 0.5)) is None:
        assert time.monotonic() < end
    return numbers


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """With small limits, and with keys where a test says so."""
    monkeypatch.setattr(watched_socket, "TOTAL_BURST_BYTES", 16_000)
    monkeypatch.setattr(watched_socket, "TOTAL_BYTES_PER_SECOND", 200_000)
    keys = None
    if getattr(request, "param", None):
        keys = tmp_path / "keys"
        make_key_folder(keys)
    with ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", max_peers=8, keys=keys) as made:
        for _ in range(3):
            made.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
        yield made


@contextlib.contextmanager
def client(publisher: ZmqEventPublisher) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        keys = publisher.get_publisher_config().keys
        if keys is not None:
            CurveKeys.load_client(keys).protect_client(dealer)
        dealer.connect(publisher.replay_endpoint)
        yield dealer


def replay_socket(publisher: ZmqEventPublisher) -> Any:
    return publisher._sockets._replay.socket  # type: ignore[union-attr]


def wait_for_another(publisher: ZmqEventPublisher, old: Any) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while replay_socket(publisher) is old:
        assert time.monotonic() < end, "it was not replaced"
        time.sleep(0.01)


def test_what_namesakes_say_is_given_back(publisher: Any) -> None:
    """ZeroMQ takes no message of a peer that names itself as another, and keeps all."""
    old = replay_socket(publisher)
    with shake_hands(publisher.replay_endpoint, b"DEALER", b"x"):
        for _ in range(20):
            with contextlib.suppress(OSError), shake_hands(publisher.replay_endpoint, b"DEALER", b"x") as namesake:
                namesake.sendall(500 * frame(b""))
                time.sleep(0.02)
            if replay_socket(publisher) is not old:
                break
        wait_for_another(publisher, old)
    assert old.closed
    with client(publisher) as dealer:
        assert ask_again(dealer) == [0, 1, 2]


def test_requests_that_are_read_are_no_reason(publisher: Any) -> None:
    """However many there are, and bad ones too."""
    old = replay_socket(publisher)
    num_clients = 20
    for _ in range(num_clients):
        with client(publisher) as dealer:
            dealer.send_multipart([b"", bytes(900)])
            for _ in range(20):
                assert ask(dealer, 2) == [2]
    server, replay = publisher._sockets._replay_server, publisher._sockets._replay
    end = time.monotonic() + PATIENCE_SECONDS
    while replay._limits.num_peers:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(1.2)
    assert replay_socket(publisher) is old and publisher.refused_requests == num_clients
    explained = replay.wire_bytes(server.num_bytes_read, server.num_frames_read)
    assert replay.num_received_bytes > num_clients * 900
    assert 0 < replay.num_received_bytes - explained < 150 * num_clients, "the handshakes, and longer headers"


@pytest.mark.parametrize("publisher", [False, True], indirect=True, ids=["open", "keys"])
def test_a_client_that_is_connected_goes_on_with_the_new_socket(publisher: Any) -> None:
    renewed: WatchedSocket = publisher._sockets._replay
    with client(publisher) as dealer:
        assert ask(dealer) == [0, 1, 2]
        before = len(os.listdir("/proc/self/fd"))
        num_renewals = 5
        for _ in range(num_renewals):
            old = replay_socket(publisher)
            publisher._sockets._num_explained_bytes -= 10**6  # as if so much were kept
            publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
            wait_for_another(publisher, old)
            assert ask_again(dealer)[:3] == [0, 1, 2]
        end = time.monotonic() + PATIENCE_SECONDS
        while len(os.listdir("/proc/self/fd")) >= before + num_renewals:  # other tests' threads close and open some
            assert time.monotonic() < end, "descriptors stay open"
            time.sleep(0.01)
    assert renewed is publisher._sockets._replay


def test_the_port_is_free_after_a_shutdown(publisher: Any) -> None:
    old = replay_socket(publisher)
    publisher._sockets._num_explained_bytes -= 10**6
    publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    wait_for_another(publisher, old)
    publisher.shutdown()
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            pass


def test_what_was_counted_before_stays_counted(publisher: Any) -> None:
    with contextlib.suppress(OSError), shake_hands(publisher.replay_endpoint, b"DEALER") as greedy:
        greedy.sendall(20 * frame(bytes(250), SHORT_MORE))
        greedy.recv(1)
    end = time.monotonic() + PATIENCE_SECONDS
    while publisher.refused_peers == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    refused = publisher.refused_peers
    old = replay_socket(publisher)
    publisher._sockets._num_explained_bytes -= 10**6
    publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    wait_for_another(publisher, old)
    assert publisher.refused_peers == refused


def test_where_no_descriptor_is_left_the_old_one_stays(publisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = replay_socket(publisher)
    listener = publisher._sockets._replay._limits.listener

    def fail() -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr(listener, "duplicate", fail)
    publisher._sockets._num_explained_bytes -= 10**6
    publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    time.sleep(0.2)
    with client(publisher) as dealer:
        assert ask(dealer)[:3] == [0, 1, 2]  # type: ignore[index]
    assert replay_socket(publisher) is old
    monkeypatch.undo()
    end = time.monotonic() + PATIENCE_SECONDS
    while replay_socket(publisher) is old:
        assert time.monotonic() < end
        publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
        time.sleep(0.1)
