"""Steps that are under way: scheduled, and their tokens not known yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpool.request import Request


class StepUnderWay(NamedTuple):
    """What the scheduler has to remember of a step: the message to the workers may be anywhere by now.

    Attributes:
        number: of the step.
        requests: those that take part.
        num_tokens: per request, tokens to compute.
        is_sampled: per request, whether the step ends with its last known token, so that the next one is sampled.
    """

    number: int
    requests: list[Request]
    num_tokens: list[int]
    is_sampled: list[bool]


def read_sampled_tokens(
    step: StepUnderWay, unfinished: Mapping[str, Request], sampled_token_ids: Mapping[str, Iterable[int]]
) -> list[list[int] | None]:
    """Per request its tokens as ints, or None; nothing is changed. O(requests of the step).

    None for a request that isn't sampled, and for one that finished since the step was scheduled, whether tokens came
    for it or not, also when another request has taken its id.

    Raises:
        InvalidArgumentError: no token for a request that is sampled; tokens for one that isn't, or isn't in the step.
        TypeError: a token is no int.
    """
    tokens: list[list[int] | None] = []
    num_used = 0
    for request, is_sampled in zip(step.requests, step.is_sampled):
        request_id = request.request_id
        given = sampled_token_ids.get(request_id)
        token_ids = None
        if given is not None:
            num_used += 1
            token_ids = [index(token_id) for token_id in given]
        if unfinished.get(request_id) is not request:
            token_ids = None
        elif is_sampled and not token_ids:
            raise InvalidArgumentError(f"no sampled token for request {request_id!r}")
        elif token_ids and not is_sampled:
            raise InvalidArgumentError(f"sampled tokens for request {request_id!r}, whose prefill isn't complete")
        tokens.append(token_ids or None)
    if num_used < len(sampled_token_ids):
        unknown = sampled_token_ids.keys() - {request.request_id for request in step.requests}
        raise InvalidArgumentError(f"sampled tokens for requests that are not in the step: {sorted(unknown)}")
    return tokens
