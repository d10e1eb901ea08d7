"""Prompts: read from a file, turned into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvpool.common.arguments import show
from kvpool.common.json_lines import (
    DEFAULT_READ_LIMITS,
    ReadLimits,
    numbered_lines,
    parse_object,
    source_name,
    type_name,
)
from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.worker.models.tokenizer import Tokenizer


class PromptError(InvalidArgumentError):
    """A prompt that can't be read; the message names the file and the line."""


def read_prompts(source: str | Path | BinaryIO, limits: ReadLimits = DEFAULT_READ_LIMITS) -> list[str | list[int]]:
    """Prompts of a JSONL file: ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}`` a line; blank lines are skipped.

    Args:
        source: a file, decompressed if its name ends in ``.gz`` or ``.zst``, or a binary stream of plain text.

    Raises:
        PromptError: a line that is neither, an empty prompt, a text that is no Unicode, no line at all, a limit that is
            exceeded, or the file can't be read.
    """
    name = source_name(source)
    with closing(numbered_lines(source, limits, PromptError)) as lines:
        prompts = [_parse_prompt(f"{name}:{number}", line) for number, line in lines]
    if not prompts:
        raise PromptError(f"{name} has no prompts")
    return prompts


def _parse_prompt(place: str, line: bytes) -> str | list[int]:
    document = parse_object(line, place, PromptError)
    fields = {"prompt", "prompt_token_ids"} & set(document)
    if len(fields) != 1:
        raise PromptError(f'{place}: either "prompt" or "prompt_token_ids" is needed')
    prompt = document[fields.pop()]
    if "prompt" in document:
        if not isinstance(prompt, str):
            raise PromptError(f'{place}: "prompt" is a text, not {show(prompt)}')
        _check_text(place, prompt)
    elif not isinstance(prompt, list):
        raise PromptError(f'{place}: "prompt_token_ids" is a list of token ids, not {show(prompt)}')
    else:
        _check_token_ids(place, prompt)
    if not prompt:
        raise PromptError(f"{place}: the prompt is empty")
    checked: str | list[int] = prompt
    return checked


def _check_text(place: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise PromptError(
            f"{place}: character {error.start} of the prompt is {half}, half of a pair, which no text holds alone"
        ) from None


def _check_token_ids(place: str, token_ids: list[object]) -> None:
    for index, token in enumerate(token_ids):
        if type(token) is not int or token < 0:
            given = show(token) if isinstance(token, int | float) else type_name(token)
            raise PromptError(f'{place}: entry {index} of "prompt_token_ids" is no token id, but {given}')


def encode_prompts(prompts: Sequence[str | list[int]], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        PromptError: a text without tokens or that is no Unicode, or a token outside of the vocabulary.
    """
    encoded = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            _check_text(f"prompt {number}", prompt)
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise PromptError(f"prompt {number} has no tokens")
        if max(token_ids) >= vocab_size:
            largest = show(max(token_ids))
            raise PromptError(f"prompt {number} has the token {largest}; the vocabulary has {vocab_size}")
        encoded.append(token_ids)
    return encoded
