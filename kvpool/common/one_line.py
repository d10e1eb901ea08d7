"""Messages as they can be shown: on one line, cut, whatever they hold."""

from __future__ import annotations

MAX_LINE_CHARS = 1_000


def one_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """The text on one line: what can't be printed is escaped, and the middle of a long text is left out."""
    if len(text) > max_chars:
        head = max_chars * 2 // 3
        tail = max_chars - head
        text = f"{text[:head]} ... ({len(text) - max_chars:,} characters left out) ... {text[-tail:]}"
    return "".join(char if char.isprintable() else _escape(char) for char in text.strip())


def _escape(char: str) -> str:
    return " " if char == "\n" else char.encode("unicode_escape", "backslashreplace").decode("ascii")
