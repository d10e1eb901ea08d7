"""The two ZeroMQ sockets that publish KV cache events, frame for frame as vLLM 0.32 does.

A PUB socket sends (topic, sequence number, payload): 8 bytes big-endian counted from 0, and a ``KVEventBatch`` in
msgpack. A subscriber that sees a gap asks the replay socket, a ROUTER: it sends (empty, first sequence number it
wants) and gets one (empty, topic, sequence number, payload) for each batch from there on that is still remembered,
then (empty, empty, ``END_OF_REPLAY``, empty). It needs a DEALER for that: a REQ takes one answer only.

Neither socket ever makes the sender wait. What a peer does not fetch is lost for it beyond a bound, and the sequence
numbers show it. Each has a ZeroMQ context, and so an I/O thread, of its own: whatever comes in by one does not hold up
the other. What peers send is bounded by ``WatchedSocket``.
"""

from __future__ import annotations

import os
import time

from kvpool.events.replay import END_OF_REPLAY, SEQUENCE_NUMBER_BYTES, RememberedBatches, ReplayServer
from kvpool.network.curve import require_protection
from kvpool.network.endpoints import is_bind_endpoint, offset_endpoint_port
from kvpool.network.pyzmq import import_zmq
from kvpool.network.watched_socket import WatchedSocket

__all__ = ["END_OF_REPLAY", "EventSockets"]

LOOPBACK_ENDPOINT = "tcp://127.0.0.1:5557"

_REPLAY_HWM = 128  # what one client is ahead of what it fetches
_RENEWAL_CHECK_SECONDS = 1.0
_MS_PER_SECOND = 1000


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
        self.zmq = import_zmq("publishing events needs")
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
        self._pub: WatchedSocket | None = None
        self._replay: WatchedSocket | None = None
        self._replay_server: ReplayServer | None = None
        self._poller = self.zmq.Poller()
        self._num_full = 0
        self._num_explained_bytes = 0  # that the replay socket got and does not keep, when it was renewed last
        self._next_renewal = 0.0
        try:
            self._open(max_buffered_bytes)
        except BaseException:
            self.close(linger_seconds=0)
            raise

    def _open(self, max_buffered_bytes: int) -> None:
        zmq = self.zmq
        # A full subscriber is told first, and only then left out; see send().
        options = {zmq.SNDHWM: self._hwm, zmq.XPUB_NODROP: 1}
        self._pub = WatchedSocket(
            zmq,
            zmq.PUB,
            options,
            self.endpoint,
            binds=self._binds,
            keys=self._keys,
            max_peers=self._max_peers,
            max_lag_bytes=max_buffered_bytes,
            keeps=True,
        )
        self.endpoint = self._pub.open()
        if self.replay_endpoint is not None:
            # So a peer that is gone or full is told, and not left out in silence.
            options = {zmq.SNDHWM: _REPLAY_HWM, zmq.ROUTER_MANDATORY: 1}
            self._replay = WatchedSocket(
                zmq,
                zmq.ROUTER,
                options,
                self.replay_endpoint,
                binds=True,
                keys=self._keys,
                max_peers=self._max_peers,
            )
            self.replay_endpoint = self._replay.open()
            self._replay_server = ReplayServer(zmq, self._replay.socket, self._remembered, self._topic)

    def _all(self) -> list[WatchedSocket]:
        return [opened for opened in (self._pub, self._replay) if opened is not None]

    @property
    def num_overflows(self) -> int:
        """How often, since creation, more waited for a subscriber than may, so that it lost some."""
        return self._num_full + (self._pub.num_lagging if self._pub else 0)

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
        return sum(each.num_refused for each in self._all())

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
        if self._pub is not None:
            # It can never be read, but takes subscriptions, and drops all else, only while it is waited for.
            self._poller.register(self._pub.socket, self.zmq.POLLIN)
        ready = {socket for socket, _ in self._poller.poll(self._wait_ms(timeout_ms))}
        if self._replay_server is not None:
            self._replay_server.work()
            self._renew_replay()
        return file_descriptor in ready

    def _renew_replay(self) -> None:
        """Once clients have sent much that was not read, and may never be: between replays if there is such a time, and
        at twice as much anyway."""
        replay, server = self._replay, self._replay_server
        if replay is None or server is None:
            return
        explained = replay.wire_bytes(server.num_bytes_read, server.num_frames_read)
        kept = replay.num_received_bytes - explained - self._num_explained_bytes
        if kept <= replay.max_total_bytes or time.monotonic() < self._next_renewal:
            return
        if (server.is_idle and not replay.socket.poll(0)) or kept > 2 * replay.max_total_bytes:
            self._poller.register(replay.socket, 0)  # which takes it out, if it is in
            if replay.renew():
                server.start_over(replay.socket)
                self._num_explained_bytes += kept
            else:
                self._next_renewal = time.monotonic() + _RENEWAL_CHECK_SECONDS

    def _wait_ms(self, timeout_ms: int | None) -> int | None:
        times = [timeout_ms]
        if self._replay_server is not None:
            times += [self._replay_server.next_work_ms(), int(_RENEWAL_CHECK_SECONDS * _MS_PER_SECOND)]
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
        self._pub.note_published(message)
