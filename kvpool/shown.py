"""Values and messages as they can be shown: on one line, cut, whatever they hold."""

from __future__ import annotations

MAX_VALUE_CHARS = 80
MAX_LINE_CHARS = 1_000

_MAX_SHOWN_BITS = 256
_MAX_ENTRIES = 4
_MAX_DEPTH = 2
_DIGITS_PER_BIT = 0.30103


def shown(value: object) -> str:
    """What a message says of a value that came from outside: its ``repr``, cut.

    Long texts and lists are cut before they are written out, integers beyond 256 bits are described, so that the cost
    is O(1) however large the value is, and nesting is followed to a fixed depth.
    """
    return _shown(value, _MAX_DEPTH)


def _shown(value: object, depth: int) -> str:
    if isinstance(value, str | bytes):
        text = repr(value[:MAX_VALUE_CHARS])
        unit = "characters" if isinstance(value, str) else "bytes"
        return text if len(value) <= MAX_VALUE_CHARS else f"{text}... ({len(value):,} {unit})"
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        sign = "a negative integer" if value < 0 else "an integer"
        return f"{sign} of about {int(value.bit_length() * _DIGITS_PER_BIT) + 1:,} digits"
    if isinstance(value, list | tuple | dict) and value:
        return _shown_entries(value, depth)
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _shown_entries(value: list[object] | tuple[object, ...] | dict[object, object], depth: int) -> str:
    kind = type(value).__name__
    if depth == 0:
        return f"a {kind} of {len(value):,}"
    if isinstance(value, dict):
        return f"a dict with the keys {_shown(list(value), depth - 1)}"
    entries = ", ".join(_shown(entry, depth - 1) for entry in value[:_MAX_ENTRIES])
    return f"[{entries}]" if len(value) <= _MAX_ENTRIES else f"[{entries}, ...] ({len(value):,} entries)"


def one_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """The text on one line: what can't be printed is escaped, and the middle of a long text is left out."""
    if len(text) > max_chars:
        head = max_chars * 2 // 3
        tail = max_chars - head
        text = f"{text[:head]} ... ({len(text) - max_chars:,} characters left out) ... {text[-tail:]}"
    return "".join(char if char.isprintable() else _escape(char) for char in text.strip())


def _escape(char: str) -> str:
    return " " if char == "\n" else char.encode("unicode_escape", "backslashreplace").decode("ascii")
