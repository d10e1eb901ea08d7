"""A consumer of vLLM's KV cache events that knows the protocol: live over SUB, and again over the replay socket."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvpool.events.wire import KVEventBatch

CLEARED = {"type": "AllBlocksCleared"}
POLL_MS = 50
PATIENCE_SECONDS = 20.0
END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True)
class EventHistory:
    """All that was published so far, and how it came.

    Attributes:
        events: of each batch, without its time; plain values, decoded with kvpool's classes.
        sequence_numbers: of each batch.
        num_live_batches: how many came over SUB; the first ones may have been sent before the subscription was there.
        live_is_end_of_replay: whether these were the last ones of the replay, byte for byte.
    """

    events: list[list[dict[str, Any]]]
    sequence_numbers: list[int]
    num_live_batches: int
    live_is_end_of_replay: bool


@contextmanager
def endpoints() -> Iterator[tuple[str, str]]:
    """Where to publish and where to replay: sockets in a folder with a short name, as their paths are bounded."""
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        yield f"ipc://{folder}/events", f"ipc://{folder}/replay"


class EventSubscriber:
    """Collects batches from `endpoint` in a thread, from before the publisher binds.

    Attributes:
        live: sequence number and payload of each batch that came over SUB, in order of arrival.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.live: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._stopping = threading.Event()
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(0)
        socket.subscribe(b"")
        socket.connect(endpoint)
        self._thread = threading.Thread(target=self._collect, args=(socket,), daemon=True)
        self._thread.start()

    def _collect(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            if socket.poll(POLL_MS):
                _, sequence_number, payload = socket.recv_multipart()
                self.live.append((int.from_bytes(sequence_number, "big"), payload))
        socket.close(linger=0)

    def replay(self) -> list[tuple[int, bytes]]:
        """Every batch since the publisher started. Raises TimeoutError if the answer has no end."""
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            batches: list[tuple[int, bytes]] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                if not socket.poll(POLL_MS):
                    continue
                *_, sequence_number, payload = socket.recv_multipart()
                if sequence_number == END_OF_REPLAY:
                    return batches
                batches.append((int.from_bytes(sequence_number, "big"), payload))
            raise TimeoutError(f"the replay had no end after {len(batches)} batches")
        finally:
            socket.close(linger=0)

    def history(self, num_cleared: int) -> EventHistory:
        """All batches up to the one that clears the cache for the `num_cleared`-th time; it should be the last.

        The publisher has a thread of its own, so only that a batch came says that all of those before it were sent.
        Raises TimeoutError if it does not come.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        events: list[list[dict[str, Any]]] = []
        while sum(event == CLEARED for batch in events for event in batch) < num_cleared:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cache was not cleared {num_cleared} times in {len(events)} batches")
            batches = self.replay()
            events = _decode(batches)
        first_live = self.live[0][0] if self.live else len(batches)
        self._wait_for(len(batches) - first_live)
        return EventHistory(
            events=events,
            sequence_numbers=[sequence_number for sequence_number, _ in batches],
            num_live_batches=len(self.live),
            live_is_end_of_replay=self.live == batches[first_live:],
        )

    def _wait_for(self, num_batches: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.live) < num_batches:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.live)} of {num_batches} batches came")
            time.sleep(POLL_MS / 1000)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


def _decode(batches: list[tuple[int, bytes]]) -> list[list[dict[str, Any]]]:
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    return [[msgspec.to_builtins(event) for event in decoder.decode(payload).events] for _, payload in batches]
