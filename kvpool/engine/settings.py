"""How to generate."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.requests.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateSettings:
    """Limits and options of a run.

    Attributes:
        block_size: tokens per block.
        num_blocks: of the pool, the null block included; None: what all prompts need at once, as far as memory goes.
        max_num_batched_tokens, max_num_seqs: tokens and requests of a step.
        max_new_tokens: per prompt.
        dtype, device: of weights and cache.
        attention: backend, see ``kvpool.worker.attention``; None for the best that is here.
        tensor_parallel: ranks.
        enable_prefix_caching: share and keep prefixes.
        ignore_eos: generate on behind the model's end of sequence.
        sampling_params: of all prompts.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_new_tokens: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    attention: str | None = None
    tensor_parallel: int = 1
    enable_prefix_caching: bool = True
    ignore_eos: bool = False
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
