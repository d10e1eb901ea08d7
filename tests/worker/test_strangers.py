"""What strangers send to a scheduler costs its workers no step, and little memory: connections without a word, garbage,
nested, large and endless messages. Who has the keys gets in, and nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from broadcast_workers import SHORT, TIMEOUT, ThreadWorker, answer_with, make_info, make_step, raw_socket
from table_digests import TableDigests

from kvpool.errors import InvalidArgumentError
from kvpool.network.curve import KEYS_VARIABLE, CurveKeys, make_key_folder
from kvpool.scheduler import StepResult
from kvpool.worker.transport import messages
from kvpool.worker.transport.broadcaster import Broadcaster, WorkerConnection
from kvpool.worker.transport.errors import (
    BroadcasterStateError,
    SchedulerLostError,
    WorkerError,
    WorkerRefusedError,
    WorkerTimeoutError,
)
from kvpool.worker.transport.messages import MalformedMessageError, WorkerInfo, decode

pytestmark = pytest.mark.dataplane

ANY_PORT = "tcp://127.0.0.1:*"
NESTED = b"\x91" * 60_000
NESTED_FIELD = b"\x84\xa4type\xa6answer\xa8sequence\x01\xadblock_digests\x90\xa1x" + NESTED
NUM_CONNECTS = 2500
STEP_SECONDS = 5.0  # that a step may take during a flood; by itself it takes milliseconds
FLOOD_SECONDS = 6.0
# With keys nobody gets as far as sending a message. Without them ZeroMQ takes what it can until a connection is cut.
MAX_GROWTH_BYTES = {"keys": 100 * 2**20, "loopback": 1000 * 2**20}


@pytest.fixture
def bind() -> Iterator[Callable[..., Broadcaster]]:
    """Makes broadcasters, and closes them."""
    made: list[Broadcaster] = []

    def make(world_size: int = 1, where: str = ANY_PORT, timeout_seconds: float = TIMEOUT, **options: Any) -> Any:
        made.append(Broadcaster(where, world_size, timeout_seconds=timeout_seconds, **options))
        return made[-1]

    yield make
    for broadcaster in made:
        broadcaster.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_key_folder(tmp_path / "keys")
    return tmp_path / "keys"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def run_steps(broadcaster: Broadcaster, first: int, num_steps: int) -> None:
    for number in range(first, first + num_steps):
        start = time.monotonic()
        position = number % 100  # within the model's length, however many steps there are
        step = make_step(number, [1] if number == 1 else None, position=position)
        assert broadcaster.execute(step).tokens == {"r": [0]}
        assert time.monotonic() - start < STEP_SECONDS


# ---- connections without a word ----


def test_thousands_of_connections_without_a_word_cost_no_step_and_no_close(bind: Callable[..., Broadcaster]) -> None:
    """While nobody calls the scheduler, which is when nobody would look at a monitor."""
    broadcaster = bind(2)
    for rank in range(2):
        ThreadWorker(broadcaster.address, rank, 2)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 2)
    place = ("127.0.0.1", port_of(broadcaster.address))
    kept: list[socket.socket] = []
    for number in range(NUM_CONNECTS):
        connection = socket.create_connection(place, timeout=TIMEOUT)
        if number % 8:
            connection.close()
        else:
            kept.append(connection)
    run_steps(broadcaster, 3, 20)
    late = ThreadWorker(broadcaster.address, 0, 2)  # connections are accepted still, and it is told
    end = time.monotonic() + TIMEOUT
    number = 23
    while late.is_alive() and time.monotonic() < end:
        run_steps(broadcaster, number, 1)
        number += 1
    assert isinstance(late.end(), WorkerRefusedError)
    start = time.monotonic()
    broadcaster.close()
    assert time.monotonic() - start < TIMEOUT / 2
    for connection in kept:
        connection.close()


def test_strangers_that_stay_are_limited_in_number_and_workers_get_in(bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    place = ("127.0.0.1", port_of(broadcaster.address))
    kept = [socket.create_connection(place, timeout=TIMEOUT) for _ in range(300)]
    end = time.monotonic() + TIMEOUT
    while broadcaster._link.num_cut < 300 - 64 and time.monotonic() < end:
        time.sleep(0.05)
    assert broadcaster._link.num_cut >= 300 - 64
    ThreadWorker(broadcaster.address, 0)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 3)
    for connection in kept:
        connection.close()


# ---- messages ----

FLOOD = r"""
import socket, struct, sys, threading, time
import zmq
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds

def speak_zmtp():
    s = socket.create_connection((host, port), timeout=5)
    s.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    s.sendall(bytes([4, len(ready)]) + ready)
    told = b""
    while b"READY" not in told:  # what comes before is no message yet
        data = s.recv(4096)
        if not data:
            raise ConnectionError
        told += data
    return s

def forever(attack):
    while time.monotonic() < end:
        try:
            attack()
        except OSError:
            pass

def connects():
    for s in [socket.create_connection((host, port), timeout=5) for _ in range(50)]:
        s.close()

def garbage():
    with socket.create_connection((host, port), timeout=5) as s:
        s.sendall(bytes(range(256)) * 64)

def large():
    with speak_zmtp() as s:
        s.sendall(b"\x02" + struct.pack(">Q", 2**28))
        while time.monotonic() < end:
            s.sendall(bytes(2**16))

def endless():
    with speak_zmtp() as s:
        part = b"\x03" + struct.pack(">Q", 2**15) + bytes(2**15)
        while time.monotonic() < end:
            s.sendall(part)

def unread_and_gone():
    # More than an idle scheduler has read, a heartbeat, and a connection that is reset: it ended libzmq.
    s = speak_zmtp()
    ping = b"\x04PING\x00\x00"
    s.sendall(b"\x00\x01x" * 3000 + bytes([4, len(ping)]) + ping + b"\x00\x01x" * 10)
    time.sleep(0.5)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()

def messages(payload):
    def attack():
        socket_ = zmq.Context.instance().socket(zmq.DEALER)
        socket_.linger = 0
        socket_.sndtimeo = 200
        socket_.connect(f"tcp://{host}:{port}")
        try:
            for _ in range(2000):
                if time.monotonic() > end:
                    break
                socket_.send(payload)
        except zmq.Again:
            pass
        socket_.close()
    return attack

nested = b"\x91" * 60000
attacks = [connects, garbage, large, endless, endless, unread_and_gone]
attacks += [messages(nested), messages(b"x"), messages(nested)]
threads = [threading.Thread(target=forever, args=(attack,)) for attack in attacks]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("protection", ["keys", "loopback"])
def test_a_flood_costs_no_step_and_little_memory(
    protection: str, keys: Path, bind: Callable[..., Broadcaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    if protection == "keys":
        monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    broadcaster = bind(2)
    workers = [ThreadWorker(broadcaster.address, rank, 2, answer_with(0)) for rank in range(2)]
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 5)
    before = largest = resident_bytes()
    words = ["127.0.0.1", str(port_of(broadcaster.address)), str(FLOOD_SECONDS)]
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, *words])
    number = 6
    try:
        while flood.poll() is None:
            run_steps(broadcaster, number, 1)
            largest = max(largest, resident_bytes())
            number += 1
            for worker in workers:
                worker.seen.clear()
    finally:
        flood.kill()
        flood.wait()
    assert flood.returncode == 0 and number > 20
    assert broadcaster._link.num_cut > 0 and (broadcaster.num_refused > 0) == (protection == "loopback")
    assert largest - before < MAX_GROWTH_BYTES[protection], f"{(largest - before) >> 20} MiB"
    run_steps(broadcaster, number, 5)
    broadcaster.close()
    assert [worker.end() for worker in workers] == [None, None]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_message_without_an_end_is_cut_while_nobody_looks(
    bind: Callable[..., Broadcaster],
) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(broadcaster.address, 0)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 1)
    script = FLOOD.partition("nested = ")[0] + "forever(endless)"
    before = largest = resident_bytes()
    with subprocess.Popen([sys.executable, "-c", script, "127.0.0.1", str(port_of(broadcaster.address)), "3"]) as flood:
        while flood.poll() is None:
            largest = max(largest, resident_bytes())
            time.sleep(0.01)
    assert broadcaster._link.num_cut > 0
    assert largest - before < MAX_GROWTH_BYTES["loopback"] / 3, f"{(largest - before) >> 20} MiB"
    run_steps(broadcaster, 2, 2)
    assert worker.is_alive()


def test_a_peer_that_sends_much_and_hangs_up_does_not_end_the_process(bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(broadcaster.address, 0)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 1)
    script = FLOOD.partition("nested = ")[0] + "forever(unread_and_gone)"
    words = ["127.0.0.1", str(port_of(broadcaster.address)), "2"]
    assert subprocess.run([sys.executable, "-c", script, *words], timeout=60, check=False).returncode == 0
    run_steps(broadcaster, 2, 20)
    assert broadcaster.num_refused > 0 and worker.is_alive()


TAKE_OVER = """
import socket, struct, sys, time
def speak_zmtp():
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    ready = b"\\x05READY\\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready += b"\\x08Identity" + struct.pack(">I", 1) + b"x"
    s.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48) + bytes([4, len(ready)]) + ready)
    s.recv(4096)
    time.sleep(0.05)
    return s
for _ in range(5):
    old, new = speak_zmtp(), speak_zmtp()
    for _ in range(5):
        try:
            old.sendall(20 * b"\\x00\\x01x")
        except OSError:
            break
        time.sleep(0.02)
    old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    old.close()
    new.close()
"""

SCHEDULER = """
import subprocess, sys, threading
from kvpool.worker.transport import link
link._HEARTBEAT_SECONDS = 0.3
from kvpool.worker.transport.broadcaster import Broadcaster
from kvpool.worker.transport.errors import WorkerTimeoutError
broadcaster = Broadcaster("tcp://127.0.0.1:*", 1)
words = [sys.executable, "-c", sys.stdin.read(), broadcaster.address.rpartition(":")[2]]
attack = threading.Thread(target=subprocess.run, args=(words,))
attack.start()
for _ in range(3):
    try:
        broadcaster.wait_for_workers(1.5)
    except WorkerTimeoutError:
        pass
attack.join()
broadcaster.close()
print("alive", flush=True)
"""


def test_a_peer_whose_identity_is_taken_over_does_not_end_the_process() -> None:
    """It sends something, hangs up, and then heartbeats would be due."""
    ended = subprocess.run(
        [sys.executable, "-c", SCHEDULER], input=TAKE_OVER, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0 and ended.stdout == "alive\n", ended.stderr


@pytest.mark.parametrize(
    "payload",
    [
        NESTED,
        NESTED_FIELD,
        b"\xdd\xff\xff\xff\xff",
        b"\x83\xa4type\xa6answer\xa8sequence\x01\xadblock_digests\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"",
        b"\x80",
    ],
)
def test_what_is_no_message_is_refused_whatever_it_is(payload: bytes, bind: Callable[..., Broadcaster]) -> None:
    with pytest.raises(MalformedMessageError):
        decode(msgspec.msgpack.Decoder(messages.FromWorker), payload)
    broadcaster = bind(1)
    raw, late = raw_socket(broadcaster.address), raw_socket(broadcaster.address)
    raw.send(payload)
    with pytest.raises(WorkerTimeoutError):
        broadcaster.wait_for_workers(SHORT)
    assert broadcaster.num_refused == 1
    ThreadWorker(broadcaster.address, 0)
    broadcaster.wait_for_workers()
    for _ in range(3):
        late.send(payload)
        raw.send(payload)
    end = time.monotonic() + TIMEOUT
    number = 1
    while broadcaster.num_refused < 7 and time.monotonic() < end:
        run_steps(broadcaster, number, 1)
        number += 1
    assert broadcaster.num_refused == 7
    assert msgspec.msgpack.decode(raw.recv(), type=messages.ToWorker) and not raw.poll(50)  # it is told once
    raw.close()
    late.close()


def test_a_worker_that_sends_nested_messages_is_named(bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    raw = raw_socket(broadcaster.address)
    raw.send(msgspec.msgpack.encode(make_info(0, 1)))
    broadcaster.wait_for_workers()
    raw.send(NESTED_FIELD)
    with pytest.raises(WorkerError, match="rank 0 sent what is no answer: maximum recursion depth"):
        broadcaster.execute(make_step(1, [1]))
    raw.close()


def test_a_worker_survives_no_nested_step(bind: Callable[..., Broadcaster]) -> None:
    import zmq

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        raw = zmq.Context.instance().socket(zmq.ROUTER)
        raw.linger = 0
        raw.bind(f"ipc://{folder}/s")
        worker = ThreadWorker(f"ipc://{folder}/s", 0)
        identity, _ = raw.recv_multipart()
        raw.send_multipart([identity, b"\x81\xa1x" + NESTED])
        assert isinstance(worker.end(), SchedulerLostError) and "is no message" in str(worker.error)
        raw.close()


@pytest.mark.parametrize("tokens", [[50], [-1], [2**40], [3, 50], []])
def test_tokens_outside_the_vocabulary_are_an_error_of_the_worker(
    tokens: list[int], bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    ThreadWorker(broadcaster.address, 0, 1, lambda output: {"r": tokens})
    broadcaster.wait_for_workers()
    with pytest.raises(WorkerError, match=r"rank 0 sent the tokens \[.*\] for 'r', in a vocabulary of 50") as raised:
        broadcaster.execute(make_step(1, [1]))
    assert raised.value.rank == 0
    with pytest.raises(BroadcasterStateError, match="vocabulary of 50"):
        broadcaster.execute(make_step(2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"num_blocks": 2**40}, f"num_blocks is {2**40}"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"block_size": -4}, "block_size is -4"),
        ({"max_num_seqs": 2**63}, f"max_num_seqs is {2**63}"),
        ({"kv_cache_groups": [messages.CacheGroupInfo(["l"], -1, 1, 8, "float32")]}, "kv_cache_groups: "),
        ({"kv_cache_groups": [messages.CacheGroupInfo(["l"], 4, 1, 8, "no type")]}, "kv_cache_groups: "),
    ],
)
def test_reports_that_can_not_be_true_are_refused(
    changes: dict[str, Any], told: str, bind: Callable[..., Broadcaster]
) -> None:
    broadcaster = bind(1)
    worker = ThreadWorker(broadcaster.address, 0, **changes)
    with pytest.raises(WorkerTimeoutError) as raised:
        broadcaster.wait_for_workers(2 * SHORT)
    assert f"a report that can't be true: {told}" in str(raised.value)
    assert isinstance(worker.end(), WorkerRefusedError)
    ThreadWorker(broadcaster.address, 0)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 2)


# ---- keys ----


class KeyWorker(threading.Thread):
    """A worker of rank 0 with options for its connection; ``error`` is what ended it."""

    def __init__(self, address: str, timeout_seconds: float = TIMEOUT, **options: Any) -> None:
        super().__init__(daemon=True)
        self.address, self.timeout_seconds, self.options = address, timeout_seconds, options
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with WorkerConnection(
                self.address, 0, timeout_seconds=self.timeout_seconds, **self.options
            ) as self.connection:
                self.connection.say_hello(make_info(0, 1))
                self.connection.serve(lambda output: StepResult({"r": [0]}), TableDigests().apply)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self.join(TIMEOUT)
        assert not self.is_alive(), "the worker hangs"
        return self.error


@pytest.mark.parametrize("by", ["folder", "keys", "environment"])
def test_with_the_right_keys_steps_are_executed(
    by: str, keys: Path, bind: Callable[..., Broadcaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = {"keys": keys}
    client: Any = {"keys": str(keys)}
    if by == "keys":
        server, client = {"keys": CurveKeys.load_server(keys)}, {"keys": CurveKeys.load_client(keys)}
    elif by == "environment":
        server = client = {}
        monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    broadcaster = bind(1, **server)
    worker = KeyWorker(broadcaster.address, **client)
    broadcaster.wait_for_workers()
    assert broadcaster._link.has_keys and worker.connection._link.has_keys
    run_steps(broadcaster, 1, 3)
    step = make_step(4, list(range(100_000)))  # of several frames
    assert broadcaster.execute(step).tokens == {"r": [0]}
    broadcaster.close()
    assert worker.end() is None


@pytest.mark.parametrize("wrong", ["no keys", "a key that is not admitted", "another scheduler's key"])
def test_with_the_wrong_keys_nobody_gets_in_and_both_say_why(
    wrong: str, keys: Path, tmp_path: Path, bind: Callable[..., Broadcaster]
) -> None:
    make_key_folder(tmp_path / "other")
    own, others = CurveKeys.load_client(keys), CurveKeys.load_client(tmp_path / "other")
    options: dict[str, Any] = {
        "no keys": {},
        "a key that is not admitted": {"keys": CurveKeys(others.public, others.secret, own.peers)},
        "another scheduler's key": {"keys": CurveKeys(own.public, own.secret, others.peers)},
    }[wrong]
    broadcaster = bind(1, keys=keys)
    worker = KeyWorker(broadcaster.address, timeout_seconds=1.0, **options)
    with pytest.raises(WorkerTimeoutError, match="compare the keys of both sides") as raised:
        broadcaster.wait_for_workers(1.2)
    assert ("a key that is not admitted: 0;" in str(raised.value)) == (wrong != "a key that is not admitted")
    assert isinstance(worker.end(), SchedulerLostError), worker.error
    told = "without keys, can't talk to" if wrong == "no keys" else "not with these keys"
    assert "can't be reached (something is there" in str(worker.error) and told in str(worker.error)
    KeyWorker(broadcaster.address, keys=keys)
    broadcaster.wait_for_workers()
    run_steps(broadcaster, 1, 2)


def test_a_worker_with_keys_does_not_talk_to_a_scheduler_without(keys: Path, bind: Callable[..., Broadcaster]) -> None:
    broadcaster = bind(1)
    worker = KeyWorker(broadcaster.address, timeout_seconds=1.0, keys=keys)
    with pytest.raises(WorkerTimeoutError):
        broadcaster.wait_for_workers(1.2)
    assert isinstance(worker.end(), SchedulerLostError) and "not with these keys" in str(worker.error)


def test_addresses_that_others_reach_need_keys_or_a_word(keys: Path, bind: Callable[..., Broadcaster]) -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"):
        with pytest.raises(InvalidArgumentError, match=r"can be reached from other machines.*--insecure"):
            Broadcaster(address, 1)
    for address in ("tcp://10.1.2.3:5600", "tcp://gpu-node:5600"):
        with pytest.raises(InvalidArgumentError, match=r"can be reached from other machines.*--insecure"):
            WorkerConnection(address, 0)
        WorkerConnection(address, 0, insecure=True).close()
        WorkerConnection(address, 0, keys=keys).close()
    with pytest.raises(InvalidArgumentError, match="is no folder of keys"):
        bind(1, keys=keys / "none")
    for options in ({"insecure": True}, {"keys": keys}):
        broadcaster = bind(1, "tcp://0.0.0.0:*", **options)
        local = broadcaster.address.replace("0.0.0.0", "127.0.0.1")
        worker = KeyWorker(local, keys=options.get("keys"))
        broadcaster.wait_for_workers()
        run_steps(broadcaster, 1, 1)
        broadcaster.close()
        assert worker.end() is None


def test_keys_in_the_environment_leave_files_of_one_machine_alone(
    keys: Path, bind: Callable[..., Broadcaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, str(keys / "none"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        broadcaster = bind(1, f"ipc://{folder}/s")
        ThreadWorker(broadcaster.address, 0)
        assert isinstance(broadcaster.wait_for_workers(), WorkerInfo)
        assert not broadcaster._link.has_keys
