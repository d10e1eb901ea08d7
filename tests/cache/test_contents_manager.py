"""Never a wrong token, through the cache manager: random histories whose steps are executed on a simulated KV memory.

The histories are those of ``manager_histories``, each on one half alone, so that nothing but the contents can tell. The
pool is far smaller than the prefixes; requests share prefixes, differ in adapter, salt or pictures alone, are aborted,
preempted, resumed with fewer tokens, decode with drafts that are right or wrong, adopt parts of their hits, get tokens
from elsewhere; hashes are evicted and reset.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from kv_contents import WRONG_TOKEN, ContentsWorker, KnownSequence, Part, start_digest
from manager_histories import History, Stack
from manager_layouts import MAKERS, Layout, ManagerRequest
from scheduler_runs import STACKS
from token_requests import Picture

from kvpool.cache.managers import FullAttentionManager
from kvpool.errors import BlockStateError
from kvpool.requests.status import RequestStatus

NUM_SEEDS = max(20, int(os.environ.get("KVPOOL_CONTENTS_SEEDS", "20")))  # per kind of layout and half

EXPECTED = {
    "hit tokens": MAKERS.keys() - {"mamba_other", "encoder_decoder"},
    "preemptions": MAKERS.keys(),
    "drafts accepted": MAKERS.keys() - {"hybrid_three"},
    "drafts rejected": MAKERS.keys() - {"hybrid_three"},
    "copies": {"hybrid_mamba"},
    "external": {"full", "hybrid"},
    "hits cut": {"full", "two_full"},
    "truncated": MAKERS.keys(),
}


class Appending:
    """A request of kvpool's own as histories use it."""

    def append(self, token_ids: Iterable[int]) -> None:
        self.append_output_token_ids(list(token_ids))  # type: ignore[attr-defined]


REQUEST_CLASSES = {name: type("AppendingRequest", (Appending, halves.Request), {}) for name, halves in STACKS.items()}


class CuttingStack(Stack):
    """Adopts a part of some hits, where the rest of a hit is one too."""

    rng: random.Random
    num_cut = 0

    def find_hit(self, request: Any) -> tuple[Any, int, int]:
        blocks, num_tokens, boundary = super().find_hit(request)
        size = self.manager.coordinator.scheduler_block_size
        has_only_full = all(
            isinstance(manager, FullAttentionManager) for manager in self.manager.coordinator.single_type_managers
        )
        if self.manager.num_kv_cache_groups == 1 and has_only_full and self.rng.random() < 0.5:
            # What is compiled must find the same.
            found, num_found = self.manager.get_computed_blocks(request)
            assert (found.get_block_ids(), num_found) == (blocks.get_block_ids(), num_tokens)
            blocks = found
        if num_tokens > size and has_only_full and self.rng.random() < 0.2:
            num_tokens = self.rng.randrange(size, num_tokens, size)
            blocks = self.manager.truncate_computed_blocks(blocks, num_tokens)
            self.num_cut += 1
        return blocks, num_tokens, boundary


class ContentsHistory(History):
    """A history on one half, executed."""

    num_steps = 60

    def __init__(self, seed: int, backend_name: str, kinds: tuple[str, ...] | None = None) -> None:
        # With events on, a pool goes other ways.
        super().__init__(
            seed, lambda layout: [CuttingStack(backend_name, layout, events=seed % 4 == 0)], RequestStatus, kinds
        )
        self.stacks[0].rng = self.rng
        if self.layout.has("mamba") and self.layout.num_speculative_blocks == 0:
            self.options.max_drafts = 0  # there is no place for their states
        if seed % 3 == 1 and not self.layout.has("mamba"):
            self.options.max_drafts, self.options.num_lookahead_tokens, self.options.budget = 2, 4, 3
            self.options.external = not self.layout.has("cross")
        self.request_class = REQUEST_CLASSES[backend_name]
        self.manager = manager = self.stacks[0].manager
        coordinator = manager.coordinator
        self.worker = ContentsWorker(
            [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups],
            hash_block_size=self.hash_block_size,
            cache_hit_alignment_tokens=coordinator.single_type_managers[0].cache_hit_alignment_tokens,
            drop_eagle_block=self.layout.use_eagle,
            num_encoder_tokens=6 if self.layout.has("cross") else 0,
        )
        self.hasher = STACKS[backend_name].BlockHasher("sha256", self.hash_block_size)
        self.sequences: dict[str, KnownSequence] = {}
        self.prompts: list[list[int]] = []
        self.loads: dict[str, tuple[int, int]] = {}

    # ---- requests ----

    def make_request(self, request_id: str, tokens: list[int], skip_reading_prefix_cache: bool) -> Any:
        rng = self.rng
        if self.prompts and rng.random() < 0.15:
            tokens = rng.choice(self.prompts)[:]  # the same once more
        self.prompts.append(tokens[:])
        salt = rng.choice([*[None] * 12, "salt", "X", ""])
        if self.num_requests % 4 == 0:
            return ManagerRequest(request_id, tokens, self.hash_block_size, RequestStatus.WAITING, cache_salt=salt)
        pictures = []
        if rng.random() < 0.1:
            start = rng.randrange(len(tokens))
            length = rng.randint(1, len(tokens) - start)  # an identifier stands for one picture, of one size
            pictures = [Picture(f"{rng.choice(['cat', 'dog'])} {length}", start, length)]
        # Its caller may take tokens back, and have others follow.
        num_taken_back = rng.randint(1, len(tokens) - 1) if rng.random() < 0.2 and not pictures and tokens[1:] else 0
        request = self.request_class(
            request_id,
            tokens,
            self.hasher,
            cache_salt=salt,
            lora_name=rng.choice([*[None] * 8, "X", "poems"]),
            mm_features=pictures,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )
        if num_taken_back:
            request.truncate(len(tokens) - num_taken_back)
            request.append([rng.randrange(3) for _ in range(rng.randint(1, num_taken_back + 1))])
            request.num_prompt_tokens = request.num_tokens
            self.seen["truncated"] += 1
        return request

    def items_of(self, request: Any) -> list[Any]:
        items: list[Any] = list(request.all_token_ids)
        for picture in request.mm_features:
            first, length = picture.mm_position.offset, picture.mm_position.length
            for i in range(first, min(first + length, len(items))):
                items[i] = (items[i], picture.identifier, i - first)
        return items

    def sequence_of(self, request: Any) -> KnownSequence:
        """What a worker knows when a request is new to it, or comes back."""
        # A ManagerRequest hashes salt "" and None apart; nobody is harmed by that.
        lora = request.lora_request.lora_name if request.lora_request else None
        start = start_digest(lora, request.cache_salt or None)
        tables = self.manager.get_block_ids(request.request_id)
        return KnownSequence(request.request_id, start, self.items_of(request), tables)

    def preempt(self, request: Any) -> None:
        super().preempt(request)
        is_own = isinstance(request, self.request_class)
        if is_own and not request.mm_features and self.rng.random() < 0.3 and request.num_tokens > 1:
            # Its caller takes tokens back, and others follow.
            request.truncate(self.rng.randint(1, request.num_tokens - 1))
            request.append([self.rng.randrange(3) for _ in range(self.rng.randint(1, 3))])
            self.seen["truncated"] += 1

    def choose_victim(self, scheduled: dict[str, int]) -> Any:
        """Nobody who is in the step: its blocks can be hit already, and would not be computed."""
        return next(request for request in reversed(self.running) if request.request_id not in scheduled)

    # ---- steps ----

    def allocate(self, request: Any, num_new: int, hits: dict[str, Any] | None = None, **options: Any) -> Any:
        new_ids = super().allocate(request, num_new, hits, **options)
        if new_ids is None:
            return None
        sequence = self.sequences.get(request.request_id)
        if hits is not None or sequence is None:
            self.sequences[request.request_id] = self.sequence_of(request)
        else:
            sequence.append_blocks(new_ids or [[] for _ in sequence.tables])
        num_external = options.get("num_external_computed_tokens", 0)
        if num_external:
            end = options["num_new_computed_tokens"] + num_external
            self.loads[request.request_id] = end - num_external, end
        return new_ids

    def decode_at_once(self, scheduled: dict[str, int]) -> None:
        before = {request.request_id: self.manager.get_block_ids(request.request_id) for request in self.running}
        super().decode_at_once(scheduled)
        for request_id in scheduled:
            old, new = before[request_id], self.manager.get_block_ids(request_id)
            self.sequences[request_id].append_blocks([table[len(was) :] for was, table in zip(old, new)])

    def release(self, request: Any) -> None:
        self.sequences.pop(request.request_id, None)
        self.loads.pop(request.request_id, None)
        super().release(request)

    def finish_load(self, request: Any) -> None:
        self.loading.remove(request)
        self.worker.load(self.sequences[request.request_id], *self.loads.pop(request.request_id))
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.waiting.insert(0, request)

    def execute(self, scheduled: dict[str, int], copies: list[tuple[int, int]]) -> None:
        memory, parts = self.worker.memory, []
        memory.zero(self.manager.take_new_block_ids())
        memory.copy(copies)
        for request in self.running[:]:
            num_new = scheduled.get(request.request_id)
            if num_new is None:
                continue
            sequence = self.sequences[request.request_id]
            load = self.loads.pop(request.request_id, None)
            if load is not None:
                self.worker.load(sequence, *load)
            start, num_tokens = request.num_computed_tokens, request.num_tokens
            end, num_drafts = start + num_new, 0
            self.compute(request, num_new)
            num_accepted = 0
            if end >= num_tokens:
                num_drafts = end - num_tokens
                num_accepted = request.num_computed_tokens - num_tokens
                self.seen["drafts accepted"] += num_accepted > 0
                self.seen["drafts rejected"] += num_accepted < num_drafts
            sequence.write_at(num_tokens, self.items_of(request)[num_tokens : num_tokens + num_accepted + 1])
            if num_drafts > num_accepted:
                sequence.write_at(num_tokens + num_accepted, [WRONG_TOKEN] * (num_drafts - num_accepted + 1))
            lookahead = self.options.num_lookahead_tokens
            parts.append((request, Part(sequence, start, end, num_drafts, num_accepted, lookahead)))
        self.worker.compute([part for _, part in parts])
        for request, part in parts:
            # The token that was sampled, in the place of a draft that was wrong.
            known = part.end - part.num_drafts + part.num_accepted
            if known == len(self.items_of(request)) - 1:
                part.sequence.write_at(known, self.items_of(request)[known:])
        self.seen["computed"] += len(parts)
        self.seen["hits cut"] = self.stacks[0].num_cut


def run(seed: int, backend_name: str, kind: str) -> Counter[str]:
    history = ContentsHistory(seed, backend_name, (kind,))
    try:
        history.run()
        return history.seen + Counter({"reads": history.worker.memory.num_reads})
    except Exception as error:
        raise AssertionError(f"history of kind {kind}, seed {seed}, {backend_name}, {history.layout}") from error


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_token_is_read_as_it_was_written(kind: str, backend_name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        seen += run(seed, backend_name, kind)
    for what, kinds in EXPECTED.items():
        assert seen[what] or kind not in kinds, (what, seen)


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_a_hit_that_was_given_away_is_refused(backend_name: str) -> None:
    """By the calls for kvpool's own requests; for those of others, see ``test_kv_cache_manager``."""
    layout = Layout([("full", 4, 0, False)], num_blocks=8)
    manager = Stack(backend_name, layout, events=False).manager  # with events, all goes the general way
    hasher = STACKS[backend_name].BlockHasher("sha256", 4)

    def make_request(request_id: str, tokens: list[int]) -> Any:
        return REQUEST_CLASSES[backend_name](request_id, tokens, hasher)

    first = make_request("first", list(range(12)))
    manager.allocate_slots(first, 12)
    manager.free(first)
    second = make_request("second", list(range(13)))
    blocks, num_tokens = manager.get_computed_blocks(second)
    assert num_tokens == 12
    thief = make_request("thief", list(range(100, 128)))
    assert manager.allocate_slots(thief, 28) is not None
    manager.free(thief)
    with pytest.raises(BlockStateError):
        manager.allocate_slots(second, 1, num_tokens, blocks)
    manager.block_pool.check()
    assert manager.block_pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("backend_name", BACKEND_NAMES)
def test_only_what_a_step_computes_is_published(backend_name: str) -> None:
    manager = Stack(backend_name, Layout([("full", 4, 0, False)], num_blocks=12), events=False).manager
    hasher = STACKS[backend_name].BlockHasher("sha256", 4)
    first, second = (REQUEST_CLASSES[backend_name](name, list(range(20)), hasher) for name in ("first", "second"))
    assert manager.allocate_slots(first, 4, num_lookahead_tokens=8) is not None
    assert manager.get_computed_blocks(second)[1] == 4
