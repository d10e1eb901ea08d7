"""Workers in threads, and other peers of a ``Broadcaster``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from table_digests import TableDigests

from kvpool.scheduler import CachedRequestData, NewRequestData, SchedulerOutput, StepResult
from kvpool.worker.transport.connection import WorkerConnection
from kvpool.worker.transport.messages import CacheGroupInfo, WorkerInfo

TIMEOUT = 10.0  # of whatever is not meant to time out
SHORT = 0.3  # of whatever is
NUM_BLOCKS = 20


def make_info(rank: int, world_size: int, **changes: Any) -> WorkerInfo:
    group = CacheGroupInfo(["layer"], 4, 1, 8, "float32")
    return msgspec.structs.replace(WorkerInfo(rank, world_size, NUM_BLOCKS, 4, 50, 200, 8, 64, [group]), **changes)


def make_step(
    number: int,
    block_ids: list[int] | None = None,
    request_ids: tuple[str, ...] = ("r",),
    position: int | None = None,
) -> SchedulerOutput:
    """A step of requests that decode; with block ids, of new ones. They have as many tokens as there were steps, or
    ``position``."""
    new = [NewRequestData(request_id, [1, 2], (list(block_ids),), 0) for request_id in request_ids if block_ids]
    known = [] if block_ids else list(request_ids)
    n = len(known)
    position = number if position is None else position
    cached = CachedRequestData(known, [False] * n, [None] * n, [position] * n, [position] * n, [[7]] * n)
    counts = dict.fromkeys(request_ids, 1)
    return SchedulerOutput(number, new, cached, counts, len(counts), list(request_ids), [], [], [], [])


def answer_with(token: int) -> Callable[[SchedulerOutput], dict[str, list[int]]]:
    return lambda output: {request_id: [token] for request_id in output.sampled_request_ids}


class ThreadWorker(threading.Thread):
    """A worker that ends by itself; ``error`` is what ended it, if it was not the scheduler."""

    def __init__(
        self,
        address: str,
        rank: int,
        world_size: int = 1,
        execute: Callable[[SchedulerOutput], dict[str, list[int]] | StepResult] | None = None,
        *,
        timeout_seconds: float = TIMEOUT,
        digest_blocks: Callable[[SchedulerOutput], list[int]] | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.arguments = address, rank, timeout_seconds
        self.info = make_info(rank, world_size, **changes)
        self.execute = execute or answer_with(rank)
        self.digest_blocks = digest_blocks or TableDigests().apply
        self.seen: list[SchedulerOutput] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        address, rank, timeout_seconds = self.arguments
        try:
            with WorkerConnection(address, rank, timeout_seconds=timeout_seconds) as self.connection:
                self.connection.say_hello(self.info)
                self.connection.serve(self._execute, self.digest_blocks)
        except BaseException as error:
            self.error = error

    def _execute(self, output: SchedulerOutput) -> StepResult:
        self.seen.append(output)
        result = self.execute(output)
        return result if isinstance(result, StepResult) else StepResult(result)

    def end(self) -> BaseException | None:
        """Waits until it has ended; what ended it."""
        self.join(TIMEOUT)
        assert not self.is_alive(), "the worker hangs"
        return self.error


def fail_in_step(number: int, error: BaseException) -> Callable[[SchedulerOutput], dict[str, list[int]]]:
    def execute(output: SchedulerOutput) -> dict[str, list[int]]:
        if output.step == number:
            raise error
        return answer_with(0)(output)

    return execute


class Relay:
    """Forwards one TCP connection at a time, and can cut it, or fall silent as a machine that is switched off."""

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("tcp://").rpartition(":")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends: list[socket.socket] = []
        self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection((self.target[0], int(self.target[2])))
            except OSError:
                return
            self.ends = [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self.is_silent:
                    target.sendall(data)
        except OSError:
            pass

    def cut(self, num_ends: int = 2) -> None:
        """Cuts the connection, at the worker's end only if ``num_ends`` is 1: the scheduler then does not notice."""
        for end in self.ends[:num_ends]:
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def swallow_and_cut(self, num_ends: int = 2) -> None:
        """What is sent from now on is lost, and soon the connection is cut."""

        def cut() -> None:
            self.is_silent = False
            self.cut(num_ends)

        self.is_silent = True
        threading.Timer(SHORT / 2, cut).start()

    def close(self) -> None:
        self.listener.close()
        self.cut()


def raw_socket(address: str) -> Any:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(address)
    return raw
