"""The simulation on traces small enough to work out by hand, the targets, and the bounds of the curve.

Unless a test says otherwise a block has 4 tokens, so has a trace block, the prefill takes 1 ms a token and so does the
output: a request of 8 + 4 tokens without hits runs for 12 ms.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from functools import lru_cache, wraps

import pytest

np = pytest.importorskip("numpy")

from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.replay.implementations import (  # noqa: E402
    LAYERS,
    BlockObjectTarget,
    IdArrayTarget,
    ImplementationError,
    default_implementations,
    make_target,
)
from kvpool.replay.policies import (  # noqa: E402
    PrefixAccesses,
    belady_hit_blocks,
    compute_curve,
    default_curve_sizes,
    unbounded_hit_blocks,
)
from kvpool.replay.simulator import (  # noqa: E402
    ReplayMismatchError,
    ReplayResult,
    ReplaySettings,
    check_same,
    simulate,
)
from kvpool.replay.synthetic import generate_trace  # noqa: E402
from kvpool.replay.target import ReplayTarget  # noqa: E402
from kvpool.replay.trace import Trace, TraceError, TraceRequest, block_hashes  # noqa: E402

IMPLEMENTATIONS = ["reference"] if os.environ.get("KVPOOL_PURE_PYTHON") == "1" else ["native", "reference"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param


@pytest.fixture(params=LAYERS)
def over(request) -> str:
    return request.param


def make_trace(*rows: tuple[float, int, int, list[int]], trace_block_size: int = 4) -> Trace:
    """Rows of (timestamp in ms, input tokens, output tokens, hash ids)."""
    requests = [
        TraceRequest(line, float(time), num_in, num_out, hash_ids=np.array(ids, np.int64))
        for line, (time, num_in, num_out, ids) in enumerate(rows, start=1)
    ]
    return Trace("hand-made", requests, trace_block_size)


def checked(target: ReplayTarget) -> ReplayTarget:
    """The target with the pool's invariants verified after every call that changes it."""
    for name in ("admit", "free"):
        call = getattr(target, name)

        @wraps(call)
        def call_and_check(*arguments, call=call):
            outcome = call(*arguments)
            target.check()
            return outcome

        setattr(target, name, call_and_check)
    return target


def settings_for(num_blocks: int, block_size: int = 4) -> ReplaySettings:
    return ReplaySettings(num_blocks, block_size, prefill_rate=1000, tpot_ms=1)


def run(implementation: str, trace: Trace, num_blocks: int, block_size: int = 4, over: str = LAYERS[0]) -> ReplayResult:
    target = checked(make_target(implementation, num_blocks, block_size, over))
    result = simulate(trace, target, settings_for(num_blocks, block_size))
    assert target.num_free_blocks() == num_blocks - 1
    return result


def crc(*block_ids: int) -> int:
    return zlib.crc32(np.array(block_ids, np.int32))


def test_a_prefix_is_hit_and_shortens_the_prefill(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (20, 9, 3, [1, 2, 3]))
    result = run(implementation, trace, num_blocks=100, over=over)
    assert (result.prompt_tokens, result.hit_tokens, result.hit_rate) == (17, 8, 8 / 17)
    assert (result.prompt_blocks, result.allocated_blocks, result.evicted_blocks) == (4, 4, 0)
    assert (result.peak_blocks_in_use, result.rejected, result.queued, result.mean_queue_ms) == (3, 0, 0, 0.0)
    assert result.admissions.hit_blocks.tolist() == [0, 2]
    timeline = result.timeline
    assert timeline.time_ms.tolist() == [0, 12, 20, 24]  # the second computes 1 token of its 9
    assert timeline.blocks_in_use.tolist() == [3, 0, 3, 0]
    assert timeline.prompt_tokens.tolist() == [8, 8, 17, 17]
    assert timeline.hit_tokens.tolist() == [0, 0, 8, 8]
    assert result.manager_ns > 0 and result.seconds == result.manager_ns / 1e9
    assert result.ns_per_prompt_block == result.manager_ns / 4


def test_a_hit_never_covers_the_whole_prompt(implementation, over):
    trace = make_trace((0, 8, 0, [1, 2]), (20, 8, 0, [1, 2]), (40, 4, 0, [1]), (60, 5, 0, [1, 9]))
    result = run(implementation, trace, num_blocks=100, over=over)
    assert result.admissions.hit_blocks.tolist() == [0, 1, 0, 1]
    assert result.allocated_blocks == 2 + 1 + 1 + 1


def test_blocks_in_use_are_shared_with_requests_that_still_run(implementation, over):
    trace = make_trace((0, 8, 100, [1, 2]), (1, 9, 3, [1, 2, 3]))
    result = run(implementation, trace, num_blocks=100, over=over)
    assert result.hit_tokens == 8 and result.peak_blocks_in_use == 27 + 1


def test_eviction_takes_uncached_blocks_first_then_the_tail_of_the_oldest_prefix(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (20, 4, 4, [9]), (100, 9, 0, [1, 2, 3]))
    result = run(implementation, trace, num_blocks=4, over=over)
    # Blocks 1, 2, 3 are freed as 3 (no hash, to the head), 2, 1. The second request takes 3 and 2, so id 2 is evicted,
    # and frees 2 (no hash, to the head) and 3. The third hits 1 and takes 2 and 3, so id 9 is evicted.
    assert result.admissions.block_id_crcs.tolist() == [crc(1, 2, 3), crc(3, 2), crc(1, 2, 3)]
    assert result.admissions.hit_blocks.tolist() == [0, 0, 1]
    assert (result.evicted_blocks, result.allocated_blocks, result.peak_blocks_in_use) == (2, 7, 3)


def test_the_head_of_the_queue_holds_up_the_rest(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (5, 4, 4, [8]), (6, 1, 1, [9]))
    target = checked(make_target(implementation, 5, 4, over))
    lookups = []
    find_prefix = target.find_prefix

    def find_and_note(served):
        lookups.append(len(getattr(served, "request", served).block_hashes))
        return find_prefix(served)

    target.find_prefix = find_and_note
    result = simulate(trace, target, settings_for(5))
    # At 5 ms one block is free: too few for the second; the third would fit but is behind it.
    assert (result.queued, result.mean_queue_ms) == (2, (7 + 6) / 2)
    assert result.timeline.time_ms.tolist() == [0, 12, 14, 20]
    assert result.timeline.blocks_in_use.tolist() == [3, 3, 2, 0]
    assert result.admissions.lines.tolist() == [1, 2, 3]
    # One lookup on arrival, one when a finish freed something; the third is looked up only when it is at the head.
    assert lookups == [2, 1, 1, 0]


def test_hits_in_the_free_list_count_against_the_free_blocks(implementation, over):
    rows = [(0, 8, 0, [1, 2]), (10, 4, 4, [7]), (12, 9, 3, [1, 2, 3])]
    result = run(implementation, make_trace(*rows), num_blocks=5, over=over)
    # At 12 ms two blocks are free and both are hits: the one new block isn't there. It is at 10 + 4 + 4 ms.
    assert (result.queued, result.mean_queue_ms, result.hit_tokens) == (1, 6.0, 8)
    result = run(implementation, make_trace(*rows), num_blocks=6, over=over)
    assert (result.queued, result.mean_queue_ms, result.hit_tokens) == (0, 0.0, 8)


def test_hits_that_are_in_use_need_no_free_block(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (1, 9, 3, [1, 2, 3]))
    result = run(implementation, trace, num_blocks=5, over=over)
    assert (result.queued, result.hit_tokens, result.peak_blocks_in_use) == (0, 8, 4)


def test_finishes_come_before_arrivals_of_the_same_instant(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (12, 8, 4, [3, 4]))
    result = run(implementation, trace, num_blocks=4, over=over)
    assert (result.queued, result.peak_blocks_in_use) == (0, 3)


def test_ties_of_finishes_are_freed_in_order_of_admission(implementation, over):
    trace = make_trace((0, 4, 4, [1]), (4, 4, 0, [2]), (8, 12, 0, [3, 4, 5]))
    result = run(implementation, trace, num_blocks=4, over=over)
    # Both finish at 8 ms. First 2 (no hash) to the head and 1 to the tail, then 3 to the tail: 2, 1, 3.
    assert result.admissions.block_id_crcs.tolist() == [crc(1, 2), crc(3), crc(2, 1, 3)]


def test_ties_of_arrivals_are_served_in_file_order(implementation, over):
    trace = make_trace((5, 4, 0, [1]), (5, 4, 0, [2]), (5, 8, 0, [1, 3]))
    result = run(implementation, trace, num_blocks=10, over=over)
    assert result.admissions.lines.tolist() == [1, 2, 3]
    assert result.admissions.hit_blocks.tolist() == [0, 0, 1]


def test_the_queue_is_served_after_all_finishes_of_an_instant(implementation, over):
    trace = make_trace((0, 8, 0, [1, 2]), (4, 4, 0, [3]), (5, 12, 0, [4, 5, 6]), (6, 4, 0, [7]))
    result = run(implementation, trace, num_blocks=4, over=over)
    assert (result.queued, result.total_queue_ms) == (2, 3.0 + (20 - 6))
    assert result.timeline.time_ms.tolist() == [0, 4, 8, 20, 24]


def test_requests_larger_than_the_pool_are_rejected_and_nothing_else_counts_them(implementation, over):
    trace = make_trace((0, 8, 5, [1, 2]), (0, 8, 4, [1, 2]), (1, 400, 0, list(range(100))))
    result = run(implementation, trace, num_blocks=4, over=over)
    assert (result.rejected, result.queued, result.prompt_tokens, result.allocated_blocks) == (2, 0, 8, 3)
    assert result.admissions.lines.tolist() == [2]


def test_all_rejected(implementation, over):
    result = run(implementation, make_trace((0, 8, 5, [1, 2])), num_blocks=2, over=over)
    assert (result.rejected, result.hit_rate, result.ns_per_prompt_block, result.mean_queue_ms) == (1, 0.0, 0.0, 0.0)


def test_sub_blocks_of_a_partial_trace_block(implementation, over):
    trace = make_trace((0, 14, 0, [1, 2]), (50, 13, 0, [1, 2]), (99, 16, 0, [1, 3]), trace_block_size=8)
    result = run(implementation, trace, num_blocks=50, over=over)
    assert result.prompt_blocks == 3 + 3 + 4
    assert result.admissions.hit_blocks.tolist() == [0, 3, 2]


def test_token_prompts(implementation, over):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 5, 6, 7, 8, 9]]
    requests = [
        TraceRequest(line, 100.0 * line, len(prompt), 1, prompt_token_ids=np.array(prompt, np.int32))
        for line, prompt in enumerate(prompts, start=1)
    ]
    result = run(implementation, Trace("tokens", requests, 512), num_blocks=50, over=over)
    assert result.admissions.hit_blocks.tolist() == [0, 2, 0]


def test_zero_time_per_output_token_and_fractions_of_ms(implementation, over):
    trace = make_trace((0.25, 3, 50, [1]), (0.3, 1, 1, [1]))
    target = make_target(implementation, 15, 4, over)
    result = simulate(trace, target, ReplaySettings(15, 4, prefill_rate=2000, tpot_ms=0))
    assert result.timeline.time_ms.tolist() == [0.25, 1.75, 2.25]
    assert result.mean_queue_ms == pytest.approx(1.45)


def test_settings_are_validated():
    for bad in (
        {"num_blocks": 1},
        {"block_size": 0},
        {"prefill_rate": 0},
        {"prefill_rate": float("nan")},
        {"prefill_rate": float("inf")},
        {"tpot_ms": -1},
        {"tpot_ms": float("nan")},
        {"over": "scheduler"},
    ):
        with pytest.raises(InvalidArgumentError):
            ReplaySettings(**({"num_blocks": 10} | bad))


def test_block_size_and_pool_size_must_fit(implementation, over):
    trace = make_trace((0, 8, 0, [1, 2]))
    with pytest.raises(TraceError, match="does not divide"):
        simulate(trace, make_target(implementation, 10, 3, over), ReplaySettings(10, 3))
    with pytest.raises(InvalidArgumentError, match="10 blocks, not 11"):
        simulate(trace, make_target(implementation, 10, 4, over), ReplaySettings(11, 4))


def test_blocks_held_at_admission(implementation, over):
    """What a request holds is what prompt and output need, and of that the full prompt blocks can be hit."""
    trace = make_trace((0, 9, 6, [1, 2, 3]), (1, 12, 1, [1, 2, 3]))
    target = make_target(implementation, 20, 4, over)
    first, second = (target.prepare(request, block_hashes(request, 4, 4)) for request in trace.requests)
    assert target.find_prefix(first) == 0 and target.admit(first)
    assert target.block_ids(first).dtype == np.int32 and target.block_ids(first).tolist() == [1, 2, 3, 4]
    assert target.find_prefix(second) == 2 and target.admit(second)
    assert target.block_ids(second).tolist() == [1, 2, 5, 6]
    target.free(first)
    assert target.num_free_blocks() == 19 - 4
    target.free(second)
    assert target.num_free_blocks() == 19 and target.evicted_blocks == 0
    target.check()


def test_progress_counts_arrivals(implementation, over):
    seen: list[int] = []
    simulate(generate_trace(0, 100), make_target(implementation, 20_000, 16, over), ReplaySettings(20_000), seen.append)
    assert seen and seen == sorted(seen) and seen[-1] <= 100


def outcome(result: ReplayResult) -> tuple:
    """All that doesn't depend on the clock."""
    return (
        result.prompt_tokens,
        result.hit_tokens,
        result.allocated_blocks,
        result.evicted_blocks,
        result.peak_blocks_in_use,
        result.rejected,
        result.queued,
        result.total_queue_ms,
        result.timeline.blocks_in_use,
    )


@pytest.mark.parametrize("num_blocks", [150, 1_500, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_all_implementations_agree_on_synthetic_traffic(seed, num_blocks):
    trace = generate_trace(seed, 120)
    settings = ReplaySettings(num_blocks, prefill_rate=2_000)
    pairs = [(name, over) for over in LAYERS for name in IMPLEMENTATIONS]
    results = [simulate(trace, make_target(name, num_blocks, 16, over), settings) for name, over in pairs]
    # The reference's pool has both ways to be driven.
    pool = make_target("reference", num_blocks, 16, "pool")._pool
    results.append(simulate(trace, IdArrayTarget("reference by ids", pool, num_blocks, 16), settings))
    check_same(results)
    assert all(outcome(result) == outcome(results[0]) for result in results)
    if num_blocks == 150:
        assert results[0].rejected
    if num_blocks == 1_500:
        assert results[0].queued and results[0].evicted_blocks


@pytest.mark.vllm
@pytest.mark.parametrize("num_blocks", [150, 1_500])
def test_vllm_agrees(num_blocks, implementation, over):
    pytest.importorskip("vllm.v1.core.block_pool")
    trace = generate_trace(7, 120)
    settings = ReplaySettings(num_blocks, prefill_rate=2_000)
    results = [simulate(trace, make_target(name, num_blocks, 16, over), settings) for name in (implementation, "vllm")]
    check_same(results)
    assert outcome(results[0]) == outcome(results[1])


def test_a_difference_names_the_first_request(implementation, over):
    trace = make_trace((0, 8, 4, [1, 2]), (20, 9, 3, [1, 2, 3]), (40, 9, 3, [1, 2, 3]))

    def other() -> ReplayResult:
        result = run(implementation, trace, num_blocks=20, over=over)
        result.implementation = "other"
        return result

    one, two = other(), other()
    one.implementation = "one"
    check_same([one, two])
    two.admissions.hit_blocks[1] = 1
    with pytest.raises(ReplayMismatchError, match="line 2: hits of 2 and 1 blocks"):
        check_same([one, two])
    two.admissions.block_id_crcs[0] ^= 1
    with pytest.raises(ReplayMismatchError, match="one and other differ at the request of line 1: other block ids"):
        check_same([one, two])
    fewer = other()
    fewer.admissions.lines.pop()
    for pair in ([one, fewer], [fewer, one]):
        with pytest.raises(ReplayMismatchError, match="admits"):
            check_same(pair)


def test_a_wrong_implementation_is_noticed(implementation, over):
    class ForgetfulTarget(BlockObjectTarget):
        def _find(self, served):
            return super()._find(served)[:1]

    trace = make_trace((0, 8, 4, [1, 2]), (20, 9, 3, [1, 2, 3]))
    right = run(implementation, trace, num_blocks=20, over=over)
    pool = make_target("reference", 20, 4, "pool")._pool
    wrong = simulate(trace, ForgetfulTarget("wrong", pool, 20, 4), settings_for(20))
    with pytest.raises(ReplayMismatchError, match="line 2: hits of 2 and 1 blocks"):
        check_same([right, wrong])


def test_unknown_and_missing_implementations(monkeypatch):
    with pytest.raises(ImplementationError, match="unknown implementation 'sglang': choose from native, reference, vl"):
        make_target("sglang", 10, 16)
    with pytest.raises(ImplementationError, match="unknown layer 'scheduler': choose from manager, pool"):
        make_target("reference", 10, 16, "scheduler")
    for over, module in (("manager", "kv_cache_manager"), ("pool", "block_pool")):
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.{module}", None)
        with pytest.raises(ImplementationError, match=r"vllm (is not installed|can't be imported)"):
            make_target("vllm", 10, 16, over)


def test_native_is_refused_in_pure_python(monkeypatch, over):
    monkeypatch.setattr("kvpool.backend.BACKEND", "reference")
    assert default_implementations() == ["reference"]
    with pytest.raises(ImplementationError, match="KVPOOL_PURE_PYTHON=1"):
        make_target("native", 10, 16, over)


def tree_trace(seed: int, trace_block_size: int, block_size: int) -> Trace:
    """Random prompts over a small tree of prefixes; ids name the path, lengths end anywhere."""
    randomness = random.Random(seed)
    rows = []
    for time in range(randomness.randint(2, 6)):
        path, ids = 1, []
        for _ in range(randomness.randint(1, 3)):
            path = path * 3 + randomness.randint(0, 1)
            ids.append(path)
        last = randomness.randint(1, trace_block_size // block_size) * block_size - randomness.choice([0, 1])
        rows.append((time, (len(ids) - 1) * trace_block_size + last, 0, ids))
    return make_trace(*rows, trace_block_size=trace_block_size)


def best_hits(trace: Trace, block_size: int, capacity: int) -> int:
    """By trial of every cache content: after a request any of the blocks at hand may be kept, as many as have room."""
    per_id = trace.trace_block_size // block_size
    prompts = [
        (
            [(int(r.hash_ids[i // per_id]), i) for i in range(r.num_full_prompt_blocks(block_size))],
            r.max_hit_blocks(block_size),
        )
        for r in trace.requests
    ]
    later = [{b for blocks, _ in prompts[index + 1 :] for b in blocks} for index in range(len(prompts))]

    @lru_cache(None)
    def best(index: int, cached: frozenset) -> int:
        if index == len(prompts):
            return 0
        blocks, limit = prompts[index]
        hits = 0
        while hits < min(limit, len(blocks)) and blocks[hits] in cached:
            hits += 1
        useful = sorted((cached | set(blocks)) & later[index])
        if len(useful) <= capacity:
            return hits + best(index + 1, frozenset(useful))
        subsets = ({b for bit, b in enumerate(useful) if mask >> bit & 1} for mask in range(1 << len(useful)))
        return hits + max(best(index + 1, frozenset(kept)) for kept in subsets if len(kept) == capacity)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(("trace_block_size", "block_size"), [(4, 4), (8, 4)])
def test_belady_is_the_best_of_all_choices(seed, trace_block_size, block_size):
    trace = tree_trace(seed, trace_block_size, block_size)
    accesses = PrefixAccesses.from_trace(trace, block_size)
    everyone = range(len(trace.requests))
    for capacity in (1, 2, 3, 5):
        assert belady_hit_blocks(accesses, everyone, capacity) == best_hits(trace, block_size, capacity)
    assert unbounded_hit_blocks(accesses, everyone) == best_hits(trace, block_size, 10_000)
    assert belady_hit_blocks(accesses, everyone, 10_000) == unbounded_hit_blocks(accesses, everyone)


def test_belady_by_hand():
    # Capacity 2. Keeping 1 is worth a hit at the third and the fourth request, keeping 2 none.
    trace = make_trace((0, 5, 0, [1, 50]), (1, 5, 0, [2, 51]), (2, 5, 0, [1, 52]), (3, 9, 0, [1, 3, 53]))
    accesses = PrefixAccesses.from_trace(trace, 4)
    assert [belady_hit_blocks(accesses, range(4), capacity) for capacity in (0, 1, 2)] == [0, 2, 2]
    assert unbounded_hit_blocks(accesses, range(4)) == 2
    assert belady_hit_blocks(accesses, [1, 3], 1) == 0


def test_belady_keeps_part_of_a_trace_block():
    trace = make_trace((0, 17, 0, [1, 2]), (1, 17, 0, [1, 3]), trace_block_size=16)
    accesses = PrefixAccesses.from_trace(trace, 4)
    assert [belady_hit_blocks(accesses, range(2), capacity) for capacity in (1, 3, 4, 9)] == [1, 3, 4, 4]


def test_a_block_that_cannot_be_hit_next_is_not_worth_its_room():
    # With room for 1: id 1 is hit by the last request only if 5 isn't kept; the second use of 5 can't be a hit.
    trace = make_trace((0, 5, 0, [1, 50]), (1, 4, 0, [5]), (2, 4, 0, [5]), (3, 5, 0, [1, 51]), (4, 5, 0, [5, 52]))
    accesses = PrefixAccesses.from_trace(trace, 4)
    assert belady_hit_blocks(accesses, range(5), 1) == best_hits(trace, 4, 1) == 1
    assert belady_hit_blocks(accesses, range(5), 2) == best_hits(trace, 4, 2) == 2


def test_token_prompts_have_bounds_too():
    prompts = [[1] * 9, [1] * 9, [1] * 4 + [2] * 4]
    requests = [
        TraceRequest(line, float(line), len(p), 0, prompt_token_ids=np.array(p, np.int32))
        for line, p in enumerate(prompts, start=1)
    ]
    accesses = PrefixAccesses.from_trace(Trace("tokens", requests, 512), 4)
    assert unbounded_hit_blocks(accesses, range(3)) == 2 + 1
    assert belady_hit_blocks(accesses, range(3), 1) == 2


def test_the_curve_stays_below_its_bounds(implementation):
    trace = generate_trace(1, 150)
    sizes = default_curve_sizes(trace, 16, num_points=5)
    assert sizes == sorted(sizes) and len(sizes) == 5
    seen: list[tuple[int, int]] = []
    settings = ReplaySettings(2, 16)
    points = compute_curve(trace, implementation, settings, [60, *sizes], lambda *state: seen.append(state))
    assert [point.num_blocks for point in points] == [60, *sizes]
    for point in points:
        assert point.hit_rate <= point.belady_hit_rate + 1e-12 <= point.unbounded_hit_rate + 2e-12
    assert points[0].rejected > 0 and not any(point.rejected for point in points[1:])
    rates = [point.belady_hit_rate for point in points[1:]]
    assert rates == sorted(rates) and rates[-1] == pytest.approx(points[-1].unbounded_hit_rate)
    assert {num_points for num_points, _ in seen} == set(range(6))


def test_a_pool_that_never_evicts_reaches_the_unbounded_cache(implementation, over):
    trace = generate_trace(1, 150)
    (point,) = compute_curve(trace, implementation, ReplaySettings(2, 16, over=over), [200_000])
    assert point.hit_rate == pytest.approx(point.unbounded_hit_rate) and point.hit_rate > 0.5


def test_curve_sizes_are_validated(implementation):
    with pytest.raises(InvalidArgumentError, match="at least 2 blocks, not 1"):
        compute_curve(generate_trace(0, 5), implementation, ReplaySettings(2, 16), [100, 1])
    single = make_trace((0, 1, 0, [1]))
    assert default_curve_sizes(single, 4) == [2]
