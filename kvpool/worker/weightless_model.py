"""What a model will keep in the cache, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvpool.kv_cache_spec import KVCacheGroupSpec
from kvpool.worker.pretrained import read_config
from kvpool.worker.tensor_parallel import shard_model
from kvpool.worker.transformers_model import TransformersModel


def read_kv_cache_groups(path: Path, block_size: int, dtype: str, world_size: int) -> list[KVCacheGroupSpec]:
    """The KV cache groups of the model in a folder or a ``.gguf`` file, with the heads that each rank has.

    Raises:
        InvalidArgumentError: there is no model, it is not supported, or so many ranks can't divide it evenly.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read_config(path), dtype=getattr(torch, dtype))
    shard_model(model, 0, world_size)
    return TransformersModel(model).kv_cache_groups(block_size)
