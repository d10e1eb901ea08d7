"""Connections are counted and weighed by what the kernel tells of them; whose is whose is never mistaken."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from event_attackers import GREETING, connect, frame, shake_hands

from kvpool.events.sockets import EventSockets
from kvpool.network.byte_budget import ByteBudget
from kvpool.network.curve import ClientGate, CurveKeys, make_key_folder
from kvpool.network.peer_limits import PeerLimits

zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells on Linux")

PATIENCE_SECONDS = 10.0


class Listener:
    """A PUB socket with limits, looked at by hand."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", **limits: Any) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PUB)
        self.limits = PeerLimits(self.socket, **limits)
        self.socket.bind(address)
        self.endpoint = self.socket.last_endpoint.rstrip(b"\0").decode()

    def look_until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_true():
            assert time.monotonic() < end
            self.limits.look()
            time.sleep(0.005)

    def look_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.limits.look()
            time.sleep(0.005)

    def close(self) -> None:
        self.limits.close()
        if self.limits.listener is not None:
            self.limits.listener.close()
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def make(**parameters: Any) -> Listener:
        listeners.append(Listener(**parameters))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


def is_cut(connection: socket.socket) -> bool:
    """Whether the other side has ended a connection."""
    connection.settimeout(PATIENCE_SECONDS)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return True
    except ConnectionError:
        pass
    return False


def test_connections_come_and_go(listen: Any) -> None:
    listener = listen(max_peers=3)
    for _ in range(10):
        with connect(listener.endpoint), shake_hands(listener.endpoint, b"SUB"):
            listener.look_until(lambda: listener.limits.num_peers == 2)
        listener.look_until(lambda: listener.limits.num_peers == 0)
    assert listener.limits.num_cut == 0
    assert listener.limits.num_failed_handshakes == 10


def test_of_too_many_the_oldest_silent_one_goes_first(listen: Any) -> None:
    listener = listen(max_peers=3)
    talker = shake_hands(listener.endpoint, b"SUB")
    listener.look_until(lambda: listener.limits.num_peers == 1)
    silent = [connect(listener.endpoint) for _ in range(2)]
    listener.look_until(lambda: listener.limits.num_peers == 3)
    late = shake_hands(listener.endpoint, b"SUB")
    listener.look_until(lambda: listener.limits.num_cut == 1)
    assert is_cut(silent[0])
    later = shake_hands(listener.endpoint, b"SUB")
    listener.look_until(lambda: listener.limits.num_cut == 2)
    assert is_cut(silent[1])
    latest = shake_hands(listener.endpoint, b"SUB")
    listener.look_until(lambda: listener.limits.num_cut == 3)
    assert is_cut(latest), "all others have spoken, and were there before"
    assert all(is_open(each) for each in (talker, late, later))
    for each in (talker, *silent, late, later, latest):
        each.close()


def test_over_a_socket_file_the_newest_goes(listen: Any, tmp_path: Path) -> None:
    """Nothing is known of what was sent there."""
    listener = listen(address=f"ipc://{tmp_path}/s", max_peers=2)
    peers = []
    for _ in range(3):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(f"{tmp_path}/s")
        peers.append(peer)
        listener.look_until(lambda: listener.limits.num_peers + listener.limits.num_cut == len(peers))
    assert listener.limits.num_cut == 1
    assert is_cut(peers[2]) and is_open(peers[0]) and is_open(peers[1])
    for peer in peers:
        peer.close()


def test_what_a_peer_sends_is_bounded_by_burst_and_rate(listen: Any) -> None:
    listener = listen(burst_bytes=5000, bytes_per_second=50_000)
    subscription = frame(b"\x01" + bytes(97))
    assert len(subscription) == 100
    with shake_hands(listener.endpoint, b"SUB") as modest, shake_hands(listener.endpoint, b"SUB") as greedy:
        for _ in range(20):  # 20,000 bytes in a second: four bursts, less than the rate
            modest.sendall(10 * subscription)
            listener.look_for(0.05)
        assert listener.limits.num_cut == 0
        greedy.sendall(100 * subscription)
        listener.look_until(lambda: listener.limits.num_cut == 1)
        assert is_cut(greedy) and is_open(modest)


SUBSCRIPTION = frame(b"\x01" + bytes(97))


def test_what_all_send_is_bounded_and_newcomers_wait(listen: Any) -> None:
    """Who is modest stays; who comes is let in as soon as the budget allows."""
    budget = ByteBudget(2500, 1500)
    listener = listen(max_peers=4, burst_bytes=1000, bytes_per_second=10, budget=budget)
    listener.limits.find_place()
    with shake_hands(listener.endpoint, b"SUB") as friend, shake_hands(listener.endpoint, b"SUB") as busy:
        busy.sendall(6 * SUBSCRIPTION)
        listener.look_for(0.05)
        assert listener.limits.num_cut == 0
        for number in range(1, 3):
            with shake_hands(listener.endpoint, b"SUB") as greedy:
                greedy.sendall(20 * SUBSCRIPTION)
                listener.look_until(lambda number=number: listener.limits.num_cut >= number)  # type: ignore[misc]
            if budget.is_spent:
                break
        listener.look_until(lambda: budget.is_spent)
        listener.limits.look()
        assert listener.limits.listener.is_shut
        assert is_cut(busy), "it sent less than a burst, but now that is too much"
        host, port = listener.endpoint.removeprefix("tcp://").split(":")
        with socket.socket() as newcomer:
            newcomer.settimeout(0.2)
            with pytest.raises(TimeoutError):
                newcomer.connect((host, int(port)))
        assert is_open(friend)
        listener.look_until(lambda: not budget.is_spent)
        listener.look_until(lambda: not listener.limits.listener.is_shut)
        with shake_hands(listener.endpoint, b"SUB") as newcomer:
            assert is_open(newcomer)


def test_newcomers_are_let_in_again_though_nobody_is_left(listen: Any) -> None:
    """The thread that looks does not sleep while they wait."""
    budget = ByteBudget(2000, 4000)
    listener = listen(max_peers=4, burst_bytes=1000, budget=budget)
    listener.limits.start()
    end = time.monotonic() + PATIENCE_SECONDS
    while not budget.is_spent:
        assert time.monotonic() < end
        with contextlib.suppress(OSError), shake_hands(listener.endpoint, b"SUB") as greedy:
            greedy.sendall(20 * SUBSCRIPTION)
            is_cut(greedy)
    while listener.limits.num_peers or budget.is_spent:
        assert time.monotonic() < end
        time.sleep(0.005)
    with shake_hands(listener.endpoint, b"SUB") as newcomer:
        assert is_open(newcomer)


def test_what_a_connection_sent_last_is_counted_when_it_is_gone(listen: Any) -> None:
    budget = ByteBudget(10**6, 1)
    listener = listen(budget=budget)
    listener.limits.find_place()
    ready = 2 + len(b"\x05READY\x0bSocket-Type") + 4 + len(b"SUB")
    with shake_hands(listener.endpoint, b"SUB") as peer:
        listener.look_until(lambda: budget.num_bytes == len(GREETING) + ready)
        peer.sendall(5 * SUBSCRIPTION)
    time.sleep(0.2)
    listener.look_until(lambda: listener.limits.num_peers == 0)
    assert budget.num_bytes == len(GREETING) + ready + 5 * len(SUBSCRIPTION) + 1, "TCP counts the end as a byte"


def test_looking_at_a_connection_leaves_it_as_it_is(listen: Any) -> None:
    """A connection that waits would stop ZeroMQ's thread."""
    budget = ByteBudget(10**6, 1)
    listener = listen(budget=budget)
    listener.limits.find_place()
    with shake_hands(listener.endpoint, b"SUB") as peer:
        listener.look_until(lambda: budget.num_bytes > 0)
        (fd,) = listener.limits._peers
        assert not os.get_blocking(fd)
        peer.sendall(SUBSCRIPTION)
        listener.look_for(0.1)
        assert not os.get_blocking(fd)


def test_a_connection_that_came_and_went_unseen_counts_as_a_burst(listen: Any) -> None:
    budget = ByteBudget(10**6, 1)
    listener = listen(budget=budget, burst_bytes=777)
    listener.limits.find_place()
    with shake_hands(listener.endpoint, b"SUB"):
        pass
    time.sleep(0.2)
    listener.look_until(lambda: budget.num_bytes > 0)
    assert budget.num_bytes == 777


def test_who_says_nothing_counts_little(listen: Any) -> None:
    """Nothing if it is cut; what it may have said just then if it goes by itself, after a second an eighth of that."""
    budget = ByteBudget(10**6, 1)
    listener = listen(budget=budget, max_peers=1, burst_bytes=800)
    listener.limits.find_place()
    with contextlib.ExitStack() as stack:
        for number in range(20):
            stack.enter_context(connect(listener.endpoint))
            listener.look_until(lambda number=number: listener.limits.num_cut == number)  # type: ignore[misc]
        assert budget.num_bytes == 0
        listener.look_for(1.2)
    listener.look_until(lambda: listener.limits.num_peers == 0)
    assert budget.num_bytes == 100
    with connect(listener.endpoint):
        listener.look_until(lambda: listener.limits.num_peers == 1)
    listener.look_until(lambda: listener.limits.num_peers == 0)
    assert budget.num_bytes == 900


def test_where_there_are_keys_who_fails_in_the_handshake_does_not_count(listen: Any) -> None:
    budget = ByteBudget(10_000, 1)
    listener = listen(budget=budget, has_keys=True, burst_bytes=777)
    listener.limits.find_place()
    for number in range(1, 20):
        with connect(listener.endpoint) as stranger:
            stranger.sendall(GREETING + 100 * bytes(100))
            listener.look_until(lambda number=number: listener.limits.num_failed_handshakes == number)  # type: ignore[misc]
    with connect(listener.endpoint):
        listener.look_until(lambda: listener.limits.num_peers == 1)
    listener.look_until(lambda: listener.limits.num_peers == 0)
    assert budget.num_bytes == 0 and not budget.is_spent
    with shake_hands(listener.endpoint, b"SUB"):
        listener.look_until(lambda: budget.num_bytes == 777)
    listener.look_until(lambda: listener.limits.num_peers == 0)
    assert budget.num_bytes == 777


def test_of_those_that_sent_too_much_together_the_largest_goes(listen: Any) -> None:
    listener = listen(max_held_bytes=2000)
    peers = [shake_hands(listener.endpoint, b"SUB") for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.sendall((3 + 3 * number) * SUBSCRIPTION)
    listener.look_until(lambda: listener.limits.num_cut == 1)
    assert is_cut(peers[2]) and is_open(peers[0]) and is_open(peers[1])
    listener.look_for(0.1)
    assert listener.limits.num_cut == 1
    for peer in peers:
        peer.close()


def test_what_waits_for_a_peer_is_bounded(listen: Any) -> None:
    """Whoever fetches is not taken for one who does not, however much is published."""
    listener = listen(max_lag_bytes=5 * 10**6)
    payload = bytes(100_000)
    with (
        shake_hands(listener.endpoint, b"SUB") as stuck,
        shake_hands(listener.endpoint, b"SUB") as bystander,
        zmq.Context() as context,
        context.socket(zmq.SUB) as reader,
    ):
        stuck.sendall(frame(b"\x01"))
        bystander.sendall(frame(b"\x01other"))
        reader.subscribe(b"")
        reader.connect(listener.endpoint)
        listener.look_until(lambda: listener.limits.num_peers == 3)
        time.sleep(0.2)
        for _ in range(500):
            listener.socket.send(payload)
            listener.limits.note_published(len(payload) + 9)
            listener.look_for(0.001)
            while reader.poll(0):
                reader.recv()
        listener.look_until(lambda: listener.limits.num_lagging == 1)
        listener.look_for(0.2)
        assert listener.limits.num_cut == 1
        assert listener.limits.num_peers == 2
        assert is_open(bystander)


@pytest.mark.parametrize("has_keys", [False, True])
def test_bytes_are_counted_as_they_go_over_the_wire(tmp_path: Path, has_keys: bool) -> None:
    """Lag is a difference of large numbers, and must not drift."""
    make_key_folder(tmp_path)
    sockets = EventSockets(
        "tcp://127.0.0.1:*",
        None,
        0,
        "topic",
        0,
        10,
        max_buffered_bytes=10**9,
        max_peers=8,
        keys=tmp_path if has_keys else None,
        insecure=False,
    )
    reading, writing = os.pipe()
    try:
        with zmq.Context() as context, context.socket(zmq.SUB) as reader:
            if has_keys:
                CurveKeys.load_client(tmp_path).protect_client(reader)
            reader.subscribe(b"")
            reader.connect(sockets.endpoint)
            number = 0
            while not reader.poll(20):
                sockets.send(number, b"")
                sockets.wait(reading, 0)
                number += 1
                assert number < 1000
            opened = sockets._pub
            assert opened is not None and opened._limits is not None
            end = time.monotonic() + 0.5
            while time.monotonic() < end:  # until nothing waits
                sockets.wait(reading, 10)
            (peer,) = opened._limits._peers.values()
            acknowledged, published = acknowledged_bytes(opened._limits), opened._limits._published
            assert (peer.acknowledged_before, peer.queued_before) == (acknowledged, published)
            for size in (0, 1, 200, 214, 222, 223, 255, 256, 257, 1000, 70_000):
                for _ in range(20):
                    sockets.send(number, bytes(size))
                    number += 1
                    while reader.poll(0):
                        reader.recv_multipart()
            end = time.monotonic() + PATIENCE_SECONDS
            while acknowledged_bytes(opened._limits) - acknowledged < opened._limits._published - published:
                assert time.monotonic() < end
                while reader.poll(10):
                    reader.recv_multipart()
            assert acknowledged_bytes(opened._limits) - acknowledged == opened._limits._published - published
    finally:
        sockets.close(0)
        os.close(reading)
        os.close(writing)


def acknowledged_bytes(limits: PeerLimits) -> int:
    (fd,) = limits._peers
    with socket.socket(fileno=os.dup(fd)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        return int.from_bytes(info[120:128], sys.byteorder)


def test_a_number_that_means_something_else_now_is_left_alone(listen: Any, tmp_path: Path) -> None:
    """ZeroMQ may have closed a descriptor, and the process opened another of the same number."""
    listener = listen()
    one, other = socket.socketpair()
    elsewhere = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(elsewhere.getsockname())
    served, _ = elsewhere.accept()
    with one, other, elsewhere, client, served, (tmp_path / "file").open("w") as file:
        closed = os.dup(one.fileno())
        os.close(closed)
        before = len(os.listdir("/proc/self/fd"))
        for fd in (one.fileno(), served.fileno(), file.fileno(), closed):
            listener.limits._cut(fd, "test")
        assert len(os.listdir("/proc/self/fd")) == before
        other.sendall(b"still here")
        assert one.recv(100) == b"still here"
        client.sendall(b"still here")
        assert served.recv(100) == b"still here"
        file.write("still here")


OLD_SUBSCRIBERS = {
    "ZMTP 1.0": b"\x01\x00" + b"\x02\x00\x01",
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f" + b"\x01\x02" + b"\x00\x00" + b"\x00\x01\x01",
}


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("protocol", OLD_SUBSCRIBERS)
def test_protocols_from_before_keys_get_nothing_where_there_are_keys(
    tmp_path: Path, protocol: str, has_keys: bool
) -> None:
    make_key_folder(tmp_path)
    with zmq.Context() as context:
        gate = ClientGate(context, CurveKeys.load_server(tmp_path)) if has_keys else None
        with context.socket(zmq.PUB) as publisher:
            publisher.linger = 0
            if gate is not None:
                gate.protect(publisher)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            with connect(f"tcp://127.0.0.1:{port}") as old:
                old.sendall(OLD_SUBSCRIBERS[protocol])
                old.settimeout(0.1)
                received = b""
                end = time.monotonic() + (1.0 if has_keys else PATIENCE_SECONDS)
                while b"secret" not in received and time.monotonic() < end:
                    publisher.send(b"secret")
                    try:
                        received += old.recv(4096)
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        break
                assert (b"secret" in received) != has_keys
        if gate is not None:
            gate.close()
