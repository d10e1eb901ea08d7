"""A step of the scheduler, applied to block tables and spelled out for kernels by one native call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from naive_table import NaiveTable
from scheduler_runs import Run, full_attention, make_scheduler, mamba, sliding_window

from kvpool.errors import InvalidArgumentError
from kvpool.native.block_rows import BlockRowGroups, BlockRows
from kvpool.native.step_outputs import StepOutputs
from kvpool.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

NUM_ROWS, WIDTH, MAX_TOKENS = 8, 40, 64
# Groups, and blocks: so few that requests are preempted.
CACHES = {
    "full": (lambda: [full_attention()], 20),
    "unequal blocks": (lambda: [full_attention(8), sliding_window(5)], 23),
    "full and mamba": (lambda: [full_attention(), mamba()], 23),
}


def make_outputs(block_sizes: list[int], **options: Any) -> StepOutputs:
    groups = BlockRowGroups([BlockRows(NUM_ROWS, WIDTH, size) for size in block_sizes])
    return StepOutputs(groups, MAX_TOKENS, with_kv_rows=True, with_compressed=True, **options)


class Mirror:
    """Native tables beside the workers of a run, which keep theirs as lists."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.block_sizes = [spec.block_size for spec in run.workers.specs]
        self.outputs = make_outputs(self.block_sizes)
        self.row_of: dict[str, int] = {}

    def step(self) -> int:
        """One step of both; the preemptions in it."""
        output = self.run.schedule()
        for request_id in output.finished_request_ids:
            row = self.row_of.pop(request_id, None)
            if row is not None:
                self.outputs.groups.clear_row(row)
        for new in output.scheduled_new_requests:
            self.row_of[new.request_id] = min(set(range(NUM_ROWS)) - set(self.row_of.values()))
        self.outputs.apply_step(output, self.row_of)
        self.compare(output)
        return len(output.preempted_request_ids)

    def compare(self, output: SchedulerOutput) -> None:
        out = self.outputs
        batch = [*output.scheduled_cached_requests.request_ids, *(r.request_id for r in output.scheduled_new_requests)]
        assert out.num_requests == len(batch) and out.num_tokens == output.total_num_scheduled_tokens
        assert out.rows[: len(batch)].tolist() == [self.row_of[request_id] for request_id in batch]
        starts = out.query_starts.tolist()
        for i, request_id in enumerate(batch):
            end = self.run.workers.states[request_id].num_computed_tokens
            n = output.num_scheduled_tokens[request_id]
            assert starts[i + 1] - starts[i] == n and out.seq_lens[i] == end
            assert out.positions[starts[i] : starts[i + 1]].tolist() == list(range(end - n, end))
            assert set(out.token_rows[starts[i] : starts[i + 1]].tolist()) == {self.row_of[request_id]}
        for group in range(len(self.block_sizes)):
            self.compare_group(group, batch)

    def compare_group(self, group: int, batch: list[str]) -> None:
        out, block_size = self.outputs, self.block_sizes[group]
        naive = NaiveTable(len(batch), WIDTH, block_size)
        naive.rows = [self.run.workers.states[request_id].tables[group] for request_id in batch]
        rows, n = out.rows[: len(batch)], out.num_tokens
        assert np.array_equal(out.groups.groups[group].block_ids[rows], naive.padded().reshape(-1, WIDTH))
        out.groups.groups[group].check()
        requests = np.repeat(np.arange(len(batch)), np.diff(out.query_starts[: len(batch) + 1]))
        slots = [naive.slot(i, p) for i, p in zip(requests.tolist(), out.positions[:n].tolist())]
        assert out.slots[group][:n].tolist() == slots
        cache = np.arange(2 * block_size * 10_000).reshape(-1, 2, block_size)
        blocks, offsets = np.divmod(np.array(slots, int), block_size)
        assert np.array_equal(out.key_rows[group][:n], cache[blocks, 0, offsets])
        assert np.array_equal(out.value_rows[group][:n], cache[blocks, 1, offsets])
        filled = [-(-length // block_size) for length in out.seq_lens[: len(batch)].tolist()]
        starts = out.block_starts[group][: len(batch) + 1]
        assert starts.tolist() == np.cumsum([0, *filled]).tolist()
        held = [b for row, count in zip(naive.rows, filled) for b in row[:count]]
        assert out.blocks[group][: starts[-1]].tolist() == held
        computed = out.seq_lens[: len(batch)] - np.diff(out.query_starts[: len(batch) + 1])
        limit = int(computed.min(initial=0 if not batch else 2**30)) // block_size
        assert out.num_common_blocks[group] == naive.num_common(range(len(batch)), limit)


@pytest.mark.parametrize("cache", CACHES)
def test_steps_of_a_scheduler(cache: str) -> None:
    """Shared prefixes, chunked prefills, preemptions and resumptions."""
    make_specs, num_blocks = CACHES[cache]
    num_preempted = 0
    for seed in range(4):
        rng = random.Random(seed)
        options = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 24}
        run = Run(make_scheduler("native", num_blocks, make_specs(), max_model_len=120, **options), "native")
        mirror = Mirror(run)
        prefix = [rng.randrange(50) for _ in range(17)]
        num_added = 0
        for _ in range(150):
            if num_added < 25 and rng.random() < 0.9 and len(run.scheduler.requests) < NUM_ROWS:
                prompt = prefix[: rng.randrange(18)] + [rng.randrange(50) for _ in range(rng.randrange(1, 25))]
                run.add(f"r{num_added}", prompt, rng.randrange(1, 20))
                num_added += 1
            num_preempted += mirror.step()
            while run.under_way:
                run.update()
        assert num_added == 25
    assert num_preempted > 0


def step_of(**changes: Any) -> SchedulerOutput:
    """A step in which "a" decodes behind 7 tokens and gets block 9, and "b" prefills 3 tokens behind a hit of 4."""
    step: dict[str, Any] = {
        "step": 1,
        "scheduled_new_requests": [NewRequestData("b", [1] * 7, ([5, 8],), 4)],
        "scheduled_cached_requests": CachedRequestData(["a"], [False], [([9],)], [7], [1], [[3]]),
        "num_scheduled_tokens": {"a": 1, "b": 3},
        "total_num_scheduled_tokens": 4,
        "sampled_request_ids": [],
        "finished_request_ids": [],
        "preempted_request_ids": [],
        "new_block_ids_to_zero": [],
        "block_copies": [],
    }
    return SchedulerOutput(**{**step, **changes})


def started() -> StepOutputs:
    outputs = make_outputs([4])
    outputs.groups.add_row(([5, 6],), 2)
    return outputs


def test_one_step() -> None:
    outputs = started()
    outputs.apply_step(step_of(), {"a": 2, "b": 0})
    assert (outputs.num_requests, outputs.num_tokens) == (2, 4)
    assert outputs.groups.groups[0].block_ids[[0, 2], :4].tolist() == [[5, 8, 0, 0], [5, 6, 9, 0]]
    assert outputs.slots[0][:4].tolist() == [27, 32, 33, 34] and outputs.positions[:4].tolist() == [7, 4, 5, 6]
    assert outputs.key_rows[0][:4].tolist() == [51, 64, 65, 66]
    assert outputs.value_rows[0][:4].tolist() == [55, 68, 69, 70]
    assert outputs.block_starts[0][:3].tolist() == [0, 2, 4] and outputs.blocks[0][:4].tolist() == [5, 6, 5, 8]
    assert outputs.last_block_lens[0][:2].tolist() == [4, 3] and outputs.num_common_blocks == [1]


def test_a_resumed_request_gets_a_new_table() -> None:
    outputs = started()
    resumed = CachedRequestData(["a"], [True], [([3],)], [0], [1], [[3]])
    outputs.apply_step(step_of(scheduled_cached_requests=resumed, scheduled_new_requests=[]), {"a": 2})
    assert outputs.groups.groups[0].block_ids[2, :3].tolist() == [3, 0, 0] and outputs.slots[0][0] == 12


def test_a_step_without_requests() -> None:
    outputs = started()
    nobody = CachedRequestData([], [], [], [], [], [])
    outputs.apply_step(step_of(scheduled_cached_requests=nobody, scheduled_new_requests=[]), {})
    assert (outputs.num_requests, outputs.num_tokens, outputs.num_common_blocks) == (0, 0, [0])
    assert outputs.query_starts[0] == 0 and outputs.block_starts[0][0] == 0


@pytest.mark.parametrize(
    ("changes", "row_of", "error"),
    [
        ({}, {"a": 2}, KeyError),
        ({"num_scheduled_tokens": {"b": 3}}, {"a": 2, "b": 0}, KeyError),
        ({"num_scheduled_tokens": {"a": 0, "b": 3}}, {"a": 2, "b": 0}, InvalidArgumentError),
        ({"num_scheduled_tokens": {"a": 1, "b": MAX_TOKENS}}, {"a": 2, "b": 0}, InvalidArgumentError),
        ({}, {"a": 2, "b": NUM_ROWS}, InvalidArgumentError),
        ({"scheduled_new_requests": [NewRequestData("b", [1], ([1], [1]), 4)]}, {"a": 2, "b": 0}, InvalidArgumentError),
        (
            {"scheduled_new_requests": [NewRequestData("b", [1], (list(range(WIDTH + 1)),), 4)]},
            {"a": 2, "b": 0},
            InvalidArgumentError,
        ),
        (
            {"scheduled_cached_requests": CachedRequestData(["a"], [], [([9],)], [7], [1], [[3]])},
            {"a": 2, "b": 0},
            InvalidArgumentError,
        ),
    ],
    ids=["no row", "no tokens", "0 tokens", "step too large", "row", "groups", "row too long", "lists"],
)
def test_a_refused_step_changes_no_table(changes: dict[str, Any], row_of: dict[str, int], error: type) -> None:
    outputs = started()
    before = outputs.groups.groups[0].block_ids.copy()
    with pytest.raises(error):
        outputs.apply_step(step_of(**changes), row_of)
    assert np.array_equal(outputs.groups.groups[0].block_ids, before)
    outputs.groups.groups[0].check()


def test_a_token_for_which_the_scheduler_gave_no_block_is_named() -> None:
    outputs = started()
    late = CachedRequestData(["a"], [False], [None], [8], [1], [[3]])
    with pytest.raises(InvalidArgumentError, match="no block for position 8"):
        outputs.apply_step(step_of(scheduled_cached_requests=late), {"a": 2, "b": 0})
