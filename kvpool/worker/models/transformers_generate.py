"""What transformers itself generates: the tokens that those on the paged cache are compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def generate_greedily(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Iterable[int] = ()
) -> list[list[int]]:
    """``model.generate`` for one prompt after the other, so that nothing is padded.

    Args:
        model: of transformers, with an attention that its own cache serves.
        prompts: token ids, at least one each.
        stop_token_ids: the first of them ends a text and belongs to it.

    Returns:
        The generated tokens of each prompt.
    """
    config = copy.deepcopy(model.generation_config)
    config.do_sample = False
    for name in ("temperature", "top_p", "top_k"):  # of a model that samples by default; transformers would warn
        setattr(config, name, None)
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.eos_token_id = list(stop_token_ids) or None
    if config.pad_token_id is None:
        config.pad_token_id = 0
    generated = []
    # As the model's own: what is None in another one would be taken from the model's, its end of sequence too.
    stock_config, model.generation_config = model.generation_config, config
    try:
        for prompt in prompts:
            inputs = torch.tensor([list(prompt)], device=model.device)
            with torch.inference_mode():
                tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs))
            generated.append(tokens[0, len(prompt) :].tolist())
    finally:
        model.generation_config = stock_config
    return generated
