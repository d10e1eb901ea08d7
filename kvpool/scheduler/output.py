"""What the scheduler tells workers in a step, and what it tells the caller after one.

Plain msgspec structs of strings, ints and lists: ``msgspec.msgpack.encode`` and ``Decoder(SchedulerOutput)`` take them
as they are, and nothing has to be pickled. Every list is made for the message: no list of the scheduler or the cache
manager is shared, so a worker in the same process may keep and extend what it gets.

A worker keeps one state per request, from NewRequestData until the id appears in ``finished_request_ids``, and applies
a message in this order:

1. forget ``finished_request_ids`` (an id may come back as a new request in the same message);
2. zero ``new_block_ids_to_zero``, then copy the blocks of ``block_copies``;
3. make a state for each of ``scheduled_new_requests``;
4. for each of ``scheduled_cached_requests``: extend the block table of a request that ran before, replace it where
   ``resumed`` is true; write ``new_token_ids`` at their positions;
5. compute ``num_scheduled_tokens`` tokens of each request from position ``num_computed_tokens`` on, and sample for
   ``sampled_request_ids``.

Preempted requests keep their state except for the blocks, which belong to others from then on.

A worker that could not execute a message, or only a part of it, goes on with the next one, provided that the scheduler
has withdrawn the step: that message repeats what matters, and nothing in it relies on the withdrawn one.
"""

from __future__ import annotations

import msgspec

from kvpool.requests.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]
"""One list of block ids per KV cache group, in token order."""


class NewRequestData(msgspec.Struct, gc=False):
    """A request that workers see for the first time (vLLM: the class of that name).

    Attributes:
        request_id: unique among the requests that aren't finished.
        prompt_token_ids: all of the prompt, also what the prefix cache holds.
        block_ids: the whole block table, per KV cache group; 0 is the null block.
        num_computed_tokens: leading tokens whose keys and values are in these blocks already: the prefix hit.
        lora_name: adapter to compute with, None for the base model.
        sampling_params: how to choose tokens, None for the most likely ones.
    """

    request_id: str
    prompt_token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int
    lora_name: str | None = None
    sampling_params: SamplingParams | None = None


class CachedRequestData(msgspec.Struct, gc=False):
    """What changed for requests that workers know, as parallel lists (vLLM: the class of that name).

    Attributes:
        request_ids: those that were running first, then the resumed ones.
        resumed: whether the request comes back from a preemption or a withdrawn step, and ``new_block_ids`` replaces
            its block table.
        new_block_ids: per KV cache group, to append to the block table (or to replace it); None: nothing new.
        num_computed_tokens: tokens computed before this step; the next position to compute.
        num_output_tokens: tokens generated before this step.
        new_token_ids: generated tokens among those to compute now, which workers may not have seen: the first is the
            one at position ``max(num_computed_tokens, number of prompt tokens)``.
    """

    request_ids: list[str]
    resumed: list[bool]
    new_block_ids: list[BlockIds | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    new_token_ids: list[list[int]]

    @property
    def num_requests(self) -> int:
        """Number of requests in the lists."""
        return len(self.request_ids)


class SchedulerOutput(msgspec.Struct, gc=False):
    """One step (vLLM: the class of that name).

    Attributes:
        step: number of the step, from 1; ``update_from_output`` takes steps in this order.
        scheduled_new_requests, scheduled_cached_requests: who takes part, and what is new about them.
        num_scheduled_tokens: by request id, in the order of scheduling: who ran before, then who was admitted. All are
            at least 1.
        total_num_scheduled_tokens: their sum, at most ``max_num_batched_tokens``.
        sampled_request_ids: requests whose last known token is computed in this step, so that the next one can be
            sampled; the others are in the middle of their prefill.
        finished_request_ids: finished or aborted since the last step, whether workers knew them or not; also requests
            that a withdrawn step has introduced: they may come as new ones once more.
        preempted_request_ids: preempted since the last step; their blocks are gone. Also requests of a withdrawn step:
            what workers know of their block tables is out of date, and they come back as resumed.
        new_block_ids_to_zero: blocks to zero before use; empty unless the cache needs it (Mamba states).
        block_copies: (source, destination) block ids to copy before the step, copy-on-write of partial blocks.
    """

    step: int
    scheduled_new_requests: list[NewRequestData]
    scheduled_cached_requests: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    sampled_request_ids: list[str]
    finished_request_ids: list[str]
    preempted_request_ids: list[str]
    new_block_ids_to_zero: list[int]
    block_copies: list[tuple[int, int]]


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What an executor has made of a step: for each of ``sampled_request_ids`` either tokens or an error.

    Attributes:
        tokens: the next tokens by request id.
        errors: by request id, the reason why there is no token. The request ends with it; the others go on.
    """

    tokens: dict[str, list[int]]
    errors: dict[str, str] = {}


class RequestOutput(msgspec.Struct, gc=False):
    """What a request got out of a step.

    Attributes:
        request_id: whose.
        new_token_ids: generated tokens, without those after a stop.
        finish_reason: "stop", "length" or "error" when these were the last, else None.
        stop_token_id: the stop token that ended it, which is also the last of ``new_token_ids``.
        error: why it could not be computed, with the finish reason "error".
        num_cached_tokens: prompt tokens that the prefix cache had when the request was first admitted; an engine says
            so, a scheduler doesn't.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
