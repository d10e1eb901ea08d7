"""Random histories of one manager over one pool: vLLM's classes, and kvpool's over the native pool and over the twin.
The same tables, hits, numbers of blocks, free lists and events after each call."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from conftest import BACKEND_NAMES, make_backend
from pool_histories import OrderedSets
from pool_state import event_fields, state_of
from token_requests import TokenRequest, chained_digests

from kvpool.cache import managers
from kvpool.cache import spec as specs

pytestmark = pytest.mark.vllm

NUM_HISTORIES = 60  # for each type
NUM_STEPS = 60
NUM_LOOKUPS = 400
HASH_SIZE = 2
GROUP = 3
ATTENTION = {"num_kv_heads": 2, "head_size": 4, "dtype": "float16"}
MAMBA = {"shapes": ((3, 5), (7,)), "dtypes": ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def vllm() -> Any:
    pytest.importorskip("vllm.v1.core.block_pool")
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import block_pool, single_type_kv_cache_manager

    class Vllm:
        specs = kv_cache_interface
        managers = single_type_kv_cache_manager
        BlockPool = block_pool.BlockPool

    return Vllm


class Setting:
    """Numbers of a group of one type, drawn from a seed."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng
        self.spec_name, self.manager_name, fields = getattr(self, kind)()
        self.block_size = fields.get("block_size", 0) or rng.choice((2, 4, 8))
        self.fields = {**(MAMBA if "mamba_cache_mode" in fields else ATTENTION), **fields}
        self.fields["block_size"] = self.block_size
        if self.is_fine:
            self.alignment = HASH_SIZE
        elif kind == "chunked":
            self.alignment = self.block_size
        else:
            self.alignment = self.block_size * rng.choice((1, 1, 2, 3))
        self.use_eagle = (
            kind in ("full", "full_fine", "sliding", "mamba_fine", "mamba_checkpoint") and rng.random() < 0.4
        )
        self.interval = rng.choice((None, None, 0, self.block_size * 2, self.block_size * 6))
        self.enable_caching = kind != "cross" and rng.random() < 0.9
        self.zeroing = kind != "sink" and rng.random() < 0.5

    def full(self) -> Any:
        return "FullAttentionSpec", "FullAttentionManager", {}

    def full_fine(self) -> Any:
        return "FullAttentionSpec", "FullAttentionManager", {"block_size": self.rng.choice((4, 8))}

    def sink(self) -> Any:
        return "SinkFullAttentionSpec", "SinkFullAttentionManager", {"block_size": 4, "sink_len": 8}

    def sliding(self) -> Any:
        window, extra = self.rng.randint(1, 14), self.rng.choice((0, 0, 3))
        return (
            "SlidingWindowSpec",
            "SlidingWindowManager",
            {"sliding_window": window, "extra_retained_tokens": extra},
        )

    def chunked(self) -> Any:
        stretch = self.rng.choice((4, 8, 12))
        return "ChunkedLocalAttentionSpec", "ChunkedLocalAttentionManager", {"attention_chunk_size": stretch}

    def cross(self) -> Any:
        return "CrossAttentionSpec", "CrossAttentionManager", {}

    def mamba(self) -> Any:
        mode = self.rng.choice(("none", "all", "align", "align"))
        return (
            "MambaSpec",
            "MambaManager",
            {"mamba_cache_mode": mode, "num_speculative_blocks": self.rng.choice((0, 0, 1, 2))},
        )

    def mamba_fine(self) -> Any:
        name, manager, fields = self.mamba()
        return name, manager, {**fields, "mamba_cache_mode": "align", "block_size": self.rng.choice((4, 8))}

    def mamba_checkpoint(self) -> Any:
        name, manager, fields = self.mamba_fine()
        alignment = self.rng.choice((2, 2, 4))
        return name, manager, {**fields, "num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": alignment}

    @property
    def is_fine(self) -> bool:
        return self.kind in ("full_fine", "mamba_fine", "mamba_checkpoint")

    @property
    def is_aligned(self) -> bool:
        return self.fields.get("mamba_cache_mode") == "align"

    def make_spec(self, module: Any) -> Any:
        fields = dict(self.fields)
        if module is not specs:
            torch = pytest.importorskip("torch")
            if "dtype" in fields:
                fields["dtype"] = getattr(torch, fields["dtype"])
            else:
                fields["dtypes"] = tuple(getattr(torch, name) for name in fields["dtypes"])
        return getattr(module, self.spec_name)(**fields)


KINDS = ("full", "full_fine", "sink", "sliding", "chunked", "cross", "mamba", "mamba_fine", "mamba_checkpoint")


class Side:
    """A pool, and a manager over it."""

    def __init__(self, setting: Setting, pool: Any, spec_module: Any, manager_module: Any) -> None:
        self.pool, self.spec = pool, setting.make_spec(spec_module)
        self.cls = getattr(manager_module, setting.manager_name)
        extra = {} if setting.kind == "sink" else {"needs_kv_cache_zeroing": setting.zeroing}
        if hasattr(self.spec, "max_admission_blocks_per_request"):
            extra["max_admission_blocks_per_request"] = self.spec.max_admission_blocks_per_request(10, 60)
        self.manager = self.cls(
            self.spec,
            block_pool=pool,
            enable_caching=setting.enable_caching,
            kv_cache_group_id=GROUP,
            scheduler_block_size=setting.alignment if not setting.is_fine else setting.block_size,
            **extra,
        )
        self.manager.cache_hit_alignment_tokens = setting.alignment
        self.manager.use_eagle = setting.use_eagle
        self.manager.drop_eagle_checkpoint_block = self.manager.shared_prefix_checkpoint = setting.use_eagle
        self.hits: list[Any] = []
        self.copies: list[Any] = []


class Running:
    def __init__(self, request: TokenRequest, num_computed: int) -> None:
        self.request, self.num_computed, self.in_flight = request, num_computed, 0


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


class History:
    """One random history; the first side is vLLM's, and what it does is right."""

    def __init__(self, vllm: Any, kind: str, seed: int) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.setting = setting = Setting(kind, rng)
        size, events = rng.randint(8, 40), rng.random() < 0.7
        self.sides = []
        for name in ("vllm", *BACKEND_NAMES):
            make = vllm.BlockPool if name == "vllm" else make_backend(name).BlockPool
            pool = make(size, setting.enable_caching, HASH_SIZE, events)
            modules = (vllm.specs, vllm.managers) if name == "vllm" else (specs, managers)
            self.sides.append(Side(setting, pool, *modules))
        self.sides[0].pool.cached_block_hashes_by_block = OrderedSets()
        self.families = [[rng.randrange(2) for _ in range(60)] for _ in range(3)]
        self.running: list[Running] = []
        self.num_requests = 0
        self.seen: Counter[str] = Counter()

    def all(self, call: Any) -> Any:
        results = [call(side) for side in self.sides]
        assert all(result == results[0] for result in results[1:]), results
        return results[0]

    def run(self) -> None:
        actions = (self.arrive, self.step, self.finish, self.copied, self.new_step, self.evict, self.reset)
        for _ in range(NUM_STEPS):
            self.rng.choices(actions, (5, 14, 3, 3, 6, 0.5, 0.5))[0]()
            self.compare()
        while self.running:
            self.finish()
        self.copied()
        self.copied()
        self.compare()
        assert self.all(lambda side: side.pool.get_num_free_blocks()) == self.sides[0].pool.num_gpu_blocks - 1

    def compare(self) -> None:
        states = []
        for side in self.sides:
            state = state_of(side.pool)
            del state["stats"]
            state["ref_cnt"][0] = 0  # vLLM's null block drifts
            state["events"] = [event_fields(event) for event in side.pool.take_events()]
            manager = side.manager
            state["tables"] = {name: ids(table) for name, table in manager.req_to_blocks.items() if table}
            state["num_cached"] = dict(manager.num_cached_block)
            state["new"] = list(manager.new_block_ids)
            state["partial"] = {name: (i, block.block_id) for name, (i, block) in manager._partial_hit_reqs.items()}
            state["copies"] = [ids(pair) for pair in manager._pending_cow_copies]
            state["this step"] = getattr(manager, "cached_blocks_this_step", None)
            if self.setting.is_aligned:
                state["checkpoints"] = dict(manager._checkpoints)
                state["retired"] = dict(manager._num_retired_blocks)
            states.append(state)
        for side, name, state in zip(self.sides[1:], BACKEND_NAMES, states[1:]):
            side.pool.check()
            assert state == states[0], name
        self.seen["copies"] += bool(states[0]["copies"])
        self.seen["checkpoints"] += bool(states[0].get("checkpoints"))
        self.seen["null"] += any(0 in table for table in states[0]["tables"].values())
        self.seen["new"] += bool(states[0]["new"])
        self.seen["events"] += bool(states[0]["events"])

    # Requests

    def arrive(self) -> None:
        rng, setting = self.rng, self.setting
        tokens = rng.choice(self.families)[: rng.randint(1, 60)] + [rng.randrange(2) for _ in range(rng.randint(0, 3))]
        request = TokenRequest(tokens, HASH_SIZE)
        self.num_requests += 1
        request.request_id = f"r{self.num_requests}"
        request.num_prompt_tokens = len(tokens)
        request.num_computed_tokens = 0
        request.shared_prefix_boundary = 0
        num_local = self.look_up(request, len(tokens) - 1)
        if rng.random() < 0.4:
            request.shared_prefix_boundary = rng.randint(0, len(tokens)) // HASH_SIZE * HASH_SIZE
        num_external = 0
        if rng.random() < 0.2 and setting.kind != "cross":
            unit = HASH_SIZE if setting.is_fine else setting.block_size
            num_external = rng.randint(0, (len(tokens) - 1 - num_local) // unit) * unit
        running = Running(request, num_local + num_external)
        if self.schedule(running, num_local, num_external):
            self.running.append(running)
        elif rng.random() < 0.5:
            self.all(lambda side: side.manager.free(request.request_id))  # nothing was allocated
        else:
            self.all(lambda side: ids(side.manager.pop_blocks_for_free(request.request_id)))

    def look_up(self, request: TokenRequest, max_length: int) -> int:
        setting = self.setting
        if not setting.enable_caching or setting.kind == "cross":
            for side in self.sides:
                side.hits = []
            return 0
        drop = setting.use_eagle and not setting.kind.startswith("mamba")
        if drop and self.rng.random() < 0.5:
            margin = HASH_SIZE if setting.is_fine else setting.block_size
            max_length = min(max_length + margin, len(request.block_hashes) * HASH_SIZE)

        def find(side: Side) -> Any:
            (side.hits,), length = side.cls.find_longest_cache_hit(
                block_hashes=request.block_hashes,
                max_length=max_length,
                kv_cache_group_ids=[GROUP],
                block_pool=side.pool,
                kv_cache_spec=side.spec,
                drop_eagle_block=drop,
                alignment_tokens=setting.alignment,
            )
            return ids(side.hits), length

        _, length = self.all(find)
        self.seen["hits"] += length > 0
        self.seen["hits inside blocks"] += length % setting.block_size > 0
        num_tokens = len(request.all_token_ids)
        if length >= num_tokens:
            length = 0  # the margin went too far; a coordinator would look again
            for side in self.sides:
                side.hits = []
        return length

    def step(self) -> None:
        if not self.running:
            return
        running = self.rng.choice(self.running)
        for side in self.sides:
            side.hits = []
        num_computed = running.num_computed
        if not self.schedule(running, num_computed, 0):
            self.running.remove(running)  # preempted
            self.all(lambda side: side.manager.free(running.request.request_id))

    def schedule(self, running: Running, num_local: int, num_external: int) -> bool:
        rng, setting, request = self.rng, self.setting, running.request
        request_id = request.request_id
        num_computed, num_tokens = running.num_computed, len(request.all_token_ids)
        num_new, num_draft, num_lookahead = self.draw_step(running)
        total = num_computed + num_new
        slots = total + num_lookahead
        prefill_end = max(request.num_prompt_tokens, num_tokens - 1) if setting.interval == 0 else 0
        running.in_flight = rng.choice((0, 0, 1, 5)) if num_computed else 0

        def count(side: Side, num_slots: int, main: int, cap: bool) -> int:
            hits = [] if setting.kind == "cross" else side.hits
            num_blocks = side.manager.get_num_blocks_to_allocate(
                request_id,
                num_slots,
                hits,
                0 if setting.kind == "cross" else num_local + num_external,
                0 if setting.kind == "cross" else num_local,
                main,
                apply_admission_cap=cap,
                prefill_end=prefill_end,
            )
            return int(num_blocks)

        if rng.random() < 0.3:
            self.same_counts(lambda side: count(side, num_tokens, num_tokens, True), num_external)
        processed = max(0, num_computed - running.in_flight)
        self.all(lambda side: side.manager.remove_skipped_blocks(request_id, processed, request.num_prompt_tokens))
        needed = self.same_counts(lambda side: count(side, slots, total, False), num_external)
        if needed > self.sides[0].pool.get_num_free_blocks():
            self.seen["full"] += 1
            return False
        num_free = self.sides[0].pool.get_num_free_blocks()
        if not any(running is other for other in self.running):
            self.all(
                lambda side: side.manager.add_local_computed_blocks(request_id, side.hits, num_local, num_external)
            )
            if num_external:
                record = rng.random() < 0.5
                self.all(
                    lambda side: side.manager.allocate_external_computed_blocks(
                        request_id, num_local, num_external, record_for_zeroing=record
                    )
                )
        self.all(lambda side: ids(side.manager.allocate_new_blocks(request_id, slots, total)))
        num_taken = num_free - self.sides[0].pool.get_num_free_blocks()
        assert num_taken <= needed and (num_taken == needed or not (setting.is_aligned and num_external))
        if setting.enable_caching:
            self.cache(request, min(total, num_tokens))
        num_accepted = rng.randint(0, num_draft)
        running.num_computed = total - num_draft + num_accepted
        if running.num_computed >= num_tokens:
            new = [rng.randrange(2) for _ in range(running.num_computed + 1 - num_tokens)]
            request.all_token_ids += new
            request.block_hashes = chained_digests(request.all_token_ids, HASH_SIZE)
        request.num_computed_tokens = running.num_computed
        return True

    def same_counts(self, count: Any, num_external: int) -> int:
        """The number of blocks that a request needs. vLLM's is not exact for a Mamba state from elsewhere; where it
        is too low, vLLM raises in the middle of an allocation."""
        theirs, *ours = [count(side) for side in self.sides]
        assert len(set(ours)) == 1
        if self.setting.is_aligned and num_external:
            assert -2 <= ours[0] - theirs <= 1
            self.seen["corrected counts"] += ours[0] != theirs
        else:
            assert ours[0] == max(theirs, 0)  # a table that is longer than needed gives nothing to others
        return ours[0]

    def draw_step(self, running: Running) -> tuple[int, int, int]:
        """Numbers of new tokens, of draft tokens among them, and of lookahead slots."""
        rng, setting, request = self.rng, self.setting, running.request
        num_computed, num_tokens = running.num_computed, len(request.all_token_ids)
        most = num_tokens - num_computed
        lookahead = rng.choice((0, 0, 2))
        if most <= 1 and num_computed >= request.num_prompt_tokens:
            num_draft = rng.randint(0, setting.fields.get("num_speculative_blocks", 2))
            return 1 + num_draft, num_draft, lookahead
        end = num_tokens if rng.random() < 0.5 else num_computed + rng.randint(1, most)
        if setting.is_aligned and end < num_tokens:
            # As a scheduler does: steps end at blocks, or where the prompt's last state can be kept.
            last = (num_tokens - 1) // HASH_SIZE * HASH_SIZE
            if setting.is_fine and rng.random() < 0.5 and last > num_computed:
                end = last
            else:
                end = max(end // setting.block_size, num_computed // setting.block_size + 1) * setting.block_size
                end = min(end, num_tokens)
        elif setting.is_aligned and setting.is_fine and rng.random() < 0.5:
            last = ((num_tokens if setting.use_eagle else num_tokens - 1) // HASH_SIZE - setting.use_eagle) * HASH_SIZE
            end = last if last > num_computed else end
        return end - num_computed, 0, lookahead

    def cache(self, request: TokenRequest, num_tokens: int) -> None:
        setting = self.setting
        if not setting.is_fine:
            aligned = num_tokens - num_tokens % setting.alignment
            beyond = setting.block_size if setting.use_eagle and aligned else 0
            num_tokens = min(aligned + beyond, num_tokens)
        boundaries = (request.num_prompt_tokens - 1,)
        self.all(
            lambda side: side.manager.cache_blocks(
                request, num_tokens, retention_interval=setting.interval, replay_boundaries=boundaries
            )
        )

    def finish(self) -> None:
        if not self.running:
            return
        running = self.running.pop(self.rng.randrange(len(self.running)))
        request_id = running.request.request_id
        if self.rng.random() < 0.5:
            self.all(lambda side: side.manager.free(request_id))
        else:
            self.all(lambda side: side.pool.free_blocks(side.manager.pop_blocks_for_free(request_id)[::-1]))

    # What happens between

    def copied(self) -> None:
        """The worker has copied what was pending before; what is pending now follows later."""

        def collect(side: Side) -> Any:
            side.pool.free_blocks([block for pair in side.copies for block in pair])
            side.copies = side.manager.take_pending_cow_copies()
            return [ids(pair) for pair in side.copies], side.manager.take_new_block_ids()

        self.all(collect)

    def new_step(self) -> None:
        self.all(lambda side: side.manager.new_step_starts())
        self.all(lambda side: (side.manager.records_new_block_ids, side.manager.has_positionally_stable_blocks))

    def evict(self) -> None:
        drawn = self.rng.sample(range(1, self.sides[0].pool.num_gpu_blocks), 3)
        self.all(lambda side: side.pool.evict_blocks(drawn))

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            while self.running:
                self.finish()
            self.copied()
            self.copied()
        self.all(lambda side: side.pool.reset_prefix_cache())
        if not isinstance(self.sides[0].pool.cached_block_hashes_by_block, OrderedSets):
            self.sides[0].pool.cached_block_hashes_by_block = OrderedSets()


WANTED = {
    "full": {"hits", "new", "events", "full"},
    "full_fine": {"hits", "hits inside blocks", "copies", "events"},
    "sink": {"hits", "events"},
    "sliding": {"hits", "null", "new", "events", "full"},
    "chunked": {"hits", "null", "events"},
    "cross": {"new"},
    "mamba": {"hits", "null", "events", "full"},
    "mamba_fine": {"hits", "hits inside blocks", "copies", "null", "events"},
    "mamba_checkpoint": {"hits", "checkpoints", "copies", "null", "events"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_histories_are_the_same(vllm: Any, kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        history = History(vllm, kind, seed)
        try:
            history.run()
        except Exception as error:
            raise AssertionError(f"{kind}: history of seed {seed}") from error
        seen += history.seen
    assert all(seen[what] > 10 for what in WANTED[kind]), seen


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cross"])
def test_lookups_in_a_cache_with_holes_are_the_same(vllm: Any, kind: str) -> None:
    """Hits in all groups of a lookup, among blocks and partial blocks of which some are missing."""
    num_hits = 0
    for seed in range(NUM_LOOKUPS):
        rng = random.Random(f"{kind} {seed}")
        setting = Setting(kind, rng)
        size = setting.block_size
        request = TokenRequest([rng.randrange(2) for _ in range(rng.randint(1, 80))], HASH_SIZE)
        num_tokens = len(request.all_token_ids)
        groups = [GROUP, 0][: rng.randint(1, 2)]
        kept = [rng.random() < rng.choice((0.5, 0.9, 1.0)) for _ in range(200)]
        max_length = rng.randint(0, num_tokens)
        drop = setting.use_eagle and rng.random() < 0.7
        found = []
        for name in ("vllm", *BACKEND_NAMES):
            make = vllm.BlockPool if name == "vllm" else make_backend(name).BlockPool
            pool = make(200, True, HASH_SIZE)
            wanted = iter(kept)
            for group in groups:
                table = pool.get_new_blocks(-(-num_tokens // size))
                mask = [next(wanted) for _ in range(num_tokens // size)]
                pool.cache_full_blocks(request, table, 0, num_tokens // size, size, group, block_mask=mask)
                for i in range(num_tokens // HASH_SIZE):
                    if setting.is_fine and i % 5 == 0 and next(wanted):
                        end = (i + 1) * HASH_SIZE
                        pool.cache_partial_block(request, table[(end - 1) // size], end, group, size)
            cls = getattr(vllm.managers if name == "vllm" else managers, setting.manager_name)
            blocks, length = cls.find_longest_cache_hit(
                block_hashes=request.block_hashes,
                max_length=max_length,
                kv_cache_group_ids=groups,
                block_pool=pool,
                kv_cache_spec=setting.make_spec(vllm.specs if name == "vllm" else specs),
                drop_eagle_block=drop,
                alignment_tokens=setting.alignment,
            )
            found.append(([ids(table) for table in blocks], length))
        assert all(one == found[0] for one in found[1:]), (seed, found)
        num_hits += found[0][1] > 0
    assert num_hits > 50


@pytest.mark.parametrize("kind", ["full", "sliding", "mamba"])
def test_masks_are_the_same(vllm: Any, kind: str) -> None:
    num_masks = 0
    for seed in range(2000):
        rng = random.Random(seed)
        setting = Setting(kind, rng)
        start = rng.randint(0, 40)
        end = start + rng.randint(0, 20)
        alignment = rng.choice((None, 3, *(setting.block_size * n for n in (1, 2, 3, 5, 7))))
        arguments: dict[str, Any] = {
            "start_block": start,
            "end_block": end,
            "alignment_tokens": alignment,
            "use_eagle": rng.random() < 0.5,
            "retention_interval": rng.choice((None, 0, *((alignment or 4) * n for n in (1, 2, 5)))),
            "reachable_boundaries": [rng.randint(0, 400) for _ in range(rng.randint(0, 3))],
            "final_segment_end_block": rng.choice((None, rng.randint(start, end + 10))),
        }
        masks = [
            getattr(manager_module, setting.manager_name).reachable_block_mask(
                kv_cache_spec=setting.make_spec(spec_module), **arguments
            )
            for spec_module, manager_module in ((vllm.specs, vllm.managers), (specs, managers))
        ]
        assert masks[1] == masks[0], (seed, arguments)
        num_masks += masks[0] is not None and any(masks[0])
    assert num_masks > 100 or kind == "full"


def test_checkpoint_rules_are_the_same(vllm: Any) -> None:
    from kvpool.cache.managers import mamba_align

    rng = random.Random(1)
    num_valid = 0
    for _ in range(5000):
        hash_size, scale = rng.choice((1, 2, 4)), rng.randint(1, 4)
        drop = rng.random() < 0.5
        num_tokens = rng.randint(0, 60)
        positions = [
            module.get_mamba_prefill_checkpoint_position(num_tokens, hash_size, drop)
            for module in (vllm.specs, mamba_align)
        ]
        assert positions[1] == positions[0]
        arguments = (
            rng.randint(0, 30),
            num_tokens,
            positions[0] if rng.random() < 0.5 else rng.randint(0, 60),
            hash_size,
            hash_size * scale,
            rng.choice((None, 1, 2, 4)),
        )
        valid = [module.is_mamba_prefill_checkpoint_valid(*arguments) for module in (vllm.specs, mamba_align)]
        assert valid[1] == valid[0], arguments
        num_valid += valid[0]
    assert num_valid > 50


@pytest.mark.parametrize("kind", KINDS)
def test_managers_are_chosen_and_bounded_alike(vllm: Any, kind: str) -> None:
    if kind == "sink":
        pytest.skip("vLLM's factory can't make this one")
    for seed in range(20):
        setting = Setting(kind, random.Random(seed))
        made = []
        for spec_module, manager_module, make in (
            (vllm.specs, vllm.managers, vllm.BlockPool),
            (specs, managers, make_backend(BACKEND_NAMES[0]).BlockPool),
        ):
            manager = manager_module.get_manager_for_kv_cache_spec(
                setting.make_spec(spec_module),
                max_in_flight_tokens=10,
                max_model_len=50,
                role="default",
                block_pool=make(4, True, HASH_SIZE),
                enable_caching=True,
                kv_cache_group_id=0,
                scheduler_block_size=setting.block_size,
                needs_kv_cache_zeroing=True,
            )
            made.append(
                (
                    type(manager).__name__,
                    manager.max_admission_blocks_per_request,
                    manager.records_new_block_ids,
                    manager.supports_fine_grained_hash_lookup,
                    manager.retains_longer_hit,
                    manager.cache_hit_alignment_tokens,
                    [max(manager.get_num_skipped_tokens(n), 0) for n in range(40)],
                )
            )
        assert made[1] == made[0]
