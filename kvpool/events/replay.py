"""Replays of published batches: what is remembered, and the socket that answers requests for it.

A request may be eight bytes and its answer the whole memory, so an answer is given in pieces, clients in turn, and all
of it in a share of the thread's time: whoever asks too much waits, and not the publishing. Requests are read as they
come, as ZeroMQ holds any number of them, and refused while too many wait. A client that fetches nothing for a while, or
is gone, loses its answer.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("kvpool")

SEQUENCE_NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_NUMBER_BYTES, "big", signed=True)

MAX_WAITING_REQUESTS = 512
"""Requests that wait for their answers, of all clients; beyond that they are refused."""

MAX_WAITING_REQUESTS_PER_CLIENT = 4
"""Of one client; beyond that they are refused."""

STALL_SECONDS = 10.0
"""A client that takes nothing for so long loses its answer."""

_TURN_SECONDS = 0.002
_REST_PER_WORK = 3  # so a quarter of the time
_RETRY_SECONDS = 0.002  # when all clients have to fetch first
_MESSAGES_PER_PIECE = 32
_REQUESTS_PER_TURN = 1024
_REQUESTS_PER_CLOCK = 16
_MS_PER_SECOND = 1000


class RememberedBatches:
    """The last batches that were published.

    Args:
        max_batches: how many.
        max_bytes: of their payloads together.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: dict[int, tuple[int, bytes]] = {}  # by their places, which have no gaps
        self.first_place = 0
        self.end_place = 0
        self.num_bytes = 0

    def append(self, sequence_number: int, payload: bytes) -> None:
        """Amortized O(1)."""
        self._batches[self.end_place] = sequence_number, payload
        self.end_place += 1
        self.num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._batches.pop(self.first_place)[1])
            self.first_place += 1

    def at(self, place: int) -> tuple[int, bytes]:
        """Sequence number and payload."""
        return self._batches[place]

    def find(self, sequence_number: int) -> int:
        """Place of the first batch with this number or a later one. O(log batches)."""
        places = range(self.first_place, self.end_place)
        return self.first_place + bisect_left(places, sequence_number, key=lambda place: self._batches[place][0])


@dataclass
class _Client:
    identity: bytes
    answers: deque[tuple[int, int]]  # places that are to be sent still, first and end; one answer after the other
    stalled_since: float | None = None


class ReplayServer:
    """Answers requests for replays from a ROUTER socket that never waits and tells when a peer is gone or full.

    Attributes:
        num_refused: requests since creation that were none, or one too many of a client.
        num_abandoned: clients since creation that did not fetch their answers to the end.
        num_bytes_read, num_frames_read: of requests, refused ones too.
    """

    def __init__(self, zmq: Any, router: Any, remembered: RememberedBatches, topic: bytes) -> None:
        self._zmq = zmq
        self._router = router
        self._remembered = remembered
        self._topic = topic
        self._clients: dict[bytes, _Client] = {}  # in the order of their turns
        self._num_waiting = 0
        self._rests_until = 0.0
        self.num_refused = 0
        self.num_abandoned = 0
        self.num_bytes_read = self.num_frames_read = 0

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is sent."""
        return not self._clients

    def start_over(self, router: Any) -> None:
        """With another socket, to which none of the clients is connected."""
        self._router = router
        for client in self._clients.values():
            self._abandon(client, "the connection was cut")
        self._clients.clear()

    @property
    def reads_requests(self) -> bool:
        """Whether the socket is worth a look for requests now."""
        return time.monotonic() >= self._rests_until

    def next_work_ms(self) -> int | None:
        """Milliseconds until ``work`` can do more, None if only a request can make it so."""
        seconds = self._rests_until - time.monotonic()
        if seconds > 0:
            return math.ceil(seconds * _MS_PER_SECOND)
        return 0 if self._clients else None

    def work(self) -> None:
        """Read requests and send pieces of answers, for a few milliseconds at most; nothing if it is not time yet."""
        if time.monotonic() < self._rests_until:
            return
        start = time.thread_time()
        has_worked = self._read_requests(start) > 0
        for identity in list(self._clients):
            client = self._clients.pop(identity)
            has_worked |= self._send_piece(client)
            if client.answers:
                self._clients[identity] = client
            if time.thread_time() - start > _TURN_SECONDS:
                break
        rest = max(_REST_PER_WORK * (time.thread_time() - start), 0.0 if has_worked else _RETRY_SECONDS)
        self._rests_until = time.monotonic() + rest if has_worked or self._clients else 0.0

    def _read_requests(self, start: float) -> int:
        for num_read in range(_REQUESTS_PER_TURN):
            if num_read % _REQUESTS_PER_CLOCK == 0 and time.thread_time() - start > _TURN_SECONDS:
                return num_read
            try:
                identity, *request = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return num_read
            self.num_frames_read += len(request)
            self.num_bytes_read += sum(map(len, request))
            if len(request) != 2 or request[0] or len(request[1]) != SEQUENCE_NUMBER_BYTES:
                self._refuse(f"{len(request)} frames of {sum(map(len, request))} bytes")
                continue
            if self._num_waiting >= MAX_WAITING_REQUESTS:
                self._refuse(f"{self._num_waiting} wait already")
                continue
            client = self._clients.setdefault(identity, _Client(identity, deque()))
            if len(client.answers) >= MAX_WAITING_REQUESTS_PER_CLIENT:
                self._refuse(f"its client has {len(client.answers)} open already")
                continue
            place = self._remembered.find(int.from_bytes(request[1], "big"))
            # To the last batch of now: what is published later comes by the other socket.
            client.answers.append((place, self._remembered.end_place))
            self._num_waiting += 1
        return _REQUESTS_PER_TURN

    def _refuse(self, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused == 1:
            logger.warning("A replay request was refused: %s. Further ones are only counted", reason)

    def _send_piece(self, client: _Client) -> bool:
        """Send to a client whose turn it is. Whether anything could be done."""
        num_sent = 0
        try:
            while client.answers and num_sent < _MESSAGES_PER_PIECE:
                self._send_next(client)
                num_sent += 1
        except self._zmq.Again:
            now = time.monotonic()
            if num_sent or client.stalled_since is None:
                client.stalled_since = now
            elif now - client.stalled_since > STALL_SECONDS:
                self._abandon(client, "it fetches nothing")
                return True
            return num_sent > 0
        except self._zmq.ContextTerminated:
            raise
        except self._zmq.ZMQError as error:
            self._abandon(client, str(error))
            return True
        client.stalled_since = None
        return True

    def _send_next(self, client: _Client) -> None:
        place, end_place = client.answers[0]
        place = max(place, self._remembered.first_place)  # what is no longer remembered is a gap
        if place >= end_place:
            self._send(client, b"", END_OF_REPLAY, b"")
            client.answers.popleft()
            self._num_waiting -= 1
            return
        sequence_number, payload = self._remembered.at(place)
        self._send(client, self._topic, sequence_number.to_bytes(SEQUENCE_NUMBER_BYTES, "big"), payload)
        client.answers[0] = place + 1, end_place

    def _send(self, client: _Client, topic: bytes, number: bytes, payload: bytes) -> None:
        self._router.send_multipart((client.identity, b"", topic, number, payload), self._zmq.NOBLOCK)

    def _abandon(self, client: _Client, reason: str) -> None:
        self._num_waiting -= len(client.answers)
        client.answers.clear()
        self.num_abandoned += 1
        if self.num_abandoned == 1:
            logger.warning("A replay was cut short: %s. Further ones are only counted", reason)
