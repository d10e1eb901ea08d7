"""An engine in small: scheduler and cache manager, and whatever executes their steps, as one loop.

The executor is a ``ModelRunner`` in this process or a ``Broadcaster`` with a worker on each rank; the loop is the same.

A request is checked when it is added, against the limits of the executor too: what an executor refuses in the middle of
a step, it refuses for everybody.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from kvpool.backend import BlockHasher, Request
from kvpool.cache.spec import KVCacheConfig
from kvpool.common.arguments import show, to_bool, to_int, to_text
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.requests.request_base import to_token_ids
from kvpool.requests.sampling_params import SamplingParams
from kvpool.scheduler import RequestOutput, Scheduler, SchedulerConfig, SchedulerOutput
from kvpool.worker.executor import Executor, ExecutorLimits

__all__ = ["Engine", "EngineStateError", "Executor", "ExecutorLimits", "RequestFailedError"]

MAX_REQUEST_ID_LENGTH = 65_536  # characters; ids are in every message to workers
_PREFIX_BYTES = 4  # of the ids that an engine gives


class RequestFailedError(KvpoolError, RuntimeError):
    """Prompts could not be computed; the message has the reason of the first.

    Attributes:
        errors: the reasons by number of the prompt.
        tokens: of each prompt, as far as it was computed: all of it where there is no error.
    """

    def __init__(self, errors: dict[int, str], tokens: list[list[int]]) -> None:
        number, reason = next(iter(errors.items()))
        others = f"; {len(errors)} of {len(tokens)} prompts failed" if len(errors) > 1 else ""
        super().__init__(f"prompt {number}: {reason}{others}")
        self.errors, self.tokens = errors, tokens


class EngineStateError(KvpoolError, RuntimeError):
    """A step was asked for in the middle of another one: by the executor, or by a second thread."""


class Engine:
    """Generates tokens for requests, as many at a time as blocks and budget allow. For one thread.

    Nothing is kept of a request that has finished.

    Args:
        kv_cache_config: the blocks, the same as the executor's.
        executor: computes the steps; closed with the engine.
        max_model_len: longest sequence, tokens.
        scheduler_config: limits of a step; None for the executor's.
        enable_caching: keep and share prefixes.
        hash_algorithm: see ``BlockHasher``.

    Attributes:
        scheduler: with the manager and the pool below it.

    Raises:
        TypeError: an argument of the wrong type.
        InvalidArgumentError: more blocks, longer sequences or larger steps than the executor has room for; a stop token
            outside its vocabulary; see also ``KVCacheManager`` and ``Scheduler``.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        executor: Executor,
        *,
        max_model_len: int,
        scheduler_config: SchedulerConfig | None = None,
        enable_caching: bool = True,
        hash_algorithm: str = "sha256",
    ) -> None:
        limits: Any = getattr(executor, "limits", None)
        for name, value, kind in (
            ("kv_cache_config", kv_cache_config, KVCacheConfig),
            ("executor.limits", limits, ExecutorLimits),
            ("hash_algorithm", hash_algorithm, str),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} can't be {show(value)}")
        if scheduler_config is not None and not isinstance(scheduler_config, SchedulerConfig):
            raise TypeError(f"scheduler_config can't be {show(scheduler_config)}")
        if scheduler_config is None:
            scheduler_config = SchedulerConfig(limits.max_num_batched_tokens, limits.max_num_seqs)
        enable_caching = to_bool("enable_caching", enable_caching)
        max_model_len = to_int("max_model_len", max_model_len, lowest=1)
        limits.require(
            max_model_len=max_model_len,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            num_blocks=kv_cache_config.num_blocks,
        )
        self._limits: ExecutorLimits = limits
        self._require_tokens("the scheduler's stop_token_ids", scheduler_config.stop_token_ids)
        manager = KVCacheManager(
            kv_cache_config,
            max_model_len,
            enable_caching=enable_caching,
            max_in_flight_tokens=scheduler_config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(manager, scheduler_config)
        self._executor = executor
        self._hasher = BlockHasher(hash_algorithm, manager.hash_block_size) if enable_caching else None
        self._num_cached_tokens: dict[str, int] = {}  # of requests that have been admitted and are unfinished
        # Ids that no caller will think of, nor another engine in the same process.
        self._id_prefix = secrets.token_hex(_PREFIX_BYTES)
        self._num_ids = 0
        self._is_computing = False

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling_params: SamplingParams | None = None,
        stop_token_ids: Iterable[int] = (),
        request_id: str | None = None,
    ) -> str:
        """Queues a prompt and returns its request id. O(prompt tokens).

        Args:
            prompt_token_ids: at least one.
            max_tokens: to generate at most.
            sampling_params: None for the most likely tokens.
            stop_token_ids: the first of them ends the request, and belongs to its tokens.
            request_id: unique among the unfinished requests; None for one that is made up.

        Raises:
            TypeError: an argument of the wrong type.
            InvalidArgumentError: a token outside the vocabulary; a value out of its range; see
                ``Scheduler.add_request``. After an error nothing has changed.
        """
        own_stop_token_ids = self._read_stop_token_ids(stop_token_ids)
        request = self._make_request(prompt_token_ids, max_tokens, sampling_params, request_id)
        self.scheduler.add_request(request, own_stop_token_ids)
        return request.request_id

    def _make_request(
        self, prompt: Any, max_tokens: int, sampling_params: SamplingParams | None, request_id: str | None
    ) -> Request:
        """A request that isn't queued yet. After this call no code of the caller's runs any more."""
        # One token more than there can be, so that an iterator without an end has one here.
        tokens = to_token_ids(_first(prompt, self.scheduler.max_model_len + 1), Request.are_token_ids, None, None)
        self._require_tokens("the prompt", tokens)
        if request_id is not None:
            request_id = to_text("request_id", request_id)
            if len(request_id) > MAX_REQUEST_ID_LENGTH:
                raise InvalidArgumentError(
                    f"request_id has {len(request_id)} characters; {MAX_REQUEST_ID_LENGTH} is the most"
                )
        return Request(
            self._next_id() if request_id is None else request_id,
            tokens,
            self._hasher,
            max_tokens=max_tokens,
            sampling_params=sampling_params,
        )

    def _next_id(self) -> str:
        while True:
            request_id = f"{self._id_prefix}-{self._num_ids}"
            self._num_ids += 1
            if request_id not in self.scheduler.requests:
                return request_id

    def _read_stop_token_ids(self, token_ids: Any) -> frozenset[int]:
        tokens = to_token_ids(_first(token_ids, self._limits.vocab_size + 1), Request.are_token_ids, None, None)
        if len(tokens) > self._limits.vocab_size:
            raise InvalidArgumentError(
                f"more stop_token_ids than the {self._limits.vocab_size} tokens of the vocabulary"
            )
        self._require_tokens("stop_token_ids", tokens)
        return frozenset(tokens)

    def _require_tokens(self, name: str, token_ids: Collection[int]) -> None:
        """Accepts plain ints of the vocabulary."""
        unknown = self._limits.find_unknown_token(token_ids)
        if unknown is not None:
            raise InvalidArgumentError(f"{name}: token {show(unknown)}, in a vocabulary of {self._limits.vocab_size}")

    def step(self) -> list[RequestOutput]:
        """Computes one step; the new tokens of each request that got one, and why a request could not be computed.

        After any exception, of the executor or by Ctrl-C, the step is withdrawn: the next call computes it again,
        unless ``scheduler.finish_requests`` ends its requests before. Whether the executor is of use then, it says
        itself. Where Ctrl-C comes after the tokens were taken, the next call returns them, also when all requests have
        finished.

        Raises:
            EngineStateError: a step is being computed; that one goes on.
        """
        if self._is_computing:
            raise EngineStateError("a step is being computed: steps come one after the other")
        output = None
        try:
            self._is_computing = True
            if self.scheduler.steps_under_way:  # Ctrl-C came while a step that had failed was being withdrawn
                self.scheduler.withdraw()
            output = self.scheduler.schedule()
            if not output.num_scheduled_tokens and self.scheduler.has_unfinished_requests():
                raise RuntimeError(f"step {output.step} has no tokens, but there are requests that wait")
            self._note_cached_tokens(output)
            result = self._executor.execute(output)
            self.scheduler.take_tokens(output, result.tokens, result.errors)
            self._add_cached_tokens()
        except BaseException:
            if self.scheduler.steps_under_way:
                self.scheduler.withdraw()
            elif output is not None and not output.num_scheduled_tokens:
                self.scheduler.withdraw(output)
            raise
        finally:
            self._is_computing = False
        # Nothing is called from here to the caller, so that no signal comes in between.
        outputs = self.scheduler.outputs
        self.scheduler.outputs = []
        return outputs

    def _add_cached_tokens(self) -> None:
        """Says it in the outputs. May be interrupted, and repeated."""
        for output in self.scheduler.outputs:
            num_cached_tokens = self._num_cached_tokens.get(output.request_id)
            if num_cached_tokens is not None:
                output.num_cached_tokens = num_cached_tokens
                if output.finish_reason is not None:
                    self._num_cached_tokens.pop(output.request_id, None)

    def _note_cached_tokens(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:  # those that were aborted: no other output tells of them
            self._num_cached_tokens.pop(request_id, None)
        for new in output.scheduled_new_requests:
            self._num_cached_tokens[new.request_id] = new.num_computed_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling_params: SamplingParams | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> list[list[int]]:
        """The generated tokens of each prompt. Nothing else may be queued.

        Raises:
            InvalidArgumentError: other requests are unfinished, or see ``add_request``.
            RequestFailedError: prompts could not be computed; the others have been, to their ends. After this and any
                other exception nothing is queued.
        """
        own_stop_token_ids = self._read_stop_token_ids(stop_token_ids)
        requests = [self._make_request(prompt, max_tokens, sampling_params, None) for prompt in prompts]
        if self.scheduler.has_unfinished_requests():
            raise InvalidArgumentError(f"{len(self.scheduler.requests)} requests are unfinished")
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        errors: dict[str, str] = {}
        try:
            for request in requests:
                self.scheduler.add_request(request, own_stop_token_ids)
            while self.scheduler.has_unfinished_requests():
                for output in self.step():
                    if output.request_id not in tokens:
                        continue  # of a step before this call, which was interrupted
                    tokens[output.request_id] += output.new_token_ids
                    if output.error is not None:
                        errors[output.request_id] = output.error
        except BaseException:
            self.scheduler.finish_requests(None)
            raise
        if errors:
            number_of = {request_id: number for number, request_id in enumerate(tokens)}
            raise RequestFailedError(
                {number_of[request_id]: error for request_id, error in errors.items()}, list(tokens.values())
            )
        return list(tokens.values())

    def close(self) -> None:
        """Ends all requests and closes the executor."""
        self.scheduler.finish_requests(None)
        self._executor.close()


def _first(token_ids: Any, most: int) -> Any:
    """What ``to_token_ids`` takes; of an iterable that may not end, the first tokens."""
    is_finite = type(token_ids) is list or hasattr(token_ids, "tolist")
    is_refused = isinstance(token_ids, (str, Mapping)) or not hasattr(token_ids, "__iter__")
    return token_ids if is_finite or is_refused else list(islice(token_ids, most))
