"""Who gets KV cache events: loopback by default, keys or an explicit word beyond it, listed clients alone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.events.publisher import EventPublisherFactory, KVEventsConfig, ZmqEventPublisher
from kvpool.events.wire import AllBlocksCleared, BlockStored, KVEventBatch
from kvpool.network.curve import KEYS_VARIABLE, ClientGate, CurveKeys, make_key_folder

zmq = pytest.importorskip("zmq")

PATIENCE_MS = 10_000
SILENCE_MS = 300
NUM_BATCHES = 20
END_MARKER = [b"", b"", b"\xff" * 8, b""]
ANY_PORT = "tcp://127.0.0.1:*"

BEYOND = ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://*:0", "tcp://router:5557")


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_key_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def publish() -> Iterator[Any]:
    publishers: list[ZmqEventPublisher] = []

    def make(*arguments: Any, **parameters: Any) -> ZmqEventPublisher:
        publishers.append(ZmqEventPublisher(*arguments, **parameters))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.shutdown()
        assert not publisher._thread.is_alive()


def batch(step: int) -> KVEventBatch:
    return KVEventBatch(float(step), [BlockStored([step], None, [1, 2], 2, None, "GPU", None), AllBlocksCleared()])


def hear(publisher: ZmqEventPublisher, keys: CurveKeys | None, patience_ms: int) -> tuple[list[Any], list[Any]]:
    """What a subscriber and a replay client get of a number of batches."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        for peer in (sub, dealer):
            peer.linger = 0
            if keys is not None:
                keys.protect_client(peer)
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        dealer.connect(publisher.replay_endpoint)
        end = time.monotonic() + patience_ms / 1000
        while not sub.poll(20) and time.monotonic() < end:
            publisher.publish(batch(-1))
        first = publisher._next_sequence_number
        for step in range(NUM_BATCHES):
            publisher.publish(batch(step))
        live: list[Any] = []
        while sub.poll(patience_ms if len(live) < NUM_BATCHES else 0):
            frames = sub.recv_multipart()
            if int.from_bytes(frames[1], "big") >= first:
                live.append(frames)
        dealer.sndtimeo = patience_ms  # it has no connection where it is refused
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
        replayed: list[Any] = []
        while replayed[-1:] != [END_MARKER] and dealer.poll(patience_ms):
            replayed.append(dealer.recv_multipart())
        return live, replayed


# The address


def test_by_default_only_this_machine_is_served(publish: Any) -> None:
    rank = next(rank for rank in range(100, 200) if is_free("127.0.0.1", 5557 + rank))
    publisher = publish(rank)
    assert publisher.endpoint == f"tcp://127.0.0.1:{5557 + rank}"
    assert not is_free("127.0.0.1", 5557 + rank)
    assert is_free("127.0.0.2", 5557 + rank), "a wildcard would have it too"


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def test_the_default_of_the_configuration_is_that_of_the_publisher() -> None:
    assert KVEventsConfig().endpoint is None and KVEventsConfig().insecure is False


@pytest.mark.parametrize("endpoint", BEYOND)
def test_other_machines_need_keys_or_a_word(endpoint: str) -> None:
    for parameters in ({"endpoint": endpoint}, {"endpoint": ANY_PORT, "replay_endpoint": endpoint}):
        with pytest.raises(InvalidArgumentError, match="kvpool keygen") as raised:
            ZmqEventPublisher(0, **parameters)
        assert endpoint in str(raised.value)
        with pytest.raises(InvalidArgumentError, match="kvpool keygen"):
            EventPublisherFactory.create(KVEventsConfig(True, **parameters))


def test_a_word_is_enough(publish: Any) -> None:
    publisher = publish(0, "tcp://*:*", "tcp://*:*", insecure=True)
    assert publisher.endpoint.startswith("tcp://0.0.0.0:")
    publisher.endpoint = publisher.endpoint.replace("0.0.0.0", "127.0.0.1")
    publisher.replay_endpoint = publisher.replay_endpoint.replace("0.0.0.0", "127.0.0.1")
    live, replayed = hear(publisher, None, PATIENCE_MS)
    assert len(live) == NUM_BATCHES and len(replayed) == NUM_BATCHES + 1


# The keys


def test_listed_clients_get_the_stream_and_replays(publish: Any, keys: Path) -> None:
    """The same frames as without keys, byte for byte."""
    publisher = publish(0, ANY_PORT, ANY_PORT, topic="t", keys=keys)
    live, replayed = hear(publisher, CurveKeys.load_client(keys), PATIENCE_MS)
    first = int.from_bytes(live[0][1], "big")
    encode = msgspec.msgpack.Encoder().encode
    expected = []
    for step in range(NUM_BATCHES):
        events = batch(step)
        events.data_parallel_rank = 0
        expected.append([b"t", (first + step).to_bytes(8, "big"), encode(events)])
    assert live == expected
    assert replayed == [[b"", *frames] for frames in expected] + [END_MARKER]
    assert publisher.refused_peers == 0


def test_nobody_else_gets_anything(publish: Any, keys: Path, tmp_path: Path) -> None:
    publisher = publish(0, ANY_PORT, ANY_PORT, keys=keys)
    make_key_folder(tmp_path / "others")
    others = CurveKeys.load_client(tmp_path / "others")
    unlisted = CurveKeys(others.public, others.secret, frozenset([CurveKeys.load_server(keys).public]))
    for stranger in (None, others, unlisted):
        assert hear(publisher, stranger, SILENCE_MS) == ([], [])
    assert publisher.refused_peers >= 3
    live, _ = hear(publisher, CurveKeys.load_client(keys), PATIENCE_MS)
    assert len(live) == NUM_BATCHES


def test_nothing_can_be_read_on_the_way(publish: Any, keys: Path) -> None:
    """A man in the middle passes everything on, and finds no token in it; without keys he does."""
    tokens = list(range(70_000, 70_100))
    marker = msgspec.msgpack.encode(tokens)
    for folder, is_readable in ((None, True), (keys, False)):
        publisher = publish(0, ANY_PORT, keys=folder)
        port = int(publisher.endpoint.rpartition(":")[2])
        with Tap(port) as tap, zmq.Context() as context, context.socket(zmq.SUB) as sub:
            if folder is not None:
                CurveKeys.load_client(folder).protect_client(sub)
            sub.subscribe(b"")
            sub.connect(f"tcp://127.0.0.1:{tap.port}")
            end = time.monotonic() + PATIENCE_MS / 1000
            while not sub.poll(20):
                assert time.monotonic() < end
                publisher.publish(KVEventBatch(0.0, [BlockStored([1], None, tokens, 16, None, "GPU", None)]))
            assert marker in sub.recv_multipart()[2]
        assert (marker in tap.seen) == is_readable


class Tap:
    """Passes one TCP connection on, and keeps what the server said."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = socket.create_connection(("127.0.0.1", port))
        self.seen = b""
        self._client: socket.socket | None = None
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        self._client, _ = self._listener.accept()
        back = threading.Thread(target=self._pass_on, args=(self._client, self._server, False), daemon=True)
        back.start()
        self._pass_on(self._server, self._client, True)
        back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, keeps: bool) -> None:
        try:
            while data := source.recv(65536):
                if keeps:
                    self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._threads[0].join(PATIENCE_MS / 1000)
        for each in (self._client, self._listener):
            if each is not None:
                each.close()


def test_the_folder_may_come_from_the_environment(publish: Any, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    publisher = publish(0, "tcp://*:*", ANY_PORT)
    assert publisher.get_publisher_config().keys == keys
    publisher.endpoint = publisher.endpoint.replace("0.0.0.0", "127.0.0.1")
    assert hear(publisher, None, SILENCE_MS) == ([], [])
    live, replayed = hear(publisher, CurveKeys.load_client(keys), PATIENCE_MS)
    assert len(live) == NUM_BATCHES and len(replayed) == NUM_BATCHES + 1


@pytest.mark.parametrize("endpoint", [ANY_PORT, "tcp://*:*"])
def test_bad_keys_are_refused_before_anything_is_opened(keys: Path, endpoint: str) -> None:
    (keys / "server.key_secret").chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="has mode 0644"):
        ZmqEventPublisher(0, endpoint, keys=keys)
    with pytest.raises(InvalidArgumentError, match="no folder of keys"):
        ZmqEventPublisher(0, endpoint, keys=keys / "nowhere")


def test_files_of_sockets_need_no_keys(publish: Any, keys: Path, tmp_path: Path) -> None:
    publisher = publish(0, f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/r", keys=keys)
    live, replayed = hear(publisher, None, PATIENCE_MS)
    assert len(live) == NUM_BATCHES and len(replayed) == NUM_BATCHES + 1


@pytest.mark.parametrize("is_the_right_one", [True, False])
def test_a_publisher_that_connects_speaks_to_its_collector_alone(
    publish: Any, keys: Path, tmp_path: Path, is_the_right_one: bool
) -> None:
    make_key_folder(tmp_path / "others")
    with zmq.Context() as context:
        theirs = CurveKeys.load_server(keys if is_the_right_one else tmp_path / "others")
        gate = ClientGate(context, CurveKeys(theirs.public, theirs.secret, CurveKeys.load_server(keys).peers))
        with context.socket(zmq.SUB) as collector:
            gate.protect(collector)
            collector.subscribe(b"")
            port = collector.bind_to_random_port("tcp://127.0.0.1")
            publisher = publish(0, f"tcp://127.0.0.1:{port}", keys=keys)
            end = time.monotonic() + (PATIENCE_MS if is_the_right_one else 2 * SILENCE_MS) / 1000
            while not collector.poll(20) and time.monotonic() < end:
                publisher.publish(batch(0))
            assert bool(collector.poll(0)) == is_the_right_one
            publisher.shutdown()
        gate.close()


def test_a_process_with_keys_ends_without_shutdown(keys: Path) -> None:
    code = f"""
from kvpool.events.publisher import ZmqEventPublisher
from kvpool.events.wire import KVEventBatch
publisher = ZmqEventPublisher(0, "{ANY_PORT}", "{ANY_PORT}", keys="{keys}")
for _ in range(100):
    publisher.publish(KVEventBatch(ts=0.0, events=[]))
print("published")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "published\n", "")
