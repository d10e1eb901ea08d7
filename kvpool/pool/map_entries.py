"""A prefix map as a mapping from key to blocks, for code that reads or writes vLLM's private dict."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

Entry = Any  # one block, or a dict of blocks by id


class MapEntries(MutableMapping[bytes, Entry]):
    """A view: key -> the block, or a dict by block id where there are several. Changes go to the map.

    Two mappings are equal if each key leads to the same blocks; a dict of one block equals the block. Iteration is
    O(blocks of the pool), all else O(blocks of the key).
    """

    __slots__ = ("_map",)

    def __init__(self, prefix_map: Any) -> None:
        self._map = prefix_map

    def __getitem__(self, key: bytes) -> Entry:
        blocks = self._map._blocks_of(key)
        if not blocks:
            raise KeyError(key)
        return blocks[0] if len(blocks) == 1 else {block.block_id: block for block in blocks}

    def __setitem__(self, key: bytes, value: Entry) -> None:
        """What the key led to before is taken out of the map."""
        self._take_out(key)
        for block in _blocks_in(value):
            self._map.insert(key, block)

    def __delitem__(self, key: bytes) -> None:
        if not self._take_out(key):
            raise KeyError(key)

    def _take_out(self, key: bytes) -> bool:
        blocks = self._map._blocks_of(key)
        for block in blocks:
            self._map.pop(key, block.block_id)
        return bool(blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._map._keys())

    def __len__(self) -> int:
        return len(self._map)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and bool(self._map._blocks_of(key))

    def clear(self) -> None:
        for key in list(self):
            self._take_out(key)

    def copy(self) -> dict[bytes, Entry]:
        """The entries of now, as a dict."""
        return dict(self)

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, MapEntries)):
            return NotImplemented
        return {key: _blocks_in(self[key]) for key in self} == {key: _blocks_in(other[key]) for key in other}

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())


def _blocks_in(entry: Entry) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]
