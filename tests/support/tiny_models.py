"""Small random decoders of transformers, and what transformers itself generates with them.

Weights are wide (``initializer_range``), so that the most likely token stands out: what rounding does to logits, about
1e-5 in float32, is far below the distance of the best two (``Generated.smallest_gap``), and greedy tokens can be
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCABULARY = 61
WINDOW = 11  # of sliding layers: smaller than most prompts, and no multiple of a block
MAX_MODEL_LEN = 160

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FULL, SLIDING = "full_attention", "sliding_attention"
SLIDES = {"sliding_window": WINDOW}
MIXED = {**SLIDES, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", SLIDES),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "use_sliding_window": True, **MIXED}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, **SLIDES},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "query_pre_attn_scalar": 8, **MIXED}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", SLIDES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", MIXED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", SLIDES),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def make_model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A random model, in eval mode.

    Args:
        kind: one of ``KINDS``.
        sizes: arguments of its configuration, in place of ``SIZES`` and those of the kind.
    """
    config_name, model_name, own_sizes = KINDS[kind]
    config = getattr(transformers, config_name)(**{**SIZES, **own_sizes, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).to(dtype).eval()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the other ones of transformers leave the cap out
    return model


@dataclass(frozen=True)
class Generated:
    """What ``generate`` of transformers makes of a prompt, greedily.

    Attributes:
        tokens: the new ones.
        smallest_gap: how far the best logit is ahead of the second, where it is closest.
    """

    tokens: list[int]
    smallest_gap: float


def generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Generated]:
    """For one prompt after the other, with the attention that the model has now."""
    generated = []
    for prompt in prompts:
        inputs = torch.tensor([list(prompt)])
        made = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(made.logits).topk(2, dim=-1).values
        gap = float((best[:, 0] - best[:, 1]).min())
        generated.append(Generated(made.sequences[0, len(prompt) :].tolist(), gap))
    return generated


def make_prompts(
    lengths: Sequence[int], seed: int = 0, prefix: Sequence[int] = (), vocabulary: int = VOCABULARY
) -> list[list[int]]:
    """Random prompts of these lengths behind a common prefix."""
    generator = torch.Generator().manual_seed(seed)
    return [[*prefix, *torch.randint(1, vocabulary, (n,), generator=generator).tolist()] for n in lengths]
