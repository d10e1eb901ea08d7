"""A worker's step: from the message of a scheduler to the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from kvpool.cache.spec import AttentionSpec, KVCacheConfig, ceil_div
from kvpool.common.arguments import to_int
from kvpool.errors import InvalidArgumentError
from kvpool.scheduler.output import BlockIds, SchedulerOutput, StepResult
from kvpool.worker.attention import create_backend
from kvpool.worker.attention.paged_attention import PagedAttention
from kvpool.worker.executor import ExecutorLimits
from kvpool.worker.memory.paged_kv_cache import PagedKVCache
from kvpool.worker.step.block_table import BlockTableConfig, MultiGroupBlockTable
from kvpool.worker.step.request_states import RequestStates
from kvpool.worker.step.sampler import SamplingBatch, sample
from kvpool.worker.step.staging import Staging
from kvpool.worker.step.step_tensors import StepTensorBuilder, StepTensors

if TYPE_CHECKING:
    from kvpool.worker.models.transformers_model import TransformersModel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RunnerConfig:
    """Limits of a worker; those of its scheduler must not be larger.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of a step.
        max_model_len: tokens of a sequence.
        attention: backend, see ``kvpool.worker.attention``; None for the best that is here.

    Raises:
        TypeError: a limit that is no integer.
        InvalidArgumentError: a limit below 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    attention: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            object.__setattr__(self, name, to_int(name, getattr(self, name), lowest=1))


class ModelRunner:
    """Executes steps: keeps requests, block tables and the paged cache, computes the model and samples.

    Args:
        model: computes tokens, see ``TransformersModel``.
        kv_cache_config: the scheduler's. Its groups are those of ``model.kv_cache_groups``.
        config: limits.

    Attributes:
        kv_cache: the memory of the blocks.
        backend: of attention.
        states: the requests.
        num_computed_tokens: tokens that the model has computed, over all steps.

    Raises:
        InvalidArgumentError: groups that are not the model's, or that one cache can't hold; sequences that are longer
            than the model's.
        CacheMemoryError: there is no memory for so many blocks.

    Not for several threads at once. After a step that failed, the worker is not to be used any further, unless
    ``RequestStates.check`` refused the message.
    """

    def __init__(self, model: TransformersModel, kv_cache_config: KVCacheConfig, config: RunnerConfig) -> None:
        spec = _common_spec(model, kv_cache_config)
        if config.max_model_len > model.max_model_len:
            raise InvalidArgumentError(
                f"sequences of {config.max_model_len} tokens, where the model computes {model.max_model_len}"
            )
        groups = kv_cache_config.kv_cache_groups
        self.model, self.kv_cache_config, self.config = model, kv_cache_config, config
        self.states = RequestStates(config.max_num_seqs, config.max_model_len, model.vocab_size)
        self.num_computed_tokens = 0
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.backend = backend = create_backend(
            config.attention, model.device, len(groups), block_size=spec.block_size, dtype=dtype
        )
        table_config = BlockTableConfig(
            spec.block_size,
            ceil_div(config.max_model_len, spec.block_size),
            num_blocks=kv_cache_config.num_blocks,
        )
        self._tables = MultiGroupBlockTable(
            [table_config] * len(groups), config.max_num_seqs, config.max_num_batched_tokens, model.device
        )
        self._builder = StepTensorBuilder(
            self._tables,
            config.max_num_batched_tokens,
            with_kv_rows=backend.with_kv_rows or model.device.type == "cpu",
            with_compressed=backend.with_compressed,
        )
        self.kv_cache = PagedKVCache(
            kv_cache_config.num_blocks,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
            max(len(group.layer_names) for group in groups),
            dtype,
            model.device,
        )
        self._attention = PagedAttention(self.kv_cache, backend, groups)
        self._input_ids = torch.empty(config.max_num_batched_tokens, dtype=torch.int64, device=model.device)
        self._staged_ids = Staging(torch.int64, model.device)
        self._is_closed = False

    @property
    def limits(self) -> ExecutorLimits:
        """What it has room for."""
        return ExecutorLimits(
            vocab_size=self.model.vocab_size,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            num_blocks=self.kv_cache_config.num_blocks,
        )

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Computes a step.

        Args:
            output: the message of the scheduler; messages come in the order of their steps.

        Returns:
            The next token of each of ``sampled_request_ids``, or an error where its logits are not finite.

        Raises:
            InvalidArgumentError: see ``RequestStates.check``, in which case nothing has changed; a step larger than the
                limits; block ids outside the cache.
        """
        if self._is_closed:
            raise InvalidArgumentError("this model runner has been closed")
        with torch.inference_mode():
            self.states.check(output)
            self._prepare_blocks(output)
            self.states.apply(output)
            if not output.num_scheduled_tokens:
                return StepResult({})
            step = self._builder.build(output, self.states.row_of)
            input_ids = self._pack_input_ids(output, step)
            request_ids, requests, logit_rows = self._sampled(output, step)
            self._attention.start_step(step)
            logits = self.model.forward(input_ids, step.positions, self._attention, logit_rows)
            self.num_computed_tokens += len(input_ids)
            if not request_ids:
                return StepResult({})
            sampled = sample(logits, self._sampling_batch(step, requests))
            tokens = {request_id: [token] for request_id, token in zip(request_ids, sampled.token_ids)}
            errors = {request_ids[place]: reason for place, reason in sampled.errors.items()}
            for request_id in errors:
                del tokens[request_id]
            return StepResult(tokens, errors)

    def _prepare_blocks(self, output: SchedulerOutput) -> None:
        if output.new_block_ids_to_zero:
            self.kv_cache.zero_blocks(output.new_block_ids_to_zero)
        if output.block_copies:
            self.kv_cache.copy_blocks(*map(list, zip(*output.block_copies)))

    def _pack_input_ids(self, output: SchedulerOutput, step: StepTensors) -> torch.Tensor:
        cached, outputs = output.scheduled_cached_requests, self._builder.outputs
        self.states.write_new_tokens(cached, step.host_rows[: len(cached.request_ids)])
        num_tokens = outputs.num_tokens
        staged = self._staged_ids.take(num_tokens)
        self.states.pack(outputs.token_rows[:num_tokens], outputs.positions[:num_tokens], staged.numpy())
        if self.model.device.type == "cpu":
            return staged
        return self._staged_ids.send(staged, self._input_ids[:num_tokens])

    def _sampled(self, output: SchedulerOutput, step: StepTensors) -> tuple[list[str], Array | None, torch.Tensor]:
        """Ids of the requests to sample in the order of the batch, their places in it (None: all of it), and the rows
        of their last tokens on the device."""
        request_ids = output.scheduled_cached_requests.request_ids
        if output.scheduled_new_requests:
            request_ids = request_ids + [new.request_id for new in output.scheduled_new_requests]
        if len(output.sampled_request_ids) == len(request_ids):
            return request_ids, None, step.query_starts[1:].long() - 1
        sampled = set(output.sampled_request_ids)
        places = [place for place, request_id in enumerate(request_ids) if request_id in sampled]
        if len(places) != len(sampled):
            raise InvalidArgumentError(f"step {output.step} samples for requests that it does not compute")
        requests = np.array(places, np.int64)
        rows = torch.from_numpy(step.host_query_starts[requests + 1].astype(np.int64) - 1)
        return [request_ids[place] for place in places], requests, rows.to(self.model.device)

    def _sampling_batch(self, step: StepTensors, requests: Array | None) -> SamplingBatch | None:
        if requests is None:
            return self.states.sampling_batch(step.host_rows, step.host_seq_lens)
        return self.states.sampling_batch(step.host_rows[requests], step.host_seq_lens[requests])

    # ---- what others may ask ----

    def block_ids_of(self, request_id: str) -> BlockIds:
        """A running request's block table as this worker has it, per KV cache group. O(blocks).

        Raises:
            KeyError: the request does not run.
        """
        row = self.states.row_of[request_id]
        return tuple(table.host[row, : table.num_blocks_per_row[row]].tolist() for table in self._tables.block_tables)

    def block_digests(self, output: SchedulerOutput) -> list[int]:
        """For each of ``num_scheduled_tokens`` of the step executed last, in that order, a checksum of the request's
        block tables in all groups as they are here; workers of one scheduler have the same. O(blocks of the requests).
        """
        row_of, digests = self.states.row_of, []
        tables = [(table.host.numpy(), table.num_blocks_per_row) for table in self._tables.block_tables]
        for row in map(row_of.__getitem__, output.num_scheduled_tokens):
            digest = 0
            for block_ids, num_blocks in tables:
                digest = crc32(block_ids[row, : num_blocks[row]].tobytes(), digest)
            digests.append(digest)
        return digests

    def close(self) -> None:
        """Gives back the memory of the cache; safe to call again."""
        if not self._is_closed:
            self._is_closed = True
            del self.kv_cache, self._attention


def _common_spec(model: TransformersModel, kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The spec whose sizes all groups have. InvalidArgumentError if they differ, or are not the model's."""
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if not specs:
        raise InvalidArgumentError("a model runner needs KV cache groups")
    block_size = specs[0].block_size
    wanted = {name: group.kv_cache_spec for group in model.kv_cache_groups(block_size) for name in group.layer_names}
    given = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
    if given.keys() != wanted.keys():
        names = sorted(given.keys() ^ wanted.keys())
        raise InvalidArgumentError(
            f"KV cache groups of {len(given)} layers for a model of {len(wanted)}; {names[0]!r} is only in one of them"
        )
    for name, spec in given.items():
        if not isinstance(spec, AttentionSpec) or _sizes(spec) != _sizes(wanted[name]):
            raise InvalidArgumentError(f"layer {name!r} is cached as {spec}, and computed as {wanted[name]}")
    first = specs[0]
    assert isinstance(first, AttentionSpec)
    return first


def _sizes(spec: object) -> tuple[int, int, int, str] | None:
    if not isinstance(spec, AttentionSpec):
        return None
    return spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype
