"""Recordings of operations that come from others: played, or refused in one line that names the file and the place."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fuzz.decisions import Decisions, Finding
from fuzz.mutations import MSGPACK_PIECES, altered_bytes, altered_value
from kvpool.backend import Request
from kvpool.cache import spec as specs
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvpool.kv_cache_manager import PlainKVCacheManager
from kvpool.playback.limits import PlaybackLimits, RecordingError
from kvpool.playback.player import play_recording
from kvpool.recording.calls import recorded
from kvpool.recording.frames import HEAD, MAGIC, frame
from kvpool.recording.settings import FILE_VARIABLE
from kvpool.worker.transport.scratch_folder import scratch_folder

MAX_SECONDS = 5.0
_NUM_FIRST = 4  # messages: what was recorded, and an empty state
LIMITS = PlaybackLimits(1 << 20, 4_096, 1 << 14, 1 << 18, 1 << 10, 1 << 16)
# A fuzzer ends as it likes; the folder goes with the process.
_SCRATCH = scratch_folder("kvpool-fuzz-")
_FOLDER = Path(_SCRATCH.__enter__())
atexit.register(_SCRATCH.__exit__, None, None, None)
_ATTENTION = {"num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
_BLOCK_SIZE = 4


def _hashes(request: Any) -> list[bytes]:
    """Of the blocks that have none."""
    num_known = len(request.block_hashes)
    return [
        b"".join(bytes([token]) for token in request.all_token_ids[: (i + 1) * _BLOCK_SIZE])[-32:]
        for i in range(num_known, request.num_tokens // _BLOCK_SIZE)
    ]


def _record(name: str, *group_specs: KVCacheSpec) -> list[Any]:
    """Messages of a run with hits, decodes, a preemption, a gap and what is refused."""
    before = os.environ.get(FILE_VARIABLE)
    os.environ[FILE_VARIABLE] = str(_FOLDER / name)
    try:
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(group_specs)]
        manager = recorded(PlainKVCacheManager)(KVCacheConfig(24, groups, hash_block_size=_BLOCK_SIZE), 64)
    finally:
        os.environ.pop(FILE_VARIABLE)
        if before is not None:
            os.environ[FILE_VARIABLE] = before
    requests = [Request(f"r{i}", [1] * 12 + [i] * (3 + i), _hashes) for i in range(4)]
    for request in requests:
        manager.new_step_starts()
        hit, num_tokens, boundary = manager.get_computed_blocks_and_boundary(request)
        request.shared_prefix_boundary = boundary
        if manager.allocate_slots(request, request.num_tokens - num_tokens, num_tokens, hit) is not None:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids([5])
    running = [request for request in requests if request.num_computed_tokens]
    manager.new_step_starts()
    manager.allocate_decode(running)
    for request in running:
        request.num_computed_tokens += 1
        request.append_output_token_ids([6])
        manager.allocate_slots(request, 1)
    manager.take_new_block_ids()
    manager.block_pool.free_blocks(manager.take_kv_cache_block_copies()[1])
    manager.take_back(running[0], 8)
    for call in (lambda: manager.block_pool.touch([None]), lambda: manager.evict_blocks([99])):
        try:
            call()
        except Exception:  # one that can't be told, one that is refused
            manager.evict_blocks([1])
    manager.block_pool.free_blocks(reversed(manager.pop_blocks_for_free(running[0])))
    for request in running[1:]:
        manager.free(request)
    manager.reset_prefix_cache()
    manager._recorder.close()
    data = (_FOLDER / name).read_bytes()
    messages, place = [], len(MAGIC)
    while place < len(data):
        num_bytes, _ = HEAD.unpack_from(data, place)
        place += HEAD.size
        messages.append(msgspec.msgpack.decode(data[place : place + num_bytes]))
        place += num_bytes
    return messages


_FULL = specs.FullAttentionSpec(block_size=_BLOCK_SIZE, **_ATTENTION)
_WINDOW = specs.SlidingWindowSpec(block_size=_BLOCK_SIZE, sliding_window=6, **_ATTENTION)
_MAMBA = specs.MambaSpec(block_size=2 * _BLOCK_SIZE, shapes=((4,),), dtypes=("float32",), mamba_cache_mode="align")
_LARGE = specs.FullAttentionSpec(block_size=2 * _BLOCK_SIZE, **_ATTENTION)
RECORDINGS = [_record("full", _FULL), _record("window", _FULL, _WINDOW), _record("mamba", _LARGE, _MAMBA)]


def altered_messages(d: Decisions, messages: list[Any]) -> list[Any]:
    """Some of them with other values, left out, doubled or in another place."""
    changed = messages[:_NUM_FIRST]
    first_chance = d.choose([0, 0, 0, 40])  # what is wrong there ends it
    for i, message in enumerate(messages):
        if i < _NUM_FIRST:
            changed[i] = _altered(d, message, first_chance)
        else:
            changed.append(_altered(d, message, 6))
        if d.chance(1):
            changed.append(d.choose(messages))
    return changed


def _altered(d: Decisions, message: Any, chance: int) -> Any:
    if not d.chance(chance):
        return message
    name, *fields = message
    at = d.below(len(fields)) if fields else 0
    if fields:
        fields[at] = altered_value(d, fields[at], 30) if d.chance(10) else _other_of_its_type(d, fields[at])
    return [name, *fields]


def _other_of_its_type(d: Decisions, value: Any) -> Any:
    """What the schema lets through, and nobody has recorded."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return d.choose([value + 1, value - 1, 0, 3, 4, 17, 2_000, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62)])
    if isinstance(value, bytes):
        ids = [int.from_bytes(value[i : i + 4], "little", signed=True) for i in range(0, len(value), 4)]
        at = d.below(len(ids) + 1)
        ids[at : at + d.below(3)] = [d.choose([0, 1, 5, 23, 24, -1, 2**31 - 1])] * d.below(3)
        return b"".join((i % 2**32).to_bytes(4, "little") for i in ids)[: len(value) + 8 - (d.below(20) == 19)]
    if isinstance(value, list) and value:
        at = d.below(len(value))
        return [*value[:at], _other_of_its_type(d, value[at]), *value[at + 1 :]]
    return d.choose([None, 0, [], [b""], [3, 1]])


def run(d: Decisions) -> None:
    messages = altered_messages(d, d.choose(RECORDINGS))
    data = MAGIC + b"".join(map(frame, messages))
    if d.chance(20):
        data = altered_bytes(d, data, MSGPACK_PIECES)
    path = _FOLDER / "file"
    path.write_bytes(data)
    start = time.process_time()
    _play(path, one_line)
    if time.process_time() - start > MAX_SECONDS:
        raise Finding(f"{len(data)} bytes took {time.process_time() - start:.1f} s")


def one_line(text: str) -> None:
    if not text.isprintable() or len(text) > 2_000:
        raise Finding(f"{len(text)} characters: {text[:500]!r}")


def _play(path: Path, check_text: Callable[[str], None]) -> None:
    try:
        report = play_recording(path, LIMITS)
    except RecordingError as error:
        check_text(str(error))
        if not str(error).startswith(str(path)):
            raise Finding(f"an error without the file: {error}") from error
        return
    for text in (report.recorded_with, *report.notes, str(report.finding)):
        check_text(text)
