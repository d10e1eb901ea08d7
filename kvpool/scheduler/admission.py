"""What is refused at the door: a request that could only wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.kv_cache_manager import KVCacheManager


class RequestTooLargeError(InvalidArgumentError):
    """A request that doesn't fit into the cache even when it has it to itself.

    Attributes:
        num_blocks_needed: blocks of all KV cache groups at the request's full length.
        num_blocks: blocks that exist, without the null block.
    """

    def __init__(self, message: str, num_blocks_needed: int, num_blocks: int) -> None:
        super().__init__(message)
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks = num_blocks


def max_num_computed_tokens(request: Request, max_model_len: int) -> int:
    """Tokens whose keys and values a request stores at most: all but the last one that is sampled."""
    return min(request.num_prompt_tokens + request.max_tokens, max_model_len) - 1


def require_fit(request: Request, manager: KVCacheManager) -> None:
    """Accepts a request that can run to its end, if need be alone.

    Raises:
        InvalidArgumentError: no prompt, no token to generate, or no room for one within ``max_model_len``; with prefix
            caching, not as many block hashes as its tokens have blocks.
        RequestTooLargeError: the cache is too small for it.
    """
    name, num_prompt_tokens = f"request {request.request_id!r}", request.num_prompt_tokens
    if num_prompt_tokens < 1:
        raise InvalidArgumentError(f"{name} has an empty prompt")
    if request.max_tokens < 1:
        raise InvalidArgumentError(f"{name} has max_tokens {request.max_tokens}, and has to generate at least 1")
    if num_prompt_tokens >= manager.max_model_len:
        raise InvalidArgumentError(
            f"{name} has {num_prompt_tokens} prompt tokens, which leaves no room for another: max_model_len is "
            f"{manager.max_model_len}"
        )
    num_hashes, num_hash_blocks = len(request.block_hashes), request.num_tokens // manager.hash_block_size
    if manager.enable_caching and num_hashes != num_hash_blocks:
        raise InvalidArgumentError(
            f"{name} has {num_hashes} block hashes, not {num_hash_blocks}: prefix caching needs requests with a "
            f"block_hasher of {manager.hash_block_size} tokens per block"
        )
    num_tokens = max_num_computed_tokens(request, manager.max_model_len)
    needed, existing = manager.get_num_required_blocks(num_tokens), manager.num_usable_blocks
    if needed > existing:
        parts = f"{num_prompt_tokens} of the prompt and {num_tokens - num_prompt_tokens} generated"
        raise RequestTooLargeError(
            f"{name} can never fit: it needs {needed} blocks for {num_tokens} tokens ({parts}), and {existing} exist",
            needed,
            existing,
        )
