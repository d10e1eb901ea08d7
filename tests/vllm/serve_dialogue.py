"""What the clients of `vllm serve` ask, mostly one by one so that nothing hangs on timing, and what they saw."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from engine_scenarios import NUM_EXAMPLES, sum_prompts
from openai import OpenAI

MODEL_NAME = "smollm2"
MAX_TOKENS = 16
NUM_CONCURRENT = 12
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0.0, "max_tokens": MAX_TOKENS}
COMPARED_METRICS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
)

Answer = dict[str, Any]


def _answer(text: str | None, usage: Any) -> Answer:
    cached = usage.prompt_tokens_details.cached_tokens
    return {"text": text, "prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "cached": cached}


def _complete(client: OpenAI, prompt: str, max_tokens: int = MAX_TOKENS, **more: Any) -> Answer:
    options = {**GREEDY, "max_tokens": max_tokens}
    completion = client.completions.create(prompt=prompt, extra_body=more, **options)
    return _answer(completion.choices[0].text, completion.usage)


def _stream(client: OpenAI, prompt: str) -> Answer:
    pieces, usage = [], None
    options = {"include_usage": True}
    for part in client.completions.create(prompt=prompt, stream=True, stream_options=options, **GREEDY):
        pieces += [choice.text for choice in part.choices]
        usage = part.usage or usage
    return _answer("".join(pieces), usage)


def _chat(client: OpenAI, questions: list[str]) -> list[Answer]:
    """A conversation: each turn repeats what was said before, so it finds the blocks of the turn before."""
    messages: list[Any] = [{"role": "system", "content": "You answer in one short sentence. " * 12}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        completion = client.chat.completions.create(messages=messages, **GREEDY)
        answers.append(_answer(completion.choices[0].message.content, completion.usage))
        messages.append({"role": "assistant", "content": answers[-1]["text"]})
    return answers


def _read_metrics(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").raise_for_status().text.splitlines() if not line.startswith("#")]
    named = [line.rsplit(" ", 1) for line in lines if line.partition("{")[0] in COMPARED_METRICS]
    return {name: float(value) for name, value in named}


def _clear(client: OpenAI, http: httpx.Client) -> dict[str, Any]:
    """Resets the cache, which is refused as long as any block is in use. Events leave with the next step, so one more
    token is asked for; what it finds in the cache is 0."""
    usage = {name: value for name, value in _read_metrics(http).items() if "usage" in name}
    reset = http.post("/reset_prefix_cache").raise_for_status().json()
    return {"usage": usage, "reset": reset, "cached": _complete(client, "Once more.", max_tokens=1)["cached"]}


def converse(client: OpenAI, http: httpx.Client) -> dict[str, Any]:
    """One request after another: the answers, the metrics and the end."""
    first, second, third = sum_prompts(range(3), range(3, 3 + NUM_EXAMPLES))
    answers = [
        _complete(client, first),
        _complete(client, first),
        _complete(client, second),
        _stream(client, third),
        # Another salt: nothing of what others left may be found, only what this one left itself.
        _complete(client, first, cache_salt="another tenant"),
        _complete(client, second, cache_salt="another tenant"),
        *_chat(client, ["What is the capital of France?", "And of Italy?", "Which of them lies further north?"]),
    ]
    return {"answers": answers, "metrics": _read_metrics(http), "end": _clear(client, http)}


def crowd(client: OpenAI, http: httpx.Client) -> dict[str, Any]:
    """More at once than there is room for. What is batched together hangs on timing, so only counts are kept."""
    prompts = sum_prompts(range(NUM_CONCURRENT), range(60, 60 + NUM_EXAMPLES))
    with ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        answers = list(threads.map(lambda prompt: _complete(client, prompt), prompts))
    return {"counts": [[answer["prompt"], answer["completion"]] for answer in answers], "end": _clear(client, http)}
