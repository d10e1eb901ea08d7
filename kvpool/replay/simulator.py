"""Discrete-event simulation of a serving engine's use of its KV cache.

A request needs blocks for prompt and output at admission, cache hits included. Admission is first come first served:
the request at the head of the queue holds up the rest until finished requests have freed enough. Its full prompt
blocks are cached at admission. It finishes after

    uncached tokens / prefill rate + output tokens * time per output token

and frees its blocks, the last one first. At one instant all finishes come first (ties in order of admission), then the
queue is served, then requests arrive (ties in file order). A request larger than the pool is rejected.

Admission needs as many free blocks as it takes from the free list: the new ones and those hits that no request uses.
The prefix of a waiting request is looked up once when it gets to the head and once after each finish. Time depends on
hits alone, never on the clock: implementations that agree run through identical events.
"""

from __future__ import annotations

import gc
import heapq
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError, KvpoolError
from kvpool.replay.implementations import LAYERS
from kvpool.replay.target import ReplayTarget
from kvpool.replay.trace import Trace, TraceRequest, block_hashes

DEFAULT_PREFILL_RATE = 20_000.0
DEFAULT_TPOT_MS = 25.0
MIN_NUM_BLOCKS = 2
MIN_PREFILL_RATE = 1e-6
MAX_TPOT_MS = 1e12
"""With these, and the limits of a trace, no time is infinite."""

_PROGRESS_INTERVAL = 32


class ReplayMismatchError(KvpoolError):
    """Two implementations gave a request different hits or block ids."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """num_blocks: pool size, null block included. block_size: tokens. prefill_rate: tokens/s. tpot_ms: ms per output
    token. over: what is driven, one of LAYERS. Raises InvalidArgumentError for values out of range."""

    num_blocks: int
    block_size: int = 16
    prefill_rate: float = DEFAULT_PREFILL_RATE
    tpot_ms: float = DEFAULT_TPOT_MS
    over: str = LAYERS[0]

    def __post_init__(self) -> None:
        if self.num_blocks < MIN_NUM_BLOCKS:
            raise InvalidArgumentError(f"a pool needs at least {MIN_NUM_BLOCKS} blocks, not {show(self.num_blocks)}")
        if self.block_size < 1:
            raise InvalidArgumentError(f"block size must be at least 1, not {show(self.block_size)}")
        if not (math.isfinite(self.prefill_rate) and self.prefill_rate > 0):
            raise InvalidArgumentError(f"prefill rate must be finite and above 0, not {self.prefill_rate}")
        if self.prefill_rate < MIN_PREFILL_RATE:
            raise InvalidArgumentError(f"prefill rate must be at least {MIN_PREFILL_RATE}, not {self.prefill_rate}")
        if not (math.isfinite(self.tpot_ms) and self.tpot_ms >= 0):
            raise InvalidArgumentError(f"time per output token must be finite and not negative, not {self.tpot_ms}")
        if self.tpot_ms > MAX_TPOT_MS:
            raise InvalidArgumentError(f"time per output token must be at most {MAX_TPOT_MS:g} ms, not {self.tpot_ms}")
        if self.over not in LAYERS:
            raise InvalidArgumentError(f"a replay runs over {' or '.join(LAYERS)}, not {show(self.over)}")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return self.num_blocks - 1

    def service_ms(self, request: TraceRequest, num_hits: int) -> float:
        """Time from admission to finish, ms."""
        num_uncached_tokens = request.input_length - num_hits * self.block_size
        return 1000.0 * num_uncached_tokens / self.prefill_rate + request.output_length * self.tpot_ms


@dataclass(slots=True)
class Timeline:
    """State after each instant at which something was admitted or freed; the arrays have equal length.

    time_ms; prompt_tokens and hit_tokens: totals of the requests admitted so far; blocks_in_use: null block excluded.
    """

    time_ms: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    hit_tokens: array[int] = field(default_factory=lambda: array("q"))
    blocks_in_use: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class Admissions:
    """What each admitted request got, in order of admission: line in the trace, blocks hit, CRC-32 of its block ids."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    hit_blocks: array[int] = field(default_factory=lambda: array("q"))
    block_id_crcs: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(slots=True)
class ReplayResult:
    """Outcome of one run. Counts of blocks and tokens are of admitted requests.

    manager_ns: time in the manager or pool, ns. prompt_blocks: full blocks of the prompts. allocated_blocks: new
    blocks taken, hits not counted. evicted_blocks: blocks that lost a hash by reuse. rejected: requests larger than the
    pool. queued: requests that had to wait. total_queue_ms: the sum of their waits.
    """

    implementation: str
    manager_ns: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    allocated_blocks: int = 0
    evicted_blocks: int = 0
    peak_blocks_in_use: int = 0
    rejected: int = 0
    queued: int = 0
    total_queue_ms: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)
    admissions: Admissions = field(default_factory=Admissions)

    @property
    def seconds(self) -> float:
        return self.manager_ns / 1e9

    @property
    def ns_per_prompt_block(self) -> float:
        return self.manager_ns / self.prompt_blocks if self.prompt_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_queue_ms(self) -> float:
        """Mean wait of the requests that had to wait; 0 if none had to."""
        return self.total_queue_ms / self.queued if self.queued else 0.0


def simulate(
    trace: Trace, target: ReplayTarget[Any], settings: ReplaySettings, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """Replays ``trace`` over the target's pool, which must be new and of ``settings.num_blocks`` blocks.

    on_progress: called now and then with the number of requests that have arrived. The garbage collector is off
    meanwhile, as in timeit: a collection would be charged to whichever call sets it off. Raises TraceError for a block
    size that doesn't fit the trace. O(blocks of all prompts and outputs).
    """
    trace.check_block_size(settings.block_size)
    if target.num_blocks != settings.num_blocks:
        raise InvalidArgumentError(f"the target's pool has {target.num_blocks} blocks, not {settings.num_blocks}")
    is_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _Simulation(trace, target, settings).run(on_progress)
    finally:
        if is_collecting:
            gc.enable()


class _Simulation:
    def __init__(self, trace: Trace, target: ReplayTarget[Any], settings: ReplaySettings) -> None:
        self._trace = trace
        self._target = target
        self._settings = settings
        self._result = ReplayResult(target.name)
        self._queue: deque[TraceRequest] = deque()
        self._head: Any = None  # the target's form of the request at the head of the queue, once looked up
        self._running: list[tuple[float, int, Any]] = []  # heap of (finish time, order of admission, target's form)

    def run(self, on_progress: Callable[[int], None] | None) -> ReplayResult:
        for index, request in enumerate(self._trace.requests):
            self._finish_until(request.timestamp_ms)
            self._arrive(request)
            if on_progress is not None and index % _PROGRESS_INTERVAL == 0:
                on_progress(index + 1)
        self._finish_until(math.inf)
        self._result.manager_ns = self._target.manager_ns
        self._result.evicted_blocks = self._target.evicted_blocks
        return self._result

    def _finish_until(self, end_ms: float) -> None:
        while self._running and self._running[0][0] <= end_ms:
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._target.free(heapq.heappop(self._running)[2])
            self._serve_queue(now)
            self._record_state(now)

    def _arrive(self, request: TraceRequest) -> None:
        if request.num_blocks_needed(self._settings.block_size) > self._settings.num_usable_blocks:
            self._result.rejected += 1
            return
        # The head has been tried since the last finish, so a newcomer can't change its fate.
        if self._queue or not self._admit(request, request.timestamp_ms):
            self._queue.append(request)
            self._result.queued += 1
        else:
            self._record_state(request.timestamp_ms)

    def _serve_queue(self, now: float) -> None:
        while self._queue and self._admit(self._queue[0], now):
            request = self._queue.popleft()
            self._result.total_queue_ms += now - request.timestamp_ms

    def _admit(self, request: TraceRequest, now: float) -> bool:
        target = self._target
        served = self._head
        if served is None:
            hashes = block_hashes(request, self._settings.block_size, self._trace.trace_block_size)
            served = target.prepare(request, hashes)
        num_hits = target.find_prefix(served)
        if not target.admit(served):
            self._head = served
            return False
        self._head = None
        finish_ms = now + self._settings.service_ms(request, num_hits)
        heapq.heappush(self._running, (finish_ms, len(self._result.admissions.lines), served))
        self._record_admission(request, num_hits, served)
        return True

    def _record_admission(self, request: TraceRequest, num_hits: int, served: Any) -> None:
        result = self._result
        block_ids = self._target.block_ids(served)
        result.prompt_tokens += request.input_length
        result.hit_tokens += num_hits * self._settings.block_size
        result.prompt_blocks += request.num_full_prompt_blocks(self._settings.block_size)
        result.allocated_blocks += len(block_ids) - num_hits
        result.peak_blocks_in_use = max(result.peak_blocks_in_use, self._num_blocks_in_use())
        result.admissions.lines.append(request.line)
        result.admissions.hit_blocks.append(num_hits)
        result.admissions.block_id_crcs.append(zlib.crc32(block_ids.data))

    def _num_blocks_in_use(self) -> int:
        return self._settings.num_usable_blocks - self._target.num_free_blocks()

    def _record_state(self, now: float) -> None:
        timeline = self._result.timeline
        timeline.time_ms.append(now)
        timeline.prompt_tokens.append(self._result.prompt_tokens)
        timeline.hit_tokens.append(self._result.hit_tokens)
        timeline.blocks_in_use.append(self._num_blocks_in_use())


def check_same(results: Sequence[ReplayResult]) -> None:
    """Raises ReplayMismatchError at the first request to which two results gave different hits or block ids."""
    for other in results[1:]:
        _check_pair(results[0], other)


def _check_pair(one: ReplayResult, other: ReplayResult) -> None:
    names = f"{one.implementation} and {other.implementation}"
    mine, theirs = one.admissions, other.admissions
    for index, line in enumerate(mine.lines):
        if index >= len(theirs.lines) or theirs.lines[index] != line:
            raise ReplayMismatchError(f"{names} differ: only one admits line {line} as number {index + 1}")
        if mine.hit_blocks[index] != theirs.hit_blocks[index]:
            hits = f"{mine.hit_blocks[index]} and {theirs.hit_blocks[index]} blocks"
            raise ReplayMismatchError(f"{names} differ at the request of line {line}: hits of {hits}")
        if mine.block_id_crcs[index] != theirs.block_id_crcs[index]:
            raise ReplayMismatchError(f"{names} differ at the request of line {line}: other block ids")
    if len(theirs.lines) > len(mine.lines):
        raise ReplayMismatchError(f"{names} differ: {other.implementation} admits more requests")
