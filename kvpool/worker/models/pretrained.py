"""Models of transformers in files: what they are, and their weights. Nothing here touches the network, and nothing in
the files is run, see ``model_files``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.worker.models.model_files import (
    ModelFileError,
    check_counts,
    check_num_parameters,
    check_weights,
    reads_model,
)


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, as far as it is known without its weights.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: see ``longest_sequence``.
        eos_token_ids: tokens that end a text, by ``generation_config.json`` and by the configuration; none for a model
            that has no such token.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]


@reads_model
def read_model_facts(path: str | Path) -> ModelFacts:
    """The facts of a model in a folder as transformers saves it, or in a ``.gguf`` file.

    Raises:
        InvalidArgumentError: there is no such folder or file, or what ends its texts is no token; see also
            ``longest_sequence``.
    """
    folder, options = _place(path)
    whole = read_config(path)
    config, vocab_size = whole.get_text_config(decoder=True), int(whole.get_text_config(decoder=True).vocab_size)
    stated = list(_stated_end_tokens(whole, None if options else Path(folder)))
    # What is outside the vocabulary, such as -1 where somebody wants no end, is never sampled.
    eos_token_ids = [token_id for token_id in dict.fromkeys(stated) if 0 <= token_id < vocab_size]
    return ModelFacts(vocab_size, longest_sequence(config), eos_token_ids)


def _stated_end_tokens(config: Any, folder: Path | None) -> Iterator[int]:
    """What the files of a model name as the end of its texts; ``folder`` is None for one in a single file.

    Beside a ``generation_config.json`` the configuration counts only where its file names an end: what it has by
    default belongs to another model.
    """
    decoder = config.get_text_config(decoder=True)
    if folder is None or not (folder / "generation_config.json").is_file():
        for part in (decoder, config):
            yield from _to_end_tokens(getattr(part, "eos_token_id", None))
        return
    yield from _to_end_tokens(GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id)
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = [part for name, part in document.items() if getattr(config, name, None) is decoder]
    for part in (document, *parts):
        yield from _to_end_tokens(part.get("eos_token_id"))


def _to_end_tokens(stated: Any) -> list[int]:
    token_ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidArgumentError(f"eos_token_id of a model is a token id or a list of them, not {show(stated)}")
    return token_ids


@reads_model
def read_config(path: str | Path) -> Any:
    """The configuration of such a model. InvalidArgumentError: there is no such folder or file, or it is broken."""
    folder, options = _place(path)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    check_counts(path, config.to_dict())
    return config


def make_without_weights(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model of this configuration on the device ``meta``. ModelFileError: its files lack its weights."""
    check_weights(path)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    check_num_parameters(path, model)
    return model


@reads_model
def load_pretrained(path: str | Path, *, dtype: str = "float32", device: torch.device | str = "cpu") -> Any:
    """A causal language model with its weights.

    Args:
        path: a folder as transformers saves it, or a ``.gguf`` file, whose weights are not quantised any more then.
        dtype: of the weights.
        device: where they are.

    Raises:
        InvalidArgumentError: there is no such folder or file, or no such dtype; the model is broken, or its weights are
            not all there.
        MemoryError: it doesn't fit.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise InvalidArgumentError(f"{dtype!r} is no floating-point dtype of torch")
    folder, options = _place(path)
    config = read_config(path)
    make_without_weights(Path(path), config, torch_dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch_dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    model, info = loaded
    if info["missing_keys"]:  # transformers would have made them up
        missing = sorted(map(str, info["missing_keys"]))
        raise ModelFileError(f"the model {path} lacks {len(missing)} of its weights: {show(missing)}")
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
