"""Reading and validation of traces, block hashes, and the synthetic generator."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from kvpool.replay.implementations import make_target  # noqa: E402
from kvpool.replay.policies import PrefixAccesses, unbounded_hit_blocks  # noqa: E402
from kvpool.replay.simulator import ReplaySettings, simulate  # noqa: E402
from kvpool.replay.synthetic import SyntheticSettings, generate_trace  # noqa: E402
from kvpool.replay.trace import TraceError, TraceRequest, block_hashes, read_trace  # noqa: E402

TRACES = Path(__file__).parents[3] / "shared" / "traces"
GOOD = {"timestamp": 5, "input_length": 513, "output_length": 3, "hash_ids": [7, 8]}
TOKENS = {"timestamp": 5, "output_length": 3, "prompt_token_ids": [1, 2, 3]}


def write(path: Path, *lines: object) -> Path:
    """Strings are written as they are, everything else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def changed(base: dict, **fields: object) -> dict:
    return {key: value for key, value in (base | fields).items() if value is not ...}


def test_fields_are_read(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD | {"type": "text", "turn": None}))
    (request,) = trace.requests
    assert (request.line, request.timestamp_ms, request.input_length, request.output_length) == (1, 5.0, 513, 3)
    assert request.hash_ids.tolist() == [7, 8] and request.hash_ids.dtype == np.int64
    assert request.prompt_token_ids is None
    assert not trace.is_synthetic and trace.trace_block_size == 512 and trace.name.endswith("t.jsonl")


def test_tokens_are_read_and_input_length_may_be_given(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", TOKENS, TOKENS | {"input_length": 3}))
    assert [request.input_length for request in trace.requests] == [3, 3]
    assert trace.requests[0].prompt_token_ids.tolist() == [1, 2, 3]
    assert trace.requests[0].hash_ids is None


def test_unsorted_timestamps_are_sorted_and_ties_stay_in_file_order(tmp_path):
    times = [3, 1, 3, 0.5, 1]
    trace = read_trace(write(tmp_path / "t.jsonl", *[GOOD | {"timestamp": time} for time in times]))
    assert [request.line for request in trace.requests] == [4, 2, 5, 1, 3]


def test_blank_lines_are_skipped_but_counted(tmp_path):
    path = write(tmp_path / "t.jsonl", "", GOOD, "  ", GOOD | {"timestamp": -1})
    with pytest.raises(TraceError, match=r"t\.jsonl:4: field 'timestamp'"):
        read_trace(path)


def test_a_last_line_without_newline_and_carriage_returns_are_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\r\n".join([json.dumps(GOOD).encode()] * 3))
    assert len(read_trace(path).requests) == 3


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, "not JSON")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match=":3: not valid JSON"):
        read_trace(path, limit=3)
    with pytest.raises(TraceError, match="limit"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(GOOD, timestamp=...), "field 'timestamp': is missing"),
        (changed(GOOD, timestamp="5"), "field 'timestamp': must be a number of milliseconds, not str"),
        (changed(GOOD, timestamp=True), "field 'timestamp': must be a number of milliseconds, not bool"),
        (changed(GOOD, timestamp=None), "field 'timestamp': must be a number of milliseconds, not null"),
        (changed(GOOD, timestamp=-0.5), "field 'timestamp': must be finite and not negative, not -0.5"),
        (changed(GOOD, timestamp=float("nan")), "field 'timestamp': must be finite and not negative, not nan"),
        (changed(GOOD, timestamp=float("inf")), "field 'timestamp': must be finite and not negative, not inf"),
        (changed(GOOD, timestamp=10**400), "field 'timestamp': must be finite and not negative, not inf"),
        (changed(GOOD, input_length=...), "field 'input_length': is missing"),
        (changed(GOOD, input_length=0), "field 'input_length': must be at least 1, not 0"),
        (changed(GOOD, input_length=-513), "field 'input_length': must be at least 1, not -513"),
        (changed(GOOD, input_length=513.0), "field 'input_length': must be a whole number of tokens, not float"),
        (changed(GOOD, input_length=float("nan")), "field 'input_length': must be a whole number of tokens, not float"),
        (changed(GOOD, input_length=True), "field 'input_length': must be a whole number of tokens, not bool"),
        (changed(GOOD, output_length=...), "field 'output_length': is missing"),
        (changed(GOOD, output_length=-1), "field 'output_length': must be at least 0, not -1"),
        (changed(GOOD, output_length="3"), "field 'output_length': must be a whole number of tokens, not str"),
        (changed(GOOD, hash_ids=...), "field 'hash_ids': is missing"),
        (changed(GOOD, hash_ids=7), "field 'hash_ids': must be a list of integers, not int"),
        (changed(GOOD, hash_ids=[7, "8"]), "field 'hash_ids': entry 1 must be an integer, not str"),
        (changed(GOOD, hash_ids=[False, 8]), "field 'hash_ids': entry 0 must be an integer, not bool"),
        (changed(GOOD, hash_ids=[7.5, 8]), "field 'hash_ids': entry 0 must be an integer, not float"),
        (changed(GOOD, timestamp=1e20), "field 'timestamp': must be at most 18446744073709551616 ms, not 1e+20"),
        (
            changed(GOOD, hash_ids=[7]),
            "field 'hash_ids': holds 1 ids, but 'input_length' 513 at 512 tokens per id takes",
        ),
        (
            changed(GOOD, hash_ids=[]),
            "field 'hash_ids': holds 0 ids, but 'input_length' 513 at 512 tokens per id takes",
        ),
        (GOOD | TOKENS, "field 'prompt_token_ids': given together with 'hash_ids'; a request has one of the two"),
        (changed(TOKENS, prompt_token_ids=[]), "field 'prompt_token_ids': must hold at least one token"),
        (
            changed(TOKENS, prompt_token_ids=[-1]),
            f"field 'prompt_token_ids': entry 0 must be from 0 to {2**31 - 1}, not -1",
        ),
        (changed(TOKENS, prompt_token_ids="abc"), "field 'prompt_token_ids': must be a list of integers, not str"),
        (changed(TOKENS, input_length=4), "field 'input_length': is 4, but 'prompt_token_ids' holds 3 tokens"),
        (changed(TOKENS, input_length=3.0), "field 'input_length': must be a whole number of tokens, not float"),
        (changed(TOKENS, output_length=...), "field 'output_length': is missing"),
        ([1, 2], "must be a JSON object, not list"),
        ("null", "must be a JSON object, not null"),
        ('{"timestamp": 5', "not valid JSON: "),
        ("[" * 200_000, "not valid JSON: "),
    ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:2: {message}") and "\n" not in text


def test_text_that_is_not_utf8_names_the_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(TraceError, match=":2: not UTF-8 text"):
        read_trace(path)


def test_other_trace_block_sizes(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD | {"input_length": 32})
    assert read_trace(path, trace_block_size=16).requests[0].hash_ids.tolist() == [7, 8]
    with pytest.raises(TraceError, match="at least 1"):
        read_trace(path, trace_block_size=0)


def test_block_size_must_divide_the_trace_block_size_but_fits_any_tokens(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD))
    trace.check_block_size(32)
    for block_size in (48, 1024):
        with pytest.raises(TraceError, match=f"{block_size} does not divide the trace block size 512"):
            trace.check_block_size(block_size)
    with pytest.raises(TraceError, match="at least 1"):
        trace.check_block_size(0)
    read_trace(write(tmp_path / "tokens.jsonl", TOKENS)).check_block_size(48)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_trace_without_requests_is_an_error(tmp_path, name):
    path = tmp_path / name
    compress(path, b"\n \n")
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(path)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def compress(path: Path, data: bytes) -> None:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_traces(tmp_path, suffix):
    lines = [GOOD | {"timestamp": time} for time in range(20_000)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / f"t.jsonl{suffix}"
    compress(path, data)
    assert [request.timestamp_ms for request in read_trace(path).requests] == list(range(20_000))
    # Two members or frames in a row are one text.
    half = len(data) // 2
    compress(path, data[:half])
    first = path.read_bytes()
    compress(path, data[half:])
    path.write_bytes(first + path.read_bytes())
    assert len(read_trace(path).requests) == 20_000
    with pytest.raises(TraceError, match=r"t\.jsonl.*:20001: field 'timestamp'"):
        compress(path, data + b'{"timestamp": -1}')
        read_trace(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_bad_and_truncated_compressed_data(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    compress(path, b"".join(json.dumps(GOOD | {"timestamp": time}).encode() + b"\n" for time in range(1000)))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceError, match="truncated"):
        read_trace(path)
    path.write_text(json.dumps(GOOD))
    with pytest.raises(TraceError, match=r"bad (gzip|zstd) data"):
        read_trace(path)


def test_zst_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "t.zst").write_bytes(b"x")
    with pytest.raises(TraceError, match="pip install zstandard"):
        read_trace(tmp_path / "t.zst")


def from_ids(input_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(1, 0.0, input_length, 0, hash_ids=np.array(hash_ids, np.int64))


def test_hashes_of_trace_ids_name_id_and_index():
    hashes = block_hashes(from_ids(8 + 8 + 5, 70, 71, 72), block_size=4, trace_block_size=8)
    assert hashes == [struct.pack("<QQQQ", *pair, 0, 0) for pair in [(70, 0), (70, 1), (71, 2), (71, 3), (72, 4)]]
    assert block_hashes(from_ids(3, 70), 4, 8) == []


LARGE_IDS = [
    0,
    1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**64 + 1,
    2**128,
    -1,
    -2,
    -(2**63),
    -(2**64),
    10**4000,
    -(10**4000),
]


def test_an_id_is_any_integer(tmp_path):
    line = GOOD | {"input_length": 4 * len(LARGE_IDS), "hash_ids": LARGE_IDS}
    (request,) = read_trace(write(tmp_path / "t.jsonl", line), trace_block_size=4).requests
    assert request.hash_ids.tolist() == LARGE_IDS
    hashes = [block_hashes(replace(request, hash_ids=request.hash_ids[[place]], input_length=4), 4, 4)[0]
              for place in range(len(LARGE_IDS))]  # fmt: skip
    assert len(set(hashes)) == len(LARGE_IDS) and set(map(len, hashes)) == {32}
    # An id of unsigned 64 bits stands for itself, in whatever company.
    for hash_id, block_hash in zip(LARGE_IDS, hashes):
        is_unsigned = 0 <= hash_id < 2**64
        assert (block_hash == struct.pack("<QQQQ", hash_id % 2**64, 0, 0, 0)) == is_unsigned


def test_an_id_has_the_same_hash_in_every_request(tmp_path):
    path = write(tmp_path / "t.jsonl", *[GOOD | {"hash_ids": [7, other]} for other in (8, 2**63, 2**64, -1)])
    requests = read_trace(path).requests
    firsts = {block_hashes(request, 16, 512)[0] for request in requests}
    assert firsts == {struct.pack("<QQQQ", 7, 0, 0, 0)}
    assert [request.hash_ids.dtype for request in requests] == [np.int64, np.uint64, object, object]


def test_large_ids_are_replayed_as_prefixes(tmp_path):
    lines = [GOOD | {"timestamp": 9000 * turn, "hash_ids": [2**64 + 5, end]} for turn, end in enumerate((-1, 2**63))]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    result = simulate(trace, make_target("reference", 100, 512), ReplaySettings(100, 512))
    assert result.hit_tokens == 512
    accesses = PrefixAccesses.from_trace(trace, 512)
    assert unbounded_hit_blocks(accesses, [0, 1]) == 1


def test_equal_ids_mean_equal_hashes_only_at_equal_positions():
    one, other = block_hashes(from_ids(12, 1, 2, 3), 4, 4), block_hashes(from_ids(12, 1, 3, 2), 4, 4)
    assert one[0] == other[0] and set(one).isdisjoint(other[1:])
    assert len(set(block_hashes(from_ids(16, 2**63 - 1, 0), 4, 8))) == 4


def test_hashes_of_tokens_are_chained():
    tokens = np.array([1, 2, 3, 4, 2**31 - 1], np.int32)
    request = TraceRequest(1, 0.0, 5, 0, prompt_token_ids=tokens)
    first = hashlib.sha256(bytes(32) + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()
    assert block_hashes(request, block_size=2, trace_block_size=512) == [first, second]


@pytest.mark.parametrize(
    ("input_length", "output_length", "needed", "full", "max_hit"),
    [(1, 0, 1, 0, 0), (4, 0, 1, 1, 0), (5, 0, 2, 1, 1), (8, 0, 2, 2, 1), (8, 1, 3, 2, 1), (9, 3, 3, 2, 2)],
)
def test_block_counts_of_a_request(input_length, output_length, needed, full, max_hit):
    request = TraceRequest(1, 0.0, input_length, output_length)
    assert request.num_blocks_needed(4) == needed
    assert request.num_full_prompt_blocks(4) == full
    assert request.max_hit_blocks(4) == max_hit


def as_tuples(trace) -> list[tuple]:
    return [(r.line, r.timestamp_ms, r.input_length, r.output_length, *r.hash_ids.tolist()) for r in trace.requests]


def test_synthetic_traces_are_determined_by_their_seed():
    assert as_tuples(generate_trace(3, 200)) == as_tuples(generate_trace(3, 200))
    assert as_tuples(generate_trace(3, 200)) != as_tuples(generate_trace(4, 200))
    assert as_tuples(generate_trace(3, 200))[:50] == as_tuples(generate_trace(3, 50))
    # Frozen: a change here changes everybody's synthetic results.
    first = [(r.timestamp_ms, r.input_length, r.output_length) for r in generate_trace(0, 3).requests]
    assert first == [(0.0, 1834, 432), (1271.912, 1798, 847), (2110.109, 1050, 668)]


def test_synthetic_traces_are_valid_and_independent_of_the_trace_block_size(tmp_path):
    fine, coarse = generate_trace(1, 300, 16), generate_trace(1, 300, 512)
    lengths = [[(r.timestamp_ms, r.input_length, r.output_length) for r in t.requests] for t in (fine, coarse)]
    assert lengths[0] == lengths[1] and lengths[0] == sorted(lengths[0], key=lambda entry: entry[0])
    assert fine.is_synthetic and "synthetic" in fine.name
    lines = [
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids.tolist(),
        }
        for request in coarse.requests
    ]
    assert len(read_trace(write(tmp_path / "t.jsonl", *lines)).requests) == 300


def test_synthetic_prefixes_form_a_tree_and_system_prompts_follow_zipf():
    trace = generate_trace(2, 1_000, 16)
    parents: dict[int, tuple[int, int]] = {}
    for request in trace.requests:
        parent = -1
        for position, hash_id in enumerate(request.hash_ids.tolist()):
            assert parents.setdefault(hash_id, (position, parent)) == (position, parent)
            parent = hash_id
    firsts = sorted((r.hash_ids[0] for r in trace.requests), key=int)
    counts = sorted((firsts.count(first) for first in set(firsts)), reverse=True)
    assert len(counts) > 10 and counts[0] > 5 * counts[len(counts) // 2]


def test_synthetic_settings_and_bad_numbers():
    settings = SyntheticSettings(mean_turns=1, num_system_prompts=1, min_system_prompt_length=64)
    assert len(generate_trace(0, 10, settings=settings).requests) == 10
    for arguments in ((0, 0), (0, 1, 0)):
        with pytest.raises(TraceError, match="at least"):
            generate_trace(*arguments)


@pytest.mark.parametrize(
    ("name", "num_requests", "mean_input"),
    [("mooncake_conversation_trace.jsonl", 12_031, 12_035), ("mooncake_synthetic_trace.jsonl", 3_993, 15_325)],
)
def test_real_traces_are_read(name, num_requests, mean_input):
    if not (TRACES / name).exists():
        pytest.skip("the shared traces are not here")
    requests = read_trace(TRACES / name).requests
    assert len(requests) == num_requests
    assert round(sum(request.input_length for request in requests) / num_requests) == mean_input
