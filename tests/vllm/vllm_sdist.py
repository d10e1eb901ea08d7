"""Gets the tests and benchmarks of a release of vLLM from its source distribution: python vllm_sdist.py VERSION FOLDER.

vLLM's package itself is left out: beside its tests it would hide the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

WANTED = ("tests/", "benchmarks/", "pyproject.toml")


def unpack_vllm_sdist(version: str, folder: Path) -> Path:
    """Return `folder`/vllm-VERSION, downloaded (45 MB) and unpacked unless it is there already.

    Runs pip of this interpreter, whose environment must hold what vLLM's setup.py imports (make_env.py sees to that).
    Raises subprocess.CalledProcessError if the download fails.
    """
    target = folder / f"vllm-{version}"
    complete = target / ".complete"
    if complete.exists():
        return target
    archive = folder / "downloads" / f"vllm-{version}.tar.gz"
    if not archive.exists():
        download(version, archive.parent)
    with tarfile.open(archive) as tar:
        prefix = f"vllm-{version}/"
        members = [member for member in tar if member.name.removeprefix(prefix).startswith(WANTED)]
        tar.extractall(folder, members=members, filter="data")
    complete.touch()
    return target


def download(version: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", f"vllm=={version}"]
    # pip runs the setup.py for its metadata. Outside of a git checkout that needs the version told, and no compiler.
    environment = os.environ | {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--dest", str(folder)], check=True, env=environment)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(unpack_vllm_sdist(sys.argv[1], Path(sys.argv[2])))
