"""Random histories: the pools of both backends and a naive model in step, compared after each call.

KVPOOL_HYPOTHESIS_PROFILE=thorough runs many more and longer histories.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pools_in_step import PoolsInStep


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """A reset that fails says so in the log; here that is thousands of times."""
    logging.getLogger("kvpool").setLevel(logging.ERROR)
    yield
    logging.getLogger("kvpool").setLevel(logging.NOTSET)


TestPoolsInStep = PoolsInStep.TestCase
