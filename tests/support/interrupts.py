"""Interrupts a call where the interpreter would: Ctrl-C raises after a call has returned, at a jump backwards, and
where a function begins."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvpool

PACKAGE = str(Path(kvpool.__file__).parent)


class Interrupted(KeyboardInterrupt):
    """Raised where Ctrl-C would be noticed."""


class Interrupter:
    """Runs calls; the n-th place where the interpreter looks for signals raises, as ``countdown`` says.

    Attributes:
        countdown: places to pass before one raises.
        is_spent: whether one has raised.
    """

    def __init__(self, countdown: int) -> None:
        self.countdown, self.is_spent = countdown, False
        self._opnames: dict[CodeType, dict[int, tuple[str, str]]] = {}

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.is_spent:
            return call(*arguments)
        sys.settrace(self._trace)
        try:
            return call(*arguments)
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "call":
            frame.f_trace_opcodes = True
            self._pass()
        elif event == "opcode":
            before, now = self._ops(frame.f_code)[frame.f_lasti]
            if before.startswith("CALL") or now.startswith("JUMP_BACKWARD"):
                self._pass()
        return self._trace

    def _ops(self, code: CodeType) -> dict[int, tuple[str, str]]:
        """By offset, the instruction before and the one there."""
        if code not in self._opnames:
            instructions = list(dis.get_instructions(code))
            names = [instruction.opname for instruction in instructions]
            pairs = zip(["", *names], names)
            self._opnames[code] = dict(zip((instruction.offset for instruction in instructions), pairs))
        return self._opnames[code]

    def _pass(self) -> None:
        if self.is_spent:
            return
        if self.countdown == 0:
            self.is_spent = True
            raise Interrupted
        self.countdown -= 1
