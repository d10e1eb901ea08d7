"""Faults of the C core and of what is compiled around it."""

from __future__ import annotations

from .fault import Edit, Fault, engine, manager, scheduler

POOL = "csrc/kvp_pool.c"
POOL_HASH = "csrc/kvp_pool_hash.c"
MAP = "csrc/kvp_prefix_map.c"
LIST = "csrc/kvp_free_list.c"
INTERNAL = "csrc/kvp_internal.h"
HASH_INPUT = "csrc/kvp_hash_input.c"
CACHE = "kvpool/native/prefix_cache.pyx"
MANAGER = "kvpool/native/kv_cache_manager.pyx"
REQUEST = "kvpool/native/request.pyx"
ALLOCATOR = "kvpool/native/allocator.pyx"
STALE_HIT = "tests/cache/test_contents_manager.py::test_a_hit_that_was_given_away_is_refused"
PUBLISHED = "tests/cache/test_contents_manager.py::test_only_what_a_step_computes_is_published"

NATIVE_FAULTS = [
    Fault(
        "native: hash without the last token",
        (
            Edit(
                HASH_INPUT,
                "    for (size_t i = 0; i < n; i++) {\n        at = pickle_token",
                "    for (size_t i = 0; i + 1 < n; i++) {\n        at = pickle_token",
            ),
        ),
        (manager("full", "native"), scheduler("full", "native"), engine("full"), "tests/hashing/test_block_hasher.py"),
    ),
    Fault(
        "native: stale hash kept at eviction",
        (
            Edit(
                POOL,
                "if (num_hashed == 0 || !pool->enable_caching) {",
                "if (num_hashed >= 0 || !pool->enable_caching) {",
            ),
        ),
        (
            manager("full", "native"),
            scheduler("full and window", "native"),
            engine("full"),
            "tests/pool/test_prefix_map.py",
        ),
    ),
    Fault(
        "native: secondary hashes kept at eviction",
        (
            Edit(
                POOL_HASH,
                "    while ((map->has_hash[id] & KVP_HAS_SECONDARY) != 0) {\n        remove_secondary",
                "    while (dropped < 0) {\n        remove_secondary",
            ),
        ),
        ("tests/pool/test_partial_blocks.py",),
    ),
    Fault(
        "native: blocks freed first to last",
        (Edit(MANAGER, "ids[last - i] = table.ids[i]", "ids[i] = table.ids[i]"),),
        ("tests/cache/test_manager_lockstep.py",),
    ),
    Fault(
        "native: freed blocks strung the other way round",
        (
            Edit(
                LIST,
                "splice(list, segment, list->links[list->capacity].prev, list->capacity);",
                "splice(list, segment, list->capacity, list->links[list->capacity].next);",
            ),
        ),
        ("tests/pool/test_allocation.py", "tests/pool/test_free_list.py"),
    ),
    Fault(
        "native: uncached blocks appended, not prepended",
        (
            Edit(
                POOL,
                "where == KVP_PLACE_BY_HASH && pool->uncached_first;",
                "where == KVP_PLACE_BY_HASH && list->num_free < 0;",
            ),
        ),
        ("tests/pool/test_allocation.py", "tests/cache/test_manager_lockstep.py"),
    ),
    Fault(
        "native: a touched block stays in the free list",
        (Edit(POOL, "        if (ref_cnt[id]++ == 0) {", "        if (ref_cnt[id]++ == -1) {"),),
        (manager("full", "native"), "tests/pool/test_allocation.py"),
    ),
    Fault(
        "native: null block counted by touch",
        (
            Edit(
                POOL,
                """        if (id == KVP_NULL_BLOCK) {
            continue;
        }
        if (ref_cnt[id]++ == 0) {""",
                """        if (id == KVP_NULL_BLOCK) {
            ref_cnt[id]++;
            continue;
        }
        if (ref_cnt[id]++ == 0) {""",
            ),
        ),
        ("tests/pool/test_allocation.py",),
    ),
    Fault(
        "native: null block counted in the usage",
        (
            Edit(
                ALLOCATOR,
                "cdef int32_t usable = home.pool.num_blocks - 1",
                "cdef int32_t usable = home.pool.num_blocks",
            ),
        ),
        ("tests/pool/test_allocation.py",),
    ),
    Fault(
        "native: hash index at the block size, not the hash block size",
        (
            Edit(
                CACHE,
                "                at = (first + i + 1) * scale - 1\n                if at >= PyList_GET_SIZE",
                "                at = first + i\n                if at >= PyList_GET_SIZE",
            ),
        ),
        (
            manager("hybrid", "native"),
            scheduler("unequal blocks", "native"),
            engine("unequal blocks"),
            "tests/pool/test_cache_blocks.py",
        ),
    ),
    Fault(
        "native: counts not restored after a refused free",
        (
            Edit(
                POOL,
                """        if (ids[i] != KVP_NULL_BLOCK) {
            ref_cnt[ids[i]]++;
        }
""",
                "",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "native: a double free goes through",
        (Edit(POOL, "if (kvp_unlikely(ref_cnt[id] == 0)) {", "if (kvp_unlikely(ref_cnt[id] < 0)) {"),),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "native: table length unchecked",
        (
            Edit(CACHE, "        if len(batch) < num_full_blocks:\n", "        if len(batch) < 0:\n"),
            Edit(CACHE, "if first < 0 or first > length or n > length - first or mask", "if first < 0 or mask"),
        ),
        (("tests/pool/test_refusals.py", "tests/pool/test_cache_blocks.py"),),
    ),
    Fault(
        "native: group id left out of the key",
        (
            Edit(MAP, "entry->group_id == key->group_id &&", "true &&"),
            Edit(MAP, "((uint64_t)key->group_id << 8) | key->digest_len", "key->digest_len"),
        ),
        (
            manager("hybrid", "native"),
            scheduler("full and window", "native"),
            engine("three"),
            "tests/pool/test_prefix_map.py",
        ),
    ),
    Fault(
        "native: digest length not part of the key",
        (
            Edit(MAP, "           entry->digest_len == key->digest_len && memcmp", "           memcmp"),
            Edit(MAP, "((uint64_t)key->group_id << 8) | key->digest_len", "((uint64_t)key->group_id << 8)"),
        ),
        ("tests/pool/test_prefix_map.py",),
    ),
    Fault(
        "native: a deletion leaves the slots behind it",
        (
            Edit(
                MAP,
                "        if (next.entry == 0 || home_of(map, next.tag) == after) {\n",
                "        if (next.entry >= 0 || home_of(map, next.tag) == after) {\n",
            ),
        ),
        ((manager("full", "native"), manager("two_full", "native")),),
    ),
    Fault(
        "native: the first of equal keys leaves, the others are lost",
        (
            Edit(
                MAP,
                "            map->slots[place.slot].entry = entry->next_same_key + 1;\n",
                "",
            ),
        ),
        ("tests/pool/test_prefix_map.py",),
    ),
    Fault(
        "native: duplicate in a batch unchecked",
        (
            Edit(
                POOL_HASH,
                "    if ((has_hash & KVP_MARKED) != 0) {",
                "    if ((has_hash & KVP_MARKED) != 0 && id < 0) {",
            ),
        ),
        ("tests/pool/test_refusals.py",),
    ),
    Fault(
        "native: poisoned links not checked",
        (Edit(LIST, "    if (!kvp_free_list_is_queued(list, node)) {", "    if (node < 0) {"),),
        ("tests/pool/test_free_list.py",),
    ),
    Fault(
        "native: a queued block is queued again",
        (Edit(LIST, "        if (kvp_free_list_is_queued(list, nodes[i])) {", "        if (nodes[i] < 0) {"),),
        ("tests/pool/test_free_list.py",),
    ),
    Fault(
        "native: a hit covers the whole prompt",
        (
            Edit(
                MANAGER,
                "(PyList_GET_SIZE(request._all_token_ids) - 1) // self.block_size",
                "PyList_GET_SIZE(request._all_token_ids) // self.block_size",
            ),
        ),
        (manager("full", "native"), "tests/cache/test_kv_cache_manager.py::test_both_lookups_find_the_same[native]"),
    ),
    Fault(
        "native: look-ahead tokens published",
        (
            Edit(
                MANAGER,
                "num_full = min(computed + num_new_tokens, num_tokens) //",
                "num_full = min(computed + num_new_tokens + num_lookahead_tokens, num_tokens) //",
            ),
        ),
        (PUBLISHED,),
    ),
    Fault(
        "native: stale hits taken",
        (
            Edit(
                MANAGER,
                "if hits.ids[i] <= KVP_NULL_BLOCK or not kvp_pool_is_reachable(self.home.pool, &key, hits.ids[i]):",
                "if hits.ids[i] <= KVP_NULL_BLOCK:",
            ),
        ),
        (STALE_HIT,),
    ),
    Fault(
        "native: a step that needs a block is taken for one that changes nothing",
        (
            Edit(
                MANAGER,
                "or table.length * self.block_size < num_slots):",
                "or (table.length + 1) * self.block_size < num_slots):",
            ),
        ),
        (manager("hybrid", "native"), scheduler("full and window", "native"), engine("full and local")),
    ),
    Fault(
        "native: a step that fills a block is taken for one that changes nothing",
        (
            Edit(
                MANAGER,
                "plain_number(<object>cached) >= num_to_cache // self.aligned * self.aligned // self.block_size)",
                "plain_number(<object>cached) >= 0)",
            ),
        ),
        ("tests/cache/test_manager_lockstep.py",),
    ),
    Fault(
        "native: stale hashes after tokens were taken back",
        (
            Edit(
                REQUEST,
                "            del self.hashes[(first // self.hash_block_size if self.hash_block_size > 0 else 0):]\n",
                "",
            ),
        ),
        ("tests/hashing/test_request.py",),
    ),
    Fault(
        "native: extra keys left out of the hash",
        (
            Edit(
                REQUEST,
                "        if self.lora_request or self.prompt_embeds is not None or self.mm_features:\n",
                "        if self.lora_request == 0:\n",
            ),
        ),
        ("tests/hashing/test_request.py", (manager("full", "native"), scheduler("full", "native"))),
    ),
]
