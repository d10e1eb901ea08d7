"""The machine and the versions of a run, in words, for the head of a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from bench.implementations import Implementation, is_release_build


def processor_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(implementations: Mapping[str, Implementation]) -> str:
    """One sentence: processor, cores, load, Python, build and versions."""
    from kvpool.native.pool import BUILD_INFO

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    build = "" if is_release_build() else " (DEBUG OR SANITIZED BUILD: the times mean nothing)"
    versions = ", ".join(f"{i.name} {i.version}" for i in implementations.values())
    return (
        f"{processor_name()}, {cores} cores{load}; {platform.system()} {platform.machine()}; "
        f"{platform.python_implementation()} {platform.python_version()}; {BUILD_INFO['compiler']} "
        f"{BUILD_INFO['flags']}{build}; {versions}."
    )
