"""A block pool of lists and dicts, written for nothing but to be plainly right. The state machine runs it in step with
the real ones. Blocks are ids. A call that must be refused raises `Refused` with the class of the error, first of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from token_requests import TokenRequest, external, lookup_key

from kvpool.errors import BlockStateError, InvalidArgumentError, KvpoolError, NoFreeBlocksError


class Refused(Exception):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__(error.__name__)
        self.error = error


def require(condition: bool, error: type[Exception]) -> None:
    if not condition:
        raise Refused(error)


class NaivePool:
    def __init__(self, num_blocks: int, caching: bool, hash_size: int, events: bool, uncached_first: bool) -> None:
        self.num_blocks, self.caching, self.hash_size = num_blocks, caching, hash_size
        self.events_on, self.uncached_first = events, uncached_first
        self.free = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.primary: dict[int, tuple[bytes, int | None]] = {}
        self.secondary: dict[int, list[bytes]] = {}
        self.index: dict[bytes, list[int]] = {}
        self.watchers: dict[int, Callable[[int], None]] = {}
        self.events: list[tuple[Any, ...]] = []
        self.evictions = 0

    # Pieces

    def is_detached(self, i: int) -> bool:
        return i != 0 and self.refs[i] == 0 and i not in self.free

    def require_ids(self, ids: Sequence[int]) -> None:
        require(all(0 <= i < self.num_blocks for i in ids), BlockStateError)

    def reachable_keys(self, i: int) -> list[bytes]:
        primary = [self.primary[i][0]] if i in self.primary else []
        return [key for key in primary + self.secondary.get(i, []) if i in self.index.get(key, [])]

    def unmap(self, key: bytes, i: int) -> None:
        self.index[key].remove(i)
        if not self.index[key]:
            del self.index[key]

    def drop_hashes(self, i: int) -> list[bytes]:
        keys = self.reachable_keys(i)
        for key in keys:
            self.unmap(key, i)
        self.primary.pop(i, None)
        self.secondary.pop(i, None)
        return keys

    def give_hash(self, key: bytes, i: int, num_tokens: int | None) -> None:
        if i in self.index.get(key, []) or self.primary.get(i, (None,))[0] == key:
            return
        if i in self.primary:
            self.secondary.setdefault(i, []).append(key)
        else:
            self.primary[i] = (key, num_tokens)
        self.index.setdefault(key, []).append(i)

    def tell_removed(self, keys: Sequence[bytes]) -> None:
        if self.events_on:
            for key in keys:
                group_id = int.from_bytes(key[-4:], "big")
                self.events.append(("BlockRemoved", [external(key[:-4])], group_id))

    def tell_stored(
        self,
        request: TokenRequest,
        digests: list[bytes],
        parent: bytes | None,
        first: int,
        past: int,
        size: int,
        g: int,
    ) -> None:
        if self.events_on:
            hashes = [external(digest) for digest in digests]
            above = None if parent is None else external(parent)
            self.events.append(("BlockStored", hashes, above, request.all_token_ids[first:past], size, g))

    # Allocation and references

    def allocate(self, n: int) -> list[int]:
        require(n >= 0, InvalidArgumentError)
        require(n <= len(self.free), NoFreeBlocksError)
        taken, self.free = self.free[:n], self.free[n:]
        for i in taken:
            self.notify(i)
        for i in taken:
            self.refs[i] = 1
            if self.caching:
                removed = self.drop_hashes(i)
                self.tell_removed(removed)
                self.evictions += bool(removed)
        return taken

    def notify(self, i: int) -> None:
        watcher = self.watchers.pop(i, None)
        if watcher is not None:
            watcher(i)

    def give_back(self, ids: Sequence[int], prepend: bool) -> None:
        self.require_ids(ids)
        counts = Counter(i for i in ids if i != 0)
        require(all(self.refs[i] >= n for i, n in counts.items()), BlockStateError)
        head, tail = [], []
        for i in ids:
            if i == 0:
                continue
            self.refs[i] -= 1
            if self.refs[i] == 0:
                is_first = self.uncached_first and (i not in self.primary or not self.caching)
                (head if prepend or is_first else tail).append(i)
        self.free = head + self.free + tail

    def touch(self, ids: Sequence[int]) -> None:
        self.require_ids(ids)
        require(not any(self.is_detached(i) for i in ids), BlockStateError)
        for i in ids:
            if i != 0:
                if self.refs[i] == 0:
                    self.free.remove(i)
                self.refs[i] += 1

    def unpin(self, ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        require(all(i != 0 and self.refs[i] >= n for i, n in Counter(ids).items()), BlockStateError)
        for i in ids:
            self.watchers[i] = on_reuse
            self.refs[i] -= 1
            if self.refs[i] == 0:
                self.free.append(i)

    # Hashes

    def digests_of(self, request: TokenRequest, block_size: int) -> list[bytes]:
        scale = block_size // self.hash_size
        return request.block_hashes[scale - 1 :: scale]

    def cache_full(
        self,
        request: TokenRequest,
        ids: Sequence[int],
        first: int,
        past: int,
        size: int,
        group: int,
        mask: list[bool] | None,
    ) -> None:
        if first >= past:
            return
        digests = self.digests_of(request, size)
        places = [k for k in range(first, past) if ids[k] != 0 and (mask is None or mask[k - first])]
        cached = [ids[k] for k in places]
        for k in places:
            carried = self.primary.get(ids[k])
            if carried is not None:
                require(carried[1] is not None and carried[1] < (k + 1) * size, BlockStateError)
        require(len(set(cached)) == len(cached), BlockStateError)
        for k in places:
            i = ids[k]
            if i in self.primary:
                self.tell_removed(self.drop_hashes(i))
            self.give_hash(lookup_key(digests[k], group), i, (k + 1) * size)
        parent = digests[first - 1] if first else None
        self.tell_stored(request, [digests[k] for k in places], parent, first * size, past * size, size, group)

    def cache_ids(self, digests: Sequence[bytes], ids: Sequence[int], group: int) -> None:
        require(not self.events_on, KvpoolError)
        self.require_ids(ids)
        planned: dict[int, bytes] = {}
        for digest, i in zip(digests, ids):
            key = lookup_key(digest, group)
            carried = self.primary[i][0] if i in self.primary else key
            require(i == 0 or (carried == key and i not in planned), BlockStateError)
            planned[i] = key
        for i, key in planned.items():
            if i != 0 and i in self.primary:
                if i not in self.index.get(key, []):
                    self.index.setdefault(key, []).append(i)
            elif i != 0:
                self.give_hash(key, i, None)

    def cache_partial(self, request: TokenRequest, i: int, num_tokens: int, group: int, replace: bool) -> bytes | None:
        if i == 0:
            return None
        num_hashes = num_tokens // self.hash_size
        require(num_tokens % self.hash_size == 0 and 0 < num_hashes <= len(request.block_hashes), InvalidArgumentError)
        digest = request.block_hashes[num_hashes - 1]
        key = lookup_key(digest, group)
        is_known = self.primary.get(i, (None,))[0] == key or i in self.index.get(key, [])
        covered = self.primary.get(i, (None, None))[1]
        if replace or (not is_known and covered is not None and covered < num_tokens):
            self.tell_removed(self.drop_hashes(i))
            is_known = False
        self.give_hash(key, i, num_tokens)
        if not is_known:
            parent = request.block_hashes[num_hashes - 2] if num_hashes > 1 else None
            self.tell_stored(request, [digest], parent, num_tokens - self.hash_size, num_tokens, self.hash_size, group)
        return key

    def move(self, source: int, target: int) -> None:
        require(target != 0 and target not in self.primary and target not in self.secondary, BlockStateError)
        num_tokens = self.primary.get(source, (None, None))[1]
        for key in self.drop_hashes(source):
            self.give_hash(key, target, num_tokens)

    def evict(self, ids: Sequence[int]) -> None:
        self.require_ids(ids)
        for i in ids:
            self.tell_removed(self.drop_hashes(i))

    def reset(self) -> bool:
        if len(self.free) < self.num_blocks - 1:
            return False
        self.primary, self.secondary, self.index = {}, {}, {}
        for i in list(self.watchers):
            self.notify(i)
        if self.events_on:
            self.events.append(("AllBlocksCleared",))
        return True

    def find(self, digest: bytes, group: int) -> int | None:
        return self.index.get(lookup_key(digest, group), [None])[0]

    def find_prefix(self, digests: Sequence[bytes], group: int, limit: int | None) -> list[int]:
        found: list[int] = []
        for digest in digests[:limit]:
            i = self.find(digest, group)
            if i is None:
                break
            found.append(i)
        return found

    # By hand

    def unlink(self, i: int) -> None:
        require(i in self.free, BlockStateError)
        self.free.remove(i)

    def pop_free(self, n: int) -> list[int]:
        require(n <= len(self.free), NoFreeBlocksError)
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def link(self, ids: Sequence[int], at_head: bool) -> None:
        require(all(self.is_detached(i) for i in ids) and len(set(ids)) == len(ids), BlockStateError)
        self.free = [*ids, *self.free] if at_head else [*self.free, *ids]

    def set_ref_cnt(self, i: int, value: int) -> None:
        require(value >= 0 and (value == 0 or (i != 0 and i not in self.free)), BlockStateError)
        self.refs[i] = value

    def set_hash(self, i: int, key: bytes, num_tokens: int | None) -> None:
        require(i != 0 and i not in self.primary, BlockStateError)
        self.primary[i] = (key, num_tokens)

    def reset_hash(self, i: int) -> None:
        if i in self.primary:
            key, _ = self.primary.pop(i)
            if i in self.index.get(key, []) and key not in self.secondary.get(i, []):
                self.unmap(key, i)

    def map_insert(self, key: bytes, i: int) -> None:
        require(i != 0, BlockStateError)
        if i in self.index.get(key, []):
            return
        if self.primary.get(i, (None,))[0] != key:
            self.secondary.setdefault(i, []).append(key)
        self.index.setdefault(key, []).append(i)

    def map_pop(self, key: bytes, i: int) -> int | None:
        if i not in self.index.get(key, []):
            return None
        self.unmap(key, i)
        if key in self.secondary.get(i, []):
            self.secondary[i].remove(key)
            if not self.secondary[i]:
                del self.secondary[i]
        return i
