"""A ZeroMQ socket that publishes or answers, and what bounds those who connect to it.

Nothing that its peers send may stop their input. libzmq 4.3.5 ends its process by an assertion (``!_io_error``) if a
peer whose input is stopped hangs up, and it then has a PING to send or to answer. So there is no bound on unread
messages, and ZeroMQ sends no heartbeats; what peers send is bounded by ``PeerLimits``, in bytes.

What they sent stays with ZeroMQ until it is read. Some of it never can be: a ROUTER keeps, and shows nobody, what a
peer says that names itself as another one, even when it is gone. ``renew`` gives that back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from kvpool.network.byte_budget import ByteBudget
from kvpool.network.curve import HANDSHAKE_SECONDS, ClientGate, CurveKeys, is_tcp
from kvpool.network.endpoints import bind
from kvpool.network.held_listener import HeldListener
from kvpool.network.peer_limits import PeerLimits

logger = logging.getLogger("kvpool")

MAX_REQUEST_BYTES = 1024
"""The largest frame that a peer may send: a subscription to a topic of less than that, a replay request."""

PEER_BURST_BYTES = 4 * 1024
PEER_BYTES_PER_SECOND = 128
"""What a peer may send: its keys, a few subscriptions or requests for replays, heartbeats."""

TOTAL_BURST_BYTES = 256 * 1024
TOTAL_BYTES_PER_SECOND = 64 * 1024
"""What all peers of a socket may send together, those that are gone too. In short messages a byte takes 32 bytes of
memory, as part of a topic 48, in frames of 36 bytes that come one by one about 100."""

TOTAL_BURST_BYTES_PER_PEER = 2 * 1024  # where so many peers are allowed that it is more

_RECEIVE_BUFFER_BYTES = 4096  # the kernel's: what little peers say fits, and a flood comes in slowly
_KEEPALIVE_IDLE_SECONDS = 60
_KEEPALIVE_INTERVAL_SECONDS = 10
_KEEPALIVE_PROBES = 3
_MS_PER_SECOND = 1000

_LONG_FRAME_BYTES = 256  # from there on, a frame has the longer header
_SHORT_HEADER_BYTES, _LONG_HEADER_BYTES = 2, 9
_CURVE_FRAME_BYTES = 33


class WatchedSocket:
    """A socket in a context of its own; in that of the process for ``inproc``, which needs that.

    Args:
        kind: ``zmq.PUB``, ``zmq.ROUTER``.
        options: of ZeroMQ, set before it is opened.
        endpoint: where to bind or connect.
        binds: rather than connects.
        keys: folder; for TCP alone. The side that binds is CURVE's server.
        max_peers: connections at a time.
        max_lag_bytes: what may wait for a peer over TCP, of what ``note_published`` tells of; None for no bound.
        keeps: the socket keeps what a peer said until that leaves, as subscriptions.

    Attributes:
        socket: ZeroMQ's.
        max_total_bytes: what all peers may send at once.
    """

    def __init__(
        self,
        zmq: Any,
        kind: int,
        options: Mapping[int, int],
        endpoint: str,
        *,
        binds: bool,
        keys: str | os.PathLike[str] | None,
        max_peers: int,
        max_lag_bytes: int | None = None,
        keeps: bool = False,
    ) -> None:
        self._zmq = zmq
        self._kind = kind
        self._options = dict(options)
        self._endpoint = endpoint
        self._binds = binds
        self._max_peers = max_peers
        self._max_lag_bytes = max_lag_bytes
        self._keeps = keeps
        self.max_total_bytes = max(TOTAL_BURST_BYTES, max_peers * TOTAL_BURST_BYTES_PER_PEER)
        self._budget = ByteBudget(self.max_total_bytes, TOTAL_BYTES_PER_SECOND)
        self._limits: PeerLimits | None = None
        self._gate: ClientGate | None = None
        self._own_keys: CurveKeys | None = None
        if keys is not None and is_tcp(endpoint):
            self._own_keys = CurveKeys.load_server(keys) if binds else CurveKeys.load_client(keys)
        self._frame_bytes = _CURVE_FRAME_BYTES if self._own_keys and binds else 0  # that encryption adds
        self._is_shared = endpoint.startswith("inproc://")
        self._context = zmq.Context.instance() if self._is_shared else zmq.Context()
        try:
            if self._own_keys is not None and binds:
                self._gate = ClientGate(self._context, self._own_keys)
            self.socket = self._make_socket()
            self._limits = self._make_limits(self.socket, None)
        except BaseException:
            self.close_socket(0)
            self.close_context()
            raise

    def _make_socket(self) -> Any:
        made = self._context.socket(self._kind)
        try:
            for option, value in self._options.items():
                made.setsockopt(option, value)
            made.rcvhwm = 0
            made.maxmsgsize = MAX_REQUEST_BYTES
            made.rcvbuf = _RECEIVE_BUFFER_BYTES
            # A machine that is gone without a word must not hold a connection for ever. The kernel asks.
            made.tcp_keepalive = 1
            made.tcp_keepalive_idle = _KEEPALIVE_IDLE_SECONDS
            made.tcp_keepalive_intvl = _KEEPALIVE_INTERVAL_SECONDS
            made.tcp_keepalive_cnt = _KEEPALIVE_PROBES
            if self._gate is not None:
                self._gate.protect(made)
            elif self._own_keys is not None:
                self._own_keys.protect_client(made)
            if self._binds and not self._is_shared:
                made.handshake_ivl = int(HANDSHAKE_SECONDS * _MS_PER_SECOND)
        except BaseException:
            made.close(linger=0)
            raise
        return made

    def _make_limits(self, zmq_socket: Any, listener: HeldListener | None) -> PeerLimits | None:
        if not self._binds or self._is_shared:
            return None
        return PeerLimits(
            zmq_socket,
            self._max_peers,
            PEER_BURST_BYTES,
            PEER_BYTES_PER_SECOND,
            max_lag_bytes=self._max_lag_bytes,
            budget=self._budget if is_tcp(self._endpoint) else None,
            has_keys=self._gate is not None,
            max_held_bytes=self.max_total_bytes if self._keeps else None,
            listener=listener,
        )

    def open(self) -> str:
        """Bind or connect; the endpoint, with the port that the system chose."""
        if self._binds:
            self._endpoint = bind(self.socket, self._endpoint)
            if self._limits is not None:
                self._limits.start()
        else:
            self.socket.connect(self._endpoint)
        return self._endpoint

    @property
    def num_lagging(self) -> int:
        """Connections cut since creation because too much waited for them."""
        return self._limits.num_lagging if self._limits is not None else 0

    @property
    def num_refused(self) -> int:
        """Connections since creation that failed in the handshake, or were cut for another reason."""
        limits = self._limits
        return limits.num_cut - limits.num_lagging + limits.num_failed_handshakes if limits is not None else 0

    @property
    def num_received_bytes(self) -> int:
        """What peers have sent since creation at most, as far as they are known by now; 0 where it is not told."""
        return self._budget.num_bytes

    def wire_bytes(self, num_bytes: int, num_frames: int) -> int:
        """What peers send for this many bytes in short frames; connections and their ends not counted."""
        return num_bytes + num_frames * (_SHORT_HEADER_BYTES + self._frame_bytes)

    def note_published(self, frames: tuple[bytes, ...]) -> None:
        """A message goes to each peer that wants it."""
        if self._limits is None:
            return
        num_bytes = 0
        for frame in frames:
            body = len(frame) + self._frame_bytes
            num_bytes += body + (_SHORT_HEADER_BYTES if body < _LONG_FRAME_BYTES else _LONG_HEADER_BYTES)
        self._limits.note_published(num_bytes)

    def renew(self) -> bool:
        """Replace ``socket`` by one that keeps nothing, at the same port, which is never free. All connections are cut;
        libzmq's peers connect again. False, and nothing has changed, where there is no port, or no descriptor left."""
        old = self._limits
        if old is None or old.listener is None:
            return False
        made = limits = None
        try:
            made = self._make_socket()
            limits = self._make_limits(made, old.listener)
            made.setsockopt(self._zmq.USE_FD, old.listener.duplicate())
            bind(made, self._endpoint)
        except (OSError, self._zmq.ZMQError) as error:
            logger.warning("The socket at %s is not renewed: %s", self._endpoint, error)
            if limits is not None:
                limits.close()
            if made is not None:
                made.close(linger=0)
            return False
        old.close()
        self.socket.close(linger=0)
        if limits is not None:
            limits.continue_counts(old)
            limits.start()
        self.socket, self._limits = made, limits
        return True

    def close_socket(self, linger_ms: int) -> None:
        """A second call does nothing."""
        if self._limits is not None:
            self._limits.close()
            if self._limits.listener is not None:
                self._limits.listener.close()
        opened = getattr(self, "socket", None)
        if opened is not None:
            opened.close(linger=linger_ms)

    def close_context(self) -> None:
        """After the socket; waits as long as that lingers."""
        if self._gate is not None:
            self._gate.close()
        if not self._is_shared:
            self._context.term()
