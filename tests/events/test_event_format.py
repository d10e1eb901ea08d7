"""KV cache events on the wire: the layout and the bytes, which equal those of vLLM 0.32."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pool_state import event_fields
from token_requests import Lora, Picture

from kvpool.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, to_external_block_hash
from kvpool.hashing.extra_keys import generate_block_hash_extra_keys, to_event_extra_keys

INT_SWITCH = "KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES"


@pytest.fixture(autouse=True)
def default_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INT_SWITCH, raising=False)


def test_external_hashes_follow_the_switch_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = bytes(range(32))
    assert to_external_block_hash(digest) == 0x18191A1B1C1D1E1F
    monkeypatch.setenv(INT_SWITCH, "0")
    assert to_external_block_hash(digest) == digest
    monkeypatch.setenv(INT_SWITCH, "1")
    assert to_external_block_hash(digest) == 0x18191A1B1C1D1E1F
    assert to_external_block_hash(b"\x01\x02") == 258


def test_the_layout_of_events() -> None:
    """Field by field, in the order in which vLLM 0.32 sends them; defaults are left out."""
    event = BlockStored([1], None, [5, 6], 2, lora_id=None, medium="GPU", lora_name=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event)) == {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert msgspec.msgpack.encode(BlockRemoved([2**64 - 1], medium=None, group_idx=1)) == (
        b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa6medium\xc0"
        b"\xa9group_idx\x01"
    )
    assert msgspec.msgpack.encode(AllBlocksCleared()) == b"\x81\xa4type\xb0AllBlocksCleared"
    batch = KVEventBatch(ts=0.5, events=[AllBlocksCleared()], data_parallel_rank=3)
    assert msgspec.msgpack.encode(batch) == (b"\x93\xcb\x3f\xe0\0\0\0\0\0\0\x91\x81\xa4type\xb0AllBlocksCleared\x03")


def all_events() -> list[Any]:
    full = BlockStored(
        [1, b"two"],
        3,
        [4, 5],
        2,
        6,
        "CPU",
        "lora",
        [("a", ("cat", 2)), None],
        7,
        "sliding_window",
        128,
        "LOCAL",
        "disk",
        "s",
    )
    return [
        full,
        BlockStored([1], None, [4], 1, None, None, None),
        BlockRemoved([1], "GPU", 2, "REMOTE", "disk"),
        BlockRemoved([b"x"], None),
        AllBlocksCleared(),
    ]


def test_a_batch_can_be_decoded() -> None:
    batch = KVEventBatch(ts=1.25, events=all_events())
    encoded = msgspec.msgpack.encode(batch)
    decoded = msgspec.msgpack.decode(encoded, type=KVEventBatch)
    assert [type(event) for event in decoded.events] == [type(event) for event in batch.events]
    assert event_fields(decoded.events[2]) == event_fields(batch.events[2])
    assert decoded.events[3:] == batch.events[3:]
    assert (decoded.ts, decoded.data_parallel_rank) == (1.25, None)
    assert msgspec.msgpack.encode(decoded) == encoded


def test_events_can_be_members_of_a_set() -> None:
    events = all_events()
    assert len({*events, *all_events()}) == len(events)


@pytest.mark.vllm
def test_bytes_equal_those_of_vllm() -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    ours = KVEventBatch(ts=1.25, events=all_events(), data_parallel_rank=1)
    events = [
        getattr(theirs, type(event).__name__)(*(getattr(event, name) for name in event.__struct_fields__))
        for event in ours.events
    ]
    for mine, other in zip(ours.events, events):
        assert mine.__struct_fields__ == other.__struct_fields__
        assert msgspec.msgpack.encode(mine) == msgspec.msgpack.encode(other)
    batch = theirs.KVEventBatch(ts=1.25, events=events, data_parallel_rank=1)
    assert msgspec.msgpack.encode(ours) == msgspec.msgpack.encode(batch)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=theirs.KVEventBatch)
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(ours)


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extra_keys_equal_those_of_vllm(make_request: Any, dtype: str) -> None:
    theirs = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    import torch

    embeddings = torch.arange(36).reshape(12, 3).to(getattr(torch, dtype))
    pictures = [Picture("cat", 0, 3), Picture("dog", 3, 2), Picture("cow", 7, 4)]
    for attributes in (
        {},
        {"prompt_embeds": embeddings},
        {"mm_features": pictures, "cache_salt": "s", "lora_request": Lora()},
    ):
        for start, end, index in ((0, 4, 0), (4, 8, 0), (4, 8, 1), (8, 12, -1), (2, 3, 0), (0, 12, 0)):
            mine = generate_block_hash_extra_keys(make_request(range(12), **attributes), start, end, index)
            other = theirs.generate_block_hash_extra_keys(make_request(range(12), **attributes), start, end, index)
            assert mine == other
            assert to_event_extra_keys([mine[0]]) == theirs.to_event_extra_keys([mine[0]])
