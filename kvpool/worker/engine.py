"""An engine in small: scheduler and cache manager, and whatever executes their steps, as one loop.

The executor is a ``ModelRunner`` in this process or a ``Broadcaster`` with a worker on each rank; the loop is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvpool.block_hasher import BlockHasher
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.kv_cache_manager import KVCacheManager
from kvpool.kv_cache_spec import KVCacheConfig
from kvpool.request import Request
from kvpool.sampling_params import SamplingParams
from kvpool.scheduler import RequestOutput, Scheduler, SchedulerConfig, SchedulerOutput, StepResult


class RequestFailedError(KvpoolError, RuntimeError):
    """A request could not be computed; the message has the reason."""


class Executor(Protocol):
    """Computes steps."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """The next token of each of ``sampled_request_ids``, or why there is none."""

    def close(self) -> None:
        """Gives back what it holds; safe to call again."""


class Engine:
    """Generates tokens for requests, as many at a time as blocks and budget allow. For one thread.

    Args:
        kv_cache_config: the blocks, the same as the executor's.
        executor: computes the steps; closed with the engine.
        max_model_len: longest sequence, tokens.
        scheduler_config: limits of a step.
        enable_caching: keep and share prefixes.
        hash_algorithm: see ``BlockHasher``.

    Attributes:
        scheduler: with the manager and the pool below it.
        num_hit_tokens: prompt tokens by request id that the prefix cache had when the request was first admitted.
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
        scheduler_config = scheduler_config or SchedulerConfig()
        manager = KVCacheManager(
            kv_cache_config,
            max_model_len,
            enable_caching=enable_caching,
            max_in_flight_tokens=scheduler_config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(manager, scheduler_config)
        self.num_hit_tokens: dict[str, int] = {}
        self._executor = executor
        self._hasher = BlockHasher(hash_algorithm, manager.hash_block_size) if enable_caching else None
        self._num_requests = 0

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
            request_id: a number of its own if None.

        Raises:
            InvalidArgumentError: see ``Scheduler.add_request``.
        """
        if request_id is None:
            request_id = str(self._num_requests)
        request = Request(
            request_id, prompt_token_ids, self._hasher, max_tokens=max_tokens, sampling_params=sampling_params
        )
        self.scheduler.add_request(request, stop_token_ids)
        self._num_requests += 1
        return request_id

    def step(self) -> list[RequestOutput]:
        """Computes one step; the new tokens of each request that got one, and why a request could not be computed.

        After any exception, of the executor or by Ctrl-C, the step is withdrawn: the next call computes it again,
        unless ``scheduler.finish_requests`` ends its requests before. Whether the executor is of use then, it says
        itself.
        """
        output = None
        try:
            output = self.scheduler.schedule()
            if not output.num_scheduled_tokens and self.scheduler.has_unfinished_requests():
                raise RuntimeError(f"step {output.step} has no tokens, but there are requests that wait")
            for new in output.scheduled_new_requests:
                self.num_hit_tokens[new.request_id] = new.num_computed_tokens
            result = self._executor.execute(output)
            return self.scheduler.update_from_output(output, result.tokens, result.errors)
        except BaseException:
            if self.scheduler.steps_under_way:
                self.scheduler.withdraw()
            elif output is not None and not output.num_scheduled_tokens:
                self.scheduler.withdraw(output)
            raise

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
            RequestFailedError: a prompt could not be computed. After this and any other exception nothing is queued.
        """
        if self.scheduler.has_unfinished_requests():
            raise InvalidArgumentError(f"{len(self.scheduler.requests)} requests are unfinished")
        tokens: dict[str, list[int]] = {}
        try:
            for prompt in prompts:
                request_id = self.add_request(
                    prompt, max_tokens=max_tokens, sampling_params=sampling_params, stop_token_ids=stop_token_ids
                )
                tokens[request_id] = []
            while self.scheduler.has_unfinished_requests():
                for output in self.step():
                    if output.error is not None:
                        raise RequestFailedError(f"request {output.request_id!r}: {output.error}")
                    tokens[output.request_id] += output.new_token_ids
        except BaseException:
            self.scheduler.finish_requests(None)
            raise
        return list(tokens.values())

    def close(self) -> None:
        """Ends all requests and closes the executor."""
        self.scheduler.finish_requests(None)
        self._executor.close()
