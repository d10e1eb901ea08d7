"""The software bill of materials that a wheel carries in ``*.dist-info/sboms/`` (PEP 770), in CycloneDX 1.6.

What is in the wheel: the package, the C core that is compiled into its modules, what it needs at run time, and what
built it. No third-party code is in it but what Cython and numpy's headers put into compiled code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BUILT_WITH = ["Cython", "numpy", "setuptools"]
LICENSE = "Apache-2.0"
FILE_NAME = "kvpool.cdx.json"


def make_bill(name: str, own_version: str, requirements: Iterable[str], sources: Iterable[Path]) -> dict[str, Any]:
    """The bill of a wheel.

    Args:
        name, own_version: of the package.
        requirements: of the package, as in its metadata; those of extras are left out.
        sources: of the C core.
    """
    own = f"pkg:pypi/{name}@{own_version}"
    core = f"{own}#csrc"
    needed = [one for one in map(Requirement, requirements) if one.marker is None or "extra" not in str(one.marker)]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.read_bytes())
    components: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": core,
            "name": f"{name} C core",
            "version": own_version,
            "licenses": [{"license": {"id": LICENSE}}],
            "description": "csrc/, compiled into the extension modules; the digest is over its files in order of name",
            "hashes": [{"alg": "SHA-256", "content": digest.hexdigest()}],
        }
    ]
    for requirement in needed:
        purl = f"pkg:pypi/{canonicalize_name(requirement.name)}"
        asked = [{"name": "python:requires", "value": str(requirement.specifier)}]
        components.append(
            {"type": "library", "bom-ref": purl, "name": requirement.name, "purl": purl, "properties": asked}
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": own_version,
                "purl": own,
                "licenses": [{"license": {"id": LICENSE}}],
            },
            "tools": {"components": [_built_with(tool) for tool in BUILT_WITH]},
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _built_with(name: str) -> dict[str, str]:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version(name)}"
    return {"type": "library", "name": name, "version": version(name), "purl": purl}


def write_bill(dist_info: Path, bill: dict[str, Any]) -> None:
    """Puts the bill where PEP 770 says."""
    folder = dist_info / "sboms"
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).write_text(json.dumps(bill, indent=2) + "\n")
