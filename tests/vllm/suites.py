"""Which of vLLM's tests are run, by the name that conformance.py --suite takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Tests that run in one process.

    paths, left_out: below vLLM's sources
    cleans_up: whether its tests need vLLM's clean-up after each test (process groups, memory of devices)
    """

    name: str
    paths: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    cleans_up: bool = False


PREFIX_CACHING = Suite("prefix-caching", ("tests/v1/core/test_prefix_caching.py",))
# Part of what is run by default.
SUITES = (
    Suite(
        "core",
        ("tests/v1/core",),
        # These generate text, with the weights of models.
        left_out=("tests/v1/core/test_scheduler_e2e.py", "tests/v1/core/test_reset_prefix_cache_e2e.py"),
    ),
    Suite(
        "offload",
        (
            "tests/v1/simple_kv_offload",
            "tests/v1/kv_offload",
            "tests/v1/worker/test_gpu_input_batch.py",
            "tests/v1/test_request.py",
            "tests/v1/test_kv_cache_spec_registry.py",
        ),
    ),
    Suite("connector", ("tests/v1/kv_connector/unit",)),
    Suite("engine", ("tests/v1/engine",), cleans_up=True),
)
BY_NAME = {suite.name: suite for suite in (*SUITES, PREFIX_CACHING)}
