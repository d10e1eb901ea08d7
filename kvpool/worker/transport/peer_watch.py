"""Limits for strangers at a scheduler's socket, which hold also while the scheduler computes or has nothing to do."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from kvpool.network.peer_limits import LOOK_SECONDS, PeerLimits

MAX_STRANGERS = 64
"""Connections at a time of peers that have not reported yet, workers that load a model among them; twice
the number of workers where that is more."""

BURST_BYTES = 128 * 2**10
BYTES_PER_SECOND = 16 * 2**10
"""What a stranger may send: a report, and after an interruption an answer. In messages of a byte it takes up to thirty
times as much memory."""

_IDLE_SECONDS = 0.2  # the longest that a close waits
_MS_PER_SECOND = 1000


class PeerWatch:
    """A thread that cuts the connections of strangers which go beyond the limits.

    Args:
        zmq_socket: of the scheduler, before it is bound.
        num_workers: that it waits for.
    """

    def __init__(self, zmq_socket: Any, num_workers: int) -> None:
        max_peers = max(MAX_STRANGERS, 2 * num_workers)
        self._limits = PeerLimits(zmq_socket, max_peers, BURST_BYTES, BYTES_PER_SECOND, cuts_oldest=True)
        self._exempt: deque[int] = deque()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """To call once the socket is bound."""
        self._limits.find_place()
        self._thread = threading.Thread(target=self._run, name="kvpool-peer-watch", daemon=True)
        self._thread.start()

    @property
    def num_cut(self) -> int:
        """Connections so far that were cut, or ended before they were ZeroMQ's."""
        return self._limits.num_cut + self._limits.num_failed_handshakes

    def exempt(self, frame: Any) -> None:
        """A connection is a worker's.

        Args:
            frame: of pyzmq, that came over it.
        """
        try:
            self._exempt.append(int(frame.get("__fd")))
        except (LookupError, ValueError):  # a ZeroMQ that does not tell: the limits stay
            return

    def _run(self) -> None:
        limits = self._limits
        while not self._is_closing.is_set():
            limits.monitor.poll(int((LOOK_SECONDS if limits.num_peers else _IDLE_SECONDS) * _MS_PER_SECOND))
            limits.look()
            while self._exempt:
                limits.exempt(self._exempt.popleft())

    def close(self) -> None:
        """Before the socket is closed."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
        self._limits.close()
