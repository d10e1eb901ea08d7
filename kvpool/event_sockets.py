"""The two ZeroMQ sockets that publish KV cache events, frame for frame as vLLM 0.32 does.

A PUB socket sends (topic, sequence number, payload): 8 bytes big-endian counted from 0, and a ``KVEventBatch`` in
msgpack. A subscriber that sees a gap asks the replay socket, a ROUTER: it sends (empty, first sequence number it
wants) and gets one (empty, topic, sequence number, payload) for each batch from there on that is still remembered,
then (empty, empty, ``END_OF_REPLAY``, empty). It needs a DEALER for that: a REQ takes one answer only.

Neither socket ever makes the sender wait. What a peer does not fetch is lost for it beyond a bound, and the sequence
numbers show it. Each has a ZeroMQ context, and so an I/O thread, of its own: whatever comes in by one does not hold up
the other.
"""

from __future__ import annotations

import os
from typing import Any

from kvpool.curve import HANDSHAKE_SECONDS, ClientGate, CurveKeys, is_tcp, require_protection
from kvpool.event_endpoints import bind, is_bind_endpoint, offset_endpoint_port
from kvpool.event_replay import END_OF_REPLAY, SEQUENCE_NUMBER_BYTES, RememberedBatches, ReplayServer
from kvpool.peer_limits import PeerLimits

__all__ = ["END_OF_REPLAY", "EventSockets"]

LOOPBACK_ENDPOINT = "tcp://127.0.0.1:5557"

MAX_REQUEST_BYTES = 1024
"""The largest frame that either socket takes: a subscription to a topic of less than that, a replay request."""

_MAX_UNREAD_MESSAGES = 16  # of one peer; TCP holds back the others
_RECEIVE_BUFFER_BYTES = 4096  # the kernel's: what little peers say fits, and a flood comes in slowly
_REPLAY_HWM = 128  # what one client is ahead of what it fetches
_KEEPALIVE_IDLE_SECONDS = 60
_KEEPALIVE_INTERVAL_SECONDS = 10
_KEEPALIVE_PROBES = 3
_MS_PER_SECOND = 1000

_LONG_FRAME_BYTES = 256  # from there on, a frame has the longer header
_SHORT_HEADER_BYTES, _LONG_HEADER_BYTES = 2, 9
_CURVE_FRAME_BYTES = 33


class EventSockets:
    """Opened by one thread, then used by one other.

    Args:
        endpoint: where the PUB socket binds, or connects (``is_bind_endpoint``); None to bind ``LOOPBACK_ENDPOINT``.
        replay_endpoint: where the replay socket binds; None for no replay.
        data_parallel_rank: added to both (``offset_endpoint_port``).
        topic: first frame of each message.
        hwm: messages kept for a slow subscriber, 0 for no bound.
        num_remembered: batches remembered for replays.
        max_buffered_bytes: of the batches remembered; and of those that wait for one subscriber over TCP, which is cut
            beyond.
        max_peers: connections of each socket that binds.
        keys: folder of CURVE keys for TCP; None for none.
        insecure: whether to do without on addresses that other machines reach.

    Attributes:
        endpoint, replay_endpoint: in use, with rank and the port that the system chose, where it was asked to.
        zmq: pyzmq.

    Raises:
        ImportError: pyzmq is not installed.
        InvalidArgumentError: an endpoint that has no place for the rank, or needs keys and has none; or bad keys.
        zmq.ZMQError: an endpoint can't be bound or connected.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None,
        data_parallel_rank: int,
        topic: str,
        hwm: int,
        num_remembered: int,
        *,
        max_buffered_bytes: int,
        max_peers: int,
        keys: str | os.PathLike[str] | None,
        insecure: bool,
    ) -> None:
        self.zmq = _import_zmq()
        self.endpoint: str = offset_endpoint_port(endpoint or LOOPBACK_ENDPOINT, data_parallel_rank)
        self.replay_endpoint = offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._binds = not endpoint or is_bind_endpoint(self.endpoint)
        for address in (self.endpoint, self.replay_endpoint):
            if address:
                require_protection(address, keys, insecure)
        self._topic = topic.encode()
        self._hwm = hwm
        self._max_peers = max_peers
        self._keys = keys
        self._remembered = RememberedBatches(num_remembered, max_buffered_bytes)
        self._pub: _Opened | None = None
        self._replay: _Opened | None = None
        self._replay_server: ReplayServer | None = None
        self._poller = self.zmq.Poller()
        self._num_full = 0
        try:
            self._open(max_buffered_bytes)
        except BaseException:
            self.close(linger_seconds=0)
            raise

    def _open(self, max_buffered_bytes: int) -> None:
        zmq = self.zmq
        self._pub = _Opened(
            zmq,
            zmq.PUB,
            self.endpoint,
            self._binds,
            self._keys,
            self._max_peers,
            sndhwm=self._hwm,
            max_lag_bytes=max_buffered_bytes,
        )
        # A full subscriber is told first, and only then left out; see send().
        self._pub.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.endpoint = self._pub.open()
        if self.replay_endpoint is not None:
            self._replay = _Opened(
                zmq, zmq.ROUTER, self.replay_endpoint, True, self._keys, self._max_peers, sndhwm=_REPLAY_HWM
            )
            # So a peer that is gone or full is told, and not left out in silence.
            self._replay.socket.router_mandatory = True
            self.replay_endpoint = self._replay.open()
            self._replay_server = ReplayServer(zmq, self._replay.socket, self._remembered, self._topic)

    def _all(self) -> list[_Opened]:
        return [opened for opened in (self._pub, self._replay) if opened is not None]

    @property
    def num_overflows(self) -> int:
        """How often, since creation, more waited for a subscriber than may, so that it lost some."""
        limits = self._pub.limits if self._pub else None
        return self._num_full + (limits.num_lagging if limits else 0)

    @property
    def num_refused_requests(self) -> int:
        """Replay requests since creation that were none, or too many of one client."""
        return self._replay_server.num_refused if self._replay_server else 0

    @property
    def num_abandoned_replays(self) -> int:
        """Clients since creation that did not fetch the answer to a replay request to its end."""
        return self._replay_server.num_abandoned if self._replay_server else 0

    @property
    def num_refused_peers(self) -> int:
        """Connections since creation that failed in ZeroMQ's handshake (silence, no key that is admitted), or were cut
        because they went beyond a limit. Without those that ZeroMQ ends itself because of a frame that is none or too
        large: it does not tell of them."""
        limits = [opened.limits for opened in self._all() if opened.limits is not None]
        return sum(each.num_cut - each.num_lagging + each.num_failed_handshakes for each in limits)

    def close(self, linger_seconds: float) -> None:
        """Close both; what was sent may take so long to leave."""
        opened = self._all()
        for each in opened:
            each.close_socket(int(linger_seconds * _MS_PER_SECOND))
        for each in opened:
            each.close_context()

    def wait(self, file_descriptor: int, timeout_ms: int | None) -> bool:
        """Do what the sockets' peers ask for, and tell whether a file descriptor can be read.

        Args:
            timeout_ms: how long to wait for either; None for ever.
        """
        self._poller.register(file_descriptor, self.zmq.POLLIN)
        if self._replay is not None and self._replay_server is not None:
            # Register with no events is to unregister.
            self._poller.register(self._replay.socket, self.zmq.POLLIN if self._replay_server.reads_requests else 0)
        ready = {socket for socket, _ in self._poller.poll(self._wait_ms(timeout_ms))}
        if self._replay_server is not None:
            self._replay_server.work()
        return file_descriptor in ready

    def _wait_ms(self, timeout_ms: int | None) -> int | None:
        times = [timeout_ms, self._replay_server.next_work_ms() if self._replay_server else None]
        return min((each for each in times if each is not None), default=None)

    def send(self, sequence_number: int, payload: bytes) -> None:
        """Publish an encoded batch, and remember it for replays."""
        if self._pub is None:
            raise RuntimeError("the sockets are closed")
        pub = self._pub.socket
        message = (self._topic, sequence_number.to_bytes(SEQUENCE_NUMBER_BYTES, "big"), payload)
        try:
            pub.send_multipart(message, self.zmq.NOBLOCK)
        except self.zmq.Again:
            # Nobody has got anything yet. Now all get it but those that have no room.
            self._num_full += 1
            pub.setsockopt(self.zmq.XPUB_NODROP, 0)
            try:
                pub.send_multipart(message, self.zmq.NOBLOCK)
            finally:
                pub.setsockopt(self.zmq.XPUB_NODROP, 1)
        self._remembered.append(sequence_number, payload)
        if self._pub.limits is not None:
            self._pub.limits.note_published(self._pub.wire_bytes(message))


class _Opened:
    """A socket with what watches over it, in a context of its own; that of the process for ``inproc``, which needs
    that.

    Args:
        binds: rather than connects.
        keys: folder; for TCP alone. The side that binds is CURVE's server.
    """

    def __init__(
        self,
        zmq: Any,
        kind: int,
        endpoint: str,
        binds: bool,
        keys: str | os.PathLike[str] | None,
        max_peers: int,
        sndhwm: int,
        max_lag_bytes: int | None = None,
    ) -> None:
        self.limits: PeerLimits | None = None
        self._frame_bytes = 0  # that the encryption of a frame adds
        self._gate: ClientGate | None = None
        self._endpoint = endpoint
        self._binds = binds
        own_keys = None
        if keys is not None and is_tcp(endpoint):
            own_keys = CurveKeys.load_server(keys) if binds else CurveKeys.load_client(keys)
        self._is_shared = endpoint.startswith("inproc://")
        self._context = zmq.Context.instance() if self._is_shared else zmq.Context()
        try:
            self.socket = self._context.socket(kind)
            self.socket.sndhwm = sndhwm
            self.socket.rcvhwm = _MAX_UNREAD_MESSAGES
            self.socket.maxmsgsize = MAX_REQUEST_BYTES
            self.socket.rcvbuf = _RECEIVE_BUFFER_BYTES
            self._keep_alive(zmq)
            if own_keys is not None and binds:
                self._gate = ClientGate(self._context, own_keys)
                self._gate.protect(self.socket)
                self._frame_bytes = _CURVE_FRAME_BYTES
            elif own_keys is not None:
                own_keys.protect_client(self.socket)
            if binds and not self._is_shared:
                self.socket.handshake_ivl = int(HANDSHAKE_SECONDS * _MS_PER_SECOND)
                self.limits = PeerLimits(self.socket, max_peers, max_lag_bytes=max_lag_bytes)
        except BaseException:
            self.close_socket(0)
            self.close_context()
            raise

    def _keep_alive(self, zmq: Any) -> None:
        """A machine that is gone without a word must not hold a connection for ever. The kernel asks: ZeroMQ's own
        heartbeats would be new on the wire."""
        self.socket.tcp_keepalive = 1
        self.socket.tcp_keepalive_idle = _KEEPALIVE_IDLE_SECONDS
        self.socket.tcp_keepalive_intvl = _KEEPALIVE_INTERVAL_SECONDS
        self.socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES

    def open(self) -> str:
        """Bind or connect; the endpoint, with the port that the system chose."""
        if self._binds:
            endpoint = bind(self.socket, self._endpoint)
            if self.limits is not None:
                self.limits.start()
            return endpoint
        self.socket.connect(self._endpoint)
        return self._endpoint

    def wire_bytes(self, frames: tuple[bytes, ...]) -> int:
        """What ZeroMQ makes of a message."""
        num_bytes = 0
        for frame in frames:
            body = len(frame) + self._frame_bytes
            num_bytes += body + (_SHORT_HEADER_BYTES if body < _LONG_FRAME_BYTES else _LONG_HEADER_BYTES)
        return num_bytes

    def close_socket(self, linger_ms: int) -> None:
        if self.limits is not None:
            self.limits.close()
        socket = getattr(self, "socket", None)
        if socket is not None:
            socket.close(linger=linger_ms)

    def close_context(self) -> None:
        """After the socket; waits as long as that lingers."""
        if self._gate is not None:
            self._gate.close()
        if not self._is_shared:
            self._context.term()


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ImportError("publishing events needs pyzmq: pip install kvpool[events]") from error
    return zmq
