"""The installed package says what is in it, and what it needs (PEP 770, CycloneDX)."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvpool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed() -> Distribution:
    """What came from a wheel: a source tree may have metadata of its own beside it."""
    return next(found for found in distributions(name="kvpool") if found.read_text("WHEEL"))


@pytest.fixture(scope="module")
def bill(installed: Distribution) -> dict[str, Any]:
    text = installed.read_text("sboms/kvpool.cdx.json")
    assert text is not None
    found: dict[str, Any] = json.loads(text)
    return found


def test_it_names_the_package_and_its_license(bill: dict[str, Any]) -> None:
    own = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert (own["name"], own["version"]) == ("kvpool", kvpool.__version__)
    assert own["licenses"] == [{"license": {"id": "Apache-2.0"}}]


def test_it_lists_the_c_core_and_every_requirement(bill: dict[str, Any], installed: Distribution) -> None:
    needed = [Requirement(text) for text in installed.requires or []]
    names = {one.name for one in needed if one.marker is None or "extra" not in str(one.marker)}
    assert {component["name"] for component in bill["components"]} == names | {"kvpool C core"}
    known = {component["bom-ref"] for component in bill["components"]}
    assert set(bill["dependencies"][0]["dependsOn"]) == known


def test_everything_that_is_installed_for_the_tests_is_locked_by_hash() -> None:
    for name, least in (("ci.txt", 70), ("vllm.txt", 100), ("model.txt", 1)):
        entries = (ROOT / "requirements" / name).read_text().replace("\\\n", " ").splitlines()
        pins = [entry for entry in entries if entry and not entry.startswith("#")]
        assert len(pins) >= least
        for pin in pins:
            assert "==" in pin.split(";")[0], pin
            assert "--hash=sha256:" in pin, pin
