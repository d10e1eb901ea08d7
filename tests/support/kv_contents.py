"""A simulated KV memory: who reads a stale block, or somebody else's, is told at once.

A slot holds no key and no value but a digest of what they depend on: all tokens of the sequence up to and including the
slot's own, and the adapter, salt and pictures that the sequence was computed with. So two slots are equal exactly when
they hold the same key and value. A state of a Mamba layer, one a block, is the digest of all tokens that went into
it. A block that another group has written to
holds nothing of what it held before: groups share blocks, not layouts.

Only a step that is executed writes, into the blocks of the worker's own tables, which know what messages said and
nothing of the cache manager. Then all is read back that the attention of the computed tokens sees.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.cache.managers.mamba_align import get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid
from kvpool.cache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvpool.scheduler.output import CachedRequestData, SchedulerOutput, StepResult

VOCABULARY = 50
WRONG_TOKEN = VOCABULARY + 7  # a draft that the model does not accept
NULL_BLOCK_ID = 0
_MODULUS = 2_305_843_009_213_693_951


class WrongToken(AssertionError):
    """A sequence would attend to something that is not its own, or write where others may read."""


# ---- what a slot depends on ----


def extended(digest: int, item: Any) -> int:
    """Digest of a prefix with one item more: a token, or a token and what stands in its place."""
    code = item + 1 if type(item) is int else zlib.crc32(repr(item).encode()) + 1_000_003
    return (digest * 1_000_003 + code) % _MODULUS


def start_digest(*extra_keys: Any) -> int:
    """Digest of no token yet under an adapter, a salt ...; 0 without any."""
    present = [key for key in extra_keys if key]
    return zlib.crc32(repr((present, [bool(key) for key in extra_keys])).encode()) if present else 0


def next_token(digest: int) -> int:
    """The token that the made-up model generates after a prefix."""
    return digest % VOCABULARY


def generated(prompt: Iterable[Any], num_tokens: int, start: int = 0) -> list[int]:
    """What the model generates after a prompt when nothing goes wrong."""
    digest = start
    for item in prompt:
        digest = extended(digest, item)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(next_token(digest))
        digest = extended(digest, tokens[-1])
    return tokens


# ---- the memory ----


class Cell(NamedTuple):
    """Content of a slot or a state; ``position`` and ``writer`` are for error messages."""

    digest: int
    position: int
    writer: str


@dataclass
class Page:
    """One block. Attributes: the group that wrote to it last, and by offset what is there."""

    group: int = -1
    cells: dict[int, Cell] = field(default_factory=dict)


class KVMemory:
    """Blocks by id; what nobody has written is absent. Block 0, the null block, is never written."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.num_reads = self.num_writes = 0

    def write(self, group: int, block_id: int, offset: int, cell: Cell) -> None:
        if block_id == NULL_BLOCK_ID:
            raise WrongToken(f"{cell} of group {group} would be written to the null block")
        page = self.pages.setdefault(block_id, Page())
        if page.group != group:
            page.group, page.cells = group, {}
        page.cells[offset] = cell
        self.num_writes += 1

    def expect(self, group: int, block_id: int, offset: int, digest: int, what: str) -> None:
        """Reads a slot. WrongToken unless it holds that digest, written by that group."""
        self.num_reads += 1
        page = self.pages.get(block_id)
        if block_id != NULL_BLOCK_ID and page is not None and page.group == group:
            cell = page.cells.get(offset)
            if cell is not None and cell.digest == digest:
                return
        raise WrongToken(f"{what}: slot {offset} of block {block_id}, group {group}, is {self.describe(block_id)}")

    def describe(self, block_id: int) -> str:
        return "the null block" if block_id == NULL_BLOCK_ID else str(self.pages.get(block_id))

    def zero(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.pages.pop(block_id, None)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """(source, destination) pairs, one after the other."""
        for source, destination in pairs:
            if NULL_BLOCK_ID in (source, destination):
                raise WrongToken(f"block {source} is copied to block {destination}")
            page = self.pages.get(source, Page())
            self.pages[destination] = Page(page.group, dict(page.cells))


# ---- a worker ----


class KnownSequence:
    """What a worker knows of a request.

    Args:
        request_id: for messages.
        start: digest of no token, see ``start_digest``.
        items: the known tokens, or a token and what stands in its place.
        tables: block ids per group, owned by the sequence.

    Attributes:
        digests: ``digests[i]`` stands for the first i tokens.
        state_index, num_accepted: of Mamba groups: index of the block with the running state, None before the first
            step with these tables; how many of the step's states count, the running one included.
    """

    def __init__(self, request_id: str, start: int, items: Iterable[Any], tables: Iterable[Iterable[int]]) -> None:
        self.request_id = request_id
        self.digests = [start]
        self.tables: list[list[int]] = []
        self.state_index: int | None = None
        self.num_accepted = 1
        self.is_encoded = False
        self.replace_tables(tables)
        self.extend(items)

    def replace_tables(self, tables: Iterable[Iterable[int]]) -> None:
        self.tables = [list(table) for table in tables]
        self.state_index, self.num_accepted, self.is_encoded = None, 1, False

    def append_blocks(self, tables: Iterable[Iterable[int]]) -> None:
        for table, more in zip(self.tables, tables, strict=True):
            table.extend(more)

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.digests.append(extended(self.digests[-1], item))

    def write_at(self, position: int, items: Iterable[Any]) -> None:
        """Tokens from that position on, behind which nothing is known."""
        if not position < len(self.digests):
            raise WrongToken(f"{self.request_id}: {len(self.digests) - 1} tokens are known, the next is {position}")
        del self.digests[position + 1 :]
        self.extend(items)


@dataclass
class Part:
    """What one sequence does in a step.

    Attributes:
        start, end: tokens to compute, [start, end); drafts are the last of them.
        num_drafts: of these.
        num_accepted: drafts that turn out to be right.
        num_lookahead: slots behind ``end`` that a draft model fills with guesses.
    """

    sequence: KnownSequence
    start: int
    end: int
    num_drafts: int = 0
    num_accepted: int = 0
    num_lookahead: int = 0


class StepFailed(Exception):
    """A step that was to fail. Attributes: ``when`` it did, as ``MessageWorker.fail`` says."""

    def __init__(self, when: str, where: str = "") -> None:
        super().__init__(f"{when} {where}")
        self.when = when


class ContentsWorker:
    """Computes steps on a ``KVMemory``.

    Args:
        specs: of the groups.
        hash_block_size, cache_hit_alignment_tokens, drop_eagle_block: where Mamba layers export a state from within a
            prefill, as vLLM's worker derives it.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        *,
        hash_block_size: int = 0,
        cache_hit_alignment_tokens: int = 0,
        drop_eagle_block: bool = False,
        num_encoder_tokens: int = 0,
    ) -> None:
        self.specs = list(specs)
        self.memory = KVMemory()
        self.hash_block_size = hash_block_size
        self.cache_hit_alignment_tokens = cache_hit_alignment_tokens
        self.drop_eagle_block = drop_eagle_block
        self.num_encoder_tokens = num_encoder_tokens
        self.writes_left: int | None = None  # StepFailed after so many writes
        self._written: set[tuple[int, int]] = set()

    def compute(self, parts: Sequence[Part]) -> None:
        """One step: states are read before they are written, keys and values written before they are read, those of
        all sequences together, as in every layer of a model."""
        self._written = set()
        for part in parts:
            self._for_groups(part, MambaSpec, self._read_state)
        for part in parts:
            self._for_groups(part, KVCacheSpec, self._write)
        for part in parts:
            self._for_groups(part, KVCacheSpec, self._read)
        for part in parts:
            self._for_groups(part, MambaSpec, self._keep_accepted_state)
            self._fill_lookahead(part)

    def _for_groups(self, part: Part, kind: type, call: Callable[[Part, int, Any], None]) -> None:
        for group, spec in enumerate(self.specs):
            if isinstance(spec, kind):
                call(part, group, spec)

    def load(self, sequence: KnownSequence, start: int, end: int) -> None:
        """Contents of tokens that come from elsewhere."""
        self._written = set()
        for group, spec in enumerate(self.specs):
            for position in range(start, end):
                if sequence.tables[group][position // spec.block_size] != NULL_BLOCK_ID:
                    self._put(sequence, group, position // spec.block_size, position % spec.block_size, position)

    # ---- slots ----

    def _put(
        self, sequence: KnownSequence, group: int, index: int, offset: int, position: int, digest: int = 0
    ) -> None:
        """Writes one slot or state; by default what the token at the position depends on."""
        if self.writes_left is not None:
            if self.writes_left == 0:
                self.writes_left = None
                raise StepFailed("middle", f"{sequence.request_id}, token {position}")
            self.writes_left -= 1
        table = sequence.tables[group]
        if not 0 <= index < len(table):
            raise WrongToken(f"{sequence.request_id}, token {position}: block {index} of {len(table)}, group {group}")
        place = table[index], offset
        if place in self._written:
            raise WrongToken(f"{sequence.request_id}, token {position}: {place} of group {group} is written twice")
        self._written.add(place)
        cell = Cell(digest or sequence.digests[position + 1], position, sequence.request_id)
        self.memory.write(group, *place, cell)

    def _write(self, part: Part, group: int, spec: Any) -> None:
        if isinstance(spec, MambaSpec):
            self._write_states(part, group, spec)
        elif isinstance(spec, CrossAttentionSpec):
            if not part.sequence.is_encoded:
                for position in range(self.num_encoder_tokens):
                    digest = extended(zlib.crc32(part.sequence.request_id.encode()), position)
                    self._put(part.sequence, group, *divmod(position, spec.block_size), position, digest)
        else:
            for position in range(part.start, part.end):
                self._put(part.sequence, group, *divmod(position, spec.block_size), position)

    def _read(self, part: Part, group: int, spec: Any) -> None:
        """All positions that the attention of the tokens [start, end) sees; those of the first token are the most."""
        sequence, start = part.sequence, part.start
        if isinstance(spec, MambaSpec):
            return
        if isinstance(spec, CrossAttentionSpec):
            sequence.is_encoded = True
            for position in range(self.num_encoder_tokens):
                digest = extended(zlib.crc32(sequence.request_id.encode()), position)
                self._expect(sequence, group, *divmod(position, spec.block_size), digest, position)
            return
        for position in range(first_position_read(spec, start), part.end):
            index, offset = divmod(position, spec.block_size)
            self._expect(sequence, group, index, offset, sequence.digests[position + 1], position)

    def _expect(self, sequence: KnownSequence, group: int, index: int, offset: int, digest: int, position: int) -> None:
        table = sequence.tables[group]
        what = f"token {position} of {sequence.request_id}"
        if index >= len(table):
            raise WrongToken(f"{what}: block {index} of {len(table)} in group {group}")
        self.memory.expect(group, table[index], offset, digest, what)

    def _fill_lookahead(self, part: Part) -> None:
        """Guesses, written wherever there are slots."""
        for group, spec in enumerate(self.specs):
            if isinstance(spec, (MambaSpec, CrossAttentionSpec)):
                continue
            table = part.sequence.tables[group]
            for position in range(part.end, part.end + part.num_lookahead):
                index, offset = divmod(position, spec.block_size)
                if index < len(table):
                    self.memory.write(group, table[index], offset, Cell(-1 - position, position, "a guess"))

    # ---- states ----

    def _read_state(self, part: Part, group: int, spec: MambaSpec) -> None:
        sequence = part.sequence
        if part.start == 0:
            return
        index = sequence.state_index
        if index is None:
            index = (part.start - 1) // spec.block_size
        index += sequence.num_accepted - 1
        table = sequence.tables[group]
        what = f"state of {sequence.request_id} after {part.start} tokens"
        if index >= len(table):
            raise WrongToken(f"{what}: block {index} of {len(table)} in group {group}")
        self.memory.expect(group, table[index], 0, sequence.digests[part.start], what)

    def _write_states(self, part: Part, group: int, spec: MambaSpec) -> None:
        sequence, size = part.sequence, spec.block_size
        current = -(-part.end // size) - 1
        base = part.end - part.num_drafts
        if spec.mamba_cache_mode == "all":
            for boundary in range(part.start // size * size + size, base, size):
                self._put(sequence, group, boundary // size - 1, 0, boundary - 1, sequence.digests[boundary])
        for k in range(part.num_drafts + 1):
            self._put(sequence, group, current + k, 0, base + k - 1, sequence.digests[base + k])
        if spec.num_prefill_checkpoint_blocks:
            self._export_state(part, group, spec)
        if group == max(g for g, other in enumerate(self.specs) if isinstance(other, MambaSpec)):
            sequence.state_index, sequence.num_accepted = current, 1

    def _export_state(self, part: Part, group: int, spec: MambaSpec) -> None:
        """A state from within a prefill step, where its kernel writes one out and the table has a block for it."""
        position = get_mamba_prefill_checkpoint_position(
            part.end, self.cache_hit_alignment_tokens, self.drop_eagle_block
        )
        if not is_mamba_prefill_checkpoint_valid(
            part.start,
            part.end,
            position,
            self.hash_block_size,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
        ):
            return
        index = -(-part.end // spec.block_size) - 2
        if part.sequence.tables[group][index] != NULL_BLOCK_ID:
            self._put(part.sequence, group, index, 0, position - 1, part.sequence.digests[position])

    def _keep_accepted_state(self, part: Part, group: int, spec: MambaSpec) -> None:
        """Drafts that were right: the next step starts from a later state; a block's last is kept."""
        sequence, size = part.sequence, spec.block_size
        if part.num_drafts == 0:
            return
        base, current = part.end - part.num_drafts, -(-part.end // size) - 1
        computed = base + part.num_accepted
        boundary = computed // size * size
        num_accepted = part.num_accepted + 1
        if boundary >= base:
            source, destination = current + boundary - base, boundary // size - 1
            table = sequence.tables[group]
            if source != destination:
                cell = self.memory.pages[table[source]].cells[0]
                self.memory.write(group, table[destination], 0, cell)
            if current == destination:
                num_accepted = 1
        sequence.num_accepted = num_accepted


def first_position_read(spec: KVCacheSpec, position: int) -> int:
    """The first of the positions that the attention of a token sees; the last is its own."""
    if isinstance(spec, SlidingWindowSpec):
        return max(position - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


# ---- a worker that is told by messages ----


class MessageWorker(ContentsWorker):
    """Executes messages of a ``Scheduler`` as ``kvpool.scheduler.output`` says, and samples from the made-up model.

    Args:
        specs: of the groups.
        start_of: by request id, the digest of no token yet; requests that are not in it have no extra keys.
        text_of: by request id, what the request computes in the end: prompt, with what stands in the place of its
            tokens, and what is generated. A hit may cover generated tokens that no message to this worker has named.

    Attributes:
        sequences: by request id, what is known of requests.
        fail: ``(when, n)``: the next step fails "before" it is looked at, in the "middle", after n writes, or "after"
            everything, when only the tokens don't come back; None: it does not.
        errors: reasons by request id why there will be no next token.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], **options: Any) -> None:
        super().__init__(specs, **options)
        self.start_of: dict[str, int] = {}
        self.text_of: dict[str, list[Any]] = {}
        self.sequences: dict[str, KnownSequence] = {}
        self.num_computed: dict[str, int] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.fail: tuple[str, int] | None = None
        self.errors: dict[str, str] = {}
        self.num_steps = self.num_failed = self.num_copies = self.num_zeroed = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        """One step; the sampled tokens. StepFailed if it is to fail; then whatever was done stays done."""
        fail, self.fail = self.fail, None
        if fail is not None:
            self.num_failed += 1
        if fail is not None and fail[0] == "before":
            raise StepFailed("before")
        self.writes_left = fail[1] if fail is not None and fail[0] == "middle" else None
        self._apply(output)
        parts = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            sequence, start = self.sequences[request_id], self.num_computed[request_id]
            if start + num_tokens >= len(sequence.digests):
                raise WrongToken(f"{request_id}: tokens to {start + num_tokens} of {len(sequence.digests) - 1} known")
            parts.append(Part(sequence, start, start + num_tokens))
        self.compute(parts)
        self.writes_left = None
        for part in parts:
            self.num_computed[part.sequence.request_id] = part.end
        if fail is not None:
            raise StepFailed("after")
        self.num_steps += bool(parts)
        tokens, errors = {}, {}
        for request_id in output.sampled_request_ids:
            if request_id in self.errors:
                errors[request_id] = self.errors.pop(request_id)
            else:
                tokens[request_id] = [next_token(self.sequences[request_id].digests[self.num_computed[request_id]])]
        return StepResult(tokens, errors)

    def close(self) -> None:
        self.sequences.clear()

    def _apply(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:
            self.sequences.pop(request_id, None)
        self.memory.zero(output.new_block_ids_to_zero)
        self.memory.copy(output.block_copies)
        self.num_zeroed += len(output.new_block_ids_to_zero)
        self.num_copies += len(output.block_copies)
        for new in output.scheduled_new_requests:
            request_id = new.request_id
            if request_id in self.sequences:
                raise WrongToken(f"{request_id} is new, but there is one")
            items = list(new.prompt_token_ids)
            items = self.text_of.get(request_id, items)[: len(items)]
            start = self.start_of.get(request_id, 0)
            self.sequences[request_id] = KnownSequence(request_id, start, items, new.block_ids)
            self.num_computed[request_id] = new.num_computed_tokens
            self.num_prompt_tokens[request_id] = len(items)
        self._apply_known(output.scheduled_cached_requests)

    def _apply_known(self, cached: CachedRequestData) -> None:
        for request_id, resumed, block_ids, num_computed, num_output, token_ids in zip(
            cached.request_ids,
            cached.resumed,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            cached.new_token_ids,
            strict=True,
        ):
            sequence = self.sequences[request_id]
            if resumed:
                if block_ids is None:
                    raise WrongToken(f"{request_id} is resumed without blocks")
                sequence.replace_tables(block_ids)
                self.num_computed[request_id] = num_computed
            elif block_ids is not None:
                sequence.append_blocks(block_ids)
            if self.num_computed[request_id] != num_computed:
                raise WrongToken(f"{request_id}: {self.num_computed[request_id]} computed here, told {num_computed}")
            num_prompt_tokens = self.num_prompt_tokens[request_id]
            num_known = len(sequence.digests) - 1
            if num_known < num_computed:
                sequence.extend(self.text_of.get(request_id, [])[num_known:num_computed])
            if token_ids:
                sequence.write_at(max(num_computed, num_prompt_tokens), token_ids)
            if num_output < 0 or num_computed > num_prompt_tokens + num_output:
                raise WrongToken(f"{request_id}: {num_computed} computed of {num_prompt_tokens} + {num_output}")
