"""Triton kernels of the worker against plain code: called by the tests with a device, or in a process of its own where
TRITON_INTERPRET=1 makes them run on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpool.worker.kernels.decode import Split, paged_decode
from kvpool.worker.kernels.slot_write import write_to_slots

POISON = 2**31 - 1  # a block id that must not be read
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class SlotWrites:
    """Tokens to write: ``layout`` is how keys and values lie in memory."""

    num_tokens: int
    block_size: int
    num_heads: int
    head_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "fused"
    num_blocks: int = 5


def tokens_of(case: SlotWrites, device: str) -> tuple[Any, Any]:
    n, heads, size = case.num_tokens, case.num_heads, case.head_size
    if case.layout == "fused":
        fused = torch.randn(n, 4 * heads, size, device=device).to(case.dtype)
        return fused[:, heads : 2 * heads], fused[:, 3 * heads :]
    if case.layout == "heads first":
        key, value = torch.randn(2, heads, n, size, device=device).to(case.dtype).transpose(1, 2)
        return key, value
    key, value = torch.randn(2, n, heads, 2 * size, device=device).to(case.dtype)[..., ::2]
    return key, value


def check_slot_writes(case: SlotWrites, device: str) -> None:
    torch.manual_seed(case.num_tokens)
    dtype = case.cache_dtype or case.dtype
    shape = (case.num_blocks, 2, case.block_size, case.num_heads, case.head_size)
    guarded = torch.randn(case.num_blocks + 2, *shape[1:], device=device).to(dtype)
    cache = guarded[1:-1]
    expected = guarded.cpu().clone()
    num_slots = case.num_blocks * case.block_size
    slots = torch.randperm(num_slots)[: case.num_tokens]
    slots = torch.cat([slots, torch.full((case.num_tokens - len(slots),), -1)])
    outside = [-1, num_slots, -2, num_slots + case.block_size, 2**62, -(2**62)]
    for place, slot in zip(range(0, case.num_tokens, 3), outside):
        slots[place] = slot
    key, value = tokens_of(case, device)
    write_to_slots(cache, key, value, slots.to(device))
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < num_slots:
            block, place = divmod(slot, case.block_size)
            expected[1 + block, 0, place] = key[token].cpu()
            expected[1 + block, 1, place] = value[token].cpu()
    assert torch.equal(guarded.cpu(), expected), case


@dataclass(frozen=True)
class Decode:
    """A batch to decode; ``splits`` are all tried."""

    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    splits: tuple[Split | None, ...] = (None,)


def decoded(query: Any, cache: Any, table: Any, rows: Any, seq_lens: Any, scale: float, case: Decode) -> Any:
    """In float64, request by request. A row below 0 and a length of 0 give zeros."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist())):
        if row < 0 or length == 0:
            continue
        position = torch.arange(max(0, length - case.window) if case.window else 0, length, device=query.device)
        blocks, places = table[row].long()[position // case.block_size], position % case.block_size
        group = case.num_heads // case.num_kv_heads
        key, value = (cache[blocks, half, places].double().repeat_interleave(group, 1) for half in (0, 1))
        logits = torch.einsum("hd,thd->ht", query[i].double(), key) * scale
        if case.soft_cap:
            logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
        out[i] = torch.einsum("ht,thd->hd", logits.softmax(-1), value)
    return out


def batch_of(case: Decode, device: str) -> tuple[Any, ...]:
    """Query, cache, table, rows and lengths. NaN and infinity lie wherever nothing may be read, and the table's cells
    there name blocks that do not exist."""
    block_size, width = case.block_size, -(-max(case.seq_lens) // case.block_size) + 1
    num_rows = len(case.seq_lens)
    cache = torch.randn(num_rows * width + 1, 2, block_size, case.num_kv_heads, case.head_size, device=device)
    cache = cache.to(case.dtype)
    cache[0] = float("nan")
    table = torch.full((num_rows + 2, 2 * width), POISON, dtype=torch.int32, device=device)[:, :width]
    places = torch.randperm(num_rows + 2)[:num_rows]
    ids = (torch.randperm(num_rows * width) + 1).view(num_rows, width).int()
    rows = places.int()
    for i, length in enumerate(case.seq_lens):
        first = max(0, length - case.window) if case.window else 0
        used = slice(first // block_size, -(-length // block_size))
        table[places[i], used] = ids[i, used].to(device)
        own = cache[ids[i].long()]
        position = torch.arange(width * block_size, device=device).view(width, block_size)
        is_read = (position >= first) & (position < length)
        own.movedim(1, 2)[~is_read] = float("nan") if i % 2 else float("inf")
        cache[ids[i].long()] = own
    fused = torch.randn(num_rows, case.num_heads + 3, case.head_size, device=device).to(case.dtype)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    nobody = torch.tensor(case.seq_lens) == 0
    nobody[::2] = False
    rows[nobody], seq_lens[nobody] = -1, 5  # padding of both kinds: no row, no tokens
    return fused[:, 1 : 1 + case.num_heads], cache, table, rows.to(device), seq_lens


def check_decode(case: Decode, device: str) -> None:
    torch.manual_seed(case.head_size)
    query, cache, table, rows, seq_lens = batch_of(case, device)
    scale = case.head_size**-0.5 * (3 if case.soft_cap else 1)
    expected = decoded(query, cache, table, rows, seq_lens, scale, case)
    longest = max(case.seq_lens)
    for split, max_seq_len in [*((split, longest) for split in case.splits), (None, None), (None, 1)]:
        out = torch.full((len(rows), case.num_heads + 1, case.head_size), 9.0, dtype=case.dtype, device=device)
        got = paged_decode(
            query,
            cache,
            table,
            rows,
            seq_lens,
            scale,
            case.window,
            case.soft_cap,
            out=out[:, :-1],
            max_seq_len=max_seq_len,
            split=split,
        )
        error = (got.double() - expected).abs().max().item()
        assert error <= TOLERANCE[case.dtype] * max(1.0, expected.abs().max().item()), (case, split, error)
        assert out[:, -1].eq(9).all() and got.data_ptr() == out.data_ptr()


SLOT_WRITES = [
    SlotWrites(0, 4, 2, 8),
    SlotWrites(7, 1, 3, 5, layout="heads first"),
    SlotWrites(20, 7, 1, 24, torch.bfloat16),
    SlotWrites(19, 16, 2, 3, torch.float32, torch.float16, layout="gaps"),
    SlotWrites(5, 32, 3, 80, torch.float16),
    SlotWrites(4, 16, 20, 128, torch.float32, torch.float16),
]
CUTS = (None, Split(32, 3), Split(16, 2), Split(16, 9))  # the whole, nearly even, too few, too many
DECODES = [
    Decode((70, 1, 33), 6, 2, 24, 16, splits=CUTS),
    Decode((40, 65), 4, 4, 16, 7, window=9, splits=(None, Split(16, 2))),
    Decode((31, 7, 0, 0), 8, 2, 80, 1, soft_cap=5.0, splits=(None, Split(16, 2))),
    Decode((90, 30), 3, 1, 64, 32, torch.float16, window=40, soft_cap=20.0, splits=CUTS[:2]),
    Decode((50, 48), 6, 2, 24, 16, torch.bfloat16, window=16, splits=CUTS[:2]),
    Decode((35,), 17, 1, 8, 5, torch.bfloat16),
    Decode((500,), 4, 1, 8, 16, splits=(Split(16, 32),)),  # more stretches than the merge takes at a time
    Decode((35, 18), 2, 2, 40, 16, torch.bfloat16, soft_cap=3.0),
]


def main() -> None:
    for case in SLOT_WRITES:
        check_slot_writes(case, "cpu")
    for decode in DECODES:
        check_decode(decode, "cpu")
    print(len(SLOT_WRITES), len(DECODES))


if __name__ == "__main__":
    main()
