"""How large must the cache be? Replays a trace at five sizes, beside an unbounded cache and Belady's optimum.

python examples/replay_trace.py [TRACE]     JSON lines, also .gz and .zst; without one, synthetic chats
"""

import sys

from kvpool.replay.implementations import default_implementations, make_target
from kvpool.replay.policies import compute_curve, default_curve_sizes
from kvpool.replay.simulator import ReplaySettings, check_same, simulate
from kvpool.replay.synthetic import generate_trace
from kvpool.replay.trace import read_trace

BLOCK_SIZE = 16


def main() -> None:
    trace = read_trace(sys.argv[1]) if len(sys.argv) > 1 else generate_trace(seed=0, num_requests=300)
    print(f"{trace.name}: {len(trace.requests)} requests")

    settings = ReplaySettings(num_blocks=2 * trace.max_blocks_needed(BLOCK_SIZE), block_size=BLOCK_SIZE)
    names = default_implementations()  # native, and reference: its pure-Python twin
    targets = [make_target(name, settings.num_blocks, BLOCK_SIZE) for name in names]
    results = [simulate(trace, target, settings) for target in targets]
    check_same(results)  # equal hits and block ids for each request, or ReplayMismatchError
    for result in results:
        print(
            f"{result.implementation:>9}: hit rate {result.hit_rate:.1%}, {result.evicted_blocks} evictions,"
            f" {result.queued} requests waited {result.mean_queue_ms:.0f} ms on average,"
            f" {result.ns_per_prompt_block:.0f} ns per prompt block"
        )

    print("   blocks   LRU  Belady  unbounded")
    for point in compute_curve(trace, names[0], settings, default_curve_sizes(trace, BLOCK_SIZE, num_points=5)):
        print(
            f"{point.num_blocks:>9} {point.hit_rate:6.1%} {point.belady_hit_rate:6.1%} {point.unbounded_hit_rate:6.1%}"
        )


if __name__ == "__main__":
    main()
