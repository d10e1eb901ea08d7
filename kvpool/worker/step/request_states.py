"""What a worker keeps of each request between steps: its row, its tokens, how its next token is chosen.

A row is a place in the block tables and in the arrays here; a request that runs has one. A preempted request gives its
row up, because there may be more of these than rows, and keeps the tokens of its prompt aside: what it has generated
comes back with the messages that resume it.
"""

from __future__ import annotations

import secrets
from heapq import heappop, heappush
from itertools import chain, compress
from typing import Any

import numpy as np

from kvpool.errors import InvalidArgumentError
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from kvpool.worker.step.sampler import SamplingBatch

Array = np.ndarray[Any, Any]

GREEDY = SamplingParams()
SEED_MASK = 2**64 - 1


class RequestStates:
    """The requests of a worker, as the messages of a scheduler tell of them. For one thread.

    A message that was applied in part, as by Ctrl-C, or whose step failed, may be followed by another one, as
    ``kvpool/scheduler/output.py`` says: it ends or preempts what the one before has left in doubt.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens of a row.
        vocab_size: token ids are below it.

    Attributes:
        row_of: row by request id, of requests that run.
        token_ids: int32 [max_num_seqs, max_model_len] in host memory; a row holds the prompt and, behind it, the
            generated tokens that have been computed.

    Raises:
        InvalidArgumentError: a size below 1.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int) -> None:
        if min(max_num_seqs, max_model_len, vocab_size) < 1:
            raise InvalidArgumentError(
                f"{max_num_seqs} rows of {max_model_len} tokens out of a vocabulary of {vocab_size}"
            )
        self.max_num_seqs, self.max_model_len, self.vocab_size = max_num_seqs, max_model_len, vocab_size
        self.row_of: dict[str, int] = {}
        self.token_ids: Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._num_prompt_tokens: Array = np.zeros(max_num_seqs, np.int64)
        self._temperatures: Array = np.zeros(max_num_seqs, np.float64)
        self._top_ks: Array = np.zeros(max_num_seqs, np.int64)
        self._top_ps: Array = np.ones(max_num_seqs, np.float64)
        self._seeds: Array = np.zeros(max_num_seqs, np.uint64)
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first, as tables are sent up to the highest
        self._params: dict[str, tuple[SamplingParams, int]] = {}  # with a seed; of requests that run or are preempted
        self._prompts_aside: dict[str, Array] = {}  # of preempted requests

    def __len__(self) -> int:
        """Requests that run or are preempted."""
        return len(self._params)

    # ---- what messages change ----

    def check(self, output: SchedulerOutput) -> None:
        """Refuses a message that can't be applied, before anything has changed. O(requests that come or go).

        Raises:
            InvalidArgumentError: a new request whose id is taken, whose prompt is empty, too long or has a token
                outside the vocabulary, or that wants an adapter; a resumed one that is not preempted; a running one
                that has no row; more requests than rows.
        """
        self._find_free_rows()
        finished, gone = set(output.finished_request_ids), {*output.finished_request_ids, *output.preempted_request_ids}
        cached, new_requests = output.scheduled_cached_requests, output.scheduled_new_requests
        known = self._params.keys() - finished if finished else self._params.keys()
        for new in new_requests:
            if new.request_id in known:
                raise InvalidArgumentError(f"request {new.request_id!r} is new, but there is one of that id")
            self._check_new(new)
        resumed = list(compress(cached.request_ids, cached.resumed))
        running = set(cached.request_ids).difference(resumed)
        if not running <= self.row_of.keys() or not running.isdisjoint(gone):
            request_id = next(iter((running - self.row_of.keys()) | (running & gone)))
            raise InvalidArgumentError(f"request {request_id!r} goes on, but it does not run here")
        for request_id in resumed:
            if request_id not in known or (request_id in self.row_of and request_id not in gone):
                raise InvalidArgumentError(f"request {request_id!r} is resumed, but it was not preempted here")
        num_wanted = len(new_requests) + len(resumed)
        num_free = len(self._free_rows) + sum(request_id in self.row_of for request_id in gone)
        if num_wanted > num_free:
            raise InvalidArgumentError(
                f"{num_wanted} requests start where {num_free} of {self.max_num_seqs} rows are free: a scheduler's "
                "max_num_seqs must not be larger than its worker's"
            )

    def _check_new(self, new: NewRequestData) -> None:
        num_tokens = len(new.prompt_token_ids)
        if not 0 < num_tokens <= self.max_model_len:
            raise InvalidArgumentError(
                f"request {new.request_id!r} has a prompt of {num_tokens} tokens, in rows of {self.max_model_len}"
            )
        lowest, highest = min(new.prompt_token_ids), max(new.prompt_token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidArgumentError(
                f"request {new.request_id!r} has the token {lowest if lowest < 0 else highest}, in a vocabulary of "
                f"{self.vocab_size}"
            )
        if new.lora_name is not None:
            raise InvalidArgumentError(f"request {new.request_id!r} wants the adapter {new.lora_name!r}; there is none")

    def apply(self, output: SchedulerOutput) -> None:
        """Takes requests out and in, as a message that passes ``check`` says.

        O(requests that come or go + tokens of their prompts). Tokens of those that stay: ``write_new_tokens``.
        """
        for request_id in output.finished_request_ids:
            self._params.pop(request_id, None)
            self._prompts_aside.pop(request_id, None)
            self._leave_row(request_id)
        for request_id in output.preempted_request_ids:
            row = self.row_of.get(request_id)
            if row is not None:
                self._prompts_aside[request_id] = self.token_ids[row, : self._num_prompt_tokens[row]].copy()
                self._leave_row(request_id)
        for new in output.scheduled_new_requests:
            params = new.sampling_params or GREEDY
            seed = secrets.randbits(64) if params.seed is None else params.seed & SEED_MASK
            self._params[new.request_id] = params, seed
            self._take_row(new.request_id, np.array(new.prompt_token_ids, np.int32))
        cached = output.scheduled_cached_requests
        for request_id in compress(cached.request_ids, cached.resumed):
            self._take_row(request_id, self._prompts_aside[request_id])
            del self._prompts_aside[request_id]

    def _leave_row(self, request_id: str) -> None:
        row = self.row_of.pop(request_id, None)
        if row is not None:
            heappush(self._free_rows, row)

    def _take_row(self, request_id: str, prompt: Array) -> None:
        row = self._free_rows[0]
        params, seed = self._params[request_id]
        self.token_ids[row, : len(prompt)] = prompt
        self._num_prompt_tokens[row] = len(prompt)
        self._temperatures[row] = params.temperature
        self._top_ks[row] = min(params.top_k, self.vocab_size)
        self._top_ps[row] = params.top_p
        self._seeds[row] = seed
        self.row_of[request_id] = row  # what a request has is whole before it has it
        heappop(self._free_rows)

    def _find_free_rows(self) -> None:
        """After an interruption in the middle of a message a row may be nobody's, or somebody's and free."""
        if len(self._free_rows) + len(self.row_of) != self.max_num_seqs:
            self._free_rows = sorted(set(range(self.max_num_seqs)).difference(self.row_of.values()))

    def write_new_tokens(self, cached: CachedRequestData, rows: Array) -> None:
        """Puts generated tokens in their places, all by one assignment.

        Args:
            cached: the requests that workers know.
            rows: their rows, in the order of ``request_ids``.

        Raises:
            InvalidArgumentError: a token outside the vocabulary or behind ``max_model_len``; nothing is written.

        O(requests + tokens), in numpy.
        """
        num_requests = len(cached.request_ids)
        counts = np.fromiter(map(len, cached.new_token_ids), np.int64, num_requests)
        token_ids = np.fromiter(chain.from_iterable(cached.new_token_ids), np.int64)
        if not len(token_ids):
            return
        first = np.maximum(
            np.fromiter(cached.num_computed_tokens, np.int64, num_requests), self._num_prompt_tokens[rows]
        )
        # Token i of the list is the (i - tokens before its request)th of its request.
        positions = np.repeat(first - (counts.cumsum() - counts), counts)
        positions += np.arange(len(token_ids))
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size or positions.max() >= self.max_model_len:
            raise InvalidArgumentError(
                f"generated tokens {token_ids.min()} to {token_ids.max()} up to position {positions.max()}, in a "
                f"vocabulary of {self.vocab_size} and rows of {self.max_model_len}"
            )
        self.token_ids[np.repeat(rows, counts), positions] = token_ids

    # ---- what steps read ----

    def pack(self, token_rows: Array, positions: Array, out: Array) -> None:
        """Token ids of a step, one after the other: int32 rows [n] and int64 positions [n] to int64 ``out`` [n]."""
        out[:] = self.token_ids[token_rows, positions]

    def sampling_batch(self, rows: Array, num_tokens: Array) -> SamplingBatch | None:
        """How the next tokens are chosen; None where all are the most likely ones.

        Args:
            rows: integers [k].
            num_tokens: integers [k], tokens of each request so far.
        """
        temperatures = self._temperatures[rows]
        if not temperatures.any():
            return None
        return SamplingBatch(temperatures, self._top_ks[rows], self._top_ps[rows], self._seeds[rows], num_tokens)
