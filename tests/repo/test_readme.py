"""The README's code runs as printed, each block in a fresh interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.split("\n", 1)[0])
def test_the_code_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_shows_the_pool_and_a_scheduler() -> None:
    assert len(BLOCKS) >= 2
    assert all(command in README.read_text(encoding="utf-8") for command in ("make demo", "make test"))
