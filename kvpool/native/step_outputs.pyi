from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from kvpool.native.block_rows import BlockRowGroups, BlockRows

_Ints = Sequence[int] | NDArray[numpy.integer[Any]]  # or a tensor of the CPU

__all__ = [
    "PAD_SLOT_ID",
    "QuerySlots",
    "StepOutputs",
    "compress_rows",
    "compute_kv_rows",
    "compute_slots",
    "num_common_blocks",
]

PAD_SLOT_ID: int

def compute_slots(
    table: BlockRows, rows: _Ints | None, positions: _Ints, out: NDArray[numpy.int64] | None = None
) -> NDArray[numpy.int64]: ...
def compute_kv_rows(
    slots: NDArray[numpy.int64], block_size: int, key_rows: NDArray[numpy.int64], value_rows: NDArray[numpy.int64]
) -> None: ...
def compress_rows(
    table: BlockRows, rows: _Ints | None, num_tokens: _Ints
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int32]]: ...
def num_common_blocks(table: BlockRows, rows: _Ints, limit: int) -> int: ...

class StepOutputs:
    def __init__(
        self,
        groups: BlockRowGroups,
        max_num_tokens: int,
        *,
        with_kv_rows: bool = False,
        with_compressed: bool = False,
        make_array: Callable[[int, Any], NDArray[Any]] | None = None,
    ) -> None: ...
    @property
    def groups(self) -> BlockRowGroups: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def rows(self) -> NDArray[numpy.int32]: ...
    @property
    def seq_lens(self) -> NDArray[numpy.int32]: ...
    @property
    def query_starts(self) -> NDArray[numpy.int32]: ...
    @property
    def positions(self) -> NDArray[numpy.int64]: ...
    @property
    def token_rows(self) -> NDArray[numpy.int32]: ...
    @property
    def slots(self) -> tuple[NDArray[numpy.int64], ...]: ...
    @property
    def key_rows(self) -> tuple[NDArray[numpy.int64], ...]: ...
    @property
    def value_rows(self) -> tuple[NDArray[numpy.int64], ...]: ...
    @property
    def block_starts(self) -> tuple[NDArray[numpy.int32], ...]: ...
    @property
    def blocks(self) -> tuple[NDArray[numpy.int32], ...]: ...
    @property
    def last_block_lens(self) -> tuple[NDArray[numpy.int32], ...]: ...
    @property
    def num_common_blocks(self) -> list[int]: ...
    def apply_step(self, output: Any, row_of: dict[str, int]) -> None: ...

class QuerySlots:
    def __init__(self, table: BlockRows, out: NDArray[numpy.int64]) -> None: ...
    def write(self, num_rows: int, query_starts: int, positions: int, num_tokens: int) -> None: ...
