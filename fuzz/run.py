"""Runs one target, or all for a while.

    python -m fuzz.run TARGET [--minutes N] [--seed S] [--crashes FOLDER]     random inputs
    python -m fuzz.run TARGET --replay FILE                                    one input that was found
    python -m fuzz.run all --minutes N                                         each target for its share

A target runs in a process of its own. Its input lies in shared memory before it is executed, so that a process that
dies or hangs leaves behind what it died of. Exit status 1 after a finding; the input is then in FOLDER.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fuzz import c_targets
from fuzz.decisions import Decisions

TARGETS = (
    "block_pool",
    "kv_cache_manager",
    "scheduler",
    "request",
    "block_rows",
    "engine",
    "messages",
    "events",
    "files",
    "recordings",
)
C_TARGETS = tuple(f"c_{name}" for name in c_targets.C_TARGETS)

MAX_INPUT = 4096
HANG_SECONDS = 60
# Executions and length of the current input, then its bytes.
HEAD = struct.Struct("=QI")


def load(name: str) -> Callable[[Decisions], None]:
    run: Callable[[Decisions], None] = importlib.import_module(f"fuzz.target_{name}").run
    return run


def seeds_of(name: str) -> list[bytes]:
    """Inputs that are kept: they run first, and others are made from them."""
    folder = Path(__file__).parent / "corpus" / name
    return [path.read_bytes() for path in sorted(folder.glob("*"))] if folder.is_dir() else []


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(rng.choice(seeds)[:MAX_INPUT])
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data) + 1)
        choice = rng.randrange(4)
        if choice == 0:
            del data[at : at + rng.randint(1, 8)]
        elif choice == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif choice == 2 and at < len(data):
            data[at] = rng.randrange(256)
        else:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:at] = other[start : start + rng.randint(1, 64)]
    return bytes(data[:MAX_INPUT])


def child(name: str, seed: int, deadline: float, shared: mmap.mmap) -> int:
    """Executes inputs until the deadline; 1 after a finding."""
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    run, rng, seeds = load(name), random.Random(seed), seeds_of(name)
    executions = 0
    while time.monotonic() < deadline:
        if executions < len(seeds):
            data = seeds[executions][:MAX_INPUT]
        elif seeds and rng.random() < 0.3:
            data = mutated(rng, seeds)
        else:
            data = rng.randbytes(int(2 ** rng.uniform(4, 11)))
        shared[HEAD.size : HEAD.size + len(data)] = data
        HEAD.pack_into(shared, 0, executions, len(data))
        try:
            run(Decisions(data))
        except BaseException:
            traceback.print_exc()
            return 1
        executions += 1
    HEAD.pack_into(shared, 0, executions, 0)
    return 0


def run_target(name: str, minutes: float, seed: int, crashes: Path) -> bool:
    """True if nothing was found."""
    if name in C_TARGETS:
        return c_targets.run(name.removeprefix("c_"), minutes, seed, crashes)
    load(name)  # so that its imports are paid for once, and fail here
    shared = mmap.mmap(-1, HEAD.size + MAX_INPUT)
    deadline = time.monotonic() + 60 * minutes
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            status = child(name, seed, deadline, shared)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    seen, since, is_hung = -1, time.monotonic(), False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        executions = HEAD.unpack_from(shared)[0]
        if executions != seen:
            seen, since = executions, time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:
            is_hung = True
            os.kill(pid, signal.SIGABRT)
            since = float("inf")
        time.sleep(0.1)
    executions, length = HEAD.unpack_from(shared)
    print(f"{name}: {executions} executions, seed {seed}", flush=True)
    if status == 0:
        return True
    crashes.mkdir(parents=True, exist_ok=True)
    path = crashes / f"{name}-{seed}-{executions}"
    path.write_bytes(shared[HEAD.size : HEAD.size + length])
    code = os.waitstatus_to_exitcode(status)
    how = "hangs" if is_hung else f"died by signal {-code}" if code < 0 else "failed"
    print(f"FINDING: {name} {how}; python -m fuzz.run {name} --replay {path}", flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.run")
    parser.add_argument("target", choices=[*TARGETS, *C_TARGETS, "all"])
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one each time, which is printed")
    parser.add_argument("--crashes", type=Path, default=Path("build/fuzz/crashes"))
    parser.add_argument("--replay", type=Path)
    arguments = parser.parse_args()
    if arguments.replay is not None:
        faulthandler.enable()
        load(arguments.target)(Decisions(arguments.replay.read_bytes()))
        print(f"{arguments.target}: {arguments.replay} is clean")
        return 0
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    names = (*C_TARGETS, *TARGETS) if arguments.target == "all" else (arguments.target,)
    results = [run_target(name, arguments.minutes / len(names), seed, arguments.crashes) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
