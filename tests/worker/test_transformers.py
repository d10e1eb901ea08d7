"""Continuous batching of transformers on kvpool: the same tokens as on its own allocator, and a cache that is used up
before anything waits. Models are tiny and random, in float32, on the CPU."""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from collections.abc import Iterator
from functools import lru_cache, wraps
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.19."):
    pytest.skip("made for transformers 5.19", allow_module_level=True)
pytest.importorskip("psutil", reason="transformers sizes a cache on the CPU with it")

ContinuousBatchingConfig = pytest.importorskip("transformers.generation.configuration_utils").ContinuousBatchingConfig
stock_cache = pytest.importorskip("transformers.generation.continuous_batching.cache")
stock = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
integration = pytest.importorskip("kvpool.integrations.transformers")

pytestmark = pytest.mark.dataplane

FULL, SLIDING = "full_attention", "sliding_attention"
VOCABULARY = 97
PAGE = 8  # tokens a block
SHARED_TOKENS = 40
MAX_NEW_TOKENS = 24
AMPLE, SCARCE, SCANT = 200, 30, 18  # blocks; a request needs up to 11, 5 of them shared

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Each test starts and ends on stock transformers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    integration.uninstall()
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL] is stock.FullAttentionCacheAllocator


@lru_cache
def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "full":
        config = transformers.LlamaConfig(num_hidden_layers=2, **TINY)
        config._attn_implementation = "sdpa"
        return transformers.LlamaForCausalLM(config).eval()
    layers = {"layer_types": [SLIDING] * 3 + [FULL], "use_sliding_window": True, "sliding_window": 16}
    config = transformers.Qwen3Config(num_hidden_layers=4, **layers, **TINY)
    config._attn_implementation = "sdpa"
    return transformers.Qwen3ForCausalLM(config).eval()


def make_prompts() -> list[list[int]]:
    """Eight prompts with their first tokens in common."""
    rng = random.Random(1)
    shared = [rng.randrange(VOCABULARY) for _ in range(SHARED_TOKENS)]
    return [shared + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))] for _ in range(8)]


def generate(kind: str, num_blocks: int, copies: int = 1, **options: Any) -> tuple[list[list[int]], Any]:
    """Tokens of each request, and the cache that they were made with."""
    caches: list[Any] = []
    make_cache = stock_cache.PagedAttentionCache.__init__

    def make_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        make_cache(self, *args, **kwargs)
        caches.append(self)

    # Several copies need sampling; from the best token alone it is greedy.
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": copies} if copies > 1 else {"do_sample": False}
    generation = transformers.GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS, eos_token_id=-1, pad_token_id=0, **sampling
    )
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock_cache.PagedAttentionCache, "__init__", make_and_keep)
        outputs = make_model(kind).generate_batch(make_prompts(), generation, config, progress_bar=False, warmup=False)
    tokens = [output.generated_tokens for output in outputs.values()]
    assert [len(each) for each in tokens] == [MAX_NEW_TOKENS] * (len(make_prompts()) * copies)
    return tokens, caches[0]


@lru_cache
def stock_tokens(kind: str) -> list[list[int]]:
    """Greedy tokens on stock transformers, blocks ample."""
    tokens, cache = generate(kind, AMPLE)
    assert type(cache.cache_allocators[FULL]) is stock.FullAttentionCacheAllocator
    return tokens


def generate_on_kvpool(kind: str, num_blocks: int, copies: int = 1, **options: Any) -> tuple[list[list[int]], Any]:
    integration.install()
    tokens, cache = generate(kind, num_blocks, copies, **options)
    integration.uninstall()
    return tokens, cache


def check_all_free(cache: Any) -> Any:
    """The full-attention allocator, after a look at everything that it owns."""
    allocator = cache.cache_allocators[FULL]
    assert type(allocator) is integration.KvpoolCacheAllocator
    allocator.block_pool.check()
    assert allocator.block_table == {}
    cache.pool.try_to_free_sectors()
    assert cache.compute_free_capacity() == 1.0
    return allocator


# ---- generation ----


@pytest.mark.parametrize(("num_blocks", "evicts"), [(AMPLE, False), (SCARCE, True), (SCANT, True)])
def test_the_same_tokens(num_blocks: int, evicts: bool) -> None:
    tokens, cache = generate_on_kvpool("full", num_blocks)
    assert tokens == stock_tokens("full")
    allocator = check_all_free(cache)
    assert allocator.block_pool.get_num_free_blocks() == allocator.num_blocks == num_blocks
    assert allocator.num_hit_tokens >= 6 * SHARED_TOKENS  # the first batch has one and a half prompts
    assert (allocator.block_pool.stats.evictions > 0) == evicts


@pytest.mark.parametrize("num_blocks", [AMPLE, SCANT])
def test_the_same_tokens_on_stock(num_blocks: int) -> None:
    """What the comparison rests on: stock transformers makes the same tokens whatever room it has."""
    assert generate("full", num_blocks)[0] == stock_tokens("full")


@pytest.mark.parametrize("num_blocks", [AMPLE, SCARCE, SCANT])
def test_forks(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[tuple[int, int]] = []
    fork_blocks = integration.KvpoolCacheAllocator.fork_blocks

    @wraps(fork_blocks)
    def fork_and_count(self: Any, source: str, dest: str, past_length: int) -> Any:
        copied, new = fork_blocks(self, source, dest, past_length)
        table = self.block_table[dest]
        shared = len(table) - len(new)
        assert table[:shared] == self.block_table[source][:shared] and set(table[shared:]) == set(new)
        assert shared == past_length // PAGE and not set(new) & set(copied)
        forked.append((shared, len(copied)))
        return copied, new

    monkeypatch.setattr(integration.KvpoolCacheAllocator, "fork_blocks", fork_and_count)
    tokens, cache = generate_on_kvpool("full", num_blocks, copies=3)
    assert tokens == [each for each in stock_tokens("full") for _ in range(3)]
    check_all_free(cache)
    assert sum(shared for shared, _ in forked) >= 5 and any(copied for _, copied in forked)
    if num_blocks == AMPLE:
        assert len(forked) == 2 * len(make_prompts())


@pytest.mark.parametrize("num_blocks", [AMPLE, 20, 12])
def test_sectors_go_to_and_fro_beside_sliding_attention(num_blocks: int) -> None:
    tokens, cache = generate_on_kvpool("hybrid", num_blocks)
    assert tokens == stock_tokens("hybrid")
    assert type(cache.cache_allocators[SLIDING]) is stock.SlidingAttentionCacheAllocator
    allocator = check_all_free(cache)
    assert allocator.blocks_per_sector == 3
    assert cache.pool.num_free_sectors == cache.num_sectors and allocator.block_pool.get_num_free_blocks() == 0


def test_forks_beside_sliding_attention() -> None:
    tokens, cache = generate_on_kvpool("hybrid", AMPLE, copies=2)
    assert tokens == [each for each in stock_tokens("hybrid") for _ in range(2)]
    check_all_free(cache)


def test_without_sharing_nothing_is_cached() -> None:
    tokens, cache = generate_on_kvpool("full", AMPLE, allow_block_sharing=False)
    assert tokens == stock_tokens("full")
    allocator = check_all_free(cache)
    assert allocator.num_hit_tokens == 0 and allocator.block_pool.num_evictable_blocks == 0


def test_a_manager_that_lives_on_hits_all_it_computed() -> None:
    integration.install()
    model = make_model("full")
    generation = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=AMPLE, max_batch_tokens=64)
    with model.continuous_batching_context_manager(generation, True, 5, config, warmup=False) as manager:
        results, hits = [], []
        for _ in range(2):
            manager.add_request(make_prompts()[0], max_new_tokens=4)
            results.append(next(iter(manager)).generated_tokens)
            allocator = manager.batch_processor.cache.cache_allocators[FULL]
            hits.append(allocator.num_hit_tokens)
    assert results[0] == results[1] == stock_tokens("full")[0][:4]
    assert hits == [0, (len(make_prompts()[0]) - 1) // PAGE * PAGE]


def test_a_reset_beside_sliding_attention_gives_all_sectors_back() -> None:
    cache = generate_on_kvpool("hybrid", 20)[1]
    cache.reset()
    assert cache.pool.num_free_sectors == cache.num_sectors
    allocator = check_all_free(cache)
    allocator.pool.allocate_sector(allocator.index)
    allocator.allocate_cache_to_request("one", 0, PAGE)
    assert allocator.block_pool.get_num_free_blocks() == allocator.blocks_per_sector - 1
    allocator.block_pool.check()


# ---- switching ----


def test_install_and_uninstall_are_idempotent() -> None:
    table = stock_cache.ATTN_TYPE_TO_ALLOCATOR
    for _ in range(2):
        integration.install()
        assert table[FULL] is integration.KvpoolCacheAllocator
    for _ in range(2):
        integration.uninstall()
        assert table[FULL] is stock.FullAttentionCacheAllocator
    assert table[SLIDING] is stock.SlidingAttentionCacheAllocator


def test_what_stood_there_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(stock.FullAttentionCacheAllocator):
        pass

    monkeypatch.setitem(stock_cache.ATTN_TYPE_TO_ALLOCATOR, FULL, Other)
    integration.install()
    integration.uninstall()
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL] is Other


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (stock.FullAttentionCacheAllocator, "fork_blocks", lambda self, source: None),
        (stock.FullAttentionCacheAllocator, "allocate_cache_to_request", lambda self, request_id, num_tokens: None),
        (stock.cache_pool.RegularTrees, "pop_leaves", lambda self: None),
        (stock.cache_allocator.BlockLedger, "evict_cached_blocks", lambda self, num_blocks: None),
    ],
)
def test_another_layout_is_refused(owner: Any, name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(integration.UnsupportedTransformersError, match=f"{transformers.__version__}.*{owner.__name__}"):
        integration.install()
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL] is stock.FullAttentionCacheAllocator


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stock.CachePool, "allocate_sector")
    with pytest.raises(integration.UnsupportedTransformersError, match="CachePool has no allocate_sector"):
        integration.install()


def test_moved_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, stock.cache_pool.__name__, None)
    spec = importlib.util.spec_from_file_location("another_copy", integration.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"transformers 5\.19.*cache_pool"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_nothing_holds_on_to_a_cache() -> None:
    """Those of the tests above are gone."""
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is stock_cache.PagedAttentionCache]
