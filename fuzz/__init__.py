"""Fuzzers: what they run, and how to replay what they find, is in docs/testing-safety.md.

``python -m fuzz.run TARGET --minutes N --seed S``; the targets of the C core are in ``fuzz/c``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a pool looks like from outside, and made-up requests, are the tests' to say.
sys.path.append(str(ROOT / "tests" / "support"))
