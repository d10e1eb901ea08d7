"""The figures and names in SECURITY.md are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.events import publisher, replay
from kvpool.events.publisher import KVEventsConfig, ZmqEventPublisher
from kvpool.events.wire import USE_INT_BLOCK_HASHES_VARIABLE
from kvpool.network import byte_budget, curve, peer_limits, watched_socket
from kvpool.network.curve import KEYS_VARIABLE

TEXT = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([a-z][^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE))
MIB, KIB = 2**20, 2**10


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        ("connections of a socket", [KVEventsConfig().max_peers]),
        ("handshake", [curve.HANDSHAKE_SECONDS]),
        ("frame from a peer", [watched_socket.MAX_REQUEST_BYTES]),
        (
            "bytes from a peer",
            [watched_socket.PEER_BURST_BYTES // KIB, watched_socket.PEER_BYTES_PER_SECOND],
        ),
        (
            "bytes from all peers of a socket",
            [
                watched_socket.TOTAL_BURST_BYTES // KIB,
                watched_socket.TOTAL_BURST_BYTES_PER_PEER // KIB,
                watched_socket.TOTAL_BYTES_PER_SECOND // KIB,
            ],
        ),
        (
            "bytes from all subscribers connected",
            [watched_socket.TOTAL_BURST_BYTES // KIB, watched_socket.TOTAL_BURST_BYTES_PER_PEER // KIB],
        ),
        ("batches that wait for one subscriber", [publisher.DEFAULT_HWM]),
        ("bytes that wait for one subscriber", [publisher.DEFAULT_MAX_BUFFERED_BYTES // MIB]),
        (
            "batches remembered for replays",
            [publisher.DEFAULT_BUFFER_STEPS, publisher.DEFAULT_MAX_BUFFERED_BYTES // MIB],
        ),
        (
            "replay requests that wait",
            [replay.MAX_WAITING_REQUESTS, replay.MAX_WAITING_REQUESTS_PER_CLIENT],
        ),
        ("replay that is not fetched", [replay.STALL_SECONDS]),
        ("batches that wait for the thread", [publisher.DEFAULT_MAX_QUEUE_SIZE]),
    ],
)
def test_limits_are_those_of_the_code(row: str, figures: list[float]) -> None:
    assert [int(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]*", ROWS[row])] == figures


def test_what_happens_beyond_all_limits_together_is_as_told() -> None:
    (meaning,) = re.findall(r"^\| bytes from all peers of a socket \| [^|]+ \| ([^|]+) \|", TEXT, re.MULTILINE)
    half = watched_socket.TOTAL_BURST_BYTES / 2 / watched_socket.TOTAL_BYTES_PER_SECOND
    assert (half, half + byte_budget.MAX_SPENT_SECONDS) == (2.0, 7.0) and "for two to seven seconds" in meaning
    assert watched_socket.PEER_BURST_BYTES == peer_limits.MODEST_SHARE * KIB and "over 1 KiB just then" in meaning
    assert watched_socket.PEER_BURST_BYTES == 4 * KIB and "counts as 4 KiB" in meaning
    assert "when 256 KiB (512 KiB while there are replays)" in TEXT


def test_messages_of_workers_are_bounded_as_told() -> None:
    pytest.importorskip("zmq")
    from kvpool.worker.transport import link, messages, peer_watch

    told = re.search(r"at most (\d+) MiB, in frames of (\d+) KiB", TEXT)
    assert told is not None
    assert (int(told[1]) * MIB, int(told[2]) * KIB) == (messages.MAX_MESSAGE_BYTES, link.FRAME_BYTES)
    told = re.search(r"(\d+) connections at most .* send (\d+) KiB at once and (\d+) KiB/s", " ".join(TEXT.split()))
    assert told is not None
    assert (int(told[1]), int(told[2]) * KIB, int(told[3]) * KIB) == (
        peer_watch.MAX_STRANGERS,
        peer_watch.BURST_BYTES,
        peer_watch.BYTES_PER_SECOND,
    )


def test_names_are_those_of_the_code() -> None:
    for name in (KEYS_VARIABLE, USE_INT_BLOCK_HASHES_VARIABLE, "insecure=True", "kvpool keygen"):
        assert name in TEXT
    counters = re.findall(r"`(?:ZmqEventPublisher)?\.([a-z_]+)`", TEXT.partition("## Limits")[2])
    assert len(counters) == 5
    for name in counters:
        instance_names = inspect.getsource(ZmqEventPublisher)
        assert hasattr(ZmqEventPublisher, name) or f"self.{name} =" in instance_names, name
    parameters = inspect.signature(ZmqEventPublisher).parameters
    for name in ("max_peers", "hwm", "max_buffered_bytes", "buffer_steps", "max_queue_size", "keys", "insecure"):
        assert name in parameters and (name in ("keys", "insecure") or f"`{name}`" in TEXT)


def test_events_disclose_what_is_told() -> None:
    from kvpool.events.wire import BlockStored

    fields: dict[str, Any] = dict.fromkeys(BlockStored.__struct_fields__)
    for field in ("token_ids", "block_hashes", "session_id", "lora_name", "lora_id", "extra_keys"):
        assert field in fields
