"""The two ZeroMQ sockets that publish KV cache events, frame for frame as vLLM 0.32 does.

A PUB socket sends (topic, sequence number, payload): 8 bytes big-endian counted from 0, and a ``KVEventBatch`` in
msgpack. A subscriber that sees a gap asks the replay socket, a ROUTER: it sends (empty, first sequence number it
wants) and gets one (empty, topic, sequence number, payload) for each batch from there on that is still remembered,
then (empty, empty, ``END_OF_REPLAY``, empty). It needs a DEALER for that: a REQ takes one answer only.

Neither socket ever makes the sender wait. What a peer does not fetch is lost for it beyond a bound, and the sequence
numbers show it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

from kvpool.event_endpoints import bind, is_bind_endpoint, offset_endpoint_port

logger = logging.getLogger("kvpool")

SEQUENCE_NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_NUMBER_BYTES, "big", signed=True)

_NUM_REPLAY_REQUEST_FRAMES = 3
_MS_PER_SECOND = 1000
_REPLAY_SLACK = 1000


class EventSockets:
    """Opened by one thread, then used by one other.

    Args:
        endpoint: where the PUB socket binds, or connects (``is_bind_endpoint``).
        replay_endpoint: where the replay socket binds; None for no replay.
        data_parallel_rank: added to both (``offset_endpoint_port``).
        topic: first frame of each message.
        hwm: messages kept for a slow subscriber.
        num_remembered: batches remembered for replays.

    Attributes:
        endpoint, replay_endpoint: in use, with rank and the port that the system chose, where it was asked to.
        zmq: pyzmq.

    Raises:
        ImportError: pyzmq is not installed.
        InvalidArgumentError: an endpoint that has no place for the rank.
        zmq.ZMQError: an endpoint can't be bound or connected.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        data_parallel_rank: int,
        topic: str,
        hwm: int,
        num_remembered: int,
    ) -> None:
        self.zmq = _import_zmq()
        self.endpoint = offset_endpoint_port(endpoint, data_parallel_rank)
        self.replay_endpoint = offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._topic = topic.encode()
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=num_remembered)
        self._pub: Any = None
        self._replay: Any = None
        self._poller = self.zmq.Poller()
        try:
            self._open(self.zmq.Context.instance(), hwm, num_remembered)
        except BaseException:
            self.close(linger_seconds=0)
            raise

    def _open(self, context: Any, hwm: int, num_remembered: int) -> None:
        self._pub = context.socket(self.zmq.PUB)
        self._pub.set_hwm(hwm)
        if is_bind_endpoint(self.endpoint):
            self.endpoint = bind(self._pub, self.endpoint)
        else:
            self._pub.connect(self.endpoint)
        if self.replay_endpoint is not None:
            self._replay = context.socket(self.zmq.ROUTER)
            # What does not fit is lost, and the end of an answer would be. ZeroMQ may count up to half of the bound
            # as taken although the peer has read it.
            self._replay.set_hwm(2 * num_remembered + _REPLAY_SLACK)
            self.replay_endpoint = bind(self._replay, self.replay_endpoint)
            self._poller.register(self._replay, self.zmq.POLLIN)

    def close(self, linger_seconds: float) -> None:
        """Close both; what was sent may take so long to leave. The context stays, others may use it."""
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=int(linger_seconds * _MS_PER_SECOND))

    def wait(self, file_descriptor: int, timeout_ms: int | None) -> bool:
        """Answer a replay request if there is one, and tell whether a file descriptor can be read.

        Args:
            timeout_ms: how long to wait for either; None for ever.
        """
        self._poller.register(file_descriptor, self.zmq.POLLIN)
        ready = {socket for socket, _ in self._poller.poll(timeout_ms)}
        if self._replay in ready:
            self._answer_replay_request(self._replay.recv_multipart())
        return file_descriptor in ready

    def send(self, sequence_number: int, payload: bytes) -> None:
        """Publish an encoded batch, and remember it for replays."""
        self._pub.send_multipart((self._topic, _encode(sequence_number), payload))
        self._remembered.append((sequence_number, payload))

    def _answer_replay_request(self, frames: list[bytes]) -> None:
        if len(frames) != _NUM_REPLAY_REQUEST_FRAMES:
            logger.warning("A replay request of %d frames was ignored", len(frames))
            return
        client, _, first = frames
        try:
            for message in self._replay_messages(int.from_bytes(first, "big")):
                self._replay.send_multipart((client, b"", *message))
        except self.zmq.ContextTerminated:
            raise
        except self.zmq.ZMQError:
            # The publishing goes on, whatever becomes of one client.
            logger.exception("A replay was cut short")

    def _replay_messages(self, first_sequence_number: int) -> Iterable[tuple[bytes, bytes, bytes]]:
        for sequence_number, payload in self._remembered:
            if sequence_number >= first_sequence_number:
                yield self._topic, _encode(sequence_number), payload
        yield b"", END_OF_REPLAY, b""


def _encode(sequence_number: int) -> bytes:
    return sequence_number.to_bytes(SEQUENCE_NUMBER_BYTES, "big")


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ImportError("publishing events needs pyzmq: pip install kvpool[events]") from error
    return zmq
