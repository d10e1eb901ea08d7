"""Random histories of a scheduler on several KV cache managers at once: all of them must do the same at every call.

A history is made of arrivals, steps (decode, chunked prefill, drafts, preemption where blocks run out, admission with
prefix hits and tokens from elsewhere), aborts, evictions and resets. It knows no model: tokens are drawn from few
families, so that prefixes are shared, and conversations go on. The first manager's answers lead the history; what
the others answer is compared with it, and after each step so are all tables, counts, hashes, the free list and events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manager_layouts import Layout, ManagerRequest, OwnManagerRequest, Status, make_config, random_layout
from pool_state import block_ids, event_fields, free_ids, state_of

import kvpool
from kvpool import reference
from kvpool.cache.managers.mamba_align import get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid
from kvpool.kv_cache_manager import KVCacheManager

NUM_STEPS = 35


class Stack:
    """One of the managers of a history. Made from a layout; vLLM's is another class with the same methods."""

    def __init__(self, name: str, layout: Layout, *, events: bool = True) -> None:
        self.name = name
        self.manager: Any = KVCacheManager(
            make_config(layout),
            layout.max_model_len,
            layout.scheduler_block_size,
            layout.hash_block_size,
            layout.enable_caching,
            layout.use_eagle,
            log_stats=True,
            enable_kv_cache_events=events,
            watermark=layout.watermark,
            max_in_flight_tokens=layout.max_in_flight_tokens,
            num_prefill_lookahead=layout.num_prefill_lookahead,
            enable_mamba_shared_prefix_checkpoint=layout.shared_prefix_checkpoint,
            block_pool_class=kvpool.BlockPool if name == "native" else reference.BlockPool,
        )
        self.pool = self.manager.block_pool

    def find_hit(self, request: ManagerRequest) -> tuple[Any, int, int]:
        return self.manager.get_computed_blocks_and_boundary(request)

    def decode(self, requests: list[ManagerRequest]) -> list[Any]:
        return self.manager.allocate_decode(requests)

    def check(self) -> None:
        self.pool.check()


@dataclass
class Options:
    """What a history's scheduler does always, or never."""

    num_lookahead_tokens: int
    max_drafts: int
    budget: int
    full_sequence_must_fit: bool
    external: bool
    in_flight: bool
    decode_at_once: bool
    drafts: dict[str, int] = field(default_factory=dict)


class History:
    """One random history.

    Args:
        seed: of everything.
        make_stacks: makes the managers for a layout.
        statuses: an enumeration with WAITING, RUNNING and PREEMPTED that all managers understand.
        kinds: names in MAKERS, None for all.
    """

    num_steps = NUM_STEPS

    def __init__(
        self,
        seed: int,
        make_stacks: Callable[[Layout], list[Any]],
        statuses: Any = Status,
        kinds: tuple[str, ...] | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.layout = random_layout(rng, kinds)
        self.statuses = statuses
        self.stacks = make_stacks(self.layout)
        self.hash_block_size = self.stacks[0].pool.hash_block_size
        is_aligned = self.layout.has("mamba_align")
        drafts = (
            rng.choice([0, 0, 2]) if self.layout.num_speculative_blocks == 0 else self.layout.num_speculative_blocks
        )
        self.options = Options(
            num_lookahead_tokens=rng.choice([0, drafts]),
            max_drafts=0 if is_aligned and self.layout.num_speculative_blocks == 0 else drafts,
            budget=rng.choice([3, 8, 16, 64]),
            full_sequence_must_fit=rng.random() < 0.3,
            external=rng.random() < 0.3 and not self.layout.has("mamba") and not self.layout.has("cross"),
            in_flight=rng.random() < 0.3,
            decode_at_once=rng.random() < 0.3,
        )
        self.families = [[rng.randrange(3) for _ in range(80)] for _ in range(3)]
        self.conversations: list[list[int]] = []
        self.waiting: list[ManagerRequest] = []
        self.loading: list[ManagerRequest] = []
        self.running: list[ManagerRequest] = []
        self.num_requests = 0
        self.seen: Counter[str] = Counter()

    # The same call to all managers

    def all(self, call: Callable[[Any], Any]) -> Any:
        results = [call(stack) for stack in self.stacks]
        for stack, result in zip(self.stacks[1:], results[1:]):
            assert result == results[0], f"{stack.name} {result}, {self.stacks[0].name} {results[0]}"
        return results[0]

    def allocate(
        self, request: ManagerRequest, num_new: int, hits: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """allocate_slots everywhere; the ids of the new blocks, or None."""

        def call(stack: Any) -> Any:
            given = {} if hits is None else {"new_computed_blocks": hits[stack.name]}
            if self.layout.has("cross"):
                given["num_encoder_tokens"] = 6
            blocks = stack.manager.allocate_slots(request, num_new, **given, **options)
            return None if blocks is None else blocks.get_block_ids()

        new_ids = self.all(call)
        self.seen["no blocks"] += new_ids is None
        return new_ids

    def compare(self) -> None:
        requests = self.waiting + self.loading + self.running
        visible = []
        for stack in self.stacks:
            pool, manager = stack.pool, stack.manager
            stack.check()
            visible.append(
                {
                    "tables": [manager.get_block_ids(request.request_id) for request in requests],
                    "free": free_ids(pool),
                    "ref_cnt": [block.ref_cnt for block in pool.blocks[1:]],
                    "hashes": [(block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
                    "usage": manager.usage,
                    "events": [event_fields(event) for event in manager.take_events()],
                    "zero": manager.take_new_block_ids(),
                    "estimates": [manager.estimate_cached_tokens(request) for request in requests],
                }
            )
        for stack, other in zip(self.stacks[1:], visible[1:]):
            for what, value in visible[0].items():
                assert other[what] == value, f"{what}: {stack.name} {other[what]}, {self.stacks[0].name} {value}"
        self.seen["events"] += len(visible[0]["events"])
        self.seen["ids to zero"] += len(visible[0]["zero"])

    # The history

    def run(self) -> Counter[str]:
        for _ in range(self.num_steps):
            choice = self.rng.random()
            if choice < 0.35:
                self.arrive()
            elif choice < 0.40:
                self.abort()
            elif choice < 0.43:
                ids = set(self.rng.sample(range(1, self.layout.num_blocks), 3))
                self.all(lambda stack, ids=ids: stack.manager.evict_blocks(ids))
            elif choice < 0.45:
                self.seen["resets"] += self.all(lambda stack: stack.manager.reset_prefix_cache())
            else:
                self.step()
            self.compare()
        while self.waiting or self.loading or self.running:
            self.abort()
        self.compare()
        self.all(lambda stack: free_ids(stack.pool))
        assert self.all(lambda stack: stack.pool.get_num_free_blocks()) == self.layout.num_blocks - 1, "lost blocks"
        self.all(lambda stack: _stats_of(stack.manager.make_prefix_cache_stats()))
        states = [state_of(stack.pool) for stack in self.stacks]
        for state in states:
            del state["stats"]
            state["ref_cnt"][0] = 0
        assert all(state == states[0] for state in states[1:])
        return self.seen

    def arrive(self) -> None:
        rng = self.rng
        if self.conversations and rng.random() < 0.4:
            tokens = rng.choice(self.conversations)[:]
        else:
            family = rng.choice(self.families)
            tokens = family[: rng.choice([0, 4, 8, 12, 16, 24, 32])]
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 10))]
        if rng.random() < 0.1:
            tokens = tokens[: rng.randint(1, 5)]
        # The model's length bounds prompts; outputs may still run into it.
        tokens = tokens[: self.layout.max_model_len - 1]
        self.num_requests += 1
        self.waiting.append(self.make_request(f"r{self.num_requests}", tokens, rng.random() < 0.05))

    def make_request(self, request_id: str, tokens: list[int], skip_reading_prefix_cache: bool) -> ManagerRequest:
        # Both in one history: calls for a request of kvpool's own class are compiled, for another they are not.
        request_class = OwnManagerRequest if self.num_requests % 3 else ManagerRequest
        return request_class(
            request_id,
            tokens,
            self.hash_block_size,
            self.statuses.WAITING,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )

    def abort(self) -> None:
        lists = [requests for requests in (self.waiting, self.loading, self.running) if requests]
        if lists:
            requests = self.rng.choice(lists)
            self.release(requests.pop(self.rng.randrange(len(requests))))

    def release(self, request: ManagerRequest) -> None:
        if self.rng.random() < 0.8:
            self.all(lambda stack: stack.manager.free(request))
            return
        popped = {stack.name: stack.manager.pop_blocks_for_free(request) for stack in self.stacks}
        self.all(lambda stack: block_ids(popped[stack.name]))
        self.all(lambda stack: stack.pool.free_blocks(reversed(popped[stack.name])))

    def step(self) -> None:
        self.all(lambda stack: stack.manager.new_step_starts())
        scheduled: dict[str, int] = {}
        if self.options.decode_at_once:
            self.decode_at_once(scheduled)
        for request in self.running[:]:
            if request in self.running and request.request_id not in scheduled:
                self.continue_request(request, scheduled)
        for request in self.loading[:]:
            if self.rng.random() < 0.5:
                self.finish_load(request)
        preempted = any(request.num_preemptions for request in self.waiting[:1])
        while self.waiting and not (preempted and self.rng.random() < 0.5):
            if not self.admit(self.waiting[0], scheduled):
                break
        copies = {stack.name: stack.manager.take_kv_cache_block_copies() for stack in self.stacks}
        pairs = self.all(lambda stack: [tuple(pair) for pair in copies[stack.name][0]])
        self.seen["copies"] += len(pairs)
        self.all(lambda stack: stack.pool.free_blocks(copies[stack.name][1]))
        self.execute(scheduled, pairs)

    def execute(self, scheduled: dict[str, int], copies: list[tuple[int, int]]) -> None:
        """What workers do with a step."""
        for request in self.running[:]:
            if request.request_id in scheduled:
                self.compute(request, scheduled[request.request_id])

    def decode_at_once(self, scheduled: dict[str, int]) -> None:
        """allocate_decode for those that have one token to compute."""
        ready = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1 and self.has_room(r)]
        answers = self.all(
            lambda stack: [None if blocks is None else blocks.get_block_ids() for blocks in stack.decode(ready)]
        )
        for request, answer in zip(ready, answers):
            if answer is not None:
                scheduled[request.request_id] = 1
                self.options.drafts[request.request_id] = 0
        self.seen["decoded at once"] += len(ready)

    def has_room(self, request: ManagerRequest) -> bool:
        return request.num_computed_tokens + 1 + self.options.max_drafts < self.layout.max_model_len

    def continue_request(self, request: ManagerRequest, scheduled: dict[str, int]) -> None:
        if not self.has_room(request) and request.num_computed_tokens >= request.num_tokens - 1:
            self.finish(request)
            return
        num_new = request.num_tokens - request.num_computed_tokens
        num_drafts = 0
        if num_new == 1 and self.has_room(request):
            num_drafts = self.rng.randint(0, self.options.max_drafts)
        num_new = min(num_new + num_drafts, self.rng.randint(1, self.options.budget) + num_drafts)
        num_new = self.split(request, request.num_computed_tokens, num_new)
        if num_new <= 0:
            return
        while True:
            if self.allocate(request, num_new, num_lookahead_tokens=self.options.num_lookahead_tokens) is not None:
                scheduled[request.request_id] = num_new
                self.options.drafts[request.request_id] = num_drafts
                self.seen["decodes" if num_new == 1 else "chunks"] += 1
                return
            victim = self.choose_victim(scheduled)
            self.preempt(victim)
            scheduled.pop(victim.request_id, None)
            if victim is request:
                return

    def choose_victim(self, scheduled: dict[str, int]) -> ManagerRequest:
        """Who loses its blocks; as in vLLM also one that is in the step already."""
        return self.running[-1]

    def preempt(self, request: ManagerRequest) -> None:
        self.running.remove(request)
        self.release(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        request.status = self.statuses.PREEMPTED
        self.waiting.insert(0, request)
        self.seen["preemptions"] += 1

    def admit(self, request: ManagerRequest, scheduled: dict[str, int]) -> bool:
        """Admit the head of the queue; False if it has to wait."""
        rng, options = self.rng, self.options
        hits, num_hit, num_external = None, 0, 0
        if request.num_computed_tokens == 0:
            found = {stack.name: stack.find_hit(request) for stack in self.stacks}
            _, num_hit, request.shared_prefix_boundary = self.all(
                lambda stack: (found[stack.name][0].get_block_ids(), *found[stack.name][1:])
            )
            assert num_hit < request.num_tokens
            hits = {name: answer[0] for name, answer in found.items()}
            self.seen["hit tokens"] += num_hit
            self.seen["hits inside blocks"] += any(num_hit % group[1] for group in self.layout.groups)
            self.seen["junctions"] += request.shared_prefix_boundary > 0
            if options.external and rng.random() < 0.4 and num_hit % self.layout.scheduler_block_size == 0:
                num_external = rng.randint(0, request.num_tokens - 1 - num_hit)
                num_external -= num_external % self.layout.scheduler_block_size
        num_computed = request.num_computed_tokens + num_hit + num_external
        is_async = num_external > 0 and rng.random() < 0.5
        num_new = 0
        if not is_async:
            num_new = min(request.num_tokens - num_computed, rng.randint(1, options.budget))
            num_new = self.split(request, num_computed, num_new)
            if num_new <= 0:
                return False
        new_ids = self.allocate(
            request,
            num_new,
            hits,
            num_new_computed_tokens=num_hit,
            num_external_computed_tokens=num_external,
            num_lookahead_tokens=0 if is_async else options.num_lookahead_tokens,
            delay_cache_blocks=is_async,
            full_sequence_must_fit=options.full_sequence_must_fit,
            reserved_blocks=rng.choice([0, 0, 0, 3]),
            has_scheduled_reqs=bool(scheduled),
            skip_zeroing_group_ids=(0,) if is_async else (),
        )
        if new_ids is None:
            if not self.running and not self.loading and rng.random() < 0.3:
                self.release(self.waiting.pop(0))  # it may never fit
            return False
        self.all(lambda stack: stack.manager.record_prefix_cache_stats(request, num_hit))
        self.waiting.pop(0)
        self.seen["admissions"] += 1
        self.seen["external"] += num_external > 0
        request.num_computed_tokens = num_computed
        if is_async:
            self.loading.append(request)
            return True
        request.status = self.statuses.RUNNING
        self.running.append(request)
        scheduled[request.request_id] = num_new
        options.drafts[request.request_id] = 0
        return True

    def finish_load(self, request: ManagerRequest) -> None:
        """The tokens from elsewhere have come: publish them, and queue the request for the rest."""
        self.loading.remove(request)
        if self.rng.random() < 0.1:
            self.all(lambda stack: stack.manager.record_blocks_for_zeroing(request.request_id, 0))
        self.all(lambda stack: stack.manager.cache_blocks(request, request.num_computed_tokens))
        self.waiting.insert(0, request)

    def compute(self, request: ManagerRequest, num_new: int) -> None:
        """The step is over: tokens are computed, drafts accepted or not, one more is sampled."""
        num_drafts = self.options.drafts.pop(request.request_id)
        request.num_computed_tokens += num_new
        request.num_in_flight_tokens = num_new if self.options.in_flight and self.rng.random() < 0.7 else 0
        if request.num_computed_tokens < request.num_tokens:
            return
        num_accepted = self.rng.randint(0, min(num_drafts, request.num_computed_tokens - request.num_tokens))
        request.num_computed_tokens = request.num_tokens + num_accepted
        family = self.families[0]
        request.append(family[(request.num_tokens + i) % len(family)] for i in range(num_accepted + 1))
        if request.num_tokens >= self.layout.max_model_len or self.rng.random() < 0.08:
            self.finish(request)

    def finish(self, request: ManagerRequest) -> None:
        self.running.remove(request)
        if self.rng.random() < 0.3:
            self.all(lambda stack: stack.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens))
        self.release(request)
        self.conversations.append(request.all_token_ids[:60])
        self.seen["finished"] += 1

    def split(self, request: ManagerRequest, start: int, num_new: int) -> int:
        """Tokens to compute now, so that aligned Mamba states are written where they can be cached: steps of a
        prefill end with a block, at the last places of the prompt that can be hit, and where prompts part."""
        layout, manager = self.layout, self.stacks[-1].manager
        sizes = [group[1] for group in layout.groups if group[0] == "mamba_align"]
        end_of_prefill = max(request.num_prompt_tokens, request.num_tokens - 1)
        if not sizes or start >= end_of_prefill:
            return num_new
        size, end = sizes[0], start + num_new
        is_fine = manager.coordinator.enable_partial_hash_hits
        hash_size = self.hash_block_size
        checkpoint = get_mamba_prefill_checkpoint_position(
            end_of_prefill, hash_size if is_fine else size, layout.use_eagle
        )
        is_kept_by_kernel = (
            layout.num_prefill_checkpoint_blocks > 0
            and end >= end_of_prefill
            and is_mamba_prefill_checkpoint_valid(start, end, checkpoint, hash_size, size, 1)
        )
        if end < end_of_prefill and (end // size * size > start or size <= self.options.budget):
            end = end // size * size
        last = (
            0
            if is_kept_by_kernel
            else get_mamba_prefill_checkpoint_position(request.num_tokens, size, layout.use_eagle)
        )
        stops = [last]
        if start % size and not is_kept_by_kernel:
            stops.append((start // size + 1) * size)
        if is_fine and not is_kept_by_kernel:
            tail = get_mamba_prefill_checkpoint_position(request.num_prompt_tokens, hash_size, layout.use_eagle)
            if last < tail < request.num_prompt_tokens:
                stops.append(tail)
        junction = request.shared_prefix_boundary
        if start < junction < end:
            is_exact = manager.mamba_shared_prefix_checkpoint and junction <= request.num_prompt_tokens
            stops.append(junction if is_exact else start + (junction - start) // size * size)
        return min([end, *(stop for stop in stops if start < stop)]) - start


def _stats_of(stats: Any) -> dict[str, Any]:
    names = ("reset", "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
    return {name: getattr(stats, name) for name in names}
