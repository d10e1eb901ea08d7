"""Files that come from others: traces, prompts, keys. Read as what they say, or refused in one line."""

from __future__ import annotations

import atexit
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

from fuzz.decisions import Decisions, Finding
from fuzz.mutations import TEXT_PIECES, altered_bytes, json_lines
from kvpool.engine.prompts import read_prompts
from kvpool.errors import KvpoolError
from kvpool.network import curve
from kvpool.replay.trace import read_trace
from kvpool.worker.transport.scratch_folder import scratch_folder

MAX_SECONDS = 5.0
TRACE: list[Any] = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 27.5, "input_length": 512, "output_length": 0, "hash_ids": [1]},
    {"timestamp": 30, "output_length": 3, "prompt_token_ids": [1, 2, 3]},
]
PROMPTS: list[Any] = [{"prompt": "Once upon \u2028a time"}, {"prompt_token_ids": [1, 2, 3]}, {"prompt": "\u00e4"}]
KEY = (
    '#   ****  Generated  ****\n\nmetadata\ncurve\n    public-key = "'
    + "a" * 40
    + '"\n    secret-key = "'
    + "b" * 40
    + '"\n'
).encode()
# A fuzzer ends as it likes; the folder goes with the process.
_SCRATCH = scratch_folder("kvpool-fuzz-")
_FOLDER = Path(_SCRATCH.__enter__())
atexit.register(_SCRATCH.__exit__, None, None, None)


def one_line(error: BaseException, data: bytes) -> None:
    text = str(error)
    if "\n" in text or len(text) > 2000:
        raise Finding(f"{type(error).__name__} of {len(text)} characters for {data[:200]!r}: {text[:500]!r}")


def read_file(path: Path, kind: int) -> Any:
    if kind == 0:
        return read_trace(path)
    if kind == 1:
        return read_prompts(path)
    return curve.CurveKeys.from_files(path, [path])


def check_trace(trace: Any) -> None:
    for request in trace.requests:
        if request.input_length < 1 or request.output_length < 0 or not request.timestamp_ms >= 0:
            raise Finding(f"a trace with {request}")
        if (request.hash_ids is None) == (request.prompt_token_ids is None):
            raise Finding(f"a trace with {request}")


def check_prompts(prompts: Any) -> None:
    for prompt in prompts:
        is_tokens = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise Finding(f"a prompt {prompt!r}")


def run(d: Decisions) -> None:
    kind = d.below(3)
    data = altered_bytes(d, KEY, TEXT_PIECES) if kind == 2 else json_lines(d, TRACE if kind == 0 else PROMPTS)
    suffix = ".jsonl"
    if kind < 2 and d.chance(20):
        data, suffix = gzip.compress(data), ".jsonl.gz"
        data = altered_bytes(d, data, TEXT_PIECES, 3)
    path = _FOLDER / f"file{suffix}"
    path.write_bytes(data)
    os.chmod(path, 0o600)
    start = time.process_time()
    try:
        found = read_file(path, kind)
    except KvpoolError as error:
        one_line(error, data)
    else:
        if kind == 0:
            check_trace(found)
        elif kind == 1:
            check_prompts(found)
            json.dumps(found)
    finally:
        path.unlink()
    if time.process_time() - start > MAX_SECONDS:
        raise Finding(f"{len(data)} bytes took {time.process_time() - start:.1f} s")
