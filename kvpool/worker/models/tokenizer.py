"""Text and tokens: a model's own tokenizer, or bytes where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvpool.worker.models.model_files import reads_model

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens."""

    @property
    def eos_token_ids(self) -> list[int]:
        return []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """A vocabulary may have more tokens than there are bytes: those stand for no text."""
        return b"".join(token.to_bytes(1, "big") if token < 256 else b"\xff" for token in token_ids).decode(
            errors="replace"
        )


class TransformersTokenizer:
    """A tokenizer of transformers; what it adds to a text by itself, such as a first token, is added."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_token_ids(self) -> list[int]:
        token_id: int | None = self._tokenizer.eos_token_id
        return [] if token_id is None else [token_id]

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@reads_model
def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model's folder or GGUF file; bytes for a folder without one. Nothing is downloaded."""
    from transformers import AutoTokenizer

    if model.is_file():
        return TransformersTokenizer(
            AutoTokenizer.from_pretrained(
                str(model.parent), gguf_file=model.name, local_files_only=True, trust_remote_code=False
            )
        )
    if not any((model / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return ByteTokenizer()
    return TransformersTokenizer(
        AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    )


class TextStream:
    """The text of tokens that come one after the other, given out as soon as it is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0  # tokens in front of it no longer change how later ones read
        self._shown = 0  # tokens whose text has been given out

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that these tokens complete. What ends within a character waits, unless these are the last."""
        self._token_ids += token_ids
        before = self._tokenizer.decode(self._token_ids[self._start : self._shown])
        now = self._tokenizer.decode(self._token_ids[self._start :])
        if not is_last and (len(now) <= len(before) or now.endswith(_REPLACEMENT)):
            return ""
        self._start, self._shown = self._shown, len(self._token_ids)
        return now[len(before) :]
