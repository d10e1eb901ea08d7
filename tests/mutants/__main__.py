"""Builds each mutant, runs its tests, and prints which of them noticed it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

from .catalogue import FAULTS
from .fault import Fault, StaleFaultError
from .tree import CHECKOUT, BuildError, Tree

TIMEOUT_S = 300  # for the tests of one fault
BASELINE_TIMEOUT_S = 1800  # for all of them
NO_END = 1000  # in the place of an exit status
FAILED = 1  # pytest's exit status when tests have run and some have failed


@dataclass
class Verdict:
    """What the tests made of one fault. Attributes: whether all killers noticed; what they said; seconds."""

    is_dead: bool
    words: list[str]
    seconds: float


def run_tests(tree: Tree, ids: list[str], timeout_s: int = TIMEOUT_S) -> tuple[int, str]:
    """pytest's exit status (negative: a signal; NO_END: it took too long) and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=line", "--show-capture=no"]
    environment = {**os.environ, "PYTHONPATH": str(tree.root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *ids],
            cwd=tree.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return NO_END, ""
    return done.returncode, done.stdout + done.stderr


def try_fault(tree: Tree, fault: Fault) -> Verdict:
    start = time.monotonic()
    words = []
    is_dead = True
    try:
        for edit in fault.edits:
            tree.keep(tree.root / edit.path)
            edit.apply(tree.root)
        tree.rebuild(fault.native_paths)
        for killer in fault.killer_ids:
            status, output = run_tests(tree, killer)
            found = re.search(r"^FAILED tests/(\S+?::[^\[\s]+(?:\[[^\]]*\])?)", output, re.MULTILINE)
            if status == FAILED and found:
                words.append(found.group(1))
            elif status < 0:
                words.append(f"signal {-status} in {', '.join(killer)}")
            elif status == NO_END:
                words.append(f"no end in {', '.join(killer)}")
            else:
                is_dead = False
                words.append(f"SURVIVED (pytest {status}) {', '.join(killer)}")
                if status != 0:
                    print(output[-2000:])
    except BuildError as error:
        return Verdict(False, [f"DOES NOT BUILD: {error}"], time.monotonic() - start)
    finally:
        tree.restore()
    return Verdict(is_dead, words, time.monotonic() - start)


def check_baseline(tree: Tree, faults: list[Fault]) -> bool:
    """Whether the tests pass on the tree without a fault: else they would notice anything."""
    ids = sorted({test_id for fault in faults for killer in fault.killer_ids for test_id in killer})
    status, output = run_tests(tree, ids, BASELINE_TIMEOUT_S)
    if status:
        print(output[-4000:])
        print(f"the tests fail without a fault (pytest {status})")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some of the faults in Python")
    parser.add_argument(
        "--only", metavar="WORDS", action="append", help="faults with these words in their names; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    faults = [
        fault
        for fault in FAULTS
        if (fault.is_quick or not options.quick)
        and (options.only is None or any(words in fault.name for words in options.only))
    ]
    if options.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    if not faults:
        print(f"no fault has one of {options.only} in its name")
        return 2
    tree = Tree(with_objects=any(fault.native_paths for fault in faults))
    for fault in faults:
        try:
            for edit in fault.edits:
                tree.keep(tree.root / edit.path)
                edit.apply(tree.root)
        except StaleFaultError as error:
            print(f"{fault.name}: {error}")
            return 2
        finally:
            tree.restore()
    if not check_baseline(tree, faults):
        return 2
    survivors = []
    width = max(len(fault.name) for fault in faults)
    for fault in faults:
        verdict = try_fault(tree, fault)
        for i, words in enumerate(verdict.words):
            print(f"{fault.name if i == 0 else '':{width}}  {words}", flush=True)
        if not verdict.is_dead:
            survivors.append(fault.name)
    num_noticed, place = len(faults) - len(survivors), tree.root.relative_to(CHECKOUT)
    print(f"{num_noticed} of {len(faults)} faults were noticed, built in {place}")
    if survivors:
        print("survived: " + "; ".join(survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
