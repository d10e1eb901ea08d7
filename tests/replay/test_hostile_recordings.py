"""A recording comes from a stranger: it is played, or refused in one line that names the file and the place in it, for
little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import IS_PURE_PYTHON
from manager_layouts import Layout, ManagerRequest, make_config
from recordings import file_of, finish, messages_of, recording_to

from kvpool.playback.limits import DEFAULT_LIMITS, PlaybackLimits, RecordingError
from kvpool.playback.player import play_recording
from kvpool.recording.frames import HEAD, MAGIC, MAX_FRAME_BYTES, frame
from kvpool.recording.operations import (
    AllocateDecode,
    AllocateSlots,
    Free,
    GroupState,
    HashesState,
    NewHashes,
    PlainAllocations,
    PoolCacheFullBlocks,
    PoolState,
    Recording,
    RequestState,
    Result,
    SnapshotEnd,
    TableState,
    pack,
)

FULL = ("full", 4, 0, False)
WINDOW = ("window", 4, 6, False)
MAMBA = ("mamba_align", 4, 0, False)


def record(path: Path, *groups: Any) -> list[Any]:
    """A short run; its messages."""
    with recording_to(path) as manager_class:
        manager = manager_class(make_config(Layout(list(groups or [FULL, WINDOW]), 20)), 100)
    requests = [ManagerRequest(f"r{i}", [1] * 8 + [i]) for i in range(3)]
    for request in requests:
        hit, num_tokens, _ = manager.get_computed_blocks_and_boundary(request)
        manager.allocate_slots(request, 9 - num_tokens, num_tokens, hit)
        request.num_computed_tokens = 9
        request.append([7])
    manager.allocate_decode(requests)
    for request in requests:
        manager.free(request)
    return messages_of(finish(manager))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def play_or_refuse(path: Path, data: bytes) -> str:
    """ "played", "finding", or what it was refused with."""
    path.write_bytes(data)
    try:
        report = play_recording(path)
    except RecordingError as error:
        text = str(error)
        assert text.startswith(f"{path}: ") and text.isprintable() and len(text) < 500
        return text.removeprefix(f"{path}: ")
    for text in (report.recorded_with, *report.notes, str(report.finding)):
        assert text.isprintable() and len(text) < 2_000
    return "played" if report.finding is None else "finding"


# ---- files that are broken ----


def test_a_file_that_is_cut_short_is_played_up_to_there(path: Path) -> None:
    record(path)
    data = path.read_bytes()
    other = path.with_name("cut")
    ends, place = [], len(MAGIC)
    while place < len(data):
        place += HEAD.size + HEAD.unpack_from(data, place)[0]
        ends.append(place)
    answers = set()
    for length in range(len(data)):
        answer = play_or_refuse(other, data[:length])
        answers.add(answer)
        if length >= ends[0]:
            assert answer == "played", (length, answer)
            notes = play_recording(other).notes
            torn = [note for note in notes if "ends within a message, at byte" in note]
            assert bool(torn) == (length not in ends), (length, notes)
    assert answers == {"played", "is no recording of kvpool's operations", "does not say what was recorded"}


def test_a_byte_that_has_changed_is_found(path: Path) -> None:
    """By the checksum of its message; in the length of one it may look like a message that is cut short."""
    record(path)
    data = path.read_bytes()
    other = path.with_name("flipped")
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        answer = play_or_refuse(other, bytes(changed))
        if answer == "played":
            assert "ends within a message" in play_recording(other).notes[0], place
        else:
            assert answer.startswith(("byte ", "is no recording", "does not say")), (place, answer)


def with_frame(path: Path, body: bytes, num_bytes: int | None = None) -> str:
    """The answer to a file whose second message is this one."""
    from zlib import crc32

    head = record(path)[0]
    length = len(body) if num_bytes is None else num_bytes
    return play_or_refuse(path.with_name("other"), MAGIC + frame(head) + HEAD.pack(length, crc32(body)) + body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no message: Input data was truncated"),
        (b"\xdd\xff\xff\xff\xff", "no message: Input data was truncated"),
        (b"\x92\xa5touch\xc6\xff\xff\xff\xff", "no message: "),
        (b"\x91" * 100_000, "no message: "),
        (b"\x92\xa4free" + b"\x91" * 100_000, "no message: "),
        (b"\xc1", "no message: "),
        (b"\x92\xa4free\x01\x01", "no message: MessagePack data is malformed: trailing characters"),
        (msgspec.msgpack.encode(["exec", "rm"]), "no message: Invalid value 'exec'"),
        (msgspec.msgpack.encode(["free"]), "no message: "),
        (msgspec.msgpack.encode(["free", -1]), "no message: Expected `int` >= 0"),
        (msgspec.msgpack.encode(["free", 1.5]), "no message: Expected `int`, got `float`"),
        (msgspec.msgpack.encode(["free", 1, 2]), "no message: "),
        (msgspec.msgpack.encode({"free": 1}), "no message: Expected `array`, got `object`"),
        (msgspec.msgpack.encode("x" * 10_000), "no message: Expected `array`, got `str`"),
        (msgspec.msgpack.encode(["\x1b[31m\n"]), "no message: Invalid value"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(path: Path, body: bytes, reason: str) -> None:
    head = record(path)[0]
    place = len(MAGIC + frame(head))
    assert with_frame(path.with_name("again"), body).startswith(f"byte {place:,}: {reason}")


def test_lengths_that_lie_are_noticed_before_anything_is_read(path: Path) -> None:
    assert f"{2**32 - 1:,} bytes; {MAX_FRAME_BYTES:,} is the most" in with_frame(path, b"", 2**32 - 1)
    assert with_frame(path.with_name("2"), b"\x91", MAX_FRAME_BYTES) == "played"  # it looks torn, and that is said
    assert "ends within a message" in play_recording(path.with_name("other")).notes[0]


# ---- messages that nobody can have written ----


def replaced(head: Recording, **fields: Any) -> Recording:
    return msgspec.structs.replace(head, setup=msgspec.structs.replace(head.setup, **fields))


def of_pool(**fields: Any) -> PoolState:
    state = {"free_ids": pack(range(1, 20)), "used_ids": b"", "ref_cnts": b"", "watched_ids": b""}
    return PoolState("start", 0, **{**state, **fields})


GROUPS = [GroupState(i, b"", b"", b"", []) for i in range(2)]
LONG = 2**40


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_blocks": 2**31 - 1}, "2,147,483,647 blocks, more than 4,194,304 (--max-blocks raises the limit)"),
        ({"groups": []}, "not of one piece: InvalidArgumentError: "),
        ({"hash_block_size": 0}, "not of one piece: "),
        ({"hash_block_size": -(2**63)}, "not of one piece: "),
        ({"scheduler_block_size": 2**64 - 1}, "not of one piece: InvalidArgumentError: "),
        ({"watermark": float("inf")}, "not of one piece: InvalidArgumentError: "),
        ({"watermark": float("nan")}, "no message: Expected `float` >= 0.0"),
        ({"retention_interval": -1}, "not of one piece: InvalidArgumentError: "),
        ({"num_blocks": 5}, "not of one piece: free and used blocks that are not those of the pool"),
    ],
    ids=str,
)
def test_a_manager_that_can_not_be_made_is_refused(path: Path, fields: dict[str, Any], reason: str) -> None:
    head, *rest = record(path)
    answer = play_or_refuse(path, file_of([replaced(head, **fields), *rest]))
    assert reason in answer and answer.startswith("byte ")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("os.system", {}),
        ("KVCacheSpec", {"block_size": 4}),
        ("FullAttentionSpec", {"block_size": 4}),
        ("FullAttentionSpec", {"block_size": "4", "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}),
        ("FullAttentionSpec", {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": "object"}),
        ("FullAttentionSpec", {"block_size": 4, "__class__": 1}),
        ("MambaSpec", {"block_size": 4, "shapes": [5], "dtypes": ["float32"]}),
        ("MambaSpec", {"block_size": 4, "shapes": [[4]], "dtypes": []}),
    ],
    ids=str,
)
def test_specs_are_those_of_the_package_with_fields_of_their_own(path: Path, kind: str, fields: dict[str, Any]) -> None:
    head, *rest = record(path)
    group = msgspec.structs.replace(head.setup.groups[0], kind=kind, fields=fields)
    answer = play_or_refuse(path, file_of([replaced(head, groups=[group, head.setup.groups[1]]), *rest]))
    assert "not of one piece: " in answer


@pytest.mark.parametrize(
    "messages",
    [
        [of_pool(free_ids=pack([1, 1]))],
        [of_pool(free_ids=pack([20]))],
        [of_pool(free_ids=pack([0]))],
        [of_pool(free_ids=pack([-1]))],
        [of_pool(free_ids=b"\x01")],
        [of_pool(used_ids=pack([1]), ref_cnts=pack([1]))],
        [of_pool(free_ids=b"", used_ids=pack([1]), ref_cnts=b"")],
        [of_pool(free_ids=b"", used_ids=pack([1]), ref_cnts=pack([-5]))],
        [of_pool(watched_ids=pack([99]))],
        [of_pool(), HashesState(pack([1]), b"", [])],
        [of_pool(), HashesState(pack([0]), pack([4]), [b"x" * 36])],
        [of_pool(), HashesState(pack([99]), pack([4]), [b"x" * 36])],
        [of_pool(), HashesState(pack([1, 1]), pack([4, 4]), [b"x" * 36] * 2)],
        [of_pool(), HashesState(pack([1]), pack([-9]), [b"x" * 36])],
        [of_pool(), GROUPS[1], GROUPS[0]],
        [of_pool(), GROUPS[0]],
        [of_pool(), *GROUPS, GROUPS[0]],
        [of_pool(), GroupState(0, b"", pack([1]), b"", []), GROUPS[1]],
        [of_pool(), *GROUPS, TableState(7, 0, b"", None, None, None, False, None)],
        [of_pool(), *GROUPS, TableState(0, 0, pack([77]), None, None, None, False, None)],
        [of_pool(), *GROUPS, *[TableState(0, 0, b"", None, None, None, False, None)] * 2],
        [of_pool(), *GROUPS, TableState(0, 0, None, 0, (1, 99), None, False, None)],
    ],
)
def test_a_state_that_there_can_not_be_is_refused(path: Path, messages: list[Any]) -> None:
    head = record(path)[0]
    groups = [] if any(isinstance(message, GroupState) for message in messages) else GROUPS
    answer = play_or_refuse(path, file_of([head, *messages, *groups, SnapshotEnd()]))
    assert answer.startswith("byte ") and "not of one piece" in answer


def request(number: int = 0, num_tokens: int = 9, hashes: Any = (), **more: Any) -> RequestState:
    numbers = {"num_computed_tokens": 0, "num_prompt_tokens": 9, "num_in_flight_tokens": 0, "shared_prefix_boundary": 0}
    return RequestState(
        number,
        more.pop("is_own", True),
        True,
        0,
        num_tokens,
        **{**numbers, **more},
        skip_reading_prefix_cache=False,
        num_kept_hashes=0,
        new_hashes=list(hashes),
    )


def allocate(number: int = 0, num_new_tokens: int = 1, hits: Any = None, **more: Any) -> AllocateSlots:
    numbers = {"num_external_computed_tokens": 0, **more}
    return AllocateSlots(number, num_new_tokens, 0, hits, 0, *numbers.values(), False, 0, False, 0, True, [])


def decode(numbers: list[int], tokens: list[int], computed: list[int]) -> AllocateDecode:
    return AllocateDecode(pack(numbers), pack(tokens), pack(computed))


HASHES = [bytes([i]) * 32 for i in range(3)]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([allocate()], "there is no request 0"),
        ([Result(None, [])], "the result of no call"),
        ([decode([0], [1], [0])], "there is no request 0"),
        ([request(), decode([0], [1], [])], "a batch of rows of unequal length"),
        ([request(), allocate(hits=0)], "the hit of a lookup that was not made"),
        ([request(), allocate(hits=[pack([99]), b""])], "a pool of 20 blocks has no block"),
        ([request(), allocate(hits=[pack([-1]), b""])], "a pool of 20 blocks has no block"),
        ([request(), allocate(hits=[b"\x01", b""])], "a row of numbers in 1 bytes"),
        ([request(num_tokens=2**30)], "has 1,073,741,824 tokens, more than 16,777,216 (--max-tokens raises the limit)"),
        ([request(i, 2**24) for i in range(9)], "more than 134,217,728 tokens together"),
        ([request(num_computed_tokens=2**63)], "not of one piece: "),
        ([msgspec.structs.replace(request(), num_kept_hashes=3)], "3 hashes of request 0, which has 0"),
        ([request(), allocate(num_external_computed_tokens=2**30)], "a table for 1,000 tokens, more"),
        ([request(), PoolCacheFullBlocks(0, b"", 0, 2**31 - 1, 1, 0, None)], "2,147,483,647 blocks are to be full"),
        ([NewHashes(pack([0]), [b""])], "there is no request 0"),
        ([request(), NewHashes(pack([0]), [])], "0 hashes for 1 requests"),
        ([PlainAllocations(*[pack([0])] * 4, [], [])], "there is no request 0"),
        ([request(), PlainAllocations(*[pack([0])] * 3, b"", [], [])], "calls in rows of unequal length"),
        ([request(), PlainAllocations(pack([0]), pack([9]), b"\0", pack([1]), [], [])], "a row of numbers in 1 bytes"),
        ([of_pool(), Free(0)], "a Free in the middle of a snapshot"),
    ],
)
def test_calls_that_nobody_has_made_are_refused(path: Path, messages: list[Any], reason: str) -> None:
    head, *_ = record(path)
    head = replaced(head, max_model_len=1_000)
    data = file_of([head, of_pool(), *GROUPS, SnapshotEnd(), *messages, Result(None, [])])
    path.write_bytes(data)
    limits = DEFAULT_LIMITS
    if "a table for" in reason:
        limits = PlaybackLimits(max_tokens=500)
    with pytest.raises(RecordingError) as caught:
        play_recording(path, limits)
    assert reason in str(caught.value) and str(caught.value).startswith(f"{path}: byte ")


CHEAP = """
import sys
from pathlib import Path
from test_hostile_recordings import *
path = Path(sys.argv[1])
window, mamba = record(path), record(path.with_name("mamba"), FULL, MAMBA)
head = replaced(window[0], max_model_len=2**62)
start = [of_pool(), *GROUPS, SnapshotEnd()]
huge = request(num_tokens=9, num_computed_tokens=LONG, is_own=False)
files = [
    [replaced(mamba[0], max_model_len=2**62), *start, request(), allocate(0, LONG), Result(None, [])],
    [replaced(mamba[0], max_model_len=2**62), *start, request(), allocate(0, 2**24 - 1), Result([b"", b""], [])] ,
    [head, *start, request(), allocate(0, 1, None, num_external_computed_tokens=LONG), Result(None, [])],
    [head, *start, huge, allocate(0, 1), Result(None, [])],
    [head, *start, huge, decode([0], [9], [2**31 - 1]), Result([], [])],
    [head, of_pool(), *GROUPS, TableState(0, 0, b"", 2**31 - 1, None, None, False, None), SnapshotEnd(),
     request(hashes=HASHES), allocate(0, 3), Result(None, [])],
    [head, *start, *[request(i, 0, []) for i in range(300_000)]],
    [head, *start, request(), PoolCacheFullBlocks(0, pack([1]), 0, 2**31 - 1, 1, 0, None), Result(None, [])],
    [replaced(head, num_blocks=2**31 - 1), *start],
]
print([play_or_refuse(path, file_of(each))[:60] for each in files], file=sys.stderr)
lines = dict(line.split(":") for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) // 1024)
"""


@pytest.mark.skipif(IS_PURE_PYTHON, reason="the same files, slowly")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory was used at most")
def test_no_file_costs_much_memory(path: Path) -> None:
    from kvpool.native.pool import BUILD_INFO

    if BUILD_INFO["sanitize"]:
        pytest.skip("a sanitizer's memory comes on top")
    done = subprocess.run(
        [sys.executable, "-c", CHEAP, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 900, done.stderr  # megabytes
