"""Random histories of a scheduler whose steps are executed on a simulated KV memory; every text is checked.

Between scheduling a step, executing it and taking its tokens anything can happen: further steps, aborts, evictions,
resets. Steps fail before, in the middle of or after what they write, and are withdrawn, as are steps that nobody has
executed; requests end with an error; calls of the scheduler are interrupted. Every text is what the model generates
alone, and at the end no block is lost.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
from interrupts import Interrupted, Interrupter
from kv_contents import MessageWorker, StepFailed, generated, start_digest
from scheduler_runs import STACKS, full_attention, make_scheduler, mamba, sliding_window
from token_requests import Picture

from kvpool.cache.spec import ChunkedLocalAttentionSpec, SinkFullAttentionSpec
from kvpool.scheduler import RequestTooLargeError, SchedulerOutput
from kvpool.scheduler.output import StepResult

MAX_MODEL_LEN = 64
DECODER = msgspec.msgpack.Decoder(SchedulerOutput)


def chunked_local(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", attention_chunk_size=size
    )


def sink(block_size: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sink_len=4)


SPECS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [full_attention()],
    "sink": lambda: [sink()],
    "window": lambda: [sliding_window(6)],
    "local": lambda: [chunked_local(8)],
    "full and window": lambda: [full_attention(), sliding_window(7)],
    "full and local": lambda: [full_attention(), chunked_local(12)],
    "three": lambda: [full_attention(), sliding_window(3), sliding_window(9)],
    "unequal blocks": lambda: [full_attention(8), sliding_window(5)],
    "full and mamba": lambda: [full_attention(), mamba()],
    "unequal mamba": lambda: [full_attention(), mamba(8)],
    "hits inside blocks": lambda: [full_attention(8), mamba(8)],
}
MANAGER_OPTIONS: dict[str, dict[str, Any]] = {"hits inside blocks": {"hash_block_size": 4}}
# Requests hold few blocks where they give them back as they go.
NUM_BLOCKS = {"window": (8, 12), "local": (8, 12)}


def random_prompt(rng: random.Random, families: list[list[int]]) -> list[int]:
    """The beginning of one of the families, often with a whole number of blocks; mostly with tokens of its own, now
    and then with another token in the middle."""
    prompt = rng.choice(families)[: rng.choice([4, 8, 16, 24, rng.randint(1, 24)])]
    if rng.random() < 0.25:
        prompt[rng.randrange(len(prompt))] = rng.randrange(50)
    return prompt + [rng.randrange(50) for _ in range(rng.choice([0, 0, 1, 2, 3, 4]))]


class SchedulerHistory:
    """One history on one half.

    Attributes:
        pending: steps that are scheduled and not executed; executed: those whose tokens have not been taken.
        expected: by request id, all that a request generates if nobody ends it.
        seen: what has happened, counted.
    """

    def __init__(
        self,
        seed: int,
        backend_name: str,
        cache: str,
        policy: str = "fcfs",
        *,
        fails: bool,
        is_interrupted: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.halves = STACKS[backend_name]
        self.depth = rng.choice([1, 1, 2, 3])
        budget = rng.choice([4, 7, 16, 40])
        self.scheduler = make_scheduler(
            backend_name,
            specs=SPECS[cache](),
            num_blocks=rng.randint(*NUM_BLOCKS.get(cache, (11, 22))) + 7 * (len(SPECS[cache]()) - 1),
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            max_num_batched_tokens=budget,
            max_num_seqs=rng.randint(2, 10),
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
            reserve_full_sequence=rng.random() < 0.5,
            manager={
                "watermark": rng.choice([0.0, 0.0, 0.1]),
                "max_in_flight_tokens": budget * self.depth,
                **MANAGER_OPTIONS.get(cache, {}),
            },
        )
        manager = self.scheduler.kv_cache_manager
        self.pool = manager.block_pool
        self.worker = MessageWorker([group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups])
        self.hasher = self.halves.BlockHasher("sha256", manager.hash_block_size)
        self.pending: deque[SchedulerOutput] = deque()
        self.executed: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.families = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
        self.num_added = 0
        self.fails, self.is_interrupted = fails, is_interrupted
        self.seen: Counter[str] = Counter()

    # ---- what happens ----

    def run(self, num_requests: int = 24) -> Counter[str]:
        rng = self.rng
        while self.num_added < num_requests or self.scheduler.has_unfinished_requests() or self.executed:
            choice = rng.random()
            if self.fails and rng.random() < 0.03:
                self.withdraw()
                self.scheduler.check()
            if choice < (0.03 if self.fails else 0.01):
                self.abort()
            elif choice < 0.035:
                self.reset()
            elif choice < 0.05:
                self.scheduler.kv_cache_manager.evict_blocks(rng.sample(range(1, self.pool.num_gpu_blocks), 3))
            elif choice < 0.15 and self.num_added < num_requests:
                self.add()
            else:
                self.step()
            self.scheduler.check()
            if self.seen["steps"] > 4000:
                raise AssertionError(f"unfinished after 4000 steps: {list(self.scheduler.requests.values())}")
        stats = self.scheduler.make_stats()
        self.seen["preemptions"] = stats.num_preemptions
        self.seen["hit tokens"] = stats.prefix_hit_tokens + stats.resumed_hit_tokens
        self.seen["copies"] = self.worker.num_copies
        self.seen["zeroed"] = self.worker.num_zeroed
        if self.pool.get_num_free_blocks() != self.pool.num_gpu_blocks - 1:
            raise AssertionError(f"{self.pool.get_num_free_blocks()} of {self.pool.num_gpu_blocks} blocks are free")
        return self.seen

    def add(self, prompt: list[int] | None = None) -> None:
        """Adds a request with that prompt and nothing else, or a random one."""
        rng = self.rng
        request_id = f"r{self.num_added}"
        self.num_added += 1
        is_plain = prompt is not None
        prompt = random_prompt(rng, self.families) if prompt is None else prompt
        max_tokens = min(rng.randint(1, 14), MAX_MODEL_LEN - len(prompt))
        salt = None if is_plain else rng.choice([*[None] * 10, "salt", "X"])
        lora = None if is_plain else rng.choice([*[None] * 10, "X", "poems"])
        pictures, items = [], list(prompt)
        if not is_plain and rng.random() < 0.1:
            first = rng.randrange(len(prompt))
            length = rng.randint(1, len(prompt) - first)  # an identifier stands for one picture, of one size
            picture = Picture(f"{rng.choice(['cat', 'dog'])} {length}", first, length)
            pictures.append(picture)
            for i in range(first, first + picture.mm_position.length):
                items[i] = (prompt[i], picture.identifier, i - first)
        request = self.halves.Request(
            request_id,
            prompt,
            self.hasher,
            max_tokens,
            priority=rng.randrange(3),
            arrival_time=float(self.num_added),
            cache_salt=salt,
            lora_name=lora,
            mm_features=pictures,
        )
        try:
            self.scheduler.add_request(request)
        except RequestTooLargeError:
            self.seen["refused"] += 1
            return
        start = start_digest(lora, salt)
        self.expected[request_id] = generated(items, max_tokens, start)
        self.worker.start_of[request_id] = start
        self.worker.text_of[request_id] = items + self.expected[request_id]
        self.outputs[request_id] = []

    def abort(self) -> None:
        unfinished = sorted(self.scheduler.requests)
        if unfinished:
            request_id = self.rng.choice(unfinished)
            request = self.scheduler.requests[request_id]
            is_in_flight = request.num_in_flight_tokens > 0
            self.seen["aborts"] += 1
            self.seen["aborts in flight"] += is_in_flight
            self.call(self.scheduler.finish_requests, request_id)
            if request_id in self.scheduler.requests:
                self.seen["aborts that did not happen"] += 1
            self.check_text(request_id)
            if self.fails and is_in_flight and self.rng.random() < 0.5:
                # Nobody is to hit what it left, when its steps are withdrawn as well.
                self.withdraw()
                self.add(list(request.all_token_ids)[: MAX_MODEL_LEN - 1])

    def reset(self) -> None:
        reset_running_requests = self.rng.random() < 0.5
        is_reset = self.call(self.scheduler.reset_prefix_cache, reset_running_requests)
        if reset_running_requests and is_reset is False:
            raise AssertionError("the cache was not reset, although nothing runs")
        self.seen["resets"] += is_reset is True

    def step(self) -> None:
        """Schedules, executes or takes tokens; steps are executed in their order, and so are their tokens taken."""
        self.seen["steps"] += 1
        calls = []
        if len(self.pending) + len(self.executed) < self.depth:
            calls.append(self.schedule)
        if self.pending:
            calls.append(self.execute)
        if self.executed:
            calls.append(self.update)
        self.rng.choice(calls)()

    def schedule(self) -> None:
        num_under_way = len(self.scheduler.steps_under_way)
        output = self.call(self.scheduler.schedule)
        if output is None:
            assert len(self.scheduler.steps_under_way) == num_under_way
            return
        self.pending.append(DECODER.decode(msgspec.msgpack.encode(output)))
        self.seen["overlapping"] += len(self.pending) > 1

    def execute(self) -> None:
        output = self.pending[0]
        if self.fails and self.rng.random() < 0.12:
            when = self.rng.choice(["before", "middle", "after"])
            self.worker.fail = when, self.rng.randrange(1 + 2 * output.total_num_scheduled_tokens)
        if self.fails and output.sampled_request_ids and self.rng.random() < 0.03:
            self.worker.errors[self.rng.choice(output.sampled_request_ids)] = "no number"
        try:
            result = self.worker.execute(output)
        except StepFailed as failure:
            self.seen[f"failed {failure.when}"] += 1
            self.withdraw_from(output)
            return
        self.pending.popleft()
        if output.num_scheduled_tokens:
            self.executed.append((output, result))

    def withdraw(self) -> None:
        """A step that nobody has executed, or whose tokens got lost, and all after it."""
        outputs = [output for output, _ in self.executed] + list(self.pending)
        if outputs:
            self.seen["withdrawn"] += 1
            self.withdraw_from(self.rng.choice(outputs))

    def withdraw_from(self, output: SchedulerOutput) -> None:
        outputs = [done for done, _ in self.executed] + list(self.pending)
        while self.call(self.scheduler.withdraw, output) is None:
            if output.num_scheduled_tokens and all(
                step.number < output.step for step in self.scheduler.steps_under_way
            ):
                break  # interrupted, and has happened
        kept = {done.step for done in outputs[: outputs.index(output)]}
        self.executed = deque((done, result) for done, result in self.executed if done.step in kept)
        self.pending = deque(done for done in self.pending if done.step in kept)
        assert [step.number for step in self.scheduler.steps_under_way] == [
            done.step for done in outputs if done.step in kept and done.num_scheduled_tokens
        ]

    def update(self) -> None:
        output, result = self.executed[0]
        tokens = dict(result.tokens)
        for request_id in result.tokens:
            # Now and then the caller knows what follows.
            request = self.scheduler.requests.get(request_id)
            if request is not None and self.rng.random() < 0.05:
                num_known = request.num_output_tokens
                tokens[request_id] = self.expected[request_id][num_known : num_known + 3]
                self.seen["several tokens"] += len(tokens[request_id]) > 1
        errors = {name: reason for name, reason in result.errors.items() if name in self.scheduler.requests}
        outputs = self.call(self.scheduler.update_from_output, output, tokens, errors)
        if outputs is None and any(step.number == output.step for step in self.scheduler.steps_under_way):
            return  # it has not happened
        self.executed.popleft()
        self.take(outputs or [])

    def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call of the scheduler, perhaps interrupted: None then, and it has happened or has not."""
        if not self.is_interrupted or self.rng.random() < 0.6:
            return call(*arguments)
        try:
            return Interrupter(int(self.rng.expovariate(1 / 150)))(call, *arguments)
        except Interrupted:
            self.seen["interrupted"] += 1
            self.scheduler.check()
            return None

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.outputs[output.request_id] += output.new_token_ids
            self.check_text(output.request_id)
            if output.finish_reason == "error":
                self.seen["ended by an error"] += 1
            elif output.finish_reason is not None:
                assert self.outputs[output.request_id] == self.expected[output.request_id]
                self.seen["finished"] += 1

    def check_text(self, request_id: str) -> None:
        text = self.outputs[request_id]
        assert text == self.expected[request_id][: len(text)], request_id
