"""The step that is being put together: who takes part with how many tokens, and what workers have to be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.scheduler.output import BlockIds, CachedRequestData, NewRequestData

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.scheduler.in_flight import StepUnderWay


class Step:
    """Collects a step until it becomes a SchedulerOutput. Who is in stays in.

    Attributes:
        token_budget: tokens that may still be scheduled.
        under_way: what is remembered of the step.
        requests: all that take part, in the order of scheduling.
        running, new, resumed: the same, by what they did before.
        resent: those that ran before, and of which workers may not know the block table; they are also in ``resumed``.
        num_scheduled_tokens: by request id, in the order of scheduling.
        has_preempted: whether blocks ran out, so that nobody is admitted.
    """

    __slots__ = (
        "_new_block_ids",
        "has_preempted",
        "new",
        "num_scheduled_tokens",
        "requests",
        "resent",
        "resumed",
        "running",
        "token_budget",
        "under_way",
    )

    def __init__(self, token_budget: int, under_way: StepUnderWay) -> None:
        self.token_budget = token_budget
        self.under_way = under_way
        self.requests = under_way.requests
        self.resent: list[Request] = []
        self.running: list[Request] = []
        self.new: list[Request] = []
        self.resumed: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.has_preempted = False
        self._new_block_ids: dict[str, BlockIds | None] = {}

    def add_running(self, request: Request, num_tokens: int, new_block_ids: BlockIds | None) -> None:
        """A request that ran before goes on; its new blocks, None if it needs none."""
        self.running.append(request)
        self._schedule(request, num_tokens, new_block_ids)

    def add_decoding(self, requests: list[Request], new_block_ids: list[BlockIds | None]) -> None:
        """Requests that ran before go on with one token each."""
        request_ids = [request.request_id for request in requests]
        self.requests += requests
        self.running += requests
        self.num_scheduled_tokens.update(dict.fromkeys(request_ids, 1))
        self._new_block_ids.update(zip(request_ids, new_block_ids))
        self.token_budget -= len(requests)

    def add_resent(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """A request that ran before goes on, of which workers are told the whole block table."""
        self.resent.append(request)
        self.resumed.append(request)
        self._schedule(request, num_tokens, block_ids)

    def add_admitted(self, request: Request, num_tokens: int, block_ids: BlockIds, *, is_new: bool) -> None:
        """A request starts, or starts again; its whole block table."""
        (self.new if is_new else self.resumed).append(request)
        self._schedule(request, num_tokens, block_ids)

    def _schedule(self, request: Request, num_tokens: int, block_ids: BlockIds | None) -> None:
        request_id = request.request_id
        self.requests.append(request)
        self.num_scheduled_tokens[request_id] = num_tokens
        self._new_block_ids[request_id] = block_ids
        self.token_budget -= num_tokens

    def new_request_data(self) -> list[NewRequestData]:
        """What workers have to be told of the requests that are new to them."""
        return [
            NewRequestData(
                request.request_id,
                request.all_token_ids[: request.num_prompt_tokens],
                self._new_block_ids[request.request_id] or (),
                request.num_computed_tokens,
                request.lora_name,
                request.sampling_params,
            )
            for request in self.new
        ]

    def cached_request_data(self) -> CachedRequestData:
        """What workers have to be told of the requests that they know."""
        requests = self.running + self.resumed if self.resumed else self.running
        request_ids = [request.request_id for request in requests]
        return CachedRequestData(
            request_ids,
            [False] * len(self.running) + [True] * len(self.resumed),
            list(map(self._new_block_ids.__getitem__, request_ids)),
            [request.num_computed_tokens for request in requests],
            [request.num_output_tokens for request in requests],
            list(map(self._generated_tokens_to_compute, requests)),
        )

    def _generated_tokens_to_compute(self, request: Request) -> list[int]:
        """Tokens at the scheduled positions behind the prompt."""
        start = request.num_computed_tokens
        end = start + self.num_scheduled_tokens[request.request_id]
        start = max(start, request.num_prompt_tokens)
        if start == end - 1:  # one, as always when it decodes
            return [request.all_token_ids[start]]
        return list(request.all_token_ids[start:end]) if start < end else []
