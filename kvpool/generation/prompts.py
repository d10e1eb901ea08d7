"""Prompts: read from a file, turned into tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.worker.tokenizer import Tokenizer


class PromptError(InvalidArgumentError):
    """A prompt that can't be read; the message names the file and the line."""


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a JSONL file: ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}`` a line; blank lines are skipped.

    Raises:
        PromptError: a line that is neither, an empty prompt, no line at all, or the file can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: {error}") from None
    prompts = [_parse_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path} has no prompts")
    return prompts


def _parse_prompt(path: Path, number: int, line: str) -> str | list[int]:
    where = f"{path}, line {number}"
    try:
        document = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: no JSON: {error}") from None
    fields = {"prompt", "prompt_token_ids"} & set(document) if isinstance(document, dict) else set()
    if len(fields) != 1:
        raise PromptError(f'{where}: either "prompt" or "prompt_token_ids" is needed')
    prompt = document[fields.pop()]
    is_text = "prompt" in document
    if is_text and not isinstance(prompt, str):
        raise PromptError(f'{where}: "prompt" is a text, not {prompt!r}')
    if not is_text and not (isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)):
        raise PromptError(f'{where}: "prompt_token_ids" is a list of token ids, not {prompt!r}'[:300])
    if not prompt:
        raise PromptError(f"{where}: the prompt is empty")
    checked: str | list[int] = prompt
    return checked


def encode_prompts(prompts: Sequence[str | list[int]], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        PromptError: a text without tokens, or a token outside of the vocabulary.
    """
    encoded = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    for number, token_ids in enumerate(encoded):
        if not token_ids:
            raise PromptError(f"prompt {number} has no tokens")
        if max(token_ids) >= vocab_size:
            raise PromptError(f"prompt {number} has the token {max(token_ids)}; the vocabulary has {vocab_size}")
    return encoded
