"""help() and inspect.signature say of every public class and function what a user needs, the same on both halves."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import IS_PURE_PYTHON
from public_help import describe, public_objects

import kvpool

SCRIPT = Path(__file__).parents[1] / "support" / "public_help.py"
DESCRIBED = describe()
CALLED = sorted(name for name, entry in DESCRIBED.items() if "signature" in entry)
# Names of how the classes are put together: nothing that a user has in hand.
INSIDE = re.compile(r"\b[Mm]ix(ed|es)?[- ]?in|\bits base\b|\w(Base|Operations|Mixin)\b|\btwin\b|(?<![\w.])_\w+|^See ``")


def describe_half(is_pure: bool) -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "KVPOOL_PURE_PYTHON": "1" if is_pure else "0"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def summary_of(name: str) -> str:
    """The first paragraph, as one line."""
    return " ".join((DESCRIBED[name]["doc"] or "").split("\n\n")[0].split())


@pytest.mark.parametrize("name", CALLED)
def test_the_signature_is_real(name: str) -> None:
    parameters = DESCRIBED[name]["signature"]
    assert parameters is not None, f"inspect.signature({name}) raises"
    kinds = [kind for _, kind, _ in parameters]
    assert kinds[:2] != ["VAR_POSITIONAL", "VAR_KEYWORD"], f"{name}(*args, **kwargs) says nothing"


@pytest.mark.parametrize("name", sorted(name for name, entry in DESCRIBED.items() if entry["kind"] != "attribute"))
def test_the_docstring_opens_with_what_it_is_for(name: str) -> None:
    summary = summary_of(name)
    assert summary, f"{name} has no docstring"
    assert summary[-1] in ".:", f"the docstring of {name} opens with no sentence: {summary!r}"
    assert not summary.startswith(f"{name}("), f"the docstring of {name} is made of its fields"
    assert not INSIDE.search(summary), f"the docstring of {name} opens with how it is built: {summary!r}"


@pytest.mark.parametrize("name", sorted(name for name, entry in DESCRIBED.items() if entry["kind"] == "attribute"))
def test_an_attribute_is_explained_by_itself_or_by_its_class(name: str) -> None:
    owner, _, attribute = name.partition(".")
    docs = [inspect.getdoc(cls) or "" for cls in public_objects()[owner].__mro__ if cls.__module__.startswith("kvpool")]
    explained = any(re.search(rf"\b{attribute}\b", doc) for doc in docs)
    assert DESCRIBED[name]["doc"] or explained, f"neither {name} nor its class says what it means"


@pytest.mark.skipif(IS_PURE_PYTHON, reason="there is one half")
def test_both_halves_have_the_same_help_and_signatures() -> None:
    native, twin = describe_half(is_pure=False), describe_half(is_pure=True)
    called = [{name for name, entry in half.items() if entry["kind"] != "attribute"} for half in (native, twin)]
    assert called[0] == called[1]
    for name in sorted(called[0]):
        for half in (native[name], twin[name]):
            half["signature"] = [each for each in half.get("signature") or [] if each[0] != "self"]
        assert native[name] == twin[name], name
    # What is a property in one half may be a plain attribute of the other, which has no docstring of its own.
    for name in native.keys() & twin.keys() - called[0]:
        docs = {half[name]["doc"] for half in (native, twin)} - {None}
        assert len(docs) < 2, name


@pytest.mark.parametrize("name", ["BlockPool", "KVCacheManager", "Request", "BlockHasher", "Scheduler", "KVCacheBlock"])
def test_help_shows_the_sentence_first(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import kvpool; help(kvpool.{name})"], capture_output=True, text=True, check=True
    )
    text = [line.strip(" |") for line in done.stdout.splitlines()]
    first = next(line for line in text[1:] if line and not line.startswith(("class ", f"{name}(")))
    assert summary_of(name).startswith(first)
    assert inspect.getdoc(getattr(kvpool, name)).startswith(first)
