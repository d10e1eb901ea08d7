"""A pipe by which a process ends with the one that has started it, however that one ends and whatever it does itself.

The starter holds the writing end of a pipe, and nothing is ever written to it. When the starter is gone the kernel
closes that end, and the process at the other end is killed: by a thread that waits for it and, on Linux, by a signal
that the kernel sends itself, which reaches a process that is stopped or that lets no Python thread run, as well.
(``PR_SET_PDEATHSIG`` would tell of the end of the thread that started a process, not of the end of its process.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import threading
import weakref

from kvpool.errors import InvalidArgumentError

_open_lines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """The starter's side, for one process.

    Attributes:
        child_end: descriptor to hand on, as one of ``subprocess.Popen``'s ``pass_fds``, to a process that calls
            ``end_with``; closed by ``close_child_end`` once it has it.
    """

    child_end = _parent_end = -1

    def __init__(self) -> None:
        self.child_end, self._parent_end = os.pipe()
        _open_lines.add(self)

    def close_child_end(self) -> None:
        """Safe to call again."""
        if self.child_end >= 0:
            os.close(self.child_end)
            self.child_end = -1

    def close(self) -> None:
        """Ends the process at the other end, if it is still there. Safe to call again."""
        self.close_child_end()
        if self._parent_end >= 0:
            os.close(self._parent_end)
            self._parent_end = -1

    def __del__(self) -> None:
        self.close()


def _close_in_fork() -> None:
    """A forked copy of the starter must not keep alive what the starter has started."""
    for line in list(_open_lines):
        line.close()


os.register_at_fork(after_in_child=_close_in_fork)


def end_with(descriptor: int) -> None:
    """Has this process, and its process group if it leads one, killed as soon as the starter's end is closed.

    Args:
        descriptor: ``Lifeline.child_end``, inherited.

    Raises:
        InvalidArgumentError: the descriptor is no pipe.
    """
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        is_pipe = False
    if not is_pipe:
        raise InvalidArgumentError(f"descriptor {descriptor} is no pipe to the process that has started this one")
    os.set_inheritable(descriptor, False)
    target = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):  # a kernel without it: the thread is left
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, target)
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    # Started behind that, it also sees an end that was closed before the kernel was asked to tell.
    threading.Thread(target=_wait_and_kill, args=(descriptor, target), name="kvpool-lifeline", daemon=True).start()


def _wait_and_kill(descriptor: int, target: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os.kill(target, signal.SIGKILL)
