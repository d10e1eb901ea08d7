"""What a target relies on: the functions, classes and constants of vLLM that its source names, and theirs in turn.

A level that does what a function of vLLM did has to know what that function called. Names are followed from their
module, through imports; attributes of modules, of classes and of ``self``. A class is taken as a whole. What a value is
that arrives as an argument can't be seen in the source: classes whose instances the compiled code reads are targets
themselves (``TARGETS`` of the levels).

The border: what lies in the modules of ``FOLLOWED`` is followed further; what these name elsewhere in vLLM is recorded
and not followed; what is in ``LEFT_OUT`` is not looked at.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvpool.integrations.vllm import sources as source

FOLLOWED = (
    "vllm.distributed.kv_events",
    "vllm.lora.request",
    "vllm.multimodal.inputs",
    "vllm.multimodal.utils",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.hisparse.block_pool",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.request",
    "vllm.v1.worker.block_table",
)

# Prefixes of names, and why a change there can't make kvpool answer otherwise than vLLM.
LEFT_OUT = {
    "vllm.config": "what was configured comes to both as arguments",
    "vllm.envs": "what the environment says reaches both through the same functions of vLLM",
    "vllm.logger": "what is written to the log",
    "vllm.model_executor.warmup": "how kernels of vLLM's own tables are compiled ahead",
    "vllm.platforms": "which device there is",
    "vllm.triton_utils": "Triton, for kernels of vLLM's own tables",
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel": "such a kernel",
    "vllm.v1.worker.block_table._COMPUTE_SLOT_MAPPING_KERNEL": "such a kernel",
}
# What every module has, and writes the log with.
_LOGGER = "logger"
# Nothing that is called: an annotation says what a value should be.
_ANNOTATIONS = frozenset({"annotation", "returns"})


def relied_on_by(target: str, sources: Path) -> list[str]:
    """The dotted names of vLLM that the definition of a target names; [] for what is not followed."""
    definition = source.definition_of(target, sources)
    if definition is None:
        return []
    if definition != target:
        return [definition]
    place, node = source.place_of(target, sources), source.node_of(target, sources)
    module = "" if place is None else source.module_name(place.path, sources)
    if place is None or node is None or module not in FOLLOWED:
        return []
    found = dict.fromkeys(_names_in(node, module, place, sources))
    return sorted(name for name in found if name != target and not is_left_out(name))


def closure_of(targets: Iterable[str], sources: Path) -> dict[str, list[str]]:
    """The targets and all that they rely on; of each, what it names itself."""
    closure: dict[str, list[str]] = {}
    waiting = deque(targets)
    while waiting:
        name = waiting.popleft()
        if name not in closure:
            closure[name] = relied_on_by(name, sources)
            waiting += closure[name]
    return closure


def is_left_out(name: str) -> bool:
    """Whether a name lies beyond the border."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in LEFT_OUT)


def _names_in(node: ast.stmt, module: str, place: source.Place, sources: Path) -> Iterator[str]:
    owner = place.names[0] if len(place.names) > 1 else None
    for part in _walk(node):
        if isinstance(part, ast.ImportFrom):
            # Inside a function: nobody else can have replaced what it binds here.
            for name in source.imported_names(part, module, place.path):
                yield from _definition_in_vllm(name, sources)
        elif isinstance(part, ast.Name) and part.id != _LOGGER:
            yield from _global_name(f"{module}.{part.id}", sources)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            first = part.value.id
            if owner is not None and first in ("self", "cls"):
                yield from _method(f"{module}.{owner}", part.attr, sources)
            elif source.definition_of(f"{module}.{first}", sources) is not None:
                yield from _attribute(f"{module}.{first}", part.attr, sources)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field not in _ANNOTATIONS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child)


def _global_name(name: str, sources: Path) -> Iterator[str]:
    """A name as its module has it, unless it is a module, or none of vLLM's."""
    definition = source.definition_of(name, sources)
    if definition is not None and not _is_module(definition, sources) and not is_left_out(definition):
        yield name


def _definition_in_vllm(name: str, sources: Path) -> Iterator[str]:
    definition = source.definition_of(name, sources)
    if definition is not None and not _is_module(definition, sources):
        yield definition


def _attribute(owner: str, attribute: str, sources: Path) -> Iterator[str]:
    """What is named through a module; the attributes of a class come with the class."""
    definition = source.definition_of(owner, sources)
    if definition is not None and _is_module(definition, sources):
        yield from _global_name(f"{definition}.{attribute}", sources)


def _method(owner: str, name: str, sources: Path) -> Iterator[str]:
    """The method or class attribute that ``self.name`` finds, in the class or in a base."""
    definition = source.definition_of(owner, sources)
    node = None if definition is None else source.node_of(definition, sources)
    if definition is None or not isinstance(node, ast.ClassDef):
        return
    if source.defined_in(node, name) is not None:
        yield f"{definition}.{name}"
        return
    module = definition.rpartition(".")[0]
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from _method(f"{module}.{base.id}", name, sources)


def _is_module(name: str, sources: Path) -> bool:
    place = source.place_of(name, sources)
    return place is not None and not place.names
