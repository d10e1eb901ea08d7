"""Processes that are killed or stopped in the middle of steps, and clocks that are set: errors that name the cause, in
time, and never a wrong token."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from broadcast_workers import SHORT, TIMEOUT, ThreadWorker, make_step
from scheduler_runs import generated

from kvpool.engine.engine import Engine
from kvpool.worker.transport.broadcaster import Broadcaster
from kvpool.worker.transport.errors import (
    BroadcasterStateError,
    SchedulerLostError,
    WorkerLostError,
    WorkerTimeoutError,
)
from kvpool.worker.transport.local_workers import LocalWorkers, WorkersEndedError

pytestmark = pytest.mark.dataplane

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
NUM_TOKENS = 24
PROMPTS = [[1, 2, 3, 4, 5, 6, user, user + 1] for user in range(4)]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 16}

# A rank with a made-up model: it fails where a request would read somebody else's tokens, and takes its time.
RANK = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]
import msgspec
from broadcast_workers import make_info
from kvpool.scheduler import StepResult
from kvpool.worker.transport.connection import WorkerConnection
from kvpool.worker.transport.lifeline import end_with
from scheduler_runs import Workers, full_attention
from table_digests import TableDigests
if "--parent-pipe" in sys.argv:
    end_with(int(sys.argv[sys.argv.index("--parent-pipe") + 1]))
made_up, rank = Workers([full_attention()]), int(os.environ["RANK"])
def execute(output):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")))
    return StepResult(made_up.execute(msgspec.msgpack.encode(output)))
with WorkerConnection(sys.argv[1], rank) as connection:
    connection.say_hello(make_info(rank, int(os.environ["WORLD_SIZE"]), **{LIMITS!r}))
    connection.serve(execute, TableDigests().apply)
"""


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"ipc://{folder}/s"


def start_ranks(address: str, num_ranks: int = 2) -> LocalWorkers:
    return LocalWorkers(num_ranks, [], command=[sys.executable, "-c", RANK, address])


def make_engine(broadcaster: Broadcaster) -> tuple[Engine, dict[str, list[int]]]:
    engine = Engine(broadcaster.wait_for_workers().kv_cache_config(), broadcaster, max_model_len=60)
    return engine, {engine.add_request(prompt, max_tokens=NUM_TOKENS): [] for prompt in PROMPTS}


def run_step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        tokens[output.request_id] += output.new_token_ids


def run_to_the_end(engine: Engine, tokens: dict[str, list[int]]) -> None:
    while engine.scheduler.has_unfinished_requests():
        run_step(engine, tokens)
    assert list(tokens.values()) == [generated(prompt, NUM_TOKENS) for prompt in PROMPTS]


# ---- killed ----


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_worker_that_is_killed_in_a_step_is_an_error_in_seconds(
    is_watched: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who watches the processes at once, by the connection a little later; all blocks come back to the engine."""
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    with start_ranks(address) as workers, Broadcaster(address, 2, timeout_seconds=600) as broadcaster:
        if is_watched:
            broadcaster._check_workers = workers.check
        engine, tokens = make_engine(broadcaster)
        run_step(engine, tokens)
        killing = threading.Timer(0.2, os.kill, [workers.process_ids[1], signal.SIGKILL])
        killing.start()
        start = time.monotonic()
        kind, told = (
            (WorkersEndedError, r"^rank 1 has ended \(killed by SIGKILL\)")
            if is_watched
            else (WorkerLostError, "the connection of rank 1 is gone")
        )
        with pytest.raises(kind, match=told):
            engine.step()
        assert time.monotonic() - start < TIMEOUT
        with pytest.raises(BroadcasterStateError, match="rank 1"):
            engine.step()
        engine.scheduler.finish_requests(None)
        engine.scheduler.check()
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == LIMITS["num_blocks"] - 1
        workers.kill()


@pytest.mark.parametrize("is_busy", [False, True])
def test_workers_end_when_their_scheduler_is_killed(is_busy: bool, address: str) -> None:
    """Also those that it has not started: by their connection, after the step that they are in."""
    scheduler = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]
from broadcast_workers import make_step
from kvpool.worker.transport.broadcaster import Broadcaster
broadcaster = Broadcaster({address!r}, 1)
broadcaster.wait_for_workers()
print("ready", flush=True)
{"broadcaster.execute(make_step(1, [1]))" if is_busy else ""}
time.sleep(600)
"""
    is_executing = threading.Event()

    def execute(output: object) -> dict[str, list[int]]:
        is_executing.set()
        time.sleep(1.0)
        return {"r": [1]}

    worker = ThreadWorker(address, 0, 1, execute)
    process = subprocess.Popen([sys.executable, "-c", scheduler], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert not is_busy or is_executing.wait(TIMEOUT)
    finally:
        process.kill()
        process.communicate()
    assert isinstance(worker.end(), SchedulerLostError) and "is gone (rank 0)" in str(worker.error)


# ---- stopped ----


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_worker_that_is_stopped_is_late_and_goes_on_with_nothing_corrupted(stopped: int, address: str) -> None:
    """Each stop is a time-out error; what the step had planned is computed again, on the same worker."""
    with start_ranks(address) as workers, Broadcaster(address, 2, timeout_seconds=TIMEOUT) as broadcaster:
        broadcaster._check_workers = workers.check
        engine, tokens = make_engine(broadcaster)
        for number in range(4):
            run_step(engine, tokens)
            os.kill(workers.process_ids[stopped], signal.SIGSTOP)
            broadcaster.timeout_seconds = SHORT
            start = time.monotonic()
            for _ in range(1 + number % 2):
                with pytest.raises(WorkerTimeoutError, match=rf"rank {stopped} did not answer within 0\.3 s") as raised:
                    engine.step()
                assert raised.value.ranks == [stopped] and not isinstance(raised.value, WorkerLostError)
            assert time.monotonic() - start < TIMEOUT
            engine.scheduler.check()
            os.kill(workers.process_ids[stopped], signal.SIGCONT)
            broadcaster.timeout_seconds = TIMEOUT
        run_to_the_end(engine, tokens)
        engine.close()
        assert workers.wait() == 0


def test_random_stops_of_random_workers_change_no_token(address: str) -> None:
    rng = random.Random(5)
    with start_ranks(address) as workers, Broadcaster(address, 2, timeout_seconds=0.05) as broadcaster:
        broadcaster._check_workers = workers.check
        broadcaster.timeout_seconds = TIMEOUT
        engine, tokens = make_engine(broadcaster)
        end = threading.Event()

        def stop_and_go_on() -> None:
            while not end.is_set():
                process_id = rng.choice(workers.process_ids)
                os.kill(process_id, signal.SIGSTOP)
                end.wait(rng.random() * 0.15)
                os.kill(process_id, signal.SIGCONT)
                end.wait(rng.random() * 0.05)

        broadcaster.timeout_seconds = 0.05
        stopping = threading.Thread(target=stop_and_go_on)
        stopping.start()
        num_late = 0
        give_up = time.monotonic() + 6 * TIMEOUT
        try:
            while engine.scheduler.has_unfinished_requests() and time.monotonic() < give_up:
                try:
                    run_step(engine, tokens)
                except WorkerTimeoutError:
                    num_late += 1
                if num_late > 20:
                    end.set()
        finally:
            end.set()
            stopping.join()
        broadcaster.timeout_seconds = TIMEOUT
        run_to_the_end(engine, tokens)
        assert num_late > 0
        engine.close()
        assert workers.wait() == 0


# ---- clocks ----


def test_a_clock_that_is_set_changes_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours forwards and backwards between any two looks at it: nobody is late for it, and who is late is for real."""
    rng = random.Random(3)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(-1e9, 1e10))
    monkeypatch.setattr(time, "time_ns", lambda: rng.randrange(-(10**18), 10**19))
    release = threading.Event()

    def execute(output: object) -> dict[str, list[int]]:
        if output.step == 8:  # type: ignore[attr-defined]
            release.wait(TIMEOUT)
        return {"r": [1]}

    with Broadcaster(address, 1, timeout_seconds=TIMEOUT) as broadcaster:
        worker = ThreadWorker(address, 0, 1, execute)
        broadcaster.wait_for_workers()
        for number in range(1, 8):
            assert broadcaster.execute(make_step(number, [1])).tokens == {"r": [1]}
        broadcaster.timeout_seconds = SHORT
        start = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match="step 8: rank 0 did not answer"):
            broadcaster.execute(make_step(8, [1]))
        assert SHORT <= time.monotonic() - start < TIMEOUT / 2
        release.set()
        broadcaster.timeout_seconds = TIMEOUT
        assert broadcaster.execute(make_step(9, [1])).tokens == {"r": [1]}
    assert worker.end() is None
