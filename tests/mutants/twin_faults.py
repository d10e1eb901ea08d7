"""Faults of the pool in plain Python."""

from __future__ import annotations

from .fault import Edit, Fault, manager, scheduler

POOL = "kvpool/reference/pool.py"
CACHE = "kvpool/reference/prefix_cache.py"
QUEUE = "kvpool/reference/free_queue.py"
HASHER = "kvpool/reference/block_hasher.py"
REQUEST = "kvpool/reference/request.py"

TWIN_FAULTS = [
    Fault(
        "twin: hash without the last token",
        (
            Edit(
                HASHER, "block = tuple(tokens[first : first + size])", "block = tuple(tokens[first : first + size - 1])"
            ),
        ),
        (manager("full", "reference"), scheduler("full", "reference"), "tests/hashing/test_block_hasher.py"),
        is_quick=True,
    ),
    Fault(
        "twin: hash without the block before",
        (
            Edit(
                HASHER,
                "parent = BlockHash(digest(serialize((parent, block, None))))",
                "parent = BlockHash(digest(serialize((b'', block, None))))",
            ),
        ),
        (manager("full", "reference"), "tests/hashing/test_block_hasher.py"),
    ),
    Fault(
        "twin: stale hash kept at eviction",
        (Edit(POOL, "if carries_hash and self._remove_cached_block_hashes(block):", "if carries_hash and not self:"),),
        (manager("full", "reference"), scheduler("full and window", "reference"), "tests/pool/test_prefix_map.py"),
        is_quick=True,
    ),
    Fault(
        "twin: secondary hashes kept at eviction",
        (
            Edit(
                CACHE,
                """        for key in keys:
            self.cached_block_hash_to_block._pop(key, block_id)
        self._secondary_keys.pop(block_id, None)
""",
                """        for key in keys[:1]:
            self.cached_block_hash_to_block._pop(key, block_id)
""",
            ),
        ),
        ("tests/pool/test_partial_blocks.py",),
    ),
    Fault(
        "twin: uncached blocks appended, not prepended",
        (
            Edit(
                POOL,
                """                if prepend or self.uncached_first:
                    self.free_block_queue._link_at_head(without_hash)
""",
                """                if prepend:
                    self.free_block_queue._link_at_head(without_hash)
""",
            ),
        ),
        ("tests/pool/test_allocation.py", "tests/cache/test_manager_lockstep.py"),
    ),
    Fault(
        "twin: a touched block stays in the free list",
        (
            Edit(
                POOL,
                """                after = block._next
                if after is None:
                    break
""",
                """                block._ref_cnt = 1
                continue
""",
            ),
        ),
        (manager("full", "reference"), "tests/pool/test_allocation.py"),
        is_quick=True,
    ),
    Fault(
        "twin: hash index at the block size, not the hash block size",
        (
            Edit(
                "kvpool/hashing/block_hash.py",
                """    resolved = resolve_block_hashes(block_hashes, hash_block_size, block_size)
    selected = resolved[first:past]
""",
                """    resolved = block_hashes
    selected = resolved[first:past]
""",
            ),
        ),
        (manager("hybrid", "reference"), scheduler("unequal blocks", "reference"), "tests/pool/test_cache_blocks.py"),
    ),
    Fault(
        "twin: counts not restored after a refused free",
        (
            Edit(
                POOL,
                """            if block is not null_block:
                block._ref_cnt += 1
        self._free_carefully""",
                """            if block is not null_block:
                pass
        self._free_carefully""",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "twin: links not restored after a refused touch",
        (
            Edit(
                POOL,
                """            block._prev._next = block  # type: ignore[union-attr]
            block._next._prev = block  # type: ignore[union-attr]
""",
                """            pass
""",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "twin: a double free goes through",
        (Edit(POOL, "            elif block is not null_block:\n                break\n", ""),),
        ("tests/pool/test_refusals.py", "tests/pool/test_allocation.py"),
    ),
    Fault(
        "twin: table length unchecked",
        (
            Edit(
                CACHE,
                """        if len(new_blocks) != num_new_blocks:
            raise InvalidArgumentError(f"{num_full_blocks} full blocks, but the request has {len(blocks)} blocks")
""",
                "",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "twin: null block counted in the usage",
        (Edit(POOL, "num_allocatable = self.num_gpu_blocks - 1\n", "num_allocatable = self.num_gpu_blocks\n"),),
        ("tests/pool/test_allocation.py",),
    ),
    Fault(
        "twin: group id left out of the key",
        (
            Edit(CACHE, "            suffix = group_suffix(group_id)\n", "            suffix = bytes(4)\n"),
            Edit(CACHE, "        suffix = group_suffix(kv_cache_group_id)\n", "        suffix = bytes(4)\n"),
        ),
        ("tests/pool/test_prefix_map.py", scheduler("full and window", "reference")),
    ),
    Fault(
        "twin: duplicate in a batch unchecked",
        (
            Edit(
                CACHE,
                """            if block in planned:
                raise BlockStateError(f"the block is in the range twice: {block!r}")
""",
                "",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "twin: the copy that was cached last is found",
        (
            Edit(
                CACHE,
                "found.append(next(iter(entry.values())) if type(entry) is dict else entry)",
                "found.append(list(entry.values())[-1] if type(entry) is dict else entry)",
            ),
        ),
        ("tests/pool/test_prefix_map.py",),
    ),
    Fault(
        "twin: links of a removed block not checked",
        (
            Edit(
                QUEUE,
                "if before is None or after is None or block._queue is not self:",
                "if before is None or after is None:",
            ),
            Edit(
                QUEUE, "if block._next is not None or isinstance(block, _QueueEnd):", "if isinstance(block, _QueueEnd):"
            ),
        ),
        ("tests/pool/test_free_list.py",),
    ),
    Fault(
        "twin: stale hashes after tokens were taken back",
        (
            Edit(
                REQUEST,
                """        # What a foreign hasher covers with a hash is unknown: all its hashes go.
        del self._block_hashes[first // self._hash_block_size if self._hash_block_size else 0 :]
""",
                """        del first
""",
            ),
        ),
        ("tests/hashing/test_request.py",),
    ),
]
