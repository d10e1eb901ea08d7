"""Child processes that run vLLM: their environment, their end in any case, and that none of theirs is left.

Each child leads a session of its own, so whatever it starts can be found and ended. Nothing goes to the network, and
what vLLM keeps between runs goes to the test's own folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from model import is_complete, model_folder

psutil = pytest.importorskip("psutil")

KVPOOL = "1"
STOCK = "0"
ACTIVE_LINE = "kvpool: active ("
PATIENCE_SECONDS = 30.0
KV_CACHE_GIB = "1"


def require_vllm() -> None:
    """Skips the calling module where vLLM or the model is missing; fails where vLLM would not find kvpool."""
    pytest.importorskip("vllm.v1.core.block_pool")
    if not is_complete(model_folder()):
        pytest.skip(f"no model in {model_folder()}: make vllm-model", allow_module_level=True)
    if "kvpool" not in entry_points(group="vllm.general_plugins").names:
        pytest.fail("this environment has vLLM, but not the entry point of an installed kvpool: make vllm-env")


def vllm_environment(folder: Path, levels: str, **more: str) -> dict[str, str]:
    """The environment of a child.

    Args:
        folder: where the child may write.
        levels: KVPOOL_VLLM, so STOCK or KVPOOL or a list.
    """
    return {
        **os.environ,
        "KVPOOL_VLLM": levels,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        # One thread: two that wait for each other take many times as long on a machine that does something else too.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The hash that prefixes start from is drawn at random otherwise, and events could not be compared.
        "PYTHONHASHSEED": "0",
        **more,
    }


def members_of_session(session_id: int) -> list[psutil.Process]:
    """Living processes of a session."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members


def wait_for_empty_session(session_id: int) -> list[str]:
    """Command lines of what is still alive in a session after some patience: [] after a clean end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (members := members_of_session(session_id)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"{process.pid} {process.name()}" for process in members if process.is_running()]


@contextmanager
def started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python child with its output in `log`; it and all of its session are ended when the block is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for member in members_of_session(process.pid):
            member.send_signal(signal.SIGKILL)
        process.wait()


def run_to_end(command: list[str], environment: dict[str, str], log: Path, timeout_seconds: float) -> str:
    """Runs a Python child and returns its output; fails the test if it fails, hangs, or leaves a process behind."""
    with started(command, environment, log) as process:
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command[0]} ran longer than {timeout_seconds} s:\n{tail(log)}")
        left = wait_for_empty_session(process.pid)
    if status != 0:
        pytest.fail(f"{command[0]} ended with status {status}:\n{tail(log)}")
    if left:
        pytest.fail(f"{command[0]} left processes behind: {left}")
    return log.read_text(errors="replace")


def tail(log: Path, num_lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
