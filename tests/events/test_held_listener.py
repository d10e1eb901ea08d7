"""A listening socket that is kept: newcomers wait while it is shut, and it goes on with another descriptor."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from kvpool.network.held_listener import HeldListener

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="socket filters are Linux'")


def test_newcomers_wait_while_it_is_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = HeldListener(server.fileno())
        address = server.getsockname()
        with socket.create_connection(address, timeout=5) as friend:
            served, _ = server.accept()
            held.shut()
            held.shut()
            assert held.is_shut
            with socket.socket() as newcomer:
                newcomer.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    newcomer.connect(address)
            friend.sendall(b"still here")
            assert served.recv(100) == b"still here"
            served.sendall(b"so am I")
            assert friend.recv(100) == b"so am I"
            served.close()
        held.open()
        assert not held.is_shut
        socket.create_connection(address, timeout=5).close()
        held.close()
        held.close()


def test_it_outlives_the_socket_it_was_taken_from() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        held = HeldListener(server.fileno())
    waiting = socket.create_connection(address, timeout=5)
    with socket.socket(fileno=held.duplicate()) as successor:
        served, _ = successor.accept()
        served.close()
    waiting.close()
    held.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_what_is_no_socket_is_refused_and_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file, pytest.raises(OSError):
        HeldListener(file.fileno())
    with pytest.raises(OSError):
        HeldListener(10**6)
    assert len(os.listdir("/proc/self/fd")) == before
