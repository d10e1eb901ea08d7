"""Two halves that must behave alike, and what a caller can see of an answer."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fuzz.decisions import Finding
from fuzz.values import FuzzError

Call = Callable[[Any], Any]


def plain(value: Any, depth: int = 0) -> Any:
    """An answer without identities: blocks become their ids, arrays lists, structs their fields."""
    if depth > 6:
        return "..."
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if hasattr(type(value), "block_id"):
        return ("block", value.block_id)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, [plain(getattr(value, name), depth + 1) for name in value.__struct_fields__])
    if isinstance(value, Mapping):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return ("set", sorted(map(repr, value)))
    if isinstance(value, Sequence) or hasattr(type(value), "__next__"):
        return [plain(item, depth + 1) for item in value]
    if hasattr(value, "get_block_ids"):
        return ("blocks", value.get_block_ids())
    return type(value).__name__


def outcome(call: Call, half: Any) -> tuple[str, Any]:
    """("returned", what) or ("raised", the name of the exception's class)."""
    try:
        return "returned", plain(call(half))
    except (FuzzError, Exception) as error:
        if os.environ.get("KVPOOL_FUZZ_TRACE"):
            traceback.print_exc()
        if isinstance(error, (Finding, MemoryError, SystemError)):
            raise
        return "raised", type(error).__name__


def one_of_both(left: Any, right: Any, what: str) -> None:
    """Finding unless two views of the halves are equal."""
    if left != right:
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            for key in [*left, *(key for key in right if key not in left)]:
                one_of_both(left.get(key), right.get(key), f"{what}, {key}")
        if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
            for index, (item, other) in enumerate(zip(left, right)):
                one_of_both(item, other, f"{what}, {index}")
        raise Finding(f"{what}: native {left!r}, twin {right!r}")


def are_alike(left: tuple[str, Any], right: tuple[str, Any], is_hostile: bool) -> bool:
    """Equal outcomes. Of values of a wrong type it is promised that both halves refuse or take them; which of several
    is refused first, and so by which exception, is not."""
    return left == right or (is_hostile and left[0] == right[0] == "raised")


def call_both(
    halves: Sequence[Any],
    call: Call,
    what: str,
    state: Callable[[Any], Any],
    is_hostile: bool,
    is_atomic: bool = True,
) -> tuple[str, Any] | None:
    """The outcome of a call on both halves; None when a callback interfered and the histories part.

    Finding: other outcomes, another state afterwards, a state that a refused call has changed (unless it is several
    calls in one, not ``is_atomic``), a broken invariant.
    """
    before = state(halves[0])
    outcomes = [outcome(call, half) for half in halves]
    for half in halves:
        half.check()
    if any(half.disturbed for half in halves):
        return None
    if not are_alike(outcomes[0], outcomes[1], is_hostile):
        raise Finding(f"{what}: native {outcomes[0]!r}, twin {outcomes[1]!r}")
    after = [state(half) for half in halves]
    one_of_both(after[0], after[1], f"after {what}, which {outcomes[0]!r}")
    if outcomes[0][0] == "raised" and is_atomic:
        one_of_both(before, after[0], f"{what} raised {outcomes[0][1]}, but before (as native) and after (as twin)")
    return outcomes[0]


def ids_of(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]
