"""KV cache events: which, in which order, and the bytes on the wire.

Hash indices in names and comments: h0 is the first block hash of the request.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from pool_state import block_ids
from token_requests import Lora, Picture, external

from kvpool.errors import InvalidArgumentError
from kvpool.events.wire import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from kvpool.hashing.extra_keys import generate_block_hash_extra_keys, to_event_extra_keys

INT_SWITCH = "KVPOOL_KV_EVENTS_USE_INT_BLOCK_HASHES"


@pytest.fixture(autouse=True)
def default_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INT_SWITCH, raising=False)


@pytest.fixture
def make_event_pool(make_pool: Any) -> Any:
    return lambda n, hash_block_size=4, **kwargs: make_pool(n, True, hash_block_size, True, **kwargs)


def stored(
    digests: list[bytes], parent: bytes | None, token_ids: list[int], size: int = 4, **fields: Any
) -> BlockStored:
    values: dict[str, Any] = {
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "extra_keys": [None] * len(digests) or None,
    }
    values.update(fields)
    above = None if parent is None else external(parent)
    return BlockStored([external(d) for d in digests], above, token_ids, size, **values)


def removed(digest: bytes, group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=[external(digest)], medium="GPU", group_idx=group)


# Streams


def test_a_plain_stream(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4)
    request = make_request(range(12))
    h = request.block_hashes
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 3)
    pool.cache_full_blocks(request, blocks, 2, 3, 4, 3)
    assert pool.take_events() == [
        stored(h[:2], None, [0, 1, 2, 3, 4, 5, 6, 7], group_idx=3),
        stored(h[2:], h[1], [8, 9, 10, 11], group_idx=3),
    ]
    assert pool.take_events() == []
    pool.free_blocks(blocks[::-1])
    assert pool.take_events() == []
    pool.get_new_blocks(3)
    assert pool.take_events() == [removed(h[2], 3), removed(h[1], 3), removed(h[0], 3)]


def test_the_last_block_of_a_chain_is_removed_first(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4)
    request = make_request(range(12))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
    pool.free_blocks(blocks[::-1])
    pool.take_events()
    assert block_ids(pool.get_new_blocks(1)) == [3]
    assert pool.take_events() == [removed(request.block_hashes[2])]


def test_without_events_nothing_is_kept(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(make_request(range(8)), blocks, 0, 2, 4, 0)
    pool.emit_cached_block_events(make_request(range(8)), 2, 4, 0)
    pool.free_blocks(blocks)
    pool.reset_prefix_cache()
    assert pool.kv_event_queue == [] and pool.take_events() == []


def test_events_can_be_switched_on_later(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(8))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.enable_kv_cache_events = True
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(2)
    h = request.block_hashes
    assert pool.take_events() == [stored(h[1:], h[0], [4, 5, 6, 7]), removed(h[0])]
    pool.get_new_blocks(1)
    assert pool.take_events() == [removed(h[1])]


def test_a_reset_says_so_once(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(5)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(make_request(range(8)), blocks, 0, 2, 4, 0)
    pool.take_events()
    assert pool.reset_prefix_cache() is False
    assert pool.take_events() == []
    pool.free_blocks(blocks[::-1])
    assert pool.reset_prefix_cache() is True
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.take_events() == []


def test_each_copy_is_stored_and_removed_as_in_vllm(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(6)
    request = make_request(range(4))
    h0 = request.block_hashes[0]
    one, two = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, [one], 0, 1, 4, 0)
    pool.cache_full_blocks(request, [two], 0, 1, 4, 0)
    assert pool.take_events() == [stored([h0], None, [0, 1, 2, 3])] * 2
    pool.evict_blocks([1])
    assert pool.take_events() == [removed(h0)]
    assert pool.get_cached_block(h0, [0]) == [two]
    pool.evict_blocks([2])
    assert pool.take_events() == [removed(h0)]


def test_dedup_tells_of_the_first_and_the_last_copy(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(8, dedup_events=True)
    request = make_request(range(8))
    h = request.block_hashes
    one, two, three, four = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, [one], 0, 1, 4, 0)
    pool.cache_full_blocks(request, [two, three], 0, 2, 4, 0)
    pool.cache_full_blocks(request, [four], 0, 1, 4, 1)
    assert pool.take_events() == [
        stored(h[:1], None, [0, 1, 2, 3]),
        stored(h[1:], h[0], [4, 5, 6, 7]),
        stored(h[:1], None, [0, 1, 2, 3], group_idx=1),
    ]
    pool.free_blocks([one])
    pool.get_new_blocks(4)
    assert one.block_hash is None
    assert pool.take_events() == []
    assert pool.get_cached_block(h[0], [0]) == [two]
    pool.evict_blocks([2])
    assert pool.take_events() == [removed(h[0])]


def test_moved_hashes_are_no_event(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(make_request(range(4)), blocks, 0, 1, 4, 0)
    pool.take_events()
    pool.move_block_hashes(*blocks)
    assert pool.take_events() == []


# Sparse blocks


def test_sparse_blocks_as_in_vllm(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(6)
    request = make_request(range(12))
    h, null = request.block_hashes, pool.null_block
    a, b, c = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, [a, null, b], 0, 3, 4, 0)
    pool.cache_full_blocks(request, [null] * 3, 0, 3, 4, 0)
    pool.cache_full_blocks(request, [null, c], 0, 2, 4, 0, block_mask=[False, True])
    assert pool.take_events() == [
        stored([h[0], h[2]], None, list(range(12))),
        stored([], None, list(range(12))),
        stored([h[1]], None, list(range(8))),
    ]


def test_dense_events_tell_which_tokens_belong_to_which_hash(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(8, dense_events=True)
    request = make_request(range(20))
    h, null = request.block_hashes, pool.null_block
    a, b, c, d = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, [a, null, b, c], 0, 4, 4, 0)
    pool.cache_full_blocks(request, [null] * 3, 0, 3, 4, 0)
    pool.cache_full_blocks(request, [null, d], 0, 2, 4, 0, block_mask=[False, True])
    assert pool.take_events() == [
        stored([h[0]], None, [0, 1, 2, 3]),
        stored([h[2], h[3]], h[1], [8, 9, 10, 11, 12, 13, 14, 15]),
        stored([h[1]], h[0], [4, 5, 6, 7]),
    ]


# Partial blocks


def test_events_of_partial_blocks(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, 2)
    request = make_request(range(8), 2)
    h = request.block_hashes
    block = pool.get_new_blocks(1)[0]

    def events(num_tokens: int, **kwargs: Any) -> list[Any]:
        pool.cache_partial_block(request, block, num_tokens, 0, 8, **kwargs)
        return pool.take_events()

    assert events(2) == [stored(h[:1], None, [0, 1], 2)]
    assert events(4) == [removed(h[0]), stored(h[1:2], h[0], [2, 3], 2)]
    assert events(4) == []
    assert events(2, replace_existing_hashes=True) == [removed(h[1]), stored(h[:1], None, [0, 1], 2)]
    assert events(8) == [removed(h[0]), stored(h[3:], h[2], [6, 7], 2)]
    assert events(6) == [stored(h[2:3], h[1], [4, 5], 2)]
    pool.free_blocks([block])
    pool.get_new_blocks(3)
    assert pool.take_events() == [removed(h[3]), removed(h[2])]


def test_a_promotion_removes_before_it_stores(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, 2)
    request = make_request(range(8), 2)
    h = request.block_hashes
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.cache_partial_block(request, blocks[1], 6, 0, 4)
    pool.take_events()
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    assert pool.take_events() == [removed(h[2]), stored([h[3]], h[1], [4, 5, 6, 7])]
    pool.cache_partial_block(request, blocks[1], 6, 0, 4)
    assert pool.take_events() == [stored([h[2]], h[1], [4, 5], 2)]


def test_strict_partial_publishes_no_dead_prefix(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, 2, strict_partial=True)
    request = make_request(range(8), 2)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    pool.take_events()
    pool.cache_partial_block(request, blocks[1], 6, 0, 4)
    assert pool.take_events() == []


# Reused blocks


def test_a_hit_can_be_published(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, 2)
    request = make_request(range(8), 2, session_id="chat 7")
    h = request.block_hashes
    pool.emit_cached_block_events(request, 0, 4, 0)
    assert pool.take_events() == []
    pool.emit_cached_block_events(request, 2, 4, 5)
    assert pool.take_events() == [stored([h[1], h[3]], None, list(range(8)), group_idx=5, session_id="chat 7")]
    for num_blocks in (3, -1):
        with pytest.raises(InvalidArgumentError):
            pool.emit_cached_block_events(request, num_blocks, 4, 0)
    assert pool.take_events() == []


# What else an event says of a request


def test_adapter_session_and_medium(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, medium=MEDIUM_CPU)
    request = make_request(range(8), lora_request=Lora("poems", 7, "/adapters/poems"), session_id="s")
    pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0)
    (event,) = pool.take_events()
    assert (event.lora_id, event.lora_name, event.session_id, event.medium) == (7, "poems", "s", "CPU")
    assert event.extra_keys == [("poems",), ("poems",)]


def test_extra_keys_of_each_block(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(5)
    pictures = [Picture("cat", 2, 4), Picture("dog", 6, 1)]
    request = make_request(range(12), mm_features=pictures, cache_salt="pepper")
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
    (event,) = pool.take_events()
    assert event.extra_keys == [(("cat", 2), "pepper"), (("cat", -2), ("dog", 2)), None]
    pool.cache_partial_block(request, blocks[0], 8, 1, 8, replace_existing_hashes=True)
    assert pool.take_events()[-1].extra_keys == [(("cat", -2), ("dog", 2))]


def test_extra_keys_are_tagged_in_a_hash_and_bare_in_an_event(make_request: Any) -> None:
    request = make_request(
        range(8), lora_request=Lora("a", 1, "/a"), mm_features=[Picture("cat", 1, 2)], cache_salt="s"
    )
    keys, next_index = generate_block_hash_extra_keys(request, 0, 4, 0)
    assert keys == (("lora", "a", "/a"), ("mm", "cat", 1), ("cache_salt", "s"))
    assert next_index == 1
    assert generate_block_hash_extra_keys(request, 4, 8, 1) == ((("lora", "a", "/a"),), 1)
    assert to_event_extra_keys([keys, None]) == [("a", ("cat", 1), "s"), None]
    assert to_event_extra_keys([]) is None and to_event_extra_keys(None) is None


def test_the_digest_of_prompt_embeddings_is_kept_on_the_request(make_event_pool: Any, make_request: Any) -> None:
    embeddings = np.arange(24, dtype=np.float32).reshape(8, 3)
    request = make_request(range(8), prompt_embeds=embeddings)
    digests = [hashlib.sha256(embeddings[i : i + 4].tobytes()).digest() for i in (0, 4)]
    pool = make_event_pool(4)
    pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0)
    assert pool.take_events()[0].extra_keys == [(digests[0],), (digests[1],)]
    assert request._prompt_embeds_per_block_hashes == {(0, 4): digests[0], (4, 8): digests[1]}
    assert generate_block_hash_extra_keys(request, 4, 8, 0) == ((("prompt_embeds", digests[1]),), 0)


# The queue


def test_an_event_queue_can_be_capped(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(4, max_queued_events=2)
    requests = [make_request(range(first, first + 4)) for first in (0, 10, 20)]
    for block, request in zip(pool.get_new_blocks(3), requests):
        pool.cache_full_blocks(request, [block], 0, 1, 4, 0)
    assert pool.dropped_events == 1
    assert [event.token_ids[0] for event in pool.kv_event_queue] == [0, 10]
    pool.free_blocks(pool.blocks[1:])
    assert pool.reset_prefix_cache() is True
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.dropped_events == 3
    with pytest.raises(InvalidArgumentError):
        make_event_pool(4, max_queued_events=0)


def test_the_queue_of_vllm_is_unbounded_and_so_is_the_default(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(3)
    for i in range(1000):
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(make_request(range(8 * i, 8 * i + 8)), blocks, 0, 2, 4, 0)
        pool.free_blocks(blocks)
    assert len(pool.kv_event_queue) == 1000 + 2 * 999
    assert pool.dropped_events == 0


def test_hashes_in_events_can_be_bytes(
    make_event_pool: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_event_pool(4)
    request = make_request(range(8))
    monkeypatch.setenv(INT_SWITCH, "0")
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    pool.evict_blocks([1])
    one, two, three = pool.take_events()
    h = request.block_hashes
    assert (one.block_hashes, two.block_hashes, two.parent_block_hash, three.block_hashes) == (
        h[:1],
        h[1:],
        h[0],
        h[:1],
    )


def test_numbers_in_events_are_plain_ints(make_event_pool: Any, make_request: Any) -> None:
    pool = make_event_pool(6)
    request = make_request(range(12))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, np.int64(0), np.int32(1), np.int64(4), np.uint8(3))
    pool.cache_partial_block(request, blocks[1], 8, np.int64(3), 8)
    for event in pool.take_events():
        assert type(event.group_idx) is int and event.group_idx == 3
        assert type(event.block_size) is int
