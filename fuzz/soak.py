"""Random block operations on native pool and manager for as long as they are given, counted and checked.

    python -m fuzz.soak [--minutes N] [--operations N] [--seed S] [--round R] [--state FILE]

One block that is allocated, freed, touched, cached or looked up is one operation. A round has a pool of its own, made
from (seed, round): sizes, options and history. It goes through batches of ids, and after each of them reference counts
and the number of free blocks are compared with numpy arrays; every few batches ``check()`` recomputes all invariants.
Every round ends with a history of requests on a KVCacheManager, and with all blocks free.

After each round the state file says how far it went; the next call goes on from there (another seed starts anew). A
round that fails is repeated by ``--seed S --round R``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from fuzz.decisions import Finding
from kvpool import BlockPool, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request
from kvpool.requests.status import RequestStatus

BATCHES_PER_ROUND = 3000
BATCHES_PER_CHECK = 60
REQUESTS_PER_ROUND = 60
NUM_DIGESTS = 1 << 15


def make_digests() -> list[bytes]:
    """Digests of short and full length; a few equal in all but the last byte."""
    return [
        (i * 0x9E3779B97F4A7C15).to_bytes(16, "big") * 2 if i % 3 else bytes(28) + i.to_bytes(4, "big")
        for i in range(NUM_DIGESTS)
    ]


class PoolRound:
    """A pool, and what its blocks' counts are.

    Attributes:
        ref_cnt: by block id.
        digest: by block id, the number of its digest; -1 without.
        num_operations: counted as the module says.
    """

    def __init__(self, rng: np.random.Generator, digests: list[bytes]) -> None:
        self.rng, self.digests = rng, digests
        self.num_blocks = int(rng.choice([64, 1000, 20_000, 65_536]))
        self.pool = BlockPool(self.num_blocks, True, 16, uncached_first=bool(rng.integers(2)))
        self.ref_cnt = np.zeros(self.num_blocks, np.int32)
        self.digest = np.full(self.num_blocks, -1, np.int64)
        self.largest = max(1, min(4096, self.num_blocks // 4))
        self.num_operations = 0

    def in_use(self, n: int) -> np.ndarray[Any, Any]:
        used = np.flatnonzero(self.ref_cnt)
        return self.rng.choice(used, n).astype(np.int32) if used.size else np.empty(0, np.int32)

    def allocate(self, n: int) -> None:
        n = min(n, self.pool.get_num_free_blocks())
        ids = self.pool.allocate_ids(n)
        if self.ref_cnt[ids].any() or np.unique(ids).size != n or (n and ids.min() < 1):
            raise Finding(f"allocated blocks that are in use, or twice: {ids.tolist()[:50]}")
        self.ref_cnt[ids] = 1
        self.digest[ids] = -1
        self.num_operations += n

    def touch(self, n: int) -> None:
        ids = self.rng.integers(1, self.num_blocks, n, dtype=np.int32)
        self.pool.touch_ids(ids)
        np.add.at(self.ref_cnt, ids, 1)
        self.num_operations += n

    def free(self, n: int) -> None:
        """One reference of each of n different blocks in use; in one batch in eight all references of them."""
        ids = np.unique(self.in_use(n))
        self.rng.shuffle(ids)
        if ids.size and self.rng.integers(8) == 0:
            ids = np.repeat(ids, self.ref_cnt[ids])
        self.pool.free_ids(ids, prepend=bool(self.rng.integers(2)))
        np.subtract.at(self.ref_cnt, ids, 1)
        self.num_operations += ids.size

    def refuse(self, n: int) -> None:
        """A batch that is bad at its end is refused, and nothing has changed."""
        ids = np.append(np.unique(self.in_use(n)), [self.num_blocks + 7]).astype(np.int32)
        for call in (self.pool.free_ids, self.pool.touch_ids):
            try:
                call(ids)
            except kvpool.BlockStateError:
                continue
            raise Finding("a batch with an id outside the pool was taken")

    def cache(self, n: int) -> None:
        ids = np.unique(self.in_use(n))
        ids = ids[self.digest[ids] < 0]
        numbers = self.rng.integers(0, NUM_DIGESTS, ids.size)
        self.pool.cache_ids([self.digests[number] for number in numbers], ids)
        self.digest[ids] = numbers
        self.num_operations += ids.size

    def find(self, n: int) -> None:
        """The prefix that is found carries the digests that were asked for."""
        known = np.flatnonzero(self.digest >= 0)
        if known.size == 0:
            return
        numbers = self.digest[self.rng.choice(known, n)]
        found = self.pool.find_prefix_ids([self.digests[number] for number in numbers])
        if found.size != n or not np.array_equal(self.digest[found], numbers):
            raise Finding(f"looked for digests {numbers.tolist()[:20]}, found blocks {found.tolist()[:20]}")
        self.num_operations += n

    def compare(self) -> None:
        num_free = int((self.ref_cnt[1:] == 0).sum())
        if self.pool.get_num_free_blocks() != num_free:
            raise Finding(f"{self.pool.get_num_free_blocks()} free blocks, counted {num_free}")

    def run(self) -> None:
        calls = [self.allocate, self.allocate, self.free, self.free, self.touch, self.cache, self.find, self.refuse]
        for batch in range(BATCHES_PER_ROUND):
            n = int(self.rng.integers(1, self.largest + 1))
            call = calls[int(self.rng.integers(len(calls)))]
            # Hashes are slow beside ids: their batches are shorter.
            call(max(1, n // 16) if call in (self.cache, self.find, self.refuse) else n)
            self.compare()
            if batch % BATCHES_PER_CHECK == 0:
                self.check()
        self.free_all()

    def check(self) -> None:
        self.pool.check()
        counts = [block.ref_cnt for block in self.pool.blocks[1:200]] if self.num_blocks > 200 else []
        if counts != self.ref_cnt[1 : 1 + len(counts)].tolist():
            raise Finding("reference counts differ")

    def free_all(self) -> None:
        ids = np.repeat(np.arange(self.num_blocks, dtype=np.int32), self.ref_cnt)
        self.pool.free_ids(ids)
        self.num_operations += ids.size
        self.pool.check()
        if self.pool.get_num_free_blocks() != self.num_blocks - 1:
            raise Finding(f"{self.num_blocks - 1 - self.pool.get_num_free_blocks()} blocks are lost")


def run_manager(rng: np.random.Generator) -> int:
    """Requests that share prefixes come, grow and go; the number of blocks that they were given."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(KVCacheConfig(4096, [KVCacheGroupSpec(["layer"], spec)]), 16_384)
    hasher = kvpool.BlockHasher("sha256", 16)
    families = [rng.integers(0, 1000, 4096).tolist() for _ in range(3)]
    live: list[Any] = []
    num_operations = 0
    for number in range(REQUESTS_PER_ROUND):
        prompt = families[int(rng.integers(3))][: int(rng.integers(1, 4096))] + rng.integers(0, 1000, 40).tolist()
        request = Request(f"r{number}", prompt, hasher)
        hit, num_hit = manager.get_computed_blocks(request)
        blocks = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        if blocks is None:
            manager.free(live.pop(int(rng.integers(len(live)))))
            manager.block_pool.check()
            continue
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        live.append(request)
        num_operations += len(manager.get_block_ids(request.request_id)[0])
        for each in live:
            each.append_output_token_ids(int(rng.integers(1000)))
        for each, got in zip(live, manager.allocate_decode(live)):
            if got is not None:
                each.num_computed_tokens = each.num_tokens
                num_operations += sum(map(len, got.get_block_ids()))
    for request in live:
        num_operations += len(manager.get_block_ids(request.request_id)[0])
        manager.free(request)
    manager.block_pool.check()
    if manager.block_pool.get_num_free_blocks() != 4095:
        raise Finding(f"the manager has lost {4095 - manager.block_pool.get_num_free_blocks()} blocks")
    return num_operations


def run_round(seed: int, number: int, digests: list[bytes]) -> int:
    """One round; the number of its operations."""
    rng = np.random.default_rng([seed, number])
    pool_round = PoolRound(rng, digests)
    try:
        pool_round.run()
        return pool_round.num_operations + run_manager(rng)
    except Exception:
        print(f"FINDING: python -m fuzz.soak --seed {seed} --round {number}", flush=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--operations", type=int, default=10**9, help="where to stop at the latest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, default=None, help="this one alone")
    parser.add_argument("--state", type=Path, default=Path("build/soak.json"))
    arguments = parser.parse_args()
    if kvpool.BACKEND != "native":
        print("the soak is of the native pool")
        return 2
    digests = make_digests()
    if arguments.round is not None:
        print(f"{run_round(arguments.seed, arguments.round, digests):,} operations, all sound")
        return 0
    done = {"seed": arguments.seed, "rounds": 0, "operations": 0, "cpu_seconds": 0.0}
    if arguments.state.exists():
        before = json.loads(arguments.state.read_text())
        done = before if before["seed"] == arguments.seed else done
    first = done["operations"]
    start, cpu_start = time.monotonic(), time.process_time()
    cpu_before = done["cpu_seconds"]
    while time.monotonic() - start < 60 * arguments.minutes and done["operations"] < arguments.operations:
        done["operations"] += run_round(arguments.seed, done["rounds"], digests)
        done["rounds"] += 1
        done["cpu_seconds"] = cpu_before + time.process_time() - cpu_start
        arguments.state.parent.mkdir(parents=True, exist_ok=True)
        written = arguments.state.with_suffix(".new")
        written.write_text(json.dumps(done))
        os.replace(written, arguments.state)
    cpu = time.process_time() - cpu_start
    now = done["operations"] - first
    print(
        f"{done['operations']:,} block operations in {done['rounds']} rounds, seed {done['seed']}; "
        f"{now:,} now in {time.monotonic() - start:.0f} s ({now / max(cpu, 1e-9) / 1e6:.1f} million per CPU second); "
        "every invariant held"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
