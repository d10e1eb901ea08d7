"""Block hashes equal those of vLLM's own functions, byte for byte, on vLLM's requests and on kvpool's."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import BACKEND_NAMES
from test_block_hasher import ALGORITHMS, hasher_class_of

import kvpool.backend
import kvpool.reference.request
import kvpool.requests.status

pytestmark = pytest.mark.vllm

NUM_HISTORIES = 60
SEED = "31"
MAX_TOKENS = 90


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's classes and functions."""
    pytest.importorskip("vllm.v1.core.block_pool")
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request, RequestStatus

    logging.getLogger("vllm").setLevel(logging.ERROR)
    return SimpleNamespace(
        LoRARequest=LoRARequest,
        MultiModalFeatureSpec=MultiModalFeatureSpec,
        PlaceholderRange=PlaceholderRange,
        Request=Request,
        RequestStatus=RequestStatus,
        SamplingParams=SamplingParams,
        hashing=hashing,
        kv_cache_utils=kv_cache_utils,
    )


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest, monkeypatch: Any, vllm: Any) -> str:
    """Both sides start from the seed in the environment."""
    monkeypatch.setenv("PYTHONHASHSEED", SEED)
    vllm.kv_cache_utils.init_none_hash(hash_function(vllm, request.param))
    return request.param


@pytest.fixture(params=BACKEND_NAMES)
def classes(request: pytest.FixtureRequest) -> Any:
    module = kvpool.backend if request.param == "native" else kvpool.reference.request
    return SimpleNamespace(BlockHasher=hasher_class_of(request.param), Request=module.Request)


def hash_function(vllm: Any, algorithm: str) -> Any:
    return vllm.hashing.get_hash_fn_by_name(algorithm)


def random_token(rng: random.Random) -> int:
    return rng.choice([rng.randrange(30), rng.randrange(300), rng.randrange(70_000), rng.randrange(200_000), 2**31 - 1])


def random_features(vllm: Any, rng: random.Random) -> list[Any]:
    features, end = [], 0
    for _ in range(rng.randrange(4)):
        offset = end + rng.randrange(12)
        length = rng.randint(1, 20)
        features.append(
            vllm.MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=rng.choice(["picture a", "picture b"]),
                mm_position=vllm.PlaceholderRange(offset=offset, length=length),
            )
        )
        end = offset + length
    return features


def random_arguments(vllm: Any, rng: random.Random) -> dict[str, Any]:
    """Arguments that both request classes have."""
    import torch

    tokens = [random_token(rng) for _ in range(rng.randrange(1, MAX_TOKENS))]
    arguments: dict[str, Any] = {"prompt_token_ids": tokens}
    if rng.random() < 0.3:
        arguments["lora_request"] = vllm.LoRARequest(rng.choice("xy"), 1, rng.choice(["/a", "/b"]))
    if rng.random() < 0.3:
        arguments["cache_salt"] = rng.choice(["", "s", "t"])
    if rng.random() < 0.5:
        arguments["mm_features"] = random_features(vllm, rng)
    if rng.random() < 0.3:
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        generator = torch.Generator().manual_seed(rng.randrange(3))
        arguments["prompt_embeds"] = torch.randn((len(tokens), 3), generator=generator).to(dtype)
        if rng.random() < 0.5:
            arguments["prompt_is_token_ids"] = [rng.random() < 0.5 for _ in tokens]
        elif rng.random() < 0.5:
            arguments["prompt_token_ids"] = None
    return arguments


def vllm_request(vllm: Any, block_hasher: Any, arguments: dict[str, Any]) -> Any:
    return vllm.Request(
        request_id="r",
        sampling_params=vllm.SamplingParams(max_tokens=100),
        pooling_params=None,
        block_hasher=block_hasher,
        **arguments,
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_requests_have_the_same_hashes(vllm: Any, classes: Any, algorithm: str, block_size: int) -> None:
    rng = random.Random(block_size)
    vllm_hasher = vllm.kv_cache_utils.get_request_block_hasher(block_size, hash_function(vllm, algorithm))
    hasher = classes.BlockHasher(algorithm, block_size)
    assert hasher.none_hash == vllm.kv_cache_utils.NONE_HASH
    num_hashes = 0
    for _ in range(NUM_HISTORIES):
        arguments = random_arguments(vllm, rng)
        requests = [
            vllm_request(vllm, vllm_hasher, arguments),
            vllm_request(vllm, hasher, arguments),
            classes.Request("r", block_hasher=hasher, **arguments),
            classes.Request("r", block_hasher=vllm_hasher, **arguments),
        ]
        for _ in range(rng.randrange(4)):
            output = [random_token(rng) for _ in range(rng.randrange(8))] if rng.random() < 0.7 else 5
            for request in requests:
                request.append_output_token_ids(output)
        for request in requests[1:]:
            assert request.block_hashes == requests[0].block_hashes
            assert list(request.all_token_ids) == list(requests[0].all_token_ids)
            assert request.num_tokens == requests[0].num_tokens
            assert request.num_prompt_tokens == requests[0].num_prompt_tokens
            assert request.num_output_tokens == requests[0].num_output_tokens
        num_hashes += len(requests[0].block_hashes)
    assert num_hashes > 100


def test_single_blocks_have_the_same_hash(vllm: Any, classes: Any, algorithm: str) -> None:
    rng = random.Random(7)
    hasher = classes.BlockHasher(algorithm, 4)
    for _ in range(300):
        tokens = [rng.choice([random_token(rng), -random_token(rng), 2**31, 2**40]) for _ in range(rng.randrange(20))]
        parent = rng.choice([None, b"", rng.randbytes(16), rng.randbytes(32)])
        keys = rng.choice([None, (("lora", "x", "/a"),), (("mm", "b", -3), ("cache_salt", "s"))])
        wanted = vllm.kv_cache_utils.hash_block_tokens(hash_function(vllm, algorithm), parent, tokens, keys)
        assert hasher.hash_block(parent, tokens, keys) == wanted


def test_the_seeds_without_a_setting(vllm: Any, classes: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for algorithm in ALGORITHMS:
        function = hash_function(vllm, algorithm)
        vllm.kv_cache_utils.init_none_hash(function)
        hasher = classes.BlockHasher(algorithm, 4)
        assert (hasher.none_hash == vllm.kv_cache_utils.NONE_HASH) == algorithm.startswith("sha256")
        told = classes.BlockHasher(algorithm, 4, vllm.kv_cache_utils.get_none_hash_seed())
        assert told.none_hash == vllm.kv_cache_utils.NONE_HASH


def test_statuses_have_the_same_values(vllm: Any) -> None:
    for status in kvpool.requests.status.RequestStatus:
        assert vllm.RequestStatus[status.name] == status
        assert vllm.RequestStatus.is_finished(status) == kvpool.requests.status.RequestStatus.is_finished(status)
