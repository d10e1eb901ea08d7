"""Faults that real allocators had, each built into a copy of the tree and run against the tests that have to notice it.

    python -m tests.mutants            all of them: Python, Cython and C
    python -m tests.mutants --quick    some of the Python ones, in a minute
    python -m tests.mutants --list     names only
    python -m tests.mutants --only stale   those with "stale" in their names

A fault is a few exact replacements of source text; one whose text is gone ends the run before it starts, since a fault
that isn't there any more proves nothing. Exit status 0: every fault was noticed by every test named for it.
"""
