"""The public calls of a KV cache manager and of its pool that change something, in front of which the recorder stands.

``recorded`` makes a class of managers that record from a class that does not; the pool of such a manager becomes one of
a class that does the same. Only calls from outside count: a call that another one makes is part of it. Where recording
has ended, the calls are those of the plain class, and a look.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from kvpool.cache.manager import KVCacheManagerBase
from kvpool.common.one_line import one_line
from kvpool.recording.frames import frame_parts
from kvpool.recording.operations import number, pack
from kvpool.recording.recorder import OperationRecorder, Parts
from kvpool.recording.settings import RecordingSettings
from kvpool.recording.setup import NotRecordableError, describe_manager
from kvpool.recording.snapshot import ids_of

if TYPE_CHECKING:
    from kvpool.backend import BlockPool, KVCacheBlock, Request
    from kvpool.cache.blocks import KVCacheBlockCopy, KVCacheBlocks

    _ManagerBase = KVCacheManagerBase
    _PoolBase = BlockPool
else:
    _ManagerBase = _PoolBase = object

logger = logging.getLogger("kvpool")

_SIGNATURE = signature(KVCacheManagerBase.__init__)
Fields = tuple[list[bytes] | None, list[int]]


# ---- results ----


def _digests(hashes: list[Any]) -> list[bytes]:
    b"".join(hashes)  # TypeError for others
    return hashes


def _nothing(result: Any) -> Fields:
    return None, []


def _number(result: Any) -> Fields:
    return None, [number(result)]


def _blocks(result: Any) -> Fields:
    return [ids_of(result)], []


def _ids(result: Any) -> Fields:
    return [pack(result if type(result) is list else memoryview(result))], []


def _blocks_by_group(result: KVCacheBlocks | None) -> Fields:
    return (None if result is None else [ids_of(group) for group in result.blocks]), []


# ---- calls that mostly bring nothing, as they are in a file ----

_NEW_STEP, _TAKE_IDS, _TAKE_COPIES = (
    frame_parts((name,)) for name in ("new_step_starts", "take_new_block_ids", "take_kv_cache_block_copies")
)
_NO_RESULT = frame_parts(("result", None, []))
_NO_IDS = frame_parts(("result", [b""], []))
_NO_COPIES = frame_parts(("result", [b"", b"", b""], []))


def _no_result(result: Any) -> Parts:
    return _NO_RESULT


def _taken_ids(ids: list[int]) -> Parts:
    return frame_parts(("result", [pack(ids)], [])) if ids else _NO_IDS


def _taken_copies(taken: tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]) -> Parts:
    copies, blocks = taken
    if not copies and not blocks:
        return _NO_COPIES
    sources, targets = (pack(copy[i] for copy in copies) for i in range(2))
    return frame_parts(("result", [sources, targets, ids_of(blocks)], []))


class RecordedManagerCalls(_ManagerBase):
    """Mixed into a manager, in front of its class."""

    _recorder: OperationRecorder | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorder = None  # made again, it is another one
        settings = RecordingSettings.from_environment()
        if settings is None:
            return
        try:
            bound = _SIGNATURE.bind(self, *args, **options)
            bound.apply_defaults()
            recorder = OperationRecorder(self, describe_manager(self, bound.arguments), settings)
            pool: Any = self.block_pool
            plain: Any = type(pool)
            pool.__class__ = _recorded_pool_class(plain)
            pool._recorder = self._recorder = recorder
            logger.info("%s: the calls of a KV cache manager are recorded here", recorder.path)
        except (OSError, NotRecordableError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            logger.warning("%s: nothing is recorded: %s", one_line(settings.path), one_line(reason))

    # Prefix hits

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        recorder, call = self._recorder, super().get_computed_blocks
        if recorder is None or not recorder.takes_calls:
            return call(request)
        found: tuple[KVCacheBlocks, int] = recorder.call(
            lambda: call(request),
            lambda: ("get_computed_blocks", recorder.tell(request).number),
            lambda result: (recorder.keep_hit(result[0]), [result[1]]),
        )
        return found

    def get_computed_blocks_and_boundary(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        recorder, call = self._recorder, super().get_computed_blocks_and_boundary
        if recorder is None or not recorder.takes_calls:
            return call(request)
        found: tuple[KVCacheBlocks, int, int] = recorder.call(
            lambda: call(request),
            lambda: ("get_computed_blocks_and_boundary", recorder.tell(request).number),
            lambda result: (recorder.keep_hit(result[0]), [result[1], result[2]]),
        )
        return found

    # Allocation

    def _allocate_plainly(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        """``allocate_slots`` of the plain class, by a shorter way than super(); see ``recorded``."""
        raise NotImplementedError

    def allocate_slots(self, request: Request, num_new_tokens: int, *others: Any, **named: Any) -> KVCacheBlocks | None:
        recorder = self._recorder
        if recorder is None or not recorder.takes_calls:
            return super().allocate_slots(request, num_new_tokens, *others, **named)
        if not others and not named and recorder.is_settled:
            # For each running request at each step where blocks are short: no call too many.
            recorder.takes_calls = recorder.is_settled = is_plain = False
            try:
                is_plain = recorder.plain.add(request, num_new_tokens) or recorder.add_plain(request, num_new_tokens)
                if is_plain:
                    blocks = self._allocate_plainly(request, num_new_tokens)
                    if blocks is self.empty_kv_cache_blocks:
                        recorder.plain.settle(False)
                        recorder.is_settled = True
                    else:
                        recorder.settle_plain(blocks)
                    return blocks
                recorder.is_settled = True
            except BaseException as error:
                if is_plain:
                    recorder.note_plain_failure(request, num_new_tokens, error)
                if is_plain or not isinstance(error, Exception):
                    raise
                recorder.is_settled = True  # a request that can't be told: as any other call
            finally:
                recorder.takes_calls = recorder.is_on
        call = super().allocate_slots
        allocated: KVCacheBlocks | None = recorder.call(
            lambda: call(request, num_new_tokens, *others, **named),
            lambda: self._describe_allocation(recorder, request, num_new_tokens, *others, **named),
            _blocks_by_group,
        )
        return allocated

    def _describe_allocation(
        self,
        recorder: OperationRecorder,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> tuple[Any, ...]:
        return (
            "allocate_slots",
            recorder.tell(request).number,
            number(num_new_tokens),
            number(num_new_computed_tokens),
            recorder.describe_hit(new_computed_blocks, self.empty_kv_cache_blocks),
            number(num_lookahead_tokens),
            number(num_external_computed_tokens),
            bool(delay_cache_blocks),
            number(num_encoder_tokens),
            bool(full_sequence_must_fit),
            number(reserved_blocks),
            bool(has_scheduled_reqs),
            list(map(number, skip_zeroing_group_ids)),
        )

    def allocate_decode(self, requests: Iterable[Request]) -> list[KVCacheBlocks | None]:
        recorder, call = self._recorder, super().allocate_decode
        if recorder is None or not recorder.takes_calls:
            return call(requests)
        batch: list[Request] | None = None

        def run() -> list[KVCacheBlocks | None]:
            return call(requests if batch is None else batch)

        def message() -> tuple[Any, ...]:
            nonlocal batch
            batch = list(requests)
            return ("allocate_decode", *recorder.tell_batch(batch))

        def result(made: list[KVCacheBlocks | None]) -> Fields:
            nothing = self.empty_kv_cache_blocks
            rows: list[bytes] = []
            numbers: list[int] = []
            for place in [place for place, blocks in enumerate(made) if blocks is not nothing]:
                blocks = made[place]
                numbers.append(-1 - place if blocks is None else place)
                rows += [] if blocks is None else [ids_of(group) for group in blocks.blocks]
            return rows, numbers

        if type(requests) is not list and type(requests) is not tuple:
            requests = list(requests)  # an iterator can be read but once
        made: list[KVCacheBlocks | None] = recorder.call(run, message, result)
        return made

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        recorder, call = self._recorder, super().cache_blocks
        if recorder is None or not recorder.takes_calls:
            return call(request, num_computed_tokens)
        recorder.call(
            lambda: call(request, num_computed_tokens),
            lambda: ("cache_blocks", recorder.tell(request).number, number(num_computed_tokens)),
            _nothing,
        )
        return None

    # Giving back

    def free(self, request: Request) -> None:
        recorder, call = self._recorder, super().free
        if recorder is None or not recorder.takes_calls:
            return call(request)
        recorder.call(
            lambda: call(request),
            lambda: ("free", recorder.number_of(request.request_id)),
            lambda result: recorder.forget(request, _nothing(result)),
        )
        return None

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        recorder, call = self._recorder, super().pop_blocks_for_free
        if recorder is None or not recorder.takes_calls:
            return call(request)
        popped: list[KVCacheBlock] = recorder.call(
            lambda: call(request),
            lambda: ("pop_blocks_for_free", recorder.number_of(request.request_id)),
            lambda result: recorder.forget(request, _blocks(result)),
        )
        return popped

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        recorder, call = self._recorder, super().remove_skipped_blocks
        if recorder is None or not recorder.takes_calls:
            return call(request_id, processed_computed_tokens, num_prompt_tokens)
        recorder.call(
            lambda: call(request_id, processed_computed_tokens, num_prompt_tokens),
            lambda: (
                "remove_skipped_blocks",
                recorder.number_of(request_id),
                number(processed_computed_tokens),
                None if num_prompt_tokens is None else number(num_prompt_tokens),
            ),
            _nothing,
        )
        return None

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        recorder, call = self._recorder, super().evict_blocks
        if recorder is None or not recorder.takes_calls:
            return call(block_ids)
        ids = list(block_ids)
        recorder.call(lambda: call(ids), lambda: ("evict_blocks", pack(ids)), _nothing)
        return None

    def reset_prefix_cache(self) -> bool:
        recorder, call = self._recorder, super().reset_prefix_cache
        if recorder is None or not recorder.takes_calls:
            return call()
        is_reset: bool = recorder.call(call, lambda: ("reset_prefix_cache",), _number)
        return is_reset

    # Steps, and what is taken back of them

    def new_step_starts(self) -> None:
        recorder, call = self._recorder, super().new_step_starts
        if recorder is None or not recorder.takes_calls:
            return call()
        recorder.call_quietly(call, _NEW_STEP, _no_result)
        return None

    def take_back(self, request: Request, num_computed_tokens: int) -> None:
        recorder, call = self._recorder, super().take_back
        if recorder is None or not recorder.takes_calls:
            return call(request, num_computed_tokens)
        recorder.call(
            lambda: call(request, num_computed_tokens),
            lambda: ("take_back", recorder.tell(request).number, number(num_computed_tokens)),
            _nothing,
        )
        return None

    def drop_pending(self) -> None:
        recorder, call = self._recorder, super().drop_pending
        if recorder is None or not recorder.takes_calls:
            return call()
        recorder.call(call, lambda: ("drop_pending",), _nothing)
        return None

    def release_orphans(self) -> int:
        recorder, call = self._recorder, super().release_orphans
        if recorder is None or not recorder.takes_calls:
            return call()
        num_released: int = recorder.call(call, lambda: ("release_orphans",), _number)
        return num_released

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        recorder, call = self._recorder, super().record_blocks_for_zeroing
        if recorder is None or not recorder.takes_calls:
            return call(request_id, start_token)
        recorder.call(
            lambda: call(request_id, start_token),
            lambda: ("record_blocks_for_zeroing", recorder.number_of(request_id), number(start_token)),
            _nothing,
        )
        return None

    def take_new_block_ids(self) -> list[int]:
        recorder, call = self._recorder, super().take_new_block_ids
        if recorder is None or not recorder.takes_calls:
            return call()
        ids: list[int] = recorder.call_quietly(call, _TAKE_IDS, _taken_ids)
        return ids

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        recorder, call = self._recorder, super().take_kv_cache_block_copies
        if recorder is None or not recorder.takes_calls:
            return call()
        taken: tuple[list[KVCacheBlockCopy], list[KVCacheBlock]] = recorder.call_quietly(
            call, _TAKE_COPIES, _taken_copies
        )
        return taken

    def get_num_required_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        recorder, call = self._recorder, super().get_num_required_blocks
        if recorder is None or not recorder.takes_calls:
            return call(num_tokens, num_encoder_tokens)
        num_blocks: int = recorder.call(
            lambda: call(num_tokens, num_encoder_tokens),
            lambda: ("get_num_required_blocks", number(num_tokens), number(num_encoder_tokens)),
            _number,
        )
        return num_blocks


class RecordedPoolCalls(_PoolBase):
    """Mixed into the pool of a manager, in front of its class."""

    _recorder: OperationRecorder | None = None

    def _own_ids(self, blocks: Iterable[Any]) -> bytes:
        """Packed ids. Blocks of other pools have no place in the recording."""
        own, ids = self.blocks, []
        for block in blocks:
            ids.append(block.block_id)
            if own[ids[-1]] is not block:
                raise NotRecordableError("a block of another pool")
        return pack(ids)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        recorder, call = self._recorder, super().get_new_blocks
        if recorder is None or not recorder.takes_calls:
            return call(num_blocks)
        blocks: list[KVCacheBlock] = recorder.call(
            lambda: call(num_blocks), lambda: ("pool.get_new_blocks", number(num_blocks)), _blocks
        )
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], prepend: bool = False) -> None:
        recorder, call = self._recorder, super().free_blocks
        if recorder is None or not recorder.takes_calls:
            return call(ordered_blocks, prepend)
        blocks = list(ordered_blocks)
        recorder.call(
            lambda: call(blocks, prepend),
            lambda: ("pool.free_blocks", self._own_ids(blocks), bool(prepend)),
            _nothing,
        )
        return None

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        recorder, call = self._recorder, super().touch
        if recorder is None or not recorder.takes_calls:
            return call(blocks)
        batch = list(blocks)
        recorder.call(lambda: call(batch), lambda: ("pool.touch", self._own_ids(batch)), _nothing)
        return None

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        recorder, call = self._recorder, super().cache_full_blocks
        arguments = (request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        if recorder is None or not recorder.takes_calls:
            return call(*arguments)
        recorder.call(
            lambda: call(*arguments),
            lambda: (
                "pool.cache_full_blocks",
                recorder.tell(request).number,
                self._own_ids(blocks),
                number(num_cached_blocks),
                number(num_full_blocks),
                number(block_size),
                number(kv_cache_group_id),
                None if block_mask is None else [bool(is_wanted) for is_wanted in block_mask],
            ),
            _nothing,
        )
        return None

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> Any:
        recorder, call = self._recorder, super().cache_partial_block
        arguments = (request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes)
        if recorder is None or not recorder.takes_calls:
            return call(*arguments)
        return recorder.call(
            lambda: call(*arguments),
            lambda: (
                "pool.cache_partial_block",
                recorder.tell(request).number,
                self._own_id(block),
                number(num_tokens),
                number(kv_cache_group_id),
                number(block_size),
                bool(replace_existing_hashes),
            ),
            lambda key: (None, [int(key is not None)]),
        )

    def _own_id(self, block: Any) -> int:
        self._own_ids([block])
        block_id: int = block.block_id
        return block_id

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        recorder, call = self._recorder, super().move_block_hashes
        if recorder is None or not recorder.takes_calls:
            return call(src_block, dst_block)
        recorder.call(
            lambda: call(src_block, dst_block),
            lambda: ("pool.move_block_hashes", self._own_id(src_block), self._own_id(dst_block)),
            _nothing,
        )
        return None

    def add_reference(self, block: KVCacheBlock) -> None:
        recorder, call = self._recorder, super().add_reference
        if recorder is None or not recorder.takes_calls:
            return call(block)
        recorder.call(lambda: call(block), lambda: ("pool.add_reference", self._own_id(block)), _nothing)
        return None

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        recorder, call = self._recorder, super().unpin_blocks
        if recorder is None or not recorder.takes_calls:
            return call(blocks, on_reuse)
        batch = list(blocks)
        recorder.call(
            lambda: call(batch, on_reuse),
            lambda: ("pool.unpin_blocks", self._own_ids(batch)),
            _nothing,
        )
        return None

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        recorder, call = self._recorder, super().evict_blocks
        if recorder is None or not recorder.takes_calls:
            return call(block_ids)
        ids = list(block_ids)
        recorder.call(lambda: call(ids), lambda: ("pool.evict_blocks", pack(ids)), _nothing)
        return None

    def reset_prefix_cache(self) -> bool:
        recorder, call = self._recorder, super().reset_prefix_cache
        if recorder is None or not recorder.takes_calls:
            return call()
        is_reset: bool = recorder.call(call, lambda: ("pool.reset_prefix_cache",), _number)
        return is_reset

    def allocate_ids(self, n: int, out: Any = None) -> Any:
        recorder, call = self._recorder, super().allocate_ids
        if recorder is None or not recorder.takes_calls:
            return call(n, out)
        return recorder.call(lambda: call(n, out), lambda: ("pool.allocate_ids", number(n)), _ids)

    def free_ids(self, ids: Any, prepend: bool = False) -> None:
        recorder, call = self._recorder, super().free_ids
        if recorder is None or not recorder.takes_calls:
            return call(ids, prepend)
        recorder.call(
            lambda: call(ids, prepend),
            lambda: ("pool.free_ids", pack(memoryview(ids)), bool(prepend)),
            _nothing,
        )
        return None

    def touch_ids(self, ids: Any) -> None:
        recorder, call = self._recorder, super().touch_ids
        if recorder is None or not recorder.takes_calls:
            return call(ids)
        recorder.call(lambda: call(ids), lambda: ("pool.touch_ids", pack(memoryview(ids))), _nothing)
        return None

    def cache_ids(self, block_hashes: Any, ids: Any, group_id: int = 0) -> None:
        recorder, call = self._recorder, super().cache_ids
        if recorder is None or not recorder.takes_calls:
            return call(block_hashes, ids, group_id)
        hashes = list(block_hashes)
        recorder.call(
            lambda: call(hashes, ids, group_id),
            lambda: ("pool.cache_ids", _digests(hashes), pack(memoryview(ids)), number(group_id)),
            _nothing,
        )
        return None


def recorded(plain: Any) -> Any:
    """A class of managers as ``plain``, that record their calls where the environment says so."""

    class RecordingKVCacheManager(RecordedManagerCalls, plain):  # type: ignore[misc]
        __doc__ = plain.__doc__
        _allocate_plainly = plain.allocate_slots

    return RecordingKVCacheManager


@cache
def _recorded_pool_class(plain: Any) -> Any:
    class RecordingBlockPool(RecordedPoolCalls, plain):  # type: ignore[misc]
        __doc__ = plain.__doc__

    return RecordingBlockPool
