"""Publishes batches of KV cache events from a thread, so that the engine that makes them never waits.

The caller leaves a batch in a queue with its sequence number; a thread encodes and sends it (``EventSockets``, which
tells the protocol). If the queue is full the batch is dropped and counted, and its sequence number with it:
subscribers see a gap that a replay does not fill, which tells them to start over. vLLM makes the caller wait instead.

The caller wakes the thread through a pipe, so that the thread waits for batches and replay requests at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.events.sockets import END_OF_REPLAY, EventSockets
from kvpool.events.wire import EventBatch
from kvpool.network.curve import find_keys_folder
from kvpool.network.peer_limits import DEFAULT_MAX_PEERS

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger("kvpool")

DEFAULT_BUFFER_STEPS = 10_000
DEFAULT_HWM = 100_000
DEFAULT_MAX_QUEUE_SIZE = 100_000
DEFAULT_MAX_BUFFERED_BYTES = 256 * 2**20

_BATCHES_PER_TURN = 64
_READ_SIZE = 4096


class PublisherClosedError(KvpoolError, RuntimeError):
    """A batch was given to a publisher that is shut down, or whose thread is gone (as in a forked child)."""


@dataclass
class KVEventsConfig:
    """Whether and how events are published; the parameters of ``ZmqEventPublisher``.

    Attributes:
        enable_kv_cache_events: whether at all.
        publisher: name in ``EventPublisherFactory``; None for "zmq" with events on, "null" with events off.
        endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic: as for ``ZmqEventPublisher``.
        keys, insecure, max_peers, max_buffered_bytes: as for ``ZmqEventPublisher``.

    vLLM: ``KVEventsConfig``, which has no field after ``topic``, and where the default endpoint is all interfaces.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    hwm: int = DEFAULT_HWM
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    topic: str = ""
    keys: str | os.PathLike[str] | None = None
    insecure: bool = False
    max_peers: int = DEFAULT_MAX_PEERS
    max_buffered_bytes: int = DEFAULT_MAX_BUFFERED_BYTES

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


class EventPublisher(ABC):
    """Takes batches of events in order, one publisher per data-parallel rank.

    Args:
        data_parallel_rank: written into batches that name none.

    vLLM: ``EventPublisher``.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Hand a batch over; it belongs to the publisher from then on."""

    @abstractmethod
    def shutdown(self) -> None:
        """Publish what was handed over, as far as that takes no longer than a moment, and stop."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """The configuration with endpoints as they are in use, None for a publisher that has none."""
        return None


class NullEventPublisher(EventPublisher):
    """Publishes nothing.

    vLLM: ``NullEventPublisher``.
    """

    def publish(self, events: EventBatch) -> None:
        return

    def shutdown(self) -> None:
        return


class ZmqEventPublisher(EventPublisher):
    """Publishes over ZeroMQ from a thread of its own. Calls may come from any thread. Also a context manager.

    Args:
        data_parallel_rank: rank of the engine; added to the ports of both endpoints.
        endpoint: where the PUB socket binds (``tcp://*:5557``, ``ipc://...``, ``inproc://...``) or connects
            (``tcp://host:5557``, any TCP address without a wildcard). None to bind port 5557 of 127.0.0.1.
        replay_endpoint: where the replay socket binds; None for no replay.
        buffer_steps: batches remembered for replays.
        hwm: messages ZeroMQ keeps for a slow subscriber; beyond that they are lost for it. 0 for no bound.
        max_queue_size: batches that wait for the thread; beyond that ``publish`` drops them.
        topic: first frame of each message, what subscribers filter by.
        keys: folder of CURVE keys for TCP (``kvpool keygen``); None for the one that ``KVPOOL_CURVE_KEYS`` names, if it
            does. Where a socket binds, the folder's clients are admitted; where it connects, ``server.key`` is the
            other side's and ``client.key_secret`` this one's.
        insecure: do without keys on addresses that other machines can reach, which is refused otherwise. SECURITY.md
            tells what everybody learns who can connect.
        max_peers: connections that each socket accepts.
        max_buffered_bytes: bytes of the batches remembered; and of those that wait for one slow subscriber, which is
            cut beyond (TCP on Linux; elsewhere only ``hwm`` counts).

    Attributes:
        endpoint, replay_endpoint: in use, with rank and the port that the system chose, where it was asked to.
        published_batches: batches sent since creation.
        dropped_batches: batches lost since creation: queue full, not to be encoded, or left over at shutdown.
        SHUTDOWN_TIMEOUT: seconds that ``shutdown`` waits for what is queued.
        END_SEQ: the sequence number that ends a replay.

    Raises:
        ImportError: pyzmq is not installed.
        InvalidArgumentError: an impossible number, an endpoint that has no place for the rank or needs keys and has
            none, or files that hold no usable keys.
        zmq.ZMQError: an endpoint can't be bound or connected.

    vLLM: ``ZmqEventPublisher``, which has no parameter after ``topic``, and binds all interfaces by default.
    """

    SHUTDOWN_TIMEOUT: ClassVar[float] = 1.0
    END_SEQ: ClassVar[bytes] = END_OF_REPLAY

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str | None = None,
        replay_endpoint: str | None = None,
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        hwm: int = DEFAULT_HWM,
        max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE,
        topic: str = "",
        *,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        max_peers: int = DEFAULT_MAX_PEERS,
        max_buffered_bytes: int = DEFAULT_MAX_BUFFERED_BYTES,
    ) -> None:
        super().__init__(data_parallel_rank)
        for name, value, least in (
            ("buffer_steps", buffer_steps, 0),
            ("hwm", hwm, 0),
            ("max_queue_size", max_queue_size, 1),
            ("max_peers", max_peers, 1),
            ("max_buffered_bytes", max_buffered_bytes, 0),
        ):
            if value < least:
                raise InvalidArgumentError(f"{name} must be at least {least}, not {value}")
        keys = find_keys_folder(keys)
        self._sockets = EventSockets(
            endpoint,
            replay_endpoint,
            data_parallel_rank,
            topic,
            hwm,
            buffer_steps,
            max_buffered_bytes=max_buffered_bytes,
            max_peers=max_peers,
            keys=keys,
            insecure=insecure,
        )
        self.endpoint = self._sockets.endpoint
        self.replay_endpoint = self._sockets.replay_endpoint
        self._config = KVEventsConfig(
            True,
            "zmq",
            self.endpoint,
            self.replay_endpoint,
            buffer_steps,
            hwm,
            max_queue_size,
            topic,
            keys,
            insecure,
            max_peers,
            max_buffered_bytes,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self.published_batches = 0
        self.dropped_batches = 0

        # Written by callers and the thread, under the lock.
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, EventBatch]] = deque()
        self._next_sequence_number = 0
        self._is_awake = False
        self._stop_at: float | None = None

        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvpool-event-publisher")
        self._thread.start()

    @property
    def queued_batches(self) -> int:
        """Batches that wait for the thread now."""
        return len(self._queue)

    @property
    def overflows(self) -> int:
        """How often, since creation, batches for a subscriber became more than ``hwm`` or ``max_buffered_bytes``
        allow, so that it lost some. It sees a gap, and can ask for a replay."""
        return self._sockets.num_overflows

    @property
    def refused_peers(self) -> int:
        """Connections since creation that failed in ZeroMQ's handshake (silence, no key that is admitted), or were cut
        because they went beyond a limit. Without those that ZeroMQ ends itself because of a frame that is none or too
        large: it does not tell of them."""
        return self._sockets.num_refused_peers

    @property
    def refused_requests(self) -> int:
        """Replay requests since creation that were none, or too many of one client."""
        return self._sockets.num_refused_requests

    @property
    def abandoned_replays(self) -> int:
        """Clients since creation that were gone, or fetched nothing for a while, before a replay was at its end."""
        return self._sockets.num_abandoned_replays

    def get_publisher_config(self) -> KVEventsConfig:
        return self._config

    # The caller's side

    def publish(self, events: EventBatch) -> None:
        """Queue a batch, or drop and count it if the queue is full. O(1), waits for nothing.

        Args:
            events: not to be changed afterwards. A rank of None becomes this publisher's.

        Raises:
            PublisherClosedError: after ``shutdown``, or in a forked child.
        """
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        # A forked child has no such thread, and perhaps a lock that nobody will release: so first look at the thread.
        if not self._thread.is_alive():
            raise PublisherClosedError("the event publisher is closed, or was made by the parent process")
        with self._lock:
            if self._stop_at is not None:
                raise PublisherClosedError("the event publisher is closed")
            sequence_number = self._next_sequence_number
            self._next_sequence_number += 1
            if len(self._queue) >= self._config.max_queue_size:
                self.dropped_batches += 1
                return
            self._queue.append((sequence_number, events))
            self._wake()

    def shutdown(self) -> None:
        """Stop the thread and close the sockets, after what is queued was sent or ``SHUTDOWN_TIMEOUT`` seconds. What
        is left then is dropped, counted and told in the log. A second call does nothing."""
        if not self._thread.is_alive():
            return
        with self._lock:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + self.SHUTDOWN_TIMEOUT
                self._wake()
        self._thread.join(2 * self.SHUTDOWN_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("The event publisher's thread did not stop; %d batches are queued", self.queued_batches)

    def __enter__(self) -> ZmqEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _wake(self) -> None:
        """Make the thread look at the queue. It reads what is in the pipe each time, so the write can't block."""
        if not self._is_awake:
            self._is_awake = True
            os.write(self._wake_writer, b"\0")

    # The thread's side

    def _run(self) -> None:
        try:
            self._serve()
        except self._sockets.zmq.ContextTerminated:
            logger.warning("The event publisher stops: its ZeroMQ context is gone")
        finally:
            self._sockets.close(self.SHUTDOWN_TIMEOUT)
            self._refuse_more()

    def _serve(self) -> None:
        is_more = False
        while True:
            if self._sockets.wait(self._wake_reader, 0 if is_more else None):
                os.read(self._wake_reader, _READ_SIZE)
            is_more = self._send_some()
            if self._stop_at is not None and (not self._queue or time.monotonic() >= self._stop_at):
                return

    def _send_some(self) -> bool:
        """Send until the queue is empty, or it is time to look at the sockets, or to stop. Whether there may be more;
        if not, the next caller will wake the thread."""
        for _ in range(_BATCHES_PER_TURN):
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                break
            with self._lock:
                if not self._queue:
                    self._is_awake = False
                    return False
                sequence_number, batch = self._queue.popleft()
            self._send(sequence_number, batch)
        return True

    def _refuse_more(self) -> None:
        with self._lock:
            self._stop_at = self._stop_at or time.monotonic()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            if self._queue:
                logger.warning("The event publisher dropped %d batches when it stopped", len(self._queue))
            self.dropped_batches += len(self._queue)
            self._queue.clear()

    def _send(self, sequence_number: int, batch: EventBatch) -> None:
        try:
            self._sockets.send(sequence_number, self._encoder.encode(batch))
        except self._sockets.zmq.ContextTerminated:
            raise
        except Exception:
            logger.exception("The batch of events %d was dropped", sequence_number)
            with self._lock:
                self.dropped_batches += 1
        else:
            self.published_batches += 1


class EventPublisherFactory:
    """Makes publishers by name.

    vLLM: ``EventPublisherFactory``.
    """

    _constructors: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, constructor: Callable[..., EventPublisher]) -> None:
        """Add a publisher under a name; a name that is taken is a KeyError."""
        if name in cls._constructors:
            raise KeyError(f"there is a publisher {name!r} already")
        cls._constructors[name] = constructor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The publisher that a configuration (kvpool's, or vLLM's) asks for; one that publishes nothing for None or
        with events off. An unknown name is an InvalidArgumentError."""
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(data_parallel_rank)
        parameters = asdict(config)
        name = parameters.pop("publisher")
        del parameters["enable_kv_cache_events"]
        if name not in cls._constructors:
            raise InvalidArgumentError(f"there is no publisher {name!r}, but {sorted(cls._constructors)}")
        return cls._constructors[name](data_parallel_rank=data_parallel_rank, **parameters)
