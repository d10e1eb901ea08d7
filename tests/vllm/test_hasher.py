"""vLLM's request block hasher and the native one of the level ``hasher``: the same digests, byte for byte."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SIZE = 4


@pytest.fixture(scope="module")
def hasher() -> Any:
    pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from kvpool.integrations.vllm import hasher

    return hasher


@pytest.fixture(params=ALGORITHMS)
def hashers(request: pytest.FixtureRequest, hasher: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's hasher and the native one of an algorithm, with its NONE_HASH."""
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    if request.param.startswith("xxhash"):
        pytest.importorskip("xxhash")
    function = getattr(hashing, request.param)
    kv_cache_utils.init_none_hash(function)
    native = hasher.get_request_block_hasher(SIZE, function)
    assert type(native) is hasher.RequestHasher
    return hasher._stock(SIZE, function), native


def make_request(tokens: list[Any], **more: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    embeds = more.pop("prompt_embeds", None)
    return Request("r", tokens, SamplingParams(max_tokens=9), None, prompt_embeds=embeds, **more)


def make_feature(offset: int, length: int, name: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def random_extras(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    """Extra keys of every kind, alone and together."""
    extras: dict[str, Any] = {}
    if rng.random() < 0.3:
        extras["cache_salt"] = rng.choice(["salt", ""])
    if rng.random() < 0.15:
        from vllm.lora.request import LoRARequest

        extras["lora_request"] = LoRARequest(rng.choice("ab"), 1, "/adapter")
    if rng.random() < 0.4:
        at, features = 0, []
        for _ in range(rng.randint(1, 3)):
            at += rng.randint(0, 6)
            features.append(make_feature(at, rng.randint(1, 9), rng.choice("xyz")))
            at += features[-1].mm_position.length
        extras["mm_features"] = features
    if rng.random() < 0.1:
        import torch

        extras["prompt_embeds"] = torch.arange(num_tokens * 2, dtype=torch.float32).reshape(num_tokens, 2)
    return extras


def append_everywhere(requests: list[Any], tokens: list[Any]) -> None:
    for request in requests:
        request.append_output_token_ids(list(tokens))


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_have_the_same_hashes(hashers: tuple[Any, Any], seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.choice([0, 1, 255, 256, 65_536, 2**31 - 1]) for _ in range(rng.randint(0, 40))]
    extras = random_extras(rng, len(tokens))
    requests = [make_request(list(tokens), block_hasher=each, **copy.copy(extras)) for each in hashers]
    assert len(requests[0].block_hashes) == len(tokens) // SIZE
    for _ in range(6):
        assert requests[0].block_hashes == requests[1].block_hashes
        append_everywhere(requests, [rng.randrange(60_000) for _ in range(rng.randint(1, 9))])
    assert requests[0].block_hashes == requests[1].block_hashes
    assert all(type(digest) is bytes for digest in requests[1].block_hashes)


def test_tokens_that_are_no_plain_ints(hashers: tuple[Any, Any]) -> None:
    numbers = [2**31, 2**63, -1, -(2**40), True, 7, 2**200, False]
    requests = [make_request(list(numbers), block_hasher=each) for each in hashers]
    assert len(requests[1].block_hashes) == 2
    assert requests[0].block_hashes == requests[1].block_hashes


def test_a_session_that_lost_tokens(hashers: tuple[Any, Any]) -> None:
    """Streaming sessions cut both lists and add to them."""
    requests = [make_request(list(range(30)), block_hasher=each, cache_salt="s") for each in hashers]
    for request in requests:
        del request._all_token_ids[18:]
        del request.block_hashes[18 // SIZE :]
        request._all_token_ids.extend(range(100, 120))
        request.update_block_hashes()
    assert len(requests[1].block_hashes) == 38 // SIZE
    assert requests[0].block_hashes == requests[1].block_hashes


def test_the_start_of_the_chain_is_read_when_hashing(hashers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    before = make_request(list(range(8)), block_hasher=hashers[1]).block_hashes
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another")
    after = [make_request(list(range(8)), block_hasher=each).block_hashes for each in hashers]
    assert after[0] == after[1] != before


def test_other_requests_and_other_functions_are_left_to_vllm(hasher: Any, hashers: tuple[Any, Any]) -> None:
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "cache_salt": None}
    tokens = list(range(12))
    other = SimpleNamespace(block_hashes=[], all_token_ids=tokens, num_tokens=len(tokens), **plain)
    assert hashers[0](other) == hashers[1](other)

    def function(value: Any) -> bytes:
        return repr(value).encode()[:20]

    left = hasher.get_request_block_hasher(SIZE, function)
    assert type(left) is not hasher.RequestHasher
    first = function((hasher.kv_cache_utils.NONE_HASH, (0, 1, 2, 3), None))
    assert make_request(tokens, block_hasher=left).block_hashes[0] == first


def test_without_xxhash_vllm_says_so(hasher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import hashing

    def fail() -> Any:
        raise ModuleNotFoundError("xxhash")

    monkeypatch.setattr(hasher, "load_xxh3_128", fail)
    monkeypatch.setattr(hashing, "_xxhash", None)
    monkeypatch.setattr(hasher.kv_cache_utils, "NONE_HASH", b"start", raising=False)
    with pytest.raises(ModuleNotFoundError, match="xxhash"):
        make_request([1] * SIZE, block_hasher=hasher.get_request_block_hasher(SIZE, hashing.xxhash))


def test_a_hasher_is_copied_and_pickled_like_a_closure(hashers: tuple[Any, Any]) -> None:
    native = hashers[1]
    assert copy.copy(native) is native
    assert copy.deepcopy([native])[0] is native
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(native)


@pytest.fixture
def installed(hasher: Any) -> Iterator[None]:
    from kvpool.integrations.vllm.hooks import Hooks

    hooks = Hooks()
    hasher.install(hooks)
    yield
    hooks.restore()


def test_engines_get_the_native_hasher(hasher: Any, installed: None) -> None:
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    made = kv_cache_utils.get_request_block_hasher(16, hashing.sha256)
    assert type(made) is hasher.RequestHasher
    assert made.block_size == 16
