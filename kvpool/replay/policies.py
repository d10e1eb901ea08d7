"""Bounds on the hit rate of any policy: the unbounded cache, and Belady's optimum for a pool size.

Both take the requests in order of admission (which is their order of arrival) as if one ended before the next began: no
block is pinned and no output takes space, so no policy of the simulator can beat Belady's figure at the same size.

Accesses are grouped into segments: runs of blocks of one trace block that are always accessed together (nearly always
all blocks of a trace block). A segment's weight is its number of blocks; it can be kept in part, from its front, so the
result is that of Belady's rule block by block. Since a prompt accesses its blocks in order, a block's next use is never
later than that of the blocks behind it in the prefix: the rule drops tails first, and single hits are prefix hits.

The last block of a prompt that ends with a full block is accessed but can never be hit (a prompt's last token is always
computed). It enters the cache then for nothing, so keeping it for such an access has no worth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvpool.errors import InvalidArgumentError
from kvpool.replay.implementations import make_target
from kvpool.replay.simulator import MIN_NUM_BLOCKS, ReplaySettings, simulate
from kvpool.replay.trace import Trace, TraceRequest, block_hashes

DEFAULT_NUM_CURVE_POINTS = 8

_NEVER = math.inf


@dataclass(slots=True)
class PrefixAccesses:
    """The accesses of a trace. weights: blocks of each segment. requests: per request the segments of its full prompt
    blocks, in order. num_countable: how many of these can be hits (all, or all but the last)."""

    weights: list[int] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)
    num_countable: list[int] = field(default_factory=list)

    @classmethod
    def from_trace(cls, trace: Trace, block_size: int) -> PrefixAccesses:
        """Raises TraceError for a block size that doesn't fit. O(blocks of token prompts + trace blocks)."""
        trace.check_block_size(block_size)
        boundaries: dict[Hashable, set[int]] = {}
        for request in trace.requests:
            for key, num_blocks, num_countable in _pieces(request, block_size, trace.trace_block_size):
                ends = boundaries.setdefault(key, set())
                ends.add(num_blocks)
                if num_countable:
                    ends.add(num_countable)
        accesses = cls()
        segments = {key: accesses._add_segments(sorted(ends)) for key, ends in boundaries.items()}
        for request in trace.requests:
            accesses._add_request(request, segments, block_size, trace.trace_block_size)
        return accesses

    def _add_segments(self, ends: list[int]) -> list[tuple[int, int]]:
        """New segments that end at ``ends``, as (end, segment)."""
        segments = []
        start = 0
        for end in ends:
            segments.append((end, len(self.weights)))
            self.weights.append(end - start)
            start = end
        return segments

    def _add_request(
        self,
        request: TraceRequest,
        segments: dict[Hashable, list[tuple[int, int]]],
        block_size: int,
        trace_block_size: int,
    ) -> None:
        accessed: list[int] = []
        countable = 0
        for key, num_blocks, num_countable in _pieces(request, block_size, trace_block_size):
            for end, segment in segments[key]:
                if end <= num_blocks:
                    accessed.append(segment)
                    countable += end <= num_countable
        self.requests.append(accessed)
        self.num_countable.append(countable)


def _pieces(request: TraceRequest, block_size: int, trace_block_size: int) -> Iterator[tuple[Hashable, int, int]]:
    """Per trace block with full blocks in it: its key, its number of full blocks, and how many of them can be hits."""
    num_full = request.num_full_prompt_blocks(block_size)
    max_hits = request.max_hit_blocks(block_size)
    if request.hash_ids is None:
        for position, block_hash in enumerate(block_hashes(request, block_size, trace_block_size)):
            yield block_hash, 1, int(position < max_hits)
        return
    blocks_per_id = trace_block_size // block_size
    for position, hash_id in enumerate(request.hash_ids.tolist()):
        start = position * blocks_per_id
        if start >= num_full:
            return
        num_blocks = min(blocks_per_id, num_full - start)
        yield (hash_id, position), num_blocks, min(num_blocks, max_hits - start)


def unbounded_hit_blocks(accesses: PrefixAccesses, admitted: Sequence[int]) -> int:
    """Blocks hit with a cache that never evicts. admitted: indices of the requests that count. O(accesses)."""
    seen = bytearray(len(accesses.weights))
    num_hits = 0
    for index in admitted:
        segments = accesses.requests[index]
        for segment in segments[: accesses.num_countable[index]]:
            num_hits += accesses.weights[segment] * seen[segment]
        for segment in segments:
            seen[segment] = 1
    return num_hits


def belady_hit_blocks(accesses: PrefixAccesses, admitted: Sequence[int], capacity: int) -> int:
    """Most blocks that any policy can hit with room for ``capacity`` blocks (pool size less the null block).

    Keeps what is used again soonest, and doesn't keep at all what isn't worth its room. O(accesses * log accesses).
    """
    weights = accesses.weights
    next_uses = _next_uses(accesses, admitted)
    kept = [0] * len(weights)
    kept_until = [_NEVER] * len(weights)
    furthest: list[tuple[float, int]] = []  # heap of (-next use, segment); stale unless equal to -kept_until
    num_kept = num_hits = position = 0
    for index in admitted:
        for order, segment in enumerate(accesses.requests[index]):
            if order < accesses.num_countable[index]:
                num_hits += kept[segment]
            next_use = next_uses[position]
            position += 1
            wanted = 0 if next_use == _NEVER else weights[segment]
            num_kept += wanted - kept[segment]
            kept[segment], kept_until[segment] = wanted, next_use
            if wanted:
                heapq.heappush(furthest, (-next_use, segment))
            while num_kept > capacity:
                negated, victim = furthest[0]
                excess = min(kept[victim], num_kept - capacity) if kept_until[victim] == -negated else 0
                kept[victim] -= excess
                num_kept -= excess
                if not excess or not kept[victim]:
                    heapq.heappop(furthest)
    return num_hits


def _next_uses(accesses: PrefixAccesses, admitted: Sequence[int]) -> list[float]:
    """For each access its segment's next access that can be a hit, as a position among all; _NEVER if the next access
    can't be a hit."""
    upcoming: list[float] = [_NEVER] * len(accesses.weights)
    next_uses: list[float] = []
    position = sum(len(accesses.requests[index]) for index in admitted)
    for index in reversed(admitted):
        num_countable = accesses.num_countable[index]
        segments = accesses.requests[index]
        for order in range(len(segments) - 1, -1, -1):
            position -= 1
            segment = segments[order]
            next_uses.append(upcoming[segment])
            upcoming[segment] = position if order < num_countable else _NEVER
    next_uses.reverse()
    return next_uses


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hit rates at one pool size (num_blocks, null block included), over the requests that fit it. rejected: the
    requests that don't."""

    num_blocks: int
    hit_rate: float
    belady_hit_rate: float
    unbounded_hit_rate: float
    rejected: int


def default_curve_sizes(trace: Trace, block_size: int, num_points: int = DEFAULT_NUM_CURVE_POINTS) -> list[int]:
    """Pool sizes evenly spaced by ratio, from the smallest that rejects no request to one that holds every block of
    the trace's prompts and its largest request beside them."""
    smallest = max(MIN_NUM_BLOCKS, trace.max_blocks_needed(block_size) + 1)
    largest = smallest + sum(PrefixAccesses.from_trace(trace, block_size).weights)
    ratio = largest / smallest
    return sorted({round(smallest * ratio ** (step / (num_points - 1))) for step in range(num_points)})


def compute_curve(
    trace: Trace,
    implementation: str,
    settings: ReplaySettings,
    sizes: Sequence[int],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[CurvePoint]:
    """Replays the trace at each pool size and sets the bounds beside it. ``settings.num_blocks`` is not used.

    on_progress: called now and then with the number of points done and of requests of the current one.
    """
    if any(size < MIN_NUM_BLOCKS for size in sizes):
        raise InvalidArgumentError(f"a pool needs at least {MIN_NUM_BLOCKS} blocks, not {min(sizes)}")
    accesses = PrefixAccesses.from_trace(trace, settings.block_size)
    points = []
    for num_done, size in enumerate(sizes):

        def report_requests(num_requests: int, num_done: int = num_done) -> None:
            if on_progress is not None:
                on_progress(num_done, num_requests)

        points.append(
            _compute_point(trace, accesses, implementation, replace(settings, num_blocks=size), report_requests)
        )
    return points


def _compute_point(
    trace: Trace,
    accesses: PrefixAccesses,
    implementation: str,
    settings: ReplaySettings,
    on_progress: Callable[[int], None],
) -> CurvePoint:
    block_size, capacity = settings.block_size, settings.num_usable_blocks
    target = make_target(implementation, settings.num_blocks, block_size, settings.over)
    result = simulate(trace, target, settings, on_progress)
    admitted = [
        index for index, request in enumerate(trace.requests) if request.num_blocks_needed(block_size) <= capacity
    ]

    def rate(num_hits: int) -> float:
        return num_hits * block_size / result.prompt_tokens if result.prompt_tokens else 0.0

    return CurvePoint(
        settings.num_blocks,
        result.hit_rate,
        rate(belady_hit_blocks(accesses, admitted, capacity)),
        rate(unbounded_hit_blocks(accesses, admitted)),
        result.rejected,
    )
