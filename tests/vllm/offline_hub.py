"""Writes a hub cache with the descriptions of a few public models, so that vLLM's tests find them without network.

vLLM's tests of its scheduler never run a model: they read the sizes of one to build a configuration. The facts below
are published sizes; no weights and no tokenizers are written, so a test that generates text fails as it does on any
machine without network. Models with pictures are left out: vLLM looks at their classes, which need torchvision.

    HF_HUB_OFFLINE=1 HF_HOME=FOLDER pytest ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A hub cache files each snapshot under the commit it was taken from. These were taken from no commit.
REVISION = "0" * 40
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
OPT_350M = OPT_125M | {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "word_embed_proj_dim": 512,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "do_layer_norm_before": False,
}
# What vLLM's ModelConfig() takes when a test names no model.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN1_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT_125M,
    "facebook/opt-350m": OPT_350M,
    "Qwen/Qwen3-0.6B": QWEN3_0_6B,
    "Qwen/Qwen1.5-7B": QWEN1_5_7B,
}


def write_hub_cache(hf_home: Path) -> None:
    """Write the cache below `hf_home`, the folder that HF_HOME is to name. Writing it twice is harmless.

    Raises OSError if the folder can't be written.
    """
    for name, config in MODELS.items():
        repository = hf_home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(REVISION)
        (snapshot / "config.json").write_text(json.dumps(config, indent=2) + "\n")
