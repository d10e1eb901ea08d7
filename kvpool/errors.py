"""Exceptions of the package.

Each class also derives from the built-in exceptions that vLLM 0.32 raises in the same place, so that ``except``
clauses and tests written for vLLM keep working. A call that raises one of these has changed nothing.
"""

from __future__ import annotations


class KvpoolError(Exception):
    """Base class of everything that kvpool raises on purpose."""


class NoFreeBlocksError(KvpoolError, ValueError, AssertionError):
    """More blocks were asked for than are free.

    vLLM raises ``ValueError`` from the pool and from ``popleft``, ``AssertionError`` from ``popleft_n``.
    """


class BlockStateError(KvpoolError, RuntimeError, AssertionError):
    """A block is not in the state that the call needs.

    Double free, a block of no pool or of another pool, an unlink of a block that is in use, a block that carries
    another hash, the null block where it makes no sense, a block id outside the pool.
    """


class InvalidArgumentError(KvpoolError, ValueError, AssertionError):
    """An argument has the right type and an impossible value (negative count, digest too long, mask too short)."""


class InvariantError(KvpoolError, AssertionError):
    """``check()`` found the bookkeeping in contradiction with itself: a defect of kvpool, never of the caller."""
