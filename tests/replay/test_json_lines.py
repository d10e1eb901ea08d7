"""Files of JSON lines from outside: what ends a line, what a file may cost, and damaged or hostile content."""

from __future__ import annotations

import gzip
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from kvpool.common.json_lines import DEFAULT_READ_LIMITS, ReadLimits, numbered_lines  # noqa: E402
from kvpool.engine.prompts import PromptError, read_prompts  # noqa: E402
from kvpool.errors import InvalidArgumentError, KvpoolError  # noqa: E402
from kvpool.replay.trace import TraceError, TraceLimits, read_trace  # noqa: E402

REQUEST = {"timestamp": 5, "input_length": 513, "output_length": 3, "hash_ids": [7, 8]}
SUFFIXES = ["", ".gz", ".zst"]


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)  # as the program zstd does
    return data


def lines_of(data: bytes, limits: ReadLimits = DEFAULT_READ_LIMITS) -> list[tuple[int, bytes]]:
    return list(numbered_lines(io.BytesIO(data), limits, TraceError))


class SmallReads(io.BytesIO):
    """A stream that hands out a few bytes at a time, as pipes do."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(random.Random(self.tell()).randint(1, 5))


# ---- lines ----


def test_lines_end_at_newlines_alone() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\n\n \t\ni"
    assert lines_of(text.encode()) == [(1, text[: text.index("\n")].encode()), (4, b"i")]


@pytest.mark.parametrize("seed", range(20))
def test_lines_do_not_depend_on_how_the_bytes_arrive(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes(rng.choice(b"ab \n") for _ in range(rng.randrange(200)))
    expected = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    assert lines_of(data) == expected
    assert list(numbered_lines(SmallReads(data), ReadLimits(), TraceError)) == expected


def test_a_line_has_a_limit_which_is_exact_and_can_be_raised() -> None:
    line = b"x" * 1000
    for end in (b"", b"\n", b"\ny"):
        assert lines_of(line + end, ReadLimits(max_line_bytes=1000))[0] == (1, line)
        for stream in (io.BytesIO(b"a\n" + line + end), SmallReads(b"a\n" + line + end)):
            with pytest.raises(TraceError, match=r"^<stream>:2: the line is longer than 999 bytes \(--max-line-bytes "):
                list(numbered_lines(stream, ReadLimits(max_line_bytes=999), TraceError))


def test_the_text_has_a_limit_which_is_exact_and_can_be_raised() -> None:
    data = b"1\n2\n3\n"
    assert len(lines_of(data, ReadLimits(max_bytes=6))) == 3
    with pytest.raises(TraceError, match=r"the text is longer than 5 bytes \(--max-bytes raises the limit\)"):
        lines_of(data, ReadLimits(max_bytes=5))


def test_limits_are_positive() -> None:
    for limits in ({"max_bytes": 0}, {"max_line_bytes": -1}, {"max_request_tokens": 0}, {"max_request_tokens": 2**31}):
        with pytest.raises(InvalidArgumentError):
            TraceLimits(**limits)


def test_a_long_line_is_refused_at_the_limit_and_not_at_its_end() -> None:
    class Endless:
        num_bytes = 0

        def read(self, size: int) -> bytes:
            self.num_bytes += size
            return b"[" * size

    stream = Endless()
    with pytest.raises(TraceError, match="longer than 16,777,216 bytes"):
        list(numbered_lines(stream, ReadLimits(), TraceError))  # type: ignore[arg-type]
    assert stream.num_bytes <= (16 << 20) + (1 << 20)


@pytest.mark.timing
def test_a_long_line_takes_time_in_proportion_to_its_length() -> None:
    def seconds(num_bytes: int) -> float:
        start = time.process_time()
        lines_of(b"x" * num_bytes, ReadLimits(max_line_bytes=1 << 30))
        return time.process_time() - start

    seconds(1 << 20)
    assert seconds(256 << 20) < 40 * max(seconds(16 << 20), 0.01)  # quadratic: 256 times


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("filler", [b"\n", b" ", b"[", b'{"a": 1}\n'])
def test_a_bomb_is_refused_with_bounded_memory(tmp_path: Path, suffix: str, filler: bytes) -> None:
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(compress(filler * ((96 << 20) // len(filler)), suffix))
    limits = TraceLimits(max_bytes=64 << 20)
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"bomb.*longer than .* raises the limit|:1: field 'timestamp'"):
            read_trace(path, limits=limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 120 << 20


# ---- traces ----


def test_lengths_have_a_limit_that_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for fields, field in (
        ({"output_length": 10**9}, "output_length"),
        ({"output_length": (1 << 24) - 512}, "output_length"),
        ({"input_length": 10**400}, "input_length"),
    ):
        path.write_text(json.dumps(REQUEST | fields))
        with pytest.raises(
            TraceError, match=r"16777216 tokens of a request .--max-request-tokens raises the limit"
        ) as e:
            read_trace(path)
        assert str(e.value).startswith(f"{path}:1: field '{field}': ") and len(str(e.value)) < 400
    path.write_text(json.dumps(REQUEST | {"output_length": 10**9}))
    assert read_trace(path, limits=TraceLimits(max_request_tokens=10**9 + 513)).requests[0].output_length == 10**9
    path.write_text(json.dumps(REQUEST | {"output_length": (1 << 24) - 513}))
    assert read_trace(path).requests[0].output_length == (1 << 24) - 513


def test_numbers_of_many_digits_are_described_not_echoed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    too_large, too_long = "not an integer of 13288 bits", "an integer has more digits than can be read"
    for digits, reason in ((4_000, too_large), (5_000, too_long)):
        path.write_text(json.dumps(REQUEST).replace("513", "-" + "9" * digits))
        with pytest.raises(TraceError, match=f":1: .*{reason}") as caught:
            read_trace(path)
        assert len(str(caught.value)) < 300


def test_a_stream_is_read_like_a_file() -> None:
    data = (json.dumps(REQUEST) + "\n").encode() * 3
    trace = read_trace(io.BytesIO(data))
    assert [request.line for request in trace.requests] == [1, 2, 3] and trace.name == "<stream>"
    assert read_prompts(io.BytesIO(b'{"prompt": "a"}\n')) == ["a"]


# ---- prompts ----


def test_prompts_hold_any_character(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive\x1csix \U0001f600"
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=is_ascii) + "\n" for is_ascii in (False, True)))
    assert read_prompts(path) == [text, text]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (r'{"prompt": "ab\ud83d"}', "character 2 of the prompt is U+D83D"),
        (r'{"prompt": "\ude00\ud83d"}', "character 0 of the prompt is U+DE00"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"prompt": ' + "[" * 300 + "]" * 300 + "}", "is a text, not [[[[[[[...]]]]]]]"),
        ('{"prompt_token_ids": [1, ' + "9" * 4000 + "9.5]}", "no token id, but inf"),
        ('{"prompt_token_ids": [-' + "9" * 4000 + "]}", "an integer of 13288 bits"),
        ('{"prompt_token_ids": {"a": ' + "9" * 4000 + "}}", "a list of token ids, not {"),
        ('{"prompt_token_ids": "' + "a" * 3_000_000 + '"}', "a...a"),
    ],
)
def test_a_hostile_prompt_is_one_short_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and reason in message
    assert len(message) < 400 + len(str(path)) and "\n" not in message


# ---- damaged files, at random ----

Reader = Callable[..., Any]


def random_request(rng: random.Random) -> dict[str, Any]:
    input_length = rng.choice([1, 16, 17, 100])
    fields: dict[str, Any] = {"timestamp": rng.choice([0, 1.5, 10**9]), "output_length": rng.randrange(40)}
    if rng.random() < 0.3:
        return fields | {"prompt_token_ids": [rng.randrange(2**31) for _ in range(input_length)]}
    bound = rng.choice([10, 2**63, 2**64, 2**200])
    ids = [rng.randrange(-bound // 3, bound) for _ in range(-(-input_length // 16))]
    return fields | {"input_length": input_length, "hash_ids": ids}


def random_prompt(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"prompt_token_ids": [rng.randrange(300) for _ in range(rng.randint(1, 20))]}
    return {"prompt": "".join(chr(rng.choice([65, 0x85, 0x2028, 0x1F600, 10, 34])) for _ in range(rng.randint(1, 9)))}


def mangle(rng: random.Random, line: str) -> str:
    """One change that keeps the shape of a line, or nearly."""
    values = ["1e999", "NaN", "-1", "null", "[]", "{}", '"\\ud800"', "9" * 5000, "true", "[" * 5000, "1.0", '"x"']
    place = rng.randrange(len(line))
    kind = rng.randrange(5)
    if kind == 0:
        return line[:place]
    if kind == 1:
        return line[:place] + chr(rng.choice([0, 0x2028, 0xFFFF, 44, 91, 125, 34, 10])) + line[place + 1 :]
    name, value = rng.choice(list(json.loads(line).items()))
    if kind == 2:
        return json.dumps({key: entry for key, entry in json.loads(line).items() if key != name})
    if kind == 3:
        return line.replace(json.dumps(value), rng.choice(values))
    return line.replace(f'"{name}"', f'"{name[:-1]}"')


def read_as_trace(path: Path) -> list[Any]:
    """What a trace holds, as plain values."""
    return [
        (r.line, r.timestamp_ms, r.output_length, *(r.prompt_token_ids if r.hash_ids is None else r.hash_ids).tolist())
        for r in read_trace(path, 16).requests
    ]


READERS: list[tuple[Reader, Callable[[random.Random], dict[str, Any]], type[KvpoolError]]] = [
    (read_as_trace, random_request, TraceError),
    (read_prompts, random_prompt, PromptError),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("read", "make_line", "error_type"), READERS, ids=["trace", "prompts"])
def test_a_mangled_line_is_named_or_read(
    tmp_path: Path, suffix: str, read: Reader, make_line: Callable[..., Any], error_type: type[KvpoolError]
) -> None:
    rng = random.Random(7)
    path = tmp_path / f"f.jsonl{suffix}"
    num_refused = 0
    for _ in range(150):
        lines = [json.dumps(make_line(rng), ensure_ascii=rng.random() < 0.5) for _ in range(rng.randint(1, 6))]
        place = rng.randrange(len(lines))
        lines[place] = mangle(rng, lines[place])
        path.write_bytes(compress("\n".join(lines).encode("utf-8", "surrogatepass"), suffix))
        try:
            read(path)
        except error_type as error:
            message = str(error)
            num_refused += 1
            is_alone = len(lines) == 1  # a line that was cut to nothing leaves no line at all
            assert message.startswith((f"{path}:{place + 1}: ", f"{path}:{place + 2}: ")) or is_alone, message
            assert len(message) < 500 and "\n" not in message
    assert num_refused > 50


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(("read", "make_line", "error_type"), READERS, ids=["trace", "prompts"])
def test_a_damaged_file_is_an_error_or_read_right(
    tmp_path: Path, suffix: str, read: Reader, make_line: Callable[..., Any], error_type: type[KvpoolError]
) -> None:
    rng = random.Random(3)
    path = tmp_path / f"f.jsonl{suffix}"
    text = "".join(json.dumps(make_line(rng)) + "\n" for _ in range(4)).encode()
    good = compress(text, suffix)
    path.write_bytes(good)
    expected = read(path)
    for length in range(0, len(good), 3):
        path.write_bytes(good[:length])
        with pytest.raises(error_type, match=r"truncated|bad|no requests|no prompts") as caught:
            read(path)
        assert str(caught.value).startswith(str(path))
    for place in range(0, len(good), 3):
        damaged = bytearray(good)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            assert read(path) == expected, place
        except error_type as error:
            assert str(error).startswith(str(path)) and len(str(error)) < 500
