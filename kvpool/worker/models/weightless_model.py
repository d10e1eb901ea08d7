"""What a model will keep in the cache, without its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from kvpool.cache.spec import KVCacheGroupSpec
from kvpool.worker.models.model_files import model_errors
from kvpool.worker.models.pretrained import make_without_weights, read_config
from kvpool.worker.models.tensor_parallel import shard_model
from kvpool.worker.models.transformers_model import TransformersModel


def read_kv_cache_groups(path: Path, block_size: int, dtype: str, world_size: int) -> list[KVCacheGroupSpec]:
    """The KV cache groups of the model in a folder or a ``.gguf`` file, with the heads that each rank has.

    Raises:
        InvalidArgumentError: there is no model, it is not supported, or so many ranks can't divide it evenly.
    """
    with model_errors(path):
        model = make_without_weights(path, read_config(path), getattr(torch, dtype))
    shard_model(model, 0, world_size)
    return TransformersModel(model).kv_cache_groups(block_size)
