"""``RequestBase``: how a request is made, cut, compared and continued, the same for both halves.

What a scheduler asks of a request at every step (token counts, appended tokens, block hashes) is in the halves:
``kvpool.native.request`` and ``kvpool.reference.request``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvpool.common.arguments import show, to_bool, to_float, to_int, to_text
from kvpool.errors import InvalidArgumentError
from kvpool.hashing.block_hash import BlockHash, BlockHashListWithBlockSize, resolve_block_hashes
from kvpool.hashing.hashing import BlockHasherBase, parse_block_size
from kvpool.requests.sampling_params import SamplingParams
from kvpool.requests.status import RequestStatus
from kvpool.requests.token_ids import MAX_TOKEN_ID, TokenIds

DEFAULT_MAX_TOKENS = 16  # as vLLM's sampling parameters

RequestBlockHasher = Callable[[Any], list[BlockHash]]


@dataclass(frozen=True)
class LoRAName:
    """A LoRA adapter of which only the name is known, with the attributes of vLLM's ``LoRARequest``."""

    lora_name: str
    lora_path: str = ""
    lora_int_id: int | None = None

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int | None:
        return self.lora_int_id


def to_token_ids(
    token_ids: Any,
    are_token_ids: Callable[[list[Any]], bool],
    lowest: int | None = 0,
    highest: int | None = MAX_TOKEN_ID,
) -> list[int]:
    """The tokens as a list of exact ints: the very list where it is one. O(len(token_ids)).

    Args:
        token_ids: a list, an array or another sequence.
        are_token_ids: of ``Request``.
        lowest, highest: the range they have to be in; None where the caller looks at that.

    Raises:
        TypeError: no sequence, or a token that is no integer.
        InvalidArgumentError: a token out of the range.
    """
    tokens = token_ids
    if type(tokens) is not list:
        is_array = hasattr(tokens, "tolist")
        if not is_array and (isinstance(tokens, (str, Mapping)) or not hasattr(tokens, "__iter__")):
            raise TypeError(f"token ids are integers in a sequence, not {show(token_ids)}")
        tokens = tokens.tolist() if is_array else list(tokens)
        if type(tokens) is not list:
            raise TypeError(f"token ids are integers in a sequence, not {show(token_ids)}")
    if are_token_ids(tokens):
        return tokens
    # A token's own code may change the list.
    return [to_int("a token id", token, lowest, highest) for token in tuple(tokens)]


def _num_prompt_tokens(token_ids: Sequence[int] | None, embeddings: Any) -> int:
    if token_ids is None and embeddings is None:
        raise InvalidArgumentError("a request needs prompt_token_ids or prompt_embeds")
    num_embeddings = None if embeddings is None else len(embeddings)
    num_tokens = num_embeddings if token_ids is None else len(token_ids)
    assert num_tokens is not None
    if num_embeddings is not None and num_embeddings != num_tokens:
        raise InvalidArgumentError(f"{num_tokens} prompt_token_ids, but prompt_embeds for {num_embeddings} tokens")
    return num_tokens


class RequestBase:
    """One sequence of tokens that is served, from its arrival to its end.

    Args:
        request_id: unique among the requests that live at a time.
        prompt_token_ids: list, array or any sequence of ints from 0 to ``MAX_TOKEN_ID``; numpy's ints and bools become
            plain ints. None with prompt_embeds alone: its tokens count as 0.
        block_hasher: called with the request, returns the hashes of full blocks that are new; a ``BlockHasher`` or one
            of vLLM's. None: no hashes.
        max_tokens: output tokens at most, at least 1.
        priority: smaller is served first.
        arrival_time: seconds, as ``time.time()``; None for now.
        lora_name: LoRA adapter by name; lora_request: the adapter with ``lora_name``, ``lora_path``, ``lora_int_id``
            (and ``name``, ``adapter_id`` for events), as vLLM's. At most one of the two. Hashes know an adapter by
            name and path, not by number: one that is reloaded in place needs another path, or a salt.
        cache_salt: only requests with the same salt share cached blocks.
        mm_features: multimodal inputs with ``identifier`` and ``mm_position.offset`` and ``.length`` (tokens), sorted.
        prompt_embeds: tensor or array [num_prompt_tokens, hidden size].
        prompt_is_token_ids: with prompt_embeds and prompt_token_ids, a bool per position; where it is False the token
            counts as 0.
        skip_reading_prefix_cache: whether to compute all of the prompt, e.g. because its log probabilities are wanted.
        session_id: passed on to events.
        sampling_params: how its tokens are chosen, passed on to workers; None: the most likely ones.

    Attributes:
        status: ``RequestStatus``.
        num_tokens, num_prompt_tokens, num_output_tokens: prompt and output; all of ``all_token_ids``.
        num_tokens_with_spec: with ``spec_token_ids``, a list of draft tokens.
        num_computed_tokens: tokens whose KV is in the cache or will be after the steps in flight.
        num_in_flight_tokens: those of them that steps in flight compute.
        num_output_placeholders: output tokens that steps in flight will bring.
        num_preemptions: how often it lost its blocks.
        shared_prefix_boundary: tokens of a prefix worth keeping for hybrid models, a whole number of blocks; 0: none.
        all_token_ids, output_token_ids: read-only views (``TokenIds``).
        block_hashes: list of a digest per full hash block.

    Raises:
        TypeError: a token that is no integer, or another argument of the wrong type.
        InvalidArgumentError: no prompt at all, a token out of range, lengths that differ, max_tokens below 1, an
            arrival time that is not finite, both LoRA arguments, a text that can't be encoded.

    Adapter, salt, inputs and embeddings are part of the block hashes: they are not to change. O(prompt tokens).
    vLLM: ``Request``.
    """

    # What each half brings: kvpool.native.request.RequestCore, and the twin.

    num_prompt_tokens: int
    num_computed_tokens: int
    status: RequestStatus
    _all_token_ids: Any  # a list of ints that notices how it is changed
    _output_token_ids: list[int]
    _block_hasher: RequestBlockHasher | None
    _before_append: tuple[int, int] | None

    def _create(self, all_token_ids: list[int], block_hasher: RequestBlockHasher | None, hash_block_size: int) -> None:
        raise NotImplementedError

    @staticmethod
    def are_token_ids(tokens: list[Any]) -> bool:
        """Whether all are exact ints from 0 to ``MAX_TOKEN_ID``."""
        raise NotImplementedError

    @staticmethod
    def are_plain(*arguments: Any) -> bool:
        """Whether these arguments of a request are what they are stored as, and in range."""
        raise NotImplementedError

    @property
    def block_hashes(self) -> list[BlockHash]:
        raise NotImplementedError

    @block_hashes.setter
    def block_hashes(self, block_hashes: list[BlockHash]) -> None:
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        raise NotImplementedError

    def update_block_hashes(self) -> None:
        """Bring ``block_hashes`` up to date: stale ones go, those of new full blocks come."""
        raise NotImplementedError

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None = None,
        block_hasher: RequestBlockHasher | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm_features: Sequence[Any] | None = None,
        prompt_embeds: Any = None,
        skip_reading_prefix_cache: bool = False,
        *,
        lora_request: Any = None,
        session_id: str | None = None,
        prompt_is_token_ids: Sequence[bool] | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> None:
        if lora_name is not None and lora_request is not None:
            raise InvalidArgumentError("either lora_name or lora_request, not both")
        # All that may run code of the caller's comes first.
        if not self.are_plain(
            request_id, max_tokens, priority, arrival_time, skip_reading_prefix_cache, cache_salt, session_id
        ):
            request_id, max_tokens = to_text("request_id", request_id), to_int("max_tokens", max_tokens, 1)
            priority = to_int("priority", priority)
            arrival_time = None if arrival_time is None else to_float("arrival_time", arrival_time)
            skip_reading_prefix_cache = to_bool("skip_reading_prefix_cache", skip_reading_prefix_cache)
            cache_salt = None if cache_salt is None else to_text("cache_salt", cache_salt)
            session_id = None if session_id is None else to_text("session_id", session_id)
        lora_name = None if lora_name is None else to_text("lora_name", lora_name)
        if sampling_params is not None and type(sampling_params) is not SamplingParams:
            if not isinstance(sampling_params, SamplingParams):
                raise TypeError(f"sampling_params are SamplingParams, not {show(sampling_params)}")
            one = sampling_params  # of a class that workers don't know
            sampling_params = SamplingParams(one.temperature, one.top_k, one.top_p, one.seed)
        if prompt_is_token_ids is not None:
            prompt_is_token_ids = [to_bool("a value of prompt_is_token_ids", flag) for flag in prompt_is_token_ids]
        prompt = None if prompt_token_ids is None else to_token_ids(prompt_token_ids, self.are_token_ids)
        num_prompt_tokens = _num_prompt_tokens(prompt, prompt_embeds)
        all_token_ids = [0] * num_prompt_tokens if prompt is None else prompt
        if prompt is not None and prompt_is_token_ids is not None:
            if len(prompt_is_token_ids) != num_prompt_tokens:
                raise InvalidArgumentError(
                    f"{num_prompt_tokens} prompt_token_ids, but {len(prompt_is_token_ids)} prompt_is_token_ids"
                )
            all_token_ids = [token if is_token else 0 for token, is_token in zip(prompt, prompt_is_token_ids)]
        hash_block_size = block_hasher.block_size if isinstance(block_hasher, BlockHasherBase) else 0
        self._create(all_token_ids, block_hasher, hash_block_size)
        self.request_id = request_id
        self.status = RequestStatus.WAITING
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.lora_request = lora_request if lora_name is None else LoRAName(lora_name)
        self.cache_salt = cache_salt
        self.mm_features = [] if mm_features is None else mm_features
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.session_id = session_id
        self.sampling_params = sampling_params
        self.spec_token_ids: list[int] = []
        self._prompt_embeds_per_block_hashes: dict[tuple[int, int], bytes] = {}
        self.all_token_ids = TokenIds(self._all_token_ids)
        self.output_token_ids = TokenIds(self._output_token_ids)
        self.update_block_hashes()

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter, or None."""
        name: str | None = self.lora_request.lora_name if self.lora_request else None
        return name

    @property
    def num_encoder_inputs(self) -> int:
        """Number of multimodal inputs."""
        return len(self.mm_features)

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether it has multimodal inputs."""
        return bool(self.mm_features)

    def is_finished(self) -> bool:
        """Whether its status is a final one."""
        return RequestStatus.is_finished(self.status)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens but the first ``num_tokens``, and the hashes of the blocks they were in.

        Where that is less than the prompt, the prompt gets shorter.

        Raises:
            TypeError: no integer.
            InvalidArgumentError: negative, or more than there are. After any error, also one of the hasher, nothing has
                changed.
        """
        num_tokens = to_int("num_tokens", num_tokens)
        if not 0 <= num_tokens <= self.num_tokens:
            raise InvalidArgumentError(f"{show(num_tokens)} tokens are to stay, there are {self.num_tokens}")
        if num_tokens == self.num_tokens:
            self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
            return
        hashes = self.block_hashes[:]
        before = self._before_append
        counts = self.num_prompt_tokens, self.prompt_token_ids, self.num_computed_tokens
        all_tokens, output_tokens = self._all_token_ids[num_tokens:], self._output_token_ids[:]
        try:
            self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
            if self.prompt_token_ids is not None and len(self.prompt_token_ids) > num_tokens:
                self.prompt_token_ids = self.prompt_token_ids[:num_tokens]
            del self._all_token_ids[num_tokens:]
            del self._output_token_ids[num_tokens - self.num_prompt_tokens :]
            self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
            if before is not None and before[0] == num_tokens:
                self.block_hashes = hashes[: before[1]]
            else:
                self.update_block_hashes()
        except BaseException:
            self.num_prompt_tokens, self.prompt_token_ids, self.num_computed_tokens = counts
            self._all_token_ids[num_tokens:] = all_tokens
            self._output_token_ids[:] = output_tokens
            self.block_hashes = hashes
            raise

    def get_block_hashes(self, block_size: int) -> list[BlockHash] | BlockHashListWithBlockSize:
        """The block hashes at ``block_size`` tokens a block: the list itself, or a view that grows with it.

        Raises:
            InvalidArgumentError: not a multiple of the hasher's block size, or no hasher of kvpool.
        """
        if not isinstance(self._block_hasher, BlockHasherBase):
            raise InvalidArgumentError("the request has no kvpool BlockHasher, so its hash block size is unknown")
        hash_block_size = self._block_hasher.block_size
        resolved = resolve_block_hashes(self.block_hashes, hash_block_size, parse_block_size(block_size))
        assert isinstance(resolved, (list, BlockHashListWithBlockSize))
        return resolved

    def __lt__(self, other: RequestBase) -> bool:
        """Whether it is served before the other: by priority, then arrival, then id."""
        mine = (self.priority, self.arrival_time, self.request_id, id(self))
        return mine < (other.priority, other.arrival_time, other.request_id, id(other))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"request {self.request_id!r} can't be pickled or copied: its block tables go by its id, its hashes by the "
            "hasher of this process; make a new Request of its tokens"
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status!s}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )
