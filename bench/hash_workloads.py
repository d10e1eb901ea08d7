"""Block hashing: what the hashers and requests of each implementation are made to do, and the rows of the target table.

A hasher gets a long prompt that has no hashes yet; a request is made of one, and gets output tokens one at a time.
Token ids are seeded, spread over a vocabulary of 128,000. No request has extra keys.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.implementations import HASH_BLOCK_SIZE, Implementation
from bench.rows import Row
from bench.workloads import SEED, Workload

PROMPT_TOKENS = 128 * 1024
VOCABULARY = 128_000
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
MIN_RATIO = 5.0  # of the two sha256 algorithms to vLLM
DECODE_TOKENS = 4_096
HASH_SEED = "bench"

MakeRequest = Callable[..., Any]  # of token ids, and of an id where it matters


@functools.lru_cache(maxsize=1)
def make_prompt() -> list[int]:
    """The token ids of a long prompt."""
    rng = random.Random(SEED)
    return [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


class UnhashedRequest:
    """What hashers read of a request without extra keys."""

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "lora_request",
        "mm_features",
        "num_tokens",
        "prompt_embeds",
    )

    def __init__(self, token_ids: list[int]) -> None:
        self.all_token_ids = token_ids
        self.num_tokens = len(token_ids)
        self.block_hashes: list[bytes] = []
        self.mm_features: list[Any] = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None


def make_hasher(implementation: Implementation, algorithm: str) -> Callable[[Any], list[bytes]]:
    """The request block hasher of an implementation."""
    if implementation.name == "vllm":
        from vllm.utils import hashing
        from vllm.v1.core import kv_cache_utils

        function = hashing.get_hash_fn_by_name(algorithm)
        # What init_none_hash would set from PYTHONHASHSEED: all implementations start from one seed.
        kv_cache_utils.NONE_HASH = function(HASH_SEED)
        hasher: Callable[[Any], list[bytes]] = kv_cache_utils.get_request_block_hasher(HASH_BLOCK_SIZE, function)
        return hasher
    if implementation.name == "reference":
        from kvpool.reference.block_hasher import BlockHasher
    else:
        from kvpool.backend import BlockHasher
    return BlockHasher(algorithm, HASH_BLOCK_SIZE, HASH_SEED)


def request_maker(implementation: Implementation, algorithm: str) -> MakeRequest:
    """Makes hashed requests of an implementation's own class."""
    hasher = make_hasher(implementation, algorithm)
    if implementation.name == "vllm":
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=DECODE_TOKENS)
        return lambda tokens, name="request": Request(name, tokens, parameters, None, block_hasher=hasher)
    if implementation.name == "reference":
        from kvpool.reference.request import Request
    else:
        from kvpool.backend import Request
    return lambda tokens, name="request": Request(name, tokens, hasher, DECODE_TOKENS)


class HashWorkload(Workload):
    """A workload with hashes instead of a pool; ``check()`` compares those of the last round with the reference's."""

    hashes: list[bytes]

    def check(self) -> None:
        from kvpool.reference.block_hasher import BlockHasher

        hashes = BlockHasher(self.algorithm, HASH_BLOCK_SIZE, HASH_SEED).hash_token_ids(self.hashed_tokens())
        if self.hashes != hashes:
            raise AssertionError(f"{len(self.hashes)} hashes, not the {len(hashes)} expected ones")

    def __init__(self, implementation: Implementation, algorithm: str) -> None:
        self.algorithm = algorithm
        self.tokens = make_prompt()
        self.hashes = []

    def hashed_tokens(self) -> list[int]:
        """What ``hashes`` are the hashes of."""
        return self.tokens


class HashPrompt(HashWorkload):
    """The hasher alone: a prompt of 131,072 tokens."""

    blocks_per_round = PROMPT_TOKENS // HASH_BLOCK_SIZE

    def __init__(self, implementation: Implementation, algorithm: str) -> None:
        super().__init__(implementation, algorithm)
        self.hasher = make_hasher(implementation, algorithm)
        self.request = UnhashedRequest(self.tokens)

    def operate(self) -> None:
        self.hashes = self.hasher(self.request)


class MakeHashedRequest(HashWorkload):
    """A request of such a prompt is made, and hashed with it."""

    blocks_per_round = PROMPT_TOKENS // HASH_BLOCK_SIZE

    def __init__(self, implementation: Implementation, algorithm: str) -> None:
        super().__init__(implementation, algorithm)
        self.make = request_maker(implementation, algorithm)

    def operate(self) -> None:
        self.hashes = self.make(self.tokens).block_hashes


class AppendTokens(HashWorkload):
    """A request gets output tokens one by one; every 16th fills a block."""

    blocks_per_round = DECODE_TOKENS // HASH_BLOCK_SIZE

    def __init__(self, implementation: Implementation, algorithm: str) -> None:
        super().__init__(implementation, algorithm)
        self.make = request_maker(implementation, algorithm)
        self.output = self.tokens[-DECODE_TOKENS:]
        self.prompt = self.tokens[:HASH_BLOCK_SIZE]

    def prepare(self) -> None:
        self.request = self.make(self.prompt)

    def operate(self) -> None:
        append = self.request.append_output_token_ids
        for token in self.output:
            append(token)
        self.hashes = self.request.block_hashes

    def hashed_tokens(self) -> list[int]:
        return self.prompt + self.output


def hash_rows() -> list[Row]:
    """Hashing of long prompts, and requests that are hashed as they are made and as they grow."""
    prompts = [
        Row(
            f"hash/{algorithm}",
            f"block hashing, {algorithm}, {PROMPT_TOKENS:,} tokens",
            partial(HashPrompt, algorithm=algorithm),
            MIN_RATIO if algorithm.startswith("sha256") else None,
        )
        for algorithm in ALGORITHMS
    ]
    return [
        *prompts,
        Row("request/make", "Request of such a prompt, sha256", partial(MakeHashedRequest, algorithm="sha256")),
        Row("request/append", "append_output_token_ids, 16 single tokens", partial(AppendTokens, algorithm="sha256")),
    ]
