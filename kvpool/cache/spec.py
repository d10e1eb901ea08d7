"""What one layer keeps in the KV cache, and how layers are grouped: specs, groups and the configuration of a cache.

A spec says how many bytes a block of a layer has (``page_size_bytes``) and how many blocks a request holds at most.
Layers with equal specs form a group and share one block table; all groups share one pool, so a block has the same
number of bytes in each of them. Nothing here allocates memory or imports torch: dtypes are names ("bfloat16"), and
torch's and numpy's dtype objects are turned into their names.

Specs are frozen, compare by value and can be keys of a dict. Wrong numbers are refused when a spec is made:
TypeError for what is no int, InvalidArgumentError for an impossible value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

MAMBA_CACHE_MODES = ("none", "align", "all")

# Bytes of an element, by name; torch and numpy, whose dtype objects are accepted, are not imported.
DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
DTYPE_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given by name or as an object of torch or numpy. InvalidArgumentError if it is unknown."""
    name = str(dtype).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"unknown dtype {dtype!r}: one of {', '.join(DTYPE_BYTES)}")
    return name


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, not {value}")


class KVCacheSpecKind(str, Enum):
    """Kinds of attention as KV cache events name them. vLLM: ``KVCacheSpecKind``."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of all specs. vLLM: ``KVCacheSpec``; the sizes that vLLM reads from its configuration are arguments here.

    Attributes:
        block_size: tokens per block.
    """

    block_size: int

    def __post_init__(self) -> None:
        _check_int("block_size", self.block_size, 1)

    @property
    def kind(self) -> KVCacheSpecKind:
        """Which attention it is, as events name it."""
        return KVCacheSpecKind.UNKNOWN

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of this spec take part in prefix caching."""
        return True

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large a block is")

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        """Blocks that one request holds at most, per layer.

        Args:
            max_model_len: longest sequence, tokens.
            max_in_flight_tokens: tokens scheduled and not yet settled, over all steps that run at once; None:
                no bound but max_model_len. Matters where blocks are given back while a request runs.
            max_encoder_tokens: longest encoder input, tokens. Matters for cross attention only.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how many blocks a request needs")

    def max_memory_usage_bytes(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        """Bytes that one request holds at most, per layer; arguments as for ``max_blocks_per_request``."""
        num_blocks = self.max_blocks_per_request(max_model_len, max_in_flight_tokens, max_encoder_tokens)
        return num_blocks * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same spec with blocks of ``block_size`` tokens."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token in a block. vLLM: ``AttentionSpec``, without its layouts for MLA.

    Attributes:
        num_kv_heads: heads of this worker's shard.
        head_size, head_size_v: elements of a key and of a value (by default as many as of a key).
        dtype: of the elements; kept as a name.
        page_size_padded: bytes of a block with padding, None for no padding.
        state_content_bytes: bytes per head and token, for layouts that are not a key and a value of ``dtype``
            (quantised with scales, say); None to compute them.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int = None  # type: ignore[assignment]
    page_size_padded: int | None = None
    state_content_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("num_kv_heads", self.num_kv_heads, 1)
        _check_int("head_size", self.head_size, 1)
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        _check_int("head_size_v", self.head_size_v, 0)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.state_content_bytes is not None:
            _check_int("state_content_bytes", self.state_content_bytes, 1)
        if self.page_size_padded is not None:
            _check_int("page_size_padded", self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of one layer, without ``page_size_padded``."""
        content = self.state_content_bytes
        if content is None:
            content = (self.head_size + self.head_size_v) * DTYPE_BYTES[self.dtype]
        return self.num_kv_heads * self.block_size * content

    @property
    def page_size_bytes(self) -> int:
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token sees all tokens before it. vLLM: ``FullAttentionSpec``.

    Attributes:
        sliding_window, attention_chunk_size: tokens; set where a layer computes locally but its blocks are managed
            as if it saw everything (a model without hybrid memory management).
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.FULL_ATTENTION

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        return ceil_div(max_model_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention whose first ``sink_len`` tokens are learned, not computed. vLLM: ``SinkFullAttentionSpec``."""

    sink_len: int | None = None

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.SINK_FULL_ATTENTION


class RecyclingSpec(AttentionSpec):
    """Attention that gives blocks back while a request runs: what a request holds is bounded by its window."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks that one request holds at most; both the size of a pool and the admission of requests go by it.

        Args:
            max_in_flight_tokens: tokens scheduled and not yet settled: their blocks can't be given back.
            max_model_len: longest sequence, tokens.
        """
        raise NotImplementedError

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        if max_in_flight_tokens is None:
            max_in_flight_tokens = max_model_len
        return self.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(RecyclingSpec):
    """A token sees itself and the ``sliding_window - 1`` tokens before it. vLLM: ``SlidingWindowSpec``.

    Attributes:
        sliding_window: tokens.
        extra_retained_tokens: tokens before the window whose blocks are kept all the same, for speculative decoding
            that computes the last tokens of a sequence again.
    """

    sliding_window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("sliding_window", self.sliding_window, 1)
        _check_int("extra_retained_tokens", self.extra_retained_tokens, 0)

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.SLIDING_WINDOW

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        held = self.sliding_window - 1 + self.extra_retained_tokens + max_in_flight_tokens
        # One more, because the first of the held tokens can be the last of its block.
        return ceil_div(min(held, max_model_len), self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(RecyclingSpec):
    """A token sees the tokens before it since the last multiple of ``attention_chunk_size``.

    vLLM: ``ChunkedLocalAttentionSpec``.
    """

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("attention_chunk_size", self.attention_chunk_size, 1)

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        held = self.attention_chunk_size + max_in_flight_tokens
        return ceil_div(min(held, max_model_len), self.block_size)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output, one static allocation a request. vLLM: ``CrossAttentionSpec``."""

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.CROSS_ATTENTION

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        return ceil_div(max_encoder_tokens, self.block_size)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A state per sequence instead of keys and values per token. vLLM: ``MambaSpec``.

    Attributes:
        block_size: tokens between two states that a prefix can be resumed from.
        shapes, dtypes: of the tensors that make up a state.
        page_size_padded: bytes of a block with padding, None for no padding.
        mamba_type: name of the kind of layer, for whoever runs it.
        mamba_cache_mode: "none": one running state; "align": states are kept where a step ends at a block boundary;
            "all": a state at every block boundary.
        num_speculative_blocks: scratch states for draft tokens.
        num_prefill_checkpoint_blocks: 1 if a kernel can write out a state from within a prefill step, else 0.
        prefill_checkpoint_alignment: tokens; where, counted from the start of the step, it can do so.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(dtype_name(dtype) for dtype in self.dtypes))
        if len(self.shapes) != len(self.dtypes):
            raise InvalidArgumentError(f"{len(self.shapes)} shapes, but {len(self.dtypes)} dtypes")
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise InvalidArgumentError(f"mamba_cache_mode is one of {MAMBA_CACHE_MODES}, not {self.mamba_cache_mode!r}")
        _check_int("num_speculative_blocks", self.num_speculative_blocks, 0)
        _check_int("num_prefill_checkpoint_blocks", self.num_prefill_checkpoint_blocks, 0)
        if self.prefill_checkpoint_alignment is not None:
            _check_int("prefill_checkpoint_alignment", self.prefill_checkpoint_alignment, 1)
        if self.page_size_padded is not None:
            _check_int("page_size_padded", self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.MAMBA

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of one layer, without ``page_size_padded``."""
        return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes))

    @property
    def page_size_bytes(self) -> int:
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        if self.mamba_cache_mode == "align":
            # The state of the step before, the one that this step writes, and what this step keeps besides.
            return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        return 1 + self.num_speculative_blocks


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table. vLLM: ``KVCacheGroupSpec``.

    Attributes:
        layer_names: names of the layers.
        kv_cache_spec: spec of each of them.
        is_eagle_group: whether layers of an EAGLE or MTP draft model are among them.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False


@dataclass
class KVCacheConfig:
    """The KV cache of a model. vLLM: ``KVCacheConfig``, without the placement of its tensors.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        kv_cache_groups: the groups, whose index is their group id.
        prefix_cache_retention_interval: tokens between the states that sliding windows and Mamba layers keep
            reachable; None: all of them, 0: only where a prompt can be resumed.
        hash_block_size: tokens per block hash; None: whoever makes the manager decides.
    """

    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)
    prefix_cache_retention_interval: int | None = None
    hash_block_size: int | None = None

    @property
    def has_mamba_layers(self) -> bool:
        """Whether a group keeps Mamba states."""
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in self.kv_cache_groups)

    @property
    def has_mixed_precision_kv_cache(self) -> bool:
        """Whether attention layers keep elements of several dtypes."""
        return len({spec.dtype for spec in self._specs() if isinstance(spec, AttentionSpec)}) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether a new block must be filled with zeros: a Mamba state is read before it is written in full, and a
        block of another dtype can hold bytes that read as NaN."""
        return self.has_mamba_layers or self.has_mixed_precision_kv_cache

    def _specs(self) -> Iterable[KVCacheSpec]:
        return (group.kv_cache_spec for group in self.kv_cache_groups)


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> KVCacheSpecKind:
    return kv_cache_spec.kind


def get_kv_cache_spec_sliding_window(kv_cache_spec: KVCacheSpec) -> int | None:
    """Tokens of the window; None where a layer is not managed as a sliding window."""
    return kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else None
