"""Arrays of block ids: any C-contiguous one-dimensional int32 buffer comes in, numpy arrays go out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_ID_BYTES = 4
# "l" is 4 bytes long on some platforms; the size of an item is checked beside the format.
_NATIVE_FORMATS = ("i", "l")
_NATIVE_BYTE_ORDERS = "@=" + ("<" if sys.byteorder == "little" else ">")


def _id_view(ids: Any, is_written: bool) -> memoryview:
    view = memoryview(ids)
    format_name = view.format.lstrip(_NATIVE_BYTE_ORDERS)
    if view.ndim != 1 or not view.c_contiguous or view.itemsize != _ID_BYTES or format_name not in _NATIVE_FORMATS:
        raise TypeError("block ids must be a C-contiguous one-dimensional buffer of int32")
    if is_written and view.readonly:
        raise TypeError("block ids cannot be written into a read-only buffer")
    # A view of no items cannot be cast; a cast gives one format to the names that int32 has.
    return view if len(view) == 0 else view.cast("B").cast("i")


def ids_of_buffer(ids: Any, is_written: bool = False) -> list[int]:
    """The ids in a buffer; with is_written, one that must also be writable. TypeError for what is no such buffer."""
    view = _id_view(ids, is_written)
    return [] if len(view) == 0 else view.tolist()


def empty_id_array(num_ids: int) -> Any:
    """A new int32 array of shape (num_ids,), values undefined."""
    # numpy takes longer to import than the rest of the package.
    import numpy

    return numpy.empty(num_ids, dtype=numpy.int32)


def write_ids(out: Any, ids: Sequence[int]) -> None:
    """Fill a buffer that ``ids_of_buffer`` has accepted."""
    view = _id_view(out, is_written=True)
    for index, block_id in enumerate(ids):
        view[index] = block_id
