"""vLLM's own Scheduler without an engine: a configuration of the smallest model, no network, no weights.

Importing vLLM takes a while: call ``make_vllm_scheduler`` only where it is installed.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TINY_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "ffn_dim": 16,
    "max_position_embeddings": 1_000_000,
    "vocab_size": 100,
    "torch_dtype": "float16",
}


class NoGrammar:
    """What is asked of the manager of structured output: nothing is structured."""

    def accept_tokens(self, *_: Any) -> bool:
        return True


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process: vLLM looks into it whenever a configuration is made."""
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "config.json").write_text(json.dumps(TINY_MODEL), encoding="utf-8")
    return folder


@functools.cache
def _model_config(max_model_len: int) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.config import ModelConfig

    folder = _model_folder().name
    return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=max_model_len, seed=0)


def make_vllm_scheduler(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    *,
    enable_caching: bool = True,
    long_prefill_token_threshold: int = 0,
    reserve_full_sequence: bool = True,
    watermark: float = 0.0,
    log_stats: bool = False,
) -> Any:
    """vLLM's Scheduler, first come, first served, over one group of full attention."""
    model_config = _model_config(max_model_len)
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    init_none_hash(_hash_function())
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        long_prefill_token_threshold=long_prefill_token_threshold,
        scheduler_reserve_full_isl=reserve_full_sequence,
        watermark=watermark,
    )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=enable_caching)
    config = VllmConfig(model_config=model_config, scheduler_config=scheduler_config, cache_config=cache_config)
    cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv_cache_config, NoGrammar(), block_size, block_size, log_stats=log_stats)


def make_vllm_request(
    request_id: str, prompt_token_ids: Sequence[int], block_size: int, max_tokens: int, arrival_time: float = 0.0
) -> Any:
    """vLLM's Request, with vLLM's hasher."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id,
        list(prompt_token_ids),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        None,
        arrival_time=arrival_time,
        block_hasher=_block_hasher(block_size),
    )


def model_runner_output(output: Any, sampled_token_ids: dict[str, list[int]]) -> Any:
    """What vLLM's ``update_from_output`` takes beside the step, from what kvpool's takes."""
    from vllm.v1.outputs import ModelRunnerOutput

    request_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=[list(sampled_token_ids.get(request_id, ())) for request_id in request_ids],
    )


def _hash_function() -> Any:
    from vllm.utils.hashing import sha256

    return sha256


@functools.cache
def _block_hasher(block_size: int) -> Any:
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(block_size, _hash_function())
