"""The event publisher, seen by a subscriber that knows the protocol and nothing of the package: three frames (topic,
sequence number, payload), replays, gaps. Endpoints are loopback and sockets below tmp_path.
"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.events import wire as own_events
from kvpool.events.publisher import (
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    PublisherClosedError,
    ZmqEventPublisher,
)
from kvpool.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

zmq = pytest.importorskip("zmq")

PATIENCE_MS = 10_000
SILENCE_MS = 200
MAX_SHUTDOWN_SECONDS = 5.0
PROBE_TIME = -1.0
END_MARKER = (b"", b"", b"\xff" * 8, b"")

Frames = tuple[bytes, ...]


class Subscriber:
    """A consumer of the stream, with a socket of each kind."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: bytes = b"", hwm: int = 0) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.set_hwm(hwm)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.replay = None
        if replay_endpoint is not None:
            self.replay = self.context.socket(zmq.DEALER)
            self.replay.set_hwm(0)
            self.replay.connect(replay_endpoint)

    def join(self, publisher: Any, make_probe: Callable[[], Any] | None = None) -> int:
        """Wait until the subscription is in force; returns the number of batches that this took."""
        num_probes = 0
        while not self.sub.poll(20):
            publisher.publish(make_probe() if make_probe else batch(PROBE_TIME))
            num_probes += 1
            assert num_probes < 1000
        self.receive(num_probes - 1)
        return num_probes

    def receive(self, last: int) -> list[Frames]:
        """Messages up to the one with sequence number `last`."""
        messages: list[Frames] = []
        while not messages or number_of(messages[-1]) < last:
            assert self.sub.poll(PATIENCE_MS), f"nothing more after {messages[-1:]}"
            messages.append(tuple(self.sub.recv_multipart()))
        return messages

    def request_replay(self, first: int) -> list[Frames]:
        """All answers to one request, the end marker included."""
        assert self.replay is not None
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        answers: list[Frames] = []
        while not answers or answers[-1] != END_MARKER:
            assert self.replay.poll(PATIENCE_MS), "the end of the replay is missing"
            answers.append(tuple(self.replay.recv_multipart()))
        return answers

    def close(self) -> None:
        self.context.destroy(linger=0)


def number_of(message: Frames) -> int:
    """Sequence number of a message, also of one that was replayed."""
    return int.from_bytes(message[-2], "big")


def batch(ts: float, *events: Any, rank: int | None = None) -> KVEventBatch:
    return KVEventBatch(ts=ts, events=list(events), data_parallel_rank=rank)


def numbered(messages: list[Frames]) -> list[int]:
    return [number_of(message) for message in messages]


def times(messages: list[Frames]) -> list[float]:
    return [msgspec.msgpack.decode(message[-1])[0] for message in messages]


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_MS / 1000
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/pub"


@pytest.fixture
def replay_endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/replay"


@pytest.fixture
def make_publisher(endpoint: str) -> Iterator[Any]:
    publishers: list[ZmqEventPublisher] = []

    def make(**parameters: Any) -> ZmqEventPublisher:
        publishers.append(ZmqEventPublisher(**{"data_parallel_rank": 0, "endpoint": endpoint, **parameters}))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.shutdown()
        assert not publisher._thread.is_alive()


@pytest.fixture
def subscribe() -> Iterator[Any]:
    subscribers: list[Subscriber] = []

    def make(*arguments: Any, **parameters: Any) -> Subscriber:
        subscribers.append(Subscriber(*arguments, **parameters))
        return subscribers[-1]

    yield make
    for subscriber in subscribers:
        subscriber.close()


class Gate:
    """An encoder that stands still until it is opened."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self._encoder = publisher._encoder
        self._open = threading.Event()
        self.is_entered = threading.Event()
        publisher._encoder = self  # type: ignore[assignment]

    def encode(self, events: Any) -> bytes:
        self.is_entered.set()
        assert self._open.wait(PATIENCE_MS / 1000)
        return self._encoder.encode(events)

    def open(self) -> None:
        self._open.set()


# What a subscriber sees


def test_three_frames(make_publisher: Any, subscribe: Any, endpoint: str) -> None:
    publisher = make_publisher(topic="kv@pod-1")
    subscriber = subscribe(endpoint, topic=b"kv@")
    first = subscriber.join(publisher)
    publisher.publish(batch(1.5, BlockRemoved([7], "GPU", 0), AllBlocksCleared()))
    publisher.publish(batch(2.5))
    (topic, number, payload), second = subscriber.receive(first + 1)
    assert topic == b"kv@pod-1"
    assert number == first.to_bytes(8, "big")
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert number_of(second) == first + 1
    assert not subscriber.sub.poll(SILENCE_MS)


def test_numbers_start_at_zero(make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    publisher.publish(batch(1.0))
    wait_until(lambda: publisher.published_batches == 1)
    answers = subscribe(endpoint, replay_endpoint).request_replay(0)
    assert numbered(answers[:-1]) == [0]


def test_other_topics_are_not_delivered(make_publisher: Any, subscribe: Any, endpoint: str) -> None:
    publisher = make_publisher(topic="kv@pod-1")
    listener, other = subscribe(endpoint, topic=b"kv@pod-1"), subscribe(endpoint, topic=b"kv@pod-2")
    listener.join(publisher)
    assert not other.sub.poll(SILENCE_MS)


def test_the_rank_is_filled_in(make_publisher: Any, subscribe: Any, tmp_path: Path) -> None:
    publisher = make_publisher(data_parallel_rank=2, endpoint="tcp://127.0.0.1:*")
    subscriber = subscribe(publisher.endpoint)
    first = subscriber.join(publisher)
    publisher.publish(batch(1.0))
    publisher.publish(batch(2.0, rank=5))
    ranks = [msgspec.msgpack.decode(message[2])[2] for message in subscriber.receive(first + 1)]
    assert ranks == [2, 5]


def test_the_stream_of_a_pool(
    make_pool: Any, make_request: Any, make_publisher: Any, subscribe: Any, endpoint: str
) -> None:
    """A router's index, built from the stream alone, holds what the pool holds."""
    pool = make_pool(9, enable_kv_cache_events=True)
    publisher = make_publisher()
    subscriber = subscribe(endpoint)
    first = subscriber.join(publisher)
    num_steps = 40
    for step in range(num_steps):
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(make_request(range(step, step + 12)), blocks, 0, 3, 4, 0)
        pool.free_blocks(blocks)
        publisher.publish(batch(float(step), *pool.take_events()))
    index: set[int] = set()
    for message in subscriber.receive(first + num_steps - 1):
        for event in msgspec.msgpack.decode(message[2])[1]:
            change = {"BlockStored": index.update, "BlockRemoved": index.difference_update}[event["type"]]
            change(event["block_hashes"])
    cached = {block.block_hash for block in pool.blocks if block.block_hash is not None}
    assert index == {int.from_bytes(key[:-4][-8:], "big") for key in cached} and len(index) == 8


# Replays


def test_a_late_subscriber_gets_what_it_missed(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str
) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint, topic="t")
    for step in range(50):
        publisher.publish(batch(float(step)))
    subscriber = subscribe(endpoint, replay_endpoint)
    wait_until(lambda: publisher.published_batches == 50)
    answers = subscriber.request_replay(20)
    assert numbered(answers[:-1]) == list(range(20, 50))
    assert times(answers[:-1]) == [float(step) for step in range(20, 50)]
    assert {(answer[0], answer[1]) for answer in answers[:-1]} == {(b"", b"t")}
    assert answers[-1] == END_MARKER


def test_a_gap_is_seen_and_filled(make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    subscriber = subscribe(endpoint, replay_endpoint)
    first = subscriber.join(publisher)
    subscriber.sub.unsubscribe(b"")
    while subscriber.sub.poll(SILENCE_MS):
        subscriber.sub.recv_multipart()
    missed = 0
    while missed < 30:
        publisher.publish(batch(float(first + missed)))
        missed += 1
        time.sleep(0.001)
    subscriber.sub.subscribe(b"")
    seen: list[Frames] = []
    while not subscriber.sub.poll(20):
        publisher.publish(batch(float(first + missed)))
        missed += 1
    seen.append(tuple(subscriber.sub.recv_multipart()))
    gap_ends = number_of(seen[0])
    assert gap_ends >= first + 30
    answers = subscriber.request_replay(first)
    filled = {number_of(answer): times([answer])[0] for answer in answers[:-1]}
    assert all(filled[number] == float(number) for number in range(first, gap_ends))


def test_only_the_last_batches_are_remembered(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str
) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint, buffer_steps=3)
    subscriber = subscribe(endpoint, replay_endpoint)
    assert subscriber.request_replay(0) == [END_MARKER]
    for step in range(10):
        publisher.publish(batch(float(step)))
    wait_until(lambda: publisher.published_batches == 10)
    assert numbered(subscriber.request_replay(0)[:-1]) == [7, 8, 9]
    assert numbered(subscriber.request_replay(9)[:-1]) == [9]
    assert subscriber.request_replay(10) == [END_MARKER]
    assert subscriber.request_replay(2**64 - 1) == [END_MARKER]


def test_a_long_replay_is_whole(make_publisher: Any, replay_endpoint: str) -> None:
    """More messages than ZeroMQ keeps by default for a peer, for a client that keeps one and takes its time."""
    num_batches = 5000
    publisher = make_publisher(replay_endpoint=replay_endpoint, buffer_steps=num_batches)
    stored = BlockStored([1], None, list(range(70_000, 71_000)), 1000, None, "GPU", None)
    for step in range(num_batches):
        publisher.publish(batch(float(step), stored))
    wait_until(lambda: publisher.published_batches == num_batches)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set_hwm(1)
        client.connect(replay_endpoint)
        for _ in range(2):
            client.send_multipart([b"", bytes(8)])
            time.sleep(0.3)
            for step in range(num_batches):
                assert client.poll(PATIENCE_MS), f"answer {step} is missing"
                assert number_of(tuple(client.recv_multipart())) == step
            assert client.poll(PATIENCE_MS) and tuple(client.recv_multipart()) == END_MARKER


def test_a_request_client_gets_one_answer(make_publisher: Any, replay_endpoint: str) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    publisher.publish(batch(0.0))
    wait_until(lambda: publisher.published_batches == 1)
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.connect(replay_endpoint)
        client.send(bytes(8))
        assert client.poll(PATIENCE_MS)
        topic, number, payload = client.recv_multipart()
        assert (topic, number) == (b"", bytes(8)) and msgspec.msgpack.decode(payload)[0] == 0.0


def test_bad_requests_are_refused_and_counted(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line of them, however many there are."""
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    publisher.publish(batch(0.0))
    wait_until(lambda: publisher.published_batches == 1)
    subscriber = subscribe(endpoint, replay_endpoint)
    with caplog.at_level(logging.WARNING, "kvpool"):
        subscriber.replay.send_multipart([bytes(8)])
        subscriber.replay.send_multipart([b"", bytes(8), b"more"])
        subscriber.replay.send_multipart([b"x", bytes(8)])
        for length in (0, 7, 9, 1000):
            subscriber.replay.send_multipart([b"", bytes(length)])
        assert numbered(subscriber.request_replay(0)[:-1]) == [0]
    assert publisher.refused_requests == 7
    assert [record.args for record in caplog.records] == [("1 frames of 8 bytes",)]


@pytest.mark.timing
def test_clients_are_answered_apart_while_batches_go_out(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str
) -> None:
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    one, other = subscribe(endpoint, replay_endpoint), subscribe(endpoint, replay_endpoint)
    first = one.join(publisher)
    for step in range(200):
        publisher.publish(batch(float(step)))
        if step == 100:
            wait_until(lambda: publisher.published_batches > first + 50)
            one.replay.send_multipart([b"", first.to_bytes(8, "big")])
    answers = other.request_replay(first + 5)
    assert numbered(answers[:-1]) == list(range(first + 5, number_of(answers[-2]) + 1))
    assert number_of(tuple(one.replay.recv_multipart())) == first
    assert numbered(one.receive(first + 199)) == list(range(first, first + 200))


# The caller never waits


def publish_timed(publisher: ZmqEventPublisher, batches: list[KVEventBatch]) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for events in batches:
        start = time.perf_counter()
        publisher.publish(events)
        seconds.append(time.perf_counter() - start)
    return seconds


def assert_nobody_waited(seconds: list[float]) -> None:
    """A wait for a peer would be for ever, or at least for each call; the interpreter's own pauses are for some."""
    ordered = sorted(seconds)
    assert ordered[len(ordered) // 2] < 0.001
    assert ordered[-1] < 1.0


@pytest.mark.parametrize("transport", ["bound", "connecting"])
@pytest.mark.timing
def test_an_absent_subscriber_costs_nothing(make_publisher: Any, transport: str) -> None:
    where = {"bound": {}, "connecting": {"endpoint": "tcp://127.0.0.1:9"}}[transport]
    publisher = make_publisher(hwm=10, **where)
    assert_nobody_waited(publish_timed(publisher, [batch(float(step)) for step in range(5000)]))
    wait_until(lambda: publisher.published_batches == 5000)
    assert publisher.dropped_batches == 0


@pytest.mark.timing
def test_a_slow_subscriber_costs_nothing_and_sees_gaps(make_publisher: Any, subscribe: Any) -> None:
    """It reads nothing while 60 MB go past it; ZeroMQ drops, and the numbers tell."""
    publisher = make_publisher(endpoint="tcp://127.0.0.1:*", hwm=4)
    subscriber = subscribe(publisher.endpoint, hwm=4)
    first = subscriber.join(publisher)
    tokens = list(range(70_000, 80_000))
    stored = BlockStored([1], None, tokens, 16, None, "GPU", None)
    num_batches = 2000
    assert_nobody_waited(publish_timed(publisher, [batch(float(step), stored) for step in range(num_batches)]))
    wait_until(lambda: publisher.queued_batches == 0)
    publisher.publish(batch(-2.0))
    numbers = []
    while subscriber.sub.poll(2 * SILENCE_MS):
        numbers.append(number_of(tuple(subscriber.sub.recv_multipart())))
    assert numbers == sorted(set(numbers)) and numbers[0] == first
    assert len(numbers) < num_batches
    assert publisher.dropped_batches == 0 and publisher.published_batches == first + num_batches + 1


@pytest.mark.timing
def test_a_full_queue_drops_counts_and_leaves_a_gap(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str
) -> None:
    publisher = make_publisher(max_queue_size=10, replay_endpoint=replay_endpoint)
    subscriber = subscribe(endpoint, replay_endpoint)
    first = subscriber.join(publisher)
    gate = Gate(publisher)
    publisher.publish(batch(0.0))
    assert gate.is_entered.wait(PATIENCE_MS / 1000)
    # The thread is stuck with one batch; ten more fit.
    assert_nobody_waited(publish_timed(publisher, [batch(float(step)) for step in range(1, 1000)]))
    assert (publisher.queued_batches, publisher.dropped_batches) == (10, 989)
    gate.open()
    assert numbered(subscriber.receive(first + 10)) == list(range(first, first + 11))
    publisher.publish(batch(1000.0))
    (after,) = subscriber.receive(first + 1000)
    assert number_of(after) == first + 1000, "what was dropped has its numbers"
    assert numbered(subscriber.request_replay(first)[:-1]) == [*range(first, first + 11), first + 1000]
    assert publisher.dropped_batches == 989


def test_what_cannot_be_encoded_is_dropped_and_told(
    make_publisher: Any, subscribe: Any, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make_publisher()
    subscriber = subscribe(endpoint)
    first = subscriber.join(publisher)
    with caplog.at_level(logging.ERROR, "kvpool"):
        publisher.publish(batch(0.0, object()))
        publisher.publish(batch(1.0))
        (message,) = subscriber.receive(first + 1)
    assert number_of(message) == first + 1
    assert publisher.dropped_batches == 1 and f"batch of events {first} was dropped" in caplog.text


def test_many_threads_publish_in_order_of_their_numbers(make_publisher: Any, subscribe: Any, endpoint: str) -> None:
    publisher = make_publisher()
    subscriber = subscribe(endpoint)
    first = subscriber.join(publisher)
    threads = [
        threading.Thread(
            target=lambda rank=rank: [publisher.publish(batch(float(step), rank=rank)) for step in range(200)]
        )
        for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = subscriber.receive(first + 799)
    assert numbered(messages) == list(range(first, first + 800))
    of_rank: dict[int, list[float]] = {}
    for message in messages:
        ts, _, rank = msgspec.msgpack.decode(message[2])
        of_rank.setdefault(rank, []).append(ts)
    assert of_rank == {rank: [float(step) for step in range(200)] for rank in range(4)}


def test_clocks_that_jump_change_nothing(
    make_publisher: Any, subscribe: Any, endpoint: str, replay_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in a batch is the caller's; the publisher looks at no clock that can be set."""

    def refuse() -> float:
        raise AssertionError("the wall clock was asked for")

    monkeypatch.setattr(time, "time", refuse)
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    subscriber = subscribe(endpoint, replay_endpoint)
    first = subscriber.join(publisher)
    stamps = [2e9, 0.0, -1.0, 1e300, 5.0]
    for stamp in stamps:
        publisher.publish(batch(stamp))
    assert times(subscriber.receive(first + 4)) == stamps
    assert times(subscriber.request_replay(first)[:-1]) == stamps
    publisher.shutdown()
    assert publisher.dropped_batches == 0


# Shutdown


def test_what_is_queued_goes_out_first(make_publisher: Any, subscribe: Any, endpoint: str) -> None:
    publisher = make_publisher()
    subscriber = subscribe(endpoint)
    first = subscriber.join(publisher)
    for step in range(500):
        publisher.publish(batch(float(step)))
    publisher.shutdown()
    assert (publisher.published_batches, publisher.dropped_batches) == (first + 500, 0)
    assert numbered(subscriber.receive(first + 499)) == list(range(first, first + 500))


def test_after_shutdown_nothing_is_taken_and_nothing_is_left(endpoint: str, replay_endpoint: str) -> None:
    for _ in range(3):
        with ZmqEventPublisher(0, endpoint, replay_endpoint) as publisher:
            publisher.publish(batch(0.0))
        publisher.shutdown()
        with pytest.raises(PublisherClosedError):
            publisher.publish(batch(1.0))
        assert not publisher._thread.is_alive()
        for descriptor in (publisher._wake_reader, publisher._wake_writer):
            with pytest.raises(OSError):
                os.write(descriptor, b"\0")
    assert issubclass(PublisherClosedError, RuntimeError)


def test_an_address_is_free_again_after_shutdown(make_publisher: Any) -> None:
    publisher = make_publisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    with pytest.raises(zmq.ZMQError):
        make_publisher(endpoint="tcp://127.0.0.1:*", replay_endpoint=publisher.replay_endpoint)
    publisher.shutdown()

    def is_free(address: str) -> bool:
        with zmq.Context.instance().socket(zmq.PUB) as probe:
            try:
                probe.bind(address)
            except zmq.ZMQError:
                return False
            return True

    wait_until(lambda: is_free(publisher.endpoint) and is_free(publisher.replay_endpoint))


def test_shutdown_does_not_wait_for_a_long_queue(make_publisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZmqEventPublisher, "SHUTDOWN_TIMEOUT", 0.2)
    publisher = make_publisher()

    class Slow:
        def encode(self, events: Any) -> bytes:
            time.sleep(0.01)
            return b""

    publisher._encoder = Slow()
    for step in range(1000):
        publisher.publish(batch(float(step)))
    start = time.monotonic()
    publisher.shutdown()
    assert time.monotonic() - start < MAX_SHUTDOWN_SECONDS
    assert publisher.published_batches >= 1 and publisher.dropped_batches >= 1
    assert publisher.published_batches + publisher.dropped_batches == 1000
    assert publisher.queued_batches == 0


def test_shutdown_gives_a_stuck_thread_up(
    make_publisher: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ZmqEventPublisher, "SHUTDOWN_TIMEOUT", 0.05)
    publisher = make_publisher()
    gate = Gate(publisher)
    publisher.publish(batch(0.0))
    assert gate.is_entered.wait(PATIENCE_MS / 1000)
    publisher.publish(batch(1.0))
    start = time.monotonic()
    publisher.shutdown()
    assert time.monotonic() - start < MAX_SHUTDOWN_SECONDS
    assert "did not stop" in caplog.text
    with pytest.raises(PublisherClosedError):
        publisher.publish(batch(2.0))
    gate.open()
    publisher._thread.join(PATIENCE_MS / 1000)
    assert publisher.published_batches + publisher.dropped_batches == 2


def test_a_process_ends_without_shutdown(tmp_path: Path) -> None:
    code = f"""
from kvpool.events.publisher import ZmqEventPublisher
from kvpool.events.wire import KVEventBatch
publisher = ZmqEventPublisher(0, "ipc://{tmp_path}/p", "ipc://{tmp_path}/r")
for _ in range(100):
    publisher.publish(KVEventBatch(ts=0.0, events=[]))
print("published")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "published\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(make_publisher: Any) -> None:
    publisher = make_publisher()
    publisher.publish(batch(0.0))
    child = os.fork()
    if child == 0:
        try:
            publisher.publish(batch(1.0))
        except PublisherClosedError:
            publisher.shutdown()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publisher.publish(batch(2.0))
    publisher.shutdown()
    assert publisher.published_batches == 2


# Construction


def test_a_publisher_can_connect(make_publisher: Any) -> None:
    """Where one collector binds and the engines connect."""
    with zmq.Context() as context, context.socket(zmq.SUB) as collector:
        collector.subscribe(b"")
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        publisher = make_publisher(data_parallel_rank=1, endpoint=f"tcp://127.0.0.1:{port - 1}")
        assert publisher.endpoint == f"tcp://127.0.0.1:{port}"
        num_probes = 0
        while not collector.poll(20):
            publisher.publish(batch(0.0))
            num_probes += 1
            assert num_probes < 1000
        assert msgspec.msgpack.decode(collector.recv_multipart()[2]) == [0.0, [], 1]


def test_the_configuration_is_what_is_in_use(make_publisher: Any) -> None:
    publisher = make_publisher(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", buffer_steps=5, topic="t", max_queue_size=9
    )
    config = publisher.get_publisher_config()
    assert config == KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        buffer_steps=5,
        topic="t",
        max_queue_size=9,
    )
    ports = [url.removeprefix("tcp://127.0.0.1:") for url in (config.endpoint, config.replay_endpoint)]
    assert all(port.isdecimal() for port in ports) and ports[0] != ports[1]


@pytest.mark.parametrize(
    "parameters",
    [{"buffer_steps": -1}, {"hwm": -1}, {"max_queue_size": 0}, {"max_peers": 0}, {"max_buffered_bytes": -1}],
)
def test_impossible_numbers_are_refused(endpoint: str, parameters: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(parameters))):
        ZmqEventPublisher(0, endpoint, **parameters)


def test_a_rank_needs_a_port(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="tcp or inproc"):
        ZmqEventPublisher(1, endpoint)


def test_the_factory(endpoint: str) -> None:
    create = EventPublisherFactory.create
    for config in (None, KVEventsConfig(), KVEventsConfig(True, "null"), KVEventsConfig(False, "zmq")):
        publisher = create(config)
        assert type(publisher) is NullEventPublisher
        publisher.publish(batch(0.0))
        publisher.shutdown()
        assert publisher.get_publisher_config() is None
    publisher = create(KVEventsConfig(True, endpoint=endpoint, topic="t"))
    assert type(publisher) is ZmqEventPublisher and publisher.get_publisher_config().topic == "t"
    publisher.shutdown()
    with pytest.raises(InvalidArgumentError, match="no publisher 'file'"):
        create(KVEventsConfig(True, "file"))
    with pytest.raises(KeyError, match="zmq"):
        EventPublisherFactory.register_publisher("zmq", ZmqEventPublisher)


def test_other_publishers_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventPublisherFactory, "_constructors", {})
    EventPublisherFactory.register_publisher("file", lambda **parameters: parameters)  # type: ignore[arg-type]
    parameters = EventPublisherFactory.create(KVEventsConfig(True, "file", topic="t"), data_parallel_rank=3)
    assert parameters["topic"] == "t" and parameters["data_parallel_rank"] == 3


def test_missing_pyzmq_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match=r"pip install kvpool\[events\]"):
        ZmqEventPublisher(0, endpoint)


def test_pyzmq_is_imported_when_it_is_needed() -> None:
    code = "import sys, kvpool.events.publisher; print('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


# Beside vLLM


@pytest.mark.vllm
def test_vllm_decodes_the_batches(
    make_pool: Any, make_request: Any, make_publisher: Any, subscribe: Any, endpoint: str
) -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    pool = make_pool(9, enable_kv_cache_events=True)
    publisher = make_publisher()
    subscriber = subscribe(endpoint)
    first = subscriber.join(publisher)
    for step in range(10):
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(make_request(range(step, step + 12), session_id="s"), blocks, 0, 3, 4, 1)
        pool.free_blocks(blocks)
        if step == 9:
            pool.reset_prefix_cache()
        publisher.publish(batch(float(step), *pool.take_events()))
    decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
    messages = subscriber.receive(first + 9)
    decoded = [decoder.decode(message[2]) for message in messages]
    assert [type(event).__name__ for event in decoded[-1].events][-1] == "AllBlocksCleared"
    assert [each.ts for each in decoded] == [float(step) for step in range(10)]
    encoder = msgspec.msgpack.Encoder()
    assert [encoder.encode(each) for each in decoded] == [message[2] for message in messages]


@pytest.mark.vllm
@pytest.mark.parametrize("topic", ["", "kv@pod"])
def test_frames_equal_those_of_vllm(subscribe: Any, tmp_path: Path, topic: str) -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")

    def stored(module: Any) -> Any:
        return module.BlockStored([1, 2], None, [3, 4], 1, None, "GPU", None, [("a",), None], 0)

    frames: list[tuple[list[Frames], list[Frames]]] = []
    num_before = 50
    for name, publisher_class, module in (
        ("v", theirs.ZmqEventPublisher, theirs),
        ("k", ZmqEventPublisher, own_events),
    ):
        urls = (f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}r")
        publisher = publisher_class(0, *urls, buffer_steps=8, topic=topic)
        try:
            subscriber = subscribe(*urls)
            first = subscriber.join(publisher, lambda module=module: module.KVEventBatch(ts=PROBE_TIME, events=[]))
            assert first < num_before
            for _ in range(first, num_before):
                publisher.publish(module.KVEventBatch(ts=PROBE_TIME, events=[]))
            for step in range(12):
                events = [stored(module), module.BlockRemoved([step], "GPU", 0), module.AllBlocksCleared()]
                rank = 3 if step % 2 else None
                publisher.publish(module.KVEventBatch(ts=float(step), events=events, data_parallel_rank=rank))
            messages = subscriber.receive(num_before + 11)[-12:]
            frames.append((messages, subscriber.request_replay(num_before + 2)))
        finally:
            publisher.shutdown()
    assert frames[0] == frames[1]
    assert len(frames[0][0]) == 12 and len(frames[0][1]) == 9


@pytest.mark.vllm
def test_parameters_and_defaults_are_those_of_vllm() -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    config_class = pytest.importorskip("vllm.config.kv_events").KVEventsConfig

    def parameters(call: Any) -> list[tuple[str, Any]]:
        return [(name, parameter.default) for name, parameter in inspect.signature(call).parameters.items()]

    vllm_parameters = parameters(theirs.ZmqEventPublisher)
    at = vllm_parameters.index(("endpoint", "tcp://*:5557"))
    vllm_parameters[at] = ("endpoint", None)
    assert parameters(ZmqEventPublisher)[: len(vllm_parameters)] == vllm_parameters
    assert ZmqEventPublisher.END_SEQ == theirs.ZmqEventPublisher.END_SEQ
    for enabled in (False, True):
        ours, other = KVEventsConfig(enable_kv_cache_events=enabled), config_class(enable_kv_cache_events=enabled)
        assert list(vars(ours))[: len(vars(other))] == list(vars(other))
        assert {**vars(ours), "endpoint": "tcp://*:5557"}.items() >= vars(other).items()


@pytest.mark.vllm
def test_vllms_default_endpoint_needs_keys_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    config_class = pytest.importorskip("vllm.config.kv_events").KVEventsConfig
    monkeypatch.delenv("KVPOOL_CURVE_KEYS", raising=False)
    with pytest.raises(InvalidArgumentError, match="kvpool keygen"):
        EventPublisherFactory.create(config_class(enable_kv_cache_events=True))


@pytest.mark.vllm
def test_vllms_configuration_is_accepted(endpoint: str) -> None:
    config_class = pytest.importorskip("vllm.config.kv_events").KVEventsConfig
    publisher = EventPublisherFactory.create(config_class(enable_kv_cache_events=True, endpoint=endpoint, topic="t"))
    assert type(publisher) is ZmqEventPublisher
    theirs = vars(config_class(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="t"))
    assert vars(publisher.get_publisher_config()).items() >= theirs.items()
    publisher.shutdown()
