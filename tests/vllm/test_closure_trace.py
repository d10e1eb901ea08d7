"""Nothing is missing from what kvpool says it relies on: whatever function of vLLM runs below a replaced one is in the
closure, seen by a trace of schedulers, cache managers, requests of every kind and tables."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool")
if sys.version_info < (3, 11):
    pytest.skip("code objects don't know their qualified names", allow_module_level=True)

import torch
from test_closure import MEMBERS
from test_hasher import make_feature, make_request, random_extras
from test_scheduler_lockstep import bench  # noqa: F401 (a fixture)

from kvpool.integrations import vllm as integration
from kvpool.integrations.vllm import (
    closure,
    hasher,
    histories,
    levels,
    longest_hit,
    manager_steps,
    pool,
    sources,
    tables,
)

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 4
# Functions of vLLM that run below a replaced one and are not in the closure, and why they need not be.
NOT_RELIED_ON = {
    "vllm.distributed.parallel_state.get_dcp_group": "which ranks there are comes to vLLM's own table",
    "vllm.distributed.parallel_state.get_pcp_group": "as above",
}


def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below a frame that the trace can see: compiled functions have none."""

    def below(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return below


_ENTERED = entered(len).__code__


class Trace:
    """Names of vLLM's functions that ran below a replaced one."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._root = str(sources.installed_sources() / "vllm") + "/"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        above = frame.f_back
        while above is not None and above.f_code is not _ENTERED:
            above = above.f_back
        if above is not None:
            module = sources.module_of_file("vllm/" + code.co_filename.removeprefix(self._root))
            function = code.co_qualname.partition(".<")[0]  # what is defined within a function belongs to it
            self.names.add(module if function.startswith("<") else f"{module}.{function}")


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """All levels are in place, and every call into them is seen."""
    integration.unregister()
    monkeypatch.setenv(levels.VARIABLE, "1")
    for module, names in (
        (manager_steps, ("allocate_slots", "cache_blocks", "free")),
        (longest_hit, ("find_full", "find_window", "find_local", "get_block_ids")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, entered(getattr(module, name)))
    stock_hasher = hasher.get_request_block_hasher
    monkeypatch.setattr(
        hasher, "get_request_block_hasher", lambda *given, **named: entered(entered(stock_hasher)(*given, **named))
    )
    for owner in (pool.BlockPool, tables.BlockTable, tables.MultiGroupBlockTable):
        for name in dir(owner):
            value = getattr(owner, name)
            is_method = callable(value) and not isinstance(_static(owner, name), (staticmethod, classmethod, type))
            if is_method and (not name.startswith("_") or name == "__init__"):
                monkeypatch.setattr(owner, name, entered(value))
    integration.register()
    status = integration.status()
    assert status is not None and status.levels == levels.NAMES, status
    trace = Trace()
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        integration.unregister()


def _static(owner: type, name: str) -> Any:
    return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)


def is_relied_on(name: str) -> bool:
    if name in MEMBERS:
        return True
    owner = name.rpartition(".")[0]
    while owner.count("."):
        member = MEMBERS.get(owner)
        if member is not None and member.functions is not None:
            return True  # a class is fingerprinted as a whole
        owner = owner.rpartition(".")[0]
    return False


def is_excused(name: str) -> bool:
    return closure.is_left_out(name) or name in NOT_RELIED_ON


# ---- what is run ----


def run_schedulers(bench: Any) -> None:  # noqa: F811
    from vllm.v1.request import RequestStatus

    for seed in range(4):
        rng = random.Random(seed)
        scheduler = bench.make_vllm_scheduler(
            num_blocks=20,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_batched_tokens=32,
            max_num_seqs=6,
            enable_caching=seed != 3,
            watermark=0.1,
            log_stats=True,
        )
        for step in range(40):
            if step % 2 == 0:
                prompt = [1] * rng.randint(1, 20) + [rng.randrange(3) for _ in range(4)]
                scheduler.add_request(bench.make_vllm_request(f"{step}", prompt, BLOCK_SIZE, rng.randint(1, 20)))
            if step % 7 == 6:
                scheduler.finish_requests(f"{step - 6}", RequestStatus.FINISHED_ABORTED)
            output = scheduler.schedule()
            tokens = {name: [rng.randrange(3)] for name in output.num_scheduled_tokens}
            for request in scheduler.running:
                if request.is_prefill_chunk:
                    tokens[request.request_id] = []
            scheduler.update_from_output(output, bench.model_runner_output(output, tokens))


def run_requests() -> None:
    """Requests with extra keys of every kind, in a manager with events."""
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_manager, kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    size: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full, coarse = (FullAttentionSpec(block_size=n * BLOCK_SIZE, **size) for n in (1, 2))
    window = SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=8, **size)
    for seed, algorithm in enumerate(("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")):
        function = getattr(hashing, algorithm)
        try:
            kv_cache_utils.init_none_hash(function)
        except ModuleNotFoundError:
            continue  # xxhash is not installed
        make_hashes = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, function)
        specs = ((full,), (coarse, window))[seed % 2]
        config = KVCacheConfig(40, [], [KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate(specs)])
        manager = kv_cache_manager.KVCacheManager(
            config,
            max_model_len=128,
            scheduler_block_size=(seed % 2 + 1) * BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=True,
            log_stats=True,
            use_eagle=seed == 2,
        )
        rng = random.Random(seed)
        for i in range(60):
            length = rng.randint(1, 60)
            more = random_extras(rng, length)
            if i % 3 == 0:
                more["mm_features"] = [make_feature(2, 9, "x")]
                more.pop("prompt_embeds", None)
            request = make_request([i % 2] * length, block_hasher=make_hashes, **more)
            request.request_id = f"{i}"
            blocks, num_hit, *_ = manager.get_computed_blocks(request)
            # Every fourth call is one that is left to vLLM's method.
            is_delayed = i % 4 == 3
            if manager.allocate_slots(request, length - num_hit, num_hit, blocks, delay_cache_blocks=is_delayed):
                manager.get_block_ids(request.request_id)
                request.num_computed_tokens = length
                request.append_output_token_ids(1)
                manager.allocate_slots(request, 1)
                manager.free(request)
            manager.take_events()
        manager.reset_prefix_cache()


def run_tables() -> None:
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    table = tables.MultiGroupBlockTable(4, 64, False, torch.device("cpu"), [4, 8], [8, 4])
    table.add_row(([1, 2], [3]), 0)
    table.append_row(([4], []), 0)
    table.add_row(([5], [6]), 1)
    table.swap_row(0, 1)
    table.commit_block_table(2)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    table.compute_slot_mapping(2, starts, torch.tensor([0, 1, 4, 5]))
    table.clear()


def test_every_function_below_a_replaced_one_is_relied_on(
    bench: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Made before the trace and left: a scheduler's configuration runs all of vLLM.
    bench.make_vllm_scheduler(20, BLOCK_SIZE, 64, 32, 6)
    bench._block_hasher.cache_clear()
    with traced(monkeypatch) as trace:
        run_schedulers(bench)
        run_requests()
        run_tables()
        for seed in range(24):
            for _ in histories.history(seed):
                pass
    bench._block_hasher.cache_clear()
    missing = sorted(name for name in trace.names if not is_relied_on(name) and not is_excused(name))
    assert not missing, missing
    core = "vllm.v1.core"
    for met in (
        f"{core}.kv_cache_utils.generate_block_hash_extra_keys",
        f"{core}.kv_cache_utils._gen_lora_extra_hash_keys",
        f"{core}.kv_cache_utils._gen_prompt_embeds_extra_hash_keys",
        f"{core}.kv_cache_utils.hash_block_tokens",
        f"{core}.kv_cache_utils.maybe_convert_block_hash",
        f"{core}.kv_cache_utils.to_event_extra_keys",
        f"{core}.kv_cache_manager.KVCacheManager.allocate_slots",
        "vllm.multimodal.utils.get_mm_features_in_window",
        "vllm.utils.math_utils.cdiv",
        "vllm.v1.request.Request.num_tokens",
        "vllm.v1.worker.block_table.BlockTable.__init__",
    ):
        assert met in trace.names, met
    assert len(trace.names) > 40, sorted(trace.names)


def test_a_function_that_nobody_relies_on_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import math_utils

    with traced(monkeypatch) as trace:
        entered(math_utils.next_power_of_2)(5)
        math_utils.round_up(5, 4)
    assert trace.names == {"vllm.utils.math_utils.next_power_of_2"}
    assert not is_relied_on("vllm.utils.math_utils.next_power_of_2")
    assert is_relied_on("vllm.utils.math_utils.cdiv") and is_relied_on("vllm.v1.request.Request.num_tokens")
