"""Generated tokens per second on a real model: kvpool's paged cache, transformers' batched generate, and transformers'
continuous batching, in one run.

    python -m bench.generation [--model DIR] [--requests 8] [--shared 512] [--new-tokens 64] [--dtype float32]

Requests share a prefix, behind which each has some tokens of its own. The ways take turns, ``--repeats`` times; the
median counts, the range is the noise. All are greedy and ignore the end of sequence, so each makes the same number of
tokens; how many requests got the same tokens as from kvpool is in the table (in float32 all of them should).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvpool.engine.model_source import ModelSource, find_model
from kvpool.engine.session import GenerateSession, GenerateSettings

SEED = 7
LONGEST_SUFFIX = 10
PAGE = 16

Tokens = list[list[int]]


@dataclass(frozen=True)
class Case:
    """What to generate."""

    prompts: Tokens
    new_tokens: int
    dtype: str
    device: str


def make_prompts(num_requests: int, num_shared: int, vocab_size: int) -> Tokens:
    rng = random.Random(SEED)
    shared = [rng.randrange(3, vocab_size) for _ in range(num_shared)]
    return [
        shared + [rng.randrange(3, vocab_size) for _ in range(rng.randrange(4, LONGEST_SUFFIX + 1))]
        for _ in range(num_requests)
    ]


def run_kvpool(source: ModelSource, case: Case, **options: Any) -> tuple[Tokens, float]:
    """Tokens and seconds, without loading; a new cache each time, so nothing is hit that was computed before."""
    settings = GenerateSettings(
        block_size=PAGE,
        max_new_tokens=case.new_tokens,
        dtype=case.dtype,
        device=case.device,
        ignore_eos=True,
        **options,
    )
    with GenerateSession(source, case.prompts, settings) as session:
        report = session.run()
    return report.tokens, report.seconds


def run_generate(model: Any, case: Case) -> tuple[Tokens, float]:
    """``model.generate`` of all prompts as one batch, padded on the left."""
    width = max(map(len, case.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in case.prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in case.prompts], device=model.device
    )
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=case.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens = out[:, width:].tolist()
    return tokens, time.perf_counter() - start


def run_continuous(model: Any, case: Case) -> tuple[Tokens, float]:
    """``model.generate_batch``, with room for all prompts."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    blocks = sum(-(-(len(prompt) + case.new_tokens) // PAGE) for prompt in case.prompts) + 8
    generation = GenerationConfig(max_new_tokens=case.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=2048)
    start = time.perf_counter()
    outputs = model.generate_batch(case.prompts, generation, config, progress_bar=False, warmup=False)
    seconds = time.perf_counter() - start
    return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--skip-continuous", action="store_true", help="transformers' continuous batching is slow on CPUs"
    )
    options = parser.parse_args()
    from kvpool.worker.models.transformers_model import load_pretrained, read_model_facts

    with tempfile.TemporaryDirectory(prefix="kvpool-") as scratch:
        source = find_model(options.model, Path(scratch))
        vocab_size = read_model_facts(source.path).vocab_size
        prompts = make_prompts(options.requests, options.shared, vocab_size)
        case = Case(prompts, options.new_tokens, options.dtype, options.device)
        stock = load_pretrained(source.path, dtype=options.dtype, device=options.device)
        ways: dict[str, Callable[[], tuple[Tokens, float]]] = {
            "kvpool": lambda: run_kvpool(source, case),
            "kvpool, no prefix caching": lambda: run_kvpool(source, case, enable_prefix_caching=False),
            "transformers generate, batched": lambda: run_generate(stock, case),
        }
        if not options.skip_continuous:
            ways["transformers continuous batching"] = lambda: run_continuous(stock, case)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        tokens: dict[str, Tokens] = {}
        for _ in range(options.repeats):
            for name, run in ways.items():
                tokens[name], took = run()
                seconds[name].append(took)
    num_tokens = options.requests * options.new_tokens
    print(f"{source.description}, {options.dtype} on {options.device}: {options.requests} requests, {options.shared}")
    print(
        f"tokens shared, 4 to {LONGEST_SUFFIX} of their own, {options.new_tokens} new; medians of {options.repeats}\n"
    )
    print("| | tokens/s (range) | seconds | same tokens as kvpool |\n| --- | --- | ---: | ---: |")
    for name, took in seconds.items():
        same = sum(a == b for a, b in zip(tokens[name], tokens["kvpool"], strict=True))
        rates = f"{num_tokens / median(took):,.1f} ({num_tokens / max(took):,.1f} .. {num_tokens / min(took):,.1f})"
        print(f"| {name} | {rates} | {median(took):.2f} | {same} of {options.requests} |")


if __name__ == "__main__":
    main()
