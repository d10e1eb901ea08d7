"""A ZeroMQ socket with a watch on its connections: what a scheduler and its workers talk through.

Addresses are ``ipc://PATH`` on one machine and ``tcp://HOST:PORT`` between machines. There is no authentication and no
encryption: bind only where everybody who can connect is trusted, the loopback interface or a network of the cluster's
own. Messages are decoded by schema and bounded in size, so a stranger can refuse or disturb service, but not run code.
"""

from __future__ import annotations

import socket
import time
from enum import Enum
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.event_endpoints import bind
from kvpool.worker.messages import MAX_MESSAGE_BYTES

RECONNECT_SECONDS = 3.0
"""A peer without a connection for so long is lost."""

_HEARTBEAT_SECONDS = 5.0
_SILENCE_SECONDS = 30.0  # without a heartbeat: the other machine is gone, though nothing closed the connection
_LINGER_SECONDS = 1.0  # at most: the last word to a peer has to leave, a dead peer must not hold up a close
_MS_PER_SECOND = 1000
_IPC, _TCP = "ipc://", "tcp://"


class LinkChange(Enum):
    """What happened to a connection."""

    UP = "up"
    DOWN = "down"


class Link:
    """One socket in a context of its own, so that closing it leaves nothing behind. For one thread.

    Attributes:
        address: as others reach it; where the system chose the port, with that port.
    """

    def __init__(self, address: str, *, is_scheduler: bool, identity: bytes | None = None) -> None:
        self._zmq = _import_zmq()
        check_address(address, may_be_wildcard=is_scheduler)
        self._context = self._zmq.Context()
        self._socket: Any = None
        self._monitor: Any = None
        self._bound_path: Path | None = None
        self._has_changes = False
        try:
            self._open(address, is_scheduler, identity)
        except self._zmq.ZMQError as error:
            self.close()
            verb = "bind" if is_scheduler else "connect to"
            raise InvalidArgumentError(f"can't {verb} {address!r}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, address: str, is_scheduler: bool, identity: bytes | None) -> None:
        zmq = self._zmq
        self._socket = opened = self._context.socket(zmq.ROUTER if is_scheduler else zmq.DEALER)
        opened.linger = int(_LINGER_SECONDS * _MS_PER_SECOND)
        opened.maxmsgsize = MAX_MESSAGE_BYTES
        opened.heartbeat_ivl = int(_HEARTBEAT_SECONDS * _MS_PER_SECOND)
        opened.heartbeat_timeout = int(_SILENCE_SECONDS * _MS_PER_SECOND)
        opened.reconnect_ivl_max = int(RECONNECT_SECONDS * _MS_PER_SECOND) // 4
        self._monitor = opened.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor.linger = 0
        self._poller = zmq.Poller()
        self._poller.register(opened, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if is_scheduler:
            # Without the first, what can't be delivered is dropped in silence; the second lets a worker come back.
            opened.router_mandatory = True
            opened.router_handover = True
            self.address = bind(opened, _with_number(address))
            if address.startswith(_IPC):
                self._bound_path = Path(address[len(_IPC) :]).absolute()
        else:
            opened.identity = identity
            if address.startswith("tcp://["):
                opened.ipv6 = True
            opened.connect(address)
            self.address = address

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    def send(self, *frames: bytes) -> bool:
        """Queues a message. Whether there is a connection for it; always true for a worker, whose message waits."""
        try:
            self._socket.send_multipart(frames, self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            if error.errno in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self, seconds: float) -> list[bytes] | None:
        """The frames of the next message; None if there is none in this time, or a connection changed first."""
        ready = dict(self._poller.poll(max(0, int(seconds * _MS_PER_SECOND))))
        self._has_changes = self._has_changes or self._monitor in ready
        if self._socket in ready:
            frames: list[bytes] = self._socket.recv_multipart()
            return frames
        return None

    def take_changes(self) -> list[LinkChange]:
        """What happened to connections between the last two calls of ``receive``, oldest first."""
        if not self._has_changes:
            return []
        from zmq.utils.monitor import recv_monitor_message

        self._has_changes = False
        changes = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            changes.append(LinkChange.UP if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED else LinkChange.DOWN)
        return changes

    def close(self) -> None:
        """Sends what was queued, for a second at most, and gives everything back. A second call does nothing."""
        if self._context.closed:
            return
        if self._socket is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
            self._socket.close()
        self._context.term()
        if self._bound_path is not None:
            self._bound_path.unlink(missing_ok=True)


class Deadline:
    """A point in time.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0


def check_address(address: str, *, may_be_wildcard: bool) -> None:
    """Checks an address before anything is opened.

    Raises:
        InvalidArgumentError: it has no known form, or another scheduler listens at this ``ipc`` path. (ZeroMQ would
            take the path away from it.)
    """
    if address.startswith(_TCP):
        host, colon, port = address[len(_TCP) :].rpartition(":")
        is_number = port.isdecimal() and int(port) < 2**16
        is_wildcard = port in ("*", "0") or host == "*"
        if not host or not colon or not (is_number or port == "*"):
            raise InvalidArgumentError(f"a tcp address is tcp://HOST:PORT, not {address!r}")
        if is_wildcard and not may_be_wildcard:
            raise InvalidArgumentError(f"{address!r} is no place to connect to: it needs a host and a port")
    elif address.startswith(_IPC):
        path = address[len(_IPC) :]
        if not path or path == "*":
            raise InvalidArgumentError(f"an ipc address is ipc://PATH, not {address!r}")
        if may_be_wildcard and _is_anybody_at(path):
            raise InvalidArgumentError(f"another scheduler listens at {address!r}")
    else:
        raise InvalidArgumentError(f"an address is ipc://PATH or tcp://HOST:PORT, not {address!r}")


def _is_anybody_at(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (OSError, ValueError):
            return False
    return True


def _with_number(address: str) -> str:
    """The address with the host's number, if that is what its name stands for: ZeroMQ binds no names."""
    if not address.startswith(_TCP):
        return address
    host, _, port = address[len(_TCP) :].rpartition(":")
    try:
        family, _, _, _, (number, *_) = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return address  # a wildcard, or the name of an interface
    return f"{_TCP}[{number}]:{port}" if family == socket.AF_INET6 else f"{_TCP}{number}:{port}"


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ImportError("workers need pyzmq: pip install kvpool[events]") from error
    return zmq
