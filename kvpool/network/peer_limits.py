"""Bounds on what strangers can do to a listening ZeroMQ socket without saying anything that reaches its owner.

ZeroMQ bounds neither how many connections it accepts nor what one connection may make it hold: subscriptions go into a
tree for as long as they come, and a message of endless parts is gathered until its last one. Neither is ever shown to
the socket's owner. What waits for a slow subscriber is bounded in messages, and those may be large. So the connections
are counted (the socket's monitor tells of them), and so are the bytes that each has sent and fetched (the kernel tells
that of TCP, on Linux); one that goes beyond is cut. A peer that was cut wrongly connects again.

(``ZMQ_SNDHWM`` of a socket in use is no way to bound bytes: libzmq 4.3.5 crashes where a peer is just leaving.)

Who is cut may connect again, and send as much once more. Where that matters there is a ``ByteBudget`` for all, those
that are gone too. When it is spent, newcomers wait (``HeldListener``), those that get in nevertheless are cut, and so
is who is not modest just then.

A thread looks whenever a connection comes or goes, and every ``LOOK_SECONDS`` while there are peers,
``BUSY_LOOK_SECONDS`` while they use a budget: what comes within that time is all that a peer can have beyond its
limits. It can't be the socket's own thread, which ZeroMQ keeps for as long as a flood of subscriptions lasts.
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

from kvpool.network.byte_budget import ByteBudget
from kvpool.network.held_listener import HeldListener, duplicate_socket

logger = logging.getLogger("kvpool")

LOOK_SECONDS = 0.02
BUSY_LOOK_SECONDS = 0.001

DEFAULT_MAX_PEERS = 128
DEFAULT_BURST_BYTES = 64 * 1024
DEFAULT_BYTES_PER_SECOND = 4 * 1024

_MAX_CHANGES_PER_LOOK = 1000
_MS_PER_SECOND = 1000
_REST_PER_LOOK = 30  # so 3 % of the time at most
_REST_PER_BUSY_LOOK = 4
_NEWCOMER_SECONDS = 0.05  # for so long, a connection is expected to send
_LONG_SILENCE_SECONDS = 1.0
_SILENT_SHARE = 8  # this part of a burst counts for one that ends after that
MODEST_SHARE = 4  # of its burst, a peer may have sent this part where the budget is spent
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
    came_at: float
    looked_at: float
    connection: socket.socket | None = None  # a duplicate, of one that has said something and the budget counts
    received: int = 0
    counted: int = 0  # the part of it that is in the budget
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
        budget: of what all send, over TCP on Linux; None for none.
        has_keys: who fails in the handshake can leave nothing behind, so that only others count for the budget; as the
            bursts that they may send, because ZeroMQ does not tell which connections are theirs.
        max_held_bytes: what those that are connected may have sent together, since they came: of more, the one that
            sent most is cut. None for no bound.
        listener: that ``zmq_socket`` is going to use; None if it binds one of its own.

    Attributes:
        listener: what newcomers come by; None where there is no budget. Stays open after ``close``.
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
        budget: ByteBudget | None = None,
        has_keys: bool = False,
        max_held_bytes: int | None = None,
        listener: HeldListener | None = None,
    ) -> None:
        import zmq

        self._zmq = zmq
        self._socket = zmq_socket
        self._max_peers = max_peers
        self._burst_bytes = burst_bytes
        self._bytes_per_second = bytes_per_second
        self._max_lag_bytes = max_lag_bytes
        self._cuts_oldest = cuts_oldest
        self._budget = budget if sys.platform.startswith("linux") else None
        self._has_keys = has_keys
        self._max_held_bytes = max_held_bytes
        self.listener = listener
        self._published = 0
        self._peers: dict[int, _Peer] = {}  # by file descriptor, oldest first
        self._silent: dict[int, None] = {}  # those of them that may not have said anything
        self._next_look = 0.0
        self._next_busy_look = 0.0
        self._newcomers_until = 0.0
        self._place: str | int | None = None
        self.num_cut = 0
        self.num_lagging = 0
        self.num_failed_handshakes = 0
        self._failures = frozenset(
            (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        )
        address = f"inproc://kvpool-peers-{id(self)}"
        changes = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | sum(self._failures)
        if self._budget is not None:
            changes |= zmq.EVENT_LISTENING | zmq.EVENT_HANDSHAKE_SUCCEEDED
        zmq_socket.monitor(address, changes)
        self.monitor = zmq_socket.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.rcvhwm = 0  # ZeroMQ must never wait for it
        self.monitor.connect(address)
        self._is_stopped = False
        self._has_told_of_filter = False
        self._thread: threading.Thread | None = None

    @property
    def num_peers(self) -> int:
        """Connections now."""
        return len(self._peers)

    def continue_counts(self, predecessor: PeerLimits) -> None:
        """Count where one that is closed has ended; before ``start``."""
        self.num_cut, self.num_lagging = predecessor.num_cut, predecessor.num_lagging
        self.num_failed_handshakes = predecessor.num_failed_handshakes
        self._has_told_of_filter = predecessor._has_told_of_filter

    def start(self) -> None:
        """Look from a thread, from now on; after the socket is bound."""
        self.find_place()
        self._take_changes(time.monotonic())  # the listener, before anybody asks for it
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvpool-peer-limits")
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self.monitor.poll(self._wait_ms())
                self.look()
            except self._zmq.ContextTerminated:
                return

    def _wait_ms(self) -> int | None:
        if not self._peers and not self._is_spent:  # newcomers that wait are let in again by a look
            return None
        return int((BUSY_LOOK_SECONDS if self._is_busy and self._peers else LOOK_SECONDS) * _MS_PER_SECOND)

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._budget.is_spent

    @property
    def _is_busy(self) -> bool:
        return self._budget is not None and (
            self._budget.is_in_use or (bool(self._peers) and time.monotonic() < self._newcomers_until)
        )

    def close(self) -> None:
        """Before the socket is closed, and from its thread."""
        self._socket.disable_monitor()  # which the thread is told
        if self._thread is not None:
            self._thread.join()
        self.monitor.close()
        for fd in list(self._peers):
            self._forget(fd)

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
        if self._budget is not None:
            self._budget.leak(now)
        self._take_changes(now)
        if now >= (self._next_busy_look if self._is_busy else self._next_look):
            for fd in list(self._peers):
                self._weigh(fd, now)
            self._cut_largest()
            cost = time.monotonic() - now
            self._next_busy_look = now + max(BUSY_LOOK_SECONDS, _REST_PER_BUSY_LOOK * cost)
            self._next_look = now + max(LOOK_SECONDS, _REST_PER_LOOK * cost)
        self._shut_or_open()

    def _shut_or_open(self) -> None:
        if self.listener is None or self.listener.is_shut == self._is_spent:
            return
        try:
            if self._is_spent:
                self.listener.shut()
            else:
                self.listener.open()
        except OSError as error:
            if not self._has_told_of_filter:
                self._has_told_of_filter = True
                logger.warning("Newcomers can't be made to wait, and are cut instead: %s", error)

    def _take_changes(self, now: float) -> None:
        for _ in range(_MAX_CHANGES_PER_LOOK):
            try:
                change, value = _CHANGE.unpack(self.monitor.recv_multipart(self._zmq.NOBLOCK)[0])
            except self._zmq.Again:
                return
            if change == self._zmq.EVENT_ACCEPTED:
                self._accept(value, now)
            elif change == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._count_admitted()
            elif change == self._zmq.EVENT_DISCONNECTED:
                self._count_last(value)
                self._forget(value)
            elif change == self._zmq.EVENT_LISTENING:
                self._hold_listener(value)
            elif change in self._failures:
                self.num_failed_handshakes += 1
            elif change == self._zmq.EVENT_MONITOR_STOPPED:
                self._is_stopped = True

    def _accept(self, fd: int, now: float) -> None:
        self._forget(fd)
        self._peers[fd] = _Peer(now, now, queued_before=self._published)
        self._silent[fd] = None
        self._newcomers_until = now + _NEWCOMER_SECONDS
        if self._is_spent:
            self._cut(fd, "all together sent too much")
        elif len(self._peers) > self._max_peers:
            silent = self._find_silent()
            newest_or_oldest = iter(self._peers) if self._cuts_oldest else reversed(self._peers)
            victim = next(newest_or_oldest) if silent is None else silent
            self._cut(victim, f"there are more than {self._max_peers}", has_said_nothing=silent is not None)

    def _hold_listener(self, fd: int) -> None:
        if self.listener is None and isinstance(self._place, int):
            self.listener = _with_socket(fd, lambda found: HeldListener(found.fileno()))

    def _find_silent(self) -> int | None:
        while self._silent:
            fd = next(iter(self._silent))
            traffic = _with_socket(fd, _traffic)
            if traffic is not None and traffic.received < _GREETING_BYTES:
                return fd
            del self._silent[fd]
        return None

    def _weigh(self, fd: int, now: float) -> None:
        peer = self._peers[fd]
        traffic = self._traffic_of(fd, peer)
        if traffic is None:
            return
        level = max(0.0, peer.level - self._bytes_per_second * (now - peer.looked_at))
        peer.level = level + max(0, traffic.received - peer.received)
        peer.received, peer.looked_at = traffic.received, now
        self._count(peer)
        if traffic.received >= _GREETING_BYTES:
            self._silent.pop(fd, None)
            if peer.connection is None and self._budget is not None and not self._has_keys:
                # So what it sent can be told when ZeroMQ has closed it. Silent ones have no place for a second
                # descriptor: they come in any number.
                peer.connection = _with_socket(fd, self._duplicate)
        if peer.level > self._burst_bytes:
            self._cut(fd, f"it sent {traffic.received} bytes")
            return
        if self._is_spent and peer.level > self._burst_bytes / MODEST_SHARE:
            self._cut(fd, f"all together sent too much, and it {traffic.received} bytes of that")
            return
        if traffic.is_idle:
            peer.queued_before, peer.acknowledged_before = self._published, traffic.acknowledged
        elif self._max_lag_bytes is not None:
            lag = self._published - peer.queued_before - (traffic.acknowledged - peer.acknowledged_before)
            if lag > self._max_lag_bytes:
                self.num_lagging += 1
                self._cut(fd, f"{lag} bytes wait for it")

    def _traffic_of(self, fd: int, peer: _Peer) -> _Traffic | None:
        if peer.connection is None:
            return _with_socket(fd, _traffic)
        try:
            return _traffic(peer.connection)
        except OSError:
            return None

    def _duplicate(self, connection: socket.socket) -> socket.socket | None:
        return duplicate_socket(connection.fileno()) if _place_of(connection) == self._place else None

    def _count_admitted(self) -> None:
        if self._budget is not None and self._has_keys:
            self._budget.add(self._burst_bytes)

    def _count(self, peer: _Peer) -> None:
        if self._budget is not None and not self._has_keys:
            self._budget.add(peer.received - peer.counted)
            peer.counted = peer.received

    def _count_last(self, fd: int) -> None:
        """Of a connection that ends: what it sent since the last look. Where that can't be told, it is a burst; less if
        it was silent for long, as there can't be many of that kind."""
        peer = self._peers.get(fd)
        if peer is None or self._budget is None or self._has_keys or not isinstance(self._place, int):
            return
        traffic = self._traffic_of(fd, peer) if peer.connection is not None else None
        if traffic is not None:
            peer.received = max(peer.received, traffic.received)
        elif peer.received < _GREETING_BYTES and peer.looked_at - peer.came_at > _LONG_SILENCE_SECONDS:
            peer.received += self._burst_bytes // _SILENT_SHARE
        else:
            peer.received += self._burst_bytes
        self._count(peer)

    def _cut_largest(self) -> None:
        if self._max_held_bytes is None:
            return
        sizes = {fd: peer.received for fd, peer in self._peers.items()}
        held = sum(sizes.values())
        while held > self._max_held_bytes:
            fd = max(sizes, key=sizes.__getitem__)
            held -= sizes[fd]
            self._cut(fd, f"it sent {sizes.pop(fd)} bytes, the most of all")

    def _cut(self, fd: int, reason: str, *, has_said_nothing: bool = False) -> None:
        _with_socket(fd, self._shut_down)
        if not has_said_nothing:
            self._count_last(fd)
        self._forget(fd)
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
        peer = self._peers.pop(fd, None)
        if peer is not None and peer.connection is not None:
            peer.connection.close()
        self._silent.pop(fd, None)


def _with_socket(fd: int, call: Callable[[socket.socket], _Result]) -> _Result | None:
    """Call something with the socket behind a descriptor that another thread may close; None if it has, or if it is
    something else by now."""
    try:
        connection = duplicate_socket(fd)
    except OSError:
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
