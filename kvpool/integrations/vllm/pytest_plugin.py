"""``pytest -p kvpool.integrations.vllm.pytest_plugin``: a test session of vLLM with kvpool in its place.

The replacement happens before test modules are imported. A session in which it was asked for and did not happen is an
error: its passing tests would say nothing.
"""

from __future__ import annotations

import pytest

from kvpool.integrations import vllm as integration


def pytest_configure() -> None:
    integration.register()
    status = integration.status()
    if status is None or status.is_refusal:
        raise pytest.UsageError("kvpool did not take hold" if status is None else status.line)


def pytest_report_header() -> str | None:
    status = integration.status()
    return None if status is None else status.line
