"""A seeded generator of chat traffic, for replay without a trace file.

Chats start as a Poisson process. Each picks one of a few system prompts by Zipf's law, so that a handful of them make
up most of the traffic, and has a geometric number of turns. The prompt of a turn is the whole stream of its chat so
far: system prompt, earlier messages and answers, and the new message. The next turn comes after the answer's estimated
time and a pause.

Only ``random.Random.random()`` is drawn from, whose sequence Python keeps the same between versions; a trace depends on
nothing but seed and settings, and a shorter one is the beginning of a longer one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect
from dataclasses import dataclass, field

import numpy as np

from kvpool.replay.trace import Trace, TraceError, TraceRequest

DEFAULT_NUM_REQUESTS = 2_000


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """Shape of the traffic. Times in ms, lengths in tokens; means are of exponential (turns: geometric) laws."""

    mean_chat_interval_ms: float = 1_000.0
    num_system_prompts: int = 32
    zipf_exponent: float = 1.1
    min_system_prompt_length: int = 128
    max_system_prompt_length: int = 2_048
    mean_turns: float = 5.0
    min_message_length: int = 8
    mean_message_length: float = 160.0
    min_answer_length: int = 4
    mean_answer_length: float = 250.0
    ms_per_answer_token: float = 25.0
    mean_pause_ms: float = 15_000.0


@dataclass(slots=True)
class _Chat:
    system_prompt: int
    num_turns_left: int
    length: int
    hash_ids: list[int] = field(default_factory=list)


def generate_trace(
    seed: int = 0,
    num_requests: int = DEFAULT_NUM_REQUESTS,
    trace_block_size: int = 16,
    settings: SyntheticSettings = SyntheticSettings(),
) -> Trace:
    """A synthetic trace of ``num_requests`` requests in order of arrival. Lengths and times don't depend on
    ``trace_block_size`` (tokens per hash id). Raises TraceError for numbers below 1."""
    if num_requests < 1 or trace_block_size < 1:
        raise TraceError("a synthetic trace needs at least one request and a trace block size of at least 1")
    requests = _ChatGenerator(seed, trace_block_size, settings).generate(num_requests)
    return Trace(f"synthetic (seed {seed})", requests, trace_block_size, is_synthetic=True)


class _ChatGenerator:
    def __init__(self, seed: int, trace_block_size: int, settings: SyntheticSettings) -> None:
        self._random = random.Random(seed)
        self._trace_block_size = trace_block_size
        self._settings = settings
        self._ids = itertools.count()
        self._order = itertools.count()
        weights = [1 / rank**settings.zipf_exponent for rank in range(1, settings.num_system_prompts + 1)]
        self._zipf = list(itertools.accumulate(weights))
        span = settings.max_system_prompt_length - settings.min_system_prompt_length
        self._system_lengths = [settings.min_system_prompt_length + int(span * self._random.random()) for _ in weights]
        # Only whole trace blocks are shared: one that ends in a chat's own tokens belongs to the chat.
        self._system_ids = [[next(self._ids) for _ in range(n // trace_block_size)] for n in self._system_lengths]

    def generate(self, num_requests: int) -> list[TraceRequest]:
        """A turn whose chat is None starts a new chat, and has the next start follow it."""
        requests: list[TraceRequest] = []
        turns: list[tuple[float, int, _Chat | None]] = [(0.0, next(self._order), None)]
        while len(requests) < num_requests:
            now, _, chat = heapq.heappop(turns)
            if chat is None:
                chat = self._start_chat()
                pause = self._exponential(self._settings.mean_chat_interval_ms)
                heapq.heappush(turns, (now + pause, next(self._order), None))
            request = self._next_turn(chat, now, line=len(requests) + 1)
            requests.append(request)
            chat.num_turns_left -= 1
            if chat.num_turns_left:
                answered = now + request.output_length * self._settings.ms_per_answer_token
                pause = self._exponential(self._settings.mean_pause_ms)
                heapq.heappush(turns, (answered + pause, next(self._order), chat))
        return requests

    def _start_chat(self) -> _Chat:
        system_prompt = bisect(self._zipf, self._random.random() * self._zipf[-1], hi=len(self._zipf) - 1)
        end_probability = 1 / self._settings.mean_turns
        num_turns = 1
        while self._random.random() >= end_probability:
            num_turns += 1
        return _Chat(
            system_prompt, num_turns, self._system_lengths[system_prompt], list(self._system_ids[system_prompt])
        )

    def _next_turn(self, chat: _Chat, now: float, line: int) -> TraceRequest:
        settings = self._settings
        chat.length += settings.min_message_length + int(
            self._exponential(settings.mean_message_length - settings.min_message_length)
        )
        input_length = chat.length
        hash_ids = self._prompt_ids(chat)
        output_length = settings.min_answer_length + int(
            self._exponential(settings.mean_answer_length - settings.min_answer_length)
        )
        chat.length += output_length
        return TraceRequest(line, round(now, 3), input_length, output_length, hash_ids=np.array(hash_ids, np.int64))

    def _prompt_ids(self, chat: _Chat) -> list[int]:
        """A block that the stream has filled keeps its id for good; a partial one is named anew on each turn."""
        num_full, num_partial_tokens = divmod(chat.length, self._trace_block_size)
        while len(chat.hash_ids) < num_full:
            chat.hash_ids.append(next(self._ids))
        return [*chat.hash_ids, next(self._ids)] if num_partial_tokens else list(chat.hash_ids)

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random.random())
