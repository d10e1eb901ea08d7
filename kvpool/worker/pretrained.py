"""Models of transformers in files: what they are, and their weights. Nothing here touches the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvpool.errors import InvalidArgumentError


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, as far as it is known without its weights.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: see ``longest_sequence``.
        eos_token_ids: tokens that end a text; none for a model that has no such token.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]


def read_model_facts(path: str | Path) -> ModelFacts:
    """The facts of a model in a folder as transformers saves it, or in a ``.gguf`` file.

    Raises:
        InvalidArgumentError: there is no such folder or file, or see ``longest_sequence``.
    """
    folder, options = _place(path)
    config = read_config(path).get_text_config(decoder=True)
    eos_token_ids = config.eos_token_id
    if not options and (Path(folder) / "generation_config.json").is_file():
        eos_token_ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if eos_token_ids is None or isinstance(eos_token_ids, int):
        eos_token_ids = [] if eos_token_ids is None else [eos_token_ids]
    return ModelFacts(int(config.vocab_size), longest_sequence(config), list(eos_token_ids))


def read_config(path: str | Path) -> Any:
    """The configuration of such a model. InvalidArgumentError: there is no such folder or file."""
    folder, options = _place(path)
    return AutoConfig.from_pretrained(folder, local_files_only=True, **options)


def load_pretrained(path: str | Path, *, dtype: str = "float32", device: torch.device | str = "cpu") -> Any:
    """A causal language model with its weights.

    Args:
        path: a folder as transformers saves it, or a ``.gguf`` file, whose weights are not quantised any more then.
        dtype: of the weights.
        device: where they are.

    Raises:
        InvalidArgumentError: there is no such folder or file, or no such dtype. Errors of transformers come as
            they are.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise InvalidArgumentError(f"{dtype!r} is no floating-point dtype of torch")
    folder, options = _place(path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True, **options)
    return model.to(device)


def longest_sequence(config: Any) -> int:
    """Positions that a model was made for, and whose embedding does not depend on the rest of the batch.

    One longer sequence in a step of a model with ``longrope`` changes the positions of all the others, and so what they
    have in the cache would not be what they compute.

    Args:
        config: of a decoder.

    Raises:
        InvalidArgumentError: it has no ``max_position_embeddings``.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise InvalidArgumentError(f"{type(config).__name__} does not say how long a sequence can be")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or by type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            positions = min(positions, int(parameters["original_max_position_embeddings"]))
    return positions


def _place(path: str | Path) -> tuple[str, dict[str, str]]:
    """The folder, and the arguments by which transformers finds the model in it."""
    path = Path(path)
    is_gguf = path.suffix == ".gguf"
    if not (path.is_file() if is_gguf else (path / "config.json").is_file()):
        raise InvalidArgumentError(f"{str(path)!r} is neither a folder with a config.json nor a .gguf file")
    return (str(path.parent), {"gguf_file": path.name}) if is_gguf else (str(path), {})
