"""Steps that are under way: scheduled, and their tokens not known yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvpool.common.arguments import to_int
from kvpool.errors import InvalidArgumentError
from kvpool.requests.token_ids import MAX_TOKEN_ID

if TYPE_CHECKING:
    from kvpool.backend import Request
    from kvpool.requests.status import RequestStatus


class Admission(NamedTuple):
    """A request that a step lets in, as it was before.

    Attributes:
        request: the first of the waiting ones.
        status: WAITING or PREEMPTED.
        num_hit_tokens: tokens of its prefix hit.
        num_preemptions: before the step; if it has more by now, it was preempted since.
        is_introduction: whether the step tells workers of it as new.
    """

    request: Request
    status: RequestStatus
    num_hit_tokens: int
    num_preemptions: int
    is_introduction: bool


@dataclass
class News:
    """What workers have not been told yet.

    Attributes:
        finished_request_ids: finished since the last step.
        preempted_request_ids: preempted since the last step, or what workers know of their blocks is out of date.
    """

    finished_request_ids: list[str] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)

    def joined_with(self, later: News) -> News:
        """Both, each id once."""
        return News(
            list(dict.fromkeys(self.finished_request_ids + later.finished_request_ids)),
            list(dict.fromkeys(self.preempted_request_ids + later.preempted_request_ids)),
        )


@dataclass(slots=True, eq=False)
class StepUnderWay:
    """What the scheduler has to remember of a step: the message to the workers may be anywhere by now, and the step may
    have to be taken back.

    Attributes:
        counts: ``Counts.of_steps`` before the step.
        number: of the step.
        requests: those that take part.
        num_tokens: per request, tokens to compute.
        num_computed_tokens: per request, those before the step; None while the step is being put together.
        is_sampled: per request, whether the step ends with its last known token, so that the next one is sampled.
        admitted: those of the requests that did not run before, in order.
        touched: running requests that are getting blocks now.
        resent_ids, introduced_ids: requests whose whole block table the step has told, and those that it has told as
            new, after a step before it was taken back.
        news: what the step has told workers; None while it has not been taken.
        copied_block_ids: blocks that are copies of others once the step has run.
        abandoned_block_ids: blocks of requests that left meanwhile, which can be hit once the step has run.
    """

    counts: tuple[int, ...]
    number: int = 0
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] | None = None
    is_sampled: list[bool] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    touched: Sequence[Request] = ()
    resent_ids: list[str] = field(default_factory=list)
    introduced_ids: list[str] = field(default_factory=list)
    news: News | None = None
    copied_block_ids: list[int] = field(default_factory=list)
    abandoned_block_ids: list[int] = field(default_factory=list)


def read_sampled_tokens(
    step: StepUnderWay,
    unfinished: Mapping[str, Request],
    sampled_token_ids: Mapping[str, Iterable[int]],
    errors: Mapping[str, str],
) -> list[list[int] | None]:
    """Per request its tokens as ints, or None; nothing is changed. O(requests of the step).

    None for a request that isn't sampled or has an error, and for one that finished since the step was scheduled,
    whether tokens came for it or not, also when another request has taken its id.

    Raises:
        InvalidArgumentError: no token for a request that is sampled; tokens for one that isn't, or has an error; tokens
            or an error for one that isn't in the step; a token below 0 or above ``MAX_TOKEN_ID``.
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
            token_ids = list(given)
            if not request.are_token_ids(token_ids):
                token_ids = [to_int("a sampled token", token_id, 0, MAX_TOKEN_ID) for token_id in token_ids]
        if unfinished.get(request_id) is not request:
            token_ids = None
        elif errors and request_id in errors:
            if token_ids:
                raise InvalidArgumentError(f"sampled tokens and an error for request {request_id!r}")
        elif is_sampled and not token_ids:
            raise InvalidArgumentError(f"no sampled token for request {request_id!r}")
        elif token_ids and not is_sampled:
            raise InvalidArgumentError(f"sampled tokens for request {request_id!r}, whose prefill isn't complete")
        tokens.append(token_ids or None)
    if num_used < len(sampled_token_ids) or errors:
        unknown = {*sampled_token_ids, *errors} - {request.request_id for request in step.requests}
        if unknown:
            raise InvalidArgumentError(f"tokens or errors for requests that are not in the step: {sorted(unknown)}")
    return tokens
