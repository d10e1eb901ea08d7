"""What goes over the wire between a scheduler and its workers: tagged msgspec structs in msgpack, nothing is pickled.

A worker connects and sends a ``WorkerInfo``. Once all ranks are there and agree it gets a ``Welcome``, else a
``Refusal``. Then for each ``StepMessage`` it sends a ``StepAnswer``. When something fails, at any time, it sends a
``WorkerFailure`` and ends. ``Shutdown`` ends it as well. After an interrupted connection it sends a ``WorkerReturn``. A
message of no bytes means nothing: it is sent to find out whether there is a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvpool._version import __version__
from kvpool.cache.spec import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.scheduler.output import SchedulerOutput

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of a step."""

MAX_REPORT_BYTES = 2**17
"""Of what a worker says of itself, and of the failure that ends it."""

_BYTES_PER_ANSWER = 2**16
_BYTES_PER_REQUEST = 2**11  # of its tokens, or its error, and its digest; without its id
_MAX_NUMBER = 2**31 - 1


class CacheGroupInfo(msgspec.Struct, frozen=True):
    """A KV cache group, see ``KVCacheGroupSpec``.

    Attributes:
        layer_names: of the model.
        block_size: tokens.
        num_kv_heads, head_size, dtype: of each rank's share.
        sliding_window: tokens that a token sees; None for all before it.
    """

    layer_names: list[str]
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None = None

    @classmethod
    def from_spec(cls, group: KVCacheGroupSpec) -> CacheGroupInfo:
        """InvalidArgumentError for what is neither full nor sliding-window attention, and for padded blocks."""
        spec = group.kv_cache_spec
        is_window = type(spec) is SlidingWindowSpec
        is_known = is_window or (type(spec) is FullAttentionSpec and spec.attention_chunk_size is None)
        if not is_known or not isinstance(spec, AttentionSpec):
            raise InvalidArgumentError(f"workers can't report a KV cache group of {spec}")
        info = cls(
            list(group.layer_names),
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
            spec.dtype,
            spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        )
        if info.to_spec().kv_cache_spec != spec:
            raise InvalidArgumentError(f"workers can't report a KV cache group of {spec}")
        return info

    def to_spec(self) -> KVCacheGroupSpec:
        """The group that was reported."""
        if self.sliding_window is None:
            full = FullAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=self.dtype,
            )
            return KVCacheGroupSpec(list(self.layer_names), full)
        window = SlidingWindowSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
        )
        return KVCacheGroupSpec(list(self.layer_names), window)


class WorkerInfo(msgspec.Struct, frozen=True, tag="info"):
    """What a worker reports of itself. All ranks have to report the same, except for their rank.

    Attributes:
        rank, world_size: which worker this is, and of how many.
        num_blocks: blocks of its KV cache, the null block among them.
        block_size: tokens of a block.
        vocab_size: of the model.
        max_model_len, max_num_seqs, max_num_batched_tokens: the most that it has room for: tokens of a sequence,
            requests, and tokens of a step. A scheduler's limits may be lower.
        kv_cache_groups: the layers that keep keys and values.
        version: of kvpool.
    """

    rank: int
    world_size: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_groups: list[CacheGroupInfo]
    version: str = __version__

    @property
    def num_kv_cache_groups(self) -> int:
        return len(self.kv_cache_groups)

    def kv_cache_config(self) -> KVCacheConfig:
        """For the cache manager of the scheduler."""
        return KVCacheConfig(self.num_blocks, [group.to_spec() for group in self.kv_cache_groups])


class WorkerReturn(msgspec.Struct, frozen=True, tag="return"):
    """A worker that was welcomed has a new connection; what was under way on the old one may be lost.

    Attributes:
        sequence: of the step that it executed last. Its answer comes once more behind this.
    """

    sequence: int


class StepAnswer(msgspec.Struct, frozen=True, gc=False, tag="answer"):
    """A step has been executed.

    Attributes:
        sequence: of the ``StepMessage``.
        block_digests: for each of ``num_scheduled_tokens``, in that order, a digest of the request's block tables.
        tokens: by request id; of rank 0 only, None from the others.
        errors: by request id, why there are no tokens for it; of rank 0 only.
    """

    sequence: int
    block_digests: list[int]
    tokens: dict[str, list[int]] | None = None
    errors: dict[str, str] = {}


class WorkerFailure(msgspec.Struct, frozen=True, tag="failure"):
    """A worker ends by an exception.

    Attributes:
        rank: of the worker.
        text: type and text of the exception, in one line.
        traceback: of the exception.
    """

    rank: int
    text: str
    traceback: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All ranks are there, and agree."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The worker is not taken, and has to end."""

    reason: str


class StepMessage(msgspec.Struct, frozen=True, tag="step"):
    """A step to execute.

    Attributes:
        sequence: counts the messages of a ``Broadcaster`` from 1, whatever numbers schedulers give to their steps.
        output: the step.
    """

    sequence: int
    output: SchedulerOutput


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The worker has to end."""


class MalformedMessageError(KvpoolError, ValueError):
    """What came can't be read as a message."""


Message = TypeVar("Message")

FromWorker = WorkerInfo | WorkerReturn | StepAnswer | WorkerFailure
ToWorker = Welcome | Refusal | StepMessage | Shutdown


def decode(decoder: msgspec.msgpack.Decoder[Message], payload: bytes) -> Message:
    """What was sent.

    Raises:
        MalformedMessageError: it can't be read as one.
    """
    try:
        return decoder.decode(payload)
    # Recursion by nesting, memory by a length that is claimed.
    except (msgspec.MsgspecError, RecursionError, MemoryError, ValueError) as error:
        raise MalformedMessageError(str(error)[:200]) from None


def max_answer_bytes(max_num_seqs: int, step_bytes: int) -> int:
    """The largest answer to a step that makes sense: the ids of the step's requests come back with it.

    Args:
        max_num_seqs: requests at a time.
        step_bytes: of the step's message.
    """
    return _BYTES_PER_ANSWER + max_num_seqs * _BYTES_PER_REQUEST + step_bytes


def find_faults(info: WorkerInfo) -> list[str]:
    """What can't be true of a report, whoever sent it; empty if it makes sense."""
    sizes = ("num_blocks", "block_size", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    faults = [
        f"{name} is {getattr(info, name)}"
        for name in sizes
        if not (2 if name == "num_blocks" else 1) <= getattr(info, name) <= _MAX_NUMBER
    ]
    try:
        for group in info.kv_cache_groups:
            group.to_spec()
    except KvpoolError as error:
        faults.append(f"kv_cache_groups: {error}")
    return faults


def find_disagreements(infos: Sequence[WorkerInfo]) -> list[str]:
    """Fields in which workers differ, each with the value of every rank; empty if they agree."""
    lines = []
    for name in WorkerInfo.__struct_fields__:
        values = [getattr(info, name) for info in infos]
        if name != "rank" and any(value != values[0] for value in values):
            told = ", ".join(f"rank {info.rank}: {value!r}" for info, value in zip(infos, values))
            lines.append(f"{name} ({told})")
    return lines
