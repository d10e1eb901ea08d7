"""A ZeroMQ socket as a scheduler and its workers talk through: messages of bytes, and what happens to connections.

Addresses are ``ipc://PATH`` on one machine and ``tcp://HOST:PORT`` between machines. Who may connect is settled by the
file system for the first, and by CURVE keys for the second (``kvpool.network.curve``); without keys TCP is for the
loopback interface, unless the caller says that everybody who can connect is trusted.

What strangers send is bounded before it is understood: a message goes over the wire in frames of ``FRAME_BYTES`` at
most, ZeroMQ drops a connection with a larger one, and queues few messages of each. Messages are decoded by schema, so
that nothing in them is run.

Calls may be interrupted anywhere, as by Ctrl-C: a message that was sent in part is ended so that the peer drops it, and
one that was received in part, or not yet ``taken``, comes with the next call.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Container
from enum import Enum
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.network.curve import HANDSHAKE_SECONDS, ClientGate, CurveKeys, find_keys_folder, is_tcp, require_protection
from kvpool.network.endpoints import bind
from kvpool.network.pyzmq import import_zmq
from kvpool.worker.transport.peer_watch import PeerWatch

RECONNECT_SECONDS = 3.0
"""A peer without a connection for so long is lost."""

FRAME_BYTES = 2**16
"""A peer that sends a larger frame is disconnected."""

Keys = CurveKeys | str | os.PathLike[str] | None
"""Keys, a folder of them, or None for the folder that ``KVPOOL_CURVE_KEYS`` names, if it does."""

_CURVE_BYTES = 256  # more than CURVE and ZMTP add to a frame
_RECEIVE_BUFFER_BYTES = 2**14  # of each connection to a scheduler: a flood then comes slowly enough to be cut in time
_HEARTBEAT_SECONDS = 5.0
_KEEPALIVE_SECONDS = 5
_SILENCE_SECONDS = 30.0  # without a heartbeat: the other machine is gone, though nothing closed the connection
_LINGER_SECONDS = 1.0  # at most: the last word to a peer has to leave, a dead peer must not hold up a close
_MS_PER_SECOND = 1000
_IPC, _TCP = "ipc://", "tcp://"
_MAX_IGNORED_AT_ONCE = 500
_ABANDONED = b"\xc1abandoned"  # the last frame of a message that was sent in part; 0xc1 is nothing in msgpack


class LinkChange(Enum):
    """What happened to the connection of a worker."""

    UP = "up"
    DOWN = "down"
    HANDSHAKE_FAILED = "handshake failed"


class Link:
    """One socket in a context of its own, so that closing it leaves nothing behind. For one thread.

    Args:
        address: to bind for a scheduler, to connect to for a worker.
        num_workers: of a scheduler; 0 for a worker.
        identity: of a worker, by which the scheduler knows it again on a new connection.
        keys: for TCP.
        insecure: do without keys on addresses that other machines reach, which is refused otherwise.

    Attributes:
        address: as others reach it; where the system chose the port, with that port.
        has_keys: whether connections are protected by CURVE.
        num_ignored: messages dropped so far.

    Raises:
        InvalidArgumentError: no such address, in use, one that needs keys and has none, or bad keys.
        ImportError: pyzmq is not installed, or has no CURVE where there are keys.
    """

    def __init__(
        self,
        address: str,
        *,
        num_workers: int = 0,
        identity: bytes | None = None,
        keys: Keys = None,
        insecure: bool = False,
    ) -> None:
        self._zmq = import_zmq("workers need")
        is_scheduler = num_workers > 0
        check_address(address, may_be_wildcard=is_scheduler)
        curve_keys = _load_keys(address, keys, insecure, is_scheduler)
        self.has_keys = curve_keys is not None
        self._context = self._zmq.Context()
        self._socket: Any = None
        self._monitor: Any = None
        self._gate: ClientGate | None = None
        self._watch: PeerWatch | None = None
        self._bound_path: Path | None = None
        self.num_ignored = 0
        self._is_sending = False
        self._received: list[Any] = []  # frames of pyzmq
        try:
            self._open(address, num_workers, identity, curve_keys)
        except self._zmq.ZMQError as error:
            self.close()
            verb = "bind" if is_scheduler else "connect to"
            raise InvalidArgumentError(f"can't {verb} {address!r}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, address: str, num_workers: int, identity: bytes | None, keys: CurveKeys | None) -> None:
        zmq = self._zmq
        self._socket = opened = self._context.socket(zmq.ROUTER if num_workers else zmq.DEALER)
        opened.linger = int(_LINGER_SECONDS * _MS_PER_SECOND)
        opened.maxmsgsize = FRAME_BYTES + _CURVE_BYTES
        # No bound on unread messages: where there is one, libzmq 4.3.5 ends this process ("Assertion failed:
        # !_io_error") if a peer exceeds it, sends a heartbeat and hangs up. What strangers send the watch bounds.
        opened.rcvhwm = 0
        opened.handshake_ivl = int(HANDSHAKE_SECONDS * _MS_PER_SECOND)
        if not num_workers:
            # The worker alone sends heartbeats. They ask the scheduler to answer, and to give the connection up when
            # they stay away. Heartbeats of the scheduler would end its process by the assertion above, if a stranger
            # takes over the identity of another (``router_handover``) that sends something and hangs up.
            opened.heartbeat_ivl = int(_HEARTBEAT_SECONDS * _MS_PER_SECOND)
            opened.heartbeat_timeout = opened.heartbeat_ttl = int(_SILENCE_SECONDS * _MS_PER_SECOND)
        elif is_tcp(address):
            # ZeroMQ stops waiting for heartbeats when something else comes, until the next one. A machine that is gone
            # just then the kernel notices.
            opened.tcp_keepalive = 1
            opened.tcp_keepalive_idle = opened.tcp_keepalive_intvl = _KEEPALIVE_SECONDS
            opened.tcp_keepalive_cnt = max(1, int(_SILENCE_SECONDS) // _KEEPALIVE_SECONDS - 1)
            opened.tcp_maxrt = int(_SILENCE_SECONDS * _MS_PER_SECOND)
        opened.reconnect_ivl_max = int(RECONNECT_SECONDS * _MS_PER_SECOND) // 4
        self._poller = zmq.Poller()
        self._poller.register(opened, zmq.POLLIN)
        if num_workers:
            # Without the first, what can't be delivered is dropped in silence; the second lets a worker come back.
            opened.router_mandatory = True
            opened.router_handover = True
            opened.rcvbuf = _RECEIVE_BUFFER_BYTES
            if keys is not None:
                self._gate = ClientGate(self._context, keys)
                self._gate.protect(opened)
            if is_tcp(address):
                self._watch = PeerWatch(opened, num_workers)
            self.address = bind(opened, _with_number(address))
            if self._watch is not None:
                self._watch.start()
            if address.startswith(_IPC):
                self._bound_path = Path(address[len(_IPC) :]).absolute()
        else:
            self._watch_connection()
            opened.identity = identity
            if keys is not None:
                keys.protect_client(opened)
            if address.startswith("tcp://["):
                opened.ipv6 = True
            opened.connect(address)
            self.address = address

    def _watch_connection(self) -> None:
        """A worker has one connection at a time, and tries no faster than ``reconnect_ivl``: few changes. (A scheduler
        asks for the connection of a rank by ``send``: strangers would fill a monitor, and ZeroMQ then waits.)"""
        zmq, address = self._zmq, f"inproc://kvpool-link-{id(self)}"
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._socket.monitor(address, events)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # during a step nobody reads it
        self._monitor.connect(address)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    @property
    def num_refused_keys(self) -> int:
        """Connections so far with a key that is not admitted. Who has none, or does not know the scheduler's, comes not
        so far."""
        return 0 if self._gate is None else self._gate.num_refused

    @property
    def num_cut(self) -> int:
        """Connections of strangers so far that were cut, or did not become ones of ZeroMQ."""
        return 0 if self._watch is None else self._watch.num_cut

    def send(self, payload: bytes, identity: bytes | None = None) -> bool:
        """Queues a message. Whether there is a connection for it; always true for a worker, whose message waits.

        Args:
            identity: of the worker that gets it; None for the scheduler.
        """
        if self._is_sending:
            self._end_abandoned()
        frames = [payload[start : start + FRAME_BYTES] for start in range(0, len(payload), FRAME_BYTES)] or [b""]
        if identity is not None:
            frames.insert(0, identity)
        self._is_sending = True
        is_sent = self._try_to_send(frames)
        self._is_sending = False
        return is_sent

    def _try_to_send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            if error.errno in (self._zmq.EHOSTUNREACH, self._zmq.EAGAIN):
                return False
            raise
        return True

    def _end_abandoned(self) -> None:
        """Where nothing is to be ended, a scheduler knows nobody of this name, and workers drop the message."""
        self._try_to_send([_ABANDONED])
        self._is_sending = False

    def receive(self, seconds: float, ignored: Container[bytes] = ()) -> list[bytes] | None:
        """The frames of the next message, or of the last one once more unless it was ``taken``; None if there is none
        in this time, or a connection changed first. A scheduler gets the worker's identity as the first frame.

        Args:
            ignored: identities whose messages are dropped and counted, a bounded number of them by one call.
        """
        if not self._received:
            ready = dict(self._poller.poll(max(0, int(seconds * _MS_PER_SECOND))))
            if self._socket not in ready:
                return None
        for _ in range(_MAX_IGNORED_AT_ONCE):
            received = self._received
            # By map and not one by one: between the call and the list nothing can come and lose a frame.
            while not received or received[-1].more:
                try:
                    received.extend(map(self._socket.recv, (self._zmq.NOBLOCK,), (False,)))
                except self._zmq.Again:
                    return None
            if received[0].bytes in ignored:
                self.num_ignored += 1
            elif received[-1].bytes != _ABANDONED:
                return [frame.bytes for frame in received]
            self.taken()
        return None

    @property
    def is_readable(self) -> bool:
        """Whether a message waits."""
        return bool(self._socket.poll(0))

    def taken(self, *, is_of_worker: bool = False) -> None:
        """The message that ``receive`` returned last has been dealt with.

        Args:
            is_of_worker: the scheduler knows the worker that sent it, whose connection is no longer a stranger's.
        """
        if is_of_worker and self._watch is not None and self._received:
            self._watch.exempt(self._received[-1])
        self._received = []

    def take_changes(self) -> list[LinkChange]:
        """What happened to a worker's connection since the last call, oldest first."""
        zmq = self._zmq
        kinds = {zmq.EVENT_HANDSHAKE_SUCCEEDED: LinkChange.UP, zmq.EVENT_DISCONNECTED: LinkChange.DOWN}
        changes = []
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            changes.append(kinds.get(event, LinkChange.HANDSHAKE_FAILED))
        return changes

    def close(self) -> None:
        """Sends what was queued, for a second at most, and gives everything back. A second call does nothing."""
        if self._context.closed:
            return
        if self._socket is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
            if self._watch is not None:
                self._watch.close()
            self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        if self._bound_path is not None:
            self._bound_path.unlink(missing_ok=True)


def _load_keys(address: str, keys: Keys, insecure: bool, is_scheduler: bool) -> CurveKeys | None:
    if not isinstance(keys, CurveKeys):
        keys = find_keys_folder(keys)
    require_protection(address, keys, insecure)
    if keys is None or not is_tcp(address):
        return None
    if isinstance(keys, CurveKeys):
        return keys
    return CurveKeys.load_server(keys) if is_scheduler else CurveKeys.load_client(keys)


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
