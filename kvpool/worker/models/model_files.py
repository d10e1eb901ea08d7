"""What a model's files may hold, before transformers reads them, and errors of it as one of ours.

A model is data: nothing in its files is ever run. transformers would run Python that a configuration names
(``auto_map``; it asks on stdin), kernels by the name of a repository, and adapters that lead to another folder; and
pickled weights can run anything. Weights come as safetensors or GGUF.

What a file claims is bounded by what it holds, so that a small folder can't take all of the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvpool.common.arguments import show
from kvpool.common.one_line import one_line
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.worker.models.gguf_header import check_gguf

GGUF_SUFFIX = ".gguf"
MAX_LAYERS = 4_096
"""Layers, and experts of a layer, of a model: each is made before it is known whether there are weights for it."""

MAX_PARAMETERS_PER_BYTE = 16
"""Parameters of a model for each byte of its weights: more than any quantisation, or sharing of weights, comes to."""

_MAX_JSON_BYTES = 64 << 20
_MAX_REASON_CHARS = 300
_CHECKED_JSON = ("config.json", "tokenizer_config.json", "generation_config.json")
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_KERNEL_KEYS = ("attn_implementation", "experts_implementation")
_COUNT_KEYS = ("layer", "expert", "block_count")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ModelFileError(InvalidArgumentError):
    """A model that can't be loaded, or won't be; the message names its folder or file, and the reason."""


def reads_model(
    function: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[str | Path, _Arguments], _Result]:
    """For functions whose first argument is the path of a model: its files are checked first, and whatever goes wrong
    is a ModelFileError (a MemoryError where memory is short)."""

    @wraps(function)
    def wrapper(path: str | Path, /, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with model_errors(path):
            check_model_files(Path(path))
            return function(path, *arguments, **options)

    return wrapper


@contextmanager
def model_errors(path: str | Path) -> Iterator[None]:
    """Turns what the libraries below raise for a broken model, which is anything, into a ModelFileError."""
    try:
        yield
    except (KvpoolError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the tokenizers' Rust is no Exception
        reason = one_line(f"{type(error).__name__}: {error}", _MAX_REASON_CHARS)
        if "not enough memory" in reason or "out of memory" in reason:  # torch's have no class in common
            raise MemoryError(reason) from None
        raise ModelFileError(f"the model {path} can't be loaded: {reason}") from error


def check_model_files(path: Path) -> None:
    """Raises ModelFileError for a model that is not there, asks for code of its own to be run, or claims what can't be.
    Weights are not looked at."""
    if path.suffix == GGUF_SUFFIX and path.is_file():
        try:
            check_gguf(path)
        except InvalidArgumentError as error:
            raise ModelFileError(f"the model {path} can't be loaded: {error}") from None
        return
    if path.suffix == GGUF_SUFFIX or not (path / "config.json").is_file():
        raise ModelFileError(f"{str(path)!r} is neither a folder with a config.json nor a .gguf file")
    for name in _CHECKED_JSON:
        if (path / name).is_file():
            _check_configuration(path / name, _read_object(path / name))
    if (path / "adapter_config.json").exists():
        raise ModelFileError(f"{path} holds an adapter, which leads to another model; merge it into that one")


def check_weights(folder: Path) -> None:
    """Raises ModelFileError for a model whose weights are missing or pickled; a GGUF file has them."""
    if folder.is_file() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED_SUFFIXES)
    if pickled:
        raise ModelFileError(
            f"the weights in {folder} are pickled ({show(pickled[0])}), and a pickle can run code: save them as"
            " safetensors"
        )
    raise ModelFileError(f"{folder} has no weights: no .safetensors file")


def check_num_parameters(path: Path, model: Any) -> None:
    """Raises ModelFileError if a model, made without memory (on the device ``meta``), has far more parameters than its
    files have weights for."""
    num_parameters = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    if num_parameters > MAX_PARAMETERS_PER_BYTE * num_bytes:
        raise ModelFileError(
            f"the model {path} can't be loaded: its configuration asks for {num_parameters:,} parameters, and there are"
            f" {num_bytes:,} bytes of weights"
        )


def check_counts(path: str | Path, configuration: Any) -> None:
    """Raises ModelFileError for a configuration, as a dict, with more layers or experts than any model has."""
    for key, value in _entries(configuration):
        is_count = any(part in key for part in _COUNT_KEYS)
        if is_count and isinstance(value, int) and value > MAX_LAYERS:
            raise ModelFileError(f"{path}: {show(key)} is {show(value)}, more than {MAX_LAYERS}")


def _read_object(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelFileError(f"{path} is larger than {_MAX_JSON_BYTES:,} bytes")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {one_line(str(error), _MAX_REASON_CHARS)}") from None
    if not isinstance(document, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not a {type(document).__name__}")
    return document


def _check_configuration(path: Path, document: dict[str, Any]) -> None:
    for key, value in _entries(document):
        if key == "auto_map":
            raise ModelFileError(
                f"{path} asks for code of its own to be run (auto_map: {show(value)}), which is never done; if"
                " transformers has this kind of model itself, take the auto_map out"
            )
        if any(key.lstrip("_").startswith(part) for part in _KERNEL_KEYS) and _names_repository(value):
            raise ModelFileError(f"{path} asks for code from elsewhere to be run ({key}: {show(value)})")
    check_counts(path, document)


def _names_repository(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_names_repository, value.values()))
    return isinstance(value, str) and ("/" in value or "|" in value)


def _entries(document: Any) -> Iterator[tuple[str, Any]]:
    """All entries of all objects in a JSON document."""
    waiting = [document]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from ((key, value) for key, value in part.items() if isinstance(key, str))
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
