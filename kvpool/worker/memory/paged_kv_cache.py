"""The memory that block ids name: keys and values of all layers, block beside block.

One allocation of shape [num_layers, num_blocks, 2, block_size, num_kv_heads, head_size]; a layer is a view of it. Block
``b`` of a layer holds the keys ``layer[b, 0]`` and the values ``layer[b, 1]`` of ``block_size`` tokens, and slot
``b * block_size + i`` is token ``i`` of block ``b``. Seen as one row a token, [num_blocks * 2 * block_size, ...], its
key is row ``slot + b * block_size`` and its value ``block_size`` rows further.

Block 0 is the null block: padding may be written there, nobody's tokens are. Layers of several KV cache groups share
one pool of ids, so a layer here serves a layer of each group: what a block holds is what its holder wrote.

On the CPU torch moves the items of a row one by one. Rows that are made of 16 bytes are therefore moved as items of 16
bytes, which takes two to eight times less time.
"""

from __future__ import annotations

import torch

from kvpool.common.environment import read_switch
from kvpool.errors import InvalidArgumentError
from kvpool.native.step_outputs import PAD_SLOT_ID
from kvpool.worker.memory.block_ids import BlockIds, are_inside, check_not_null, check_pairs, checked_ids, ids_on
from kvpool.worker.memory.device_memory import allocate_blocks

WORD = torch.complex128  # 16 bytes, the widest item that torch has
FEW_ROWS = 16  # below, looking at them as words costs more than it saves
COPY_BYTES = 64 * 2**20  # of blocks on their way in copy_blocks on CUDA, unless those of one layer are more


class PagedKVCache:
    """Keys and values of a worker's layers by block id.

    Args:
        num_blocks: blocks of the pool, the null block among them.
        block_size: tokens of a block.
        num_kv_heads, head_size: of this worker (a rank of several has a part of the heads).
        num_layers: layers of the largest KV cache group.
        dtype: of what is kept. Keys and values of another one are converted when they are written.
        device: where.

    Attributes:
        layers: for each layer a tensor [num_blocks, 2, block_size, num_kv_heads, head_size], zeroed at first.
        nbytes: bytes of all of them.

    Raises:
        InvalidArgumentError: a size below 1, or a dtype that isn't one of floating point.
        CacheMemoryError: more than is free on the device, which is asked before anything is allocated.

    On CUDA calls are queued on the current stream. With KVPOOL_DEBUG=1 in the environment ``write`` waits for the
    device there and checks slots. Not for several threads at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        num_layers: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        block_bytes = bytes_per_block(block_size, num_kv_heads, head_size, num_layers, dtype)
        if num_blocks < 1:
            raise InvalidArgumentError(f"a KV cache of {num_blocks} blocks")
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, num_layers
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        self.dtype = dtype
        self.nbytes = num_blocks * block_bytes
        shape = (num_layers, num_blocks, 2, block_size, num_kv_heads, head_size)
        self.storage = allocate_blocks(shape, num_blocks, dtype, torch.device(device))
        self.device = self.storage.device
        self.layers = list(self.storage.unbind(0))
        self._rows = [layer.view(-1, num_kv_heads, head_size) for layer in self.layers]
        self._half_blocks = [layer.view(2 * num_blocks, -1) for layer in self.layers]
        self._is_cpu, self._is_cuda = self.device.type == "cpu", self.device.type == "cuda"
        self._word_rows = [_as_words(rows) for rows in self._rows] if self._is_cpu else [None] * num_layers
        self._checks_slots = read_switch("KVPOOL_DEBUG") or not self._is_cuda

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Writes the keys and values of packed tokens to their slots.

        Args:
            key, value: [n, num_kv_heads, head_size], of any strides.
            slot_mapping: int64 [n] on the device. Tokens at ``PAD_SLOT_ID`` are skipped. Of several tokens at one slot
                any one may stay.

        Raises:
            TypeError: slots of another dtype.
            InvalidArgumentError: another shape, or a slot outside the cache; nothing is written. On CUDA tokens with
                such a slot are skipped instead, since finding one would mean to wait.

        O(n). On the CPU ``write_rows`` does less: its rows are computed once a step, not once a layer.
        """
        self._check_tokens(key, value, slot_mapping)
        has_padding = self._checks_slots and slot_mapping.numel() > 0 and self._check_slots(slot_mapping)
        if self._is_cuda:
            from kvpool.worker.kernels.slot_write import write_to_slots

            write_to_slots(self.layers[layer], key, value, slot_mapping)
            return
        if has_padding:
            is_token = slot_mapping != PAD_SLOT_ID
            key, value, slot_mapping = key[is_token], value[is_token], slot_mapping[is_token]
        key_rows = slot_mapping + slot_mapping // self.block_size * self.block_size
        self.write_rows(layer, key, value, key_rows, key_rows + self.block_size)

    def write_rows(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, key_rows: torch.Tensor, value_rows: torch.Tensor
    ) -> None:
        """``write`` with rows in place of slots, see ``compute_kv_rows``: padding is a row of the null block.

        Args:
            key, value: [n, num_kv_heads, head_size], of any strides.
            key_rows, value_rows: int64 [n] on the device, inside the cache: on the CPU torch raises an IndexError for
                another row, CUDA stops.

        O(n).
        """
        rows, word_rows = self._rows[layer], self._word_rows[layer]
        key, value = key.to(self.dtype), value.to(self.dtype)
        if word_rows is not None and key.shape[0] >= FEW_ROWS:
            key_words, value_words = _as_words(key), _as_words(value)
            if key_words is not None and value_words is not None:
                rows, key, value = word_rows, key_words, value_words
        rows.index_copy_(0, key_rows, key)
        rows.index_copy_(0, value_rows, value)

    def gather(
        self, layer: int, block_ids: BlockIds, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some blocks, one behind the other.

        Args:
            block_ids: integers [n]. Those in a tensor on CUDA are not looked at.
            out: two contiguous tensors [m, num_kv_heads, head_size] of the cache's dtype to write to, m at least
                n * block_size. Fresh memory costs several times the copy in page faults.

        Returns:
            Keys and values, [n * block_size, num_kv_heads, head_size]; the first part of ``out`` if that was given.

        Raises:
            InvalidArgumentError: an id outside the cache, or an ``out`` that doesn't fit.

        O(n * block_size).
        """
        ids = self._device_ids(block_ids, "gather")
        halves = self._half_blocks[layer]
        num_tokens, shape = ids.numel() * self.block_size, (ids.numel(), halves.shape[1])
        if out is None:
            keys, values = (halves.new_empty(num_tokens, self.num_kv_heads, self.head_size) for _ in range(2))
        else:
            keys, values = (self._workspace(tensor, num_tokens) for tensor in out)
        key_halves = 2 * ids
        torch.index_select(halves, 0, key_halves, out=keys.view(shape))
        torch.index_select(halves, 0, key_halves + 1, out=values.view(shape))
        return keys, values

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copies blocks in all layers, as if all sources were read before any target is written.

        Raises:
            InvalidArgumentError: lists of different lengths, an id outside the cache, a target twice, the null block as
                a target. Nothing is copied.

        O(blocks * layers).
        """
        source_ids = checked_ids(sources, self.num_blocks, "copy_blocks")
        target_ids = checked_ids(targets, self.num_blocks, "copy_blocks")
        check_pairs(source_ids, target_ids, "copy_blocks")
        check_not_null(target_ids, "copy_blocks")
        if self._is_cpu:
            self._copy_one_by_one(source_ids, target_ids)
        elif source_ids:
            self._copy_by_index(ids_on(self.device, source_ids), ids_on(self.device, target_ids))

    def zero_blocks(self, block_ids: BlockIds) -> None:
        """Zeroes blocks in all layers. InvalidArgumentError for an id outside the cache. O(blocks * layers)."""
        if self._is_cpu:
            for block_id in checked_ids(block_ids, self.num_blocks, "zero_blocks"):
                self.storage[:, block_id].zero_()
            return
        ids = self._device_ids(block_ids, "zero_blocks")
        if ids.numel():
            self.storage.index_fill_(1, ids, 0)

    def _copy_one_by_one(self, sources: list[int], targets: list[int]) -> None:
        """Plain copies of memory, faster than by index. Sources that are targets too are saved first."""
        overwritten = set(targets)
        saved = {source: self.storage[:, source].clone() for source in sources if source in overwritten}
        for source, target in zip(sources, targets):
            self.storage[:, target].copy_(saved[source] if source in saved else self.storage[:, source])

    def _copy_by_index(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        layer_bytes = sources.numel() * self.layers[0][0].nbytes
        step = max(1, COPY_BYTES // layer_bytes)
        for first in range(0, self.num_layers, step):
            layers = self.storage[first : first + step]
            layers.index_copy_(1, targets, layers.index_select(1, sources))

    def _device_ids(self, block_ids: BlockIds, name: str) -> torch.Tensor:
        if isinstance(block_ids, torch.Tensor):
            is_seen = block_ids.device.type == "cpu"
            if not is_seen or (block_ids.dtype == torch.int64 and are_inside(block_ids, self.num_blocks)):
                return block_ids.to(self.device, torch.int64)
        return ids_on(self.device, checked_ids(block_ids, self.num_blocks, name))

    def _workspace(self, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
        is_fit = (
            tensor.dtype == self.dtype
            and tensor.device == self.device
            and tensor.is_contiguous()
            and tensor.shape[1:] == (self.num_kv_heads, self.head_size)
            and tensor.shape[0] >= num_tokens
        )
        if not is_fit:
            raise InvalidArgumentError(
                f"gather: no room in a {tensor.dtype} {list(tensor.shape)} on {tensor.device} for {num_tokens} tokens "
                f"of {self.dtype} [{self.num_kv_heads}, {self.head_size}] on {self.device}"
            )
        return tensor[:num_tokens]

    def _check_tokens(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if slot_mapping.dtype != torch.int64:
            raise TypeError(f"write: slots are int64, not {slot_mapping.dtype}")
        wanted = (slot_mapping.numel(), self.num_kv_heads, self.head_size)
        if slot_mapping.dim() != 1 or key.shape != wanted or value.shape != wanted:
            raise InvalidArgumentError(
                f"write: keys {list(key.shape)}, values {list(value.shape)}, slots {list(slot_mapping.shape)}; a token "
                f"has [{self.num_kv_heads}, {self.head_size}]"
            )

    def _check_slots(self, slot_mapping: torch.Tensor) -> bool:
        """Whether there is padding among them."""
        num_slots = self.num_blocks * self.block_size
        low, high = (int(edge) for edge in slot_mapping.aminmax())
        if low < PAD_SLOT_ID or high >= num_slots:
            raise InvalidArgumentError(f"write: slot {low if low < PAD_SLOT_ID else high} of {num_slots} slots")
        return bool(low == PAD_SLOT_ID)


def bytes_per_block(block_size: int, num_kv_heads: int, head_size: int, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes of a block in all layers, keys and values. InvalidArgumentError for a size below 1 or another dtype."""
    if min(block_size, num_kv_heads, head_size, num_layers) < 1 or not dtype.is_floating_point:
        raise InvalidArgumentError(
            f"blocks of {block_size} tokens, {num_layers} layers, {num_kv_heads} KV heads of {head_size}, {dtype}"
        )
    return 2 * block_size * num_kv_heads * head_size * num_layers * dtype.itemsize


def _as_words(rows: torch.Tensor) -> torch.Tensor | None:
    """The same memory as items of 16 bytes, None where heads do not begin and end at such."""
    items = WORD.itemsize // rows.dtype.itemsize
    token_stride, head_stride, item_stride = rows.stride()
    is_whole = not (rows.shape[2] % items or token_stride % items or head_stride % items)
    is_aligned = not (rows.storage_offset() % items or rows.data_ptr() % WORD.itemsize)
    return rows.view(WORD) if item_stride == 1 and is_whole and is_aligned else None
