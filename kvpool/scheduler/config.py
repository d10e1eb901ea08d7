"""What a scheduler may do in one step, and in which order it serves requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpool.common.arguments import show, to_bool, to_int, to_text
from kvpool.errors import InvalidArgumentError

_HIGHEST_COUNT = 2**63 - 1


class SchedulingPolicy(Enum):
    """Order of service; vLLM's names."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # the smallest (priority, arrival_time, request_id) first


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of a ``Scheduler``; vLLM's names where vLLM has them.

    Attributes:
        max_num_batched_tokens: tokens that one step computes at most, over all requests.
        max_num_seqs: requests that run at the same time at most.
        policy: a ``SchedulingPolicy`` or its value.
        enable_chunked_prefill: a prompt may be computed over several steps, as the token budget allows. Without it a
            prompt waits until a step has room for all of it.
        long_prefill_token_threshold: tokens that one request gets in one step at most while there are other requests;
            0: no such limit.
        reserve_full_sequence: a request is admitted only when all tokens it has now fit into the free blocks, not just
            its first part (vLLM: ``scheduler_reserve_full_isl``).
        stop_token_ids: tokens that end any request, e.g. the end of sequence; ``add_request`` takes more for one.

    Raises:
        TypeError: a limit or a token that is no integer, a policy that is neither.
        InvalidArgumentError: a limit below 1, a negative threshold, an unknown policy.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    policy: SchedulingPolicy | str = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_sequence: bool = True
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, lowest in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("long_prefill_token_threshold", 0)):
            object.__setattr__(self, name, to_int(name, getattr(self, name), lowest, _HIGHEST_COUNT))
        policies = {policy.value: policy for policy in SchedulingPolicy}
        is_policy = isinstance(self.policy, SchedulingPolicy)
        policy = self.policy if is_policy else policies.get(to_text("policy", self.policy))
        if policy is None:
            known = ", ".join(policies)
            raise InvalidArgumentError(f"unknown scheduling policy {show(self.policy)}; there are: {known}")
        object.__setattr__(self, "policy", policy)
        stop_token_ids = frozenset(to_int("a stop token id", token_id) for token_id in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        for name in ("enable_chunked_prefill", "reserve_full_sequence"):
            object.__setattr__(self, name, to_bool(name, getattr(self, name)))
