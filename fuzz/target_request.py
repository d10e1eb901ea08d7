"""Requests and block hashers, native against twin: tokens of every kind, callbacks that change the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.decisions import Decisions
from fuzz.pairs import Call, call_both
from fuzz.values import Maker, any_int, any_sequence, constant, junk
from kvpool import backend, reference
from kvpool.reference.block_hasher import BlockHasher as ReferenceBlockHasher
from kvpool.reference.request import Request as ReferenceRequest

MAX_STEPS = 40
CLASSES = {
    "native": (backend.Request, backend.BlockHasher),
    "reference": (ReferenceRequest, ReferenceBlockHasher),
}
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Half:
    def __init__(self, name: str, algorithm: str, block_size: int, hashes: bool, action: Maker | None) -> None:
        self.backend = reference
        self.disturbed = False
        request_class, hasher_class = CLASSES[name]
        self.hasher = hasher_class(algorithm, block_size, "0")
        self.stranger = self.hasher
        self.request_class = request_class
        self.action = action
        self.make_hashes = (self.hash_and_act if action is not None else self.hasher) if hashes else None
        self.request = request_class("r", [1, 2, 3, 4, 5], self.make_hashes)
        self.other = request_class("other", [1, 2, 3], None)

    def hash_and_act(self, made: Any) -> list[bytes]:
        if self.action is not None and hasattr(self, "request"):
            self.action(self)
        hashes: list[bytes] = self.hasher(made)
        return hashes

    def check(self) -> None:
        """The hashes are those of the tokens, whatever was called."""
        if self.disturbed or self.make_hashes is None:
            return
        tokens = list(self.request.all_token_ids)
        size = self.hasher.block_size
        if self.is_hashed_plainly and list(self.request.block_hashes) != self.hasher.hash_token_ids(
            tokens[: len(tokens) // size * size]
        ):
            raise AssertionError(f"stale hashes of {tokens}")

    is_hashed_plainly = False


def state(half: Half) -> Any:
    made = half.request
    return (
        list(made.all_token_ids),
        list(made.output_token_ids),
        list(made.block_hashes),
        made.num_tokens,
        made.num_tokens_with_spec,
        made.num_prompt_tokens,
        made.num_computed_tokens,
        repr(made.status),
    )


def an_action(d: Decisions) -> Maker:
    which = d.below(4)

    def act(half: Half) -> None:
        half.disturbed = True
        half.action = None
        if which == 0:
            half.request.append_output_token_ids([7] * 5)
        elif which == 1:
            half.request.block_hashes = []
        elif which == 2:
            half.request.truncate(1)
        else:
            half.request.update_block_hashes()

    return act


def tokens(d: Decisions, most: int = 20) -> Maker:
    how = d.byte()
    plain = [d.below(5) for _ in range(d.below(most))]
    if how < 100:
        return constant(plain)
    if how < 130:
        edges = [2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 255, 256, 65535, 65536, 2**63 - 1, -(2**63)]
        return constant(plain + [d.choose(edges) for _ in range(d.below(6))])
    if how < 150:
        dtype = d.choose(["int32", "int64", "uint8", "uint64", "int16", ">i4"])
        return constant(np.array(plain, dtype))
    d.num_hostile += 1
    if how < 165:
        return constant(np.array(plain, d.choose(["float32", "bool", "object"])))
    return any_sequence(d, [any_int(d, 0, 5, an_action(d)) for _ in plain], an_action(d))


def make_request(d: Decisions) -> Call:
    given, max_tokens = tokens(d, 30), any_int(d, 1, 9, an_action(d))
    salt: Maker = constant(None) if d.byte() < 220 else d.choose([constant("salt"), constant(""), constant(3), junk(d)])
    lora: Maker = constant(None) if d.byte() < 220 else d.choose([constant("poems"), constant(7), junk(d)])

    def call(half: Half) -> Any:
        half.request = half.request_class(
            "r", given(half), half.make_hashes, max_tokens(half), cache_salt=salt(half), lora_name=lora(half)
        )
        return repr(half.request)

    return call


def append(d: Decisions) -> Call:
    given: Maker = tokens(d, 9) if d.chance(50) else any_int(d, 0, 5, an_action(d))
    return lambda half: half.request.append_output_token_ids(given(half))


def truncate(d: Decisions) -> Call:
    n = any_int(d, 0, 12, an_action(d))
    return lambda half: half.request.truncate(n(half))


def set_counter(d: Decisions) -> Call:
    name = d.choose(
        [
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_output_placeholders",
            "num_preemptions",
            "shared_prefix_boundary",
        ]
    )
    value = constant(d.below(10))

    def call(half: Half) -> Any:
        setattr(half.request, name, value(half))
        return getattr(half.request, name)

    return call


def set_drafts(d: Decisions) -> Call:
    given = constant([d.below(5) for _ in range(d.below(4))])

    def call(half: Half) -> Any:
        half.request.spec_token_ids = given(half)
        return half.request.num_tokens_with_spec

    return call


def set_hashes(d: Decisions) -> Call:
    given = any_sequence(d, [constant(bytes([d.below(4)]) * 32) for _ in range(d.below(4))], an_action(d))
    keeps = d.chance(50)

    def call(half: Half) -> Any:
        half.request.block_hashes = given(half)
        return None if keeps else half.request.update_block_hashes()

    return call


def get_hashes(d: Decisions) -> Call:
    size, index = d.choose([1, 2, 4, 8, 3, 0, -4]), d.below(8) - 2
    stop = d.below(8)

    def call(half: Half) -> Any:
        found = half.request.get_block_hashes(size)
        return len(found), list(found), found[index:stop], found[index]

    return call


def compare(d: Decisions) -> Call:
    return lambda half: (half.request < half.other, half.request.is_finished())


def hash_block(d: Decisions) -> Call:
    given, which = tokens(d), d.below(3)
    parent: Maker = d.choose([constant(None), constant(bytes(32)), constant(b""), constant(b"x" * 300), junk(d)])

    def call(half: Half) -> Any:
        if which == 0:
            return half.hasher.hash_block(parent(half), given(half))
        if which == 1:
            return half.hasher.hash_token_ids(given(half), parent(half))
        return half.hasher.hash_token_ids(given(half))

    return call


def make_hasher(d: Decisions) -> Call:
    algorithm: Maker = constant(d.choose(ALGORITHMS)) if d.byte() < 200 else junk(d)
    size, seed = any_int(d, 1, 5, an_action(d)), d.choose([constant(None), constant("0"), constant(3), junk(d)])
    return lambda half: repr(type(half.hasher)(algorithm(half), size(half), seed(half)))


CALLS: list[Callable[[Decisions], Call]] = [
    *[make_request] * 2,
    *[append] * 6,
    *[truncate] * 2,
    set_counter,
    set_drafts,
    set_hashes,
    *[get_hashes] * 2,
    compare,
    *[hash_block] * 3,
    make_hasher,
]


def run(d: Decisions) -> None:
    options = d.byte()
    algorithm, size = d.choose(ALGORITHMS[:2]), d.choose([1, 2, 4, 4, 16])
    action = an_action(d) if options >= 224 else None
    halves = [Half(name, algorithm, size, options % 8 != 7, action) for name in CLASSES]
    for _ in range(MAX_STEPS):
        if d.is_empty:
            break
        d.num_hostile = 0
        make_call = d.choose(CALLS)
        call = make_call(d)
        if call_both(halves, call, make_call.__name__, state, d.num_hostile > 0) is None:
            for half in halves:
                half.disturbed = True
