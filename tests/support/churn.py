"""A small cache manager on top of a pool, with made-up contents: every block remembers the tokens whose keys and values
were written into it, and every hit is compared with the tokens that were asked for."""

from __future__ import annotations

import random
from typing import Any

from token_requests import Digests, TokenRequest, chained_digests

BLOCK_SIZE = 4


class WrongContents(AssertionError):
    """A request would have read somebody else's tokens, or written over them."""


class Sequence:
    def __init__(self, token_ids: list[int], table: list[Any], num_cached: int) -> None:
        self.token_ids, self.table, self.num_cached = token_ids, table, num_cached


class Churn:
    """Requests come, grow, are preempted and finish, in an order drawn from a seed.

    Attributes:
        num_hit_blocks: blocks that were reused.
    """

    def __init__(
        self, pool: Any, seed: int, hash_block_size: int = BLOCK_SIZE, digests: Digests = chained_digests
    ) -> None:
        self.pool, self.rng = pool, random.Random(seed)
        self.hash_size, self.digests = hash_block_size, digests
        self.contents: dict[int, tuple[int, ...]] = {}  # by block id: the whole prefix that the block ends
        self.running: list[Sequence] = []
        self.waiting: list[list[int]] = []
        self.num_hit_blocks = 0
        self.families = [[self.rng.randrange(3) for _ in range(24)] for _ in range(8)]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            action = self.rng.choices(
                (self.arrive, self.twins, self.decode, self.finish, self.preempt, self.resume, self.drop),
                (5, 1, 8, 3, 1, 1, 0.2),
            )[0]
            action()
            self.pool.check()
        while self.running:
            self.finish()
        if self.pool.get_num_free_blocks() != self.pool.num_gpu_blocks - 1:
            raise WrongContents("blocks are lost")

    # What happens

    def arrive(self) -> None:
        family = self.rng.choice(self.families)
        token_ids = family[: self.rng.randint(1, 24)] + [self.rng.randrange(3) for _ in range(self.rng.randint(0, 6))]
        self.admit(token_ids)

    def twins(self) -> None:
        """Two requests with one prompt look up before either is cached."""
        token_ids = self.rng.choice(self.families)[:]
        hits = [self.find(token_ids), self.find(token_ids)]
        for found in hits:
            self.admit(token_ids, found)

    def resume(self) -> None:
        if self.waiting:
            self.admit(self.waiting.pop())

    def admit(self, token_ids: list[int], hits: list[Any] | None = None) -> None:
        hits = self.find(token_ids) if hits is None else hits
        num_new = -(-len(token_ids) // BLOCK_SIZE) - len(hits)
        num_free_hits = sum(block.ref_cnt == 0 for block in hits)
        if num_new + num_free_hits > self.pool.get_num_free_blocks():
            return
        if any(self.contents.get(block.block_id) != tuple(token_ids[: 4 * (k + 1)]) for k, block in enumerate(hits)):
            return  # the first twin's allocation has taken what was found before; a manager would have touched it
        self.pool.touch(hits)
        sequence = Sequence(token_ids, hits + self.pool.get_new_blocks(num_new), len(hits))
        self.num_hit_blocks += len(hits)
        for k in range(len(hits), len(sequence.table)):
            self.write(sequence, k)
        self.running.append(sequence)
        self.cache(sequence)

    def find(self, token_ids: list[int]) -> list[Any]:
        """Blocks of the longest cached prefix that leaves a token to compute; their contents are compared."""
        scale = BLOCK_SIZE // self.hash_size
        digests = self.digests(token_ids, self.hash_size)[scale - 1 :: scale][: (len(token_ids) - 1) // BLOCK_SIZE]
        hits = []
        for k, digest in enumerate(digests):
            found = self.pool.get_cached_block(digest, [0])
            if found is None:
                break
            if self.contents[found[0].block_id] != tuple(token_ids[: BLOCK_SIZE * (k + 1)]):
                raise WrongContents(f"{token_ids[: BLOCK_SIZE * (k + 1)]} hit {self.contents[found[0].block_id]}")
            hits.append(found[0])
        if self.pool.find_prefix_ids(digests).tolist() != [block.block_id for block in hits]:
            raise WrongContents("the two lookups differ")
        return hits

    def write(self, sequence: Sequence, k: int) -> None:
        """Compute block k of a sequence as far as it has tokens."""
        block = sequence.table[k]
        if any(block in other.table for other in self.running if other is not sequence):
            raise WrongContents(f"{block!r} belongs to two requests")
        if not self.pool.is_block_writable(block):
            raise WrongContents(f"{block!r} is written by a request although others may read it")
        self.contents[block.block_id] = tuple(sequence.token_ids[: BLOCK_SIZE * (k + 1)])

    def cache(self, sequence: Sequence) -> None:
        num_full = len(sequence.token_ids) // BLOCK_SIZE
        request = TokenRequest(sequence.token_ids, self.hash_size, self.digests)
        self.pool.cache_full_blocks(request, sequence.table, sequence.num_cached, num_full, BLOCK_SIZE, 0)
        sequence.num_cached = max(num_full, sequence.num_cached)

    def decode(self) -> None:
        if not self.running:
            return
        sequence = self.rng.choice(self.running)
        if len(sequence.token_ids) % BLOCK_SIZE == 0:
            if self.pool.get_num_free_blocks() == 0:
                return
            sequence.table += self.pool.get_new_blocks(1)
        sequence.token_ids = [*sequence.token_ids, self.rng.randrange(3)]
        self.write(sequence, len(sequence.table) - 1)
        self.cache(sequence)

    def finish(self) -> None:
        if self.running:
            sequence = self.running.pop(self.rng.randrange(len(self.running)))
            self.pool.free_blocks(sequence.table[::-1])

    def preempt(self) -> None:
        if self.running:
            sequence = self.running.pop()
            self.pool.free_blocks(sequence.table[::-1])
            self.waiting.append(sequence.token_ids)

    def drop(self) -> None:
        """Hashes are evicted by id, or all of them if nothing runs."""
        if not self.pool.reset_prefix_cache():
            self.pool.evict_blocks(self.rng.sample(range(self.pool.num_gpu_blocks), 3))
