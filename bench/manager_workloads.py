"""Cache managers: what the managers of each implementation are made to do, and the rows of the target table.

``native`` and ``reference`` are kvpool's manager with its own requests, native and in plain Python; ``vllm`` is vLLM's
with vLLM's requests. One group of full attention, caching on, events, metrics and statistics off. Requests are made and
hashed (sha256) before the clock starts, all of the same tokens. A figure is ns per request.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from bench.hash_workloads import PROMPT_TOKENS, VOCABULARY, make_prompt, request_maker
from bench.implementations import HASH_BLOCK_SIZE, Implementation
from bench.rows import Row
from bench.workloads import SEED, Workload

ALGORITHM = "sha256"
NUM_DECODING = 256
DECODE_PROMPT_TOKENS = 512
MAX_DECODE_STEPS = 256
OUTPUT_TOKEN = 7
NUM_KV_HEADS, HEAD_SIZE = 8, 128


def make_manager(implementation: Implementation, num_blocks: int, max_model_len: int) -> Any:
    """A new manager over a pool of ``num_blocks`` blocks, the null block included."""
    if implementation.name == "vllm":
        return _make_vllm_manager(num_blocks, max_model_len)
    from kvpool.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    if implementation.name == "reference":
        from kvpool.cache.reference_manager import KVCacheManager
    else:
        from kvpool.kv_cache_manager import KVCacheManager
    spec = FullAttentionSpec(HASH_BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype="float16")
    return KVCacheManager(KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)]), max_model_len)


def _make_vllm_manager(num_blocks: int, max_model_len: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(HASH_BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float16)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len, HASH_BLOCK_SIZE, HASH_BLOCK_SIZE)


class Decode(Workload):
    """Slots for one token of each of 256 running requests; a round is one step, a call of allocate_slots per request.

    Lengths are spread over a block, so that at each step every 16th request needs a new block and another one fills
    its last.
    """

    blocks_per_round = NUM_DECODING

    def __init__(self, implementation: Implementation) -> None:
        rng = random.Random(SEED)
        self.prompts = [
            [rng.randrange(VOCABULARY) for _ in range(DECODE_PROMPT_TOKENS + number % HASH_BLOCK_SIZE)]
            for number in range(NUM_DECODING)
        ]
        longest = DECODE_PROMPT_TOKENS + HASH_BLOCK_SIZE + MAX_DECODE_STEPS
        num_blocks = NUM_DECODING * -(-longest // HASH_BLOCK_SIZE) + 1
        self.manager = make_manager(implementation, num_blocks, longest)
        self.pool = self.manager.block_pool
        self.make_request = request_maker(implementation, ALGORITHM)
        self.requests: list[Any] = []
        self.num_steps = MAX_DECODE_STEPS

    def start(self) -> None:
        """All requests anew, their prompts computed."""
        for request in self.requests:
            self.manager.free(request)
        self.pool.reset_prefix_cache()
        self.requests = [self.make_request(prompt, f"request {number}") for number, prompt in enumerate(self.prompts)]
        for request in self.requests:
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                raise AssertionError("the pool is too small")
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(OUTPUT_TOKEN)
        self.num_steps = 0

    def prepare(self) -> None:
        if self.num_steps >= MAX_DECODE_STEPS:
            self.start()
        else:
            for request in self.requests:
                request.num_computed_tokens += 1
                request.append_output_token_ids(OUTPUT_TOKEN)
        self.num_steps += 1

    def operate(self) -> None:
        allocate = self.manager.allocate_slots
        for request in self.requests:
            allocate(request, 1)

    def num_held_blocks(self) -> int:
        return sum(-(-(request.num_computed_tokens + 1) // HASH_BLOCK_SIZE) for request in self.requests)


class DecodeInBatch(Decode):
    """The same with one allocate_decode for all; vLLM, which has none, does it with allocate_slots."""

    def operate(self) -> None:
        if not hasattr(self.manager, "allocate_decode"):
            super().operate()
            return
        self.manager.allocate_decode(self.requests)


class LongPrompt(Workload):
    """A request of 131,072 tokens is looked up, gets its blocks, caches them and is freed, in a pool just large enough.

    Args:
        case: "hits", all but the last block, which vLLM computes again; "misses" in a pool without cached blocks;
            "evictions", misses in a pool full of another prompt's.
    """

    blocks_per_round = 1  # figures are per request

    def __init__(self, implementation: Implementation, case: str) -> None:
        self.case = case
        self.manager = make_manager(implementation, PROMPT_TOKENS // HASH_BLOCK_SIZE + 1, PROMPT_TOKENS)
        self.pool = self.manager.block_pool
        make_request = request_maker(implementation, ALGORITHM)
        prompt = make_prompt()
        self.request = make_request(prompt, "request")
        self.next_request = make_request(prompt[::-1], "other") if case == "evictions" else self.request
        self.num_hits = 0
        self.operate()

    def prepare(self) -> None:
        if self.case == "misses" and not self.pool.reset_prefix_cache():
            raise AssertionError("blocks are in use")
        self.request, self.next_request = self.next_request, self.request

    def operate(self) -> None:
        manager, request = self.manager, self.request
        computed = manager.get_computed_blocks(request)  # vLLM's has a third value
        num_hits = self.num_hits = computed[1]
        manager.allocate_slots(request, PROMPT_TOKENS - num_hits, num_hits, computed[0])
        manager.free(request)

    def check(self) -> None:
        super().check()
        expected = PROMPT_TOKENS - HASH_BLOCK_SIZE if self.case == "hits" else 0
        if self.num_hits != expected:
            raise AssertionError(f"{self.num_hits} tokens hit, {expected} expected")
        computed = self.manager.get_computed_blocks(self.request)
        if computed[1] != PROMPT_TOKENS - HASH_BLOCK_SIZE:
            raise AssertionError(f"{computed[1]} tokens are cached")


def manager_rows() -> list[Row]:
    """What a scheduler asks of a manager: decode tokens, and whole prompts of 128 k tokens."""
    prompt = "get_computed_blocks + allocate_slots + free, 128 k tokens"
    return [
        Row("manager/decode/one", "allocate_slots, one decode token", Decode, 10),
        Row("manager/decode/batch", f"allocate_decode of {NUM_DECODING} requests", DecodeInBatch, 25),
        Row("manager/prompt/hits", f"{prompt}, all hits", partial(LongPrompt, case="hits"), 15),
        Row("manager/prompt/misses", f"{prompt}, all misses", partial(LongPrompt, case="misses"), 15),
        Row("manager/prompt/evictions", f"{prompt}, misses that evict", partial(LongPrompt, case="evictions"), None),
    ]
