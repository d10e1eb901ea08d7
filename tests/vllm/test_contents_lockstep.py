"""Never a wrong token under vLLM's Scheduler: random histories whose steps are executed on a simulated KV memory, stock
and with kvpool in its place.

Every slot that the attention of a step reads through its block table must hold what was written for that prefix, and
every text is what the model generates alone. Both halves make the same history; their outputs must be the same, too.
``KVPOOL_CONTENTS_SEEDS=400`` runs more histories. A fault of stock vLLM would fail with the name of that half; none is
met on valid histories such as these.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import gcd, lcm
from typing import Any

import pytest
from kv_contents import (
    WRONG_TOKEN,
    ContentsWorker,
    KnownSequence,
    Part,
    WrongToken,
    extended,
    generated,
    next_token,
    start_digest,
)
from scheduler_contents import chunked_local
from scheduler_runs import full_attention, sliding_window
from test_scheduler_lockstep import answer_fields, bench, fields_of  # noqa: F401 (bench is a fixture)

pytestmark = pytest.mark.vllm

NUM_SEEDS = max(3, int(os.environ.get("KVPOOL_CONTENTS_SEEDS", "20")) // 4)  # per layout and mode
NUM_REQUESTS = 20
MAX_MODEL_LEN = 64
MAX_STEPS = 3000
MOST_TOKENS = 52
VOCABULARY = 50

LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [full_attention()],
    "window": lambda: [sliding_window(6)],
    "local": lambda: [chunked_local(8)],
    "full and window": lambda: [full_attention(), sliding_window(7)],
    "three": lambda: [full_attention(), sliding_window(3), sliding_window(9)],
    "unequal blocks": lambda: [full_attention(8), sliding_window(5)],
}
# "drafts": speculative decoding; "async": a step is planned before the tokens of the last one are known.
MODES = ("plain", "drafts", "async")


@contextmanager
def kvpool_active() -> Iterator[None]:
    """All levels are in place."""
    from kvpool.integrations import vllm as integration
    from kvpool.integrations.vllm import levels
    from kvpool.integrations.vllm.hooks import Hooks

    integration.unregister()
    hooks = Hooks()
    integration.install(levels.NAMES, hooks)
    try:
        yield
    finally:
        hooks.restore()


def make_scheduler(bench: Any, specs: list[Any], mode: str, rng: random.Random) -> Any:  # noqa: F811
    """vLLM's own Scheduler over a pool that is far too small."""
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1 import kv_cache_interface as vllm_specs
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class Grammar(bench.NoGrammar):  # type: ignore[misc,name-defined]
        def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
            return tokens

    init_none_hash(bench._hash_function())
    more = {"window": "sliding_window", "local": "attention_chunk_size"}
    groups = []
    for i, spec in enumerate(specs):
        name = type(spec).__name__
        fields: dict[str, Any] = {"block_size": spec.block_size, "num_kv_heads": 1, "head_size": 8}
        fields |= {field: getattr(spec, field) for field in more.values() if hasattr(spec, field)}
        if name == "FullAttentionSpec":
            fields = {key: value for key, value in fields.items() if key not in more.values()}
        vllm_spec = getattr(vllm_specs, name)(dtype=torch.float32, **fields)
        groups.append(vllm_specs.KVCacheGroupSpec([f"layer {i}"], vllm_spec))
    block_size, hash_block_size = lcm(*(s.block_size for s in specs)), gcd(*(s.block_size for s in specs))
    scheduler_config = SchedulerConfig(
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([9, 16, 64] if len(specs) == 1 else [9, 16]),
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=mode == "async",
        long_prefill_token_threshold=rng.choice([0, 0, 8]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        watermark=rng.choice([0.0, 0.1]),
    )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=bench._model_config(MAX_MODEL_LEN), scheduler_config=scheduler_config, cache_config=cache_config
    )
    # Enough for one sequence of the greatest length that is met, and for little more.
    most_blocks = 0
    for spec in specs:
        window = getattr(spec, "sliding_window", None) or MOST_TOKENS
        most_blocks += -(-min(MOST_TOKENS, window + scheduler_config.max_num_batched_tokens) // spec.block_size) + 1
    num_blocks = cache_config.num_gpu_blocks = most_blocks + rng.randint(0, 4)
    kv_cache_config = vllm_specs.KVCacheConfig(num_blocks, [], groups)
    make = AsyncScheduler if mode == "async" else Scheduler
    scheduler = make(config, kv_cache_config, Grammar(), block_size, hash_block_size, log_stats=True)
    if mode == "drafts":
        scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = rng.randint(1, 4)
    if rng.random() < 0.5:
        manager = scheduler.kv_cache_manager
        manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
    return scheduler


class VllmWorker(ContentsWorker):
    """Executes vLLM's SchedulerOutputs and samples from the made-up model.

    Attributes:
        start_of: by request id, the digest of no token yet.
        sequences, num_computed: by request id, what a worker knows.
    """

    def __init__(self, specs: list[Any], num_lookahead: int) -> None:
        super().__init__(specs)
        self.num_lookahead = num_lookahead
        self.start_of: dict[str, int] = {}
        self.sequences: dict[str, KnownSequence] = {}
        self.num_computed: dict[str, int] = {}
        self.num_copies = self.num_accepted = self.num_rejected = 0

    def execute(self, output: Any) -> dict[str, list[int]]:
        """One step; the tokens by request, none for a piece of a prompt."""
        self._apply(output)
        parts, sampling = [], {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            sequence, start = self.sequences[request_id], self.num_computed[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            num_known, base = len(sequence.digests) - 1, start + num_tokens - len(drafts)
            if base > num_known or (drafts and base != num_known):
                raise WrongToken(f"{request_id}: tokens to {base} and {len(drafts)} drafts, {num_known} are known")
            sampling[request_id] = drafts if base == num_known else None
            sequence.extend(drafts)
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] == next_token(
                sequence.digests[base + num_accepted]
            ):
                num_accepted += 1
            parts.append(Part(sequence, start, base + len(drafts), len(drafts), num_accepted, self.num_lookahead))
        self.compute(parts)
        tokens: dict[str, list[int]] = {}
        for part in parts:
            request_id, sequence = part.sequence.request_id, part.sequence
            computed = self.num_computed[request_id] = part.end - part.num_drafts + part.num_accepted
            drafts = sampling[request_id]
            tokens[request_id] = []
            if drafts is not None:
                tokens[request_id] = [*drafts[: part.num_accepted], next_token(sequence.digests[computed])]
                sequence.write_at(computed, tokens[request_id][-1:])
                self.num_accepted += part.num_accepted
                self.num_rejected += part.num_drafts - part.num_accepted
        return tokens

    def _apply(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.sequences.pop(request_id, None)
        self.memory.zero(output.new_block_ids_to_zero or ())
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        self.memory.copy(copies)
        self.num_copies += len(copies)
        for new in output.scheduled_new_reqs:
            self.sequences[new.req_id] = KnownSequence(
                new.req_id, self.start_of[new.req_id], new.prompt_token_ids, new.block_ids
            )
            self.num_computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sequence = self.sequences[request_id]
            if request_id in cached.all_token_ids:
                sequence.write_at(0, cached.all_token_ids[request_id])
            if request_id in cached.resumed_req_ids:
                sequence.replace_tables(block_ids)
                self.num_computed[request_id] = num_computed
            elif block_ids is not None:
                sequence.append_blocks(block_ids)
            if self.num_computed[request_id] != num_computed:
                raise WrongToken(f"{request_id}: {self.num_computed[request_id]} computed here, told {num_computed}")


class History:
    """One history on one half.

    Attributes:
        log: all that the scheduler said, for comparison with the other half.
        seen: what has happened, counted.
    """

    def __init__(self, bench: Any, seed: int, layout: str, mode: str) -> None:  # noqa: F811
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.bench, self.mode = bench, mode
        self.rng = rng = random.Random(seed)
        self.scheduler = make_scheduler(bench, LAYOUTS[layout](), mode, rng)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = VllmWorker(LAYOUTS[layout](), self.scheduler.num_lookahead_tokens)
        self.hasher = get_request_block_hasher(self.scheduler.hash_block_size, bench._hash_function())
        self.pending: deque[Any] = deque()
        self.executed: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.expected: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.sessions: set[str] = set()
        self.families = [[rng.randrange(VOCABULARY) for _ in range(24)] for _ in range(3)]
        self.num_added = 0
        self.log: list[Any] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        rng = self.rng
        while (
            self.num_added < NUM_REQUESTS
            or self.scheduler.get_num_unfinished_requests()
            or self.pending
            or self.executed
            or self.sessions
        ):
            choice = rng.random()
            if choice < 0.012:
                self.abort()
            elif choice < 0.018:
                self.reset()
            elif choice < 0.035:
                self.scheduler.kv_cache_manager.evict_blocks(set(rng.sample(range(1, self.pool.num_gpu_blocks), 3)))
            elif choice < 0.2 and self.num_added < NUM_REQUESTS:
                self.add()
            elif choice < 0.3 and self.sessions:
                self.continue_session()
            else:
                self.step()
            self.seen["steps"] += 1
            if hasattr(self.pool, "check"):
                self.pool.check()
            if self.seen["steps"] > MAX_STEPS:
                raise AssertionError(f"unfinished after {MAX_STEPS} steps: {list(self.scheduler.requests)}")
        if self.pool.get_num_free_blocks() != self.pool.num_gpu_blocks - 1:
            raise AssertionError(f"{self.pool.get_num_free_blocks()} of {self.pool.num_gpu_blocks} blocks are free")
        self.seen["copies"] += self.worker.num_copies
        self.seen["accepted"] += self.worker.num_accepted
        self.seen["rejected"] += self.worker.num_rejected
        self.seen["reads"] += self.worker.memory.num_reads

    # ---- what happens ----

    def make_request(self, request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(request_id, prompt, sampling, None, arrival_time=0.0, block_hasher=self.hasher, **more)

    def add(self) -> None:
        from vllm.lora.request import LoRARequest

        rng = self.rng
        request_id = f"r{self.num_added}"
        self.num_added += 1
        prompt = rng.choice(self.families)[: rng.randint(1, 24)]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 4))]
        max_tokens = rng.randint(1, 14)
        salt = rng.choice([*[None] * 10, "salt", "X"])
        lora = rng.choice([*[None] * 10, "X", "poems"])
        is_session = self.mode == "plain" and rng.random() < 0.15
        self.worker.start_of[request_id] = start_digest(lora, salt)
        self.expected[request_id] = generated(prompt, max_tokens, start_digest(lora, salt))
        self.texts[request_id] = []
        request = self.make_request(
            request_id,
            prompt,
            max_tokens,
            cache_salt=salt,
            lora_request=None if lora is None else LoRARequest(lora, 1 + len(lora), "/adapter"),
            resumable=is_session,
        )
        self.scheduler.add_request(request)
        if is_session:
            self.sessions.add(request_id)

    def continue_session(self) -> None:
        """More input for a request that has answered: its last token is taken back. Or its end."""
        from vllm.v1.request import RequestStatus

        rng = self.rng
        request_id = rng.choice(sorted(self.sessions))
        session = self.scheduler.requests.get(request_id)
        if session is None:
            self.sessions.discard(request_id)
        elif session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            more, max_tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))], rng.randint(1, 5)
            is_last = rng.random() < 0.4 or session.num_tokens + len(more) + max_tokens > MOST_TOKENS - 4
            self.seen["session ends" if is_last else "session turns"] += 1
            self.scheduler.add_request(self.make_request(request_id, more, max_tokens, resumable=not is_last))
            if is_last:
                self.sessions.discard(request_id)
            self.expected[request_id] = []  # the memory tells alone what is right

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        if self.scheduler.requests:
            request_id = self.rng.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self.sessions.discard(request_id)
            self.seen["aborts"] += 1

    def reset(self) -> None:
        is_forced = self.rng.random() < 0.5 and not self.sessions
        is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=is_forced)
        self.log.append(("reset", is_reset))
        self.seen["resets"] += is_reset

    def step(self) -> None:
        """Schedules, executes or takes tokens, each in order."""
        calls: list[Callable[[], None]] = []
        if len(self.pending) + len(self.executed) < (2 if self.mode == "async" else 1):
            calls.append(self.schedule)
        if self.pending:
            calls.append(self.execute)
        if self.executed:
            calls.append(self.update)
        self.rng.choice(calls)()

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        self.log.append(fields_of(output))
        self.seen["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.seen["hit tokens"] += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        self.pending.append(output)
        self.seen["overlapping"] += len(self.pending) + len(self.executed) > 1

    def execute(self) -> None:
        output = self.pending.popleft()
        self.executed.append((output, self.worker.execute(output)))

    def update(self) -> None:
        output, tokens = self.executed.popleft()
        answers = self.scheduler.update_from_output(output, self.bench.model_runner_output(output, tokens))
        for answer in (each for several in answers.values() for each in several.outputs):
            self.log.append(answer_fields(answer))
            text, expected = self.texts[answer.request_id], self.expected[answer.request_id]
            text += answer.new_token_ids
            if expected and text != expected[: len(text)]:
                raise WrongToken(f"{answer.request_id} says {text}, alone it says {expected}")
            self.seen["finished"] += answer.finish_reason is not None
        if self.mode == "drafts":
            self.propose(tokens)

    def propose(self, request_ids: Iterable[str]) -> None:
        """Drafts of what follows, now and then a wrong one."""
        from vllm.v1.outputs import DraftTokenIds

        proposed: dict[str, list[int]] = {}
        for request_id in request_ids:
            sequence = self.worker.sequences.get(request_id)
            if sequence is not None and request_id in self.scheduler.requests:
                drafts = proposed[request_id] = []
                digest = sequence.digests[-1]
                for _ in range(self.rng.randint(0, self.scheduler.num_spec_tokens)):
                    drafts.append(next_token(digest) if self.rng.random() < 0.7 else WRONG_TOKEN)
                    digest = extended(digest, drafts[-1])
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(proposed), list(proposed.values())))


def run_half(bench: Any, seed: int, layout: str, mode: str, is_native: bool) -> History:  # noqa: F811
    half = "kvpool" if is_native else "stock"
    with kvpool_active() if is_native else nullcontext():
        history = History(bench, seed, layout, mode)
        assert hasattr(history.pool, "check") == is_native
        try:
            history.run()
        except Exception as error:
            raise AssertionError(f"{half}: {layout!r}, {mode}, seed {seed}, step {history.seen['steps']}") from error
    return history


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Resets that fail are part of the histories."""
    for name in ("kvpool", "vllm"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_read_as_it_was_written(bench: Any, layout: str, mode: str) -> None:  # noqa: F811
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        stock, ours = (run_half(bench, seed, layout, mode, is_native) for is_native in (False, True))
        for i, (expected, answer) in enumerate(zip(stock.log, ours.log, strict=True)):
            assert answer == expected, f"{layout!r}, {mode}, seed {seed}: answer {i}"
        seen += ours.seen
    wanted = ["hit tokens", "aborts", "finished", "reads"]
    wanted += {"plain": ["session turns"], "drafts": ["accepted", "rejected"], "async": ["overlapping"]}[mode]
    wanted += ["resumed"] if layout not in ("window", "local") else []
    for what in wanted:
        assert seen[what], (what, seen)


# ---- faults are seen ----


def without_last_token(make: Any) -> Any:
    """Hashes that do not know the last token of their block."""

    def make_hasher(block_size: int, function: Any, *more: Any) -> Any:
        return make(block_size, lambda value: function((value[0], value[1][:-1], value[2])), *more)

    return make_hasher


@pytest.mark.parametrize("fault", ["hash without the last token", "hits that nobody holds", "blocks given back early"])
def test_a_fault_of_the_native_half_is_seen(
    bench: Any,  # noqa: F811
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvpool.integrations.vllm import hasher, pool

    if fault == "hash without the last token":
        monkeypatch.setattr(hasher, "get_request_block_hasher", without_last_token(hasher._stock))
    elif fault == "hits that nobody holds":
        monkeypatch.setattr(pool.BlockPool, "touch", lambda self, blocks: None)
    else:
        stock_cache = pool.BlockPool.cache_full_blocks

        def cache_and_free(self: Any, request: Any, blocks: Any, *more: Any, **named: Any) -> None:
            stock_cache(self, request, blocks, *more, **named)
            self.free_blocks([block for block in blocks[:1] if block.ref_cnt])

        monkeypatch.setattr(pool.BlockPool, "cache_full_blocks", cache_and_free)
    with pytest.raises(AssertionError, match=r"kvpool: 'full', plain, seed"):
        for seed in range(20):
            run_half(bench, seed, "full", "plain", is_native=True)
