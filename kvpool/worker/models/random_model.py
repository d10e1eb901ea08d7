"""Random models: the same shapes and code as a real one, tokens without meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BYTE_VOCABULARY = 256


def make_random_llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: Any) -> Any:
    """A Llama of transformers with random weights, in eval mode.

    Args:
        seed: of the weights.
        sizes: keywords of ``LlamaConfig``; by default 2 layers, 8 query and 4 KV heads, and a vocabulary of bytes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = {
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        # Wide enough that the most likely token stands out from the others: rounding then changes no token.
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[] if device == "cpu" else None), torch.device(device):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**defaults, **sizes}))
    return model.to(dtype).eval()


def write_random_llama(folder: Path, seed: int = 0, **sizes: Any) -> None:
    """Saves one as transformers does, without a tokenizer: bytes are tokens."""
    make_random_llama(seed, **sizes).save_pretrained(folder)
