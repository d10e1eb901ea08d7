"""A temporary folder that is gone when the process is that made it, however that one ends."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvpool.worker.transport.lifeline import Lifeline

PREFIX = "kvpool-"
_REMOVE_SECONDS = 10.0
# Waits for the end of its stdin, which is that of the process that holds the other end of the pipe.
_REMOVE_IN_THE_END = 'read -r nothing; rm -rf -- "$0"'


@contextmanager
def scratch_folder(prefix: str = PREFIX) -> Iterator[str]:
    """A new folder for its owner only, removed with what is in it behind the ``with``, and also where this process is
    killed: by a shell that waits for that.

    Raises:
        OSError: no folder can be made, or no process be started.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:  # mkdtemp's folders are for their owner only
        line = Lifeline()
        try:
            remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_IN_THE_END, folder],
                stdin=line.child_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
            )
        except BaseException:
            line.close()
            raise
        line.close_child_end()
        try:
            yield folder
        finally:
            line.close()
            with suppress(subprocess.TimeoutExpired):
                remover.wait(_REMOVE_SECONDS)
