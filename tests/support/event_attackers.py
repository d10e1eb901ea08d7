"""Strangers that speak ZMTP, ZeroMQ's protocol, by hand: what a library would not send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SHORT, SHORT_MORE, LONG, SHORT_COMMAND = b"\x00", b"\x01", b"\x02", b"\x04"
CONNECT_SECONDS = 5.0


def connect(endpoint: str) -> socket.socket:
    """A TCP connection without a word."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)


def shake_hands(endpoint: str, socket_type: bytes, identity: bytes = b"") -> socket.socket:
    """A connection that ZeroMQ takes for a peer of this type (``SUB``, ``DEALER``), which may name itself."""
    connection = connect(endpoint)
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    if identity:
        body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    connection.sendall(GREETING + SHORT_COMMAND + bytes([len(body)]) + body)
    received = b""
    while len(received) < len(GREETING) + 2 or len(received) < len(GREETING) + 2 + received[len(GREETING) + 1]:
        data = connection.recv(4096)
        if not data:
            connection.close()
            raise ConnectionError("cut in the handshake")
        received += data
    return connection


def frame(body: bytes, flags: bytes = SHORT) -> bytes:
    return flags + bytes([len(body)]) + body


@contextlib.contextmanager
def flood(
    endpoint: str, socket_type: bytes | None, make_bytes: object, num_threads: int = 2, identity: bytes = b""
) -> Iterator[list[int]]:
    """Threads that connect, send what ``make_bytes(number)`` gives again and again, and connect anew when cut.

    Args:
        socket_type: None for connections without ZeroMQ's handshake.
        identity: of all of them.

    Yields:
        Bytes sent so far, in a list of one for each thread.
    """
    stop = threading.Event()
    sent = [0] * num_threads

    def attack(index: int) -> None:
        number = index << 32
        while not stop.is_set():
            try:
                connection = connect(endpoint) if socket_type is None else shake_hands(endpoint, socket_type, identity)
            except OSError:
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.2)
                while not stop.is_set():
                    data = make_bytes(number)  # type: ignore[operator]
                    number += 1
                    connection.sendall(data)
                    sent[index] += len(data)

    threads = [threading.Thread(target=attack, args=(index,), daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * CONNECT_SECONDS)
