"""Times of one call that finds the processor's caches full of other data, as an engine's step does.

Before each sample a product of two 3,000 x 3,000 matrices (float32) runs, which is what a step does between two calls
of the pool. A sample is one call (for one-block lookups, the calls for one batch), so the clock (about 100 ns a sample)
is part of the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.sampling import Sampler, garbage_collector_off, measure, time_rounds
from bench.workloads import SEED, Workload

MATRIX_SIDE = 3_000
WARM_UP_ROUNDS = 20


def make_matrix_product() -> Callable[[], None]:
    """A function that multiplies two matrices and so evicts what the caches held."""
    import numpy as np

    generator = np.random.default_rng(SEED)
    left, right = (generator.random((MATRIX_SIDE, MATRIX_SIDE), dtype=np.float32) for _ in range(2))
    product = np.empty_like(left)

    def multiply() -> None:
        np.matmul(left, right, out=product)

    return multiply


class AfterMatrixProduct(Workload):
    """A workload whose every round starts in a cold cache: the product runs after ``prepare()``."""

    def __init__(self, workload: Workload, multiply: Callable[[], None]) -> None:
        self.workload = workload
        self.multiply = multiply
        self.blocks_per_round = workload.blocks_per_round
        time_rounds(workload, WARM_UP_ROUNDS)

    def prepare(self) -> None:
        self.workload.prepare()
        self.multiply()

    def operate(self) -> None:
        self.workload.operate()

    def check(self) -> None:
        self.workload.check()


def measure_cold(
    workloads: Mapping[str, Workload], samples: int, multiply: Callable[[], None]
) -> dict[str, list[float]]:
    """``samples`` cold figures of each implementation, in ns per block, taken in turn; then checks the pools."""
    with garbage_collector_off():
        cold = {name: AfterMatrixProduct(workload, multiply) for name, workload in workloads.items()}
    results = measure({name: _one_round(workload) for name, workload in cold.items()}, samples)
    for workload in workloads.values():
        workload.check()
    return results


def _one_round(workload: Workload) -> Sampler:
    return lambda: time_rounds(workload, 1) / workload.blocks_per_round
