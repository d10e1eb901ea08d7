"""What a model will keep in the cache, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvpool.kv_cache_spec import KVCacheGroupSpec
from kvpool.worker.pretrained import read_config
from kvpool.worker.transformers_model import TransformersModel


def read_kv_cache_groups(path: Path, block_size: int, dtype: str) -> list[KVCacheGroupSpec]:
    """The KV cache groups of the model in a folder or a ``.gguf`` file, with all of its heads.

    Raises:
        InvalidArgumentError: there is no model, or it is not supported.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read_config(path), dtype=getattr(torch, dtype))
    return TransformersModel(model).kv_cache_groups(block_size)
