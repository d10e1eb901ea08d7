"""Workers on this machine, one process a rank, started directly.

Nothing of them can be reached from another machine: the ranks meet through a file in a folder of their own that nobody
else may read, and what they exchange goes over the loopback interface. (torchrun, which starts ranks on several
machines, has a store that listens on every interface, and unpickles what anybody puts there.)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.worker.transport.lifeline import Lifeline
from kvpool.worker.transport.scratch_folder import scratch_folder

MAX_RANKS = 1024
CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TOLD_BYTES = 20_000  # of what a worker has written, to look for the reason in
_ERROR_PREFIX = "error: "
_LAUNCHERS_PREFIXES = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")  # what another launcher may have set


class WorkersEndedError(KvpoolError, RuntimeError):
    """Workers have ended that nobody told to; the message has the last error that one of them told."""


class LocalWorkers:
    """Starts ``python -m kvpool.worker`` for each rank, and ends it. A context manager.

    The workers end within a second when this process does, by whatever signal and whatever they are doing; see
    ``kvpool.worker.transport.lifeline``. Nothing of them is left in the temporary folder either. Ctrl-C in a
    terminal does not reach them.

    Args:
        num_ranks: workers to start.
        arguments: of each, see ``python -m kvpool.worker --help``.
        command: what is run, with options of its own behind ``arguments``.
        keeps_errors: what they write to stderr is kept, and the last of it told when they fail; else it goes where
            that of this process goes.

    Raises:
        InvalidArgumentError: no rank, or more than ``MAX_RANKS``.
        OSError: a process can't be started; none is left.
    """

    def __init__(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = (sys.executable, "-m", "kvpool.worker"),
        keeps_errors: bool = True,
    ) -> None:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise InvalidArgumentError(f"{show(num_ranks)} workers; 1 to {MAX_RANKS} can be started")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self._exit_stack = ExitStack()
        try:
            folder = self._exit_stack.enter_context(scratch_folder())
            words = [*command, *arguments, "--rendezvous", f"{folder}/ranks"]
            for rank in range(num_ranks):
                self._start(words, _environment(rank, num_ranks), keeps_errors)
        except BaseException:
            self.kill()
            self.close()
            raise

    def _start(self, words: Sequence[str], environment: dict[str, str], keeps_errors: bool) -> None:
        log = None
        if keeps_errors:
            log = self._exit_stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # closed by close()
            self._logs.append(log)
        line = Lifeline()
        self._exit_stack.callback(line.close)
        process = subprocess.Popen(
            [*words, "--parent-pipe", str(line.child_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
            pass_fds=[line.child_end],
            start_new_session=True,
        )
        self._processes.append(process)
        line.close_child_end()

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, in their order."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raises WorkersEndedError if one of them has ended."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                raise WorkersEndedError(f"rank {rank} has ended ({_name_code(code)}): {self._last_error(rank)}")

    def _last_error(self, rank: int) -> str:
        """The last line that a worker wrote as its error, else the last line at all."""
        if not self._logs:
            return "see what it has written"
        log = self._logs[rank]
        end = log.seek(0, os.SEEK_END)
        log.seek(max(0, end - _TOLD_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(_ERROR_PREFIX)]
        return (errors or lines or ["it said nothing"])[-1].removeprefix(_ERROR_PREFIX)

    def wait(self) -> int:
        """Waits until all have ended, or one by a failure. The exit code of that one, else 0."""
        while True:
            codes = [process.poll() for process in self._processes]
            failed = next((code for code in codes if code), 0)
            if failed or None not in codes:
                return failed
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Waits for workers that were told to end, ``CLOSE_SECONDS`` at most, and ends those that don't. Safe to call
        again."""
        end = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self.kill()
        for process in self._processes:
            process.wait()
        self._exit_stack.close()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


def loopback_interface() -> str:
    """Name of the interface that no other machine reaches.

    Raises:
        InvalidArgumentError: none of a known name.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise InvalidArgumentError(f"none of the network interfaces {', '.join(names)} is known as the loopback one")


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS_PREFIXES)}
    interface = loopback_interface()
    # Ranks share the processors; each with a thread for all of them would only be in each other's way.
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **inherited,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        # Over whatever was set for several machines. NCCL takes names as prefixes, unless behind a "=".
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "NCCL_IB_DISABLE": "1",
    }


def _name_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
