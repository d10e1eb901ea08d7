"""``BlockHasherBase``: which algorithms there are, how a hasher is made, and the blocks that are not plain.

Plain blocks, whose tokens are plain ints and which have no extra keys, are hashed by the halves
(``kvpool.native.block_hasher``, ``kvpool.reference.block_hasher``): ``_hash_plain_blocks`` and ``_hash_plain_block``.

The hash of a block is the digest of ``(hash of the block before, tuple of its tokens, extra keys or None)``, serialized
by pickle or as canonical CBOR. Engines that share a cache have to agree on every byte of that.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kvpool.common.arguments import show, to_int
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import BlockHash
from kvpool.hashing.extra_keys import ExtraKeys, generate_block_hash_extra_keys

DEFAULT_SEED = "vllm-none-hash"  # vLLM's: engines of either kind that share a cache start their chains alike
RANDOM_SEED_BYTES = 32
_MAX_BLOCK_SIZE = 2**62
NATIVE_PICKLE_PROTOCOL = 5

Digest = Callable[[bytes], bytes]
Serialize = Callable[[Any], bytes]

logger = logging.getLogger("kvpool")


@dataclass(frozen=True)
class Algorithm:
    """How a block is serialized and digested.

    Attributes:
        name: as ``BlockHasher`` takes it.
        is_cbor: canonical CBOR, else pickle at its highest protocol.
        is_sha256: SHA-256, else XXH3 of 128 bits, which is fast and not safe against chosen tokens.
    """

    name: str
    is_cbor: bool
    is_sha256: bool


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("sha256", is_cbor=False, is_sha256=True),
        Algorithm("sha256_cbor", is_cbor=True, is_sha256=True),
        Algorithm("xxhash", is_cbor=False, is_sha256=False),
        Algorithm("xxhash_cbor", is_cbor=True, is_sha256=False),
    )
}


# ---- serialization and digests ----


def plain_int(token: Any) -> int:
    """A token id as an exact int: bools, numpy's ints and enum members become what they stand for.

    Raises:
        TypeError: no integer.
    """
    return int(index(token))


def serialize_pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


@functools.cache
def _load_cbor2() -> Any:
    try:
        import cbor2
    except ImportError as error:
        raise ModuleNotFoundError(
            "CBOR block hashes of anything but plain token ids need the cbor2 package: pip install kvpool[cbor]",
            name="cbor2",
        ) from error
    return cbor2


def serialize_cbor(value: Any) -> bytes:
    dumped: bytes = _load_cbor2().dumps(value, canonical=True)
    return dumped


def serialize_cbor_text(text: str) -> bytes:
    """Canonical CBOR of a str, so that a hasher can be made without the cbor2 package."""
    data = text.encode()
    for additional, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if len(data) < additional == 24:
            return bytes([0x60 | len(data)]) + data
        if len(data) < 1 << 8 * width:
            return bytes([0x60 | additional]) + len(data).to_bytes(width, "big") + data
    raise InvalidArgumentError("a seed this long does not exist")


def sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def load_xxh3_128() -> Digest:
    """XXH3-128 of the xxhash package, which is imported here and not with kvpool.

    Raises:
        ModuleNotFoundError: it is not installed, or too old to have XXH3.
    """
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise ModuleNotFoundError(
            "the block hash algorithms 'xxhash' and 'xxhash_cbor' need the xxhash package: pip install kvpool[xxhash]",
            name="xxhash",
        ) from error
    digest: Digest = xxh3_128_digest
    return digest


# ---- the start of every chain ----


def resolve_none_hash_seed(algorithm: str, seed: str | int | None = None) -> str:
    """The seed of the hash that stands before the first block, by vLLM's rules.

    What is given counts, then the environment variable PYTHONHASHSEED. Without either, sha256 starts from a fixed seed
    (equal hashes everywhere), xxhash from a new random one: with a seed that others know they could work out tokens
    that collide.

    Raises:
        TypeError: the seed is neither str nor int.
    """
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (str, int)):
            raise TypeError(f"a seed is a str or an int, not {type(seed).__name__}: {seed!r}")
        return str(seed)
    environment_seed = os.environ.get("PYTHONHASHSEED")
    if environment_seed is not None:
        return environment_seed
    if parse_algorithm(algorithm).is_sha256:
        return DEFAULT_SEED
    logger.warning(
        "%s block hashes start from a random seed and differ from process to process; "
        "set PYTHONHASHSEED, pass a seed or use sha256 to share a prefix cache",
        algorithm,
    )
    return os.urandom(RANDOM_SEED_BYTES).hex()


# ---- arguments ----


def parse_algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise InvalidArgumentError(f"unknown block hash algorithm {show(name)}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def parse_block_size(block_size: Any) -> int:
    if isinstance(block_size, bool) or not hasattr(block_size, "__index__"):
        raise TypeError(f"block_size must be an int, not {type(block_size).__name__}: {show(block_size)}")
    size = to_int("block_size", block_size, highest=_MAX_BLOCK_SIZE)
    if size < 1:
        raise InvalidArgumentError(f"block_size must be positive, not {show(size)}")
    return size


def _private_list(token_ids: Any) -> list[Any]:
    """The tokens in a list that nobody else has, so that no code of the caller can change it under the hasher."""
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)


def _num_blocks_with_extra_keys(request: Any, block_size: int) -> float:
    """How many blocks from the start may have extra keys; all further ones have none. O(1)."""
    if getattr(request, "lora_request", None) or getattr(request, "prompt_embeds", None) is not None:
        return float("inf")
    num_blocks = 1 if getattr(request, "cache_salt", None) else 0
    features = getattr(request, "mm_features", None)
    if features:
        place = features[-1].mm_position  # sorted by offset
        num_blocks = max(num_blocks, -(-(place.offset + place.length) // block_size))
    return num_blocks


class BlockHasherBase:
    """The hashes of full blocks of tokens, each over the block's tokens and the hash before it.

    Calling it with a request hashes the request's new full blocks; ``Request`` does so by itself.

    Args:
        algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor". Digests are equal to vLLM 0.32's, byte for byte.
        block_size: tokens per hash, at least 1.
        seed: of the hash before the first block, a str or an int; None follows PYTHONHASHSEED and then vLLM's
            defaults (``resolve_none_hash_seed``).

    Attributes:
        algorithm, block_size: as given.
        seed: the one in use, a str; hashers that are to agree on xxhash need it.
        none_hash: the digest in the place of the hash before the first block; vLLM's ``NONE_HASH``.

    Raises:
        TypeError: block_size is no int, or seed neither str nor int.
        InvalidArgumentError: block_size below 1 or an unknown algorithm.
        ModuleNotFoundError: an xxhash algorithm without the xxhash package. The cbor2 package is looked for when the
            first block needs it.

    Tokens that are no exact ints (bools, numpy's ints) are hashed as the int they stand for; vLLM hashes the pickle of
    the object itself. vLLM: ``get_request_block_hasher`` and ``hash_block_tokens``.
    """

    algorithm: str
    block_size: int
    seed: str
    none_hash: BlockHash

    # What each half brings: kvpool.native.block_hasher.BlockHasherCore, and the twin.

    def _create(self, block_size: int, algorithm: Algorithm, digest: Digest) -> None:
        raise NotImplementedError

    def _hash_plain_block(self, parent: BlockHash, tokens: list[Any]) -> BlockHash:
        """The hash of one block of any length without extra keys."""
        raise NotImplementedError

    def _hash_plain_blocks(self, parent: BlockHash, tokens: list[Any], start: int, hashes: list[BlockHash]) -> None:
        """Append to ``hashes`` those of the full blocks from token ``start`` on."""
        raise NotImplementedError

    def __init__(self, algorithm: str, block_size: int, seed: str | int | None = None) -> None:
        parsed = parse_algorithm(algorithm)
        self._digest: Digest = sha256_digest if parsed.is_sha256 else load_xxh3_128()
        self._serialize: Serialize = serialize_cbor if parsed.is_cbor else serialize_pickle
        self._create(parse_block_size(block_size), parsed, self._digest)
        self.algorithm = algorithm
        self.seed = resolve_none_hash_seed(algorithm, seed)
        serialize_seed = serialize_cbor_text if parsed.is_cbor else serialize_pickle
        self.none_hash = BlockHash(self._digest(serialize_seed(self.seed)))

    def __call__(self, request: Any) -> list[BlockHash]:
        """Hashes of the full blocks that have none yet; the caller appends them to ``request.block_hashes``.

        Args:
            request: has ``all_token_ids``, ``block_hashes``, and what ``generate_block_hash_extra_keys`` reads.

        A token list that is shorter than what was hashed has the surplus removed from ``request.block_hashes``. One
        that was shortened and has grown again can be told by kvpool's ``Request``, which keeps track, but not by other
        requests: whoever shortens them has to drop their hashes. O(new tokens).
        """
        hashes = request.block_hashes
        first, past = len(hashes), len(request.all_token_ids) // self.block_size
        if first >= past:
            if first > past:
                del hashes[past:]
            return []
        parent = self._parse_parent(hashes[-1] if first else None)
        tokens = request.all_token_ids[first * self.block_size : past * self.block_size]
        if type(tokens) is not list:  # a slice of a list is a new list already
            tokens = _private_list(tokens)
        return self._hash_request_blocks(request, parent, tokens, first)

    def hash_block(
        self, parent_block_hash: BlockHash | None, token_ids: Sequence[int], extra_keys: ExtraKeys = None
    ) -> BlockHash:
        """The hash of one block. O(len(token_ids)).

        Args:
            parent_block_hash: hash of the block before; None or b"" for the first block.
            token_ids: the block's tokens, any number of them.
            extra_keys: as from ``generate_block_hash_extra_keys``.

        vLLM: ``hash_block_tokens``.
        """
        parent = self._parse_parent(parent_block_hash)
        tokens = _private_list(token_ids)
        if extra_keys is None:
            return self._hash_plain_block(parent, tokens)
        return self._hash_exactly(parent, tokens, extra_keys)

    def hash_token_ids(self, token_ids: Sequence[int], parent_block_hash: BlockHash | None = None) -> list[BlockHash]:
        """The hashes of all full blocks of a sequence without extra keys; ``parent_block_hash`` stands before it."""
        hashes: list[BlockHash] = []
        self._hash_plain_blocks(self._parse_parent(parent_block_hash), _private_list(token_ids), 0, hashes)
        return hashes

    def _parse_parent(self, parent_block_hash: Any) -> BlockHash:
        if not parent_block_hash:
            return self.none_hash
        if type(parent_block_hash) is not bytes:
            raise TypeError(f"a block hash is bytes, not {type(parent_block_hash).__name__}")
        return BlockHash(parent_block_hash)

    def _hash_request_blocks(self, request: Any, parent: BlockHash, tokens: list[Any], first: int) -> list[BlockHash]:
        """Hashes of the blocks from number ``first`` on; ``tokens`` are theirs."""
        size = self.block_size
        hashes: list[BlockHash] = []
        past = min(first + len(tokens) // size, _num_blocks_with_extra_keys(request, size))
        block, mm_index = first, 0
        while block < past:
            start = (block - first) * size
            extra_keys, mm_index = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, mm_index)
            parent = self.hash_block(parent, tokens[start : start + size], extra_keys)
            hashes.append(parent)
            block += 1
        self._hash_plain_blocks(parent, tokens, (block - first) * size, hashes)
        return hashes

    def _hash_exactly(self, parent: BlockHash, tokens: list[Any], extra_keys: ExtraKeys = None) -> BlockHash:
        """The hash of any block, over what the serializers themselves make of it."""
        return BlockHash(self._digest(self._serialize((parent, tuple(map(plain_int, tokens)), extra_keys))))

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.algorithm, self.block_size, self.seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm!r}, {self.block_size})"
