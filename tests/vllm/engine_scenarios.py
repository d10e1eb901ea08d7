"""What the engines of the end-to-end tests are asked: prompts with shared beginnings, and how much room there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from model import model_folder

BLOCK_SIZE = 32
NUM_EXAMPLES = 9

Waves = list[list[str]]


def sum_prompts(numbers: range, examples: range) -> list[str]:
    """Questions after the same worked examples: the same first 7 blocks of 32 tokens for 9 examples."""
    shared = "".join(f"Q: What is {number} plus 7?\nA: {number} plus 7 is {number + 7}.\n" for number in examples)
    return [f"{shared}Q: What is {number} plus {2 * number}?\nA:" for number in numbers]


def waves() -> Waves:
    """Requests that share a prefix within a wave, repeat earlier ones, extend them, and crowd them out."""
    first = sum_prompts(range(4), range(3, 3 + NUM_EXAMPLES))
    other = sum_prompts(range(4), range(40, 40 + NUM_EXAMPLES))
    longer = sum_prompts(range(20, 24), range(3, 3 + NUM_EXAMPLES + 3))
    return [first, [*first[:2], *other, *longer]]


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        num_blocks: of 32 tokens; the prompts need 10 to 13 each, of which they share up to 7.
        is_multiprocess: whether the engine core is a process of its own, as it is by default.
        max_tokens: generated per request, none stops before.
        preempts: whether the blocks are too few for what is running.
        num_groups: KV cache groups, one per kind of attention.
        is_caching: whether prefixes are found again.
        engine: further arguments of vllm.LLM.
    """

    name: str
    num_blocks: int
    is_multiprocess: bool = False
    max_tokens: int = 40
    preempts: bool = False
    num_groups: int = 1
    is_caching: bool = True
    engine: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def spec(self, events: tuple[str, str]) -> dict[str, Any]:
        """What engine_run.py reads."""
        engine = {
            "model": str(model_folder()),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 512,
            "max_num_seqs": 16,
            # Less than the longest prompt, so that prompts are computed in parts.
            "max_num_batched_tokens": 288,
            "num_gpu_blocks_override": self.num_blocks,
            "seed": 0,
            **self.engine,
        }
        budget = {"max_tokens": self.max_tokens, "min_tokens": self.max_tokens}
        return {"engine": engine, "waves": waves(), "events": events, **budget}


AMPLE = Scenario("ample", num_blocks=400)
SCARCE = Scenario("scarce", num_blocks=34, preempts=True)
SCARCE_MULTIPROCESS = Scenario("scarce-multiprocess", num_blocks=34, preempts=True, is_multiprocess=True)

# Other block managers and schedulers of vLLM. What four layers of made-up weights say makes no sense, and has to be the
# same all the same.
SMALL: dict[str, Any] = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 4}}
HYBRID_LAYERS = {
    "num_hidden_layers": 4,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SLIDING_WINDOW = Scenario(
    "sliding-window",
    num_blocks=60,
    preempts=True,
    num_groups=2,
    engine={**SMALL, "hf_overrides": HYBRID_LAYERS, "disable_hybrid_kv_cache_manager": False},
)
SPECULATIVE = Scenario(
    "speculative",
    num_blocks=34,
    preempts=True,
    engine={**SMALL, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
)
CBOR_HASH = Scenario(
    "cbor-hash", num_blocks=34, preempts=True, engine={**SMALL, "prefix_caching_hash_algo": "sha256_cbor"}
)
NO_CACHING = Scenario(
    "no-caching",
    num_blocks=64,
    preempts=True,
    is_caching=False,
    engine={**SMALL, "enable_prefix_caching": False},
)
