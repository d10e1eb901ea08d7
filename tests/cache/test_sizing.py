"""Blocks that fit in memory, requests that fit in the blocks, and blocks of one size for all layers."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.cache.sizing import (
    bytes_per_block,
    max_concurrency,
    num_blocks_for_memory,
    num_blocks_per_request,
    token_capacity,
    unify_kv_cache_spec_page_size,
)
from kvpool.cache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvpool.errors import InvalidArgumentError

NUMBERS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 4, "dtype": "float16"}
FULL = FullAttentionSpec(16, **NUMBERS)  # 512 bytes
WINDOW = SlidingWindowSpec(16, sliding_window=33, **NUMBERS)
MAMBA = MambaSpec(64, shapes=((25,),), dtypes=("float32",), mamba_cache_mode="align")  # 100 bytes


def group(spec: KVCacheSpec, num_layers: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"{type(spec).__name__}.{i}" for i in range(num_layers)], spec)


def test_a_block_has_room_for_the_layers_of_the_largest_group() -> None:
    assert bytes_per_block([group(FULL, 3)]) == 1536
    assert bytes_per_block([group(FULL, 3), group(WINDOW, 4), group(MAMBA, 5)]) == 2048
    assert bytes_per_block([]) == 0


def test_blocks_that_fit_in_memory() -> None:
    groups = [group(FULL, 3), group(WINDOW, 4)]
    assert num_blocks_for_memory(groups, 2048 * 10) == 10
    assert num_blocks_for_memory(groups, 2048 * 11 - 1) == 10
    assert num_blocks_for_memory([], 0) == 1
    for too_few in (2047, 0, -5):
        with pytest.raises(InvalidArgumentError, match="a block needs 2048 bytes"):
            num_blocks_for_memory(groups, too_few)
    with pytest.raises(InvalidArgumentError, match="no layers"):
        num_blocks_for_memory([group(FULL, 0)], 1000)


def test_requests_that_fit_in_the_blocks() -> None:
    config = KVCacheConfig(130, [group(FULL, 3), group(WINDOW, 3)])
    # Full attention: 1,000 / 16 -> 63 blocks; window: (32 + 64) / 16 + 1 -> 7.
    assert num_blocks_per_request(config.kv_cache_groups, 1000, 64) == 70
    assert max_concurrency(config, 1000, 64) == pytest.approx(130 / 70)
    assert token_capacity(config, 1000, 64) == 1857
    # Without a bound for what is in flight the window holds the whole sequence.
    assert max_concurrency(config, 1000) == pytest.approx(130 / 127)
    cross = KVCacheConfig(100, [group(FULL, 1), group(CrossAttentionSpec(16, **NUMBERS), 1)])
    assert max_concurrency(cross, 160, max_encoder_tokens=1500) == pytest.approx(100 / 104)
    with pytest.raises(InvalidArgumentError, match="needs no blocks"):
        max_concurrency(KVCacheConfig(10, []), 100)


def test_blocks_of_one_size() -> None:
    half = replace(FULL, num_kv_heads=1)
    third = replace(FULL, state_content_bytes=5)
    named: dict[str, KVCacheSpec] = {"a": half, "b": FULL, "c": MAMBA, "d": third, "e": WINDOW}
    unified = unify_kv_cache_spec_page_size(named)
    assert list(unified) == list(named)
    assert {spec.page_size_bytes for spec in unified.values()} == {512}
    assert unified["a"] == replace(half, block_size=32)  # longer blocks
    assert unified["b"] is FULL and unified["e"] is WINDOW
    assert unified["c"] == replace(MAMBA, page_size_padded=512)
    assert unified["d"] == replace(third, page_size_padded=512)  # 160 bytes don't fit a whole number of times
    assert named["a"] is half
    assert unify_kv_cache_spec_page_size({}) == {}


def test_padded_blocks_get_more_padding() -> None:
    padded = replace(FULL, num_kv_heads=1, state_content_bytes=10, page_size_padded=256)
    unified = unify_kv_cache_spec_page_size({"a": padded, "b": FULL})
    assert unified["a"] == replace(padded, page_size_padded=512)


def test_only_specs_with_a_size_can_be_unified() -> None:
    class Odd(KVCacheSpec):
        page_size_bytes = 100

    with pytest.raises(InvalidArgumentError, match="'odd' can't be padded"):
        unify_kv_cache_spec_page_size({"odd": Odd(16), "b": FULL})


def to_vllm(spec: KVCacheSpec) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as theirs

    fields = dict(vars(spec))
    if isinstance(spec, MambaSpec):
        fields["dtypes"] = tuple(getattr(torch, name) for name in spec.dtypes)
        del fields["mamba_type"]
    else:
        fields["dtype"] = getattr(torch, fields["dtype"])
    return getattr(theirs, type(spec).__name__)(**fields)


def draw_spec(rng: random.Random) -> KVCacheSpec:
    numbers = {
        "block_size": rng.choice((8, 16, 32)),
        "num_kv_heads": rng.choice((1, 2, 3, 4)),
        "head_size": rng.choice((4, 8)),
        "dtype": rng.choice(("float16", "float32", "float8_e4m3fn")),
    }
    mode = rng.choice(("none", "align"))
    return rng.choice(
        (
            FullAttentionSpec(**numbers),
            SlidingWindowSpec(**numbers, sliding_window=rng.randint(1, 90), extra_retained_tokens=rng.choice((0, 3))),
            ChunkedLocalAttentionSpec(**numbers, attention_chunk_size=rng.choice((32, 96))),
            CrossAttentionSpec(**numbers),
            MambaSpec(64, ((3, rng.randint(1, 9)),), ("float32",), mamba_cache_mode=mode, num_speculative_blocks=2),
        )
    )


@pytest.mark.vllm
def test_the_numbers_are_vllms() -> None:
    pytest.importorskip("vllm.v1.core.block_pool")
    from vllm.v1 import kv_cache_interface as theirs
    from vllm.v1.core import kv_cache_utils

    for seed in range(500):
        rng = random.Random(seed)
        kv_cache_specs = [draw_spec(rng) for _ in range(rng.randint(1, 4))]
        length, in_flight, encoder = rng.randint(1, 2000), rng.randint(1, 300), rng.randint(1, 1500)
        modes = {spec.mamba_cache_mode for spec in kv_cache_specs if isinstance(spec, MambaSpec)}
        if len(modes) > 1:
            continue  # in vLLM the mode belongs to the whole configuration
        vllm_config = SimpleNamespace(
            max_in_flight_tokens=in_flight,
            model_config=SimpleNamespace(max_model_len=length),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            cache_config=SimpleNamespace(mamba_cache_mode=next(iter(modes), "none")),
            scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=encoder),
        )
        for spec in kv_cache_specs:
            ours = spec.max_memory_usage_bytes(length, in_flight, encoder)
            assert ours == to_vllm(spec).max_memory_usage_bytes(vllm_config), spec
        num_blocks = rng.randint(1, 1000)
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec) for spec in kv_cache_specs])
        other = theirs.KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[theirs.KVCacheGroupSpec(["layer"], to_vllm(spec)) for spec in kv_cache_specs],
        )
        capacity = kv_cache_utils.get_kv_cache_capacity(vllm_config, other)
        assert (
            token_capacity(config, length, in_flight, encoder),
            max_concurrency(config, length, in_flight, encoder),
        ) == capacity
        assert config.needs_kv_cache_zeroing == other.needs_kv_cache_zeroing

        named = {str(i): spec for i, spec in enumerate(kv_cache_specs)}
        unified = unify_kv_cache_spec_page_size(named)
        expected = kv_cache_utils.unify_kv_cache_spec_page_size({name: to_vllm(spec) for name, spec in named.items()})
        assert {name: to_vllm(spec) for name, spec in unified.items()} == expected
