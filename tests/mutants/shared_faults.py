"""Faults of what both halves share: hashes of what is rare, managers, coordinators, scheduler."""

from __future__ import annotations

from .fault import Edit, Fault, engine, engine_fails, manager, scheduler, scheduler_fails

HASHING = "kvpool/hashing/hashing.py"
KEYS = "kvpool/hashing/extra_keys.py"
OPERATIONS = "kvpool/cache/manager.py"
POOL_OPERATIONS = "kvpool/pool/observed.py"
BASE = "kvpool/cache/managers/base.py"
WINDOW = "kvpool/cache/managers/sliding_window.py"
LOCAL = "kvpool/cache/managers/chunked_local.py"
MAMBA = "kvpool/cache/managers/mamba.py"
ALIGNED = "kvpool/cache/managers/mamba_align.py"
FULL = "kvpool/cache/managers/full_attention.py"
HYBRID = "kvpool/cache/coordinator/hybrid.py"
LIFECYCLE = "kvpool/scheduler/lifecycle.py"
WITHDRAWAL = "kvpool/scheduler/withdrawal.py"

SHARED_FAULTS = [
    Fault(
        "extra keys left out of the hash",
        (Edit(HASHING, "tokens[start : start + size], extra_keys)", "tokens[start : start + size], None)"),),
        (manager("full", "native"), scheduler("full", "native"), "tests/hashing/test_block_hasher.py"),
        is_quick=True,
    ),
    Fault(
        "adapter left out of the extra keys",
        (Edit(KEYS, '        keys.append(("lora", lora.lora_name, lora.lora_path))\n', "        pass\n"),),
        (
            (manager("full", "native"), manager("full", "reference"), scheduler("full", "native")),
            "tests/hashing/test_block_hasher.py",
        ),
    ),
    Fault(
        "salt left out of the extra keys",
        (Edit(KEYS, '        keys.append(("cache_salt", salt))\n', "        pass\n"),),
        (
            (manager("full", "native"), manager("two_full", "native"), scheduler("full", "native")),
            "tests/hashing/test_block_hasher.py",
        ),
    ),
    Fault(
        "pictures left out of the extra keys",
        (Edit(KEYS, "    keys += multimodal_keys\n", ""),),
        (
            (manager("full", "native"), manager("two_full", "native"), scheduler("full", "native")),
            "tests/hashing/test_block_hasher.py",
        ),
    ),
    Fault(
        "a hit covers the whole prompt",
        (
            Edit(
                OPERATIONS,
                "request.block_hashes, request.num_tokens - 1\n",
                "request.block_hashes, request.num_tokens\n",
            ),
        ),
        (manager("full", "reference"), "tests/cache/test_kv_cache_manager.py"),
    ),
    Fault(
        "look-ahead tokens published",
        (
            Edit(
                OPERATIONS,
                "else min(computed + num_new_tokens, request.num_tokens)",
                "else min(computed + num_new_tokens + num_lookahead_tokens, request.num_tokens)",
            ),
        ),
        ((manager("full", "reference"), manager("two_full", "reference")),),
        is_quick=True,
    ),
    Fault(
        "tokens from elsewhere published before they are there",
        (
            Edit(
                OPERATIONS,
                "to_cache = -1 if delay_cache_blocks else",
                "to_cache = -1 if not self else",
            ),
        ),
        ((manager("full", "native"), manager("hybrid", "native"), manager("two_full", "reference")),),
    ),
    Fault(
        "stale hits taken",
        (Edit(OPERATIONS, "        if self.verify_hits:\n", "        if not self:\n"),),
        ("tests/cache/test_kv_cache_manager.py",),
    ),
    Fault(
        "blocks freed first to last",
        (
            Edit(
                BASE,
                "self.block_pool.free_blocks(self.pop_blocks_for_free(request_id)[::-1])",
                "self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))",
            ),
        ),
        ("tests/cache/test_managers.py",),
    ),
    Fault(
        "window freed one block too early",
        (
            Edit(
                WINDOW,
                "return max(num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens, 0)",
                "return max(num_computed_tokens - self.sliding_window + 1 + self.block_size, 0)",
            ),
        ),
        (
            manager("window", "native"),
            scheduler("full and window", "reference"),
            engine("window"),
            "tests/cache/test_managers.py",
        ),
        is_quick=True,
    ),
    Fault(
        "window hit one block too short",
        (
            Edit(
                WINDOW,
                "return ceil_div(window_size - 1, block_size) + use_eagle",
                "return max(ceil_div(window_size - 1, block_size) - 1, 1) + use_eagle",
            ),
        ),
        (manager("window", "native"), scheduler("full and window", "reference"), "tests/cache/test_managers.py"),
    ),
    Fault(
        "stretch freed one block too early",
        (
            Edit(
                LOCAL,
                "return max(num_computed_tokens, 0) //",
                "return max(num_computed_tokens + self.block_size, 0) //",
            ),
        ),
        (manager("local", "native"), scheduler("local", "reference"), "tests/cache/test_managers.py"),
    ),
    Fault(
        "a Mamba state is given back before it is read",
        (Edit(MAMBA, "return max(num_computed_tokens - 1, 0)", "return max(num_computed_tokens, 0)"),),
        ((manager("mamba", "native"), manager("hybrid_mamba", "native")), "tests/cache/test_managers.py"),
    ),
    Fault(
        "a Mamba state is hit in the step that computes it",
        (
            Edit(
                MAMBA,
                "if new_computed_blocks and new_computed_blocks[-1].block_hash in self.cached_blocks_this_step:",
                "if not self:",
            ),
        ),
        (
            (manager("mamba", "native"), manager("hybrid_mamba", "native"), scheduler("full and mamba", "native")),
            "tests/cache/test_kv_cache_manager.py",
        ),
    ),
    Fault(
        "a cached Mamba state is written over",
        (
            Edit(
                ALIGNED,
                "            self._partial_hit_reqs[request.request_id] = (block_idx, block)\n",
                "",
            ),
        ),
        ((manager("hybrid_mamba", "native"), scheduler("hits inside blocks", "native")),),
    ),
    Fault(
        "a hit inside a block is continued in place",
        (Edit(BASE, "        self.req_to_blocks[request_id][block_idx] = cow_block\n", ""),),
        (
            (manager("hybrid_mamba", "native"), scheduler("hits inside blocks", "native")),
            "tests/cache/test_kv_cache_manager.py",
        ),
    ),
    Fault(
        "copies of shared blocks are not asked for",
        (
            Edit(
                "kvpool/cache/queries.py",
                "copies = [KVCacheBlockCopy(source.block_id, target.block_id) for source, target in pairs]",
                "copies: list[KVCacheBlockCopy] = []",
            ),
        ),
        (manager("hybrid_mamba", "reference"), scheduler("hits inside blocks", "native"), engine("hits inside blocks")),
        is_quick=True,
    ),
    Fault(
        "blocks are zeroed again and again",
        (Edit(BASE, "ids, self.new_block_ids = self.new_block_ids, []", "ids = list(self.new_block_ids)"),),
        (
            manager("hybrid_mamba", "native"),
            scheduler("full and mamba", "native"),
            "tests/cache/test_kv_cache_manager.py",
        ),
    ),
    Fault(
        "groups do not have to agree on a hit",
        (Edit(HYBRID, "            length = found_length\n", ""),),
        (manager("hybrid", "native"), scheduler("full and window", "native"), "tests/cache/test_coordinator.py"),
    ),
    Fault(
        "a dead partial entry returns",
        (
            Edit(
                POOL_OPERATIONS,
                """        if self.strict_partial and not replace_existing_hashes and not is_beyond:
            return None
""",
                "",
            ),
        ),
        ("tests/pool/test_partial_blocks.py",),
    ),
    Fault(
        "a replaced partial entry stays",
        (
            Edit(
                POOL_OPERATIONS,
                "removed = self._remove_cached_block_hashes(block) if replace_existing_hashes or is_promotion else []",
                "removed = self._remove_cached_block_hashes(block) if replace_existing_hashes and is_promotion else []",
            ),
        ),
        ("tests/pool/test_partial_blocks.py",),
    ),
    Fault(
        "events in another order",
        (
            Edit(
                "kvpool/pool/event_stream.py",
                "        for key in block_hashes:\n            if self.dedup_events",
                "        for key in list(block_hashes)[::-1]:\n            if self.dedup_events",
            ),
        ),
        (("tests/pool/test_state_machine.py", "tests/events/test_events.py", "tests/pool/test_partial_blocks.py"),),
    ),
    Fault(
        "removed before stored, the other way round",
        (
            Edit(
                POOL_OPERATIONS,
                """        self._emit_block_removed_events(removed)
        if event is not None:
            self._queue_event(event)
""",
                """        if event is not None:
            self._queue_event(event)
        self._emit_block_removed_events(removed)
""",
            ),
        ),
        (("tests/events/test_events.py", "tests/pool/test_state_machine.py"),),
    ),
    Fault(
        "a reset while blocks are in use",
        (Edit(POOL_OPERATIONS, "        if num_used:\n", "        if num_used < 0:\n"),),
        ("tests/pool/test_cache_blocks.py",),
    ),
    Fault(
        "a resumed block table is appended to the old one",
        (Edit("kvpool/scheduler/step.py", "[True] * len(self.resumed)", "[False] * len(self.resumed)"),),
        (scheduler("full", "native"), scheduler("full and window", "reference"), engine("full")),
        is_quick=True,
    ),
    Fault(
        "generated tokens are not sent",
        (Edit("kvpool/scheduler/step.py", "return [request.all_token_ids[start]]", "return []"),),
        (scheduler("full", "native"), engine("full")),
    ),
    Fault(
        "a prefill with Mamba states ends anywhere",
        (Edit("kvpool/scheduler/mamba_split.py", "        if start >= prefill_end:\n", "        if True:\n"),),
        (scheduler("full and mamba", "native"), engine("full and mamba")),
    ),
    Fault(
        "a step that failed is not withdrawn",
        (
            Edit(
                "kvpool/engine/engine.py",
                "                self.scheduler.withdraw()\n            elif",
                "                self.scheduler.steps_under_way.clear()\n            elif",
            ),
        ),
        (engine_fails("full"), engine_fails("full and window")),
    ),
    Fault(
        "hashes of a withdrawn step stay",
        (
            Edit(
                BASE,
                "        self.block_pool.evict_blocks(self.find_uncomputed_ids(request_id, num_computed_tokens))\n",
                "",
            ),
        ),
        (
            scheduler_fails("full", "native"),
            scheduler_fails("full and window", "reference"),
            engine_fails("full"),
            "tests/scheduler/test_scheduler_withdrawal.py",
        ),
        is_quick=True,
    ),
    Fault(
        "blocks of a withdrawn step are kept",
        (Edit(BASE, "        self._shorten(request_id, num_kept_blocks)\n", ""),),
        ("tests/scheduler/test_scheduler_withdrawal.py",),
    ),
    Fault(
        "tables are not told again after a withdrawn step",
        (Edit(WITHDRAWAL, "            self._resent_ids.add(request.request_id)\n", ""),),
        (scheduler_fails("full", "native"), engine_fails("full"), "tests/scheduler/test_scheduler_withdrawal.py"),
    ),
    Fault(
        "counts of a withdrawn step stay",
        (
            Edit(
                WITHDRAWAL,
                "        request.num_computed_tokens = num_computed_tokens\n        manager",
                "        manager",
            ),
        ),
        (scheduler_fails("full", "native"), engine_fails("full"), "tests/scheduler/test_scheduler_withdrawal.py"),
    ),
    Fault(
        "blocks of a request that left during a withdrawn step are hit",
        (Edit(LIFECYCLE, "                step.abandoned_block_ids += block_ids\n", "                pass\n"),),
        (
            (
                scheduler_fails("full", "native"),
                scheduler_fails("full", "native", "priority"),
                scheduler_fails("sink", "native"),
                scheduler_fails("full and local", "native"),
            ),
            "tests/scheduler/test_scheduler_withdrawal.py",
        ),
    ),
    Fault(
        "a Mamba state that a withdrawn step has written over is gone on from",
        (
            Edit(
                "kvpool/cache/withdrawal.py",
                "return any(isinstance(manager, MambaManager) for manager in self.coordinator.single_type_managers)",
                "return False",
            ),
        ),
        (
            scheduler_fails("full and mamba", "native"),
            engine_fails("full and mamba"),
            "tests/scheduler/test_scheduler_withdrawal.py",
        ),
    ),
    Fault(
        "a preempted request keeps its blocks",
        (
            Edit(
                LIFECYCLE,
                "        self._stop_running(request)\n        self.kv_cache_manager.free(request)\n",
                "        self._stop_running(request)\n",
            ),
        ),
        (scheduler("full", "native"), engine("full")),
        is_quick=True,
    ),
    Fault(
        "a preempted request goes on where it was",
        (
            Edit(
                LIFECYCLE,
                "        request.status = RequestStatus.PREEMPTED\n        request.num_computed_tokens = 0\n",
                "        request.status = RequestStatus.PREEMPTED\n",
            ),
        ),
        (scheduler("full", "native"), engine("full")),
    ),
    Fault(
        "a preempted request is admitted before its token has come",
        (
            Edit(
                "kvpool/scheduler/scheduler.py",
                "            if request.num_in_flight_tokens:\n",
                "            if request.num_in_flight_tokens < 0:\n",
            ),
        ),
        (("tests/scheduler/test_scheduler.py", "tests/scheduler/test_scheduler_random.py"),),
    ),
]
