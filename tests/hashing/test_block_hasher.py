"""Block hashes are what hashlib or xxhash make of what pickle or cbor2 make of a block, on both backends."""

from __future__ import annotations

import copy
import enum
import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import BACKEND_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from token_requests import Lora, Picture, TokenRequest

import kvpool.backend
import kvpool.reference.block_hasher
from kvpool.errors import InvalidArgumentError
from kvpool.hashing import hashing, openssl
from kvpool.hashing.extra_keys import generate_block_hash_extra_keys

cbor2 = pytest.importorskip("cbor2")  # make quick has neither
xxhash = pytest.importorskip("xxhash")

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
EDGES = [0, 1, 22, 23, 24, 25, 255, 256, 257, 65_535, 65_536, 2**24, 2**31 - 1]
UNUSUAL = [2**31, 2**32 - 1, 2**32, 2**63, 2**64, 2**100, -1, -24, -25, -256, -257, -65_537, -(2**31), -(2**31) - 1]
INTS = st.sampled_from(EDGES) | st.integers(0, 200_000) | st.sampled_from(UNUSUAL) | st.integers()
SEED = "a seed"
FEW = settings(max_examples=40)

# tokens 0 .. 31 * 4,099 in blocks of 16, fixed seed of vLLM: equal on every machine
GOLDEN_TOKENS = [i * 4_099 for i in range(32)]
GOLDEN = {
    "sha256": "6f8713b03911312e9fd0ec2b7c979de6f20729b1f1e6aaea0daf86edf443eb14",
    "sha256_cbor": "f049d144b1390fe3bb344ce3f96ba8ff8f3b212429c012ea14964520f274f09b",
}


def expected_hash(algorithm: str, parent: bytes, tokens: Sequence[int], extra_keys: Any = None) -> bytes:
    return digest_of(algorithm, (parent, tuple(tokens), extra_keys))


def digest_of(algorithm: str, value: Any) -> bytes:
    if algorithm.endswith("cbor"):
        data = cbor2.dumps(value, canonical=True)
    else:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return hashlib.sha256(data).digest() if algorithm.startswith("sha256") else xxhash.xxh3_128_digest(data)


def expected_hashes(algorithm: str, tokens: Sequence[int], block_size: int, request: Any = None) -> list[bytes]:
    """All blocks from the first, each with the extra keys of the request."""
    hashes, parent, mm_index = [], digest_of(algorithm, SEED), 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        keys = None
        if request is not None:
            keys, mm_index = generate_block_hash_extra_keys(request, start, start + block_size, mm_index)
        parent = expected_hash(algorithm, parent, tokens[start : start + block_size], keys)
        hashes.append(parent)
    return hashes


def hasher_class_of(backend_name: str) -> Any:
    module = kvpool.backend if backend_name == "native" else kvpool.reference.block_hasher
    return module.BlockHasher


def run_python(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(params=BACKEND_NAMES)
def hasher_class(request: pytest.FixtureRequest) -> Any:
    return hasher_class_of(request.param)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hasher(hasher_class: Any, algorithm: str) -> Any:
    return hasher_class(algorithm, 4, SEED)


# ---- the bytes ----


@FEW
@given(tokens=st.lists(INTS, max_size=130), block_size=st.integers(1, 64))
def test_hashes_of_any_ints(hasher_class: Any, algorithm: str, tokens: list[int], block_size: int) -> None:
    hasher = hasher_class(algorithm, block_size, SEED)
    assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, tokens, block_size)


@FEW
@given(random=st.randoms(use_true_random=False), block_size=st.sampled_from([1, 3, 16, 64, 256]))
def test_hashes_of_token_ids(hasher_class: Any, algorithm: str, random: Any, block_size: int) -> None:
    tokens = [i * i % 151_000 for i in range(random.randrange(100), random.randrange(300, 700))]
    hasher = hasher_class(algorithm, block_size, SEED)
    assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, tokens, block_size)


def test_ints_at_the_edge_of_a_width(hasher: Any, algorithm: str) -> None:
    for token in EDGES + UNUSUAL:
        for place in range(4):
            tokens = [7, 300, 70_000, 5]
            tokens[place] = token
            assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, tokens, 4)


def test_block_sizes(hasher_class: Any, algorithm: str) -> None:
    for block_size in (*range(1, 65), 255, 256, 257, 8_192, 8_193, 14_000):
        tokens = [(i * 40_503) % 150_000 for i in range(2 * block_size + 1)]
        hasher = hasher_class(algorithm, block_size, SEED)
        assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, tokens, block_size)


@FEW
@given(
    parent=st.binary(min_size=1, max_size=300),
    tokens=st.lists(INTS, max_size=20),
    extra_keys=st.none() | st.tuples(st.tuples(st.just("lora"), st.text(), st.text())),
)
def test_one_block(hasher_class: Any, algorithm: str, parent: bytes, tokens: list[int], extra_keys: Any) -> None:
    hasher = hasher_class(algorithm, 4, SEED)
    assert hasher.hash_block(parent, tokens, extra_keys) == expected_hash(algorithm, parent, tokens, extra_keys)


def test_a_first_block_has_the_none_hash_before_it(hasher: Any, algorithm: str) -> None:
    assert hasher.none_hash == digest_of(algorithm, SEED)
    first = expected_hash(algorithm, hasher.none_hash, [1, 2, 3, 4])
    assert hasher.hash_block(None, [1, 2, 3, 4]) == hasher.hash_block(b"", [1, 2, 3, 4]) == first
    second = expected_hash(algorithm, first, [5, 6, 7, 8])
    assert hasher.hash_token_ids([5, 6, 7, 8, 9], first) == [second]


@pytest.mark.parametrize("length", [0, 1, 23, 24, 255, 256, 65_535, 65_536])
def test_seeds_of_any_length(hasher_class: Any, algorithm: str, length: int) -> None:
    seed = ("ä" + "x" * length)[:length]
    assert hasher_class(algorithm, 4, seed).none_hash == digest_of(algorithm, seed)


def test_parents_that_are_no_bytes(hasher: Any) -> None:
    for parent in ("parent", bytearray(b"parent"), 7):
        with pytest.raises(TypeError):
            hasher.hash_block(parent, [1, 2, 3, 4])


# ---- tokens that are no plain ints ----


class Special(enum.IntEnum):
    END = 5


@pytest.mark.parametrize("token", [True, np.int64(1), np.uint8(1), np.int32(1), np.uint64(1), Special(5), 1])
def test_what_counts_as_an_int_is_hashed_as_one(hasher: Any, algorithm: str, token: Any) -> None:
    plain = [300, int(token), 2, 3]
    assert hasher.hash_token_ids([300, token, 2, 3]) == expected_hashes(algorithm, plain, 4)
    assert hasher.hash_block(None, (300, token, 2, 3)) == expected_hash(algorithm, hasher.none_hash, plain)
    keys = (("cache_salt", "s"),)
    assert hasher.hash_block(None, [300, token, 2, 3], keys) == expected_hash(algorithm, hasher.none_hash, plain, keys)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays(hasher: Any, algorithm: str, dtype: Any) -> None:
    array = np.arange(30, dtype=dtype) * 2_000
    assert hasher.hash_token_ids(array) == expected_hashes(algorithm, array.tolist(), 4)
    assert hasher(TokenRequest([], block_hashes=[], all_token_ids=array)) == expected_hashes(
        algorithm, array.tolist(), 4
    )


@pytest.mark.parametrize("token", [1.0, "1", None, b"\1", np.float32(1)])
def test_what_is_no_int_is_refused(hasher: Any, token: Any) -> None:
    with pytest.raises(TypeError):
        hasher.hash_token_ids([1, 2, token, 4])
    with pytest.raises(TypeError):
        hasher.hash_block(None, [1, token], (("cache_salt", "s"),))


def test_a_token_that_changes_its_list_while_it_is_read(hasher: Any, algorithm: str) -> None:
    class Sly:
        def __index__(self) -> int:
            tokens.clear()
            return 9

    tokens = [1, 2, Sly(), 4, 5, 6, 7, 8]
    assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, [1, 2, 9, 4, 5, 6, 7, 8], 4)


# ---- requests ----


def request_of(tokens: Sequence[int], **attributes: Any) -> TokenRequest:
    return TokenRequest(tokens, block_hashes=[], **attributes)


def embeddings(num_tokens: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((num_tokens, 3)).astype(np.float32)


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora_request": Lora()},
    "salt": {"cache_salt": "tenant"},
    "picture": {"mm_features": [Picture("a", 5, 9)]},
    "pictures": {"mm_features": [Picture("a", 0, 3), Picture("b", 3, 1), Picture("a", 9, 1), Picture("c", 17, 4)]},
    "embeddings": {"prompt_embeds": embeddings(40)},
    "all": {
        "lora_request": Lora(),
        "cache_salt": "tenant",
        "mm_features": [Picture("a", 2, 30)],
        "prompt_embeds": embeddings(40),
    },
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_extra_keys(hasher: Any, algorithm: str, name: str) -> None:
    tokens = list(range(1000, 1038))
    request = request_of(tokens, **ATTRIBUTES[name])
    hashes = hasher(request)
    assert hashes == expected_hashes(algorithm, tokens, 4, request) and len(hashes) == 9
    assert (hashes == expected_hashes(algorithm, tokens, 4)) == (name == "plain")


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_hashing_in_steps_and_at_once(hasher: Any, algorithm: str, name: str, step: int) -> None:
    tokens = list(range(1000, 1038))
    request = request_of([], **ATTRIBUTES[name])
    for start in range(0, len(tokens), step):
        request.all_token_ids += tokens[start : start + step]
        request.block_hashes += hasher(request)
    assert request.block_hashes == expected_hashes(algorithm, tokens, 4, request)
    assert hasher(request) == []


@FEW
@given(
    pictures=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from("ab")), max_size=5),
    salt=st.sampled_from([None, "", "s"]),
    block_size=st.integers(1, 9),
    first=st.integers(0, 40),
)
def test_pictures_anywhere(
    hasher_class: Any, algorithm: str, pictures: list[Any], salt: str | None, block_size: int, first: int
) -> None:
    features, end = [], 0
    for gap, length, identifier in pictures:
        features.append(Picture(identifier, end + gap, length))
        end += gap + length
    hasher = hasher_class(algorithm, block_size, SEED)
    request = request_of([9] * 40, mm_features=features, cache_salt=salt)
    wanted = expected_hashes(algorithm, [9] * 40, block_size, request)
    request.block_hashes = wanted[: first // block_size]
    assert hasher(request) == wanted[first // block_size :]


def test_a_lora_adapter_and_a_salt_of_the_same_name(hasher: Any) -> None:
    tokens = list(range(8))
    requests = [
        request_of(tokens, lora_request=Lora("X")),
        request_of(tokens, cache_salt="X"),
        request_of(tokens),
        request_of(tokens, lora_request=Lora("X", path="/elsewhere")),
    ]
    assert len({hash for request in requests for hash in hasher(request)}) == 8
    # As in vLLM the number of an adapter is no part of its identity.
    assert hasher(request_of(tokens, lora_request=Lora("X", 8))) == hasher(requests[0])


def test_salts(hasher: Any) -> None:
    tokens = list(range(8))
    hashes = {salt: hasher(request_of(tokens, cache_salt=salt)) for salt in ("A", "B", None, "")}
    assert hashes[""] == hashes[None]
    assert len({hash for salt in ("A", "B", None) for hash in hashes[salt]}) == 6


def test_pictures_and_their_places(hasher: Any) -> None:
    def hashes_with(*features: Picture) -> list[bytes]:
        return hasher(request_of([7] * 16, mm_features=list(features)))

    text = hashes_with()
    one = hashes_with(Picture("one", 8, 8))
    assert one[:2] == text[:2]
    for other in (text, hashes_with(Picture("two", 8, 8)), hashes_with(Picture("one", 9, 7))):
        assert not set(one[2:]) & set(other[2:])


def test_embeddings_are_told_apart(hasher: Any) -> None:
    hashes = [hasher(request_of([0] * 8, prompt_embeds=embeddings(8, seed))) for seed in (1, 2, 1)]
    assert hashes[0] == hashes[2] and not set(hashes[0]) & set(hashes[1])


def test_a_shortened_list_of_tokens(hasher: Any, algorithm: str) -> None:
    request = request_of(range(13))
    request.block_hashes += hasher(request)
    del request.all_token_ids[6:]
    assert hasher(request) == []
    assert request.block_hashes == expected_hashes(algorithm, range(4), 4)
    request.all_token_ids += [90, 91]
    request.block_hashes += hasher(request)
    assert request.block_hashes == expected_hashes(algorithm, [*range(6), 90, 91], 4)


# ---- seeds ----


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor"])
def test_digests_are_the_same_everywhere(hasher_class: Any, name: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    hasher = hasher_class(name, 16)
    assert hasher.seed == kvpool.hashing.hashing.DEFAULT_SEED
    assert hasher.hash_token_ids(GOLDEN_TOKENS)[-1].hex() == GOLDEN[name]
    code = f"""
from kvpool.backend import BlockHasher
print(BlockHasher({name!r}, 16).hash_token_ids({GOLDEN_TOKENS})[-1].hex())
"""
    assert run_python(code) == run_python(code, KVPOOL_PURE_PYTHON="1") == GOLDEN[name]
    assert run_python(code, PYTHONHASHSEED="7") not in ("", GOLDEN[name])


def test_the_environment_seeds_every_algorithm(hasher_class: Any, algorithm: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    hasher = hasher_class(algorithm, 4)
    assert hasher.seed == "42" and hasher.none_hash == digest_of(algorithm, "42")
    assert hasher.none_hash == hasher_class(algorithm, 4, 42).none_hash == hasher_class(algorithm, 4, "42").none_hash
    assert hasher_class(algorithm, 4, "").none_hash == digest_of(algorithm, "")
    monkeypatch.setenv("PYTHONHASHSEED", "")
    assert hasher_class(algorithm, 4).seed == ""


@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_what_can_be_attacked_gets_a_random_seed(hasher_class: Any, name: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with caplog.at_level(logging.WARNING, "kvpool"):
        first, second = hasher_class(name, 4), hasher_class(name, 4)
    assert [record.name for record in caplog.records] == ["kvpool"] * 2 and "random seed" in caplog.text
    assert first.none_hash != second.none_hash and len(bytes.fromhex(first.seed)) == 32
    assert hasher_class(name, 4, first.seed).none_hash == first.none_hash


@pytest.mark.parametrize("seed", [True, 1.0, b"seed", ["seed"]])
def test_seeds_of_a_wrong_type(hasher_class: Any, seed: Any) -> None:
    with pytest.raises(TypeError, match="seed"):
        hasher_class("sha256", 4, seed)


# ---- a hasher ----


def test_arguments(hasher_class: Any) -> None:
    for block_size in (True, "4", 4.0, None):
        with pytest.raises(TypeError, match="block_size"):
            hasher_class("sha256", block_size)
    for block_size in (0, -4, 2**64, -(2**70)):
        with pytest.raises(InvalidArgumentError, match="block_size"):
            hasher_class("sha256", block_size)
    for name in ("md5", "", "SHA256"):
        with pytest.raises(InvalidArgumentError, match="sha256, sha256_cbor, xxhash, xxhash_cbor"):
            hasher_class(name, 4)
    assert hasher_class("sha256", np.int64(4)).block_size == 4


def test_a_hasher_shows_what_it_is(hasher: Any, algorithm: str) -> None:
    assert (hasher.algorithm, hasher.block_size, hasher.seed) == (algorithm, 4, SEED)
    assert repr(hasher) == f"BlockHasher({algorithm!r}, 4)"


def test_a_copy_hashes_alike(hasher_class: Any, algorithm: str) -> None:
    hasher = hasher_class(algorithm, 4)
    for twin in (copy.deepcopy(hasher), pickle.loads(pickle.dumps(hasher))):
        assert twin.hash_token_ids([1, 2, 3, 4]) == hasher.hash_token_ids([1, 2, 3, 4])


def test_empty_and_short_sequences(hasher: Any) -> None:
    assert hasher.hash_token_ids([]) == hasher.hash_token_ids([1, 2, 3]) == hasher(request_of([1, 2, 3])) == []


# ---- what may be missing ----


def test_sha256_without_the_functions_of_openssl(algorithm: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(openssl, "find_sha256", lambda: None)
    tokens = list(range(300))
    for name in BACKEND_NAMES:
        hasher = hasher_class_of(name)(algorithm, 16, SEED)
        assert hasher.hash_token_ids(tokens) == expected_hashes(algorithm, tokens, 16)


def test_functions_that_hash_wrong_are_not_taken() -> None:
    import ctypes

    def function(*types: Any) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(lambda *arguments: 1)

    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    assert not openssl._is_sha256(ctypes, function(pointer), function(pointer, pointer, size), function(pointer))


def test_another_pickle_protocol(hasher_class: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pickle, "HIGHEST_PROTOCOL", 4)
    tokens = list(range(8))
    assert hasher_class("sha256", 4, SEED).hash_token_ids(tokens) == expected_hashes("sha256", tokens, 4)


@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_the_xxhash_package_is_missing(hasher_class: Any, name: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install kvpool\[xxhash\]"):
        hasher_class(name, 4)
    hasher_class("sha256", 4)


def test_the_cbor2_package_is_missing(hasher_class: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cbor2", None)
    hashing._load_cbor2.cache_clear()
    hasher = hasher_class("sha256_cbor", 4, SEED)
    with pytest.raises(ModuleNotFoundError, match=r"pip install kvpool\[cbor\]"):
        hasher.hash_block(None, [1, 2, 3, 4], (("cache_salt", "s"),))
    is_native = hasher_class is not kvpool.reference.block_hasher.BlockHasher
    if is_native:  # plain tokens need no package there
        assert hasher.hash_token_ids([1, 2, 3, 4]) == expected_hashes("sha256_cbor", [1, 2, 3, 4], 4)
    else:
        with pytest.raises(ModuleNotFoundError, match=r"pip install kvpool\[cbor\]"):
            hasher.hash_token_ids([1, 2, 3, 4])


def test_packages_are_imported_when_they_are_needed() -> None:
    code = """
import sys
from kvpool.backend import BlockHasher
loaded = lambda: [name for name in ("ctypes", "xxhash", "cbor2", "numpy") if name in sys.modules]
before = loaded()
BlockHasher("sha256_cbor", 4).hash_token_ids([1, 2, 3, 4])
print(before, "xxhash" in loaded(), "numpy" in loaded())
"""
    assert run_python(code) == "[] False False"
