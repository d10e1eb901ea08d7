"""The API reference, made of the docstrings: ``make docs``. Nothing is fetched; a warning is an error."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import kvpool  # noqa: E402

project = "kvpool"
author = "the kvpool project"
release = version = kvpool.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"kvpool {release}"
html_show_copyright = False
nitpicky = True
default_role = "any"  # single backticks: what they name has to be documented here; code is in double ones

autodoc_mock_imports = ["vllm"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Where the code names what both halves have in common, the link leads to what a reader has in hand.
PUBLIC_NAMES = {
    "kvpool.pool.interface.Block": "KVCacheBlock",
    "kvpool.pool.interface.BlockT": "KVCacheBlock",
    "kvpool.pool.interface.PrefixMap": "BlockHashToBlockMap",
}


def object_of(target: str) -> Any:
    """What a dotted name leads to, None for nothing."""
    module, _, rest = target, "", ""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:length]), parts[length:]
        try:
            found: Any = import_module(module)
        except Exception:
            continue
        for name in rest:
            found = getattr(found, name, None)
        return found
    return None


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A reference that Sphinx does not find.

    Types and exceptions of the standard library, numpy, torch and so on are shown without a link: nothing is asked for
    on the network. A name of kvpool is looked up under its public name, where that is documented, whatever module it is
    in. What is left is an error.
    """
    target = node.get("reftarget", "")
    target = PUBLIC_NAMES.get(target, target)
    name = target.rpartition(".")[2]
    domain = env.get_domain("py")
    candidates = [full for full in domain.objects if full.rpartition(".")[2] == name and full.startswith("kvpool")]
    if target.startswith("kvpool.") or "." not in target:
        for full in candidates:
            if "." not in target or object_of(target) is object_of(full):
                return domain.resolve_xref(
                    env, node["refdoc"], app.builder, node.get("reftype", "obj"), full, node, contnode
                ) or domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, contnode)
    if target.startswith("kvpool"):
        return None
    return contnode


def setup(app: Any) -> None:
    app.connect("missing-reference", resolve)
