"""The level ``hasher``: vLLM's request block hasher, native, with the same digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvpool.hashing.hashing import ALGORITHMS, Digest, load_xxh3_128, sha256_digest
from kvpool.integrations.vllm.hooks import Hooks
from kvpool.integrations.vllm.request_hasher import RequestHasher

TARGETS = (
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher",
    "vllm.v1.core.kv_cache_utils.hash_block_tokens",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
    "vllm.v1.core.kv_cache_utils._gen_mm_extra_hash_keys",
    "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys",
    "vllm.v1.core.kv_cache_utils._gen_prompt_embeds_extra_hash_keys",
    "vllm.v1.core.kv_cache_utils.init_none_hash",
    "vllm.utils.hashing.sha256",
    "vllm.utils.hashing.sha256_cbor",
    "vllm.utils.hashing.xxhash",
    "vllm.utils.hashing.xxhash_cbor",
    "vllm.lora.request.LoRARequest",
    "vllm.multimodal.inputs.MultiModalFeatureSpec",
    "vllm.multimodal.inputs.PlaceholderRange",
    "vllm.v1.request.Request.__init__",
    "vllm.v1.request.Request.append_output_token_ids",
    "vllm.v1.request.Request.update_block_hashes",
)

RequestHashes = Callable[[Request], list[Any]]

_NAME = "get_request_block_hasher"
_stock = getattr(kv_cache_utils, _NAME)


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], num_hash_lookahead_tokens: int = 0
) -> RequestHashes:
    """vLLM's function of this name: a native hasher for vLLM's own hash functions, vLLM's hasher for all others.

    Args:
        hash_block_size: tokens per hash.
        caching_hash_fn: one of the functions of ``vllm.utils.hashing``, or any other.
        num_hash_lookahead_tokens: tokens after each block that its hash covers (vLLM 0.33): vLLM's hasher if any.
    """
    if num_hash_lookahead_tokens:
        looking_ahead: RequestHashes = _stock(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens)
        return looking_ahead
    stock: RequestHashes = _stock(hash_block_size, caching_hash_fn)
    algorithm = _algorithm_of(caching_hash_fn)
    if algorithm is None or type(hash_block_size) is not int or hash_block_size < 1:
        return stock
    digest: Digest = sha256_digest
    if not algorithm.is_sha256:
        try:
            digest = load_xxh3_128()
        except ModuleNotFoundError:
            return stock  # it raises vLLM's own error when it is called
    native: RequestHashes = RequestHasher(
        hash_block_size, algorithm, digest, caching_hash_fn, stock, Request, kv_cache_utils
    )
    return native


def _algorithm_of(function: Any) -> Any:
    return next((ALGORITHMS[name] for name in ALGORITHMS if getattr(hashing, name, None) is function), None)


def install(hooks: Hooks) -> None:
    """Replace the function in every module that has it."""
    hooks.replace_in_modules(_stock, get_request_block_hasher, [_NAME])
