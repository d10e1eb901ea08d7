"""Requests and layouts of KV cache groups for tests of the managers: by hand, or of every kind at random."""

from __future__ import annotations

import enum
import hashlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from token_requests import TokenRequest

from kvpool.backend import Request
from kvpool.cache import spec as specs
from kvpool.cache.spec import KVCacheConfig, KVCacheGroupSpec


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()


class ManagerRequest(TokenRequest):
    """A request as a scheduler keeps it, with vLLM's attribute names."""

    def __init__(
        self,
        request_id: str,
        token_ids: Iterable[int],
        hash_block_size: int = 4,
        status: Any = Status.WAITING,
        **more: Any,
    ) -> None:
        token_ids = list(token_ids)
        super().__init__(token_ids, hash_block_size, digests=lambda *_: [])
        self.request_id = request_id
        self.hash_block_size = hash_block_size
        self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_output_placeholders = 0
        self.shared_prefix_boundary = 0
        self.skip_reading_prefix_cache = False
        self.status = status
        vars(self).update(more)
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens more; hashes follow."""
        self.all_token_ids += token_ids
        self.block_hashes += new_hashes(self, self.hash_block_size)


def new_hashes(request: Any, hash_block_size: int, num_lookahead_tokens: int = 0) -> list[bytes]:
    """Chained digests of the full blocks that have none yet, and so many tokens behind them."""
    hashes, size = list(request.block_hashes), hash_block_size
    num_old = len(hashes)
    while (len(hashes) + 1) * size + num_lookahead_tokens <= request.num_tokens:
        tokens = request.all_token_ids[len(hashes) * size : (len(hashes) + 1) * size]
        before = hashes[-1] if hashes else str(request.cache_salt).encode()
        hashes.append(hashlib.sha256(before + ",".join(map(str, tokens)).encode()).digest())
    return hashes[num_old:]


class OwnManagerRequest(Request):
    """The same over kvpool's own class, which the compiled calls are for."""

    def __init__(
        self,
        request_id: str,
        token_ids: Iterable[int],
        hash_block_size: int,
        status: Any,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        super().__init__(
            request_id,
            list(token_ids),
            partial(new_hashes, hash_block_size=hash_block_size),
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )
        self.status = status

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens more; hashes follow."""
        self.append_output_token_ids(list(token_ids))


@dataclass
class Layout:
    """What the managers of a history are made for; a group is its kind, block size, kind's own number, EAGLE or not."""

    groups: list[tuple[str, int, int, bool]]
    num_blocks: int = 30
    hash_block_size: int | None = None
    enable_caching: bool = True
    use_eagle: bool = False
    retention_interval: int | None = None
    max_model_len: int = 128
    max_in_flight_tokens: int | None = None
    watermark: float = 0.0
    num_prefill_lookahead: int = 0
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    shared_prefix_checkpoint: bool = False

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(*(group[1] for group in self.groups))

    def has(self, kind: str) -> bool:
        return any(group[0].startswith(kind) for group in self.groups)


def make_spec(layout: Layout, group: tuple[str, int, int, bool], classes: Any = specs, dtype: Any = "float32") -> Any:
    """The spec of a group, of kvpool's classes or of others with the same names."""
    kind, block_size, number, _ = group
    heads = {"num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    if kind == "full":
        return classes.FullAttentionSpec(block_size=block_size, **heads)
    if kind == "sink":
        return classes.SinkFullAttentionSpec(block_size=block_size, sink_len=block_size, **heads)
    if kind == "window":
        return classes.SlidingWindowSpec(block_size=block_size, sliding_window=number, **heads)
    if kind == "local":
        return classes.ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=number, **heads)
    if kind == "cross":
        return classes.CrossAttentionSpec(block_size=block_size, **heads)
    mode = kind.removeprefix("mamba_")
    return classes.MambaSpec(
        block_size=block_size,
        shapes=((4,),),
        dtypes=(dtype,),
        mamba_cache_mode=mode,
        num_speculative_blocks=layout.num_speculative_blocks,
        num_prefill_checkpoint_blocks=layout.num_prefill_checkpoint_blocks if mode == "align" else 0,
        prefill_checkpoint_alignment=1 if layout.num_prefill_checkpoint_blocks and mode == "align" else None,
    )


def make_config(layout: Layout) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], make_spec(layout, group), group[3]) for i, group in enumerate(layout.groups)
    ]
    return KVCacheConfig(layout.num_blocks, groups, prefix_cache_retention_interval=layout.retention_interval)


def random_layout(rng: random.Random, kinds: tuple[str, ...] | None = None) -> Layout:
    """Of every kind of coordinator something; see MAKERS."""
    makers = MAKERS if kinds is None else {kind: MAKERS[kind] for kind in kinds}
    layout = rng.choice(list(makers.values()))(rng)
    # Requests hold few Mamba states; with the pool of other kinds they would never run out.
    layout.num_blocks = sum(
        rng.randint(4, 7) if group[0] == "mamba_align" else rng.randint(10, 28) for group in layout.groups
    )
    layout.max_in_flight_tokens = rng.choice([None, 16, 40])
    layout.watermark = rng.choice([0.0, 0.0, 0.1])
    layout.max_model_len = rng.choice([128, 128, 48])
    if layout.enable_caching and rng.random() < 0.1 and not layout.has("mamba"):
        layout.enable_caching = False
    if layout.use_eagle and layout.scheduler_block_size >= 4:
        layout.num_prefill_lookahead = rng.choice([0, 0, 1, 3])
    if layout.has("window") or layout.has("mamba"):
        size = layout.scheduler_block_size
        layout.retention_interval = rng.choice([None, None, 0, 0, size, 2 * size]) if layout.enable_caching else None
    return layout


def _one_group(kind: str, numbers: tuple[int, ...] = (0,)) -> Callable[[random.Random], Layout]:
    def make(rng: random.Random) -> Layout:
        eagle = kind in ("full", "window") and rng.random() < 0.4
        return Layout([(kind, rng.choice([2, 4]), rng.choice(numbers), False)], use_eagle=eagle)

    return make


def _hybrid(rng: random.Random) -> Layout:
    """Full attention and windows, equal or unequal block sizes."""
    sizes = rng.choice([(4, 4, 4), (4, 8, 4), (8, 4, 4), (2, 8, 4), (4, 2, 6)])
    groups = [("full", sizes[0], 0, False), ("window", sizes[1], rng.choice([3, 5, 9, 17]), False)]
    if rng.random() < 0.4:
        groups.append(("window", sizes[2], rng.choice([5, 12]), False))
    if rng.random() < 0.3:
        groups.insert(rng.randint(0, 2), ("full", sizes[0], 0, False))
    rng.shuffle(groups)
    return _with_eagle(rng, Layout(groups))


def _hybrid_local(rng: random.Random) -> Layout:
    return Layout([("full", 4, 0, False), ("local", 4, rng.choice([8, 12]), False)])


def _windows_only(rng: random.Random) -> Layout:
    return _with_eagle(rng, Layout([("window", rng.choice([4, 8]), 6, False), ("window", 4, 11, False)]))


def _two_full(rng: random.Random) -> Layout:
    return _with_eagle(rng, Layout([("full", 4, 0, False), ("full", rng.choice([4, 8]), 0, False)]))


def _mamba(rng: random.Random) -> Layout:
    layout = Layout([("mamba_align", rng.choice([4, 8]), 0, False)])
    layout.num_speculative_blocks = rng.choice([0, 0, 2])
    return layout


def _mamba_other(rng: random.Random) -> Layout:
    layout = Layout([(rng.choice(["mamba_none", "mamba_all"]), 4, 0, False)], enable_caching=False)
    layout.num_speculative_blocks = rng.choice([0, 1])
    return layout


def _hybrid_mamba(rng: random.Random) -> Layout:
    """Full attention and aligned Mamba states, hashes as long as blocks or finer."""
    sizes = rng.choice([(4, 4), (4, 8), (8, 8)])
    groups = [("full", sizes[0], 0, False), ("mamba_align", sizes[1], 0, False)]
    if rng.random() < 0.3:
        groups.append(("mamba_align", sizes[1], 0, False))
    layout = Layout(groups, hash_block_size=rng.choice([None, None, 2, 4]))
    layout.num_speculative_blocks = rng.choice([0, 0, 2])
    layout.num_prefill_checkpoint_blocks = rng.choice([0, 1])
    layout = _with_eagle(rng, layout, only="full")
    layout.shared_prefix_checkpoint = rng.random() < 0.5
    return layout


def _hybrid_three(rng: random.Random) -> Layout:
    return Layout([("full", 4, 0, False), ("window", 4, 7, False), ("mamba_align", 4, 0, False)])


def _encoder_decoder(rng: random.Random) -> Layout:
    return Layout([("full", 4, 0, False), ("cross", 4, 0, False)], enable_caching=False)


def _with_eagle(rng: random.Random, layout: Layout, only: str = "") -> Layout:
    layout.use_eagle = rng.random() < 0.5
    if layout.use_eagle and (only or rng.random() < 0.5):
        marked = [i for i, group in enumerate(layout.groups) if group[0].startswith(only)]
        chosen = rng.choice(marked)
        layout.groups = [(*group[:3], i == chosen) for i, group in enumerate(layout.groups)]
    return layout


MAKERS: dict[str, Callable[[random.Random], Layout]] = {
    "full": _one_group("full"),
    "window": _one_group("window", (2, 4, 5, 9)),
    "local": _one_group("local", (8, 12)),
    "mamba": _mamba,
    "mamba_other": _mamba_other,
    "hybrid": _hybrid,
    "hybrid_local": _hybrid_local,
    "windows_only": _windows_only,
    "two_full": _two_full,
    "hybrid_mamba": _hybrid_mamba,
    "hybrid_three": _hybrid_three,
    "encoder_decoder": _encoder_decoder,
}
