"""The examples run as a reader runs them, each in a fresh interpreter, and print what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 60
PATIENCE_SECONDS = 300

# What each has to print: facts that a broken example would not.
PRINTS = {
    "events_to_router.py": ["the engine holds 6 blocks", "of the second prompt 64 tokens"],
    "generate.py": ["0 tokens were cached", "64 tokens were cached"],
    "pool.py": ["taken: [1, 2, 3, 4]", "999 of 999", "found: [1, 2, 3, 4]", "refused, and nothing has changed"],
    "replay_trace.py": ["reference: hit rate", "Belady"],
    "scheduler_loop.py": ["user 0: 0 of its tokens", "user 7: 96 of its tokens", "num_finished_requests=8"],
    "vllm_drop_in.py": ["kvpool: active (pool, manager, hasher, tables)", "warm: 256 tokens were cached"],
}
NEEDS = {"generate.py": pytest.mark.dataplane, "vllm_drop_in.py": pytest.mark.vllm}


def run(name: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_each_is_short_and_is_run_here() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [script.name for script in scripts] == sorted(PRINTS)
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MAX_LINES, script.name
        assert f"python examples/{script.name}" in text, "the docstring says how it is run"


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in sorted(PRINTS)])
def test_it_runs_and_shows_what_it_is_for(name: str, tmp_path: Path) -> None:
    if name == "vllm_drop_in.py":
        pytest.importorskip("vllm.v1.core.block_pool")
    if name == "generate.py":
        pytest.importorskip("transformers")
    if name == "events_to_router.py":
        pytest.importorskip("zmq")
    caches = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_CONFIG_ROOT": str(tmp_path / "config")}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    output = run(name, VLLM_LOGGING_LEVEL="INFO", **caches, **quiet)
    for text in PRINTS[name]:
        assert text in output
