"""Seeded histories on whatever vLLM's names lead to at the moment: run one on stock vLLM and once more with kvpool in
its place, and each step must answer the same.

What a step does depends on the seed and on the answers so far, never on the classes. Answers are plain values: block
ids, events, the free list, reference counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

HASH_BLOCK_SIZE = 4
NUM_STEPS = 50
NUM_FAMILIES = 3
MAX_TOKENS = 60

Outcome = tuple[Any, ...]


class _Requests:
    """Makes vLLM's own requests whose prompts share prefixes."""

    def __init__(self, rng: random.Random) -> None:
        import vllm.v1.core.kv_cache_utils as blocks
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.request import Request

        blocks.init_none_hash(sha256)
        self._make = Request
        self._sampling = SamplingParams(max_tokens=MAX_TOKENS)
        self._hasher = blocks.get_request_block_hasher(HASH_BLOCK_SIZE, sha256)
        self._rng = rng
        self._families = [[rng.randrange(9) for _ in range(MAX_TOKENS)] for _ in range(NUM_FAMILIES)]
        self._num_made = 0

    def next(self) -> Any:
        rng = self._rng
        tokens = rng.choice(self._families)[: rng.randint(1, MAX_TOKENS)]
        tokens += [rng.randrange(9) for _ in range(rng.choice((0, 0, 3)))]
        self._num_made += 1
        return self._make(
            request_id=f"request {self._num_made}",
            prompt_token_ids=tokens,
            sampling_params=self._sampling,
            pooling_params=None,
            cache_salt=rng.choice((None, None, "salt")),
            block_hasher=self._hasher,
        )


def _ids(blocks: Iterable[Any] | None) -> list[int] | None:
    return None if blocks is None else [block.block_id for block in blocks]


def _events(events: Iterable[Any]) -> list[Any]:
    """Events as values. Several hashes of one block are unordered in vLLM: runs of BlockRemoved are sorted."""
    fields = [(type(event).__name__, *(repr(getattr(event, n)) for n in event.__struct_fields__)) for event in events]
    ordered: list[Any] = []
    run: list[Any] = []
    for entry in [*fields, ()]:
        if entry and entry[0] == "BlockRemoved":
            run.append(entry)
        else:
            ordered += [*sorted(run), entry]
            run = []
    return ordered[:-1]


def _state(pool: Any) -> Outcome:
    blocks = list(pool.blocks)
    return (
        _ids(pool.free_block_queue.get_all_free_blocks()),
        [block.ref_cnt for block in blocks[1:]],
        [(block.block_hash, block.block_hash_num_tokens) for block in blocks],
        {block_id: sorted(keys) for block_id, keys in pool.cached_block_hashes_by_block.items()},
        len(pool.cached_block_hash_to_block),
        pool.get_usage(),
        _events(pool.take_events()),
    )


class _PoolHistory:
    """Requests take, cache, share and free the blocks of one pool, and what is rare happens often."""

    def __init__(self, seed: int) -> None:
        import vllm.v1.core.block_pool as pools

        self.rng = rng = random.Random(seed)
        self.pool = pools.BlockPool(rng.randint(6, 40), rng.random() < 0.9, HASH_BLOCK_SIZE, rng.random() < 0.8)
        self.requests = _Requests(rng)
        self.running: list[tuple[Any, list[Any]]] = []
        self.reused: list[int] = []

    def run(self) -> Iterator[Outcome]:
        actions: tuple[Callable[[], Any], ...] = (self.arrive, self.finish, self.partial, self.share, self.unpin)
        actions += (self.move, self.evict, self.reset)
        for _ in range(NUM_STEPS):
            action = self.rng.choices(actions, (6, 5, 3, 2, 1, 1, 1, 1))[0]
            yield (action.__name__, action(), list(self.reused), *_state(self.pool))

    def arrive(self) -> Any:
        request, pool = self.requests.next(), self.pool
        hits: list[Any] = []
        for block_hash in request.block_hashes:
            found = pool.get_cached_block(block_hash, [0])
            if found is None or found[0] in hits:
                break
            hits += found
        pool.touch(hits)
        num_full = request.num_tokens // HASH_BLOCK_SIZE
        try:
            new = pool.get_new_blocks(-(-request.num_tokens // HASH_BLOCK_SIZE) - len(hits))
        except ValueError as error:
            pool.free_blocks(reversed(hits))
            return str(error)
        table = hits + new
        if pool.enable_caching:
            mask = [self.rng.random() < 0.9 for _ in range(num_full - len(hits))] if self.rng.random() < 0.2 else None
            pool.cache_full_blocks(request, table, len(hits), num_full, HASH_BLOCK_SIZE, 0, block_mask=mask)
            pool.emit_cached_block_events(request, len(hits), HASH_BLOCK_SIZE, 0)
        self.running.append((request, table))
        return _ids(table)

    def finish(self) -> Any:
        if self.running:
            _, table = self.running.pop(self.rng.randrange(len(self.running)))
            self.pool.free_blocks(reversed(table))
            return _ids(table)
        return None

    def partial(self) -> Any:
        """The blocks of another group, twice as long, of which some prefix ends inside."""
        request, pool = self.requests.next(), self.pool
        num_hashes = len(request.block_hashes)
        if not pool.enable_caching or num_hashes == 0 or pool.get_num_free_blocks() == 0:
            return None
        block = pool.get_new_blocks(1)[0]
        keys = []
        for _ in range(self.rng.randint(1, 3)):
            num_tokens = self.rng.randint(1, num_hashes) * HASH_BLOCK_SIZE
            replace = self.rng.random() < 0.2
            keys.append(pool.cache_partial_block(request, block, num_tokens, 1, 2 * HASH_BLOCK_SIZE, replace))
        pool.free_blocks([block])
        return keys

    def share(self) -> Any:
        blocks = [self.pool.blocks[self.rng.randrange(self.pool.num_gpu_blocks)] for _ in range(3)]
        self.pool.touch(blocks)
        writable = [self.pool.is_block_writable(block) for block in self.pool.blocks]
        self.pool.free_blocks(blocks)
        return writable

    def unpin(self) -> Any:
        if self.running:
            _, table = self.running.pop()
            self.pool.unpin_blocks(table, lambda block: self.reused.append(block.block_id))
            return _ids(table)
        return None

    def move(self) -> Any:
        pool = self.pool
        if not self.running or pool.get_num_free_blocks() == 0:
            return None
        source, (target,) = self.running[0][1][-1], pool.get_new_blocks(1)
        if target.block_hash is None and pool.enable_caching:
            pool.move_block_hashes(source, target)
        pool.free_blocks([target])
        return source.block_id, target.block_id

    def evict(self) -> Any:
        ids = sorted(self.rng.sample(range(1, self.pool.num_gpu_blocks), 3))
        self.pool.evict_blocks(ids)
        return ids

    def reset(self) -> Any:
        if self.rng.random() < 0.5:
            while self.running:
                self.finish()
        return self.pool.reset_prefix_cache()


class _ManagerHistory:
    """A small scheduler on vLLM's KVCacheManager: prefix hits, chunked prefill, decode, preemption, resets."""

    def __init__(self, seed: int) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.rng = rng = random.Random(seed)
        self.manager: Any = KVCacheManager(
            _config(rng),
            max_model_len=4 * MAX_TOKENS,
            scheduler_block_size=HASH_BLOCK_SIZE,
            hash_block_size=HASH_BLOCK_SIZE,
            enable_caching=rng.random() < 0.9,
            enable_kv_cache_events=rng.random() < 0.7,
            log_stats=True,
        )
        self.requests = _Requests(rng)
        self.running: list[Any] = []
        self.waiting: list[Any] = []

    def run(self) -> Iterator[Outcome]:
        pool: Any = self.manager.block_pool
        for _ in range(NUM_STEPS):
            if self.rng.random() < 0.5:
                self.waiting.append(self.requests.next())
            done = [self.manager.new_step_starts() if hasattr(self.manager, "new_step_starts") else None]
            done += [self.advance(request) for request in list(self.running) if request in self.running]
            done += [self.admit()] if self.waiting else []
            done += [self.finish()] if self.running and self.rng.random() < 0.2 else []
            done += [self.manager.reset_prefix_cache()] if self.rng.random() < 0.05 else []
            tables = [self.manager.get_block_ids(request.request_id) for request in self.running]
            yield (done, tables, self.manager.usage, *_state(pool))

    def admit(self) -> Any:
        request = self.waiting[0]
        blocks, num_hit, *_ = self.manager.get_computed_blocks(request)
        num_new = min(request.num_tokens - num_hit, self.rng.choice((7, 1000)))
        allocated = self.manager.allocate_slots(request, num_new, num_hit, blocks)
        if allocated is not None:
            self.waiting.pop(0)
            self.running.append(request)
            request.num_computed_tokens = num_hit + num_new
        return request.request_id, num_hit, None if allocated is None else allocated.get_block_ids()

    def advance(self, request: Any) -> Any:
        """The rest of a prompt, or one token more; the last request gives way where there is no room."""
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(self.rng.randrange(9))
        num_new = request.num_tokens - request.num_computed_tokens
        while (allocated := self.manager.allocate_slots(request, num_new)) is None:
            victim = self.running.pop()
            self.manager.free(victim)
            victim.num_computed_tokens = 0
            victim.status = RequestStatus.PREEMPTED
            self.waiting.insert(0, victim)
            if victim is request:
                return victim.request_id
        request.num_computed_tokens += num_new
        return allocated.get_block_ids()

    def finish(self) -> Any:
        request = self.running.pop(self.rng.randrange(len(self.running)))
        self.manager.free(request)
        return request.request_id


def _config(rng: random.Random) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    size: dict[str, Any] = {"block_size": HASH_BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full, window = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=rng.choice((5, 8, 13)))
    specs = rng.choice(((full,), (window,), (full, window)))
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=rng.randint(20, 120), kv_cache_tensors=[], kv_cache_groups=groups)


def history(seed: int) -> Iterator[Outcome]:
    """The outcomes of the seed's history, step by step: one of a pool and one of a cache manager in turn."""
    made = _ManagerHistory(seed) if seed % 2 else _PoolHistory(seed)
    return made.run()
