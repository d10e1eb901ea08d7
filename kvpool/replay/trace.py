"""Request traces: reading, validation, and the block hashes of a prompt.

A trace is a text file with one JSON object a line (``.gz`` and ``.zst`` are decompressed while reading)::

    timestamp         arrival, ms, >= 0
    input_length      prompt length, tokens, >= 1
    output_length     generated length, tokens, >= 0
    hash_ids          one id, any integer, per trace block (512 tokens unless told otherwise; the last may be partial);
                      equal ids at equal positions mean an equal prefix
    prompt_token_ids  the prompt itself, in place of hash_ids; input_length may then be left out

Other fields are ignored, blank lines are skipped. A bad line is a TraceError that names file, line and field, and
nothing is returned then: a trace is read whole or not at all. Requests come back in order of arrival, ties in file
order, whatever the order of the lines.

Prompts are kept in their compact form (ids or tokens as arrays); block hashes are made when a request is replayed and
dropped after it, because those of a whole trace at block size 16 would take gigabytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from kvpool.common.arguments import show
from kvpool.common.json_lines import ReadLimits, numbered_lines, parse_object, source_name, type_name
from kvpool.errors import InvalidArgumentError, KvpoolError

DEFAULT_TRACE_BLOCK_SIZE = 512
"""Tokens per entry of ``hash_ids`` in the Mooncake traces. The Qwen-Bailian traces have 16."""

DIGEST_SIZE = 32
"""Bytes of a block hash."""

MAX_REQUEST_TOKENS = 2**31 - 1
"""Of prompt and output together, whatever the limit: counts of blocks and times stay exact."""

MAX_TIMESTAMP_MS = 2.0**64
"""Nanoseconds since 1970, taken for milliseconds, are below it."""

_TOKEN_LIMIT = 2**31
_PROGRESS_INTERVAL = 1024


@dataclass(frozen=True)
class TraceLimits(ReadLimits):
    """max_request_tokens: of one request, prompt and output together, at most MAX_REQUEST_TOKENS. The rest, and what
    is raised: see ReadLimits."""

    max_request_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_request_tokens <= MAX_REQUEST_TOKENS:
            raise InvalidArgumentError(
                f"a limit of tokens is from 1 to {MAX_REQUEST_TOKENS}, not {show(self.max_request_tokens)}"
            )


DEFAULT_TRACE_LIMITS = TraceLimits()


class TraceError(KvpoolError, ValueError):
    """A trace that can't be read. The message is ``FILE:LINE: field 'NAME': reason``, as far as these are known."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace. Exactly one of ``hash_ids`` and ``prompt_token_ids`` is not None.

    line: 1-based line in the file (1-based number of the request in a synthetic trace). timestamp_ms: arrival, ms.
    input_length, output_length: tokens. hash_ids: one per trace block, int64, or uint64 or Python integers where that
    is too small for one of them. prompt_token_ids: int32, one per token.
    """

    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: np.ndarray | None = None
    prompt_token_ids: np.ndarray | None = None

    def num_blocks_needed(self, block_size: int) -> int:
        """Blocks for prompt and output together, cache hits included."""
        return -(-(self.input_length + self.output_length) // block_size)

    def num_full_prompt_blocks(self, block_size: int) -> int:
        """Blocks that the prompt fills completely: those that can be cached."""
        return self.input_length // block_size

    def max_hit_blocks(self, block_size: int) -> int:
        """Most blocks that a hit may cover: at least one token of the prompt is always computed."""
        return (self.input_length - 1) // block_size


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A validated trace. requests: in order of arrival. trace_block_size: tokens per entry of ``hash_ids``."""

    name: str
    requests: list[TraceRequest]
    trace_block_size: int
    is_synthetic: bool = False

    def check_block_size(self, block_size: int) -> None:
        """Raises TraceError unless ``block_size`` (tokens) divides the trace's block size. Tokens fit any."""
        if block_size < 1:
            raise TraceError(f"block size must be at least 1, not {show(block_size)}")
        if self.trace_block_size % block_size and any(r.hash_ids is not None for r in self.requests):
            raise TraceError(f"block size {block_size} does not divide the trace block size {self.trace_block_size}")

    def max_blocks_needed(self, block_size: int) -> int:
        """Blocks that the largest request needs."""
        return max(request.num_blocks_needed(block_size) for request in self.requests)


def read_trace(
    source: str | Path | BinaryIO,
    trace_block_size: int = DEFAULT_TRACE_BLOCK_SIZE,
    limit: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    limits: TraceLimits = DEFAULT_TRACE_LIMITS,
) -> Trace:
    """Reads and validates a trace: a file, or a binary stream of plain text.

    limit: only the first ``limit`` requests in file order; what follows is not read. on_progress: called now and then
    with the number of requests read. limits: what a line, a request and the whole may cost. Raises TraceError (the
    whole file counts: nothing is half-read). O(bytes).
    """
    if trace_block_size < 1:
        raise TraceError(f"trace block size must be at least 1, not {show(trace_block_size)}")
    if limit is not None and limit < 1:
        raise TraceError(f"limit must be at least 1, not {show(limit)}")
    name = source_name(source)
    requests: list[TraceRequest] = []
    with closing(numbered_lines(source, limits, TraceError)) as lines:
        for number, text in lines:
            requests.append(_LineReader(name, number, trace_block_size, limits.max_request_tokens).read(text))
            if on_progress is not None and len(requests) % _PROGRESS_INTERVAL == 0:
                on_progress(len(requests))
            if len(requests) == limit:
                break
    if not requests:
        raise TraceError(f"{name}: the trace holds no requests")
    requests.sort(key=lambda request: request.timestamp_ms)
    return Trace(name, requests, trace_block_size)


def block_hashes(request: TraceRequest, block_size: int, trace_block_size: int) -> list[bytes]:
    """The 32-byte hashes of the prompt's full blocks, in order.

    With ``hash_ids`` a hash is no digest but the name it would stand for: the trace id and the index of the block in
    the prompt, as two little-endian 64-bit integers, zero padded. It is unique by construction and costs no hashing.
    Ids beyond unsigned 64 bits stand for themselves by a digest, in the first 8 and the last 16 bytes. With
    ``prompt_token_ids`` it is sha256 over the parent's hash (32 zero bytes at the start) and the block's tokens as
    little-endian int32. O(blocks).
    """
    num_blocks = request.num_full_prompt_blocks(block_size)
    if request.hash_ids is not None:
        return _named_hashes(request.hash_ids, num_blocks, trace_block_size // block_size)
    if request.prompt_token_ids is None:
        raise TraceError(f"request of line {request.line} has neither hash_ids nor prompt_token_ids")
    return _chained_hashes(request.prompt_token_ids, num_blocks, block_size)


def _named_hashes(hash_ids: np.ndarray, num_blocks: int, blocks_per_id: int) -> list[bytes]:
    names = np.zeros((num_blocks, 4), "<u8")
    used_ids = hash_ids[: -(-num_blocks // blocks_per_id)]
    for column, words in _id_words(used_ids).items():
        names[:, column] = np.repeat(words, min(blocks_per_id, num_blocks))[:num_blocks]
    names[:, 1] = np.arange(num_blocks)
    packed = names.tobytes()
    return [packed[start : start + DIGEST_SIZE] for start in range(0, len(packed), DIGEST_SIZE)]


def _id_words(hash_ids: np.ndarray) -> dict[int, np.ndarray]:
    """The words of a name that stand for its id: the first is the id itself, or three are a digest of it."""
    if hash_ids.dtype != object:
        return {0: hash_ids}
    words = np.zeros((3, len(hash_ids)), "<u8")
    for place, hash_id in enumerate(hash_ids.tolist()):
        if 0 <= hash_id < 2**64:
            words[0, place] = hash_id
            continue
        packed = hash_id.to_bytes((hash_id.bit_length() + 8) // 8, "little", signed=True)
        words[:, place] = np.frombuffer(hashlib.sha256(packed).digest(), "<u8", 3)
        words[2, place] |= np.uint64(1)  # so that no digest can be taken for an id that stands for itself
    return dict(zip((0, 2, 3), words))


def _chained_hashes(token_ids: np.ndarray, num_blocks: int, block_size: int) -> list[bytes]:
    packed = token_ids.astype("<i4", copy=False).tobytes()
    block_bytes = 4 * block_size
    hashes = []
    parent = bytes(DIGEST_SIZE)
    for start in range(0, num_blocks * block_bytes, block_bytes):
        parent = hashlib.sha256(parent + packed[start : start + block_bytes]).digest()
        hashes.append(parent)
    return hashes


class _LineReader:
    """Turns one line into a TraceRequest; every failure names file, line and, where there is one, field."""

    def __init__(self, path: str, number: int, trace_block_size: int, max_tokens: int) -> None:
        self._place = f"{path}:{number}"
        self._number = number
        self._trace_block_size = trace_block_size
        self._max_tokens = max_tokens
        self._fields: dict[str, Any] = {}

    def read(self, text: bytes) -> TraceRequest:
        self._fields = parse_object(text, self._place, TraceError)
        timestamp_ms = self._read_timestamp()
        has_tokens = "prompt_token_ids" in self._fields
        if has_tokens and "hash_ids" in self._fields:
            self._fail("prompt_token_ids", "given together with 'hash_ids'; a request has one of the two")
        if has_tokens:
            tokens = self._read_tokens()
            input_length = len(tokens)
            if input_length == 0:
                self._fail("prompt_token_ids", "must hold at least one token")
            if "input_length" in self._fields:
                self._check_input_length(self._read_length("input_length", minimum=1), input_length)
            output_length = self._read_output_length(input_length)
            return TraceRequest(self._number, timestamp_ms, input_length, output_length, prompt_token_ids=tokens)
        input_length = self._read_length("input_length", minimum=1)
        output_length = self._read_output_length(input_length)
        hash_ids = self._read_hash_ids()
        self._check_num_hash_ids(len(hash_ids), input_length)
        return TraceRequest(self._number, timestamp_ms, input_length, output_length, hash_ids=hash_ids)

    def _fail(self, field: str, reason: str) -> NoReturn:
        raise TraceError(f"{self._place}: field {field!r}: {reason}")

    def _get(self, field: str) -> Any:
        if field not in self._fields:
            self._fail(field, "is missing")
        return self._fields[field]

    def _read_timestamp(self) -> float:
        value = self._get("timestamp")
        if type(value) not in (int, float):
            self._fail("timestamp", f"must be a number of milliseconds, not {type_name(value)}")
        try:
            timestamp_ms = float(value)
        except OverflowError:
            timestamp_ms = math.inf
        if not math.isfinite(timestamp_ms) or timestamp_ms < 0:
            self._fail("timestamp", f"must be finite and not negative, not {timestamp_ms}")
        if timestamp_ms > MAX_TIMESTAMP_MS:
            self._fail("timestamp", f"must be at most {MAX_TIMESTAMP_MS:.0f} ms, not {timestamp_ms}")
        return timestamp_ms

    def _read_length(self, field: str, minimum: int) -> int:
        value = self._get(field)
        if type(value) is not int:
            self._fail(field, f"must be a whole number of tokens, not {type_name(value)}")
        if value < minimum:
            self._fail(field, f"must be at least {minimum}, not {show(value)}")
        if value > self._max_tokens:
            self._fail(field, f"{show(value)} is more than {self._limit()}")
        return value

    def _read_output_length(self, input_length: int) -> int:
        output_length = self._read_length("output_length", minimum=0)
        if input_length + output_length > self._max_tokens:
            self._fail("output_length", f"{output_length} and a prompt of {input_length} are more than {self._limit()}")
        return output_length

    def _limit(self) -> str:
        return f"{self._max_tokens} tokens of a request (--max-request-tokens raises the limit)"

    def _read_integers(self, field: str) -> list[int]:
        values = self._get(field)
        if not isinstance(values, list):
            self._fail(field, f"must be a list of integers, not {type_name(values)}")
        if not set(map(type, values)) <= {int}:
            index = next(index for index, value in enumerate(values) if type(value) is not int)
            self._fail(field, f"entry {index} must be an integer, not {type_name(values[index])}")
        return values

    def _read_tokens(self) -> np.ndarray:
        tokens = self._read_integers("prompt_token_ids")
        if tokens and not 0 <= min(tokens) <= max(tokens) < _TOKEN_LIMIT:
            index = next(index for index, token in enumerate(tokens) if not 0 <= token < _TOKEN_LIMIT)
            reason = f"entry {index} must be from 0 to {_TOKEN_LIMIT - 1}, not {show(tokens[index])}"
            self._fail("prompt_token_ids", reason)
        return np.array(tokens, np.int32)

    def _read_hash_ids(self) -> np.ndarray:
        ids = self._read_integers("hash_ids")
        if not ids or 0 <= min(ids) <= max(ids) < 2**63:
            return np.array(ids, np.int64)
        is_unsigned = 0 <= min(ids) <= max(ids) < 2**64
        return np.array(ids, np.uint64 if is_unsigned else object)

    def _check_input_length(self, given: int, num_tokens: int) -> None:
        if given != num_tokens:
            self._fail("input_length", f"is {given}, but 'prompt_token_ids' holds {num_tokens} tokens")

    def _check_num_hash_ids(self, num_hash_ids: int, input_length: int) -> None:
        expected = -(-input_length // self._trace_block_size)
        if num_hash_ids != expected:
            self._fail(
                "hash_ids",
                f"holds {num_hash_ids} ids, but 'input_length' {input_length} at {self._trace_block_size} tokens"
                f" per id takes {expected}",
            )
