"""kvpool inside an unmodified vLLM: the entry point ``vllm.general_plugins``.

vLLM calls ``register`` in each of its processes, perhaps several times. It replaces what ``KVPOOL_VLLM`` asks for, or,
where this vLLM is not one that kvpool was checked against, nothing at all with one warning that says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from kvpool import backend
from kvpool.integrations.vllm import announcement, levels
from kvpool.integrations.vllm.hooks import Hooks
from kvpool.integrations.vllm.sources import installed_sources


class Status(NamedTuple):
    """What ``register`` did in this process.

    Attributes:
        levels: what is replaced, () for nothing.
        line: the line of the log.
        is_refusal: levels were asked for, and vLLM was left as it is.
    """

    levels: tuple[str, ...]
    line: str
    is_refusal: bool = False


class NotExpectedError(Exception):
    """This vLLM is not as kvpool knows it."""


_hooks = Hooks()
_status: Status | None = None


def register() -> None:
    """Replace what ``KVPOOL_VLLM`` asks for. Idempotent; never raises: where it can't, vLLM stays stock and one
    warning says why."""
    global _status
    if _status is not None:
        return
    try:
        _status = install(levels.requested_levels(os.environ.get(levels.VARIABLE)), _hooks)
    except Exception as error:
        _hooks.restore()
        _status = Status((), f"kvpool: not active, vLLM runs as it is: {reason_of(error)}", is_refusal=True)
        announcement.logger.warning("%s", _status.line)
        return
    if _status.levels:
        announcement.announce(_status.line, is_pool_expected="pool" in _status.levels)


def unregister() -> None:
    """Put vLLM back as it was; pools that were made stay what they are. ``register`` may be called again."""
    global _status
    _hooks.restore()
    announcement.forget()
    _status = None


def status() -> Status | None:
    """What ``register`` did, None before it was called."""
    return _status


def reason_of(error: Exception) -> str:
    """Why ``install`` failed, in one line."""
    return str(error) if isinstance(error, NotExpectedError) else f"{type(error).__name__}: {error}"


def install(names: Sequence[str], hooks: Hooks) -> Status:
    """Replace what some levels replace.

    Raises:
        NotExpectedError: this vLLM differs from those that kvpool knows, or the pure-Python twin is selected; nothing
            has been replaced.
    """
    if not names:
        return Status((), f"kvpool: off ({levels.VARIABLE}=0)")
    if backend.BACKEND != "native":
        # Each level is native: what was asked for as a whole is not given in parts.
        raise NotExpectedError(f"{backend.VARIABLE}=1 selects the pure-Python twin, which takes no place in vLLM")
    from kvpool.integrations.vllm import drift  # here, so that it can be run as a command

    version = levels.vllm_version()
    targets = levels.targets_of(names)
    found = drift.objections(version, targets, installed_sources())
    if found:
        raise NotExpectedError(drift.describe(found))
    for name in names:
        levels.load_level(name).install(hooks)
    return Status(tuple(names), f"kvpool: active ({', '.join(names)}) on vLLM {version}")
