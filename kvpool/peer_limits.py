"""Bounds on what strangers can do to a listening ZeroMQ socket without saying anything that reaches its owner.

ZeroMQ bounds neither how many connections it accepts nor what one connection may make it hold: subscriptions go into a
tree for as long as they come, and a message of endless parts is gathered until its last one. Neither is ever shown to
the socket's owner. What waits for a slow subscriber is bounded in messages, and those may be large. So the connections
are counted (the socket's monitor tells of them), and so are the bytes that each has sent and fetched (the kernel tells
that of TCP, on Linux); one that goes beyond is cut. A peer that was cut wrongly connects again.

(``ZMQ_SNDHWM`` of a socket in use is no way to bound bytes: libzmq 4.3.5 crashes where a peer is just leaving.)

A thread looks whenever a connection comes or goes, and every ``LOOK_SECONDS`` while there are peers: what comes within
that time is all that a peer can have beyond its limits. It can't be the socket's own thread, which ZeroMQ keeps for as
long as a flood of subscriptions lasts.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

logger = logging.getLogger("kvpool")

LOOK_SECONDS = 0.02

DEFAULT_MAX_PEERS = 128
DEFAULT_BURST_BYTES = 64 * 1024
DEFAULT_BYTES_PER_SECOND = 4 * 1024

_MAX_CHANGES_PER_LOOK = 1000
_MS_PER_SECOND = 1000
_REST_PER_LOOK = 30  # so 3 % of the time at most
_GREETING_BYTES = 64  # of ZMTP: who has not sent as much has said nothing yet
_TCP_INFO = struct.Struct("=24x I 92x Q Q 8x I")  # Linux' struct tcp_info, to tcpi_notsent_bytes
_CHANGE = struct.Struct("=hi")

_Result = TypeVar("_Result")


class _Traffic(NamedTuple):
    """What the kernel tells of a connection, in bytes."""

    received: int
    acknowledged: int  # by the peer
    is_idle: bool  # nothing that was sent waits to be acknowledged


@dataclass
class _Peer:
    looked_at: float
    received: int = 0
    level: float = 0.0  # the part of it that counts against the burst still
    queued_before: int = 0  # bytes published in all, and acknowledged by this peer, when nothing waited for it last
    acknowledged_before: int = 0


class PeerLimits:
    """The connections that one socket has accepted.

    Args:
        zmq_socket: before it is bound.
        max_peers: connections at a time. Of more, the oldest that has said nothing is cut, else the newest.
        burst_bytes: what a peer may send at once.
        bytes_per_second: what it may send on average, after that.
        max_lag_bytes: what may wait for a peer, of what ``note_published`` tells of; None for no bound.
        cuts_oldest: of too many that have all said something the oldest is cut: so whoever is known by what he says
            soon, see ``exempt``, gets in between any number of others.

    Attributes:
        monitor: socket to poll before ``look``, for an owner that starts no thread here.
        num_lagging: connections cut since creation because too much waited for them.
        num_cut: connections cut since creation.
        num_failed_handshakes: connections since creation that ended before they were ZeroMQ's: by garbage, silence or
            the wrong key.
    """

    def __init__(
        self,
        zmq_socket: Any,
        max_peers: int = DEFAULT_MAX_PEERS,
        burst_bytes: int = DEFAULT_BURST_BYTES,
        bytes_per_second: int = DEFAULT_BYTES_PER_SECOND,
        max_lag_bytes: int | None = None,
        *,
        cuts_oldest: bool = False,
    ) -> None:
        import zmq

        self._zmq = zmq
        self._socket = zmq_socket
        self._max_peers = max_peers
        self._burst_bytes = burst_bytes
        self._bytes_per_second = bytes_per_second
        self._max_lag_bytes = max_lag_bytes
        self._cuts_oldest = cuts_oldest
        self._published = 0
        self._peers: dict[int, _Peer] = {}  # by file descriptor, oldest first
        self._silent: dict[int, None] = {}  # those of them that may not have said anything
        self._next_look = 0.0
        self._place: str | int | None = None
        self.num_cut = 0
        self.num_lagging = 0
        self.num_failed_handshakes = 0
        self._failures = frozenset(
            (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        )
        address = f"inproc://kvpool-peers-{id(self)}"
        changes = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | sum(self._failures)
        zmq_socket.monitor(address, changes)
        self.monitor = zmq_socket.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.rcvhwm = 0  # ZeroMQ must never wait for it
        self.monitor.connect(address)
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    @property
    def num_peers(self) -> int:
        """Connections now."""
        return len(self._peers)

    def start(self) -> None:
        """Look from a thread, from now on; after the socket is bound."""
        self.find_place()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvpool-peer-limits")
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self.monitor.poll(int(LOOK_SECONDS * _MS_PER_SECOND) if self._peers else None)
                self.look()
            except self._zmq.ContextTerminated:
                return

    def close(self) -> None:
        """Before the socket is closed, and from its thread."""
        self._socket.disable_monitor()  # which the thread is told
        if self._thread is not None:
            self._thread.join()
        self.monitor.close()

    def find_place(self) -> None:
        """To call once the socket is bound, where another thread than the socket's is to ``look``."""
        self._place = _listening_place(self._socket.last_endpoint.rstrip(b"\0").decode())

    def exempt(self, fd: int) -> None:
        """A connection whose peer is known: it has no limits from now on, and does not count."""
        self._forget(fd)

    def note_published(self, num_bytes: int) -> None:
        """So much more goes to each peer that wants it, framing included."""
        self._published += num_bytes

    def look(self) -> None:
        """Cut what goes beyond the limits; for the owner where no thread was started. O(changes + peers)."""
        now = time.monotonic()
        self._take_changes(now)
        if now >= self._next_look:
            for fd in list(self._peers):
                self._weigh(fd, now)
            self._next_look = now + max(LOOK_SECONDS, _REST_PER_LOOK * (time.monotonic() - now))

    def _take_changes(self, now: float) -> None:
        for _ in range(_MAX_CHANGES_PER_LOOK):
            try:
                change, value = _CHANGE.unpack(self.monitor.recv_multipart(self._zmq.NOBLOCK)[0])
            except self._zmq.Again:
                return
            if change == self._zmq.EVENT_ACCEPTED:
                self._forget(value)
                self._peers[value] = _Peer(now, queued_before=self._published)
                self._silent[value] = None
                if len(self._peers) > self._max_peers:
                    self._cut(self._choose_victim(now), f"there are more than {self._max_peers}")
            elif change == self._zmq.EVENT_DISCONNECTED:
                self._forget(value)
            elif change in self._failures:
                self.num_failed_handshakes += 1
            elif change == self._zmq.EVENT_MONITOR_STOPPED:
                self._is_stopped = True

    def _choose_victim(self, now: float) -> int:
        while self._silent:
            fd = next(iter(self._silent))
            traffic = _with_socket(fd, _traffic)
            if traffic is not None and traffic.received < _GREETING_BYTES:
                return fd
            del self._silent[fd]
        return next(iter(self._peers) if self._cuts_oldest else reversed(self._peers))

    def _weigh(self, fd: int, now: float) -> None:
        traffic = _with_socket(fd, _traffic)
        if traffic is None:
            return
        peer = self._peers[fd]
        level = max(0.0, peer.level - self._bytes_per_second * (now - peer.looked_at))
        peer.level = level + max(0, traffic.received - peer.received)
        peer.received, peer.looked_at = traffic.received, now
        if traffic.received >= _GREETING_BYTES:
            self._silent.pop(fd, None)
        if peer.level > self._burst_bytes:
            self._cut(fd, f"it sent {traffic.received} bytes")
            return
        if traffic.is_idle:
            peer.queued_before, peer.acknowledged_before = self._published, traffic.acknowledged
        elif self._max_lag_bytes is not None:
            lag = self._published - peer.queued_before - (traffic.acknowledged - peer.acknowledged_before)
            if lag > self._max_lag_bytes:
                self.num_lagging += 1
                self._cut(fd, f"{lag} bytes wait for it")

    def _cut(self, fd: int, reason: str) -> None:
        self._forget(fd)
        _with_socket(fd, self._shut_down)
        self.num_cut += 1
        if self.num_cut == 1:
            logger.warning("A connection was cut: %s. Further ones are only counted", reason)

    def _shut_down(self, connection: socket.socket) -> None:
        # ZeroMQ sees the end and closes its descriptor itself. It may have done so before, and the number may belong
        # to something else now, which must be left alone.
        if self._place is None:
            self.find_place()
        if _place_of(connection) == self._place:
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, fd: int) -> None:
        self._peers.pop(fd, None)
        self._silent.pop(fd, None)


def _with_socket(fd: int, call: Callable[[socket.socket], _Result]) -> _Result | None:
    """Call something with the socket behind a descriptor that another thread may close; None if it has, or if it is
    something else by now."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # no socket
        os.close(duplicate)
        return None
    with connection:
        try:
            return call(connection)
        except OSError:
            return None


def _traffic(connection: socket.socket) -> _Traffic | None:
    """None for what is no TCP, and where the kernel does not tell."""
    if not sys.platform.startswith("linux") or connection.family == socket.AF_UNIX:
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return None
    num_unacknowledged_packets, acknowledged, received, not_sent = _TCP_INFO.unpack(info)
    return _Traffic(received, acknowledged, is_idle=not (num_unacknowledged_packets or not_sent))


def _place_of(connection: socket.socket) -> str | int:
    name = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return os.fsdecode(name).replace("\0", "@", 1)
    port: int = name[1]
    return port


def _listening_place(endpoint: str) -> str | int:
    """Port or path."""
    if endpoint.startswith("ipc://"):
        return endpoint[len("ipc://") :]
    return int(endpoint.rpartition(":")[2])
