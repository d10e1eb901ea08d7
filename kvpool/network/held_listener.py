"""A listening TCP socket that is kept while a ZeroMQ socket accepts its connections: to let newcomers wait, and to hand
it to another ZeroMQ socket without a moment in which somebody else could take the port."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux; Python has no names for them
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)  # a struct sock_filter: return 0 bytes of each packet


def duplicate_socket(fd: int) -> socket.socket:
    """One more descriptor of a socket. ``socket.dup`` would make it wait, for those who use the first one as well.

    Raises:
        OSError: it can't be duplicated, or is no socket.
    """
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise


class HeldListener:
    """
    Args:
        fd: of the listening socket, which is duplicated.

    Raises:
        OSError: it can't be duplicated, or is no socket.
    """

    def __init__(self, fd: int) -> None:
        self._socket = duplicate_socket(fd)
        self.is_shut = False

    def duplicate(self) -> int:
        """A descriptor for another ZeroMQ socket (``ZMQ_USE_FD``), which closes it. An OSError if there is none."""
        return os.dup(self._socket.fileno())

    def shut(self) -> None:
        """Let newcomers wait: the kernel drops their packets, and they knock again after a second, three, seven.
        Connections that are accepted stay as they are. An OSError where the kernel knows no socket filters."""
        if sys.platform.startswith("linux"):
            code = ctypes.create_string_buffer(_DROP_ALL)
            program = struct.pack("@HP", 1, ctypes.addressof(code))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            self.is_shut = True

    def open(self) -> None:
        """Let newcomers in again."""
        if self.is_shut:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self.is_shut = False

    def close(self) -> None:
        """A second call does nothing."""
        self._socket.close()
