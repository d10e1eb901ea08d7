"""Calls and what became of them, in words of bounded length."""

from __future__ import annotations

from typing import Any

from kvpool.common.one_line import one_line
from kvpool.playback.calls import Outcome
from kvpool.recording.operations import NAME_OF, Operation, unpack

_MOST_ITEMS = 12
_MOST_CHARS = 400
_HASH_CHARS = 8
_PACKED = {"block_ids", "requests", "num_tokens", "num_computed_tokens"}


def call_in_words(operation: Operation) -> str:
    """``name(argument=value, ...)``."""
    arguments = ", ".join(
        f"{name}={value_in_words(getattr(operation, name), is_packed=name in _PACKED)}"
        for name in operation.__struct_fields__
    )
    return one_line(f"{NAME_OF[type(operation)]}({arguments})", _MOST_CHARS)


def value_in_words(value: Any, *, is_packed: bool = True) -> str:
    """A value of a message: packed ids as numbers, hashes by their beginnings."""
    if isinstance(value, bytes):
        return row_in_words(value) if is_packed else value.hex()[:_HASH_CHARS]
    if isinstance(value, (list, tuple)):
        shown = ", ".join(value_in_words(item, is_packed=is_packed) for item in value[:_MOST_ITEMS])
        return f"[{shown}{_rest(len(value))}]"
    return repr(value)


def row_in_words(packed: bytes) -> str:
    """A row of ids."""
    ids = unpack(packed)
    return f"[{', '.join(map(str, ids[:_MOST_ITEMS]))}{_rest(len(ids))}]"


def outcome_in_words(outcome: Outcome) -> str:
    """What a call has returned."""
    rows, numbers = outcome
    parts = [] if rows is None else [f"blocks [{', '.join(map(row_in_words, rows[:_MOST_ITEMS]))}{_rest(len(rows))}]"]
    if numbers:
        parts.append(value_in_words(numbers))
    return one_line(" and ".join(parts) or "nothing", _MOST_CHARS)


def _rest(num_items: int) -> str:
    return f", ... {num_items:,} in all" if num_items > _MOST_ITEMS else ""
