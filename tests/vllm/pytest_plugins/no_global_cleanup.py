"""A pytest plugin that gives each test vLLM's own mark skip_global_cleanup: -p no_global_cleanup.

vLLM's conftest collects garbage after every test, a second each once torch is loaded, to give back GPU memory and
process groups. Tests that build neither don't need it; the mark is how vLLM's tests say so.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)
