"""Workers on this machine, one a rank, under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from kvpool.errors import KvpoolError

CLOSE_SECONDS = 10.0
_TOLD_BYTES = 20_000  # of what the workers have written, to look for the reason in
_ERROR_PREFIX = "error: "


class WorkersEndedError(KvpoolError, RuntimeError):
    """Workers have ended that nobody told to; the message has the last error that they told."""


class LocalWorkers:
    """Starts ``torchrun -m kvpool.worker`` and ends it. A context manager.

    Args:
        num_ranks: workers to start.
        arguments: of each, see ``python -m kvpool.worker --help``.

    What they write to stderr is kept, and the last of it told when they fail.
    """

    def __init__(self, num_ranks: int, arguments: Sequence[str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--rdzv-backend", "c10d"]
        command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", "-m", "kvpool.worker", *arguments]
        # Ranks share the processors; each with a thread for all of them would only be in each other's way.
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._log, env=environment, start_new_session=True
        )

    def check(self) -> None:
        """Raises WorkersEndedError if they have ended."""
        code = self._process.poll()
        if code is not None:
            raise WorkersEndedError(f"the workers have ended (exit code {code}): {self._last_error()}")

    def _last_error(self) -> str:
        """The last line that a worker wrote as its error, else the last line at all."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _TOLD_BYTES))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(_ERROR_PREFIX)]
        return (errors or lines or ["they said nothing"])[-1].removeprefix(_ERROR_PREFIX)

    def close(self) -> None:
        """Waits for workers that were told to end, and ends those that don't. Safe to call again."""
        if self._log.closed:
            return
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def kill(self) -> None:
        """Ends them at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.kill()
        self.close()
