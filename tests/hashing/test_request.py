"""A request: its tokens and counts, and block hashes that follow the tokens however they change."""

from __future__ import annotations

import enum
import gc
import os
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import BACKEND_NAMES
from hostile_values import HUGE, INTEGERS, NO_INTEGERS, REALS, Index, Unshowable
from hypothesis import given, settings
from hypothesis import strategies as st
from token_requests import Lora, Picture

import kvpool.backend
import kvpool.reference.block_hasher
import kvpool.reference.request
from kvpool.backend import BlockHasher
from kvpool.common.arguments import show
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import BlockHashListWithBlockSize
from kvpool.requests.sampling_params import SamplingParams
from kvpool.requests.status import RequestStatus
from kvpool.requests.token_ids import MAX_TOKEN_ID, TokenIds

BLOCK_SIZE = 4


@pytest.fixture(params=BACKEND_NAMES)
def request_class(request: pytest.FixtureRequest) -> Any:
    module = kvpool.backend if request.param == "native" else kvpool.reference.request
    return module.Request


@pytest.fixture
def hasher() -> BlockHasher:
    return BlockHasher("sha256", BLOCK_SIZE)


@pytest.fixture
def make(request_class: Any, hasher: BlockHasher) -> Any:
    def make_request(tokens: Any = range(10), **arguments: Any) -> Any:
        return request_class("r", tokens, hasher, **arguments)

    return make_request


def hashes_of(tokens: Any) -> list[bytes]:
    return BlockHasher("sha256", BLOCK_SIZE).hash_token_ids(tokens)


# ---- arguments and attributes ----


def test_a_new_request(request_class: Any) -> None:
    before = time.time()
    request = request_class("name", [5, 6, 7])
    assert before <= request.arrival_time <= time.time()
    assert (request.request_id, request.prompt_token_ids, request.max_tokens) == ("name", [5, 6, 7], 16)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.num_computed_tokens == request.num_in_flight_tokens == request.num_preemptions == 0
    assert request.num_output_placeholders == request.shared_prefix_boundary == request.priority == 0
    assert (request.spec_token_ids, request.num_tokens_with_spec) == ([], 3)
    assert request.status is RequestStatus.WAITING and not request.is_finished()
    assert request.lora_request is request.lora_name is request.cache_salt is request.prompt_embeds is None
    assert request.session_id is request.prompt_is_token_ids is None
    assert request.mm_features == [] and not request.has_encoder_inputs and request.num_encoder_inputs == 0
    assert request.skip_reading_prefix_cache is False
    assert request.block_hashes == [] and request._prompt_embeds_per_block_hashes == {}
    assert repr(request) == "Request('name', WAITING, num_tokens=3, num_computed_tokens=0)"


def test_all_arguments(request_class: Any) -> None:
    picture, embeddings = Picture("p", 0, 1), np.ones((2, 3))
    request = request_class("r", [1, 2], None, 9, 3, 12.5, "poems", "salt", [picture], embeddings, True, session_id="s")
    assert (request.max_tokens, request.priority, request.arrival_time) == (9, 3, 12.5)
    assert (request.lora_name, request.cache_salt, request.session_id) == ("poems", "salt", "s")
    assert request.mm_features == [picture] and request.has_encoder_inputs and request.num_encoder_inputs == 1
    assert request.prompt_embeds is embeddings and request.skip_reading_prefix_cache is True
    lora = request.lora_request
    assert (lora.lora_name, lora.name, lora.lora_path, lora.lora_int_id, lora.adapter_id) == (
        "poems", "poems", "", None, None,
    )  # fmt: skip
    assert request_class("r", [1], lora_request=Lora("verse")).lora_name == "verse"


def test_arguments_that_do_not_fit(request_class: Any) -> None:
    for arguments in (
        {},
        {"prompt_token_ids": [1], "max_tokens": 0},
        {"prompt_token_ids": [1], "lora_name": "a", "lora_request": Lora()},
        {"prompt_token_ids": [1], "prompt_embeds": np.ones((2, 3))},
        {"prompt_token_ids": [1, 2], "prompt_embeds": np.ones((2, 3)), "prompt_is_token_ids": [True]},
    ):
        with pytest.raises(InvalidArgumentError):
            request_class("r", **arguments)
    for tokens in ([1.0], ["1"], [None], np.ones(3), 7):
        with pytest.raises(TypeError):
            request_class("r", tokens)


@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: type(value).__name__)
def test_numbers_become_plain(request_class: Any, value: Any) -> None:
    request = request_class("r", [value], max_tokens=value, priority=value, arrival_time=REALS[1])
    for number in (request.max_tokens, request.priority, request.prompt_token_ids[0], request.all_token_ids[0]):
        assert type(number) is int and number == 3
    assert type(request.arrival_time) is float and request.arrival_time == 0.5
    request = request_class("r", range(5))
    request.truncate(value)
    assert request.all_token_ids == [0, 1, 2]


@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_refused_by_name(request_class: Any, make: Any, value: Any) -> None:
    for name in ("max_tokens", "priority"):
        with pytest.raises(TypeError, match=f"{name} is an integer, not "):
            request_class("r", [1], **{name: value})
    with pytest.raises(TypeError, match="a token id is an integer, not "):
        request_class("r", [1, value])
    request = make()
    hashes = list(request.block_hashes)
    for call in (request.truncate, lambda wrong: request.append_output_token_ids([1, wrong])):
        with pytest.raises(TypeError, match=r"(num_tokens|a token id) is an integer, not "):
            call(value)
    assert request.all_token_ids == list(range(10)) and request.block_hashes == hashes
    assert request.num_prompt_tokens == 10 and list(request.prompt_token_ids) == list(range(10))


def test_arguments_of_wrong_types_are_refused_by_name(request_class: Any) -> None:
    for name in ("lora_name", "cache_salt", "session_id"):
        for value in (b"a", 5, ["a"], Unshowable()):
            with pytest.raises(TypeError, match=f"{name} is a str, not "):
                request_class("r", [1], **{name: value})
        with pytest.raises(InvalidArgumentError, match=f"{name} .* can't be encoded"):
            request_class("r", [1], **{name: "\ud800"})
    for value in (None, 5, b"r", Unshowable()):
        with pytest.raises(TypeError, match="request_id is a str, not "):
            request_class(value, [1])
    for value in (float("nan"), float("-inf"), *HUGE):
        with pytest.raises(InvalidArgumentError, match="arrival_time is finite, not "):
            request_class("r", [1], arrival_time=value)
    for value in ({}, "greedy", SimpleNamespace(temperature=0)):
        with pytest.raises(TypeError, match="sampling_params are SamplingParams, not "):
            request_class("r", [1], sampling_params=value)
    for value in ("12", {1: 2}, 7, np.array(7), Unshowable()):
        with pytest.raises(TypeError, match="token ids are integers in a sequence, not "):
            request_class("r", value)


def test_parameters_of_a_subclass_are_those_that_workers_know(request_class: Any) -> None:
    class Mine(SamplingParams, array_like=True, frozen=True, gc=False):
        note: object = None

    request = request_class("r", [1], sampling_params=Mine(0.5, 3, 0.9, 7, object()))
    assert type(request.sampling_params) is SamplingParams
    assert request.sampling_params == SamplingParams(0.5, 3, 0.9, 7)


def test_a_token_whose_own_code_fails_or_changes_the_list(request_class: Any) -> None:
    request = request_class("r", [1, 2])
    with pytest.raises(ZeroDivisionError):
        request.append_output_token_ids([3, Index(ZeroDivisionError())])
    assert request.all_token_ids == [1, 2] and request.output_token_ids == []

    class Growing:
        def __index__(self) -> int:
            tokens.extend([self] * 2)
            return 5

    tokens: list[Any] = [1, Growing()]
    request.append_output_token_ids(tokens)
    assert request.all_token_ids == [1, 2, 1, 5] and request.output_token_ids == [1, 5]
    tokens = [Growing()]
    assert request_class("r", tokens).all_token_ids == [5]


class Special(enum.IntEnum):
    END = 2


def test_tokens_become_plain_ints(request_class: Any) -> None:
    for tokens in ([True, np.int64(2)], (1, Special.END), np.array([1, 2], dtype=np.int32), range(1, 3)):
        request = request_class("r", tokens)
        assert [type(token) for token in request.all_token_ids] == [int, int]
        assert request.prompt_token_ids == [1, 2] == request.all_token_ids.copy()
        for more in (np.int32(3), True, [np.int64(4), Special.END], np.array([5]), iter([6]), 7):
            request.append_output_token_ids(more)
        assert request.output_token_ids == [3, 1, 4, 2, 5, 6, 7]
        assert {type(token) for token in request.all_token_ids} == {int}


def test_the_prompt_is_copied(request_class: Any) -> None:
    prompt = [1, 2, 3]
    request = request_class("r", prompt)
    request.append_output_token_ids(4)
    assert prompt == [1, 2, 3] and request.prompt_token_ids is prompt


def test_prompts_of_embeddings(request_class: Any) -> None:
    request = request_class("r", prompt_embeds=np.ones((3, 2)))
    assert request.prompt_token_ids is None and request.num_prompt_tokens == 3
    assert request.all_token_ids == [0, 0, 0]
    mixed = request_class("r", [7, 8, 9], prompt_embeds=np.ones((3, 2)), prompt_is_token_ids=[True, False, True])
    assert mixed.prompt_token_ids == [7, 8, 9] and mixed.all_token_ids == [7, 0, 9]


def test_appending_is_all_or_nothing(make: Any) -> None:
    request = make()
    for tokens in ([1, "2"], 1.0, "3", None, [None]):
        with pytest.raises(TypeError):
            request.append_output_token_ids(tokens)
    assert request.all_token_ids == list(range(10)) and request.output_token_ids == []


NO_TOKEN_IDS = [-1, MAX_TOKEN_ID + 1, 2**32, 2**63, 2**64, -(2**63) - 1, *HUGE]


@pytest.mark.parametrize("value", NO_TOKEN_IDS, ids=show)
@pytest.mark.parametrize("convert", [lambda value: value, Index], ids=["an int", "an index"])
def test_token_ids_that_no_worker_has_room_for_are_refused(
    request_class: Any, make: Any, value: int, convert: Any
) -> None:
    wanted = f"a token id is at {'least 0' if value < 0 else f'most {MAX_TOKEN_ID}'}, not {show(value)}"
    for tokens in ([convert(value)], [1, 2, convert(value)], (convert(value), 1)):
        with pytest.raises(InvalidArgumentError) as caught:
            request_class("r", tokens)
        assert str(caught.value) == wanted
    request = make()
    for new in (convert(value), [convert(value)], [1, 2, convert(value)], iter([convert(value)])):
        with pytest.raises(InvalidArgumentError) as caught:
            request.append_output_token_ids(new)
        assert str(caught.value) == wanted
    assert request.all_token_ids == list(range(10)) and request.output_token_ids == []
    assert request.block_hashes == hashes_of(range(10))


def test_the_largest_token_id(make: Any) -> None:
    tokens = [0, 1, 2**15 - 1, 2**15, 2**30 - 1, 2**30, 2**30 + 1, MAX_TOKEN_ID]
    request = make(tokens)
    request.append_output_token_ids(tokens)
    for token in tokens:
        request.append_output_token_ids(token)
    assert request.all_token_ids == 3 * tokens and request.block_hashes == hashes_of(3 * tokens)
    assert make(np.array(tokens, np.uint32)).all_token_ids == tokens


# ---- a hasher that fails ----


class OwnHasher:
    """A hasher of somebody's that keeps a hash for every two tokens, and fails when told to."""

    def __init__(self) -> None:
        self.is_broken = False
        self.num_calls = 0

    def __call__(self, request: Any) -> Any:
        self.num_calls += 1
        tokens, first = list(request.all_token_ids), len(request.block_hashes)
        hashes = [repr(tokens[: 2 * end]).encode() for end in range(first + 1, len(tokens) // 2 + 1)]
        return self.fail(hashes) if self.is_broken else hashes

    def fail(self, hashes: list[bytes]) -> Any:
        """As a generator: some hashes come before it fails."""
        yield from hashes[:1]
        raise OSError("no hash today")


def everything(request: Any) -> tuple[Any, ...]:
    """What a request is, to be compared."""
    return (
        list(request.all_token_ids),
        list(request.output_token_ids),
        list(request.block_hashes),
        request.prompt_token_ids,
        (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens, request.num_computed_tokens),
    )


@pytest.mark.parametrize("tokens", [6, [6], [6, 7, 8, 9, 6, 7, 8, 9, 6, 7, 8, 9]], ids=["an int", "one", "many"])
def test_a_hasher_that_fails_leaves_no_token(request_class: Any, tokens: Any) -> None:
    hasher = OwnHasher()
    request, other = (request_class("r", [1, 2, 3], each) for each in (hasher, OwnHasher()))
    for request_of in (request, other):
        request_of.append_output_token_ids([4, 5])
    before = everything(request)
    hasher.is_broken = True
    for _ in range(2):
        with pytest.raises(OSError, match="no hash today"):
            request.append_output_token_ids(tokens)
        assert everything(request) == before
    with pytest.raises(OSError, match="no hash today"):
        request_class("s", range(9), hasher)
    hasher.is_broken = False
    for request_of in (request, other):
        request_of.append_output_token_ids(tokens)
        request_of.append_output_token_ids(tokens)
    assert everything(request) == everything(other)


def test_a_hasher_of_kvpools_that_fails_leaves_no_token(request_class: Any, hasher: BlockHasher) -> None:
    """Where the blocks have extra keys, objects of the caller's are asked for them."""

    class Broken:
        @property
        def identifier(self) -> str:
            raise OSError("no name")

        mm_position = Picture("p", 0, 2).mm_position

    request = request_class("r", range(3), hasher, mm_features=[Broken()])
    before = everything(request)
    for tokens in (3, [3], range(3, 20)):
        with pytest.raises(OSError, match="no name"):
            request.append_output_token_ids(tokens)
        assert everything(request) == before
    request.mm_features = []
    request.append_output_token_ids(3)
    assert request.block_hashes == hashes_of(range(4))


def test_a_hasher_that_fails_takes_no_token_away(request_class: Any) -> None:
    hasher = OwnHasher()
    request = request_class("r", list(range(8)), hasher)
    request.append_output_token_ids([8, 9])
    request.append_output_token_ids([10, 11])
    request.num_computed_tokens = 9
    before = everything(request)
    hasher.is_broken = True
    for num_tokens in (0, 3, 8, 9, 11):
        with pytest.raises(OSError, match="no hash today"):
            request.truncate(num_tokens)
        assert everything(request) == before
    hasher.is_broken = False
    request.truncate(9)
    assert request.all_token_ids == list(range(9)) and request.output_token_ids == [8]
    assert request.block_hashes == request_class("s", range(9), OwnHasher()).block_hashes


def test_the_last_tokens_are_taken_back_without_asking_a_foreign_hasher(request_class: Any) -> None:
    hasher = OwnHasher()
    request = request_class("r", list(range(8)), hasher)
    request.append_output_token_ids([8, 9])
    before = everything(request)
    request.append_output_token_ids([10, 11])
    num_calls, hasher.is_broken = hasher.num_calls, True
    request.truncate(12)
    request.truncate(10)
    assert everything(request) == before and hasher.num_calls == num_calls
    hasher.is_broken = False
    request.append_output_token_ids([5, 5])
    request._all_token_ids[1] = 77  # what had hashes has changed: they are made anew
    request.truncate(10)
    assert request.block_hashes == request_class("s", list(request.all_token_ids), OwnHasher()).block_hashes


def test_counts(request_class: Any) -> None:
    request = request_class("r", [1, 2, 3])
    request.append_output_token_ids(4)
    request.append_output_token_ids([5, 6])
    request.append_output_token_ids([])
    request.spec_token_ids = [7, 8]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (6, 3, 3)
    assert request.num_tokens_with_spec == 8
    for name in ("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "num_preemptions"):
        setattr(request, name, 5)
        setattr(request, name, getattr(request, name) + 1)
        assert getattr(request, name) == 6
    for name in ("num_tokens", "num_output_tokens", "num_tokens_with_spec"):
        with pytest.raises(AttributeError):
            setattr(request, name, 1)


def test_views_of_tokens(make: Any) -> None:
    request = make()
    view = request.all_token_ids
    assert isinstance(view, TokenIds) and view is request.all_token_ids
    assert (len(view), view[0], view[-1], view[2:4], list(view), 9 in view) == (10, 0, 9, [2, 3], list(range(10)), True)
    assert type(view[:]) is list and view.index(3) == 3 and view.count(3) == 1
    assert view == list(range(10)) and view not in ([1], (1,)) and view == make().all_token_ids
    request.append_output_token_ids(77)
    assert view[-1] == 77 and request.output_token_ids[0] == 77
    for change in ("append", "extend", "pop", "clear", "__setitem__", "__delitem__", "__iadd__"):
        assert not hasattr(view, change)
    with pytest.raises(TypeError):
        hash(view)
    assert repr(request.output_token_ids) == "TokenIds([77])"


def test_status() -> None:
    assert [status.name for status in RequestStatus if RequestStatus.is_finished(status)] == [
        "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ]  # fmt: skip
    assert str(RequestStatus.PREEMPTED) == "PREEMPTED"


def test_a_request_that_is_finished(request_class: Any) -> None:
    request = request_class("r", [1])
    for status in RequestStatus:
        request.status = status
        assert request.is_finished() == status.name.startswith("FINISHED")


def test_order_of_service(request_class: Any) -> None:
    late = request_class("a", [1], arrival_time=2.0)
    early = request_class("b", [1], arrival_time=1.0)
    urgent = request_class("c", [1], priority=-1, arrival_time=3.0)
    twin = request_class("d", [1], arrival_time=2.0)
    assert sorted([twin, late, early, urgent]) == [urgent, early, late, twin]
    same = request_class("a", [1], arrival_time=2.0)
    assert (late < same) != (same < late)


def test_a_request_is_freed_without_the_garbage_collector(make: Any, no_garbage: Any) -> None:
    request = make()
    request.append_output_token_ids([1, 2, 3])
    gone = weakref.ref(request)
    del request
    assert gone() is None
    gc.collect()


def test_other_attributes_can_be_added(make: Any) -> None:
    request = make()
    request.connector_state = {"a": 1}
    assert request.connector_state == {"a": 1}


# ---- hashes ----


def test_hashes_follow_the_tokens(make: Any) -> None:
    request = make(range(3))
    tokens = [0, 1, 2]
    hashes = request.block_hashes
    for step in ([3], [4, 5], [], [6, 7, 8, 9, 10, 11, 12]):
        request.append_output_token_ids(step)
        tokens += step
        assert request.block_hashes == hashes_of(tokens)
    for token in range(13, 40):
        request.append_output_token_ids(token)
        tokens.append(token)
        assert request.block_hashes == hashes_of(tokens)
    assert request.block_hashes is hashes  # views of it stay right


def test_without_a_hasher_there_are_no_hashes(request_class: Any) -> None:
    request = request_class("r", list(range(100)))
    request.append_output_token_ids(list(range(100)))
    request.update_block_hashes()
    assert request.block_hashes == []


def test_extra_keys_are_hashed(make: Any) -> None:
    different = [
        make(),
        make(lora_name="a"),
        make(lora_request=Lora("a", path="/b")),
        make(cache_salt="a"),
        make(mm_features=[Picture("a", 0, 8)]),
        make(prompt_embeds=np.ones((10, 2))),
    ]
    assert len({hash for request in different for hash in request.block_hashes}) == 2 * len(different)
    assert set(different[-1]._prompt_embeds_per_block_hashes) == {(0, 4), (4, 8)}
    assert make(lora_name="a").block_hashes == make(lora_request=Lora("a", path="")).block_hashes


def test_a_truncated_request(make: Any) -> None:
    request = make(range(8))
    request.append_output_token_ids([8, 9, 10, 11, 12])
    request.num_computed_tokens = 12
    request.truncate(10)
    assert (request.num_tokens, request.num_output_tokens, request.num_computed_tokens) == (10, 2, 10)
    assert request.block_hashes == hashes_of(range(8))
    request.append_output_token_ids([90, 91, 92])
    assert request.block_hashes == hashes_of([*range(10), 90, 91, 92])
    request.truncate(6)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (6, 6, 0)
    assert request.prompt_token_ids == request.all_token_ids.copy() == list(range(6))
    request.append_output_token_ids([70, 71])
    assert request.block_hashes == hashes_of([*range(6), 70, 71])
    request.truncate(8)
    assert request.num_tokens == 8 and request.output_token_ids == [70, 71]
    request.truncate(0)
    assert request.num_tokens == 0 and request.block_hashes == []
    for num_tokens in (-1, 1):
        with pytest.raises(InvalidArgumentError, match="are to stay"):
            request.truncate(num_tokens)


def test_tokens_dropped_and_replaced_between_updates(make: Any) -> None:
    request = make(range(8))
    del request._all_token_ids[6:]
    request._all_token_ids.extend([90, 91])
    assert request.block_hashes == hashes_of(range(4))  # nothing stale is ever seen
    request.update_block_hashes()
    assert request.block_hashes == hashes_of([*range(6), 90, 91])


OPERATIONS: dict[str, Any] = {
    "append": lambda tokens, i, new: tokens.append(new),
    "extend": lambda tokens, i, new: tokens.extend([new, new + 1]),
    "add": lambda tokens, i, new: tokens.__iadd__([new]),
    "repeat": lambda tokens, i, new: tokens.__imul__(1 + new % 2),
    "set": lambda tokens, i, new: tokens.__setitem__(i, new),
    "set slice": lambda tokens, i, new: tokens.__setitem__(slice(i, i + 3), [new]),
    "set every other": lambda tokens, i, new: tokens.__setitem__(slice(None, None, -2), [new] * len(tokens[::-2])),
    "insert by slice": lambda tokens, i, new: tokens.__setitem__(slice(i, i), [new]),
    "delete": lambda tokens, i, new: tokens.__delitem__(i),
    "delete tail": lambda tokens, i, new: tokens.__delitem__(slice(i, None)),
    "delete slice": lambda tokens, i, new: tokens.__delitem__(slice(i, i + 2)),
    "insert": lambda tokens, i, new: tokens.insert(i, new),
    "pop": lambda tokens, i, new: tokens.pop(),
    "pop from": lambda tokens, i, new: tokens.pop(i),
    "remove": lambda tokens, i, new: tokens.remove(tokens[i]),
    "clear": lambda tokens, i, new: tokens.clear(),
    "reverse": lambda tokens, i, new: tokens.reverse(),
    "sort": lambda tokens, i, new: tokens.sort(key=lambda token: -token),
}


@settings(max_examples=250)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(-9, 20), st.integers(0, 9), st.booleans()),
        max_size=12,
    )
)
def test_hashes_follow_any_change(make: Any, steps: list[Any]) -> None:
    request = make(range(14))
    model = list(range(14))
    for name, index, new, is_updated in steps:
        failures = []
        for tokens in (request._all_token_ids, model):
            try:
                OPERATIONS[name](tokens, index, new)
                failures.append(None)
            except (IndexError, ValueError) as error:
                failures.append(type(error))
        assert failures[0] is failures[1] and request.all_token_ids == model
        stale_free = request.block_hashes
        assert stale_free == hashes_of(model)[: len(stale_free)]
        if is_updated:
            request.update_block_hashes()
            assert request.block_hashes == hashes_of(model)


def test_a_change_costs_no_more_than_what_follows_it(request_class: Any) -> None:
    class CountingHasher(kvpool.reference.block_hasher.BlockHasher):
        num_hashed = 0

        def _hash_plain_blocks(self, parent: Any, tokens: Any, start: int, hashes: Any) -> None:
            CountingHasher.num_hashed += (len(tokens) - start) // self.block_size
            super()._hash_plain_blocks(parent, tokens, start, hashes)

    request = request_class("r", list(range(400)), CountingHasher("sha256", BLOCK_SIZE))
    assert CountingHasher.num_hashed == 100
    request.truncate(300)
    request.append_output_token_ids([1] * 8)
    assert CountingHasher.num_hashed == 102
    request.append_output_token_ids(1)
    assert CountingHasher.num_hashed == 102


def test_a_hasher_that_is_any_function(request_class: Any) -> None:
    calls = []

    def hasher(request: Any) -> list[bytes]:
        calls.append(len(request.block_hashes))
        full = request.num_tokens // 2
        return [bytes([request.all_token_ids[2 * i]]) for i in range(len(request.block_hashes), full)]

    request = request_class("r", [1, 2, 3], hasher)
    assert request.block_hashes == [b"\1"] and calls == [0]
    request.append_output_token_ids(4)
    assert request.block_hashes == [b"\1", b"\3"] and calls == [0, 1]
    del request._all_token_ids[2:]
    request.append_output_token_ids([5, 6])
    assert request.block_hashes == [b"\1", b"\5"]
    with pytest.raises(InvalidArgumentError):
        request.get_block_hashes(4)


def test_hashes_of_coarser_blocks(make: Any) -> None:
    request = make(range(20))
    assert request.get_block_hashes(4) is request.block_hashes
    view = request.get_block_hashes(8)
    assert isinstance(view, BlockHashListWithBlockSize)
    assert list(view) == [request.block_hashes[1], request.block_hashes[3]]
    request.append_output_token_ids([1, 2, 3, 4])
    assert len(view) == 3
    for block_size in (6, 2, 0):
        with pytest.raises(InvalidArgumentError):
            request.get_block_hashes(block_size)


def test_hashes_can_be_replaced_by_a_list(make: Any) -> None:
    request = make(range(10))
    request.block_hashes = request.block_hashes[:1]
    request.update_block_hashes()
    assert request.block_hashes == hashes_of(range(10))
    for hashes in (None, (b"",), "hash"):
        with pytest.raises(TypeError):
            request.block_hashes = hashes


def test_a_hasher_of_either_backend_fits(request_class: Any) -> None:
    for hasher_class in (BlockHasher, kvpool.reference.block_hasher.BlockHasher):
        request = request_class("r", list(range(33)), hasher_class("sha256", BLOCK_SIZE), cache_salt="s")
        twin = request_class("r", list(range(33)), BlockHasher("sha256", BLOCK_SIZE), cache_salt="s")
        assert request.block_hashes == twin.block_hashes and len(request.block_hashes) == 8


def test_the_backend_follows_the_environment() -> None:
    code = """
from kvpool import backend, reference
print(backend.Request is reference.Request, backend.BlockHasher is reference.BlockHasher)
"""
    for value, expected in (("1", "True True"), ("0", "False False")):
        if value == "0" and "native" not in BACKEND_NAMES:
            continue
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "KVPOOL_PURE_PYTHON": value},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected
