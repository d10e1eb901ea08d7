"""A scheduler loop without a model: eight users share a system prompt, and each step's blocks go into block tables.

python examples/scheduler_loop.py
"""

from kvpool import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, Scheduler
from kvpool.scheduler import SchedulerConfig

BLOCK_SIZE = 16


def main() -> None:
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
    config = KVCacheConfig(num_blocks=64, kv_cache_groups=[KVCacheGroupSpec(["layer 0", "layer 1"], attention)])
    manager = KVCacheManager(config, max_model_len=512)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_batched_tokens=128))

    hasher = BlockHasher("sha256", BLOCK_SIZE)
    system_prompt = list(range(100))
    for user in range(8):
        prompt = system_prompt + [1000 * user] * 20
        scheduler.add_request(Request(f"user {user}", prompt, hasher, max_tokens=60))

    texts: dict[str, list[int]] = {}
    block_tables: dict[str, list[int]] = {}
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        for new in step.scheduled_new_requests:
            texts[new.request_id] = list(new.prompt_token_ids)
            block_tables[new.request_id] = list(new.block_ids[0])
            print(f"{new.request_id}: {new.num_computed_tokens} of its tokens are cached")
        cached = step.scheduled_cached_requests
        for request_id, resumed, block_ids in zip(cached.request_ids, cached.resumed, cached.new_block_ids):
            if block_ids is not None:  # after a preemption the whole table, otherwise what is new
                block_tables[request_id] = list(block_ids[0]) if resumed else block_tables[request_id] + block_ids[0]

        # Here a model computes step.num_scheduled_tokens of each request, reading and writing block_tables.
        sampled = {request_id: [texts[request_id][-1] + 1] for request_id in step.sampled_request_ids}

        for output in scheduler.update_from_output(step, sampled):
            texts[output.request_id] += output.new_token_ids
    print(scheduler.make_stats())
    manager.block_pool.check()


if __name__ == "__main__":
    main()
