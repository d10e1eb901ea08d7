"""FreeKVCacheBlockQueue, on its own over hand-made blocks and as the free list of a pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pool_state import block_ids, free_ids, state_of

from kvpool.errors import BlockStateError, InvalidArgumentError, NoFreeBlocksError


@pytest.fixture
def make_queue(backend: Any) -> Any:
    """Makes a queue of n hand-made blocks with ids 0 to n - 1, and gives the blocks too."""

    def make(n: int) -> tuple[Any, list[Any]]:
        blocks = [backend.KVCacheBlock(i) for i in range(n)]
        return backend.FreeKVCacheBlockQueue(blocks), blocks

    return make


def walk(queue: Any) -> list[int]:
    """Ids from head to tail, after a walk over the links in both directions has met the same blocks."""
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    forward, block = [], head.next_free_block
    while block is not tail:
        assert block.prev_free_block.next_free_block is block
        assert block.next_free_block.prev_free_block is block
        forward.append(block.block_id)
        block = block.next_free_block
    assert block_ids(queue.get_all_free_blocks()) == forward
    assert block_ids(queue.iter_blocks_after(None)) == forward
    assert queue.num_free_blocks == len(forward)
    return forward


def is_out(block: Any) -> bool:
    return block.prev_free_block is None and block.next_free_block is None


# Order and links


def test_one_block_between_the_ends(make_queue: Any) -> None:
    queue, (block,) = make_queue(1)
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert head.next_free_block is block and tail.prev_free_block is block
    assert block.prev_free_block is head and block.next_free_block is tail
    assert (head.block_id, tail.block_id) == (-1, -1)
    assert head.prev_free_block is None and tail.next_free_block is None
    assert queue.popleft() is block
    assert is_out(block)
    assert head.next_free_block is tail and tail.prev_free_block is head
    queue.append(block)
    assert walk(queue) == [0]


def test_blocks_are_queued_in_the_given_order(make_queue: Any) -> None:
    queue, blocks = make_queue(5)
    assert walk(queue) == [0, 1, 2, 3, 4]
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == blocks[1:3]
    queue.append(blocks[1])
    queue.append_n([blocks[2], blocks[0]])
    assert walk(queue) == [3, 4, 1, 2, 0]


def test_blocks_are_prepended_in_the_given_order(make_queue: Any) -> None:
    queue, blocks = make_queue(5)
    queue.popleft_n(3)
    queue.prepend_n([blocks[2], blocks[0], blocks[1]])
    assert walk(queue) == [2, 0, 1, 3, 4]
    assert queue.popleft_n(5) == [blocks[i] for i in (2, 0, 1, 3, 4)]
    queue.prepend_n([blocks[3]])
    assert walk(queue) == [3]


@pytest.mark.parametrize("place, left", [(0, [1, 2, 3]), (1, [0, 2, 3]), (3, [0, 1, 2])])
def test_a_block_can_be_taken_from_anywhere(make_queue: Any, place: int, left: list[int]) -> None:
    queue, blocks = make_queue(4)
    queue.remove(blocks[place])
    assert walk(queue) == left
    assert is_out(blocks[place])


def test_a_queue_of_nothing(make_queue: Any) -> None:
    queue, _ = make_queue(0)
    assert walk(queue) == []
    assert queue.popleft_n(0) == []
    queue.append_n([])
    queue.prepend_n([])
    with pytest.raises(ValueError, match=r"^No free blocks available$") as raised:
        queue.popleft()
    assert type(raised.value) is NoFreeBlocksError
    assert walk(queue) == []


def test_an_emptied_queue_is_empty(make_queue: Any) -> None:
    queue, blocks = make_queue(2)
    assert queue.popleft_n(2) == blocks
    assert all(is_out(block) for block in blocks)
    with pytest.raises(NoFreeBlocksError, match="No free blocks available"):
        queue.popleft()
    queue.append_n(blocks[::-1])
    assert walk(queue) == [1, 0]


def test_a_queue_takes_blocks_it_was_not_made_with(backend: Any, make_queue: Any) -> None:
    queue, _ = make_queue(2)
    more = [backend.KVCacheBlock(i) for i in range(100, 150)]
    queue.append_n(more)
    assert walk(queue) == [0, 1, *range(100, 150)]


def test_blocks_can_move_between_queues(make_queue: Any) -> None:
    one, blocks = make_queue(3)
    other, _ = make_queue(0)
    for _ in range(50):
        other.append_n(one.popleft_n(3))
        one.prepend_n(other.popleft_n(3))
    assert walk(one) == [0, 1, 2] and walk(other) == []
    other.append(one.popleft())
    assert walk(other) == [0]
    with pytest.raises(BlockStateError):
        one.remove(blocks[0])


def test_iteration_goes_on_after_a_cursor(make_queue: Any) -> None:
    queue, blocks = make_queue(5)
    assert block_ids(queue.iter_blocks_after(blocks[2])) == [3, 4]
    assert block_ids(queue.iter_blocks_after(blocks[4])) == []
    queue.remove(blocks[3])
    assert block_ids(queue.iter_blocks_after(blocks[3])) == []


def test_random_surgery_equals_a_list(make_queue: Any) -> None:
    queue, blocks = make_queue(12)
    rng = random.Random(20)
    expected, out = list(range(12)), []
    for _ in range(2000):
        action = rng.randrange(5)
        if action == 0:
            n = rng.randint(0, len(expected))
            assert block_ids(queue.popleft_n(n)) == expected[:n]
            out += expected[:n]
            del expected[:n]
        elif action == 1 and expected:
            i = rng.choice(expected)
            queue.remove(blocks[i])
            expected.remove(i)
            out.append(i)
        elif out:
            rng.shuffle(out)
            some = [out.pop() for _ in range(rng.randint(1, len(out)))]
            if action == 2:
                queue.prepend_n([blocks[i] for i in some])
                expected = some + expected
            else:
                queue.append_n([blocks[i] for i in some])
                expected += some
        assert walk(queue) == expected


# Refusals


def test_what_is_not_queued_cannot_be_removed(make_queue: Any, backend: Any) -> None:
    queue, blocks = make_queue(3)
    queue.remove(blocks[1])
    for block in (blocks[1], backend.KVCacheBlock(7), queue.fake_free_list_head):
        with pytest.raises(RuntimeError, match=r"^remove\(\) called on an invalid block: "):
            queue.remove(block)
    assert walk(queue) == [0, 2]


def test_too_many_are_not_popped(make_queue: Any) -> None:
    queue, _ = make_queue(3)
    with pytest.raises(AssertionError) as raised:
        queue.popleft_n(4)
    assert type(raised.value) is NoFreeBlocksError
    with pytest.raises(InvalidArgumentError):
        queue.popleft_n(-1)
    for n in (True, 1.0, None):
        with pytest.raises(TypeError):
            queue.popleft_n(n)
    assert walk(queue) == [0, 1, 2]


@pytest.mark.parametrize("method", ["append_n", "prepend_n"])
def test_a_block_twice_in_a_batch_is_refused(make_queue: Any, method: str) -> None:
    queue, _ = make_queue(4)
    x0, x1 = queue.popleft_n(2)
    with pytest.raises(BlockStateError):
        getattr(queue, method)([x0, x0, x1])
    assert walk(queue) == [2, 3]
    assert is_out(x0) and is_out(x1)
    assert block_ids(queue.popleft_n(queue.num_free_blocks)) == [2, 3]
    queue.append_n([x1, x0])
    assert walk(queue) == [1, 0]


def test_a_queued_block_is_not_queued_again(make_queue: Any, backend: Any) -> None:
    queue, blocks = make_queue(3)
    other = backend.FreeKVCacheBlockQueue([])
    out = queue.popleft()
    for refused in (
        lambda: queue.append(blocks[1]),
        lambda: queue.append_n([out, blocks[2]]),
        lambda: queue.prepend_n([out, blocks[1]]),
        lambda: other.append(blocks[1]),
        lambda: backend.FreeKVCacheBlockQueue([out, blocks[1]]),
        lambda: backend.FreeKVCacheBlockQueue([out, out]),
        lambda: queue.append(queue.fake_free_list_tail),
    ):
        with pytest.raises(BlockStateError):
            refused()
        assert walk(queue) == [1, 2]
        assert walk(other) == []
        assert is_out(out)


def test_only_blocks_are_queued(make_queue: Any) -> None:
    queue, _ = make_queue(2)
    for item in (None, 1, object()):
        with pytest.raises(TypeError):
            queue.append(item)
    assert walk(queue) == [0, 1]


def test_links_belong_to_the_queue(make_queue: Any, backend: Any) -> None:
    queue, blocks = make_queue(3)
    stranger = backend.KVCacheBlock(9)
    for block in blocks:
        for link in ("prev_free_block", "next_free_block"):
            with pytest.raises((AttributeError, BlockStateError)):
                setattr(block, link, None)
            with pytest.raises((AttributeError, BlockStateError)):
                setattr(block, link, stranger)
    with pytest.raises(BlockStateError):
        queue.fake_free_list_head.next_free_block = blocks[2]
    assert walk(queue) == [0, 1, 2]


def test_a_severed_tail_takes_nothing(make_queue: Any, backend: Any) -> None:
    queue, _ = make_queue(2)
    queue.fake_free_list_tail.prev_free_block = None
    block = backend.KVCacheBlock(5)
    with pytest.raises(RuntimeError):
        queue.append(block)
    with pytest.raises(AssertionError):
        queue.append_n([block])
    assert queue.num_free_blocks == 2 and is_out(block)


def test_a_severed_head_takes_and_lists_nothing(make_queue: Any, backend: Any) -> None:
    queue, _ = make_queue(2)
    queue.fake_free_list_head.next_free_block = None
    block = backend.KVCacheBlock(5)
    with pytest.raises(AssertionError):
        queue.prepend_n([block])
    with pytest.raises(RuntimeError):
        queue.get_all_free_blocks()
    assert list(queue.iter_blocks_after(None)) == []
    assert queue.num_free_blocks == 2 and is_out(block)


# The free list of a pool


def test_the_free_list_of_a_pool_changes_the_pool(make_pool: Any) -> None:
    pool = make_pool(6)
    queue = pool.free_block_queue
    first = queue.popleft()
    second, third = queue.popleft_n(2)
    queue.remove(pool.blocks[5])
    pool.check()
    assert walk(queue) == [4]
    assert pool.get_num_free_blocks() == 1
    assert [first.ref_cnt, second.ref_cnt, third.ref_cnt] == [0, 0, 0]
    queue.append(first)
    queue.prepend_n([third, second])
    queue.append_n([pool.blocks[5]])
    assert walk(queue) == [3, 2, 4, 1, 5]


def test_a_detached_block_keeps_its_hash_and_can_be_put_into_use(make_pool: Any, make_request: Any) -> None:
    pool = make_pool(4)
    request = make_request(range(4))
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.free_blocks(blocks)
    pool.free_block_queue.remove(blocks[0])
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks
    blocks[0].ref_cnt = 1
    pool.check()
    pool.free_blocks(blocks)
    assert free_ids(pool) == [2, 3, 1]


def test_what_the_free_list_of_a_pool_refuses(make_pool: Any, backend: Any) -> None:
    pool, other = make_pool(6), make_pool(3)
    used = pool.get_new_blocks(1)[0]
    detached = pool.free_block_queue.popleft()
    queue = pool.free_block_queue
    theirs = other.free_block_queue.popleft()
    before, before_other = state_of(pool), state_of(other)
    for block in (used, pool.null_block, theirs, backend.KVCacheBlock(2), pool.blocks[4]):
        for refused in (
            lambda block=block: queue.append(block),
            lambda block=block: queue.append_n([detached, block]),
            lambda block=block: queue.prepend_n([detached, block]),
        ):
            with pytest.raises(BlockStateError):
                refused()
    for block in (used, detached, pool.null_block, other.blocks[2], backend.KVCacheBlock(4)):
        with pytest.raises(BlockStateError, match=r"^remove\(\) called on an invalid block: "):
            queue.remove(block)
    for refused in (
        lambda: queue.append_n([detached, detached]),
        lambda: pool.touch([pool.blocks[4], detached]),
        lambda: pool.free_blocks([used, detached]),
        lambda: setattr(queue.fake_free_list_tail, "prev_free_block", None),
        lambda: setattr(queue.fake_free_list_head, "next_free_block", None),
        lambda: backend.FreeKVCacheBlockQueue([detached]),
        lambda: queue.popleft_n(4),
    ):
        with pytest.raises((BlockStateError, NoFreeBlocksError)):
            refused()
    assert state_of(pool) == before and state_of(other) == before_other
    assert walk(queue) == [3, 4, 5]
    queue.append(detached)
    assert walk(queue) == [3, 4, 5, 2]


def test_the_number_of_blocks_can_be_cut_and_restored(backend: Any, make_queue: Any) -> None:
    """As vLLM's tests do to play a full cache: the first blocks stay, the others wait aside in their order."""
    queue, blocks = make_queue(6)
    queue.num_free_blocks = 2
    assert queue.num_free_blocks == 2 and queue.get_all_free_blocks() == blocks[:2]
    assert blocks[3].prev_free_block is None
    queue.num_free_blocks = 0
    assert queue.get_all_free_blocks() == []
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    queue.num_free_blocks = 5
    assert queue.get_all_free_blocks() == blocks[:5]
    for wrong, error in ((7, BlockStateError), (-1, InvalidArgumentError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error):
            queue.num_free_blocks = wrong
    assert queue.get_all_free_blocks() == blocks[:5]
    queue.num_free_blocks = 6
    assert queue.get_all_free_blocks() == blocks


def test_a_pool_can_be_played_full(backend: Any) -> None:
    pool = backend.BlockPool(6, True, 4)
    used = pool.get_new_blocks(2)
    pool.free_block_queue.num_free_blocks = 0
    assert pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks(used)
    pool.check()
    pool.free_block_queue.num_free_blocks = 5
    pool.check()
    assert pool.get_num_free_blocks() == 5 and pool.reset_prefix_cache()


def test_a_hand_made_block_is_born_with_a_hash(backend: Any) -> None:
    """vLLM's block is a dataclass, and tests of its connectors fill in these fields."""
    anything = object()
    block = backend.KVCacheBlock(block_id=3, _block_hash=anything, _block_hash_num_tokens=48)
    assert block.block_hash is anything and block.block_hash_num_tokens == 48
    block.reset_hash()
    assert block.block_hash is None and block.block_hash_num_tokens is None
