"""Strangers at the ports of an event publisher: what they send costs no subscriber a batch, and the engine no memory.

The engine is a process of its own with few file descriptors; it reports its memory, its longest call and its counters.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from event_attackers import GREETING, LONG, SHORT_COMMAND, SHORT_MORE, connect, flood, frame, shake_hands

from kvpool.network.curve import CurveKeys, make_key_folder

zmq = pytest.importorskip("zmq")

pytestmark = [
    pytest.mark.dataplane,  # a process of its own, measured: once, on the release build
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures by /proc"),
]

MB = 10**6
PATIENCE_SECONDS = 20.0
FLOOD_SECONDS = 1.5
MAX_GROWTH_BYTES = 100 * MB  # 30 at most as a rule; of a machine on which the thread that cuts gets its turn late
MAX_CALL_SECONDS = 1.0  # a wait for a peer would last as long as the flood
MAX_FILES = 256
END_MARKER = [b"", b"", b"\xff" * 8, b""]
CHILD = Path(__file__).parents[1] / "support" / "event_engine_child.py"


class Engine:
    """The process; its last report is in ``report``."""

    def __init__(self, **parameters: Any) -> None:
        whole = {
            "endpoint": "tcp://127.0.0.1:*",
            "replay_endpoint": "tcp://127.0.0.1:*",
            "max_files": MAX_FILES,
            "max_peers": 32,
            **parameters,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(whole)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reports = 0
        self.report: dict[str, Any] = {}
        self.stderr = ""
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        self.wait_for(bool)

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            self.report = json.loads(line)
            self._reports += 1

    def _read_errors(self) -> None:
        for line in self._process.stderr:  # type: ignore[union-attr]
            self.stderr += line

    def wait_for(self, is_true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_true(self.report):
            assert self._process.poll() is None, self.stderr
            assert time.monotonic() < end, self.report
            time.sleep(0.02)
        return self.report

    def news(self) -> dict[str, Any]:
        """A report of now."""
        seen = self._reports + 1
        return self.wait_for(lambda _: self._reports > seen)

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            assert self._process.wait(PATIENCE_SECONDS) == 0, self.stderr
        finally:
            self._process.kill()
            self._process.wait()
            for thread in self._threads:
                thread.join()
            for stream in (self._process.stdout, self._process.stderr):
                stream.close()  # type: ignore[union-attr]


class Reader:
    """A subscriber that reads all the time and keeps the numbers."""

    def __init__(
        self, engine: Engine, patience_seconds: float = PATIENCE_SECONDS, keys: CurveKeys | None = None
    ) -> None:
        self._context = zmq.Context()
        self._keys = keys
        self._endpoints = engine.report["endpoint"], engine.report["replay_endpoint"]
        self._patience_seconds = patience_seconds
        self.numbers: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.wait_for(1)

    def _read(self) -> None:
        with self._context.socket(zmq.SUB) as sub:
            sub.linger = 0
            self._protect(sub)
            sub.subscribe(b"")
            sub.connect(self._endpoints[0])
            while not self._stop.is_set():
                if sub.poll(50):
                    self.numbers.append(int.from_bytes(sub.recv_multipart()[1], "big"))

    def _protect(self, peer: Any) -> None:
        if self._keys is not None:
            self._keys.protect_client(peer)

    def wait_for(self, number: int) -> None:
        end = time.monotonic() + self._patience_seconds
        while not self.numbers or self.numbers[-1] < number:
            assert time.monotonic() < end, f"batch {number} did not come, but {self.numbers[-1:]}"
            time.sleep(0.02)

    def replay(self, first: int) -> list[int]:
        """Asked for again when no answer comes: a request is lost with its connection, which may be cut."""
        end = time.monotonic() + self._patience_seconds
        while (numbers := self._try_replay(first)) is None:
            assert time.monotonic() < end, "the replay does not end"
        return numbers

    def _try_replay(self, first: int) -> list[int] | None:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            self._protect(dealer)
            dealer.connect(self._endpoints[1])
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            numbers = []
            while True:
                if not dealer.poll(2000):
                    return None
                frames = dealer.recv_multipart()
                if frames == END_MARKER:
                    return numbers
                numbers.append(int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def start() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(kind: Any, *arguments: Any, **parameters: Any) -> Any:
            made = kind(*arguments, **parameters)
            stack.callback(made.close)
            return made

        yield make


def check_unharmed(engine: Engine, reader: Reader, before: dict[str, Any]) -> dict[str, Any]:
    """The reader misses nothing, the engine has waited for nobody and is no larger than before."""
    report = engine.news()
    reader.wait_for(report["step"])
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[-1] + 1)), "no gap"
    assert report["step"] > before["step"]
    assert report["dropped_batches"] == 0 and report["overflows"] == 0
    assert report["worst_seconds"] < MAX_CALL_SECONDS
    assert report["rss"] - before["rss"] < MAX_GROWTH_BYTES
    assert report["files"] < MAX_FILES
    return report


def subscriptions(number: int) -> bytes:
    """A thousand that nobody has made yet."""
    return b"".join(frame(b"\x01" + struct.pack("<QQ", each, number)) for each in range(1000))


REQUEST = frame(b"", SHORT_MORE) + frame(bytes(8))

FLOODS: dict[str, tuple[str, bytes | None, Callable[[int], bytes]]] = {
    "garbage-pub": ("endpoint", None, lambda _: os.urandom(50_000)),
    "garbage-replay": ("replay_endpoint", None, lambda _: os.urandom(50_000)),
    "subscriptions": ("endpoint", b"SUB", subscriptions),
    "long-topics": ("endpoint", b"SUB", lambda n: frame(b"\x01" + struct.pack("<Q", n) * 30)),
    "parts-pub": ("endpoint", b"SUB", lambda _: 1000 * frame(b"\x01" + bytes(200), SHORT_MORE)),
    "parts-replay": ("replay_endpoint", b"DEALER", lambda _: 1000 * frame(bytes(200), SHORT_MORE)),
    "large-frame-pub": ("endpoint", b"SUB", lambda _: LONG + struct.pack(">Q", 2**28) + bytes(100_000)),
    "large-frame-replay": ("replay_endpoint", b"DEALER", lambda _: LONG + struct.pack(">Q", 2**28) + bytes(100_000)),
    "nonsense-requests": ("replay_endpoint", b"DEALER", lambda _: 1000 * frame(b"what?")),
    "replay-requests": ("replay_endpoint", b"DEALER", lambda _: 100 * REQUEST),
}
# ZeroMQ does not tell of connections that it ends itself because of a frame that is none or too large.
ENDED_BY_ZEROMQ = ("garbage-pub", "garbage-replay", "large-frame-pub", "large-frame-replay")


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_harms_nobody(start: Any, kind: str) -> None:
    where, socket_type, make_bytes = FLOODS[kind]
    engine = start(Engine)
    reader = start(Reader, engine)
    before = engine.news()
    peak = 0
    with flood(before[where], socket_type, make_bytes) as sent:
        end = time.monotonic() + FLOOD_SECONDS
        while time.monotonic() < end:
            peak = max(peak, engine.news()["rss"])
    assert sum(sent) > 10_000
    report = check_unharmed(engine, reader, before)
    print(f"{kind}: {sum(sent) / MB:.0f} MB sent, memory grew by {(peak - before['rss']) / MB:.1f} MB")
    assert peak - before["rss"] < MAX_GROWTH_BYTES
    assert report["refused_peers"] + report["refused_requests"] > 0 or kind in ENDED_BY_ZEROMQ, "it is counted"
    assert reader.replay(report["step"])[:1] == [report["step"]], "replays are answered"
    newcomer = start(Reader, engine)
    assert newcomer.numbers[0] >= report["step"], "and who comes later gets in"


CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(192)

STRANGERS: dict[str, Callable[[int], bytes]] = {
    "garbage": lambda _: os.urandom(50_000),
    "no-keys": lambda _: GREETING + 1000 * frame(b"\x01"),
    "bad-hello": lambda _: CURVE_GREETING + HELLO,
    "endless-hello": lambda _: CURVE_GREETING + 1000 * frame(bytes(200), SHORT_MORE),
}


@pytest.mark.parametrize("where", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_at_a_port_with_keys_harm_nobody(start: Any, tmp_path: Path, kind: str, where: str) -> None:
    make_key_folder(tmp_path)
    engine = start(Engine, keys=str(tmp_path))
    reader = start(Reader, engine, keys=CurveKeys.load_client(tmp_path))
    before = engine.news()
    with flood(before[where], None, STRANGERS[kind]) as sent:
        time.sleep(FLOOD_SECONDS)
    assert sum(sent) > 1000
    report = check_unharmed(engine, reader, before)
    assert report["refused_requests"] == 0
    assert report["refused_peers"] > 0 or kind == "garbage", "it is counted"
    assert reader.replay(report["step"])[:1] == [report["step"]]


PING = SHORT_COMMAND + b"\x07\x04PING\x00\x00"


@pytest.mark.parametrize(("where", "socket_type"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_a_peer_that_sends_a_little_and_a_ping_and_hangs_up_does_not_end_the_process(
    start: Any, where: str, socket_type: bytes
) -> None:
    """It ends libzmq where a bound on unread messages has stopped the peer's input."""
    engine = start(Engine)
    reader = start(Reader, engine)
    before = engine.news()

    def attack() -> None:
        with contextlib.suppress(OSError), shake_hands(before[where], socket_type) as peer:
            peer.sendall(100 * frame(b"x") + PING + 10 * frame(b"x"))
            time.sleep(0.002)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    for _ in range(20):
        threads = [threading.Thread(target=attack) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.news()
    report = check_unharmed(engine, reader, before)
    assert reader.replay(report["step"])[:1] == [report["step"]]


def test_replay_clients_that_all_have_one_name_harm_nobody(start: Any) -> None:
    """ZeroMQ listens to the first of them, and keeps what the others say."""
    engine = start(Engine)
    reader = start(Reader, engine)
    before = engine.news()
    peak = 0
    with (
        shake_hands(before["replay_endpoint"], b"DEALER", b"x"),
        flood(before["replay_endpoint"], b"DEALER", lambda _: 100 * frame(b""), identity=b"x") as sent,
    ):
        end = time.monotonic() + FLOOD_SECONDS
        while time.monotonic() < end:
            peak = max(peak, engine.news()["rss"])
    assert sum(sent) > 1000
    report = check_unharmed(engine, reader, before)
    assert peak - before["rss"] < MAX_GROWTH_BYTES
    assert reader.replay(report["step"])[:1] == [report["step"]]


def test_frames_that_come_one_by_one_cost_little_memory(start: Any) -> None:
    """Each takes a buffer of its own, and of a message without an end none is read."""
    engine = start(Engine)
    reader = start(Reader, engine)
    before = engine.news()
    peak = 0
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(shake_hands(before["replay_endpoint"], b"DEALER")) for _ in range(31)]
        for peer in peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.monotonic() + 2 * FLOOD_SECONDS
        while time.monotonic() < end:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sendall(frame(bytes(34), SHORT_MORE))
            peak = max(peak, engine.report["rss"])
        report = check_unharmed(engine, reader, before)
    print(f"memory grew by {(peak - before['rss']) / MB:.1f} MB")
    assert peak - before["rss"] < MAX_GROWTH_BYTES
    assert report["refused_peers"] > 0
    assert reader.replay(report["step"])[:1] == [report["step"]]


def test_bare_connects_cost_nothing(start: Any) -> None:
    """Ten times as many as the engine has descriptors, held open and silent; it can open files all the time."""
    engine = start(Engine)
    reader = start(Reader, engine)
    before = engine.news()
    most_files = 0
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            for where in ("endpoint", "replay_endpoint"):
                for _ in range(MAX_FILES // 2):
                    with contextlib.suppress(TimeoutError):  # whoever comes while the queue is full has to wait
                        stack.enter_context(connect(before[where]))
            most_files = max(most_files, engine.news()["files"])
        report = check_unharmed(engine, reader, before)
        assert reader.replay(report["step"]) != [], "a client finds room among them"
    assert most_files < MAX_FILES
    assert report["refused_peers"] > 10 * MAX_FILES / 2


def test_more_subscribers_than_allowed_are_refused(start: Any) -> None:
    """Those that came first stay."""
    engine = start(Engine, max_peers=4)
    readers = [start(Reader, engine) for _ in range(4)]
    before = engine.news()
    with zmq.Context() as context, context.socket(zmq.SUB) as late:
        late.linger = 0
        late.subscribe(b"")
        late.connect(before["endpoint"])
        engine.wait_for(lambda report: report["refused_peers"] > 0)
        for reader in readers:
            check_unharmed(engine, reader, before)
        assert not late.poll(0)
        readers.pop().close()
        assert late.poll(int(1000 * PATIENCE_SECONDS)), "there is room now"


# Readers that are slow or gone


def test_a_subscriber_that_reads_nothing_is_cut(start: Any) -> None:
    """20 kB a batch: the default of 100,000 batches would be 2 GB for it."""
    max_buffered_bytes = 20 * MB
    engine = start(Engine, tokens=4000, pause_seconds=0.0005, max_buffered_bytes=max_buffered_bytes)
    reader = start(Reader, engine)
    before = engine.news()
    stuck = shake_hands(before["endpoint"], b"SUB")
    stuck.sendall(frame(b"\x01"))
    with stuck:
        report = engine.wait_for(lambda report: report["overflows"] > 0)
    assert report["rss"] - before["rss"] < 3 * max_buffered_bytes  # half of it is what replays are made of
    assert (report["step"] - before["step"]) * 20_000 > max_buffered_bytes
    report = engine.wait_for(lambda later: later["step"] > report["step"] + 100)
    reader.wait_for(report["step"])
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[-1] + 1)), "the other one misses nothing"
    assert report["dropped_batches"] == 0 and report["worst_seconds"] < MAX_CALL_SECONDS


def test_a_slow_subscriber_loses_batches_beyond_the_high_water_mark(start: Any, tmp_path: Path) -> None:
    """Over a socket file, where bytes are not counted."""
    engine = start(Engine, endpoint=f"ipc://{tmp_path}/pub", tokens=4000, pause_seconds=0.0005, hwm=10)
    before = engine.news()
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.linger = 0
        stuck.rcvhwm = 1
        stuck.subscribe(b"")
        stuck.connect(before["endpoint"])
        report = engine.wait_for(lambda report: report["overflows"] > 0)
        report = engine.wait_for(lambda later: later["step"] > report["step"] + 1000)
        assert report["dropped_batches"] == 0 and report["worst_seconds"] < MAX_CALL_SECONDS
        numbers = []
        while stuck.poll(200) and len(numbers) < 1000:
            numbers.append(int.from_bytes(stuck.recv_multipart()[1], "big"))
        assert numbers == sorted(set(numbers)) and numbers != list(range(numbers[0], numbers[-1] + 1)), "gaps tell"


def test_replays_that_nobody_fetches_cost_little(start: Any) -> None:
    """All connections ask for everything again and again, and read nothing."""
    engine = start(Engine, tokens=4000, pause_seconds=0.0005, max_buffered_bytes=20 * MB, max_peers=8)
    reader = start(Reader, engine)
    engine.wait_for(lambda report: report["step"] > 500)
    before = engine.news()
    with contextlib.ExitStack() as stack:
        for _ in range(7):
            greedy = stack.enter_context(shake_hands(before["replay_endpoint"], b"DEALER"))
            greedy.sendall(100 * REQUEST)
        engine.wait_for(lambda report: report["refused_requests"] > 0)
        for _ in range(20):
            report = check_unharmed(engine, reader, before)
        assert reader.replay(report["step"])[:1] == [report["step"]]


READER_CODE = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
    sub.subscribe(b"")
    sub.connect(sys.argv[1])
    dealer.rcvhwm = 1
    dealer.connect(sys.argv[2])
    dealer.send_multipart([b"", bytes(8)])
    for count in range(50):
        dealer.recv_multipart()
    print(int.from_bytes(sub.recv_multipart()[1], "big"), flush=True)
    sys.stdin.read()
"""


def test_a_reader_that_is_killed_in_a_replay_costs_nothing_and_its_successor_catches_up(start: Any) -> None:
    engine = start(Engine, tokens=4000, pause_seconds=0.001)
    reader = start(Reader, engine)
    engine.wait_for(lambda report: report["step"] > 1000)
    before = engine.news()
    for _ in range(3):
        victim = subprocess.Popen(
            [sys.executable, "-c", READER_CODE, before["endpoint"], before["replay_endpoint"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert victim.stdout is not None and victim.stdin is not None
        last_seen = int(victim.stdout.readline())
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
        victim.stdin.close()
    report = engine.wait_for(lambda report: report["abandoned_replays"] == 3)
    successor = start(Reader, engine)
    filled = successor.replay(last_seen)
    assert filled[0] == last_seen and filled == list(range(last_seen, filled[-1] + 1))
    assert filled[-1] >= successor.numbers[0] - 1, "replay and stream meet"
    assert report["refused_requests"] == 0
    check_unharmed(engine, reader, before)


def test_a_reader_that_is_stopped_and_goes_on_catches_up(start: Any) -> None:
    """SIGSTOP until it is cut, then SIGCONT: it connects again, sees the gap and fills it."""
    code = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.SUB) as sub:
    sub.rcvhwm = 10
    sub.subscribe(b"")
    sub.connect(sys.argv[1])
    while True:
        print(int.from_bytes(sub.recv_multipart()[1], "big"), flush=True)
"""
    engine = start(Engine, tokens=4000, pause_seconds=0.0005, max_buffered_bytes=20 * MB)
    stopped = subprocess.Popen([sys.executable, "-c", code, engine.report["endpoint"]], stdout=subprocess.PIPE)
    assert stopped.stdout is not None
    try:
        numbers = [int(stopped.stdout.readline())]
        stopped.send_signal(signal.SIGSTOP)
        report = engine.wait_for(lambda report: report["overflows"] > 0)
        stopped.send_signal(signal.SIGCONT)
        while numbers[-1] <= report["step"]:
            numbers.append(int(stopped.stdout.readline()))
    finally:
        stopped.kill()
        stopped.wait()
        stopped.stdout.close()
    gaps = [(one, other) for one, other in itertools.pairwise(numbers) if other != one + 1]
    assert len(gaps) == 1
    assert numbers == sorted(numbers)
    assert report["dropped_batches"] == 0 and report["worst_seconds"] < MAX_CALL_SECONDS
    filler = start(Reader, engine)
    filled = filler.replay(report["step"])
    assert filled[0] >= report["step"] and filled == list(range(filled[0], filled[-1] + 1))
